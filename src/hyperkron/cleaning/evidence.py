"""What is known about the true class of a row: experts, the noise matrix, and the likelihood that joins them.

For a row with input x, given label y and true class k,

    log e(k) = κ · log p̄(k | x) + β · log T[k, y] ,      p̄ ∝ e^{b_k} Π_j p_j^{a_j} ,      T[k, y] = P(given y | true k)

where the p_j are experts: models whose training never saw the row. The classes may be more or less frequent among the
noisy rows than among the trusted ones, to which a and b are fitted; ``label_noise.py`` carries p̄ over and finds T. A
network f is then fitted to the likelihood −log Σ_k f(k | x) e(k): with κ = 0 this is training through the noise matrix
(forward correction), with a large κ it is training on the experts' opinion, and with e a single class it is
cross-entropy. κ and β are hyperparameters.

References:
    Patrini et al., 2017, "Making deep neural networks robust to label noise: a loss correction approach".
    Hendrycks et al., 2018, "Using trusted data to train deep networks on labels corrupted by severe noise".
    Alexandari, Kundaje & Shrikumar, 2020, "Maximum likelihood with bias-corrected calibration is hard-to-beat at label
        shift adaptation".
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron import losses
from hyperkron.losses import Loss

MIN_PROBABILITY = 1e-4
"""Added to every probability of an expert: one overconfident network must not decide a product of opinions."""

FOLDS = 3
BIAS_RIDGES = (0.05, 0.005)
NO_BIAS_RIDGE = 1e6
"""Pulls on the offsets of the pool, of which cross-validation picks one; the last leaves nothing of them."""

POOL_PRIOR, POOL_SUM = 9.0, 1.3
"""Nats that a pool pays for the squared distance of its exponents from equal ones, and the sum of those."""

NEWTON_STEPS = 50

RULED_OUT = -16.0
"""Log-evidence of the classes that a trusted label rules out."""


def logs(p: Tensor) -> Tensor:
    """Log-probabilities that stay away from −∞."""
    return (p + MIN_PROBABILITY).log()


def with_unseen(told: Tensor, other: Tensor, labels: Tensor) -> Tensor:
    """What a model says (rows, C) that was trained on ``labels``; classes it never saw are told by another model.

    Without this it would rule them out, and every row with such a label would look wrong.

    Example:
        >>> with_unseen(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.1, 0.1, 0.8]]), torch.tensor([0, 1]))
        tensor([[0.1000, 0.1000, 0.8000]])
    """
    seen = torch.bincount(labels, minlength=told.shape[1]) > 0
    if bool(seen.all()):
        return told
    unseen, known = other * ~seen, told * seen
    return unseen + (1 - unseen.sum(1, keepdim=True)) * known / known.sum(1, keepdim=True).clamp(min=MIN_PROBABILITY)


def certain(labels: Tensor, classes: int) -> Tensor:
    """The log-evidence of labels that are right: 0 for the class, very low for the others; 0 for −1, no label."""
    return (1 - F.one_hot(labels.clamp(min=0), classes).float()) * RULED_OUT * (labels >= 0)[:, None]


def likelihood(output: Tensor, evidence: Tensor, weight: Tensor | None = None) -> Loss:
    """The mean of −log Σ_k f(k) e(k), as a loss that knows its curvature.

    Written as the cross-entropy of two outcomes, "the evidence was seen" with probability s = Σ_k f(k) e(k) and its
    contrary, so that the Gauss–Newton matrix is the information that the evidence carries about θ. The matrix of the
    soft-target cross-entropy with the same gradient is larger by what the missing true labels would have told, and
    hypergradients through it can have the wrong sign.

    Args:
        output: logits of f (N, C).
        evidence: log e (N, C), any scale: each row is shifted to a maximum of 0.
        weight: of the rows.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0, 0.0]])
        >>> torch.allclose(likelihood(logits, certain(torch.tensor([0]), 3)).value,
        ...                F.cross_entropy(logits, torch.tensor([0])), atol=1e-5)
        True
    """
    top = evidence.max(dim=1, keepdim=True).values.detach()
    seen = torch.logsumexp(output.log_softmax(1) + evidence - top, dim=1).clamp(max=-1e-6)
    pair = torch.stack([seen, torch.log(-torch.expm1(seen))], dim=1)
    return losses.cross_entropy(pair, torch.zeros(len(seen), dtype=torch.long, device=seen.device), weight=weight)


@dataclass(frozen=True)
class Pool:
    """How the experts' opinions are joined.

    Attributes:
        exponents: a (J,), not negative.
        offsets: b (C,), the experts' common bias for or against a class, taken away.
    """

    exponents: Tensor
    offsets: Tensor

    def __call__(self, experts: Tensor) -> Tensor:
        """log p̄ (N, C) of log-probabilities (J, N, C)."""
        joined = torch.einsum("j,jnc->nc", self.exponents.to(experts), experts)
        return (joined + self.offsets.to(experts)).log_softmax(1)


def stack(experts: Tensor, labels: Tensor) -> Pool:
    """The pool that agrees best with known labels.

        min_{a ≥ 0, b}  mean_m CE(Σ_j a_j log p_j(x_m) + b, y_m) + POOL_PRIOR/M · Σ_j (a_j − POOL_SUM/J)² + r · ‖b‖²

    r is the one of BIAS_RIDGES, or so large that b = 0, whose pool is best on rows it was not fitted to (three folds).

    Args:
        experts: log-probabilities (J, M, C) of rows that the experts did not train on.
        labels: the true classes (M,).

    References:
        Wolpert, 1992, "Stacked generalization"; Genest & Zidek, 1986, on logarithmic opinion pools.
    """
    experts, labels = experts.detach().double().cpu(), labels.cpu()
    fold = F.one_hot(labels).cumsum(0).gather(1, labels[:, None])[:, 0] % FOLDS  # of each class as many in each
    seen = torch.cat([fold != torch.arange(FOLDS)[:, None], torch.ones(1, len(labels), dtype=torch.bool)])
    found = []
    for bias_ridge in (NO_BIAS_RIDGE, *BIAS_RIDGES):
        a, b = _fitted(experts, labels, seen, POOL_PRIOR / len(labels), bias_ridge)
        told = _logits(experts, a, b).log_softmax(2)[:, torch.arange(len(labels)), labels]
        known = torch.bincount(labels, minlength=b.shape[1]) > 0  # of other classes nothing is known
        found.append((float((told * ~seen).sum()), Pool(a[-1].float(), (b[-1] * known).float())))  # it saw all rows
    return max(found, key=lambda pair: pair[0])[1]


def _logits(experts: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Σ_j a_kj log p_j + b_k for K pools (K, M, C)."""
    return torch.einsum("kj,jmc->kmc", a, experts) + b[:, None]


