"""What every curvature gives to a solver: a linear operator, and sometimes its inverse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from hyperkron import trees
from hyperkron.evaluation.differentiation import graph_nodes
from hyperkron.evaluation.point import Point
from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError, Status, warn_once
from hyperkron.trees import Tree
from hyperkron.validation import check_nonnegative


class Operator(ABC):
    """A symmetric linear operator v ↦ (A + δI) v on trees of parameters.

    A approximates the inner Hessian ∇²_θθ J_in and δ ≥ 0 is the damping. The damping is part of the operator
    and appears once: a solver never adds its own.

    An implementation evaluates the curvature at one fixed point, with the same parameters, batch and dropout
    masks every time, so that repeated products are products with one matrix. The products are detached from
    the graph.

    Attributes:
        products: how many matrix-vector products have been computed; every :meth:`matvec` adds one.
        roundoff: the unit roundoff of products with a model in half precision; 0 if products are as precise as vectors.
    """

    products: int = 0
    roundoff: float = 0.0

    @abstractmethod
    def matvec(self, v: Tree) -> Tree:
        """(A + δI) v as a new tree with the names and dtypes of ``v``, which is not changed; adds 1 to ``products``."""

    def matvec_stacked(self, v: Tree) -> Tree:
        """:meth:`matvec` for each of many vectors, along the leading dimension of ``v``."""
        return trees.stacked([self.matvec(one) for one in trees.unstacked(v)])

    def unreached(self) -> Collection[str]:
        """The parameters that J_in does not depend on, where that is known: A and the cross term are zero there."""
        return ()

    def release(self) -> None:  # noqa: B027 (most have nothing to free)
        """Called after the solve: free memory that no later call needs."""

    @property
    def gradients(self) -> Tree | None:
        """∂_θ J_in on the curvature batch, if the products are computed from it; else ``None``."""
        return None

    def cross(self, v: Tree, hypers: Tree) -> dict[str, Tensor | None] | None:
        """∂²_λθ J_in · v on the curvature batch, if it follows from the graph of :attr:`gradients`; else ``None``."""
        return None

    def matvec_and_cross(self, v: Tree, hypers: Tree) -> tuple[Tree, dict[str, Tensor | None] | None]:
        """:meth:`matvec` and :meth:`cross` of one vector; some operators compute both at the cost of one."""
        return self.matvec(v), self.cross(v, hypers)


class Eigenbasis(NamedTuple):
    """The complete eigenbasis of a block V ↦ Q_B [(Q_Bᵀ V Q_A) ∘ (S + δ)] Q_Aᵀ of A + δI.

    Q_A is (groups, d_in, d_in), with the column of a bias last; Q_B is (groups, d_out, d_out), and S + δ
    (groups, d_out, d_in).
    """

    a: Tensor
    b: Tensor
    spectrum: Tensor


class Invertible(Operator):
    """An operator that also applies its inverse b ↦ (A + δI)⁻¹ b, usually from a factorisation made once.

    Any such operator serves as a direct solve. A positive definite one also serves as the preconditioner of
    conjugate gradients, or gradient descent, on another operator.

    Attributes:
        status: how the factorisation went: ``DIRECT``, or ``MORE_DAMPING`` or ``KEPT_PREVIOUS`` where a
            fallback was needed.
        overwrites: whether a solve may write its result into the memory of b; set by callers that no longer need b.
    """

    status: Status = Status.DIRECT
    overwrites: bool = False

    @abstractmethod
    def solve(self, b: Tree) -> Tree:
        """(A + δI)⁻¹ b as a new tree with the names of ``b``, not changed unless ``overwrites``; counts no product."""

    def solve_stacked(self, b: Tree) -> Tree:
        """:meth:`solve` for each of many right-hand sides, along the leading dimension of ``b``."""
        return trees.stacked([self.solve(one) for one in trees.unstacked(b)])

    def eigenbases(self) -> dict[str, Eigenbasis]:
        """The eigenbases of blocks, by their names, where the inverse is computed from them; the default is none."""
        return {}

    def definite(self) -> Invertible:
        """This operator as a preconditioner: positive definite on all parameters.

        Override it where :meth:`solve` is zero for some parameters. The default is the operator itself.
        """
        return self


@dataclass
class DiagonalOperator(Invertible):
    """A = diag(1/inverse): ``solve`` multiplies by ``inverse``, ``matvec`` divides."""

    inverse: dict[str, Tensor | float]
    products: int = 0

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return {name: (x / self.inverse[name]).to(x.dtype) for name, x in v.items()}

    def solve(self, b: Tree) -> Tree:
        found: Tree = {}
        for kind in (Tensor, float):  # one launch for all parameters of a kind
            names = [name for name in b if isinstance(self.inverse[name], kind)]
            if names:
                factors: Any = [self.inverse[name] for name in names]
                found.update(zip(names, torch._foreach_mul([b[name] for name in names], factors), strict=True))
        return {name: found[name].to(x.dtype) for name, x in b.items()}


class CurvatureState:
    """What a curvature remembers between calls; this one remembers nothing.

    A subclass with a memory overrides ``state_dict``, ``load_state_dict`` and, to be seen in ``result.stats``,
    :meth:`stats`. The other methods are for curvatures that can be recorded as a CUDA graph: :meth:`replayed` if they
    remember anything; :attr:`kept`, :meth:`tensors`, :meth:`adopt` and :meth:`let_go` if they use one measurement in
    several calls; :meth:`generators` if they draw random numbers. Replace attributes and do not change them in place,
    so that a shallow copy of a state stays valid.
    """

    def stats(self) -> dict[str, float | int | str]:
        """Figures of the last call for ``result.stats``, by name."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """The state as nested dictionaries of tensors, numbers and strings."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        if state:
            raise HyperkronError(f"this curvature keeps no state, but a state with {sorted(state)} was given.")

    def collect(self) -> None:
        """Called by all processes that share this state: until :meth:`uncollect`, :meth:`state_dict` of the first one
        has everything that any number of processes needs to continue."""

    def uncollect(self) -> None:
        """Free what :meth:`collect` received from other processes."""

    @property
    def kept(self) -> Any:
        """The measurement that later calls reuse, the same object until the next one; ``None`` if there is none."""
        return None

    def tensors(self) -> Any:
        """The tensors of :attr:`kept`, as nested lists, tuples and dictionaries."""
        return self.kept

    def adopt(self, other: CurvatureState) -> None:
        """Use the tensors of ``other``, which have the same values, instead of its own."""
        raise HyperkronError(
            f"{type(self).__name__} keeps a measurement but has no adopt(); write it, or use graph=False."
        )

    def let_go(self) -> None:
        """Forget the kept measurement, so that the next call measures again."""

    def generators(self, device: torch.device) -> list[torch.Generator]:
        """The random generators on ``device`` that a measurement draws from."""
        return []

    def replayed(self, made: CurvatureState | None) -> None:
        """Called after each replay of a recorded step.

        Args:
            made: the state whose tensors the replay has written, if the step measures the curvature; ``None`` if the
                step uses the kept measurement.
        """
        if self.state_dict():
            raise HyperkronError(
                f"{type(self).__name__} remembers something but has no replayed(); write it, or use graph=False."
            )


