"""What was decided about the cross term, and for which inner loss."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hyperkron.kernels.graphs import switches
from hyperkron.problem import BilevelProblem
from hyperkron.trees import Tree

RECHECK = 100
"""A way that is not double backward is looked at again after this many calls, for a model in training changes."""


@dataclass(frozen=True)
class Way:
    """A way to the cross term."""

    mode: str  # reverse, forward, difference or adjoint
    form: str = ""  # which weights of the inner loss λ reaches, where it does nothing else
    radius: float = 0.0  # of a finite difference
    full: bool = False  # in full float32, where the model runs in TF32 or is held in half precision


@dataclass
class CrossState:
    """What was decided, so that later calls and a resumed run do the same."""

    mode: str = ""
    weights: str = ""  # the form of the way
    radius: float = 0.0
    full: bool = False
    error: float = 0.0
    calls: int = 0
    inner: Hashable = field(default=None, repr=False)  # which inner loss it was decided for; not saved

    def state_dict(self) -> dict[str, Any]:
        """The decision as plain values."""
        return {name: value for name, value in vars(self).items() if name != "inner"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with an earlier decision."""
        self.mode, self.radius, self.full = state["mode"], state["radius"], state["full"]
        self.error, self.calls = state["error"], state["calls"]
        self.weights = state.get("weights", "")
        if "weights" not in state and self.mode != "reverse":
            self.mode = ""  # of a version that did not look at the structure of the loss

    def decided(self, inner: Hashable) -> bool:
        """Whether a call for the inner loss of this :func:`inner_key` has nothing to decide.

        The first inner loss after a resume is taken to be the one that it was decided for.
        """
        return self.inner in (None, inner) and bool(self.mode) and self.calls % RECHECK != 0

    @property
    def way(self) -> Way:
        """The way decided for."""
        return Way(self.mode, self.weights, self.radius, self.full)

    def settle(self, way: Way, cross: Tree, error: float = 0.0) -> Tree:
        """Write a decision down; ``cross``, what it gave, is returned."""
        self.mode, self.weights, self.radius, self.full, self.error = way.mode, way.form, way.radius, way.full, error
        return cross


def described(function: Any, depth: int = 4) -> Hashable:
    """What tells one function from another: its code and the flags, texts, whole numbers and functions it refers to.

    Tensors, modules and other objects count by their type and their own flags.
    """
    if function is None or isinstance(function, (bool, int, str, type)):
        return function
    kind = f"{type(function).__module__}.{type(function).__qualname__}"
    if depth == 0:
        return kind
    deeper = functools.partial(described, depth=depth - 1)
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


def inner_key(problem: BilevelProblem, model: nn.Module, hyper: nn.Module) -> Hashable:
    """What tells one inner loss from another: the function, and what of θ and λ changes its structure or precision."""
    names, dtypes = tuple(name for name, _ in hyper.named_parameters()), {p.dtype for p in model.parameters()}
    switched = switches((*model.modules(), *hyper.modules()))
    return described(problem.inner), type(model), switched, frozenset(dtypes), type(hyper), names


def _held(cell: types.CellType) -> tuple[Any, ...]:
    """What a cell of a closure holds: one thing, or nothing yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
