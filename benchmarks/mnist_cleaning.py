"""MNIST hypercleaning: does KFAC in place of the solver of AID, AmIGO and MRBO reach the same test loss sooner?

Half of the training labels are drawn anew, uniformly. λ is one weight for every training example, θ a linear model:

    J_in = mean(clip(λ_n) · CE) + 0.001 ‖θ‖² on the noisy part ,      J_out = mean CE on the first validation part

Every method is tuned by the same number of trials (step sizes of θ and λ, and one number of its solver: damping, or the
step of its iteration), each of full length, on the *second* validation part. The chosen setting runs with every seed, a
method and its KFAC version taking turns every few steps, so that whatever slows the machine slows both; the quicker of
the two then goes on until it has used as much CPU time as the other. Only in these runs is the test part looked at,
outside the clock.

    python benchmarks/mnist_cleaning.py             # half an hour on two cores; continues where an earlier run stopped
    python benchmarks/mnist_cleaning.py --table     # the tables of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.data import mnist

RESULT = "mnist_cleaning.json"
KEYS = ("settings", "tuned", "curves", "verdicts", "diagnosis")
PAIRS = (
    ("AID-CG", "AID-KFAC"),
    ("AmIGO", "AmIGO-KFAC"),
    ("MRBO", "MRBO-KFAC"),
    ("AID-CG", "AmIGO-PCG"),
    ("AmIGO", "AmIGO-PCG"),
)
DAMPINGS = (1e-2, 1e-1, 1.0, 10.0)
STEPS = (0.01, 0.03, 0.1, 0.3)
SOLVER = {
    "AID-CG": ("damping", DAMPINGS),
    "AID-KFAC": ("damping", DAMPINGS),
    "AmIGO": ("step of v", STEPS),
    "AmIGO-KFAC": ("damping", DAMPINGS),
    "MRBO": ("step of the series", STEPS),
    "MRBO-KFAC": ("damping", DAMPINGS),
    "AmIGO-PCG": ("damping", DAMPINGS),
}

# --- the problem -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Standardised images and labels; the training labels are partly wrong, ``clean`` says which are right."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    second: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    clean: Tensor


def noisy_mnist(folder: str | Path, counts: tuple[int, int, int], noise: float = 0.5, seed: int = 0) -> Split:
    """MNIST's training part cut at random into training, validation and second validation; noise in the first."""
    data = mnist(folder)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(data.images), generator=generator)[: sum(counts)].split(list(counts))
    labels = data.labels[order[0]].clone()
    again = torch.rand(len(labels), generator=generator) < noise
    labels[again] = torch.randint(10, (int(again.sum()),), generator=generator)
    mean, deviation = data.images[order[0]].mean(0), data.images[order[0]].std(0)
    scale = torch.where(deviation > 0, 1 / deviation.clamp(min=1e-12), torch.zeros_like(deviation))

    def standard(x: Tensor) -> Tensor:
        return ((x - mean) * scale).clamp(-10, 10)

    parts = [(standard(data.images[i]), data.labels[i]) for i in order]
    test = (standard(data.test_images), data.test_labels)
    return Split((parts[0][0], labels), parts[1], parts[2], test, labels == data.labels[order[0]])


def cleaning(decay: float = 1e-3) -> hk.BilevelProblem:
    """The two objectives."""

    def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y, index = batch
        return hk.losses.cross_entropy(model(x), y, weight=weights(index)) + hk.losses.l2(model, decay)

    def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        x, y = batch
        return hk.losses.cross_entropy(model(x), y)

    return hk.BilevelProblem(inner, outer)


def loss_and_error(model: nn.Module, part: tuple[Tensor, Tensor]) -> tuple[float, float]:
    with torch.no_grad():
        output = model(part[0])
        wrong = (output.argmax(1) != part[1]).double().mean()
        return float(nn.functional.cross_entropy(output, part[1])), float(wrong)


# --- the methods -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is tuned: the step sizes of θ and λ, and the number of the solver."""

    inner: float
    outer: float
    solver: float


