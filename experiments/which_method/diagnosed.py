"""Is the advice of ``hk.diagnose`` worth something? What it says of the ten problems, beside what was best on record.

Every problem is diagnosed where λ begins to move, and after 30 steps of λ with the identity. δ is 1/(steps · rate) for
the steps of θ before λ moves.

    python -m experiments.which_method.diagnosed            # 3.5 processor-minutes, continues where it stopped
    python -m experiments.which_method.diagnosed --table    # the recorded answers
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

import hyperkron as hk
from experiments import records
from experiments.pieces import Lines
from experiments.which_method.compare import START, started
from experiments.which_method.methods import INNER
from experiments.which_method.page import TAKE
from experiments.which_method.problems import PROBLEMS, RATE, Task, digits
from hyperkron.attribution import training_damping

RESULT = records.RESULTS / "which_method_diagnosed.jsonl"
SEEDS = (1, 2, 3, 4, 5)
LOOKS = (0, 30)
"""Steps of λ after which a problem is diagnosed."""


DAMPING = training_damping([RATE] * START)


def looks(task: Task, seed: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """At each of ``LOOKS``: the steps of λ, and problem, model, hyper, inner and outer batch after them."""
    model, hyper, inner, outer = started(task, seed)
    made = hk.fit(
        task.problem,
        model,
        hyper,
        hk.AID(hk.identity(), INNER),
        inner,
        outer,
        steps=0,
        inner_optimizer=torch.optim.SGD(model.parameters(), RATE),
        outer_optimizer=torch.optim.Adam(hyper.parameters(), lr=0.03),
        projection=task.projection,
        seed=None,
    )
    for look in LOOKS:
        made.advance(look - made.state.step)
        yield look, (task.problem, model, hyper, inner, outer)


def diagnoses(
    problem: str, seed: int, data: Path | None = None, damping: float = DAMPING
) -> Iterator[hk.hypergradient.Diagnosis]:
    """What is said of a problem, at each of ``LOOKS``."""
    parts = digits(seed, data)
    torch.manual_seed(seed)
    task = PROBLEMS[problem](parts)
    for _, given in looks(task, seed):
        yield hk.diagnose(*given, damping=damping)


def rows_of(problem: str, seed: int, data: Path | None = None) -> Iterator[dict[str, Any]]:
    """The same as rows of the record."""
    for look, found in zip(LOOKS, diagnoses(problem, seed, data), strict=True):
        yield {
            "problem": problem,
            "seed": seed,
            "look": look,
            "converged": found.converged,
            "method": found.method,
            "damping": found.damping,
            "newton": None if math.isnan(found.newton) else found.newton,
            "cosines": {row.name: None if math.isnan(row.cosine) else row.cosine for row in found.rows},
        }


def table(rows: list[dict[str, Any]]) -> str:
    """What was said at each look, beside what was best on record; the last lines count."""
    lines, right, most = [], [0] * len(LOOKS), [0] * len(LOOKS)
    asked = len(rows) // len(LOOKS)
    for problem, take in TAKE.items():
        wanted = not take.startswith("`hk.identity")
        cosines, advised, methods, dampings = [], [], [], []
        for i, look in enumerate(LOOKS):
            here = [row for row in rows if row["problem"] == problem and row["look"] == look]
            count = sum(row["method"] not in (None, "hk.identity()") for row in here)
            agree = count if wanted else sum(row["method"] == "hk.identity()" for row in here)
            right[i] += agree
            most[i] += 2 * agree > len(here)
            cosines.append(f"{statistics.mean(row['cosines']['hk.identity()'] for row in here):.2f}")
            advised.append(str(count))
            methods.append(f"`{_usual(row['method'] for row in here)}`")
            dampings.append(_usual(f"{row['damping']:g}" for row in here))
        shown = (", ".join(x) for x in (cosines, advised, methods, dampings))
        lines.append([problem, *shown, take.partition(":")[0]])
    columns = ["λ", "cosine of identity", "curvature advised", "most often advised", "best δ of KFAC", "on record"]
    wants = sum(not take.startswith("`hk.identity") for take in TAKE.values())
    told = [
        f"After {look} steps of λ {right[i]} of {asked} answers agree with the record on whether to use curvature; "
        f"most seeds agree in {most[i]} of {len(TAKE)} problems."
        for i, look in enumerate(LOOKS)
    ]
    always = f"The answer 'always curvature' agrees in {wants} of {len(TAKE)} problems."
    return "\n".join([records.markdown(columns, lines), "", *told, always])


def _usual(values: Iterable[str]) -> str:
    return Counter(values).most_common(1)[0][0]


def main(arguments: list[str] | None = None) -> None:
    """Diagnose what is not recorded yet, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the tables of the recorded answers")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the answers; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with digits.npz, where scikit-learn is missing")
    parser.add_argument("--show", choices=list(PROBLEMS), help="print the whole diagnosis of a problem, seed 1")
    parser.add_argument("--damping", type=float, default=DAMPING, help=f"δ with --show; default: {DAMPING:.3g}")
    options = parser.parse_args(arguments)
    lines = Lines(options.out)
    if options.table:
        print(table(lines.rows))
        return
    torch.set_num_threads(1)
    if options.show:
        print(next(diagnoses(options.show, 1, options.data, options.damping)))
        return
    done = {(row["problem"], row["seed"], row["look"]) for row in lines.rows}
    for problem in PROBLEMS:
        for seed in SEEDS:
            if any((problem, seed, look) not in done for look in LOOKS):
                for row in rows_of(problem, seed, options.data):
                    lines.append(row)
                print(f"{problem}, seed {seed}", flush=True)


if __name__ == "__main__":
    main()
