"""How many steps a run takes, and what to leave out so that it ends in time."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from hyperkron.cleaning.alternatives import BLIND, ESTIMATORS, TREES
from hyperkron.cleaning.config import OURS
from hyperkron.cleaning.method import PRESETS
from hyperkron.cleaning.trainer import TrainingPlan, TrainingTargets, train
from hyperkron.cleaning.work import Work


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
    trusted = [[len(work.side(h, work.trusted)) or len(work.trusted) for h in (0, 1)] for work in works]
    noisy = [len(first.side(h, first.noisy)) for h in (0, 1)]
    alone = first.short if first.many else first.brief
    steps = _side_by_side(alone, [len(work.trusted) for work in works])
    steps += _side_by_side(first.brief, [count for pair in trusted for count in pair])
    sides = [[len(work.side(h, work.trusted)) for h in (0, 1)] for work in works]
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


def seconds_per_step(work: Work, steps: int = 20) -> float:
    """Of a network and batch of this run, measured on one that is thrown away; side by side a step takes less."""
    plan = replace(work.plan, epochs=0.001, least=steps)
    rows = work.noisy[: max(work.plan.batch * 8, 16)]
    targets = TrainingTargets(rows, work.known(rows))
    train(work.build, work.inputs, targets, replace(plan, least=3), seed=0)
    begin = time.perf_counter()
    train(work.build, work.inputs, targets, plan, seed=0)
    if work.device.type == "cuda":
        torch.cuda.synchronize(work.device)
    return (time.perf_counter() - begin) / plan.steps(len(rows))


def within(work: Work, names: list[str], test: bool, seconds: float) -> tuple[TrainingPlan, list[str], list[str]]:
    """A plan and the alternatives that fit into this many seconds, and messages about what was given up.

    Training is shortened first, to a third of its epochs at most; then alternatives are left out, most expensive first.
    """
    each = seconds_per_step(work)
    messages, names, plan = [], list(names), work.plan
    for share in (1.0, 0.75, 0.5, 1 / 3):
        least = max(60, round(work.plan.least * share))
        plan = replace(work.plan, epochs=work.plan.epochs * share, least=least)
        if steps_of(work, plan, names, test) * each <= seconds:
            break
    for name in (
        "sama",
        "gold-loss",
        "neighbours",
        "cleanlab",
        "small-loss",
        "trusted-confidence",
        "noisy",
        "pooled",
        "trusted",
    ):
        if steps_of(work, plan, names, test) * each > seconds and name in names:
            names.remove(name)
            messages.append(f"'{name}' is left out of the comparison to stay within the budget of {seconds:.0f} s.")
    if plan.epochs < work.plan.epochs:
        messages.insert(0, f"Training is shortened to {plan.epochs:.1f} epochs to stay within {seconds:.0f} s.")
    expected = steps_of(work, plan, names, test) * each
    if expected > seconds:
        messages.append(f"This will still take about {expected:.0f} s, more than the budget of {seconds:.0f} s.")
    return plan, names, messages