class Curvature(ABC):
    """A choice of A ≈ ∇²_θθ J_in: configuration only. Its memory is a :class:`CurvatureState` made by :meth:`init`.

    Attributes:
        uses_data: whether A is measured on a batch.
        invertible: whether its operators are :class:`Invertible`.
        records_products: whether products with A can be recorded in a CUDA graph: they never read from the device.
        records_inverse: the same for products with A⁻¹.
    """

    uses_data: ClassVar[bool] = True
    invertible: ClassVar[bool] = False
    records_products: ClassVar[bool] = False
    records_inverse: ClassVar[bool] = False

    def init(self) -> CurvatureState:
        """A fresh state."""
        return CurvatureState()

    @abstractmethod
    def operator(self, point: Point, state: CurvatureState) -> Operator:
        """A + δI at ``point``; refreshes ``state`` if that is due."""

    @property
    def lean(self) -> bool:
        """Whether to save memory at the price of time: b is computed before the curvature."""
        return False

    def due(self, state: CurvatureState) -> bool:
        """Whether the next call measures the curvature again."""
        return True

    def check_graph(self) -> None:  # noqa: B027 (most can be recorded with all of their options, or with none)
        """Refuse options with which a step cannot be recorded as a CUDA graph."""

    def constants(self, state: CurvatureState) -> Hashable | None:
        """The constants that a CUDA graph of the next step would contain; ``None`` if it cannot be recorded."""
        return () if self.records_products or self.records_inverse else None

    @property
    def records_refreshes(self) -> bool:
        """Whether steps that measure the curvature again can be recorded, or only those between them."""
        return True

    @property
    def keeps_parts(self) -> bool:
        """Whether a measurement keeps parts of the previous one, as EKFAC keeps its eigenbasis."""
        return False


