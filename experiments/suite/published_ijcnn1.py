"""The problem *long* of tuned.py with the settings that the published suite names as its best for IJCNN1.

Nothing is tuned here. Two files of the repository benchopt/benchmark_bilevel name such settings for all six algorithms:

- *paper*: config/ijcnn1_best_param.yml (commit 2f93176), whose algorithms are those of Dagréou et al. (2022);
- *later*: config/ijcnn1_best_params.yml (commit 055942a), made anew with algorithms of later papers beside them.

*tenfold* is *paper* for ten times as long, from where the suite starts. Batches (64), inner and linear steps or terms
(10), decay exponents and η of MRBO (0.5) are the same there and here, and so is what a ratio means: λ moves by
step/ratio.

    python -m experiments.suite.published_ijcnn1            # continues where an earlier run stopped; 50 minutes in all
    python -m experiments.suite.published_ijcnn1 --table    # all figures of the recorded runs
    python -m experiments.suite.published_ijcnn1 --overview # the tables and verdicts of pages/suite-ijcnn1.md

With --ijcnn1 and the folder that has LIBSVM's files ijcnn1 and ijcnn1.t (also packed, as .bz2) the same is done on
IJCNN1 itself; --workers 8 runs eight algorithms side by side.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from experiments import records
from experiments.suite import tables
from experiments.suite import tuned as suite
from experiments.suite.numpy_algorithms import SIX, Array
from experiments.suite.problems import Case, Ijcnn1, Long

RESULT, IJCNN1 = "suite/published_ijcnn1.json", "suite/real_ijcnn1.json"
BOUND = 12.0
"""The suite's loops of 2022 hold λ within ±12."""
PAPER = {
    "SABA": (0.25, 1.0),
    "SOBA": (4.0, 1.0),
    "AmIGO": (0.125, 10**-0.5),
    "MRBO": (1.0, 10**-1.5),
    "FSLA": (1.0, 10**-0.5),
    "stocBiO": (0.5, 10**-0.5),
}
LATER = {
    "SABA": (0.125, 1.0),
    "SOBA": (1 / 32, 0.01),
    "AmIGO": (0.125, 10**-0.5),
    "MRBO": (0.5, 10**-1.5),
    "FSLA": (1 / 32, 0.01),
    "stocBiO": (0.125, 1.0),
}
"""The step and the ratio of each algorithm."""


@dataclass(frozen=True)
class Run:
    """Settings, how long they run with which seeds, and the seed of the start (none: zero)."""

    best: dict[str, tuple[float, float]]
    seconds: float = 30.0
    seeds: tuple[int, ...] = (0, 1, 2)
    start: int | None = None


RUNS = {"paper": Run(PAPER), "later": Run(LATER), "tenfold": Run(PAPER, 300.0, (0,), start=2442)}
STATEMENTS = {
    "SABA is best": ("SABA",),
    "SABA goes lower than SOBA and sooner": ("SABA", "SOBA"),
    "AmIGO and SABA reach the lowest values, SABA much sooner": ("SABA", "AmIGO"),
    "SABA is the only single-loop method to go below 1e-3": ("SABA", "SOBA", "FSLA", "MRBO"),
    "SOBA is the first to reach its best value, which is the highest of all": ("SOBA",),
}
"""What is stated, and the algorithms of which the rule of its verdict says something."""


def main(folder: str = "", workers: int = 1) -> None:
    """Run what the file of the results does not hold yet; on IJCNN1 where ``folder`` has it."""
    path = records.RESULTS / (IJCNN1 if folder else RESULT)
    record: dict[str, Any] = {"runs": {}}
    if path.exists():
        record = {"runs": json.loads(path.read_text("utf-8"))["runs"]}
    case = Ijcnn1(folder).case() if folder else Long().case()
    missing = []
    for which, run in RUNS.items():
        plan = json.loads(json.dumps({**asdict(run), "batch": 64, "bound": BOUND}))
        if record["runs"].get(which, {}).get("settings") != plan:
            record["runs"][which] = {"settings": plan, "problems": {"long": {}}}
        missing += [(which, name) for name in run.best if name not in record["runs"][which]["problems"]["long"]]
    missing.sort(key=lambda task: -RUNS[task[0]].seconds)  # the longest first
    with multiprocessing.get_context("fork").Pool(workers) if workers > 1 else nullcontext() as pool:
        one = partial(_one, case)
        for which, name, found in map(one, missing) if pool is None else pool.imap_unordered(one, missing):
            record["runs"][which]["problems"]["long"][name] = found
            records.write_result(path, record)
            print(which, name, tables.last_values(found["runs"], "suboptimality"), flush=True)


def _one(case: Case, task: tuple[str, str]) -> tuple[str, str, dict[str, Any]]:
    which, name = task
    return which, name, of_algorithm(case, name, RUNS[which].best[name], RUNS[which])


def start(seed: int, features: int) -> tuple[Array, Array]:
    """Where the suite starts: θ normal, λ the logarithm of uniform numbers, by its seed (2442 there)."""
    generator = np.random.RandomState(seed)
    return generator.randn(features), np.log(generator.rand(features))


