"""The decision how to compute the cross term, and for which inner loss it was made."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from hyperkron.kernels.graphs import modules_of, switches
from hyperkron.problem import BilevelProblem
from hyperkron.solution import warn_once

RECHECK = 100
"""A way other than double backward is checked again after this many calls, because a model in training changes."""
MAX_CHANGES = 5
"""After another inner loss in this many calls in a row there is a warning."""


@dataclass(frozen=True)
class Way:
    """A way to compute the cross term."""

    mode: str = ""  # reverse, forward, difference or adjoint; "" if none is decided
    form: str = ""  # which weights of the inner loss depend on λ, if nothing else does
    radius: float = 0.0  # of a finite difference
    full: bool = False  # use full float32, for a model in TF32 or half precision


@dataclass
class CrossState:
    """The decision, so that later calls and a resumed run do the same."""

    way: Way = Way()
    error: float = 0.0
    calls: int = 0
    inner: Hashable = field(default=None, repr=False)  # which inner loss it was decided for; not saved
    changes: int = field(default=0, repr=False)  # in how many calls in a row that was another one; not saved

    @property
    def mode(self) -> str:
        """The mode of the way."""
        return self.way.mode

    def state_dict(self) -> dict[str, Any]:
        """The decision as plain values."""
        return {**vars(self.way), "error": self.error, "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with an earlier decision."""
        self.way = Way(state["mode"], state["form"], state["radius"], state["full"])
        self.error, self.calls = state["error"], state["calls"]

    def forget(self) -> None:
        """Drop the decision, but not what is likely to be decided again."""
        self.way = replace(self.way, mode="")

    def see(self, inner: Hashable) -> None:
        """Begin a call with the inner loss of this :func:`inner_key`; a decision for another one is dropped."""
        changed = self.inner not in (None, inner)
        self.inner, self.calls, self.changes = inner, self.calls + 1, self.changes + 1 if changed else 0
        if changed:
            self.forget()

    def warn_of_changes(self) -> None:
        """Say once that the decision is made in every call."""
        if self.changes >= MAX_CHANGES:
            warn_once(
                "cross-changes",
                "the way to compute the cross term is chosen again in every call, which costs several passes, because "
                "the inner loss, the module hyper, or a true or false attribute or a hook of model or hyper, is "
                "another one every time (does forward set an attribute?); keep these the same, or use cross='reverse'.",
            )

    def decided(self, inner: Hashable) -> bool:
        """Whether the decision holds for a call with the inner loss of this :func:`inner_key`.

        The first inner loss after a resume is assumed to be the one of the decision.
        """
        return self.inner in (None, inner) and bool(self.mode) and self.calls % RECHECK != 0


def function_key(function: Any, depth: int = 4) -> Hashable:
    """A key that distinguishes functions: code, and the flags, strings, integers and functions it refers to.

    Tensors, modules and other objects are represented by their type and their own flags.
    """
    if function is None or isinstance(function, (bool, int, str, type)):
        return function
    kind = f"{type(function).__module__}.{type(function).__qualname__}"
    if depth == 0:
        return kind
    deeper = functools.partial(function_key, depth=depth - 1)
    if isinstance(function, functools.partial):
        named = tuple((name, deeper(x)) for name, x in sorted(function.keywords.items()))
        return deeper(function.func), tuple(map(deeper, function.args)), named
    if isinstance(function, types.MethodType):
        return deeper(function.__func__), deeper(function.__self__)
    if isinstance(function, types.FunctionType):
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        held = [x for cell in function.__closure__ or () for x in _held(cell) if x is not function]
        return function.__code__, tuple(map(deeper, given)), tuple(map(deeper, held))
    if isinstance(function, (list, tuple)):
        return tuple(map(deeper, function))
    own = vars(function) if hasattr(function, "__dict__") and not isinstance(function, (nn.Module, Tensor)) else {}
    flags = tuple((name, x) for name, x in own.items() if isinstance(x, bool))
    called = tuple(
        (name, deeper(x)) for name, x in own.items() if isinstance(x, (types.FunctionType, types.MethodType))
    )
    return kind, flags, called


def code_of(function: Any) -> object:
    """The code of a function or method, also of a partial one; of other objects the type."""
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return getattr(function, "__code__", type(function))


def inner_key(problem: BilevelProblem, model: nn.Module, hyper: nn.Module) -> Hashable:
    """A key that distinguishes inner losses: the function, λ's module, and what affects their structure."""
    names, parts = tuple(name for name, _ in hyper.named_parameters()), modules_of(model, hyper)
    dtypes = frozenset(p.dtype for part in parts for p in part._parameters.values() if p is not None)
    return function_key(problem.inner), type(model), switches(parts), dtypes, weakref.ref(hyper), names


def _held(cell: types.CellType) -> tuple[Any, ...]:
    """The content of a closure's cell as a tuple; empty if it is not filled yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
