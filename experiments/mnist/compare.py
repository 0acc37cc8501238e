"""MNIST hypercleaning: does KFAC in place of the solver of AID, AmIGO and MRBO reach the same test loss sooner?

Half of the training labels are drawn anew, uniformly. λ is one weight for every training example, θ a linear model:

    J_in = mean(clip(λ_n) · CE) + 0.001 ‖θ‖² on the noisy part ,      J_out = mean CE on the first validation part

Every method is tuned by the same number of trials (step sizes of θ and λ, and one number of its solver: damping, or the
step of its iteration), each of full length, on the *second* validation part. The chosen setting runs with every seed, a
method and its KFAC version taking turns every few steps, so that whatever slows the machine slows both; the quicker of
the two then goes on until it has used as much time as the other: CPU time, on a GPU wall time. Only in these runs is
the test part looked at, outside the clock.

    python -m experiments.mnist.compare             # half an hour on two cores; continues where an earlier run stopped
    python -m experiments.mnist.compare --plan paper --table     # the tables of experiments/pages/mnist-kfac.md
    python -m experiments.mnist.compare --plan paper --device cuda --workers 12 --limit 570     # again until it is done

The plan ``paper`` has the paper's 50 000 training examples, all of them in every batch of AID and AmIGO.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hyperkron as hk
from experiments import records
from experiments.mnist import tuning
from experiments.mnist.problem import (
    DAMPINGS,
    DECAY,
    SOLVER,
    PaperPlan,
    Plan,
    Setting,
    Trial,
    clock,
    noisy_mnist,
    prepare,
)
from experiments.mnist.tables import table
from experiments.paper.cleaning import Split, problem
from experiments.paper.recipe import Job
from experiments.pieces import Cells, OutOfTime

RESULT = "mnist/small.json"
PAPER = "mnist/paper.json"
PLANS = {"small": (Plan(), RESULT), "paper": (PaperPlan(), PAPER)}
PAIRS = (
    ("AID-CG", "AID-KFAC"),
    ("AmIGO", "AmIGO-KFAC"),
    ("MRBO", "MRBO-KFAC"),
    ("AID-CG", "AmIGO-PCG"),
    ("AmIGO", "AmIGO-PCG"),
    ("AID-CG", "AmIGO-PGD"),
    ("AmIGO", "AmIGO-PGD"),
)
NEAR = 1.001
"""Also told is when a method is within a thousandth of the best loss: which of two comes a hair lower is chance."""

# --- the comparison ----------------------------------------------------------------------------------------


def compete(
    pair: tuple[str, str], tuned: dict[str, Any], split: Split, seed: int, plan: Plan, check_time: Callable[[], None]
) -> dict[str, Any]:
    """Both methods of a pair, in turns, for the same iterations; the quicker one then goes on for the same time."""

    def begin(name: str) -> Trial:
        return Trial(name, Setting(**tuned[name]["setting"]), split, plan, seed)

    def go_on(run: Trial) -> None:
        check_time()
        run.advance(plan.block)
        run.look(test=split.test, second=split.second)

    if split.device.type == "cuda":  # kernels and libraries are loaded by their first call, which is not to count
        for name in pair:
            begin(name).advance(plan.refresh + 1)
    runs = [begin(name) for name in pair]
    for block in range(plan.steps(pair[0]) // plan.block):
        for run in runs[:: 1 if block % 2 == 0 else -1]:
            go_on(run)
    quick, slow = sorted(runs, key=lambda run: run.spent)
    while quick.spent < slow.spent and not quick.failed:
        go_on(quick)
    return {run.name: run.curve for run in runs}


def reached(curve: list[dict[str, float]], loss: float) -> dict[str, float] | None:
    """The first row with at most this test loss."""
    return next((row for row in curve if row["test_loss"] <= loss), None)


def verdict(pair: tuple[str, str], curves: dict[str, Any], clock: str = "cpu") -> dict[str, Any]:
    """When the KFAC version is at the original's best test loss, and how much sooner than the original itself.

    The original's best is that of the common iterations; the KFAC version has them, or the same time by ``clock``.
    """
    own, kfac = (curves[n] for n in pair)
    common_steps = min(own[-1]["step"], kfac[-1]["step"])
    own = [row for row in own if row["step"] <= common_steps]
    target = min(row["test_loss"] for row in own)
    there, here = reached(own, target), reached(kfac, target)
    assert there is not None
    same = [row for row in kfac if row["step"] <= common_steps]
    found: dict[str, Any] = {
        "target": target,
        "kfac_best": min(row["test_loss"] for row in same),
        "kfac_best_same_time": min(row["test_loss"] for row in kfac),
        "error": min(row["test_error"] for row in own),
        "kfac_error": min(row["test_error"] for row in kfac),
        "seconds": there["seconds"],
        "step": there["step"],
        "milliseconds_a_step": 1e3 * own[-1][clock] / own[-1]["step"],
        "kfac_milliseconds_a_step": 1e3 * kfac[-1][clock] / kfac[-1]["step"],
        "kfac_seconds": here and here["seconds"],
        "kfac_step": here and here["step"],
        "same_iterations": here is not None and here["step"] <= common_steps,
    }
    near = [reached(curve, NEAR * target) for curve in (own, kfac)]
    for kind in ("seconds", "cpu"):
        found[f"{kind}_ratio"] = _ratio(there, here, kind)
        found[f"near_{kind}_ratio"] = _ratio(near[0], near[1], kind)
    return found


def _ratio(there: dict[str, float] | None, here: dict[str, float] | None, kind: str) -> float | None:
    """How much sooner one is ``here`` than another is ``there``; ``None`` for never."""
    return None if there is None or here is None else there[kind] / here[kind]


def diagnose(setting: Setting, split: Split, plan: Plan) -> dict[str, Any]:
    """How near the solvers come to the exact hypergradient (CG to the end) after 20 steps of AID-CG, on one batch.

    The cosine and the ratio of the norms with the exact hypergradient of the full training part, over the batch.
    """
    run = Trial("AID-CG", setting, split, plan, 0)
    run.advance(20)
    x, y = split.train
    index = torch.arange(len(x), device=split.device)
    point = (problem(DECAY), run.run.state.model, run.run.state.hyper)
    exact = hk.cg(500, tolerance=1e-4).compute(*point, (x, y, index), split.validation)
    part = index[: plan.batches(run.name)[0]]
    batch = (x[part], y[part], part)
    reference = exact.grads["weight"][part]
    methods = {"v = b": hk.identity()}
    methods |= {f"CG, {k} products, damping {d:g}": hk.cg(k, d) for k in (3, 10) for d in (0.0, 0.1)}
    methods |= {f"KFAC, damping {d:g}": hk.kfac(d) for d in (1e-3, *DAMPINGS)}
    methods |= {f"EKFAC, damping {d:g}": hk.ekfac(d) for d in (1e-3, *DAMPINGS[:2])}
    found: dict[str, Any] = {"exact": {"products": exact.stats["products"]}}
    on_cpu = split.device.type == "cpu"
    now = time.process_time if on_cpu else time.perf_counter
    for name, method in methods.items():
        for _ in range(1 if on_cpu else 2):  # the first call on a GPU loads what it needs
            records.synchronize(split.device)
            begin = now()
            grads = method.compute(*point, batch, split.validation).grads["weight"][part]
            records.synchronize(split.device)
            spent = now() - begin
        scale = len(part) / len(x)  # the batch's mean has a smaller divisor
        found[name] = {
            "cosine": float(nn.functional.cosine_similarity(grads, reference, dim=0)),
            "norm": float(grads.norm() / reference.norm()) * scale,
            "milliseconds": 1e3 * spent,
        }
    return found


# --- the record --------------------------------------------------------------------------------------------


def settings_of(plan: Plan, device: str) -> dict[str, Any]:
    """What a result depends on."""
    kind = torch.device(device).type
    where = {} if kind == "cpu" else {"device": kind}
    return asdict(plan) | {"noise": 0.5, "decay": DECAY, "tuning_seed": 0, "solver": SOLVER} | where


def recorded(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The result of an earlier run with the same settings, or an empty one."""
    empty: dict[str, Any] = {"settings": settings, "tuned": {}, "curves": {}, "verdicts": {}, "diagnosis": {}}
    if not path.exists():
        return empty
    record: dict[str, Any] = json.loads(path.read_text("utf-8"))
    if record.get("settings") != json.loads(json.dumps(settings)):
        raise SystemExit(f"{path.name} holds a run with other settings; name another file by --out, or remove this one")
    return {key: record[key] for key in empty}


