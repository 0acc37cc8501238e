"""Seven stochastic algorithms on the problems of the benchmark_bilevel suite, at a size for one CPU core.

The problems are those of problems.py: *logistic* (regularisation selection, small), *sized* (the same at
IJCNN1's size), both on synthetic data, and *cleaning* (hypercleaning of MNIST).
*long* is *sized* with the loops of numpy_algorithms.py, which make many more steps in a second;
*digits* and *covtype* have these loops and real data.

Every algorithm has its published decay exponents, batches of 64, and the same grid of (step, ratio): θ (and v, and the
Neumann series) move by step, λ by step/ratio. The grid is screened with the first seed for a short time, the best
settings run for all of it with every seed, and the one whose median score at the end is lowest is taken.
F2SA is the published suite's (ℓ grows as t^(6/7)); F2SA-paper has the growth of its paper, t^(1/7).

    python -m experiments.suite.tuned             # continues where an earlier run stopped
    python -m experiments.suite.figure            # experiments/pages/figures/suite.png
    python -m experiments.suite.tuned --table     # all that experiments/pages/suite-ijcnn1.md sums up
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hyperkron as hk
from experiments import records
from experiments.suite.numpy_algorithms import SIX, STEPS, Loop, Oracles, Penalties
from experiments.suite.problems import Case, Covtype, Digits, Logistic, Long, Sized, cleaning
from experiments.suite.tables import CALLS, FIGURES, LOOPS, columns, last_values, table

RESULT, SIZED, LONG, DIGITS, COVTYPE = (
    f"suite/tuned_{x}.json" for x in ("logistic", "sized", "long", "digits", "covtype")
)
NAMES = ("SABA", "SOBA", "AmIGO", "MRBO", "FSLA", "stocBiO", "F2SA", "F2SA-paper")
SURVIVING = ("digits", "covtype")
"""The problems on which a setting that diverges with the first seed gives its place to the next one."""
COMPARED = {**dict.fromkeys(LOOPS, SIX), "covtype": tuple(STEPS)}
"""The algorithms that run on a problem, where not all of them do."""


def algorithm(name: str, step: float, ratio: float, seed: int = 0) -> hk.algorithms.Algorithm:
    """An algorithm with its published exponents."""
    outer = step / ratio
    if name == "SABA":
        return hk.algorithms.SABA(inner_rate=step, outer_rate=outer, seed=seed)
    if name in ("SOBA", "FSLA"):
        kind = hk.algorithms.SOBA if name == "SOBA" else hk.algorithms.FSLA
        return kind(inner_rate=hk.algorithms.Rate(step, 1 / 2), outer_rate=hk.algorithms.Rate(outer, 1 / 2), seed=seed)
    if name == "AmIGO":
        return hk.algorithms.AmIGO(linear_rate=step, inner_rate=step, outer_rate=outer, seed=seed)
    if name == "stocBiO":
        return hk.algorithms.StocBiO(step_size=step, inner_rate=step, outer_rate=outer, seed=seed)
    if name == "MRBO":
        series = hk.algorithms.StochasticNeumann(10, step, seed=seed)
        return hk.algorithms.MRBO(
            series, inner_rate=hk.algorithms.Rate(step, 1 / 3), outer_rate=hk.algorithms.Rate(outer, 1 / 3), seed=seed
        )
    if name in ("F2SA", "F2SA-paper"):  # ℓ grows as t^(6/7) in the suite, as t^(1/7) in the paper
        growth = hk.algorithms.Rate(0.1, 1 / 7 if name == "F2SA" else 6 / 7)
        y, z, hyper = hk.algorithms.Rate(step, 5 / 7), hk.algorithms.Rate(step, 4 / 7), hk.algorithms.Rate(outer, 4 / 7)
        return hk.algorithms.F2SA(growth=growth, inner_rate=y, second_rate=z, outer_rate=hyper, seed=seed)
    raise ValueError(f"name={name!r} is none of {', '.join(NAMES)}.")


# --- running -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Track:
    """A run under way: ``advance`` it, count its ``steps``, keep where it is, place the modules there for a score."""

    advance: Callable[[], object]
    steps: Callable[[], int]
    here: Callable[[], Any]
    place: Callable[[Any], tuple[nn.Module, nn.Module]]


def by_library(case: Case, name: str, step: float, ratio: float, seed: int) -> Track:
    """An algorithm of the library."""
    model, hyper = case.start()
    method = algorithm(name, step, ratio, seed)
    state = method.init(case.problem, model, hyper)
    inner = hk.algorithms.Examples(*case.inner, batch_size=64, seed=seed)
    batches = hk.algorithms.BatchSources(inner, hk.algorithms.Examples(*case.outer, batch_size=64, seed=seed + 1000))

    def place(at: tuple[dict[str, Tensor], dict[str, Tensor]]) -> tuple[nn.Module, nn.Module]:
        state.inner.place(at[0])
        state.outer.place(at[1])
        return model, hyper

    return Track(lambda: method.step(state, batches), lambda: state.step, lambda: _snapshot(state), place)


def by_loop(
    case: Case,
    name: str,
    step: float,
    ratio: float,
    seed: int,
    chunk: int = 64,
    bound: float = math.inf,
    origin: tuple[Any, Any] | None = None,
    kind: Callable[[Case, int], Oracles] = Penalties,
    loop: Loop | None = None,
) -> Track:
    """The same steps in numpy, ``chunk`` of them at a time, from (θ, λ) = ``origin``, with λ within ±``bound``.

    Without ``origin`` they start where the oracles do that ``kind`` makes; ``loop`` is in place of the algorithm's.
    """
    oracles, count = kind(case, seed), 0
    if origin is not None:
        oracles.theta, oracles.hyper = origin
    steps = (loop or STEPS[name])(oracles, step, step / ratio)

    def advance() -> None:
        nonlocal count
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(chunk):
                next(steps)
                if bound < math.inf:
                    oracles.hyper = np.minimum(np.maximum(oracles.hyper, -bound), bound)
        count += chunk
        if not math.isfinite(float(oracles.theta.sum() + oracles.hyper.sum())):
            raise hk.HyperkronError(f"{name} is not finite after {count} steps.")

    def place(at: tuple[Any, Any]) -> tuple[nn.Module, nn.Module]:
        modules = case.start()
        for module, values in zip(modules, at, strict=True):
            for p in module.parameters():
                p.data = torch.as_tensor(values).view_as(p)
        return modules

    return Track(advance, lambda: count, lambda: (oracles.theta, oracles.hyper), place)


def run(
    case: Case,
    name: str,
    step: float,
    ratio: float,
    seed: int,
    seconds: float,
    points: int | list[float] = 25,
    now: Callable[[], float] = time.process_time,
    make: Callable[..., Track] | None = None,
) -> dict[str, Any]:
    """One run of ``seconds`` of CPU time; snapshots are scored afterwards, outside the clock.

    ``points`` is how many there are, evenly, or the times at which they are taken.
    ``make`` begins the run; without it the problem's name decides between the library and the loops.
    CPU time of the one thread is what wall-clock time would be on a machine that nobody else uses.
    """
    make = make or (by_loop if case.name in LOOPS else by_library)
    track = make(case, name, step, ratio, seed)
    marks = points if isinstance(points, list) else [seconds * (i + 1) / points for i in range(points)]
    found: list[dict[str, Any]] = [{"seconds": 0.0, "steps": 0, "at": track.here()}]
    clock, failed = 0.0, False
    while marks and not failed:
        begin = now()
        try:
            track.advance()
        except hk.HyperkronError:
            failed = True
        clock += now() - begin
        if clock >= marks[0]:
            marks = [x for x in marks if x > clock]
            found.append({"seconds": clock, "steps": track.steps(), "at": track.here()})
    curve = []
    for row in found:
        with torch.no_grad():
            scores = case.score(*track.place(row["at"]))
        if not all(math.isfinite(x) for x in scores.values()):
            failed = True
            break
        curve.append({"seconds": row["seconds"], "calls": row["steps"] * CALLS[name], **scores})
    return {"failed": failed, "curve": curve}


def _snapshot(state: hk.algorithms.State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(θ, λ). The θ of F2SA that follows θ*(λ) is its z; its y is also pulled by J_out and would score too well."""
    return state.twins.get("z", state.inner).values(), state.outer.values()


