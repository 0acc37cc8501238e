"""What is due to the number of examples: the sized problem of ``tuned.py`` with few of them and with many.

python -m experiments.suite.sample_size    # minutes
"""

from __future__ import annotations

import json
import statistics
from itertools import product
from typing import Any

import numpy as np
import torch

from experiments import records
from experiments.suite import tables
from experiments.suite import tuned as suite
from experiments.suite.numpy_algorithms import SIX, STEPS, Penalties
from experiments.suite.problems import Sized

CONTROL = "suite/sample_size.json"


def median_after(problem: Sized, name: str, step: float, ratio: float, count: int) -> float:
    """The median over three seeds of h − h* after ``count`` steps; infinite where two of them diverge."""
    found = []
    for seed in range(3):
        oracles = Penalties(problem.case(), seed)
        steps = STEPS[name](oracles, step, step / ratio)
        with np.errstate(over="ignore", invalid="ignore"):
            for _ in range(count):
                next(steps)
        h = float(problem.value(torch.from_numpy(oracles.hyper))[0] - problem.best)
        found.append(h if np.isfinite(h) and np.isfinite(oracles.theta).all() else np.inf)
    return statistics.median(found)


def control() -> dict[str, Any]:
    """Data of one kind in two sizes: every setting of the grid for as many steps as the library made in its run."""
    done = json.loads((records.RESULTS / suite.SIZED).read_text("utf-8"))["problems"]["sized"]
    result: dict[str, Any] = {"seeds": [0, 1, 2], "rows": []}
    for sizes in ((1024, 512), (49_990, 91_701)):
        problem = Sized(*sizes)
        for name in SIX:
            calls = statistics.median(json.loads(x["calls"])[-1] for x in done[name]["runs"])
            count = round(calls / tables.CALLS[name])
            grid = list(product(problem.steps, problem.ratios))
            ends = [median_after(problem, name, *setting, count) for setting in grid]
            best = min(range(len(grid)), key=ends.__getitem__)
            row = {"train": sizes[0], "validation": sizes[1], "algorithm": name, "steps": count}
            result["rows"].append({**row, "step": grid[best][0], "ratio": grid[best][1], "suboptimality": ends[best]})
            print(result["rows"][-1], flush=True)
    return result


def table(result: dict[str, Any]) -> str:
    """The result as Markdown: a row for each algorithm, the two sizes side by side."""
    columns = ["algorithm", "steps", "1024 + 512 examples (step, ratio)", "49 990 + 91 701 examples (step, ratio)"]
    lines = []
    for name in SIX:
        few, many = (row for row in result["rows"] if row["algorithm"] == name)
        cells = [f"{x['suboptimality']:.2g} ({x['step']:g}, {x['ratio']:g})" for x in (few, many)]
        lines.append([name, str(few["steps"]), *cells])
    return records.markdown(columns, lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table(json.loads(records.write_result(CONTROL, control()).read_text("utf-8"))))