def algorithm(name: str, setting: Setting, seed: int, refresh: int) -> hk.Algorithm:
    rates: dict[str, Any] = {"inner_rate": setting.inner, "outer_rate": setting.outer, "seed": seed}
    falling = rates | {k: hk.Rate(rates[k], 1 / 3) for k in ("inner_rate", "outer_rate")}
    kfac = hk.kfac(setting.solver, refresh_every=refresh, seed=seed) if name.endswith("KFAC") else None
    if name == "AID-CG":
        return hk.AID(hk.cg(3, setting.solver), **rates)
    if name == "AID-KFAC":
        return hk.AID(kfac, **rates)
    if name == "AmIGO":
        return hk.AmIGO(linear_rate=setting.solver, **rates)
    if name == "AmIGO-KFAC":
        return hk.AmIGO(hypergradient=kfac, **rates)
    if name == "AmIGO-PCG":  # KFAC not in place of the solve, but of its many steps: one, from the last solution
        near = hk.KFAC(setting.solver, refresh_every=refresh, seed=seed)
        exact = hk.Hessian(setting.solver)
        step = hk.pcg(1, curvature=exact, preconditioner=near, tolerance=0.0, warm_start=True)
        return hk.AmIGO(hypergradient=step, **rates)
    if name == "MRBO":
        return hk.MRBO(hk.StochasticNeumann(10, setting.solver), **falling)
    return hk.MRBO(kfac, **falling)


@dataclass
class Trial:
    """One run of one method that can be advanced a few steps at a time, with its own clock."""

    name: str
    setting: Setting
    split: Split
    batch: int
    seed: int
    refresh: int = 5

    def __post_init__(self) -> None:
        x, y = self.split.train
        self.model = nn.Linear(x.shape[1], 10)
        self.weights = hk.SampleWeights(len(x))
        self._pretrain()
        self.algorithm = algorithm(self.name, self.setting, self.seed, self.refresh)
        self.state = self.algorithm.init(cleaning(), self.model, self.weights, project=hk.Box(0.0, 1.0))
        inner = hk.Examples(x, y, torch.arange(len(x)), batch_size=self.batch, seed=self.seed)
        self.draw = hk.Draw(inner, hk.Examples(*self.split.validation, batch_size=self.batch, seed=self.seed + 1))
        self.seconds = self.cpu = 0.0
        self.curve: list[dict[str, float]] = []
        self.failed = False

    def _pretrain(self) -> None:
        """θ of every method starts at the same point: a few passes over noisy training and validation data."""
        nn.init.zeros_(self.model.weight)
        nn.init.zeros_(self.model.bias)
        x, y = (torch.cat(pair) for pair in zip(self.split.train, self.split.validation, strict=True))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for i in torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(self.batch) * 2:
            optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x[i]), y[i]).backward()
            optimizer.step()

    def advance(self, steps: int) -> None:
        """``steps`` more steps, on the clock."""
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            for _ in range(0 if self.failed else steps):
                self.algorithm.step(self.state, self.draw)
        except hk.HyperkronError:
            self.failed = True
        self.seconds += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    def look(self, **parts: tuple[Tensor, Tensor]) -> None:
        """Add a row to the curve, off the clock."""
        row = {"step": self.state.step, "seconds": self.seconds, "cpu": self.cpu}
        for name, part in parts.items():
            found = (math.inf, 1.0) if self.failed else loss_and_error(self.model, part)
            row[f"{name}_loss"], row[f"{name}_error"] = (x if math.isfinite(x) else 1e9 for x in found)
        self.curve.append(row)


# --- tuning and the comparison -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    counts: tuple[int, int, int] = (10_000, 5_000, 5_000)
    batch: int = 2_000
    iterations: int = 100
    single_loop_iterations: int = 160
    inner: tuple[float, ...] = (0.1, 0.2)
    outer: tuple[float, ...] = (3e2, 1e3, 3e3, 1e4)
    seeds: tuple[int, ...] = (4, 5, 6)
    block: int = 4
    refresh: int = 5

    def steps(self, name: str) -> int:
        """MRBO moves θ once an iteration, the others ten times."""
        return self.single_loop_iterations if name.startswith("MRBO") else self.iterations


def trial(name: str, setting: Setting, split: Split, plan: Plan, steps: int) -> float:
    """The lowest loss on the second validation part within ``steps``."""
    run = Trial(name, setting, split, plan.batch, 0, plan.refresh)
    for done in range(0, steps, plan.block):
        run.advance(min(plan.block, steps - done))
        run.look(second=split.second)
    return min(row["second_loss"] for row in run.curve)