def check_damping(damping: float) -> None:
    """Refuse a damping that is not a finite number ≥ 0."""
    check_nonnegative("damping", damping, "1e-3 is a common choice")


def opaque(loss: Loss, params: Tree) -> bool:
    """Whether the inner loss has a plain tensor that depends on θ, whose curvature only the Hessian includes."""
    return _reaches(graph_nodes(loss.plain), params)


def moving(loss: Loss, params: Tree) -> bool:
    """Whether weights or targets of the inner loss depend on θ with a gradient, as weights in a focal loss do."""
    weights = [x for term in loss.terms for x in term.factors if isinstance(x, Tensor) and x.requires_grad]
    outputs = {get_gradient_edge(term.output).node for term in loss.terms if term.output.requires_grad}
    targets = graph_nodes([term.row_losses for term in loss.terms], outputs)
    return _reaches(chain(graph_nodes(weights), targets), params)


def warn_opaque(who: str, loss: Loss, params: Tree) -> None:
    """Warn once if the inner loss is :func:`opaque`."""
    if opaque(loss, params):
        warn_once(
            f"opaque {who}",
            f"the inner loss contains a plain tensor whose curvature {who} cannot see; write an L2 penalty as "
            "hyperkron.losses.l2(...) to have its curvature counted, or use curvature=Hessian().",
        )


def _reaches(nodes: Iterable[Node], params: Tree) -> bool:
    """Whether a parameter is among these nodes of a graph."""
    members = {id(p) for p in params.values()}
    return any(id(getattr(node, "variable", None)) in members for node in nodes)


def warn_moving(who: str, loss: Loss, params: Tree) -> None:
    """Warn once if the inner loss is :func:`moving`."""
    if moving(loss, params):
        warn_once(
            f"moving {who}",
            f"weights or targets of the inner loss depend on the model's parameters, but {who} treats them as "
            "constants, so it is not the curvature of this loss; detach() them if they are meant as constants, write "
            "mse(f, g) of two outputs as mse(f - g, zeros), or use curvature=Hessian().",
        )


def l2_curvature(loss: Loss, params: Tree) -> dict[str, Tensor | float]:
    """2α for each parameter under a penalty α‖p‖² of the inner loss, by name (summed where there are several)."""
    names = {id(p): name for name, p in params.items()}
    found: dict[str, Tensor | float] = {}
    doubled: dict[tuple[object, ...], Tensor] = {}  # a coefficient that parameters share stays one tensor
    for penalty in loss.l2:
        name = names.get(id(penalty.parameter))
        if name is None and _reaches(graph_nodes([penalty.parameter]), params):
            warn_once(
                "l2-derived",
                "the inner loss has an l2 penalty on a tensor computed from parameters, whose curvature is not "
                "counted; penalise the parameters themselves: losses.l2(model, α).",
            )
        if name is not None:
            coefficient = penalty.coefficient
            value: Tensor | float
            if isinstance(coefficient, Tensor):
                layout = coefficient.shape, coefficient.stride()
                key = (coefficient.data_ptr(), coefficient.device, coefficient.dtype, *layout)
                if key not in doubled:
                    doubled[key] = 2 * coefficient.detach()
                value = doubled[key]
            else:
                value = 2 * coefficient
            found[name] = found[name] + value if name in found else value
    return found
