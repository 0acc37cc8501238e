"""What the user could have done instead: each alternative is a set of training targets, trained by the same plan.

Every one can be asked for the whole data or for one half of the noisy rows with the trusted rows of the other half;
the second form is how all candidates are judged, on trusted rows that neither their network nor their weights saw.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

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
    OURS: "evidence of experts and given labels, weighted by KFAC hypergradients, plus the trusted rows",
    "noisy": "the training rows as they are, without the trusted ones",
    "trusted": "the trusted rows alone",
    "pooled": "training and trusted rows together, labels as they are",
    "small-loss": "each row weighted by the confidence of a network of all rows in its label",
    "trusted-confidence": "each row weighted by the confidence of a network of the trusted rows in its label",
    "cleanlab": "the rows that cleanlab keeps, given the same out-of-sample predictions, plus the trusted rows",
    "sama": "one free weight per row, learnt by SAMA without curvature, plus the trusted rows",
}

SAMA_STEPS, SAMA_ROWS, SAMA_RATE = 40, 2048, 0.05


def available(names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """The alternatives that can be trained here, and messages about the others."""
    if "cleanlab" in names and importlib.util.find_spec("cleanlab") is None:
        message = "cleanlab is not installed, so it is left out of the comparison: pip install 'hyperkron[compare]'."
        return [name for name in names if name != "cleanlab"], [message]
    return list(names), []


def targets_for(name: str, work: Work, outcome: Outcome, half: int | None = None) -> TrainingTargets:
    """What a candidate learns from: everything, or one half of the noisy rows and the other half's trusted rows."""
    if name not in (OURS, *ALTERNATIVES):
        raise HyperkronError(f"name={name!r} is not a candidate; choose from {', '.join((OURS, *ALTERNATIVES))}.")
    noisy = work.noisy if half is None else work.side(half, work.noisy)
    trusted = work.trusted if half is None else work.side(1 - half, work.trusted)
    if name == OURS:
        return outcome.targets(work, torch.cat([noisy, trusted]), half)
    noisy = work.labelled(noisy)
    rows = {"noisy": noisy, "trusted": trusted}.get(name, torch.cat([noisy, trusted]))
    if name in ("noisy", "trusted", "pooled"):
        return TrainingTargets(rows, work.known(rows))
    if name == "cleanlab":
        rows = torch.cat([noisy[_kept_by_cleanlab(outcome.pooled_expert[noisy], work.given[noisy])], trusted])
        return TrainingTargets(rows, work.known(rows))
    if name == "sama":
        weight = _sama_weights(work, noisy, trusted, half)
    else:
        alone = outcome.trusted_expert if half is None else outcome.halved
        expert = outcome.pooled_expert if name == "small-loss" else alone
        weight = of_label(expert[noisy], work.given[noisy])
    return TrainingTargets(rows, work.known(rows), torch.cat([weight, torch.ones(len(trusted), device=work.device)]))


def judged(name: str, work: Work, outcome: Outcome) -> Tensor:
    """Probabilities of all trusted rows (M, C), each from networks that did not see the row or its half's labels."""
    ready = {"trusted": outcome.trusted_expert, "pooled": outcome.pooled_expert}
    if name in ready:
        return ready[name][work.trusted]

    def compute() -> dict[str, Tensor]:
        found = torch.zeros(len(work.given), work.classes, device=work.device)
        targets = [targets_for(name, work, outcome, half) for half in (0, 1)]
        plan = outcome.paced(work, work.short) if name == OURS else work.short
        for half, network in enumerate(work.fit(targets, plan, f"judge-{name}", seeds=[21, 22])):
            ask = work.side(half, work.trusted)
            found[ask] = predict(network, work.inputs, ask)
        return {"asked": found[work.trusted]}

    return work.stages(f"judged-{name}", compute)["asked"]


def _kept_by_cleanlab(predicted: Tensor, given: Tensor) -> Tensor:
    """The positions that cleanlab does not flag."""
    from cleanlab.filter import find_label_issues

    labels, probabilities = given.cpu().numpy(), predicted.double().cpu().numpy()
    if len(set(labels.tolist())) < probabilities.shape[1]:  # it needs every class to occur
        return torch.arange(len(given), device=given.device)
    flagged = find_label_issues(labels, probabilities / probabilities.sum(1, keepdims=True), n_jobs=1)
    return torch.as_tensor(~flagged, device=given.device).nonzero()[:, 0]


def _sama_weights(work: Work, noisy: Tensor, trusted: Tensor, half: int | None) -> Tensor:
    """One weight in [0, 1] for each noisy row, learnt by SAMA along one training run."""

    def compute() -> dict[str, Tensor]:
        with seeded(work.config.seed, work.device):
            return {"weight": _Sama(work, noisy, trusted).weights()}

    return work.stages(f"sama-weights-{'all' if half is None else half}", compute)["weight"]


SAMA_PROBLEM = BilevelProblem(
    lambda net, w, b: losses.cross_entropy(net(*b[0]), b[1], weight=w(b[2])),
    lambda net, w, b: losses.cross_entropy(net(*b[0]), b[1]),
)


class _Sama:
    """The training run that learns the weights of noisy rows."""

    def __init__(self, work: Work, noisy: Tensor, trusted: Tensor) -> None:
        self._work, self._noisy, self._trusted = work, noisy, trusted
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
