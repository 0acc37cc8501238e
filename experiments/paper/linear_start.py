"""Figure 6, the cell that is not recorded at full length (all rows, damping 1e-10): its first 100 outer steps.

With a batch of all rows a step takes seconds on a CPU, so that 1000 steps of twelve runs are out of reach there. 100
steps with and without averaging show what the cell looks like: in the recorded cells with all rows, every run had its
lowest held-out loss within 80 steps. They decide nothing, because the rule asks for 1000. The first run repeats one
that is recorded from a GPU.

    python -m experiments.paper.linear_start            # continues an earlier run
    python -m experiments.paper.linear_start --table
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from experiments import records
from experiments.paper import cleaning, datasets, linear_length, linear_runs
from experiments.paper.linear_length import RESULT, Contest
from experiments.paper.linear_runs import Task, key, task_of
from experiments.paper.tuning import shown
from experiments.pieces import Lines

START = records.RESULTS / "paper" / "linear-start.jsonl"
STEPS = 100
BETAS = (0.0, 0.9)


def tasks(contest: Contest) -> list[Task]:
    """The recorded run, then those of the missing cell."""
    finals = [
        contest.finals(line, [{"ema": beta}])
        for damping, betas in ((1e-5, BETAS[:1]), (1e-10, BETAS))
        for beta in betas
        for line in contest.lines
        if line.fixed["damping"] == damping and "batch" not in line.fixed
    ]
    return [task._replace(steps=STEPS) for task in (finals[0][0], *finals[1], *finals[2])]


def table(contest: Contest, lines: Lines) -> str:
    """The repeated run beside the recorded one, and test losses at the look with the lowest held-out loss."""
    again, *others = tasks(contest)
    done = {key(task_of(row)): row for row in lines.rows}
    curves = [done[key(again)]["curve"], contest.done[key(again._replace(steps=contest.plan.steps))]["curve"]]
    ours, theirs = (dict(zip(x["step"], x["test_loss"], strict=True)) for x in curves)
    told = [f"{loss:.4f} ({theirs[step]:.4f}) at step {step:.0f}" for step, loss in ours.items() if step in theirs]
    parts = [f"- damping 1e-5, seed 1, test loss (from a GPU): {', '.join(told)}"]
    for beta in BETAS:
        best = [done[key(task)]["best"] for task in others if task.setting["ema"] == beta]
        losses, steps = shown([x["test_loss"] for x in best]), ", ".join(f"{x['step']:.0f}" for x in best)
        parts.append(f"- damping 1e-10, β = {beta:g}: {losses}, where held-out rows are best: steps {steps} of {STEPS}")
    return "\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Run what is not recorded yet, or show what is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the recorded runs")
    parser.add_argument("--out", type=Path, default=START, help="file of the runs; finished ones are not repeated")
    parser.add_argument("--data", type=Path, default=None, help="folder with mnist/")
    options = parser.parse_args(arguments)
    contest, lines = Contest(Lines(RESULT).rows, lines=linear_length.averages()), Lines(options.out)
    if options.table:
        print(table(contest, lines))
        return
    torch.set_float32_matmul_precision("highest")
    images, done = datasets.mnist(options.data), {key(task_of(row)) for row in lines.rows}
    for task in (task for task in tasks(contest) if key(task) not in done):
        begin = time.perf_counter()
        split = cleaning.noisy_split(images, (linear_length.ROWS, 5000, 5000), task.seed, scaling="one")
        found = linear_runs.run(task, split)
        lines.append({**found, "seconds": round(time.perf_counter() - begin, 2), "device": "cpu"})
        print(task.setting, task.seed, found["best"], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
