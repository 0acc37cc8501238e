"""What the user could have done instead: each alternative is a set of training targets, trained by the same plan.

Every candidate is made from a view of the work: from all rows to be delivered, and without one fold of the trusted
rows after the other to be judged on that fold.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from hyperkron import losses
from hyperkron.algorithms import Algorithm, BatchSources, State, StepReport, derivatives
from hyperkron.cleaning.config import ALTERNATIVES, BOOSTED, ESTIMATORS, FOREST, NETWORK, OURS
from hyperkron.cleaning.evidence import label_evidence, noise_matrix_from_trusted, of_label
from hyperkron.cleaning.filters import confident, neighbour_votes
from hyperkron.cleaning.learners import chosen_learner, grow
from hyperkron.cleaning.method import Outcome, certainty
from hyperkron.cleaning.models import trees
from hyperkron.cleaning.own import fit_estimator
from hyperkron.cleaning.trainer import TrainingTargets, optimizer_for, seeded, updates
from hyperkron.cleaning.work import Work
from hyperkron.hyper import SampleWeights
from hyperkron.hypergradient import sama
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training import Box, fit

BLIND = ("noisy",)
"""Candidates that look at no trusted row, so that one network serves all views."""

TREES = {"forest": FOREST, "boosted": BOOSTED}
"""Candidates that are trees, for tables, and of which kind."""
GOLD_SHARE = 0.25
"""Of gold loss correction: the trusted rows together count at least this part of the noisy ones."""
SAMA_STEPS, SAMA_ROWS, SAMA_RATE = 40, 2048, 0.05


def available(
    names: tuple[str, ...], *, table: bool = True, vectors: bool = True, estimator: bool = False
) -> tuple[list[str], list[str]]:
    """The alternatives that can be trained here, and messages about the others.

    ``table`` and ``vectors`` say what the inputs are, ``estimator`` whether the user has brought one.
    """
    messages, out = [], [*(() if table else TREES), *(() if vectors else ("neighbours",))]
    if names != ALTERNATIVES:  # somebody asked for them
        messages += [
            f"'{name}' is left out of the comparison: it is not for inputs of this kind."
            for name in names
            if name in out
        ]
    if "cleanlab" in names and importlib.util.find_spec("cleanlab") is None:
        messages.append(
            "cleanlab is not installed, so it is left out of the comparison: pip install 'hyperkron[compare]'."
        )
        out.append("cleanlab")
    if table and not trees.installed():
        messages.append(trees.MISSING)
        out += TREES
    return [*(name for name in names if name not in out), *(ESTIMATORS if estimator else ())], messages


def targets_for(name: str, work: Work, outcome: Outcome) -> TrainingTargets:
    """What a candidate learns from the rows of a view; ``work.held_out`` is for nobody's eyes here."""
    if name not in (OURS, *ALTERNATIVES) or name in TREES:
        raise HyperkronError(
            f"name={name!r} is not a candidate with a network; choose from {', '.join((OURS, *ALTERNATIVES))}."
        )
    noisy, trusted = work.labelled(work.noisy), work.trusted
    if name == OURS:
        return outcome.targets(work, work.every)
    rows = {"noisy": noisy, "trusted": trusted}.get(name, torch.cat([noisy, trusted]))
    if name in ("noisy", "trusted", "pooled"):
        return work.as_given(rows)
    if name in ("cleanlab", "neighbours"):
        return work.as_given(_kept(name, work, outcome))
    if name == "gold-loss":
        return _gold_loss(work, outcome)
    if name == "sama":
        with seeded(work.config.seed, work.device):
            weight = _Sama(work).weights()
    else:
        expert = outcome.experts["noisy" if name == "small-loss" else "trusted"]
        weight = of_label(expert[noisy], work.given[noisy])
    return work.as_given(rows, torch.cat([weight, torch.ones(len(trusted), device=work.device)]))


def _kept(name: str, work: Work, outcome: Outcome) -> Tensor:
    """The noisy rows that a filter keeps, and the trusted ones."""
    noisy = work.labelled(work.noisy)
    given = work.given[noisy]
    if name == "cleanlab":
        kept = _kept_by_cleanlab(outcome.experts["noisy"][noisy], given)
    elif name == "neighbours":
        votes = neighbour_votes(work.vectors(noisy), given, work.classes, seed=work.config.seed)
        kept = (votes.argmax(1) == given).nonzero()[:, 0]
    else:
        kept = confident(outcome.experts["forest"][noisy], given)
    return torch.cat([noisy[kept], work.trusted])


