"""What the user could have done instead: each alternative is a set of training targets, trained by the same plan.

Every candidate is made from a view of the work: from all rows to be delivered, and without one fold of the trusted
rows after the other to be judged on that fold.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hyperkron import losses
from hyperkron.algorithms import State
from hyperkron.cleaning.config import ALTERNATIVES, OURS
from hyperkron.cleaning.evidence import of_label
from hyperkron.cleaning.method import Outcome
from hyperkron.cleaning.trainer import Interleaved, TrainingTargets, optimizer_for, predict, seeded, updates
from hyperkron.cleaning.work import Work
from hyperkron.hyper import SampleWeights
from hyperkron.hypergradient import sama
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training import Box, fit

DESCRIPTIONS = {
    OURS: "evidence of experts and given labels, plus the trusted rows",
    "noisy": "the training rows as they are, without the trusted ones",
    "trusted": "the trusted rows alone",
    "pooled": "training and trusted rows together, labels as they are",
    "small-loss": "each row weighted by the confidence of a network of all rows in its label",
    "trusted-confidence": "each row weighted by the confidence of a network of the trusted rows in its label",
    "cleanlab": "the rows that cleanlab keeps, given the same out-of-sample predictions, plus the trusted rows",
    "sama": "one free weight per row, learnt by SAMA without curvature, plus the trusted rows",
}

BLIND = ("noisy",)
"""Candidates that look at no trusted row, so that one network serves all views."""

SAMA_STEPS, SAMA_ROWS, SAMA_RATE = 40, 2048, 0.05


def available(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The alternatives that can be trained here, and messages about the others."""
    if "cleanlab" in names and importlib.util.find_spec("cleanlab") is None:
        message = "cleanlab is not installed, so it is left out of the comparison: pip install 'hyperkron[compare]'."
        return [name for name in names if name != "cleanlab"], [message]
    return list(names), []


def targets_for(name: str, work: Work, outcome: Outcome) -> TrainingTargets:
    """What a candidate learns from the rows of a view.

    Args:
        name: of the candidate.
        work: the view; ``work.held_out`` is for nobody's eyes here.
        outcome: of the method on the same view.
    """
    if name not in (OURS, *ALTERNATIVES):
        raise HyperkronError(f"name={name!r} is not a candidate; choose from {', '.join((OURS, *ALTERNATIVES))}.")
    noisy, trusted = work.labelled(work.noisy), work.trusted
    if name == OURS:
        return outcome.targets(work, torch.cat([work.noisy, trusted]))
    rows = {"noisy": noisy, "trusted": trusted}.get(name, torch.cat([noisy, trusted]))
    if name in ("noisy", "trusted", "pooled"):
        return TrainingTargets(rows, work.known(rows))
    if name == "cleanlab":
        rows = torch.cat([noisy[_kept_by_cleanlab(outcome.noisy_expert[noisy], work.given[noisy])], trusted])
        return TrainingTargets(rows, work.known(rows))
    if name == "sama":
        with seeded(work.config.seed, work.device):
            weight = _Sama(work).weights()
    else:
        expert = outcome.noisy_expert if name == "small-loss" else outcome.trusted_expert
        weight = of_label(expert[noisy], work.given[noisy])
    return TrainingTargets(rows, work.known(rows), torch.cat([weight, torch.ones(len(trusted), device=work.device)]))


def fitted(name: str, works: Sequence[Work], outcomes: Sequence[Outcome], stage: str) -> list[nn.Module]:
    """A candidate's networks, one made from each view; anything whose forward gives logits of rows of inputs will do.

    Args:
        name: of the candidate.
        works: the whole alone, or the views that judge.
        outcomes: of the method on each of them.
        stage: what the progress calls it.
    """
    seen = works[:1] if name in BLIND else works
    targets = [targets_for(name, work, outcome) for work, outcome in zip(seen, outcomes, strict=False)]
    plans = [
        outcome.paced(work, work.last) if name == OURS else work.last
        for work, outcome in zip(seen, outcomes, strict=False)
    ]
    found: dict[int, nn.Module] = {}
    for plan in dict.fromkeys(plans):
        mine = [i for i, own in enumerate(plans) if own == plan]
        networks = works[0].fit([targets[i] for i in mine], plan, stage, seeds=[0] * len(mine))
        found.update(zip(mine, networks, strict=True))
    return [found[i % len(seen)] for i in range(len(works))]