def tune(name: str, split: Split, plan: Plan, workers: int) -> dict[str, Any]:
    """The setting with the lowest loss on the second validation part, and every trial that led to it."""
    settings = [Setting(*x) for x in product(plan.inner, plan.outer, SOLVER[name][1])]
    run = partial(trial, name, split=split, plan=plan, steps=plan.steps(name))
    with multiprocessing.get_context("spawn").Pool(workers, torch.set_num_threads, (1,)) as pool:
        losses = pool.map(run, settings, chunksize=1)
    order = sorted(zip(losses, range(len(settings)), settings, strict=True))
    return {
        "setting": asdict(order[0][2]),
        "second_loss": order[0][0],
        "trials": [asdict(x) | {"second_loss": loss} for loss, _, x in order],
    }


def compete(pair: tuple[str, str], tuned: dict[str, Any], split: Split, seed: int, plan: Plan) -> dict[str, Any]:
    """Both methods of a pair, in turns, for the same iterations; the quicker one then goes on for the same CPU time."""
    runs = [Trial(n, Setting(**tuned[n]["setting"]), split, plan.batch, seed, plan.refresh) for n in pair]
    for block in range(plan.steps(pair[0]) // plan.block):
        for run in runs[:: 1 if block % 2 == 0 else -1]:
            run.advance(plan.block)
            run.look(test=split.test, second=split.second)
    quick, slow = sorted(runs, key=lambda run: run.cpu)
    while quick.cpu < slow.cpu and not quick.failed:
        quick.advance(plan.block)
        quick.look(test=split.test, second=split.second)
    return {run.name: run.curve for run in runs}


def reached(curve: list[dict[str, float]], loss: float) -> dict[str, float] | None:
    """The first row with at most this test loss."""
    return next((row for row in curve if row["test_loss"] <= loss), None)


def verdict(pair: tuple[str, str], curves: dict[str, Any]) -> dict[str, Any]:
    """When the KFAC version is at the original's best test loss, and how much sooner than the original itself.

    The original's best is that of the common iterations; the KFAC version has them, or the same CPU time.
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
        "milliseconds_a_step": 1e3 * own[-1]["cpu"] / own[-1]["step"],
        "kfac_milliseconds_a_step": 1e3 * kfac[-1]["cpu"] / kfac[-1]["step"],
        "kfac_seconds": here and here["seconds"],
        "kfac_step": here and here["step"],
        "same_iterations": here is not None and here["step"] <= common_steps,
    }
    for clock in ("seconds", "cpu"):
        found[f"{clock}_ratio"] = None if here is None else there[clock] / here[clock]
    return found


def diagnose(setting: Setting, split: Split, plan: Plan) -> dict[str, Any]:
    """How near the solvers come to the exact hypergradient (CG to the end) after 20 steps of AID-CG, on one batch.

    The cosine and the ratio of the norms with the exact hypergradient of the full training part, over the batch.
    """
    run = Trial("AID-CG", setting, split, plan.batch, 0)
    run.advance(20)
    x, y = split.train
    index = torch.arange(len(x))
    point = (cleaning(), run.model, run.weights)
    exact = hk.cg(500, tolerance=1e-4).compute(*point, (x, y, index), split.validation)
    part = index[: plan.batch]
    reference = exact.grads["weight"][part]
    methods = {"v = b": hk.identity()}
    methods |= {f"CG, {k} products, damping {d:g}": hk.cg(k, d) for k in (3, 10) for d in (0.0, 0.1)}
    methods |= {f"KFAC, damping {d:g}": hk.kfac(d) for d in (1e-3, *DAMPINGS)}
    methods |= {f"EKFAC, damping {d:g}": hk.ekfac(d) for d in (1e-3, *DAMPINGS[:2])}
    found: dict[str, Any] = {"exact": {"products": exact.stats["products"]}}
    for name, method in methods.items():
        begin = time.process_time()
        grads = method.compute(*point, (x[part], y[part], part), split.validation).grads["weight"][part]
        spent = time.process_time() - begin
        scale = len(part) / len(x)  # the batch's mean has a smaller divisor
        found[name] = {
            "cosine": float(nn.functional.cosine_similarity(grads, reference, dim=0)),
            "norm": float(grads.norm() / reference.norm()) * scale,
            "milliseconds": 1e3 * spent,
        }
    return found


def load(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What an earlier run with the same settings has already found."""
    if path.exists():
        record = json.loads(path.read_text("utf-8"))
        if record.get("settings") == json.loads(json.dumps(settings)):
            return {key: record.get(key, {}) for key in KEYS}
    return {"settings": settings} | {key: {} for key in KEYS[1:]}


def main(folder: str, plan: Plan, path: Path) -> None:
    torch.set_num_threads(1)
    settings = asdict(plan) | {"noise": 0.5, "decay": 1e-3, "tuning_seed": 0, "solver": SOLVER}
    record = load(path, settings)
    split = noisy_mnist(folder, plan.counts, seed=0)
    for name in SOLVER:
        if name not in record["tuned"]:
            same = {"AmIGO-KFAC": "AID-KFAC"}.get(name, "")  # a direct solve leaves nothing to amortise
            record["tuned"][name] = record["tuned"].get(same) or tune(name, split, plan, workers=2)
            common.write_result(path, record)
            print(name, record["tuned"][name]["setting"], record["tuned"][name]["second_loss"], flush=True)
    if not record["diagnosis"]:
        record["diagnosis"] = diagnose(Setting(**record["tuned"]["AID-CG"]["setting"]), split, plan)
        common.write_result(path, record)
    for seed in plan.seeds:
        split = noisy_mnist(folder, plan.counts, seed=seed)
        for pair in PAIRS:
            name = pair[0] if pair[1].endswith("KFAC") else f"{pair[0]}, {pair[1]}"
            key = f"{name} seed {seed}"
            if key not in record["curves"]:
                record["curves"][key] = _rounded(compete(pair, record["tuned"], split, seed, plan))
                record["verdicts"].setdefault(name, {})[str(seed)] = verdict(pair, record["curves"][key])
                common.write_result(path, record)
                print(key, record["verdicts"][name][str(seed)], flush=True)


def _rounded(curves: dict[str, Any]) -> dict[str, Any]:
    return {name: [{k: round(x, 5) for k, x in row.items()} for row in curve] for name, curve in curves.items()}


# --- the tables --------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = [
        "| method | θ step | λ step | solver | loss on second validation |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, found in record["tuned"].items():
        x = found["setting"]
        solver = f"{SOLVER[name][0]} {x['solver']:g}"
        lines.append(f"| {name} | {x['inner']:g} | {x['outer']:g} | {solver} | {found['second_loss']:.4f} |")
    lines += [
        "",
        "| pair | seed | best test loss | of KFAC | and in the same time | ms a step | of KFAC | steps to the first | "
        "of KFAC | time ratio | CPU ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in record["verdicts"].items():
        for seed, x in rows.items():
            lines.append(
                f"| {name} | {seed} | {x['target']:.4f} | {x['kfac_best']:.4f} | {x['kfac_best_same_time']:.4f} | "
                f"{x['milliseconds_a_step']:.0f} | {x['kfac_milliseconds_a_step']:.0f} | {x['step']} | "
                f"{_or_never(x['kfac_step'], '', 0)} | {_or_never(x['seconds_ratio'], '×')} | "
                f"{_or_never(x['cpu_ratio'], '×')} |"
            )
        medians = (_median([x[f"{clock}_ratio"] for x in rows.values()]) for clock in ("seconds", "cpu"))
        wall, cpu = (_or_never(x, "×") for x in medians)
        lines.append(f"| **{name}** | **median** | | | | | | | | **{wall}** | **{cpu}** |")
    lines += [
        "",
        "| hypergradient | cosine with the exact one | norm, relative | ms |",
        "| --- | --- | --- | --- |",
    ]
    for name, x in record.get("diagnosis", {}).items():
        if name != "exact":
            lines.append(f"| {name} | {x['cosine']:.3f} | {x['norm']:.3f} | {x['milliseconds']:.0f} |")
    return "\n".join(lines)


def _median(ratios: list[float | None]) -> float | None:
    """The median, a run that never got there counting as zero."""
    return statistics.median(x or 0.0 for x in ratios) or None


def _or_never(x: float | None, unit: str, digits: int = 2) -> str:
    return "never" if x is None else f"{x:.{digits}f}{unit}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="MNIST hypercleaning, solvers against KFAC.")
    parser.add_argument("--data", default="data/mnist", help="folder with MNIST's four IDX files")
    parser.add_argument("--table", action="store_true", help="print the tables of an earlier run")
    arguments = parser.parse_args()
    file = common.RESULTS / RESULT
    if arguments.table:
        print(table(json.loads(file.read_text("utf-8"))))
    else:
        main(arguments.data, Plan(), file)
