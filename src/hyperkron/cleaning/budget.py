"""How many steps a run takes, and what to leave out so that it ends in time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import one_hot

from hyperkron.cleaning.alternatives import BLIND, TREES
from hyperkron.cleaning.config import ALTERNATIVES, BOOSTED, ESTIMATORS, FOREST, OURS
from hyperkron.cleaning.method import PRESETS
from hyperkron.cleaning.models import trees
from hyperkron.cleaning.trainer import TrainingPlan, train
from hyperkron.cleaning.work import Work

MEASURED_ROWS = 2000
"""Rows of the trees whose time is measured, at most."""
MEASURED_PART = 10
"""One tenth of the trees of a forest, or of the rounds of boosting, is fitted to measure the time of all."""
LITTLE = 0.1
"""Of the time left: trees that take no more are not given up."""
SHARES = (1.0, 0.75, 0.5, 1 / 3)
"""Of the epochs, to which training is shortened before alternatives are left out."""
FURTHER = (0.2, 0.1)
"""Of the epochs, to which it is shortened after that, but not below one epoch or below the least number of steps."""
ONE_PROCESS = "The budget is planned as if there were one process; with several the run may take less time."
"""What is said where several processes share the work."""


def steps_of(work: Work, plan: TrainingPlan, names: list[str], test: bool) -> int:
    """Training steps of a whole run under a plan, those of networks side by side each counted."""
    whole = replace(work, plan=plan)
    views, half = whole.views(), -(-len(work.noisy) // 2)
    total = 2 * whole.quick(half).steps(half)  # the noisy expert
    total += _of_method([whole]) + _of_candidate(OURS, [whole]) + _of_method(views)
    total += sum(_of_candidate(name, views) for name in (OURS, *names))
    return total + (sum(_of_candidate(name, [whole]) for name in names) if test else 0)


def _side_by_side(plan: TrainingPlan, rows: list[int]) -> int:
    """Of networks of this many rows each, which all train as long as the longest."""
    return len(rows) * max(plan.steps(count) for count in rows)


def _of_method(works: list[Work]) -> int:
    """Of the trusted expert, the noise-matrix expert and the fold models."""
    first = works[0]
    sides = [[len(work.side(h, work.trusted)) for h in (0, 1)] for work in works]
    noisy = [len(first.side(h, first.noisy)) for h in (0, 1)]
    steps = _side_by_side(first.alone, [len(work.trusted) for work in works])
    steps += _side_by_side(first.brief, [count or sum(pair) for pair in sides for count in pair])
    of_matrix, of_folds = first.quick(-(-len(first.given) // 2)), first.quick(-(-len(first.noisy) // 2))
    steps += _side_by_side(of_matrix, [noisy[h] + pair[h] for pair in sides for h in (0, 1)])
    return steps + len(PRESETS) * _side_by_side(of_folds, [noisy[h] + pair[1 - h] for pair in sides for h in (0, 1)])


def _of_candidate(name: str, works: list[Work]) -> int:
    """Of a candidate's networks; what cleanlab takes out is not known beforehand."""
    if name in (*TREES, *ESTIMATORS):
        return 0
    noisy = len(works[0].noisy)
    rows = [{"noisy": noisy, "trusted": len(w.trusted)}.get(name, noisy + len(w.trusted)) for w in works]
    learning = len(works) * works[0].short.steps(noisy) if name == "sama" else 0
    return learning + _side_by_side(works[0].last, rows[:1] if name in BLIND else rows)


def seconds_per_step(work: Work) -> float:
    """Of a network and batch of this run, measured on one that is thrown away; side by side a step takes less."""
    plan = replace(work.plan, epochs=0.001, least=20)
    targets = work.as_given(work.noisy[: max(work.plan.batch * 8, 16)])
    train(work.build, work.inputs, targets, replace(plan, least=3), seed=0)
    begin = time.perf_counter()
    train(work.build, work.inputs, targets, plan, seed=0)
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return (time.perf_counter() - begin) / plan.steps(len(targets.rows))


Fit = tuple[str, int]
"""A fit of trees: FOREST or BOOSTED, and its rows."""


