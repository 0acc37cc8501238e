"""The formula itself: dΦ/dλ = ∂_λ J_out − ∂²_λθ J_in · A⁻¹ · ∂_θ J_out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron import trees
from hyperkron.cross import Cross, CrossState, Mode
from hyperkron.curvature import Curvature, CurvatureState, Invertible, KroneckerState
from hyperkron.curvature.kfac.state import KroneckerOperator
from hyperkron.hypergradient.base import Hypergradient
from hyperkron.point import Point, independent
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HypergradientResult, HyperkronError, NonFiniteError, Solution, Status
from hyperkron.solvers import Solver
from hyperkron.trees import Tree


@dataclass
class ImplicitState:
    """What an implicit hypergradient remembers: curvature, preconditioner, cross-term decision and last solution."""

    curvature: CurvatureState
    preconditioner: CurvatureState
    cross: CrossState = field(default_factory=CrossState)
    start: Tree | None = None
    calls: int = 0


class Implicit(Hypergradient):
    """The implicit hypergradient, with one slot for each piece of the formula.

        dΦ/dλ = ∂_λ J_out − ∂²_λθ J_in · v ,    (A + δI) v = ∂_θ J_out

    Args:
        curvature: A.
        solver: how v is found: ``Direct()`` for curvatures with an inverse, else an iterative solver.
        preconditioner: a second curvature with an inverse, for ``CG``.
        warm_start: begin each solve at the previous solution.
        cross: how ∂²_λθ J_in · v is computed: ``auto``, ``reverse``, ``forward`` or ``difference``.
        radius: of the finite difference; ``None`` chooses by dtype.

    Example:
        >>> import hyperkron as hk
        >>> method = hk.Implicit(hk.GGN(damping=1e-3), hk.CG(20), preconditioner=hk.KFAC(damping=1e-3))
    """

    def __init__(
        self,
        curvature: Curvature,
        solver: Solver,
        *,
        preconditioner: Curvature | None = None,
        warm_start: bool = False,
        cross: Mode = "auto",
        radius: float | None = None,
    ) -> None:
        _check_slots(curvature, solver, preconditioner)
        if preconditioner is not None and not solver.uses_preconditioner:
            raise HyperkronError(
                f"solver={type(solver).__name__} takes no preconditioner; use CG, or leave preconditioner out."
            )
        if warm_start and not solver.uses_start:
            raise HyperkronError(
                f"solver={type(solver).__name__} has no use for warm_start=True; use GradientDescent or CG."
            )
        self.warm_start = warm_start
        self.curvature = curvature
        self.solver = solver
        self.preconditioner = preconditioner
        self.cross = Cross(cross, radius)
        self.state = self._fresh()

    def _fresh(self) -> ImplicitState:
        second = CurvatureState() if self.preconditioner is None else self.preconditioner.init()
        return ImplicitState(self.curvature.init(), second)

    def compute(
        self,
        problem: BilevelProblem,
        model: nn.Module,
        hyper: nn.Module,
        inner_batch: Any,
        outer_batch: Any,
        *,
        curvature_batch: Any = None,
    ) -> HypergradientResult:
        """dΦ/dλ at the current (λ, θ); ``curvature_batch`` measures A on another batch than the cross term."""
        state = self.state
        with Point(problem, model, hyper, inner_batch, outer_batch, curvature_batch=curvature_batch) as point:
            operator = self.curvature.operator(point, state.curvature)  # before b, which would add to its peak memory
            value, b, direct = outer_gradients(point)
            solution = self.solver.solve(
                operator,
                b,
                start=state.start if self.warm_start else None,
                preconditioner=self._preconditioner(point, state),
            )
            if solution.status is Status.NON_FINITE:
                raise NonFiniteError(f"{self.solver!r}: {solution.status.value}")
            crossed = self.cross.term(point, solution.value, operator, state.cross)
            grads = trees.add(direct, crossed, alpha=-1.0)
            point.finite("hypergradient", trees.norm(grads), "raise damping, or look for extreme values in the batches")
            point.settle()
        if self.warm_start:
            state.start = solution.value
        state.calls += 1
        return HypergradientResult(grads, solution.status, float(value), solution, self._stats(solution, point))

    def _preconditioner(self, point: Point, state: ImplicitState) -> Invertible | None:
        if self.preconditioner is None:
            return None
        made = self.preconditioner.operator(point, state.preconditioner)
        if isinstance(made, KroneckerOperator):
            return made.definite()
        if not isinstance(made, Invertible):
            raise HyperkronError(
                f"preconditioner={type(self.preconditioner).__name__} has no inverse; use KFAC, EKFAC or Identity."
            )
        return made

    def _stats(self, solution: Solution, point: Point) -> dict[str, float | int | str]:
        stats: dict[str, float | int | str] = {
            "iterations": solution.iterations,
            "products": solution.products,
            "cross": self.state.cross.mode,
        }
        if solution.residual is not None:
            stats["residual"] = solution.residual
        if self.state.cross.error:
            stats["cross_error"] = self.state.cross.error
        for memory in (self.state.curvature, self.state.preconditioner):
            if isinstance(memory, KroneckerState):
                stats["curvature_age"] = memory.age
                stats["curvature_refreshes"] = memory.refreshes
                if memory.inverses is not None:
                    stats["curvature_strategy"] = memory.inverses.strategies()
        return {**stats, **point.notes}

    def state_dict(self) -> dict[str, Any]:
        return {
            "curvature": self.state.curvature.state_dict(),
            "preconditioner": self.state.preconditioner.state_dict(),
            "cross": self.state.cross.state_dict(),
            "start": None if self.state.start is None else dict(self.state.start),
            "calls": self.state.calls,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        fresh = self._fresh()
        fresh.curvature.load_state_dict(state["curvature"])
        fresh.preconditioner.load_state_dict(state["preconditioner"])
        fresh.cross.load_state_dict(state["cross"])
        fresh.start, fresh.calls = state["start"], state["calls"]
        self.state = fresh


def _check_slots(curvature: Curvature, solver: Solver, preconditioner: Curvature | None) -> None:
    """Refuse what does not belong in a slot, such as a class in place of its instance."""
    slots = [("curvature", curvature, Curvature, "KFAC()"), ("solver", solver, Solver, "Direct()")]
    if preconditioner is not None:
        slots.append(("preconditioner", preconditioner, Curvature, "KFAC()"))
    for name, value, kind, example in slots:
        if not isinstance(value, kind):
            raise HyperkronError(f"{name}={value!r} is no {kind.__name__.lower()}; pass an instance such as {example}.")


def outer_gradients(point: Point) -> tuple[Tensor, Tree, Tree]:
    """(J_out, ∂_θ J_out, ∂_λ J_out) from one backward pass; absent dependences are zero."""
    loss = point.outer()
    wanted = [*point.params.values(), *point.hypers.values()]
    if not loss.value.requires_grad:
        raise independent("outer")
    found = torch.autograd.grad(loss.value, wanted, allow_unused=True)
    filled = [
        torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for p, g in zip(wanted, found, strict=True)
    ]
    count = len(point.params)
    if all(g is None for g in found[:count]):
        raise independent("outer")
    b = dict(zip(point.params, filled[:count], strict=True))
    direct = dict(zip(point.hypers, filled[count:], strict=True))
    point.finite("∂θ J_out", trees.norm(b), "look for overflow in the model or its loss")
    return loss.value.detach(), b, direct