def of_algorithm(case: Case, name: str, setting: tuple[float, float], run: Run) -> dict[str, Any]:
    """What is recorded of an algorithm, in the form of the other results."""
    origin = None if run.start is None else start(run.start, case.inner[0].shape[1])
    make = partial(suite.by_loop, bound=BOUND, origin=origin)
    found = [suite.run(case, name, *setting, seed, run.seconds, make=make) for seed in run.seeds]
    row = {"step": setting[0], "ratio": setting[1], "failed": [x["failed"] for x in found]}
    return {**row, "runs": [tables.columns(x["curve"]) for x in found]}


# --- verdicts ----------------------------------------------------------------------------------------------


def median_of(found: dict[str, Any]) -> tuple[list[float], list[float]]:
    """An algorithm's median at every time of one of its runs."""
    times = sorted({x for run in found["runs"] for x in json.loads(run["seconds"])})
    return times, tables.curve(found["runs"], "seconds", "suboptimality", times)


def verdicts(record: dict[str, Any], problem: str = "long") -> list[tuple[bool, bool] | None]:
    """For each statement, whether its two parts hold, by the rules of its page in docs; times are told by marks.

    None where one of the algorithms that the statement is about diverged.
    """
    rows = {row["name"]: row for row in tables.summary(record, problem)}
    medians = {name: median_of(record["problems"][problem][name]) for name in SIX}
    order = [name for name in rows if name in SIX]  # the published six, the lowest at the end first
    diverged = {name for name in order if math.isinf(rows[name]["end"])}
    others = [name for name in order if name != "SOBA" and name not in diverged]

    def mark(seconds: float) -> float:
        return round(25 * seconds / record["settings"]["seconds"]) if math.isfinite(seconds) else math.inf

    def arrival(name: str, level: float) -> float:
        """The mark at which a median is first at ``level`` or below."""
        return mark(next((t for t, x in zip(*medians[name], strict=True) if x <= level), math.inf))

    def alone(below: dict[str, bool]) -> bool:
        """SABA goes below 1e-3, the other single-loop methods do not."""
        return below["SABA"] and not any(below[name] for name in ("SOBA", "FSLA", "MRBO"))

    soba, amigo = (min(medians[name][1]) for name in ("SOBA", "AmIGO"))
    settled = {name: mark(rows[name]["settled"]) for name in order}
    found = [
        (order[0] == "SABA", all(rows["SABA"]["equal"] <= rows[name]["equal"] for name in order)),
        (rows["SABA"]["end"] < rows["SOBA"]["end"], arrival("SABA", soba) < arrival("SOBA", soba)),
        (set(order[:2]) == {"SABA", "AmIGO"}, arrival("SABA", amigo) <= arrival("AmIGO", amigo) / 2),
        (
            alone({name: math.isfinite(arrival(name, tables.FIGURES[problem][1])) for name in order}),
            alone({name: math.isfinite(rows[name]["below"]) for name in order}),
        ),
        (
            all(settled["SOBA"] < settled[name] for name in others),
            all(rows["SOBA"]["least"] > rows[name]["least"] for name in others),
        ),
    ]
    return [None if diverged & set(names) else x for x, names in zip(found, STATEMENTS.values(), strict=True)]


def table(record: dict[str, Any]) -> str:
    """A table for each run of a record."""
    return "\n\n".join(tables.table(run).strip() for run in record["runs"].values())


TUNED = {"sized": suite.SIZED, "long": suite.LONG, "digits": suite.DIGITS, "covtype": suite.COVTYPE}


def overview() -> str:
    """On IJCNN1, on data of its size with the same settings, and with settings tuned here: the verdicts, and how far
    each algorithm came.
    """

    def read(name: str) -> dict[str, Any]:
        return dict(json.loads((records.RESULTS / name).read_text("utf-8")))

    real, made = (
        {f"{which}{of}": (run, "long") for which, run in read(file)["runs"].items()}
        for of, file in ((" (IJCNN1)", IJCNN1), (" (made up)", RESULT))
    )
    tuned = {problem: (read(file), problem) for problem, file in TUNED.items()}
    blocks = []
    for shown in (real, made, tuned):
        found = {column: verdicts(*of) for column, of in shown.items()}
        lines = [[said, *(tables.word(x[i]) for x in found.values())] for i, said in enumerate(STATEMENTS)]
        blocks += [records.markdown(["stated", *found], lines), tables.ends(shown)]
    small = {problem: (read(suite.RESULT), problem) for problem in ("logistic", "cleaning")}
    return "\n\n".join([*blocks, tables.ends(small)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The suite's own best settings for IJCNN1, on data of its size.")
    parser.add_argument("--table", action="store_true", help="print the tables of an earlier run")
    parser.add_argument("--overview", action="store_true", help="print the tables of pages/suite-ijcnn1.md")
    parser.add_argument("--ijcnn1", default="", metavar="FOLDER", help="run on IJCNN1, from this folder")
    parser.add_argument("--workers", type=int, default=1, help="runs side by side, one core each; default: 1")
    torch.set_num_threads(1)
    arguments = parser.parse_args()
    if arguments.overview:
        print(overview())
    elif arguments.table:
        result = IJCNN1 if arguments.ijcnn1 else RESULT
        print(table(json.loads((records.RESULTS / result).read_text("utf-8"))))
    else:
        main(arguments.ijcnn1, arguments.workers)