def fitted(name: str, works: Sequence[Work], outcomes: Sequence[Outcome], stage: str) -> list[nn.Module]:
    """A candidate's models, one made from each view; ``stage`` is what the progress calls it.

    Anything whose forward gives logits of rows of inputs will do.
    """
    views = list(zip(works, outcomes, strict=True))
    if name in (*TREES, *ESTIMATORS):
        return [_without_network(name, work, outcome, stage) for work, outcome in views]
    found: dict[int, nn.Module] = {}
    for i, (work, outcome) in enumerate(views):
        if name == OURS and (kind := chosen_learner(work, outcome)) != NETWORK:
            found[i] = grow(kind, work, work.every, outcome.final.posterior)
    seen = [i for i in range(len(views)) if i not in found][: 1 if name in BLIND else None]
    plans = {i: views[i][1].paced(works[i], works[i].last) if name == OURS else works[i].last for i in seen}
    for plan in dict.fromkeys(plans.values()):
        mine = [i for i in seen if plans[i] == plan]
        targets = [targets_for(name, *views[i]) for i in mine]
        networks = works[0].fit(targets, plan, stage, seeds=[works[i].shift for i in mine])
        found.update(zip(mine, networks, strict=True))
    return [found[i] if i in found else found[seen[0]] for i in range(len(views))]


def _without_network(name: str, work: Work, outcome: Outcome, stage: str) -> nn.Module:
    """Trees, or the user's estimator, made from a view."""
    if name in ESTIMATORS:
        work.tick(stage, 0)
        cleaned, q = name == "estimator-cleaned", outcome.final.posterior
        rows = torch.cat([work.noisy if cleaned else work.labelled(work.noisy), work.trusted])
        labels, weight = work.given[rows], torch.ones(len(rows), device=work.device)
        if cleaned:
            labels = torch.cat([q.argmax(1), work.given[work.trusted]])
            weight[: len(q)] = certainty(q, work.given[work.noisy])
        return fit_estimator(work.estimator, work.vectors(rows), labels, weight, work.classes).eval()
    rows = _kept(name, work, outcome)
    work.fitting(stage, TREES[name], len(rows))
    if name == "boosted":
        return trees.boosted(work.vectors(rows), work.given[rows], work.classes, seed=work.config.seed).eval()
    labels = one_hot(work.given[rows], work.classes).float()
    return trees.forest(work.vectors(rows), labels, seed=work.config.seed)[0].eval()


def _gold_loss(work: Work, outcome: Outcome) -> TrainingTargets:
    """Gold loss correction: noisy rows through T, trusted rows as they are and up-weighted.

        T[k, :] = mean of p(given | x_m) over the trusted rows of class k ,      p from a network of the noisy rows

    References:
        Hendrycks et al., 2018, "Using trusted data to train deep networks on labels corrupted by severe noise".
    """
    noisy, trusted, sure = work.labelled(work.noisy), work.trusted, work.given[work.trusted]
    matrix = noise_matrix_from_trusted(outcome.experts["noisy"][trusted], sure, work.classes, strength=1e-6)
    evidence = torch.cat([label_evidence(matrix, work.given[noisy]), work.known(trusted)])
    gold = max(1.0, GOLD_SHARE * len(noisy) / len(trusted))
    weight = torch.cat([torch.ones(len(noisy)), torch.full((len(trusted),), gold)]).to(work.device)
    return TrainingTargets(torch.cat([noisy, trusted]), evidence, weight / weight.mean())


def delivered(name: str, work: Work, outcome: Outcome) -> nn.Module:
    """A candidate's network made from all rows, from disk if it was made before."""
    made: list[nn.Module] = []

    def compute() -> dict[str, Tensor]:
        made.extend(fitted(name, [work], [outcome], f"training {name}"))
        return dict(made[0].state_dict())

    weights = work.stages(f"network-{name}", compute)
    if made:
        return made[0]
    with torch.random.fork_rng(devices=[]):
        return trees.rebuilt(work.build, weights).to(work.device).eval()


def judged(name: str, views: Sequence[Work], outcomes: Sequence[Outcome]) -> Tensor:
    """Probabilities (rows, C) of the trusted rows, each from a candidate made without the fold of the row.

    Nothing of it looked at that fold: neither its networks, nor the experts, weights and settings behind its targets.
    """
    first = views[0]

    def compute() -> dict[str, Tensor]:
        models = fitted(name, views, outcomes, f"judging {name}")
        return {"asked": first.answers(models, [view.held_out for view in views])}

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


@dataclass(frozen=True)
class Interleaved(Algorithm):
    """``total`` steps of θ, with a step of λ after those that are ``due``: ``move``, which gives J_out before it."""

    total: int = 1
    due: range = range(0)
    move: Callable[[State], float | None] = lambda state: None

    warns_of_decay: ClassVar[bool] = False

    @property
    def steps(self) -> int:
        """Steps of the algorithm."""
        return len(self.due) + (self.total not in self.due)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        """The steps of θ up to the next one of λ, and that one."""
        ends, here = [0, *self.due, self.total], state.step
        derivatives.descend(state, batches, ends[here + 1] - ends[here])
        return state.finish(self.move(state) if here < len(self.due) else None, {})


class _Sama:
    """The training run that learns the weights of noisy rows; private, because ``fit`` describes all it can see."""

    def __init__(self, work: Work) -> None:
        self._work, self._noisy, self._trusted = work, work.labelled(work.noisy), work.trusted
        self._random = torch.Generator(work.device).manual_seed(work.config.seed)
        self._network = work.build().to(work.device).train()
        self._optimizer = optimizer_for(self._network, work.short)
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
