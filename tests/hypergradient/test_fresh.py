"""Every hypergradient makes a fresh one of itself: all options kept, all memory dropped, whichever they are.

The options are read from the signatures, so that one added later is tested too.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.algorithms import Algorithm
from hyperkron.hypergradient import Hypergradient, named
from hyperkron.hypergradient.steps import Adam
from quadratic import Quadratic

WEIGHT = nn.Parameter(torch.ones(2))
OTHERS: dict[str, Any] = {
    "curvature": hk.curvature.GGN(0.7),
    "solver": hk.solvers.Neumann(4, 0.2),
    "preconditioner": hk.curvature.KFAC(0.3),
    "optimizer": Adam(0.03),
    "radius": 0.3,
    "split": "plain",
}
"""Options whose other value cannot be guessed from their type."""
SPECIAL = {("sama", "optimizer"): torch.optim.SGD([WEIGHT], lr=0.3)}
NEEDS: dict[str, dict[str, Any]] = {
    "Implicit": {"curvature": hk.curvature.Hessian(0.1), "solver": hk.solvers.CG(3)},
    "Unrolled": {"steps": 3},
}
"""What must be given."""
TOGETHER = {("neumann", "graph"): {"step": 0.1}, ("gradient_descent", "graph"): {"step": 0.1}}
"""What an option needs beside it."""


def makers() -> dict[str, Callable[..., Hypergradient]]:
    """Every class of hypergradients in the library, and every named function that makes one."""
    classes = [c for c in subclasses(Hypergradient) if c.__module__.startswith("hyperkron.")]
    functions = [f for _, f in inspect.getmembers(named, inspect.isfunction) if f.__module__ == named.__name__]
    return {f.__name__: f for f in (*classes, *functions)}


def subclasses(kind: type) -> Iterator[Any]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def another(maker: str, name: str, hint: Any, default: Any) -> Any:
    """A value of this option that differs from its default."""
    if (maker, name) in SPECIAL:
        return SPECIAL[maker, name]
    if name in OTHERS:
        return OTHERS[name]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        return next(value for value in reversed(typing.get_args(hint)) if value != default)
    number = default if isinstance(default, (bool, int, float)) else 1
    made = {bool: lambda: not number, int: lambda: number + 1, float: lambda: number / 2 if number else 0.25}
    return made[hint]()


def options() -> Iterator[Any]:
    for maker, function in makers().items():
        hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)
        for name, parameter in inspect.signature(function).parameters.items():
            default = NEEDS.get(maker, {}).get(name, parameter.default)
            value = another(maker, name, hints[name], default)
            yield pytest.param(
                maker, {**TOGETHER.get((maker, name), {}), name: value}, id=f"{maker} {name}={value!r:.40}"
            )


def described(x: Any) -> Any:
    """An object as plain values, down to every field."""
    if isinstance(x, (torch.Generator, Tensor)):
        return (x.get_state() if isinstance(x, torch.Generator) else x).tolist()
    if isinstance(x, (dict, list, tuple)):
        return {k: described(v) for k, v in x.items()} if isinstance(x, dict) else [described(v) for v in x]
    if isinstance(x, (torch.optim.Optimizer, nn.Module, type)) or not hasattr(x, "__dict__"):
        return x if isinstance(x, (int, float, str, type(None))) else id(x)
    return type(x), {name: described(value) for name, value in vars(x).items()}


def used(method: Hypergradient) -> Hypergradient:
    """The method after two calls."""
    problem = Quadratic(ridge=0.1)
    model, hyper = problem.modules()
    for p in model.parameters():
        nn.init.normal_(p)
    for _ in range(2):
        method.compute(problem.problem(), model, hyper, *problem.data())
    return method


@pytest.mark.parametrize(("maker", "given"), list(options()))
def test_a_fresh_one_keeps_every_option_and_drops_all_memory(maker: str, given: dict[str, Any]) -> None:
    make, needs = makers()[maker], NEEDS.get(maker, {})
    method = make(**{**needs, **given})
    new = described(make(**{**needs, **given}))
    assert described(method) == new != described(make(**needs)), "the option cannot be seen in the method"
    used(method) if "optimizer" not in given or maker != "sama" else None  # an optimizer of another model
    before = described(method)
    made = method.fresh()
    assert described(made) == new
    assert described(method) == before
    used(made) if "optimizer" not in given or maker != "sama" else None
    assert described(method) == before, "the two share memory"


@pytest.mark.parametrize("method", [hk.kfac, hk.cg, lambda: hk.algorithms.hia(4)], ids=["kfac", "cg", "hia"])
def test_there_is_memory_to_drop(method: Any) -> None:
    assert described(used(method())) != described(method())


WITH = [c for c in subclasses(Algorithm) if "hypergradient" in {f.name for f in dataclasses.fields(c)}]


@pytest.mark.parametrize("kind", [c for c in WITH if c is not hk.algorithms.SUSTAIN], ids=lambda c: c.__name__)
def test_algorithms_take_the_method_as_it_is(kind: Any) -> None:
    """Each has a fresh one of its own, with all of its options."""
    problem = Quadratic(ridge=0.1)
    given = hk.kfac(0.2, graph=True, samples=3, cross="reverse")
    used(given)
    algorithm = kind(hypergradient=given)
    state = algorithm.init(problem.problem(), *problem.modules())
    assert state.hypergradient is not given
    assert described(state.hypergradient) == described(hk.kfac(0.2, graph=True, samples=3, cross="reverse"))
    algorithm.step(state, problem.batches(2))
    assert state.hypergradient.graph  # also where a step makes another of it
