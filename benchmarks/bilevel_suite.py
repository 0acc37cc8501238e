"""Seven stochastic algorithms on the two problems of the benchmark_bilevel suite, at a size for one CPU core.

*logistic*: one penalty for each feature of a logistic regression, J_in = mean loss + ½ Σ_j exp(λ_j) θ_j² on training
data, J_out = mean loss on validation data. The score is the suboptimality h(λ) − h* of the value function, with the
inner problem solved by Newton's method. The data are synthetic (IJCNN1 and covtype must be downloaded): features
of different scales, and validation labels noisier than the training labels, so that the best penalties are finite.

*cleaning*: weights σ(λ_n) of MNIST examples of which half have random labels, J_in = mean(σ(λ) · CE) + 0.2 ‖θ‖²,
λ₀ = −2, θ₀ = 0; the score is the validation loss at (λ, θ), with the test error, which the published figure shows,
beside it.

Every algorithm has its published decay exponents, batches of 64, and the same grid of (step, ratio): θ (and v, and the
Neumann series) move by step, λ by step/ratio. The grid is screened with the first seed for an eighth of the time, the
three best settings run for all of it with every seed, and the one whose median score at the end is lowest is taken.
F2SA is the published suite's (ℓ grows as t^(6/7)); F2SA-paper has the growth of its paper, t^(1/7).

    python benchmarks/bilevel_suite.py             # continues where an earlier run stopped
    python benchmarks/bilevel_suite.py --figure    # docs/figures/bilevel_suite.png
    python benchmarks/bilevel_suite.py --table     # the tables of docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import common
import torch
from mnist_cleaning import loss_and_error, noisy_mnist
from torch import Tensor, nn

import hyperkron as hk

RESULT = "bilevel_suite.json"
FIGURE = common.RESULTS.parent.parent / "docs" / "figures" / "bilevel_suite.png"
NAMES = ("SABA", "SOBA", "AmIGO", "MRBO", "FSLA", "stocBiO", "F2SA", "F2SA-paper")
CALLS = {"SABA": 4, "SOBA": 4, "AmIGO": 22, "MRBO": 26, "FSLA": 7, "stocBiO": 22, "F2SA": 33, "F2SA-paper": 33}
"""Oracle calls on a batch in one step (∂f, ∂g, Hv and X count one each), as in docs/algorithms.md."""
FIGURES = {"logistic": ("suboptimality", 1e-3), "cleaning": ("validation loss", 0.8)}
"""The figure each problem is judged by, and the level the tables say when it is reached."""
FLOOR = 1e-16
"""What a suboptimality within rounding of zero, or below, is written as."""
Scores = dict[str, float]


def algorithm(name: str, step: float, ratio: float, seed: int = 0) -> hk.Algorithm:
    """An algorithm with its published exponents."""
    outer = step / ratio
    if name == "SABA":
        return hk.SABA(inner_rate=step, outer_rate=outer, seed=seed)
    if name in ("SOBA", "FSLA"):
        kind = hk.SOBA if name == "SOBA" else hk.FSLA
        return kind(inner_rate=hk.Rate(step, 1 / 2), outer_rate=hk.Rate(outer, 1 / 2), seed=seed)
    if name == "AmIGO":
        return hk.AmIGO(linear_rate=step, inner_rate=step, outer_rate=outer, seed=seed)
    if name == "stocBiO":
        return hk.StocBiO(step_size=step, inner_rate=step, outer_rate=outer, seed=seed)
    if name == "MRBO":
        series = hk.StochasticNeumann(10, step, seed=seed)
        return hk.MRBO(series, inner_rate=hk.Rate(step, 1 / 3), outer_rate=hk.Rate(outer, 1 / 3), seed=seed)
    if name in ("F2SA", "F2SA-paper"):  # ℓ grows as t^(6/7) in the suite, as t^(1/7) in the paper
        growth = hk.Rate(0.1, 1 / 7 if name == "F2SA" else 6 / 7)
        y, z, hyper = hk.Rate(step, 5 / 7), hk.Rate(step, 4 / 7), hk.Rate(outer, 4 / 7)
        return hk.F2SA(growth=growth, inner_rate=y, second_rate=z, outer_rate=hyper, seed=seed)
    raise ValueError(f"name={name!r} is none of {', '.join(NAMES)}.")


# --- the problems ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A bilevel problem, where it starts, how it is scored, and the grid of its step sizes."""

    name: str
    problem: hk.BilevelProblem
    start: Callable[[], tuple[nn.Module, nn.Module]]
    inner: tuple[Tensor, ...]
    outer: tuple[Tensor, ...]
    score: Callable[[nn.Module, nn.Module], Scores]
    steps: tuple[float, ...]
    ratios: tuple[float, ...]