def _fitted(experts: Tensor, labels: Tensor, seen: Tensor, ridge: float, bias_ridge: float) -> tuple[Tensor, Tensor]:
    """The minimisers (K, J) and (K, C) of K such problems at once, each over the rows that it has ``seen`` (K, M).

    By Newton's method on (a, b); exponents that would leave a ≥ 0 are held at 0 while the objective asks for less.
    """
    count, classes = len(experts), experts.shape[2]
    share = (seen / seen.sum(1, keepdim=True).clamp(min=1))[..., None]
    target = F.one_hot(labels, classes).to(experts)
    middle = torch.cat([torch.full((count,), POOL_SUM / count), torch.zeros(classes)]).to(experts)
    pull = torch.cat([torch.full((count,), ridge), torch.full((classes,), bias_ridge)]).to(experts)
    lowest = torch.cat([torch.zeros(count), torch.full((classes,), -math.inf)]).to(experts)

    def loss(w: Tensor) -> Tensor:
        told = _logits(experts, w[:, :count], w[:, count:]).log_softmax(2) * target
        return -(share * told).sum((1, 2)) + (pull * (w - middle).square()).sum(1)

    w = middle.repeat(len(seen), 1)
    for _ in range(NEWTON_STEPS):
        p = _logits(experts, w[:, :count], w[:, count:]).softmax(2)
        off = share * (p - target)
        gradient = torch.cat([torch.einsum("kmc,jmc->kj", off, experts), off.sum(1)], 1) + 2 * pull * (w - middle)
        held = (w <= lowest) & (gradient > 0)
        gradient = gradient.masked_fill(held, 0)
        hessian = (_curvature(experts, p, share) + torch.diag(2 * pull)).masked_fill(
            held[:, :, None] | held[:, None, :], 0
        )
        step = torch.linalg.solve(hessian + torch.diag_embed(held.to(experts)), gradient)
        worth = (step * gradient).sum(1) > 1e-12  # twice what is left to gain, were it quadratic
        if not bool(worth.any()):
            break
        w = _descend(loss, w, step, lowest, worth)
    return w[:, :count], w[:, count:]