def complete(record: dict[str, Any], plan: Plan) -> bool:
    """Whether every pair has every seed."""
    return set(record["curves"]) == {f"{called(pair)} seed {seed}" for pair in PAIRS for seed in plan.seeds}


def called(pair: tuple[str, str]) -> str:
    """What a pair is called in the record."""
    return pair[0] if pair[1].endswith("KFAC") else f"{pair[0]}, {pair[1]}"


def job_of(
    folder: str, plan: Plan, path: Path, device: str, say: Callable[[str], None] = print, limit: float | None = None
) -> Job:
    """A run of the plan; its finished pieces are in a file beside the result."""
    cells = Cells(path.with_suffix(".cells.jsonl"), settings_of(plan, device))
    deadline = math.inf if limit is None else time.monotonic() + limit
    return Job("paper", plan, plan.seeds, torch.device(device), cells, Path(folder), deadline, say)


def main(job: Job, path: Path, workers: int = 1) -> None:
    """Run what is missing of the plan, and write the result."""
    prepare(str(job.device))
    settings = settings_of(job.settings, str(job.device))
    if complete(recorded(path, settings), job.settings):
        return
    record: dict[str, Any] = {"settings": settings, "tuned": {}, "curves": {}, "verdicts": {}, "diagnosis": {}}
    try:
        _run(job, record, workers)
    except OutOfTime:
        job.say("The limit is reached; the same command goes on from here.")
    if record["tuned"]:
        records.write_result(path, record)


