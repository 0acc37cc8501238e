"""The map: which method for which problem?

Every problem starts from a trained model. λ is trained by Adam, for which the scale of a hypergradient does not matter;
each method has the step size at which J_out on held-out rows is lowest after all steps (mean of two seeds), and is then
run with five further seeds. The cosine is that of a method's hypergradient with one whose linear system is solved until
it has converged, on the same rows and at the same points of one training, in float64.

    python -m experiments.which_method.compare --workers 12 --limit-minutes 9   # continues an earlier run
    python -m experiments.which_method.compare --table                          # the recorded runs
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import hyperkron as hk
from experiments import records
from experiments.pieces import Lines
from experiments.seeds import interval
from experiments.which_method.methods import INNER, METHODS, Method, exact
from experiments.which_method.problems import PROBLEMS, RATE, Digits, Rows, Task, digits, network
from experiments.workers import share
from support.storages import Storages

RESULT = records.RESULTS / "which_method.jsonl"
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
STEPS = 100
SEEDS = 5
TUNING = (0, 100)
"""Seeds that choose step sizes."""
START = 300
"""Steps of θ before λ begins to move."""
LOOKS = (0, 30, 60)
"""Steps of λ after which hypergradients are compared."""


class Piece(NamedTuple):
    """A run of a method with a step size of λ, or, where that is zero, the cosines of all methods."""

    problem: str
    method: str
    rate: float
    seed: int


def started(task: Task, seed: int, double: bool = False) -> tuple[nn.Module, nn.Module, Rows, Rows]:
    """A trained model, λ, and the batches."""
    torch.manual_seed(seed)
    model = network(seed)
    hyper = copy.deepcopy(task.hyper(model))
    inner, outer = task.inner_rows, task.outer_rows
    if double:
        model, hyper = model.double(), hyper.double()
        inner, outer = (tuple(x.double() if x.is_floating_point() else x for x in rows) for rows in (inner, outer))
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    only = hk.algorithms.InnerOnly(START)
    hk.fit(task.problem, model, hyper, only, inner, steps=1, inner_optimizer=optimizer, seed=None)
    return model, hyper, inner, outer


def run(task: Task, piece: Piece, steps: int, method: Method | None = None) -> dict[str, Any]:
    """Train λ, by the method of that name if none is given; J_out on held-out rows, what the user wanted, the costs."""
    model, hyper, inner, outer = started(task, piece.seed)
    method, optimizer = method or METHODS[piece.method], torch.optim.SGD(model.parameters(), RATE)
    made = hk.fit(
        task.problem,
        model,
        hyper,
        method.algorithm(optimizer),
        inner,
        outer,
        steps=0,
        inner_optimizer=None if method.functional else optimizer,
        outer_optimizer=torch.optim.Adam(hyper.parameters(), lr=piece.rate),
        projection=task.projection,
        clock=time.process_time,
        record_failure=True,
        seed=None,
    )
    before = task.held(model, hyper)
    with Storages() as count:
        made.advance(1)
    made.advance(steps - 1, seconds=math.inf)
    failed = made.failure is not None
    held = math.inf if failed else task.held(model, hyper)
    return {
        **piece._asdict(),
        "failed": failed,
        "before": before,
        "held": held if math.isfinite(held) else None,
        "wanted": None if failed else task.judge(model, hyper),
        "milliseconds": 1e3 * made.seconds / max(1, steps - 1),
        "bytes": count.peak,
    }


def cosines(task: Task, piece: Piece, looks: Sequence[int] = LOOKS) -> dict[str, Any]:
    """Cosines with the converged hypergradient at several points of one training, and the mean of each method's."""
    model, hyper, inner, outer = started(task, piece.seed, double=True)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    made = hk.fit(
        task.problem,
        model,
        hyper,
        hk.AID(exact(), INNER),
        inner,
        outer,
        steps=0,
        inner_optimizer=optimizer,
        outer_optimizer=torch.optim.Adam(hyper.parameters(), lr=0.03),
        projection=task.projection,
        seed=None,
    )
    found: dict[str, list[float]] = {name: [] for name in METHODS}
    status = set()
    for step in looks:
        made.advance(step - made.state.step)
        with torch.random.fork_rng(devices=[]):
            state = torch.random.get_rng_state()

            def flat(method: hk.hypergradient.Hypergradient, state: torch.Tensor = state) -> torch.Tensor:
                torch.random.set_rng_state(state)  # the same augmentation for all
                result = method.compute(task.problem, model, hyper, inner, outer)
                status.add(result.status.name)
                return torch.cat([x.flatten() for x in result.grads.values()])

            wanted = flat(exact())
            for name, method in METHODS.items():
                given = flat(method.hypergradient(optimizer))
                found[name].append(float(torch.cosine_similarity(given, wanted, 0)))
    return {**piece._asdict(), "cosines": found, "statuses": sorted(status)}