class Logistic:
    """Regularisation selection on synthetic data, in double precision, with its value function."""

    def __init__(self, features: int = 10, train: int = 1024, validation: int = 512, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def sample(count: int, noise: float) -> tuple[Tensor, Tensor]:
            x = torch.randn(count, features, generator=generator, dtype=torch.float64)
            chance = (1 - noise) * torch.sigmoid(0.9 * x @ signs) + noise / 2
            return x * scales, (torch.rand(count, generator=generator, dtype=x.dtype) < chance).to(x.dtype)

        scales = 3 * torch.logspace(0, -0.5, features, dtype=torch.float64)  # the covariance has condition number 10
        signs = 2 * torch.randint(2, (features,), generator=generator).double() - 1
        self.train, self.validation = sample(train, 0.0), sample(validation, 0.4)

    def case(self) -> Case:
        def loss(model: nn.Module, batch: Any) -> hk.losses.Loss:
            return hk.losses.binary_cross_entropy(model(batch[0]).squeeze(1), batch[1])

        def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
            return loss(model, batch) + hk.losses.l2(model, 0.5 * hyper().exp())

        problem = hk.BilevelProblem(inner, lambda model, hyper, batch: loss(model, batch))
        features = self.train[0].shape[1]
        best = self.value(self.optimum())[0]

        def start() -> tuple[nn.Module, nn.Module]:
            model = nn.Linear(features, 1, bias=False, dtype=torch.float64)
            nn.init.zeros_(model.weight)
            return model, hk.as_hyper(torch.zeros(1, features, dtype=torch.float64))

        def score(model: nn.Module, hyper: nn.Module) -> Scores:
            return {"suboptimality": max(float(self.value(hyper().detach()[0])[0] - best), FLOOR)}

        grid = {"steps": (0.04, 0.1, 0.25, 0.6, 1.5), "ratios": (0.1, 0.03, 0.01, 0.003)}
        return Case("logistic", problem, start, self.train, self.validation, score, **grid)

    def value(self, log_penalty: Tensor) -> tuple[Tensor, Tensor]:
        """h(λ) and its gradient, −exp(λ) θ ⊙ H⁻¹∂f, at the inner minimum found by Newton's method."""
        x, y = self.train
        penalty, theta = log_penalty.exp(), torch.zeros_like(log_penalty)
        for _ in range(100):
            p = torch.sigmoid(x @ theta)
            gradient = x.T @ (p - y) / len(x) + penalty * theta
            hessian = (x.T * (p * (1 - p))) @ x / len(x) + torch.diag(penalty)
            if float(gradient.norm()) < 1e-13:
                break
            theta = theta - torch.linalg.solve(hessian, gradient)
        x, y = self.validation
        output = x @ theta
        b = x.T @ (torch.sigmoid(output) - y) / len(x)
        h = nn.functional.binary_cross_entropy_with_logits(output, y)
        return h, -penalty * theta * torch.linalg.solve(hessian, b)

    def optimum(self) -> Tensor:
        """argmin h, by L-BFGS on exact values and gradients."""
        point = torch.zeros(self.train[0].shape[1], dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [point], max_iter=500, tolerance_grad=1e-9, tolerance_change=0.0, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            h, point.grad = self.value(point.detach())
            return h

        optimizer.step(closure)
        return point.detach()


def cleaning(folder: str | Path, train: int = 2048, validation: int = 1024) -> Case:
    """Hypercleaning of MNIST with a linear model."""
    split = noisy_mnist(folder, (train, validation, 0))

    def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2])) + hk.losses.l2(model, 0.2)

    def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    def start() -> tuple[nn.Module, nn.Module]:
        model = nn.Linear(split.train[0].shape[1], 10, bias=False)
        nn.init.zeros_(model.weight)
        return model, hk.SampleWeights(train, "sigmoid", init=float(torch.sigmoid(torch.tensor(-2.0))))

    def score(model: nn.Module, weights: nn.Module) -> Scores:
        loss, _ = loss_and_error(model, split.validation)
        return {"validation loss": loss, "test error": loss_and_error(model, split.test)[1]}

    data = (*split.train, torch.arange(train))
    problem = hk.BilevelProblem(inner, outer)
    grid = {"steps": (0.015, 0.05, 0.15, 0.3, 0.6, 1.0), "ratios": (1e-3, 1e-4, 1e-5, 1e-6)}
    return Case("cleaning", problem, start, data, split.validation, score, **grid)