def final(result: dict[str, Any]) -> float:
    """The score at the end, by the problem's first figure; infinite for a run that failed."""
    figures = [v for k, v in result["curve"][-1].items() if k not in ("seconds", "calls")]
    return math.inf if result["failed"] else float(figures[0])


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    seconds: float = 12.0
    screening: float = 1.5
    kept: int = 3
    seeds: tuple[int, ...] = (0, 1, 2)


RUNS = {RESULT: (Plan(), ["logistic", "cleaning"]), SIZED: (Plan(30.0, 2.0, 2), ["sized"])}
RUNS |= {
    LONG: (RUNS[SIZED][0], ["long"]),
    DIGITS: (RUNS[SIZED][0], ["digits"]),
    COVTYPE: (RUNS[SIZED][0], ["covtype"]),
}
"""How much is run of which problems, by the file of the results."""


def tune_and_run(case: Case, name: str, plan: Plan) -> dict[str, Any]:
    """Screen the grid with the first seed, run the best settings with every seed, and keep the best median."""
    first = plan.seeds[0]
    screened = [(*x, final(run(case, name, *x, first, plan.screening, 2))) for x in product(case.steps, case.ratios)]
    screened.sort(key=lambda x: x[2])
    full: list[tuple[float, float, float, list[dict[str, Any]]]] = []
    for step, ratio, _ in screened:
        runs = [run(case, name, step, ratio, first, plan.seconds)]
        if not (runs[0]["failed"] and case.name in SURVIVING):
            runs += [run(case, name, step, ratio, seed, plan.seconds) for seed in plan.seeds[1:]]
        full.append((step, ratio, statistics.median(final(x) for x in runs), runs))
        if sum(len(x[3]) == len(plan.seeds) for x in full) == plan.kept:
            break
    complete = [x for x in full if len(x[3]) == len(plan.seeds)]
    step, ratio, _, runs = min(complete or full, key=lambda x: x[2])
    return {
        "step": step,
        "ratio": ratio,
        "grid": json.dumps([[s, r, _plain(x)] for s, r, x in screened]),
        "full": json.dumps([[s, r, _plain(x)] for s, r, x, _ in full]),
        "failed": [x["failed"] for x in runs],
        "runs": [columns(x["curve"]) for x in runs],
    }