def tree_fits(work: Work, names: list[str], test: bool) -> list[Fit]:
    """The fits of trees of a whole run: of the method, and of the candidates among ``names``."""
    views, rows = len(work.views()), len(work.noisy) + len(work.trusted)
    found = [(TREES[name], rows) for name in names if name in TREES for _ in range(views + test)]
    if work.trees:  # the noisy forest, and those of the cleaned labels
        found += [(FOREST, rows)] * (2 + views)
    if work.trees and work.tree_model:  # both kinds of each half are asked; at most one is fitted to all rows
        halves = [(kind, -(-rows // 2)) for kind in (FOREST, BOOSTED) for _ in range(2)]
        found += [*halves, (FOREST, rows)] * (1 + views)
    return found


def seconds_per_fit(work: Work, kinds: set[str]) -> dict[Fit, float]:
    """Of trees of each kind and of two sizes, from a part of the trees of each on rows of this run."""
    found, rows = {}, torch.cat([work.labelled(work.noisy), work.trusted])
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:MEASURED_ROWS].to(rows.device)]
    for kind in sorted(kinds):
        import sklearn.ensemble  # noqa: F401  (loading it is not part of a fit)

        for count in (-(-len(rows) // 2), len(rows)):
            x, labels, begin = work.vectors(rows[:count]), work.given[rows[:count]], time.perf_counter()
            whole = trees.TREES if kind == FOREST else trees.ROUNDS
            part = max(1, whole // MEASURED_PART)
            if kind == FOREST:
                trees.forest(x, one_hot(labels, work.classes).float(), trees=part)
            else:
                trees.boosted(x, labels, work.classes, rounds=part)
            found[kind, count] = whole / part * (time.perf_counter() - begin)
    return found


def seconds_of(fits: list[Fit], measured: dict[Fit, float]) -> float:
    """Of fits of trees, on the straight line in their rows through the two sizes that were measured."""
    total = 0.0
    for kind, rows in fits:
        (low, first), (high, second) = sorted((n, t) for (k, n), t in measured.items() if k == kind)
        total += first + max(0.0, second - first) * (rows - low) / (high - low)
    return total


def within(work: Work, names: list[str], test: bool, seconds: float) -> dict[str, Any]:
    """What fits into this many seconds, as the log of a run keeps it.

    ``epochs`` and ``least`` are those of a full training, ``compare`` the alternatives that stay; ``trees`` says
    whether these are among the experts and may be delivered, and ``messages`` what was given up.

    Where networks without any alternative would take too long with the trees of the method, those are given up. Then
    training is shortened, to a third of its epochs at most; then alternatives are left out, most expensive first; then
    training of many rows is shortened further.
    """
    fits, begin = tree_fits(work, names, test), time.perf_counter()
    measured = seconds_per_fit(work, {kind for kind, _ in fits})
    each = seconds_per_step(work)
    seconds = max(1.0, seconds - (time.perf_counter() - begin))

    def expected(plan: TrainingPlan, names: list[str]) -> float:
        return steps_of(work, plan, names, test) * each + seconds_of(tree_fits(work, names, test), measured)

    messages, names = list[str](), list(names)
    why = f"to stay within the {seconds:.0f} s that are left of the budget."
    plans = [
        replace(work.plan, epochs=work.plan.epochs * share, least=max(60, round(work.plan.least * share)))
        for share in SHARES
    ]
    of_trees = seconds_of(tree_fits(work, [], test), measured)
    if of_trees > LITTLE * seconds and expected(plans[-1], []) > seconds:
        work = replace(work, trees=False)
        names = [name for name in names if name not in TREES]  # which need the forest that is an expert
        messages.append(f"Networks alone are trained, without trees, {why} Accuracy may be lower.")
    plan = next((plan for plan in plans if expected(plan, names) <= seconds), plans[-1])
    alone = {name: expected(plan, [name]) for name in names if name in ALTERNATIVES}
    left_out = list[str]()
    for name in sorted(alone, key=lambda name: (-alone[name], -ALTERNATIVES.index(name))):
        if expected(plan, names) > seconds:
            names.remove(name)
            left_out.append(f"'{name}' is left out of the comparison {why}")
    for share in FURTHER:
        if expected(plan, names) > seconds:
            plan = replace(plan, epochs=min(plan.epochs, max(1.0, share * work.plan.epochs)))
    if plan.epochs < work.plan.epochs:
        messages.append(
            f"Training is shortened to {plan.epochs:.1f} epochs {why} Wrong labels may be missed, and the noise rate "
            "may be too low."
        )
    messages += left_out
    if (still := expected(plan, names)) > seconds:
        messages.append(f"This will still take about {still:.0f} s, more than the {seconds:.0f} s left of the budget.")
    kept = {"epochs": plan.epochs, "least": plan.least, "compare": names}
    return kept | {"trees": work.trees, "messages": messages}
