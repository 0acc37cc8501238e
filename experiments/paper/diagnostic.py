"""Experiment 1: how far approximate inverses of H are from the exact one as the dimension grows (table 1).

Linear regression with standard normal X and y: H = XXᵀ/N, of which Monte-Carlo KFAC is a random multiple. The measure
is min_α ‖αM − (H + δI)⁻¹‖₂ / ‖(H + δI)⁻¹‖₂ with δ = 1e-5; see :mod:`experiments.paper.inverses`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.paper import inverses, plots
from experiments.paper.printed import printed
from experiments.paper.recipe import Job, Judgement, Recipe, Result, Table, Verdict
from hyperkron import losses
from hyperkron.curvature import EKFAC, KFAC, Curvature, Hessian
from hyperkron.curvature import Identity as IdentityCurvature
from hyperkron.curvature.base import Operator
from hyperkron.curvature.kfac.state import KroneckerOperator
from hyperkron.evaluation.point import Point
from hyperkron.hyper import as_hyper
from hyperkron.problem import BilevelProblem
from hyperkron.solvers import CG, Direct, Neumann, Solver

BOUND = 7.62e-3
"""KFAC's printed error, at every d."""

FACTOR = 2.5
"""How far from print a figure may lie and still count as the same."""

TEXT, IMPLIED = 100, 800
"""The number of examples in the paper's text, and the one its numbers imply."""


PRINTED = 3
"""How many of the dimensions, from the first, are those of the paper."""

LARGE = 500
"""Beyond this dimension, which takes minutes, only the first seed is run."""


@dataclass(frozen=True)
class Settings:
    """Which sizes are run."""

    dimensions: tuple[int, ...] = (10, 100, 500)
    examples: tuple[int, ...] = (TEXT, IMPLIED)
    damping: float = 1e-5


def _problem(x: Tensor, y: Tensor) -> tuple[BilevelProblem, nn.Module, nn.Module]:
    """Linear regression; λ plays no part in the inverse."""
    problem = BilevelProblem(
        lambda model, hyper, batch: losses.mse(model(x), y + hyper()),
        lambda model, hyper, batch: losses.mse(model(x), y),
    )
    return problem, nn.Linear(x.shape[1], 1, bias=False, dtype=x.dtype), as_hyper(torch.zeros((), dtype=x.dtype))


