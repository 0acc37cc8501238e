"""The methods that are compared, each with its own grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.paper.tuning import Grid, Setting
from hyperkron.algorithms import AID, BOME, BSG1, MRBO, AmIGO, Rate, StocBiO, StochasticNeumann
from hyperkron.algorithms.base import Algorithm
from hyperkron.curvature import GGN
from hyperkron.hypergradient import Hypergradient, cg, ekfac, gradient_descent, identity, kfac, neumann


@dataclass(frozen=True)
class Method:
    """A method: its name in the paper, its grid, and how a setting of the grid becomes an algorithm.

    The names ``inner``, ``outer`` and ``momentum`` of a setting are the step sizes of θ and λ and θ's momentum.
    """

    name: str
    grid: Grid
    algorithm: Callable[[Setting, int], Algorithm]


@dataclass(frozen=True)
class Rates:
    """The values that grids are made of.

    Attributes:
        inner, outer, momentum: of every method (MRBO, which has its own momentum, and BOME have none).
        damping: of methods that solve a damped system.
        step: of methods that iterate: of the Neumann series, or of AmIGO's v.
        own: BOME's η and BSG-1's ϵ.
    """

    inner: tuple[float, ...] = (0.1, 0.01, 0.001)
    outer: tuple[float, ...] = (0.1, 1.0, 10.0, 100.0, 500.0, 1000.0)
    momentum: tuple[float, ...] = (0.0, 0.9)
    damping: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
    step: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3)
    own: tuple[float, ...] = (0.001, 0.01, 0.1, 1.0)


ABSOLUTE = Rates(inner=(0.03, 0.1, 0.3), outer=(300.0, 1e3, 3e3, 1e4), momentum=(0.9,), damping=(1e-2, 1e-1, 1.0, 10.0))
"""Of the linear model at small scale, at a batch of 2000."""
RELATIVE = Rates(inner=(0.1,), outer=(0.1, 0.4), momentum=(0.9,), damping=(1e-2, 1.0))
"""Of networks at small scale, with relative steps of λ."""
WIDE = Rates(outer=(0.01, 0.03, 0.1, 0.3, 1.0))
"""Of networks at paper scale, with relative steps of λ."""

Make = Callable[[Setting, int], Hypergradient]


def methods(
    rates: Rates, *, inner_steps: int = 10, refresh: int = 1, ema: float = 0.0, graph: bool = False
) -> dict[str, Method]:
    """Every method of the cleaning experiments, by name.

    Args:
        rates: what the grids are made of.
        inner_steps: T, of the double-loop methods.
        refresh: how many outer steps a curvature of KFAC and EKFAC serves.
        ema: the decay of KFAC's moving averages.
        graph: record hypergradients as CUDA graphs; AmIGO's ten steps of v then share a batch. MRBO, which has two
            points, records none.
    """
    plain: Grid = {"inner": rates.inner, "outer": rates.outer}
    moving: Grid = {**plain, "momentum": rates.momentum}
    damped: Grid = {**moving, "damping": rates.damping}
    stepped: Grid = {**moving, "step": rates.step}
    kept: dict[str, Any] = {"refresh_every": refresh, "ema": ema}

    def kronecker(x: Setting, seed: int, graph: bool = graph) -> Hypergradient:
        return kfac(x["damping"], seed=seed, graph=graph, **kept)

    def empirical(x: Setting, seed: int) -> Hypergradient:
        return kfac(x["damping"], fisher="empirical", seed=seed, graph=graph, **kept)

    def corrected(x: Setting, seed: int) -> Hypergradient:
        return ekfac(x["damping"], seed=seed, graph=graph, **kept)

    def amigo_kronecker(x: Setting, seed: int) -> Algorithm:
        return AmIGO(inner_steps=inner_steps, hypergradient=kronecker(x, seed), seed=seed)

    found = [
        _aid("AID-KFAC", damped, kronecker, inner_steps),
        _aid("AID-KFAC-EMP", damped, empirical, inner_steps),
        _aid("AID-EKFAC", damped, corrected, inner_steps),
        _aid("AID-identity", moving, lambda x, seed: identity(graph=graph), inner_steps),
        Method("AmIGO", stepped, partial(_amigo, inner_steps, graph)),
        Method("AmIGO-KFAC", damped, amigo_kronecker),
        _mrbo("MRBO", {**plain, "step": rates.step}, lambda x, seed: StochasticNeumann(10, x["step"], seed=seed)),
        _mrbo("MRBO-KFAC", {**plain, "damping": rates.damping}, lambda x, seed: kronecker(x, seed, graph=False)),
        Method("stocBiO", stepped, lambda x, seed: StocBiO(inner_steps=inner_steps, step_size=x["step"], seed=seed)),
        Method("BOME", {**plain, "eta": rates.own}, lambda x, seed: BOME(inner_steps, x["eta"], seed=seed)),
        Method("BSG-1", {**moving, "epsilon": rates.own}, lambda x, seed: BSG1(inner_steps, x["epsilon"], seed=seed)),
    ]
    for count in (1, 3, 5, 10, 20):
        found += _solvers(count, damped, stepped, inner_steps, graph)
    return {method.name: method for method in found}


def _solvers(count: int, damped: Grid, stepped: Grid, inner_steps: int, graph: bool) -> list[Method]:
    """AID with ``count`` iterations of CG and of the Neumann series, on the Hessian and the Gauss–Newton matrix."""
    made: dict[str, tuple[Grid, Make]] = {
        "CG": (damped, lambda x, seed: cg(count, x["damping"], graph=graph)),
        "GGN-CG": (damped, lambda x, seed: cg(count, curvature=GGN(x["damping"]), graph=graph)),
        "Neumann": (stepped, lambda x, seed: neumann(count, step=x["step"], graph=graph)),
        "GGN-Neumann": (stepped, lambda x, seed: neumann(count, step=x["step"], curvature=GGN(0.0), graph=graph)),
    }
    return [_aid(f"AID-{name}-{count}", grid, make, inner_steps) for name, (grid, make) in made.items()]


def _aid(name: str, grid: Grid, make: Make, inner_steps: int) -> Method:
    return Method(name, grid, lambda x, seed: AID(make(x, seed), inner_steps, seed=seed))


def _amigo(inner_steps: int, graph: bool, x: Setting, seed: int) -> Algorithm:
    if not graph:
        return AmIGO(inner_steps=inner_steps, linear_rate=x["step"], seed=seed)
    v_loop = gradient_descent(10, step=x["step"], warm_start=True, graph=True)
    return AmIGO(inner_steps=inner_steps, hypergradient=v_loop, seed=seed)


def _mrbo(name: str, grid: Grid, make: Make) -> Method:
    def algorithm(x: Setting, seed: int) -> Algorithm:
        inner, outer = Rate(x["inner"], 1 / 3), Rate(x["outer"], 1 / 3)
        return MRBO(make(x, seed), inner_rate=inner, outer_rate=outer, seed=seed)

    return Method(name, grid, algorithm)
