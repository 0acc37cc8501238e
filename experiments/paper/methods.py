"""The methods that clean the linear model, each with its own grid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from experiments.paper.tuning import Grid, Setting
from hyperkron.algorithms import AID, BOME, BSG1, MRBO, AmIGO, Rate, StocBiO, StochasticNeumann
from hyperkron.algorithms.base import Algorithm
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


Make = Callable[[Setting, int], Hypergradient]


INNER_STEPS = 10


def methods(rates: Rates, *, refresh: int = 1, ema: float = 0.0, graph: bool = False) -> dict[str, Method]:
    """Every method that the linear model is cleaned with, by name.

    Args:
        rates: what the grids are made of.
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

    def corrected(x: Setting, seed: int) -> Hypergradient:
        return ekfac(x["damping"], seed=seed, graph=graph, **kept)

    found = [
        _aid("AID-KFAC", damped, kronecker),
        _aid("AID-EKFAC", damped, corrected),
        _aid("AID-identity", moving, lambda x, seed: identity(graph=graph)),
        _aid("AID-CG-3", damped, lambda x, seed: cg(3, x["damping"], graph=graph)),
        _aid("AID-Neumann-10", stepped, lambda x, seed: neumann(10, step=x["step"], graph=graph)),
        Method("AmIGO", stepped, partial(_amigo, graph)),
        _mrbo("MRBO", {**plain, "step": rates.step}, lambda x, seed: StochasticNeumann(10, x["step"], seed=seed)),
        _mrbo("MRBO-KFAC", {**plain, "damping": rates.damping}, lambda x, seed: kronecker(x, seed, graph=False)),
        Method("stocBiO", stepped, lambda x, seed: StocBiO(inner_steps=INNER_STEPS, step_size=x["step"], seed=seed)),
        Method("BOME", {**plain, "eta": rates.own}, lambda x, seed: BOME(INNER_STEPS, x["eta"], seed=seed)),
        Method("BSG-1", {**moving, "epsilon": rates.own}, lambda x, seed: BSG1(INNER_STEPS, x["epsilon"], seed=seed)),
    ]
    return {method.name: method for method in found}


def _aid(name: str, grid: Grid, make: Make) -> Method:
    return Method(name, grid, lambda x, seed: AID(make(x, seed), INNER_STEPS, seed=seed))


def _amigo(graph: bool, x: Setting, seed: int) -> Algorithm:
    if not graph:
        return AmIGO(inner_steps=INNER_STEPS, linear_rate=x["step"], seed=seed)
    v_loop = gradient_descent(10, step=x["step"], warm_start=True, graph=True)
    return AmIGO(inner_steps=INNER_STEPS, hypergradient=v_loop, seed=seed)


def _mrbo(name: str, grid: Grid, make: Make) -> Method:
    def algorithm(x: Setting, seed: int) -> Algorithm:
        inner, outer = Rate(x["inner"], 1 / 3), Rate(x["outer"], 1 / 3)
        return MRBO(make(x, seed), inner_rate=inner, outer_rate=outer, seed=seed)

    return Method(name, grid, algorithm)
