"""Experiment 8: unrolling one step is the identity in place of H, unrolling for ever is H itself (appendix C).

A softmax regression with example weights, in double precision, at its inner minimum θ*. With θ⁰ = θ*,

    T = 1:     dΦ_1/dλ = −η ∂²_λθ J_in ∂_θ J_out                      the implicit formula with A = I/η
    T → ∞:     dΦ_T/dλ → −∂²_λθ J_in H⁻¹ ∂_θ J_out                    the implicit formula itself
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.paper import plots
from experiments.paper.cleaning import made_up, noisy_split, problem
from experiments.paper.recipe import Job, Judgement, Recipe, Result, Table, Verdict
from hyperkron.hyper import SampleWeights
from hyperkron.hypergradient import Hypergradient, cg, ekfac, identity, kfac, one_step, unrolled
from hyperkron.hypergradient.steps import SGD
from hyperkron.losses import as_loss
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class Settings:
    """The size of the problem, the steps that are unrolled, their size, and the damping of KFAC."""

    examples: int = 200
    features: int = 10
    decay: float = 0.01
    steps: tuple[int, ...] = (1, 3, 10, 30, 100, 300)
    rate: float = 0.5
    damping: float = 1e-3


def _minimum(objective: Any, model: nn.Module, tolerance: float = 1e-12) -> None:
    """Move the model to the inner minimum by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, tolerance_grad=tolerance, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = as_loss(objective(model)).value
        value.backward()
        return value

    optimizer.step(closure)
    size = max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    if size > 1e-8:
        raise HyperkronError(f"the inner minimum was not found: the gradient is still {size:.1g}; raise decay.")


def distances(settings: Settings, seed: int) -> dict[str, Any]:
    """Relative distances to the exact hypergradient, as they are and after the best scale."""
    data = made_up((settings.features,), settings.examples + 200, 10, seed)
    split = noisy_split(data, (settings.examples, 100, 100), seed)
    x, y = split.train[0].double(), split.train[1]
    outer = (split.validation[0].double(), split.validation[1])
    model, weights = nn.Linear(settings.features, 10, dtype=x.dtype), SampleWeights(len(x)).double()
    for p in model.parameters():
        nn.init.zeros_(p)
    levels, batch = problem(settings.decay), (x, y, torch.arange(len(x)))
    _minimum(lambda m: levels.inner(m, weights, batch), model)

    def of(method: Hypergradient) -> Tensor:
        return method.compute(levels, model, weights, batch, outer).grads["weight"]

    exact = of(cg(2000, 0.0, tolerance=1e-13, cross="reverse"))

    def distance(v: Tensor, scaled: bool = False) -> float:
        scale = float((v @ exact) / (v @ v)) if scaled else 1.0
        return float((scale * v - exact).norm() / exact.norm())

    single = of(one_step(settings.rate))
    plain = of(identity(settings.rate, cross="reverse"))
    methods: Mapping[str, Hypergradient] = {
        "identity": identity(cross="reverse"),
        "KFAC": kfac(settings.damping, cross="reverse", seed=seed),
        "EKFAC": ekfac(settings.damping, cross="reverse", seed=seed),
        "CG-3": cg(3, settings.damping, cross="reverse"),
    }
    return {
        "one step": float((single - plain).norm() / plain.norm()),
        "unrolled": [distance(of(unrolled(t, SGD(settings.rate)))) for t in settings.steps],
        "methods": {name: distance(of(method), scaled=True) for name, method in methods.items()},
    }


def work(job: Job) -> dict[str, Any]:
    """The mean over seeds of every distance."""
    settings: Settings = job.settings
    cells = [job.cell([seed], lambda s=seed: distances(settings, s)) for seed in job.seeds]  # type: ignore[misc]
    return {
        "steps": list(settings.steps),
        "one step": max(cell["one step"] for cell in cells),
        "unrolled": [statistics.fmean(column) for column in zip(*(cell["unrolled"] for cell in cells), strict=True)],
        "methods": {name: statistics.fmean(cell["methods"][name] for cell in cells) for name in cells[0]["methods"]},
    }


def verdict(result: Result) -> Judgement:
    """Reproduced: one unrolled step equals the identity's hypergradient to 1e-6, the distance of T unrolled steps to
    the exact one falls with T to at most 1e-3, and KFAC's direction is nearer to the exact one than the identity's. In
    trend: all but the last. Not reproduced: otherwise.
    """
    figures = result.figures
    far, ways = figures["unrolled"], figures["methods"]
    limits = figures["one step"] <= 1e-6 and far[-1] <= 1e-3 and all(a > b for a, b in pairwise(far))
    text = (
        f"One step differs from the identity by {figures['one step']:.1g}; the distance to the exact hypergradient "
        f"falls from {far[0]:.2g} at T = {figures['steps'][0]} to {far[-1]:.2g} at T = {figures['steps'][-1]}; after "
        f"the best scale it is {ways['identity']:.2g} for the identity and {ways['KFAC']:.2g} for KFAC."
    )
    if limits and ways["KFAC"] < ways["identity"]:
        return Judgement(Verdict.REPRODUCED, text)
    return Judgement(Verdict.TREND if limits else Verdict.FAILED, text)


def tables(result: Result | None) -> list[Table]:
    """The paper gives an equation; the distances are ours."""
    if result is None:
        return []
    figures = result.figures
    rows = [[f"unrolled, T = {t}", f"{x:.2e}", "–"] for t, x in zip(figures["steps"], figures["unrolled"], strict=True)]
    rows += [[name, "–", f"{x:.2e}"] for name, x in figures["methods"].items()]
    return [Table("Relative distance to the exact hypergradient at θ*", ["method", "as it is", "best scale"], rows)]


def plot(result: Result, folder: Path) -> list[Path]:
    """The distance by unrolled steps, with the other methods as lines."""
    figures = result.figures

    def fill(axes: Any) -> None:
        lines = {"unrolled": (figures["steps"], figures["unrolled"])}
        plots.curves(axes[0], lines, "T", "relative distance", log_x=True, log_y=True, level=figures["methods"])
        axes[0].legend(fontsize=7)

    return [plots.draw(folder / "unrolling.svg", 1, fill)]


RECIPES = (
    Recipe(
        name="unrolling",
        title="One step is the identity, infinite unrolling is the implicit hypergradient",
        place="Appendix C",
        experiment=8,
        settings={
            "smoke": Settings(),
            "small": Settings(1000, 20, steps=(1, 3, 10, 30, 100, 300, 1000)),
            "paper": Settings(1000, 20, steps=(1, 3, 10, 30, 100, 300, 1000)),
        },
        work=work,
        verdict=verdict,
        tables=tables,
        plot=plot,
        note="The appendix is a derivation; here it is checked numerically on a softmax regression with noisy labels.",
        judged=("smoke", "small", "paper"),
        seeds={"smoke": 1, "small": 5, "paper": 5},
    ),
)