def _run(job: Job, record: dict[str, Any], workers: int) -> None:
    plan: Plan = job.settings
    split = lru_cache(1)(lambda seed: noisy_mnist(str(job.data), plan.counts, seed=seed).to(job.device))
    record["tuned"] = chosen = tuning.tuned(job, workers)
    start = Setting(**chosen["AID-CG"]["setting"])
    record["diagnosis"] = job.cell(["diagnosis"], lambda: diagnose(start, split(0), plan))
    for seed in job.seeds:
        for pair in PAIRS:
            found = job.cell(
                [called(pair), seed],
                lambda p=pair, s=seed: _columns(compete(p, chosen, split(s), s, plan, job.check_time)),  # type: ignore[misc]
            )
            record["curves"][f"{called(pair)} seed {seed}"] = found
            outcome = verdict(pair, _rows(found), clock(job.device))
            record["verdicts"].setdefault(called(pair), {})[str(seed)] = outcome


def _columns(curves: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, list[float]]]:
    """Rounded, with a list for each quantity in place of a dictionary for each row."""
    return {name: {key: [round(row[key], 5) for row in curve] for key in curve[0]} for name, curve in curves.items()}


def _rows(curves: dict[str, dict[str, list[float]]]) -> dict[str, list[dict[str, float]]]:
    """What :func:`_columns` was made of."""
    return {
        name: [dict(zip(of, values, strict=True)) for values in zip(*of.values(), strict=True)]
        for name, of in curves.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="MNIST hypercleaning, solvers against KFAC.")
    parser.add_argument("--data", default="data/mnist", help="folder with MNIST's four IDX files")
    parser.add_argument("--plan", choices=PLANS, default="small", help="how much is run")
    parser.add_argument("--device", default="cpu", help="where: cpu or cuda")
    parser.add_argument("--workers", type=int, default=2, help="processes that tune")
    parser.add_argument("--limit", type=float, help="stop after so many seconds; the same command goes on later")
    parser.add_argument("--out", type=Path, help="the result file")
    parser.add_argument("--table", action="store_true", help="print the tables of an earlier run")
    arguments = parser.parse_args()
    chosen, usual = PLANS[arguments.plan]
    file = (arguments.out or records.RESULTS / usual).resolve()
    if arguments.table:
        print(table(json.loads(file.read_text("utf-8"))))
    else:
        job = job_of(arguments.data, chosen, file, arguments.device, limit=arguments.limit)
        main(job, file, arguments.workers)
