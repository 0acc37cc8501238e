"""The bilevel part: two networks, each fitted to the evidence on one half, judged on trusted rows of the other.

    min_λ  Σ_h J_out(λ, θ_h(λ); trusted rows of half h)     subject to
    θ_h(λ) = argmin_θ  −mean_n [ log Σ_k f_θ(k | x_n) e_n(k; κ, β) + γ q_n(y_n) log f_θ(y_n | x_n) ] / (1 + γ)
             over the noisy rows of half h and the trusted rows of the other half

λ = (log κ, log β, log γ) says how much the experts and the given labels count as evidence, and how much a given label
that is believed, with probability q(y), is learnt beside it. The experts' opinions on the noisy rows of half h come
from models that saw neither those rows nor the trusted rows of half h, so J_out is an honest held-out loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron import losses
from hyperkron.algorithms import State
from hyperkron.cleaning.batched_training import Stack, stackable
from hyperkron.cleaning.evidence import Evidence, certain, likelihood, of_label
from hyperkron.cleaning.trainer import (
    Dense,
    Inputs,
    Interleaved,
    NetworkGroup,
    Separate,
    Tick,
    TrainingPlan,
    TrainingTargets,
    descend,
    predict,
    seeded,
)
from hyperkron.cross import Mode
from hyperkron.hypergradient import kfac
from hyperkron.losses import Loss
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError, Status

DAMPING = 1e-2
"""Of KFAC; see `experiments/cleaning/evidence_hypergradient.py` for how its hypergradient compares with retraining."""

OUTER_RATE = 0.08
"""Of Adam on λ: at most about 8 % change per outer step of 30, whatever the hypergradient's scale."""

EXPERT_PENALTY = 0.01
"""Weight of log κ in the outer objective: the experts count only as far as held-out trusted rows ask for it."""

OUTER_STEPS = 30
"""Steps of λ in one training; in a short training one for every 12 inner steps, at least 10."""

HYPERGRADIENT_COST = 6
"""Inner steps that one hypergradient costs, roughly."""

WARM_UP = 0.2
BOUNDS = (1e-2, 1e2)
"""κ, β and γ must stay between these, and β and γ at most 1; leaving them is reported as a collapse."""


@dataclass(frozen=True)
class Half:
    """One of the two problems.

    Attributes:
        noisy, kept, held_out: row numbers: noisy rows to learn from, trusted rows to learn from, trusted rows to judge.
        opinion, given: log p̄ and log T[:, y] of the noisy rows (n, C).
    """

    noisy: Tensor
    kept: Tensor
    held_out: Tensor
    opinion: Tensor
    given: Tensor


@dataclass
class FoldModels:
    """What came out: the networks, λ, and the way there.

    Attributes:
        networks: one for each half.
        evidence: λ, its mean over the last third of the outer steps.
        outer: the held-out loss at every outer step.
        path: κ, β and γ at every outer step.
        collapsed: λ ran into a bound, or a hypergradient was not finite; λ was then put back to where it began.
        troubled: hypergradients whose solve did not end well.
    """

    networks: list[nn.Module]
    evidence: Evidence
    outer: list[float] = field(default_factory=list)
    path: list[dict[str, float]] = field(default_factory=list)
    collapsed: bool = False
    troubled: int = 0


def inner(network: Any, evidence: Any, batch: Any) -> Loss:
    """J_in: likelihood of the evidence and cross-entropy of the believed labels, of noisy and trusted rows together."""
    x, opinion, given, sure, label, belief = batch
    weight, believed = evidence.shares(belief)
    output = network(*x)
    seen = likelihood(output, torch.cat([evidence(opinion, given), sure]), weight)
    return seen + losses.cross_entropy(output, label, weight=believed)


def outer(network: Any, evidence: Any, batch: Any) -> Loss:
    """J_out: cross-entropy on held-out trusted rows, and EXPERT_PENALTY · (log κ + ½ (log β)²)."""
    x, y = batch
    experts, label, _ = evidence.log_scale
    return losses.cross_entropy(network(*x), y) + EXPERT_PENALTY * (experts + 0.5 * label.square())