def _curvature(experts: Tensor, p: Tensor, share: Tensor) -> Tensor:
    """The Hessian (K, J + C, J + C) of the mean cross-entropy by (a, b): the covariance of the slopes of the logits."""
    count, weighed = len(experts), share * p
    mean = torch.einsum("kmc,jmc->kmj", p, experts)
    pairs = (experts[:, None] * experts[None]).flatten(0, 1).flatten(1)
    of_a = (weighed.flatten(1) @ pairs.T).view(-1, count, count) - (share * mean).mT @ mean
    both = torch.einsum("kmc,jmc->kjc", weighed, experts) - mean.mT @ weighed
    of_b = torch.diag_embed(weighed.sum(1)) - weighed.mT @ p
    return torch.cat([torch.cat([of_a, both], 2), torch.cat([both.mT, of_b], 2)], 1)


def _descend(loss: Callable[[Tensor], Tensor], w: Tensor, step: Tensor, lowest: Tensor, left: Tensor) -> Tensor:
    """The first of w − step, w − ½ step, … that lowers the loss, for each problem that is ``left`` by itself."""
    before, after = loss(w), w
    for halving in range(10):
        trial = torch.maximum(w - 0.5**halving * step, lowest)
        good = left & (loss(trial) < before)
        after, left = torch.where(good[:, None], trial, after), left & ~good
        if not bool(left.any()):
            break
    return after


def frequencies(labels: Tensor, classes: int) -> Tensor:
    """How frequent each class is among labels, with one more row for each."""
    count = torch.bincount(labels, minlength=classes).float() + 1
    return count / count.sum()


def noise_matrix_from_trusted(predicted: Tensor, labels: Tensor, classes: int, strength: float = 2.0) -> Tensor:
    """T from a model of the *given* labels: its mean prediction over the trusted rows of each class.

    Shrunk, by ``strength`` rows, to a matrix with one and the same error rate for all classes.
    """
    sums = torch.zeros(classes, classes, device=predicted.device).index_add_(0, labels, predicted)
    count = torch.bincount(labels, minlength=classes).to(sums)
    present = count > 0
    kept = float((sums.diagonal() / count.clamp(min=1))[present].mean()) if bool(present.any()) else 0.5
    prior = torch.full_like(sums, (1 - kept) / max(classes - 1, 1)).fill_diagonal_(kept)
    return (sums + strength * prior) / (count + strength)[:, None]


def of_label(probabilities: Tensor, labels: Tensor) -> Tensor:
    """The probability (N,) that (N, C) gives to each row's label; 0 where that is −1."""
    return probabilities.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)


def overconfidence(probabilities: Tensor, labels: Tensor) -> float:
    """By how much the cross-entropy of rows exceeds the entropy of what is predicted for them.

        mean_n [ −log p_n(y_n) + Σ_k p_n(k) log p_n(k) ]  =  d/dτ  mean_n CE(p_n^τ / Σ_k p_n(k)^τ, y_n)   at τ = 1

    Negative where sharper predictions would be better: the network is less sure than it is right, as after a training
    that was too gentle. Positive where it is surer than it is right, as after one that fitted noise.

    ``probabilities`` (M, C) are of rows that were not trained on, and ``labels`` (M,) their true classes.

    References:
        Guo et al., 2017, "On calibration of modern neural networks" (1/τ is their temperature).

    Example:
        >>> p = torch.tensor([[0.8, 0.2]] * 10)
        >>> nine, seven = (torch.arange(10) >= n for n in (9, 7))  # nine or seven of ten are of the first class
        >>> overconfidence(p, nine.long()) < 0 < overconfidence(p, seven.long())
        True
    """
    p = probabilities.double()
    entropy = -torch.special.xlogy(p, p).sum(1)
    told = of_label(p, labels).clamp(min=torch.finfo(torch.float32).tiny).log()
    return float((-told - entropy).mean())


def label_evidence(matrix: Tensor, given: Tensor) -> Tensor:
    """log T[:, y_n] for every row (N, C); 0 for rows without a label, −1."""
    return (matrix + 1e-6).log()[:, given.clamp(min=0)].T * (given >= 0)[:, None]