def delivered(name: str, work: Work, outcome: Outcome) -> nn.Module:
    """A candidate's network made from all rows, from disk if it was made before."""
    made: list[nn.Module] = []

    def compute() -> dict[str, Tensor]:
        made.extend(fitted(name, [work], [outcome], f"network-{name}"))
        return dict(made[0].state_dict())

    weights = work.stages(f"network-{name}", compute)
    if made:
        return made[0]
    with torch.random.fork_rng(devices=[]):
        network = work.build().to(work.device)
    network.load_state_dict(weights)
    return network.eval()


def judged(name: str, views: Sequence[Work], outcomes: Sequence[Outcome]) -> Tensor:
    """Probabilities (rows, C) of the trusted rows, each from a candidate made without the fold of the row.

    Nothing of it looked at that fold: neither its networks, nor the experts, weights and settings behind its targets.
    """
    first = views[0]

    def compute() -> dict[str, Tensor]:
        found = torch.zeros(len(first.given), first.classes, device=first.device)
        for view, network in zip(views, fitted(name, views, outcomes, f"judge-{name}"), strict=True):
            found[view.held_out] = predict(network, view.inputs, view.held_out)
        return {"asked": found}

    return first.stages(f"judged-{name}", compute)["asked"]


def _kept_by_cleanlab(predicted: Tensor, given: Tensor) -> Tensor:
    """The positions that cleanlab does not flag."""
    from cleanlab.filter import find_label_issues

    labels, probabilities = given.cpu().numpy(), predicted.double().cpu().numpy()
    if len(set(labels.tolist())) < probabilities.shape[1]:  # it needs every class to occur
        return torch.arange(len(given), device=given.device)
    flagged = find_label_issues(labels, probabilities / probabilities.sum(1, keepdims=True), n_jobs=1)
    return torch.as_tensor(~flagged, device=given.device).nonzero()[:, 0]


SAMA_PROBLEM = BilevelProblem(
    lambda net, w, b: losses.cross_entropy(net(*b[0]), b[1], weight=w(b[2])),
    lambda net, w, b: losses.cross_entropy(net(*b[0]), b[1]),
)


class _Sama:
    """The training run that learns the weights of noisy rows."""

    def __init__(self, work: Work) -> None:
        self._work, self._noisy, self._trusted = work, work.noisy, work.trusted
        self._random = torch.Generator(work.device).manual_seed(work.config.seed)
        self._network = work.build().to(work.device).train()
        self._optimizer = optimizer_for([self._network], work.short)
        self._method = sama(self._optimizer)

    def weights(self) -> Tensor:
        """Train, and give the weights."""
        plan, rows = self._work.short, len(self._noisy)
        weights, total = SampleWeights(rows).to(self._work.device), plan.steps(rows)
        every = max(1, total // SAMA_STEPS)
        first = max(every, -(-(total // 5) // every) * every)
        algorithm = Interleaved(total=total, due=range(first, total + 1, every), move=self._move)
        fit(
            SAMA_PROBLEM,
            self._network,
            weights,
            algorithm,
            self._step_batch,
            steps=algorithm.steps,
            inner_optimizer=updates(self._optimizer, total),
            outer_optimizer=torch.optim.Adam(weights.parameters(), lr=SAMA_RATE),
            projection=Box(0, 1),
            seed=None,
        )
        return weights.weight.detach().clone()

    def _step_batch(self) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Noisy rows for a step of θ."""
        self._work.tick("SAMA weights", 1)
        return self._batch(self._work.short.batch_for(len(self._noisy)))

    def _batch(self, count: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        index = self._positions(self._noisy, count)
        rows = self._noisy[index]
        return self._work.inputs.batch(rows), self._work.given[rows], index

    def _positions(self, rows: Tensor, count: int) -> Tensor:
        return torch.randint(len(rows), (count,), generator=self._random, device=rows.device)

    def _move(self, state: State) -> float:
        """One step of the weights."""
        ask = self._trusted[self._positions(self._trusted, min(512, len(self._trusted)))]
        inner_batch = self._batch(min(SAMA_ROWS, len(self._noisy)))
        outer_batch = self._work.inputs.batch(ask), self._work.given[ask]
        found = self._method.compute(SAMA_PROBLEM, self._network, state.hyper, inner_batch, outer_batch)
        state.outer.step(found.grads)
        return found.outer_loss