class Learner:
    """A fold model and its share of the data."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        inputs: Inputs,
        labels: Tensor,
        half: Half,
        plan: TrainingPlan,
        seed: int,
    ) -> None:
        self.inputs, self.labels, self.half = inputs, labels.clamp(min=0), half  # those without a label weigh nothing
        self.device = half.noisy.device
        with seeded(seed, self.device):
            self.network = build().to(self.device).train()
        self.random = torch.Generator(self.device).manual_seed(seed)
        self.size = plan.batch_for(len(half.noisy))
        self.rows = torch.cat([half.noisy, half.kept])
        self.sure = certain(labels[half.kept], half.given.shape[1])
        own = of_label((half.opinion + half.given).softmax(1), labels[half.noisy])
        self.belief = torch.cat([own, torch.ones_like(own[:1]).expand(len(half.kept))])

    def sample_rows(self, size: int) -> Tensor:
        """Positions of noisy rows, and of trusted ones in the proportion in which there are some, at least one."""
        noisy, kept = len(self.half.noisy), len(self.half.kept)
        share = min(max(1, round(size * kept / max(1, noisy))), 4 * size)
        i = torch.randint(noisy, (size,), generator=self.random, device=self.device)
        j = torch.randint(noisy, noisy + kept, (share,), generator=self.random, device=self.device)
        return torch.cat([i, j])

    def batch(self, size: int) -> Any:
        """This many noisy rows, and trusted ones, as the inner objective takes them."""
        at = self.sample_rows(size)
        i, j = at[:size], at[size:] - len(self.half.noisy)
        told = self.labels[self.rows[at]], self.belief[at]
        return self.inputs.batch(self.rows[at]), self.half.opinion[i], self.half.given[i], self.sure[j], *told

    @torch.no_grad()
    def targets(self, evidence: Evidence) -> TrainingTargets:
        """All rows with their evidence at the present λ."""
        weight, believed = evidence.shares(self.belief)
        told = torch.cat([evidence(self.half.opinion, self.half.given), self.sure])
        return TrainingTargets(self.rows, told, weight, (self.labels[self.rows], believed))

    def batches(self) -> Iterator[Tensor]:
        """Positions for one inner step after the other."""
        while True:
            yield self.sample_rows(self.size)

    def trusted(self) -> Any:
        """The held-out trusted rows, at most 512 of them drawn afresh."""
        rows = self.half.held_out
        if len(rows) > 512:
            rows = rows[torch.randint(len(rows), (512,), generator=self.random, device=self.device)]
        return self.inputs.batch(rows), self.labels[rows]


def learn_evidence(
    build: Callable[[], nn.Module],
    inputs: Inputs,
    labels: Tensor,
    halves: list[Half],
    plan: TrainingPlan,
    *,
    seed: int,
    learn: bool = True,
    tick: Tick | None = None,
) -> FoldModels:
    """Train both fold models and, between their steps, λ by KFAC hypergradients on the held-out trusted rows.

    Args:
        build: makes a fresh network.
        inputs: of all rows.
        labels: of all rows; those of trusted rows are right.
        halves: the two problems.
        plan: of one fold model's training.
        seed: of initialisation and batches.
        learn: False keeps λ where it begins.
        tick: called after every inner step, and after every outer step with what it cost in inner ones.
    """
    if any(len(half.held_out) == 0 or len(half.kept) == 0 for half in halves):
        raise HyperkronError("each half needs at least one trusted row; give at least two trusted rows.")
    total = steps_of(plan, halves)
    learners = [Learner(build, inputs, labels, half, plan, seed + h) for h, half in enumerate(halves)]
    networks = [learner.network for learner in learners]
    found = FoldModels(networks, Evidence().to(learners[0].device))
    stacked = stackable(networks, inputs)
    group = Stack(networks, inputs) if stacked else Separate(networks, inputs)
    moving = _Moving(found, learners, group, "reverse" if stacked else "auto", tick)
    rate = OUTER_RATE * OUTER_STEPS / moves(total)
    with seeded(seed, learners[0].device):  # for dropout
        descend(
            group,
            [learner.batches() for learner in learners],
            plan,
            total,
            tick,
            found.evidence,
            Interleaved(total=total, due=outer_steps(total) if learn else range(0), move=moving.step),
            outer_optimizer=torch.optim.Adam(found.evidence.parameters(), lr=rate, betas=(0.8, 0.95)),
            projection=at_most_one_observation,
        )
    moving.finish()
    return found


def steps_of(plan: TrainingPlan, halves: list[Half]) -> int:
    """Inner steps of each fold model."""
    return max(plan.steps(len(half.noisy)) for half in halves)


def moves(total: int) -> int:
    """Into how many parts the moves of λ divide this many inner steps; where these are fewer, the rate is higher."""
    return min(OUTER_STEPS, max(OUTER_STEPS // 3, total // 12))


def outer_steps(total: int) -> range:
    """After which inner steps λ moves: every so often, after a warm-up."""
    every = max(1, total // moves(total))
    return range(math.ceil(WARM_UP * total / every) * every, total + 1, every)


def _replayable(learner: Learner) -> bool:
    """Whether a GPU can replay its hypergradients: batches of one shape, and no dropout."""
    drops = any(isinstance(module, nn.modules.dropout._DropoutNd) for module in learner.network.modules())
    return isinstance(learner.inputs, Dense) and not drops


def at_most_one_observation(log_scale: Tensor) -> Tensor:
    """The projection of λ: a label is no more than one observation, β ≤ 1 and γ ≤ 1."""
    return torch.cat([log_scale[:1], log_scale[1:].clamp(max=0.0)])


class _Moving:
    """λ on its way: the summed hypergradients of both fold models, with collapse detected."""

    def __init__(
        self, models: FoldModels, learners: list[Learner], group: NetworkGroup, cross: Mode, tick: Tick | None
    ) -> None:
        self._models, self._learners, self._group, self._tick = models, learners, group, tick
        self._problem = BilevelProblem(inner, outer)
        graph = _replayable(learners[0])
        self._methods = [kfac(DAMPING, cross=cross, seed=h, graph=graph) for h in range(len(learners))]
        self._begin = models.evidence.log_scale.detach().clone()
        self._set_targets()

    def _set_targets(self) -> None:
        self._group.set_targets([learner.targets(self._models.evidence) for learner in self._learners])

    def step(self, state: State) -> float | None:
        """One outer step, unless λ has collapsed."""
        models, evidence, loss = self._models, self._models.evidence, 0.0
        if models.collapsed:
            return None
        evidence.zero_grad()
        for method, learner in zip(self._methods, self._learners, strict=True):
            result = method.backward(
                self._problem, learner.network, evidence, learner.batch(2 * learner.size), learner.trusted()
            )
            loss += result.outer_loss / len(self._learners)
            if not result.status.ok and result.status is not Status.MORE_DAMPING:
                models.troubled += 1
        gradient = evidence.log_scale.grad
        models.collapsed = gradient is None or not bool(torch.isfinite(gradient).all())
        if gradient is not None and not models.collapsed:
            models.outer.append(loss)
            models.path.append(evidence.values())
            state.outer.step({"log_scale": gradient})
            models.collapsed = not bool(((evidence.log_scale > _LOW) & (evidence.log_scale < _HIGH)).all())
        if models.collapsed:
            evidence.log_scale.data.copy_(self._begin)
        evidence.zero_grad()
        self._set_targets()
        if self._tick is not None:
            self._tick(HYPERGRADIENT_COST * len(self._learners))
        return None if models.collapsed else loss

    def finish(self) -> None:
        """The mean of λ over the last third of the outer steps, in which the fold models had nearly converged."""
        path = self._models.path
        if self._models.collapsed or not path:
            return
        last = path[-max(1, len(path) // 3) :]
        mean = [[p[name] for p in last] for name in Evidence.NAMES]
        logs = torch.tensor(mean, dtype=torch.float64).log().mean(1)
        self._models.evidence.log_scale.data.copy_(logs)


_LOW, _HIGH = (float(torch.tensor(b, dtype=torch.float64).log()) for b in BOUNDS)


def held_out(models: FoldModels, inputs: Inputs, halves: list[Half], rows: int, classes: int) -> Tensor:
    """Probabilities (rows, C) where each row is predicted by the fold model that did not train on it."""
    found = torch.zeros(rows, classes, device=halves[0].noisy.device)
    for h, network in enumerate(models.networks):
        for part in (halves[h].held_out, *(other.noisy for o, other in enumerate(halves) if o != h)):
            found[part] = predict(network, inputs, part)
    return found