def _plain(x: float) -> float | None:
    return float(f"{x:.4g}") if math.isfinite(x) else None


def main(folder: str, plan: Plan, path: Path, problems: Iterable[str], covtype: str = "") -> None:
    """Run what the file of the results does not hold yet."""
    made: dict[str, Callable[[], Case]] = {
        "logistic": lambda: Logistic().case(),
        "sized": lambda: Sized().case(),
        "long": lambda: Long().case(),
        "digits": lambda: Digits(folder).case(),
        "covtype": lambda: Covtype(covtype).case(),
        "cleaning": lambda: cleaning(folder),
    }
    settings = {**asdict(plan), "seeds": list(plan.seeds), "batch": 64}
    record: dict[str, Any] = {"settings": settings, "problems": {}}
    if path.exists():
        earlier = json.loads(path.read_text("utf-8"))
        if earlier.get("settings") == settings:
            record["problems"] = earlier["problems"]
    for problem in problems:
        done = record["problems"].setdefault(problem, {})
        missing = [name for name in COMPARED.get(problem, NAMES) if name not in done]
        if missing:
            case = made[problem]()
        for name in missing:
            done[name] = tune_and_run(case, name, plan)
            records.write_result(path, record)
            ends = last_values(done[name]["runs"], FIGURES[problem][0])
            print(problem, name, done[name]["step"], done[name]["ratio"], ends, flush=True)


def recorded() -> dict[str, Any]:
    """All problems of the result files that are there."""
    files = [records.RESULTS / result for result in RUNS]
    found = [json.loads(file.read_text("utf-8"))["problems"] for file in files if file.exists()]
    return {"problems": {name: runs for problems in found for name, runs in problems.items()}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stochastic bilevel algorithms on the problems of benchmark_bilevel.")
    parser.add_argument("--data", default="data/mnist", help="folder with MNIST's four IDX files")
    parser.add_argument("--covtype", default="data/covtype/covtype.csv", help="UCI's covtype.data, or it with a header")
    parser.add_argument("--problems", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--table", action="store_true", help="print the tables of an earlier run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.table:
        print(table(recorded()))
    else:
        for result, (plan, problems) in RUNS.items():
            wanted = [x for x in problems if x in arguments.problems]
            main(arguments.data, plan, records.RESULTS / result, wanted, arguments.covtype)