# --- running -----------------------------------------------------------------------------------------------


def run(
    case: Case,
    name: str,
    step: float,
    ratio: float,
    seed: int,
    seconds: float,
    points: int = 25,
    now: Callable[[], float] = time.process_time,
) -> dict[str, Any]:
    """One run of ``seconds`` of CPU time; snapshots are scored afterwards, outside the clock.

    CPU time of the one thread is what wall-clock time would be on a machine that nobody else uses.
    """
    model, hyper = case.start()
    method = algorithm(name, step, ratio, seed)
    state = method.init(case.problem, model, hyper)
    inner = hk.Examples(*case.inner, batch_size=64, seed=seed)
    draw = hk.Draw(inner, hk.Examples(*case.outer, batch_size=64, seed=seed + 1000))
    marks = [seconds * (i + 1) / points for i in range(points)]
    found: list[dict[str, Any]] = [{"seconds": 0.0, "steps": 0, "at": _snapshot(state)}]
    clock, failed = 0.0, False
    while marks and not failed:
        begin = now()
        try:
            method.step(state, draw)
        except hk.HyperkronError:
            failed = True
        clock += now() - begin
        if clock >= marks[0]:
            marks = [x for x in marks if x > clock]
            found.append({"seconds": clock, "steps": state.step, "at": _snapshot(state)})
    curve = []
    for row in found:
        state.inner.place(row["at"][0])
        state.outer.place(row["at"][1])
        with torch.no_grad():
            scores = case.score(model, hyper)
        if not all(math.isfinite(x) for x in scores.values()):
            failed = True
            break
        curve.append({"seconds": row["seconds"], "calls": row["steps"] * CALLS[name], **scores})
    return {"failed": failed, "curve": curve}


def _snapshot(state: hk.State) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
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


def tune_and_run(case: Case, name: str, plan: Plan) -> dict[str, Any]:
    """Screen the grid with the first seed, run the best settings with every seed, and keep the best median."""
    first = plan.seeds[0]
    screened = [(*x, final(run(case, name, *x, first, plan.screening, 2))) for x in product(case.steps, case.ratios)]
    screened.sort(key=lambda x: x[2])
    full = []
    for step, ratio, _ in screened[: plan.kept]:
        runs = [run(case, name, step, ratio, seed, plan.seconds) for seed in plan.seeds]
        full.append((step, ratio, statistics.median(final(x) for x in runs), runs))
    step, ratio, _, runs = min(full, key=lambda x: x[2])
    return {
        "step": step,
        "ratio": ratio,
        "grid": json.dumps([[s, r, _plain(x)] for s, r, x in screened]),
        "full": json.dumps([[s, r, _plain(x)] for s, r, x, _ in full]),
        "failed": [x["failed"] for x in runs],
        "runs": [_columns(x["curve"]) for x in runs],
    }