class Map:
    """What has been run so far, what comes next, and the winners."""

    def __init__(self, rows: Sequence[dict[str, Any]], problems: Sequence[str], seeds: int = SEEDS) -> None:
        self.problems, self.seeds = problems, range(1, seeds + 1)
        self.done = {key(Piece(*(row[name] for name in Piece._fields))): row for row in rows}

    def tried(self, problem: str, method: str) -> list[Piece]:
        """The runs that choose a step size."""
        return [Piece(problem, method, rate, seed) for seed in TUNING for rate in RATES]

    def best(self, problem: str, method: str) -> float | None:
        """The step size with the lowest held-out objective; ``None`` before all are tried, or if all failed."""
        found = {piece: self.done.get(key(piece)) for piece in self.tried(problem, method)}
        if any(row is None for row in found.values()):
            return None
        scores: dict[float, float] = dict.fromkeys(RATES, 0.0)
        for piece, row in found.items():
            assert row is not None
            scores[piece.rate] += math.inf if row["held"] is None else row["held"]
        rate = min(scores, key=lambda x: scores[x])
        return rate if math.isfinite(scores[rate]) else None

    def finals(self, problem: str, method: str) -> list[Piece]:
        """The runs of the chosen step size."""
        rate = self.best(problem, method)
        return [] if rate is None else [Piece(problem, method, rate, seed) for seed in self.seeds]

    def missing(self) -> Iterator[tuple[list[Any], Piece]]:
        """What can begin now."""
        for problem in self.problems:
            pieces = [Piece(problem, "", 0.0, seed) for seed in self.seeds]
            for method in METHODS:
                pieces += [*self.tried(problem, method), *self.finals(problem, method)]
            yield from ((list(piece), piece) for piece in pieces if key(piece) not in self.done)

    def figures(self, problem: str, method: str) -> dict[str, Any] | None:
        """The figures of a cell, each as a list over seeds; ``None`` where something is missing."""
        rows = [self.done.get(key(piece)) for piece in self.finals(problem, method)]
        points = [self.done.get(key(Piece(problem, "", 0.0, seed))) for seed in self.seeds]
        if not rows or any(row is None for row in (*rows, *points)):
            return None
        found: dict[str, Any] = {
            x: [row[x] for row in rows if row] for x in ("held", "wanted", "milliseconds", "bytes")
        }
        found["cosine"] = [sum(row["cosines"][method]) / len(row["cosines"][method]) for row in points if row]
        found["rate"] = rows[0]["rate"] if rows[0] else None
        return found


def key(piece: Piece) -> str:
    """A piece as text."""
    return json.dumps(list(piece))


def table(made: Map) -> str:
    """One table for each problem."""
    lines = []
    for problem in made.problems:
        cells = {name: made.figures(problem, name) for name in METHODS}
        known = {name: x for name, x in cells.items() if x is not None}
        columns = [problem, "cosine", "J_out, held out", "wanted, in %", "time", "memory", "step of λ"]
        rows = [[name, *_cells(x, known.get("identity"))] for name, x in known.items()]
        lines += [records.markdown(columns, rows), ""]
    return "\n".join(lines)


def _cells(x: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    if None in x["held"]:
        return [f"{interval(x['cosine'])[0]:.2f}", "diverged", "–", "–", "–", f"{x['rate']:g}"]
    texts = [f"{interval(x['cosine'])[0]:.2f}"]
    texts += [f"{mean:.3f} ± {half:.3f}" for mean, half in [interval(x["held"])]]
    texts += [f"{mean:.1f} ± {half:.1f}" for mean, half in [interval(x["wanted"])]]
    for name in ("milliseconds", "bytes"):
        ratio = sorted(x[name])[len(x[name]) // 2] / sorted(base[name])[len(base[name]) // 2] if base else math.nan
        texts.append(f"{ratio:.1f}×")
    edge = " (edge)" if x["rate"] in (RATES[0], RATES[-1]) else ""
    return [*texts, f"{x['rate']:g}{edge}"]


def _worker(options: argparse.Namespace) -> Callable[[Piece], dict[str, Any]]:
    """What carries out a piece."""
    torch.set_num_threads(1)

    def carry_out(piece: Piece) -> dict[str, Any]:
        piece = Piece(*piece)
        parts: Digits = digits(piece.seed, options.data)
        torch.manual_seed(piece.seed)
        task = PROBLEMS[piece.problem](parts)
        if not piece.rate:
            return cosines(task, piece)
        try:
            return run(task, piece, options.steps)
        except hk.HyperkronError as error:  # what a λ that is too large leaves cannot be trained on
            told = {"failed": True, "error": str(error)[:200]}
            return {**piece._asdict(), **told, "held": None, "wanted": None, "milliseconds": None, "bytes": None}

    return carry_out


def main(arguments: list[str] | None = None) -> None:
    """Run what is not recorded yet, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the recorded runs")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the runs; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with digits.npz, where scikit-learn is missing")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=list(PROBLEMS))
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of λ; default: {STEPS}")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"default: {SEEDS}")
    parser.add_argument("--workers", type=int, default=1, help="processes; default: 1")
    parser.add_argument("--limit-minutes", type=float, default=1e9, help="no run begins after this time")
    options = parser.parse_args(arguments)
    lines = Lines(options.out)
    if options.table:
        print(table(Map(lines.rows, options.problems, options.seeds)))
        return

    def keep(name: list[Any], row: dict[str, Any], seconds: float, busy: float) -> None:
        lines.append(row)
        print(f"{name}: {seconds:.1f} s", flush=True)

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    deadline = time.monotonic() + 60 * options.limit_minutes
    share(
        options.workers,
        partial(_worker, options),
        lambda: Map(lines.rows, options.problems, options.seeds).missing(),
        keep,
        late=lambda: time.monotonic() > deadline,
    )


if __name__ == "__main__":
    main()