class Library:
    """The library's inverses on one data set, applied to vectors."""

    def __init__(self, point: Point, damping: float, seed: int) -> None:
        self.point, self.damping, self.seed = point, damping, seed

    def operator(self, curvature: Curvature) -> Operator:
        """The curvature at this point, measured anew."""
        return curvature.operator(self.point, curvature.init())

    def inverse(self, curvature: Curvature, solver: Solver) -> Callable[[Tensor], Tensor]:
        """b ↦ A⁻¹b with one curvature for all b."""
        operator = self.operator(curvature)
        return lambda b: solver.solve(operator, {"weight": b[None]}).value["weight"][0]

    def linear(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """The methods that are functions of H, but for EKFAC."""
        d, seed, direct = self.damping, self.seed, Direct()
        found = {
            "KFAC": self.inverse(KFAC(d, split="exact", seed=seed), direct),
            "KFAC, factored damping": self.inverse(KFAC(d, seed=seed), direct),
            "Identity": self.inverse(IdentityCurvature(), direct),
        }
        return found | {f"Neumann-{k}": self.inverse(Hessian(d), Neumann(k)) for k in (3, 20, 50)}

    def corrected(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """EKFAC, which is a function of H too."""
        d, seed, direct = self.damping, self.seed, Direct()
        return {
            "EKFAC": self.inverse(EKFAC(d, seed=seed), direct),
            "EKFAC, exact Fisher": self.inverse(EKFAC(d, fisher="type-2", seed=seed), direct),
        }

    def cg(self, count: int, b: Tensor, preconditioned: bool) -> Tensor:
        """Conjugate gradients on one right-hand side."""
        other = self.operator(KFAC(self.damping, seed=self.seed)) if preconditioned else None
        assert other is None or isinstance(other, KroneckerOperator)
        solution = CG(count).solve(
            self.operator(Hessian(self.damping)),
            {"weight": b[None]},
            preconditioner=None if other is None else other.definite(),
        )
        return solution.value["weight"][0]


def values_on(of: inverses.Spectrum, inverse: Callable[[Tensor], Tensor]) -> tuple[Tensor, float]:
    """The values f(h) of a function of H, from one solve; and how far a second solve is from being that function."""
    generator = torch.Generator().manual_seed(1)
    d, count = of.basis.shape

    def outside(x: Tensor) -> Tensor:
        return x - of.basis @ (of.basis.T @ x)

    x = torch.randn(d, generator=generator, dtype=of.h.dtype)
    rest = outside(x) / outside(x).norm() if of.null else torch.zeros_like(x)
    answer = inverse(of.basis.sum(1) + rest)
    values = torch.cat((of.basis.T @ answer, (rest @ answer)[None])) if of.null else of.basis.T @ answer
    second = torch.randn(d, generator=generator, dtype=of.h.dtype)
    expected = of.basis @ (values[:count] * (of.basis.T @ second))
    if of.null:
        expected = expected + values[count] * outside(second)
    found = inverse(second)
    return values, float((found - expected).norm() / found.norm())


def corrected(
    x: Tensor, y: Tensor, of: inverses.Spectrum, damping: float, seed: int, turned: bool
) -> dict[str, tuple[Tensor, float]]:
    """The values of EKFAC and how far each is from being a function of H.

    Args:
        turned: in place of all d coordinates take those of the eigenvectors of H and one for the rest of the space.
            EKFAC turns to the eigenvectors anyhow, so that its answer is the same; its time is that of the smaller
            decompositions.
    """
    if turned:
        rank, size = len(of.h), len(of.h) + of.null
        x = torch.cat((x @ of.basis, x.new_zeros(len(x), size - rank)), 1)
        of = inverses.Spectrum(of.h, torch.eye(size, rank, dtype=x.dtype), damping)
    with Point(*_problem(x, y), None, None) as point:
        found = {name: values_on(of, f) for name, f in Library(point, damping, seed).corrected().items()}
        point.settle()
    return found


def errors(d: int, examples: int, damping: float, seed: int) -> dict[str, Any]:
    """The relative error of every method for one draw of the data, and how far the shortcuts are from the library."""
    generator = torch.Generator().manual_seed(10_000 * seed + d)
    x = torch.randn(examples, d, generator=generator, dtype=torch.float64)
    y = torch.randn(examples, 1, generator=generator, dtype=torch.float64)
    of = inverses.spectrum(x, damping)
    found: dict[str, float] = {}
    departure = 0.0
    values = corrected(x, y, of, damping, seed, turned=d > LARGE)
    with Point(*_problem(x, y), None, None) as point:
        library = Library(point, damping, seed)
        values |= {name: values_on(of, inverse) for name, inverse in library.linear().items()}
        for name, (row, gap) in values.items():
            departure = max(departure, gap)
            found[name] = inverses.function_error(row, of.exact())
        factored = values["KFAC, factored damping"][0]
        for name, counts, preconditioner in (("CG", (3, 5, 10), None), ("PCG", (3, 10), factored)):
            for count, ratios in inverses.cg_columns(of, counts, preconditioner).items():
                found[f"{name}-{count}"] = inverses.columns_error(of, ratios)
                if count == 3:
                    departure = max(departure, _column_gap(of, ratios, library, preconditioner is not None))
        point.settle()
    return {"errors": found, "departure": departure}


def _column_gap(of: inverses.Spectrum, ratios: Tensor, library: Library, preconditioned: bool) -> float:
    """How far the first column of a matrix of :func:`inverses.cg_columns` is from the library's answer."""
    unit = torch.zeros(of.basis.shape[0], dtype=of.h.dtype)
    unit[0] = 1.0
    inside = of.basis.T[:, 0]
    mine = of.basis @ (ratios[: len(of.h), 0] * inside)
    if of.null:
        mine = mine + ratios[len(of.h), 0] * (unit - of.basis @ inside)
    theirs = library.cg(3, unit, preconditioned)
    return float((mine - theirs).norm() / theirs.norm())


def work(job: Job) -> dict[str, Any]:
    """Errors by number of examples, method and dimension: the mean over seeds, and the largest."""
    settings: Settings = job.settings
    means: dict[str, dict[str, list[float]]] = {}
    largest: dict[str, dict[str, list[float]]] = {}
    departure = 0.0
    for examples in settings.examples:
        for d in settings.dimensions:
            cells = [
                job.cell([examples, d, seed], lambda n=examples, d=d, s=seed: errors(d, n, settings.damping, s))  # type: ignore[misc]
                for seed in (job.seeds if d <= LARGE else job.seeds[:1])
            ]
            departure = max(departure, *(cell["departure"] for cell in cells))
            for name in cells[0]["errors"]:
                row = [cell["errors"][name] for cell in cells]
                means.setdefault(str(examples), {}).setdefault(name, []).append(statistics.fmean(row))
                largest.setdefault(str(examples), {}).setdefault(name, []).append(max(row))
    return {"dimensions": list(settings.dimensions), "mean": means, "largest": largest, "departure": departure}


def verdict(result: Result) -> Judgement:
    """Reproduced: KFAC's mean error is at most 7.62e-3 at every d for both numbers of examples and moves by less than
    that between them; at N = 100, as in the text, every other printed method's error rises from d = 10 to 100 to 500
    and lies within a factor 2.5 of print at every d. In trend: the same of KFAC, and the others rise at N = 800, which
    the printed numbers imply. Not reproduced: otherwise.
    """
    rows = printed("table_diagnostic_relative_error")["rows"]
    kfac = [x for of in result.figures["mean"].values() for x in of["KFAC"]]
    flat = max(kfac) <= BOUND and max(kfac) - min(kfac) < BOUND
    falling, far = {}, {}
    for examples in (TEXT, IMPLIED):
        ours = {name: row for name, row in result.figures["mean"][str(examples)].items() if name in rows}
        others = [name for name in rows if name != "KFAC"]
        falling[examples] = [name for name in others if not ours[name][0] < ours[name][1] < ours[name][2]]
        ratios = [(ours[name][i] / rows[name][i]) for name in others for i in range(PRINTED)]
        far[examples] = sum(not 1 / FACTOR <= ratio <= FACTOR for ratio in ratios)
    count = PRINTED * (len(rows) - 1)
    text = f"KFAC's largest mean error is {max(kfac):.2g} (printed {BOUND:.2g})."
    for examples in (TEXT, IMPLIED):
        rising = f"all but {', '.join(falling[examples])} rise" if falling[examples] else "all others rise"
        text += (
            f" At N = {examples} {rising} with d, and {count - far[examples]} of {count} of their figures are within "
        )
        text += f"a factor {FACTOR} of print."
    if flat and not falling[TEXT] and not far[TEXT]:
        return Judgement(Verdict.REPRODUCED, text)
    return Judgement(Verdict.TREND if flat and not falling[IMPLIED] else Verdict.FAILED, text)


def tables(result: Result | None) -> list[Table]:
    """The printed errors, and ours for each number of examples."""
    shown = printed("table_diagnostic_relative_error")
    rows = {name: [f"{x:.2e}" for x in row] for name, row in shown["rows"].items()}
    if result is None:
        return [Table("Printed", ["method", *shown["columns"]], [[name, *row] for name, row in rows.items()])]
    columns = [
        x
        for i, d in enumerate(result.figures["dimensions"])
        for x in ([f"d={d} printed", f"d={d}"] if i < PRINTED else [f"d={d}"])
    ]
    found = []
    for examples, ours in result.figures["mean"].items():
        lines = []
        for name in [*rows, *(name for name in ours if name not in rows)]:
            cells = [name]
            old = rows.get(name, ["–"] * PRINTED)
            for i, value in enumerate(ours[name]):
                cells += [*old[i : i + 1], f"{value:.2e}"]
            lines.append(cells)
        found.append(Table(f"N = {examples}, mean over seeds (d > {LARGE}: one seed)", ["method", *columns], lines))
    return found


def plot(result: Result, folder: Path) -> list[Path]:
    """Errors against d, one panel for each number of examples."""
    dimensions = result.figures["dimensions"]

    def fill(axes: Any) -> None:
        for axis, (examples, ours) in zip(axes, result.figures["mean"].items(), strict=True):
            plots.curves(
                axis,
                {name: (dimensions, row) for name, row in ours.items()},
                f"d  (N = {examples})",
                "relative error",
                log_x=True,
                log_y=True,
            )

    return [plots.draw(folder / "diagnostic.svg", len(result.figures["mean"]), fill, height=4.0)]


NOTE = (
    "The text says N = 100. The printed numbers cannot come from that: for d > N, H is singular, and the identity's "
    "error after the best α is ½(1 − δ/(h_max + δ)) = 0.5000, while 0.493 is printed at d = 500 (and 0.391 at d = "
    "100, where it is 0.49998). The identity's error is ½(1 − h_min/h_max) in general, and the printed row fits N = "
    "800 (0.386 and 0.493 at d = 100 and 500 by the Marchenko–Pastur law). N = 800 was inferred from the identity's "
    "row alone; that CG's rows come near there too is evidence for it, but no proof, and the Neumann rows at d = 10 "
    "and 100 fit neither. Both numbers of examples are shown. The printed floors (KFAC's 7.62e-3 at every d, 6.31e-4 "
    "of CG-5 and CG-10 at d = 10) and Neumann-3's 0.801, above the 0.493 of the identity, suggest that α was searched "
    "on a coarse, bounded grid; ours is the exact minimum, so that KFAC's error is far below the printed one. KFAC is "
    "damped as the formula says, (B⊗A + δI)⁻¹. The factored damping that the experiments use is a row of its own, and "
    "it is not always below the printed bound. EKFAC with one Monte-Carlo draw is worse than KFAC here: KFAC's noise "
    "is one scalar, which α absorbs, EKFAC's is a different one for every eigenvalue. The extension to d = 5000 shows "
    "that the growth with d is not for ever: it is hardest where d is near N, where small eigenvalues lie between δ "
    "and the bulk. For d well above N the few eigenvalues of H that are not zero are far from δ and close together, "
    "and given enough products (Neumann-20 and -50, CG-10) the errors fall again, while KFAC's stays where it was. At "
    "d = 5000 EKFAC is computed in the coordinates of H's eigenvectors, where its answer is the same. "
    "The rule was made stricter after the figures had been seen: a first one, which compared chosen rows only, said "
    "reproduced."
)

RECIPES = (
    Recipe(
        name="diagnostic",
        title="Relative error of inverses as the dimension grows",
        place="Table 1",
        experiment=1,
        settings={
            "smoke": Settings(dimensions=(10, 100, 500)),
            "small": Settings(dimensions=(10, 100, 500, 5000)),
            "paper": Settings(dimensions=(10, 100, 500, 5000)),
        },
        work=work,
        verdict=verdict,
        tables=tables,
        plot=plot,
        note=NOTE,
        judged=("smoke", "small", "paper"),
        seeds={"smoke": 1, "small": 5, "paper": 20},
    ),
)