def _plain(x: float) -> float | None:
    return float(f"{x:.4g}") if math.isfinite(x) else None


def _columns(curve: list[dict[str, float]]) -> dict[str, str]:
    """A curve by column, each as one JSON string so that the file stays readable."""
    return {key: json.dumps([float(f"{row[key]:.4g}") for row in curve]) for key in curve[0]}


def main(folder: str, plan: Plan, path: Path, problems: list[str]) -> None:
    torch.set_num_threads(1)
    made: dict[str, Callable[[], Case]] = {"logistic": Logistic().case, "cleaning": lambda: cleaning(folder)}
    settings = {**asdict(plan), "seeds": list(plan.seeds), "batch": 64}
    record: dict[str, Any] = {"settings": settings, "problems": {}}
    if path.exists():
        earlier = json.loads(path.read_text("utf-8"))
        if earlier.get("settings") == settings:
            record["problems"] = earlier["problems"]
    for problem in problems:
        case, done = made[problem](), record["problems"].setdefault(problem, {})
        for name in NAMES:
            if name not in done:
                done[name] = tune_and_run(case, name, plan)
                common.write_result(path, record)
                ends = [json.loads(x[FIGURES[problem][0]])[-1] for x in done[name]["runs"]]
                print(problem, name, done[name]["step"], done[name]["ratio"], ends, flush=True)


# --- tables and the figure ---------------------------------------------------------------------------------


def curve(runs: list[dict[str, str]], axis: str, figure: str, grid: list[float]) -> list[float]:
    """The median over the runs of a figure, each read at the last mark not after ``grid``."""
    found = []
    for run_ in runs:
        at, values = json.loads(run_[axis]), json.loads(run_[figure])
        found.append([values[max(i for i, x in enumerate(at) if x <= g)] for g in grid])
    return [statistics.median(column) for column in zip(*found, strict=True)]


def reach(runs: list[dict[str, str]], axis: str, figure: str, level: float) -> float:
    """The median over the runs of where a figure is first at ``level`` or below; infinite where it never is."""
    found = []
    for run_ in runs:
        pairs = zip(json.loads(run_[axis]), json.loads(run_[figure]), strict=True)
        found.append(next((x for x, value in pairs if value <= level), math.inf))
    return statistics.median(found)


def common_calls(record: dict[str, Any], problem: str) -> int:
    """The oracle calls that every run that did not fail has made: where algorithms are compared at equal calls."""
    found = record["problems"][problem].values()
    pairs = [pair for x in found for pair in zip(x["runs"], x["failed"], strict=True)]
    return int(min(json.loads(run_["calls"])[-1] for run_, failed in pairs if not failed))


def summary(record: dict[str, Any], problem: str) -> list[dict[str, Any]]:
    """One row for each algorithm, the best final median first; a run that failed ends at infinity."""
    figure, level = FIGURES[problem]
    calls, rows = common_calls(record, problem), []
    for name, found in record["problems"][problem].items():
        runs = found["runs"]
        ends = [math.inf if failed else x for x, failed in zip(_ends(runs, figure), found["failed"], strict=True)]
        row = {"name": name, "step": found["step"], "ratio": found["ratio"], "end": statistics.median(ends)}
        row |= {"low": min(ends), "high": max(ends), "steps": statistics.median(_ends(runs, "calls")) / CALLS[name]}
        row |= {axis: reach(runs, axis, figure, level) for axis in ("seconds", "calls")}
        row["equal"] = curve(runs, "calls", figure, [calls])[0]
        if "test error" in runs[0]:
            row["error"] = statistics.median(_ends(runs, "test error"))
        rows.append(row)
    by_calls = sorted(row["equal"] for row in rows)
    return sorted(({**row, "place": by_calls.index(row["equal"]) + 1} for row in rows), key=lambda row: row["end"])


