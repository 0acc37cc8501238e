"""How many steps a run takes, and what to leave out so that it ends in time."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from hyperkron.cleaning.fold_models import HYPERGRADIENT_COST, outer_steps
from hyperkron.cleaning.trainer import TrainingPlan, TrainingTargets, train
from hyperkron.cleaning.work import Work

READY = ("trusted", "pooled")
"""Alternatives whose held-out predictions the experts already give."""


def steps_of(work: Work, plan: TrainingPlan, names: list[str], test: bool) -> int:
    """Training steps of a whole run under a plan."""
    here = replace(work, plan=plan)
    noisy, trusted = len(work.noisy), len(work.trusted)
    half, inner = math.ceil((noisy + trusted) / 2), math.ceil(noisy / 2)
    judge, fold_steps = here.short.steps(inner + trusted // 2), here.quick(inner).steps(inner)
    outer = HYPERGRADIENT_COST * len(outer_steps(fold_steps)) if work.config.hypergradient == "kfac" else 0
    expert = 3 * here.brief.steps(trusted)
    if here.many:
        expert = here.short.steps(trusted) + 2 * here.brief.steps(trusted - trusted // 2)
    ours = expert + 4 * here.quick(half).steps(half) + 2 * (fold_steps + outer) + here.last.steps(noisy + trusted)
    others = sum(2 * judge * (2 if name == "sama" else 1) for name in names if name not in READY)
    others += 2 * judge if names else 0  # ours
    if test:
        others += here.short.steps(noisy) if "sama" in names else 0
        others += sum(plan.steps(trusted if name == "trusted" else noisy + trusted) for name in names)
    return ours + others


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
    for name in ("sama", "cleanlab", "small-loss", "trusted-confidence", "noisy", "pooled", "trusted"):
        if steps_of(work, plan, names, test) * each > seconds and name in names:
            names.remove(name)
            messages.append(f"'{name}' is left out of the comparison to stay within the budget of {seconds:.0f} s.")
    if plan.epochs < work.plan.epochs:
        messages.insert(0, f"Training is shortened to {plan.epochs:.1f} epochs to stay within {seconds:.0f} s.")
    expected = steps_of(work, plan, names, test) * each
    if expected > seconds:
        messages.append(f"This will still take about {expected:.0f} s, more than the budget of {seconds:.0f} s.")
    return plan, names, messages
