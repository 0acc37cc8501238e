"""Every model × λ × hypergradient × cross mode against an independent oracle; prints how many are silently wrong.

    python benchmarks/correctness_grid.py [--only TEXT ... --sample N --seed 0 --workers 2 --keep FILE --no-record]

What is right, and to which tolerance, is written in support/grid/cells.py. The exit code is 1 if a cell is silently
wrong or ended in an exception other than a HyperkronError. ``--only`` takes cells whose name, ``model | λ | method``,
contains every TEXT; such a run, and a sample, leave no record. The whole grid writes benchmarks/results/grid.json.
With ``--keep`` what is done is kept in FILE, and the same command continues after an interruption.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import multiprocessing
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

from common import write_result

from grid import cells, special
from grid.cells import BAD, OUTCOMES, Record

Task = tuple[str, str, list[str]]
"""A model, a λ, and the methods."""


def tasks(only: list[str], sample: int | None, seed: int) -> list[Task]:
    """The cells asked for, those of one model and λ together."""
    names = [(m, h, method) for m, h in cells.every_pair() for method in cells.METHODS]
    names += [(special.SPECIAL, case, "") for case in special.CASES]
    names = [name for name in names if all(text in " | ".join(name) for text in only)]
    if sample is not None and sample < len(names):
        names = sorted(random.Random(seed).sample(names, sample), key=names.index)
    groups: dict[tuple[str, str], list[str]] = {}
    for model, hyper, method in names:
        groups.setdefault((model, hyper), []).append(method)
    return [(*pair, methods) for pair, methods in groups.items()]


def work(task: Task) -> tuple[Task, list[Record]]:
    """The records of one model and λ, in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model, hyper, methods = task
    if model == special.SPECIAL:
        return task, [special.run(hyper)]
    torch.compiler.reset()
    return task, cells.run_pair(model, hyper, methods)


def table(records: list[Record], by: str) -> str:
    """How many cells of each outcome, for each model, λ or method."""
    counts: dict[str, collections.Counter[str]] = {}
    for record in records:
        counts.setdefault(getattr(record, by), collections.Counter())[record.outcome] += 1
    counts["all"] = collections.Counter(record.outcome for record in records)
    width = max(map(len, counts))
    lines = ["  ".join([by.ljust(width), *OUTCOMES])]
    for name, count in counts.items():
        lines.append("  ".join([name.ljust(width), *(str(count[o] or "·").rjust(len(o)) for o in OUTCOMES)]))
    return "\n".join(lines)


def reasons(records: list[Record], outcome: str, most: int = 12) -> str:
    """The first sentences of what was said, and how often."""
    said = collections.Counter(record.words.split(";")[0][:110] for record in records if record.outcome == outcome)
    return "\n".join(f"{count:6d}  {words}" for words, count in said.most_common(most))


def describe(record: Record) -> str:
    """One bad cell on one line."""
    errors = ", ".join(f"{what} {record.errors[what]:.1e}" for what in record.failed)
    return f"{record.outcome}: {record.name}: {errors or record.words.splitlines()[0][:120]}"


def main() -> int:
    """Run, print and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="text that a cell's name must contain")
    parser.add_argument("--sample", type=int, help="number of cells, drawn at random")
    parser.add_argument("--keep", type=Path, help="file of the finished cells; they are not repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--list", type=int, default=200, help="how many bad cells to print")
    parser.add_argument("--no-record", action="store_true", help="write no record")
    options = parser.parse_args()
    asked, started = tasks(options.only, options.sample, options.seed), time.time()
    total = sum(len(methods) for *_, methods in asked)
    records = kept(options.keep)
    done = {(record.model, record.hyper) for record in records}
    asked = [task for task in asked if task[:2] not in done]
    context, bar = (
        multiprocessing.get_context("spawn"),
        tqdm(total=total, initial=len(records), unit="cell", desc="grid"),
    )
    with context.Pool(options.workers, maxtasksperchild=40) as pool, bar:
        for (_, _, methods), found in pool.imap_unordered(work, asked):
            records += found
            keep(options.keep, found)
            for record in found:
                if record.bad:
                    bar.write(describe(record))
            bar.update(len(methods))
            bar.set_postfix(bad=sum(record.bad for record in records))
    for by in ("model", "hyper", "method"):
        print(f"\n{table(records, by)}")
    for outcome in (cells.REFUSED, cells.WARNED):
        print(f"\n{outcome}, by what was said:\n{reasons(records, outcome)}")
    bad = sorted((record for record in records if record.bad), key=lambda r: (r.outcome, r.name))
    for record in bad[: options.list]:
        print(describe(record))
    counts = collections.Counter(record.outcome for record in records)
    print(f"\n{len(records)} cells in {time.time() - started:.0f} s; silently wrong: {counts[cells.SILENT]}, ", end="")
    print(f"crashed: {counts[cells.CRASHED]}, oracle in doubt: {counts[cells.DOUBTFUL]}")
    if not (options.only or options.sample or options.no_record):
        record_all(records, counts)
    return 1 if bad else 0


def kept(path: Path | None) -> list[Record]:
    """The cells that an earlier run has finished."""
    lines = path.read_text("utf-8").splitlines() if path is not None and path.exists() else []
    return [Record(**json.loads(line)) for line in lines]


def keep(path: Path | None, found: list[Record]) -> None:
    """Add the cells of one model and λ."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(dataclasses.asdict(record)) + "\n" for record in found))


def record_all(records: list[Record], counts: collections.Counter[str]) -> None:
    """Write benchmarks/results/grid.json."""
    by_model: dict[str, dict[str, int]] = {}
    for record in records:
        row = by_model.setdefault(record.model, dict.fromkeys(OUTCOMES, 0))
        row[record.outcome] += 1
    noted: list[dict[str, Any]] = [dataclasses.asdict(r) for r in records if r.outcome in BAD]
    write_result("grid.json", {"cells": len(records), "outcomes": dict(counts), "models": by_model, "bad": noted})


if __name__ == "__main__":
    sys.exit(main())