def _ends(runs: list[dict[str, str]], column: str) -> list[float]:
    return [json.loads(x[column])[-1] for x in runs]


def table(record: dict[str, Any]) -> str:
    """The result as Markdown."""
    lines = []
    for problem, (figure, level) in FIGURES.items():
        if problem not in record["problems"]:
            continue
        error = " test error |" if problem == "cleaning" else ""
        heads = f"| rank | algorithm | {figure} at the end (lowest – highest) |{error} at"
        heads += f" {common_calls(record, problem)} calls (rank) | s to {level:g} | calls to {level:g} |"
        heads += " steps | step | ratio |"
        lines += [heads, "| --- " * (heads.count("|") - 1) + "|"]
        for rank, row in enumerate(summary(record, problem), 1):
            seconds, calls = (f"{x:.3g}" if math.isfinite(x) else "–" for x in (row["seconds"], row["calls"]))
            middle = f" {row['error']:.1%} |" if error else ""
            lines.append(
                f"| {rank} | {row['name']} | {_short(row['end'])} ({_short(row['low'])} – {_short(row['high'])}) |"
                f"{middle} {_short(row['equal'])} ({row['place']}) | {seconds} | {calls} | {row['steps']:.0f} | "
                f"{row['step']:g} | {row['ratio']:g} |"
            )
        lines.append("")
    return "\n".join(lines)


def _short(x: float) -> str:
    return "failed" if math.isinf(x) else "0" if x <= FLOOR else f"{x:.3g}"


def draw_figure(record: dict[str, Any], path: Path) -> None:
    """Median curves over time and over oracle calls, one row of panels for each figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [("logistic", "suboptimality", 1e-9, 0.3), ("cleaning", "validation loss", 0.72, 1.1)]
    shown.append(("cleaning", "test error", 0.14, 0.22))
    figure, panels = plt.subplots(3, 2, figsize=(9, 9), constrained_layout=True)
    for row, (problem, label, low, high) in zip(panels, shown, strict=True):
        for panel, axis in zip(row, ("seconds", "calls"), strict=True):
            for i, name in enumerate(NAMES):
                runs = record["problems"][problem][name]["runs"]
                last = statistics.median(_ends(runs, axis))
                grid = [last * k / 100 for k in range(101)]
                style = "-" if name in ("SABA", "SOBA") else "--" if name in ("FSLA", "MRBO") else ":"
                style = "-." if name.startswith("F2SA") else style
                panel.plot(grid, curve(runs, axis, label, grid), style, color=f"C{i}", label=name, lw=1.6)
            panel.set_yscale("log" if problem == "logistic" else "linear")
            panel.set_ylim(low, high)
            panel.set_xlabel("CPU seconds, one thread" if axis == "seconds" else "oracle calls on a batch of 64")
            panel.set_ylabel(r"$h(\lambda) - h^*$" if problem == "logistic" else label)
            panel.set_title({"logistic": "regularisation selection", "cleaning": "hypercleaning of MNIST"}[problem])
    panels[0][0].legend(fontsize=8, ncol=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Stochastic bilevel algorithms on the problems of benchmark_bilevel.")
    parser.add_argument("--data", default="data/mnist", help="folder with MNIST's four IDX files")
    parser.add_argument("--problems", nargs="+", default=list(FIGURES), choices=list(FIGURES))
    parser.add_argument("--table", action="store_true", help="print the tables of an earlier run")
    parser.add_argument("--figure", action="store_true", help="draw the figure of an earlier run")
    arguments = parser.parse_args()
    file = common.RESULTS / RESULT
    if arguments.table:
        print(table(json.loads(file.read_text("utf-8"))))
    elif arguments.figure:
        draw_figure(json.loads(file.read_text("utf-8")), FIGURE)
    else:
        main(arguments.data, Plan(), file, arguments.problems)
