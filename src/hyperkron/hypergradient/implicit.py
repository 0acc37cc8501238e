"""The formula itself: dΦ/dλ = ∂_λ J_out − ∂²_λθ J_in · A⁻¹ · ∂_θ J_out."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyperkron import trees
from hyperkron.cross import MAX_CHANGES, RECHECK, Cross, CrossState, Mode, code_of
from hyperkron.curvature import Curvature, CurvatureState, Invertible
from hyperkron.curvature.base import Eigenbasis
from hyperkron.evaluation.passes import Pass
from hyperkron.evaluation.point import Point, independent
from hyperkron.hypergradient.autocast import too_coarse
from hyperkron.hypergradient.base import Hypergradient
from hyperkron.hypergradient.passes import RecordedPasses
from hyperkron.hypergradient.recordings import Answer, Request
from hyperkron.hypergradient.replay import Replays
from hyperkron.kernels import graphs
from hyperkron.kernels.execution import Pending
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HypergradientResult, HyperkronError, NonFiniteError, Solution, Status, warn_once
from hyperkron.solvers import LinearSystem, Solver
from hyperkron.trees import Tree

Graph = bool | Literal["passes"]
"""What is recorded as a CUDA graph: the whole step, only the passes through the model, or nothing."""


@dataclass
class ImplicitState:
    """What an implicit hypergradient remembers: curvature, preconditioner, cross-term decision and last solution."""

    curvature: CurvatureState
    preconditioner: CurvatureState
    cross: CrossState = field(default_factory=CrossState)
    start: Tree | None = None
    calls: int = 0
    plain: bool = False  # whether the objectives run without autocast, because it was found too coarse
    modules: list[weakref.ref[nn.Module]] = field(default_factory=list, repr=False)  # of the model; not saved
    inner: Any = field(default=None, repr=False)  # the code of the inner loss; not saved
    changes: int = field(default=0, repr=False)  # in how many calls in a row that was another one; not saved


class Implicit(Hypergradient):
    """The implicit hypergradient, with one argument for each part of the formula.

        dΦ/dλ = ∂_λ J_out − ∂²_λθ J_in · v ,    (A + δI) v = ∂_θ J_out

    Args:
        curvature: A.
        solver: how to solve for v: ``Direct()`` for curvatures with an inverse, else an iterative solver.
        preconditioner: a second curvature with an inverse, for ``CG`` and ``GradientDescent``. Default: none.
        warm_start: start each solve from the previous solution. Default: False.
        cross: how to compute ∂²_λθ J_in · v: ``auto`` (default), ``reverse``, ``forward`` or ``difference``.
        radius: radius of the finite difference; ``None`` chooses it by dtype.
        graph: on a GPU, record a step (``True``), or only its passes through the model (``"passes"``), as CUDA graphs
            and replay them; on a CPU it has no effect. Default: False.

    When to use ``graph=True``: for small models, where a step waits for Python. It needs batches of one shape on the
    device, and objectives that never wait for the device and draw no random numbers on the CPU. Dropout draws one mask
    for a step and another for the next, as without the graph. A step that cannot be recorded runs without the graph,
    with a warning if this is permanent. It works with

    - ``Direct()`` and KFAC, EKFAC (except steps that compute a new eigenbasis), the identity, or SAMA with optimizers
      without second moments;
    - ``CG``, or ``Neumann`` and ``GradientDescent`` with a given step, and ``Hessian``, ``GGN`` or the identity;
    - your own curvatures that say so (``records_products``, ``records_inverse``).

    A recorded solve that ends early has the usual value and status, but runs the products of all iterations. Python
    numbers used by the objectives keep the values they had when recorded. A graph does not share its memory with other
    work, and if a factorisation fails there is no previous inverse to use.

    When to use ``graph="passes"``: for large models, whose passes wait for Python, while factorisations and solves do
    not. It needs less memory than recording a whole step, works with every curvature and solver, and handles a failed
    factorisation as usual. b, the cross term and KFAC's pass for its factors are recorded; products with a Hessian are
    not. If an objective calls ``torch.func.grad`` or ``vjp`` itself, its passes cannot be recorded; a warning says so.

    Example:
        >>> import hyperkron as hk
        >>> from hyperkron.curvature import GGN, KFAC
        >>> method = hk.Implicit(GGN(damping=1e-3), hk.solvers.CG(20), preconditioner=KFAC(damping=1e-3))
    """

    solver: Solver

    def __init__(
        self,
        curvature: Curvature,
        solver: Solver,
        *,
        preconditioner: Curvature | None = None,
        warm_start: bool = False,
        cross: Mode = "auto",
        radius: float | None = None,
        graph: Graph = False,
    ) -> None:
        self.curvature, self.solver, self.preconditioner = curvature, solver, preconditioner
        self.warm_start, self.graph = warm_start, graph
        self._check_slots()
        if graph != "passes" and not isinstance(graph, bool):
            raise HyperkronError(f"graph={graph!r} is unknown; use True, 'passes' or False.")
        if graph is True:
            self._check_graph()
        self.cross = Cross(cross, radius)
        self._forget()

    def __repr__(self) -> str:
        extra = f", preconditioner={self.preconditioner!r}" if self.preconditioner else ""
        return f"Implicit({self.curvature!r}, {self.solver!r}{extra})"

    def _check_slots(self) -> None:
        """Refuse arguments of the wrong type, such as a class instead of an instance, and unsupported combinations."""
        slots = [("curvature", self.curvature, Curvature, "KFAC()"), ("solver", self.solver, Solver, "Direct()")]
        if self.preconditioner is not None:
            slots.append(("preconditioner", self.preconditioner, Curvature, "KFAC()"))
        for name, value, kind, example in slots:
            if not isinstance(value, kind):
                raise HyperkronError(
                    f"{name}={value!r} is not a {kind.__name__.lower()}; pass an instance such as {example}."
                )
        solver = type(self.solver).__name__
        if self.preconditioner is not None and not self.solver.uses_preconditioner:
            raise HyperkronError(
                f"solver={solver} takes no preconditioner; use CG or GradientDescent, or leave preconditioner out."
            )
        if self.warm_start and not self.solver.uses_start:
            raise HyperkronError(f"solver={solver} has no use for warm_start=True; use GradientDescent or CG.")

    def _check_graph(self) -> None:
        """Refuse what cannot be recorded: steps that read from the device, or whose state changes between steps."""
        curvature, solver = self.curvature, self.solver
        solver.check_graph()
        if self.preconditioner is not None:
            raise HyperkronError(
                f"graph=True does not work with preconditioner={type(self.preconditioner).__name__}; leave the "
                "preconditioner out, or use graph=False."
            )
        if not (curvature.records_products if solver.needs_products else curvature.records_inverse):
            raise HyperkronError(
                f"graph=True does not work with {type(curvature).__name__} and {type(solver).__name__}; use KFAC, "
                "EKFAC or Identity with Direct(), or Hessian, GGN or Identity with CG or Neumann, or graph=False."
            )
        curvature.check_graph()

    def _forget(self) -> None:
        self.state = self._empty()
        self._forget_recordings()

    def _forget_recordings(self) -> None:
        self._replays: Replays | RecordedPasses = RecordedPasses() if self.graph == "passes" else Replays()

    def fresh(self) -> Implicit:
        """A copy of the configuration with an empty state and without recordings."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        made._forget()
        return made

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and ``copy``: everything but the model and the recordings. A copy belongs to the first model and
        inner loss it is used with."""
        return {**vars(self), "state": self.state_dict(), "_replays": None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept)
        self.load_state_dict(kept["state"])

    @property
    def measures_curvature(self) -> bool:
        """Whether A or its preconditioner is measured on data; False for the identity and SAMA's diagonal."""
        return self.preconditioner is not None or self.curvature.uses_data

    def _empty(self) -> ImplicitState:
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
        """dΦ/dλ at the current (λ, θ).

        A is measured on ``curvature_batch``, or on ``inner_batch`` if it is ``None``.
        """
        self._forget_others(problem, model)
        answer, start = None, self._start(model)
        make_point = functools.partial(
            Point, problem, model, hyper, inner_batch, outer_batch, curvature_batch=curvature_batch
        )
        if self.state.calls % RECHECK == 0:
            self.state.plain = self.state.plain or too_coarse(make_point)
        given = getattr(problem, "autocast", None)  # Point raises an error if problem is not a BilevelProblem
        plain = self.state.plain if given is None else not given
        recorded = bool(self.graph) and graphs.available(next(model.parameters()).device)
        if recorded:
            batches, memory = (inner_batch, outer_batch, curvature_batch, start), self.state.curvature
            states = memory, self.state.cross, self.curvature.due(memory), plain
            answer = self._replays.step(Request(self._answer, problem, model, hyper, batches, self.curvature, *states))
        if answer is None:
            with make_point(plain=plain, passes=self._replays.passes if recorded else None) as point:
                point.warns_of_strangers = self.state.calls == 0
                answer = self._answer(point, start)
            if recorded:
                self._replays.after_eager_step(point)
        solution = answer.solution.wait()
        if self.warm_start:
            self.state.start = solution.value
        self.state.calls += 1
        stats = {**self._stats(solution), **answer.notes}
        if plain and given is None:
            stats["autocast"] = "too coarse"
        (outer_loss,) = answer.value.wait()
        return HypergradientResult(answer.grads, solution.status, outer_loss, solution, stats)

    def _forget_others(self, problem: BilevelProblem, model: nn.Module) -> None:
        """Reset the state if it belongs to another model, such as the model of an earlier fold, or another inner loss.

        Models are compared by their modules, because ``fully_shard`` replaces parameters; losses by their code, because
        they may be defined again in every call.
        """
        modules = graphs.modules_of(model) if isinstance(model, nn.Module) else []
        known = self.state.modules
        same = len(known) == len(modules) and all(x() is m for x, m in zip(known, modules, strict=True))
        inner = code_of(getattr(problem, "inner", None))
        changes = 0 if self.state.inner in (None, inner) else self.state.changes + 1
        if (known and not same) or changes:
            self._forget()
            same = False
        self.state.inner, self.state.changes = inner, changes
        if changes == MAX_CHANGES:
            warn_once(
                "inner-changes",
                "every call has another inner loss than the one before, so the hypergradient starts again each time: "
                "it keeps no curvature, average or warm start; use a hypergradient of its own for each inner loss.",
            )
        if not same:
            self.state.modules = [weakref.ref(module) for module in modules]

    def _start(self, model: nn.Module) -> Tree | None:
        """The last solution for a warm start, or ``None`` if there is none or other parameters are trained now."""
        start = self.state.start if self.warm_start else None
        trained = {} if start is None else {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        return start if start is not None and {name: x.shape for name, x in start.items()} == trained else None

    def _answer(self, point: Point, start: Tree | None) -> Answer:
        """The formula at ``point``; on a GPU only the solver waits for its results."""
        state = self.state
        # Usually curvature first: the GPU factorises while Python queues b. If memory is short b first: its pass then
        # does not run while the inverses are in memory.
        early = self.curvature.lean and not point.recording and not point.reuses_pass_memory
        first = _outer_gradients(point) if early else None
        operator = self.curvature.operator(point, state.curvature)
        preconditioner = self._preconditioner(point, state)  # before b, because its pass may overwrite b
        value, b, direct = first or _outer_gradients(point)
        del first
        if point.dtype == torch.float16:  # its range is too narrow for v, so the cross term gets v in float32
            b = trees.widened(b)
        if point.reuses_pass_memory and isinstance(operator, Invertible):
            operator.overwrites = not self.solver.needs_products
        if point.curvature_batch is point.inner_batch and self.solver.needs_products:
            b = b | {name: torch.zeros_like(b[name]) for name in operator.unreached()}  # v has no effect there
        v, solution = self._solve(point, LinearSystem(operator, b, start, preconditioner))
        if not point.recording:
            operator.release()
        if point.reuses_pass_memory:  # the cross term overwrites b, and v may share its memory
            v = {name: x.clone() if x.data_ptr() == b[name].data_ptr() else x for name, x in v.items()}
        del b
        crossed = self.cross.term(point, v, operator, state.cross)
        rounded = trees.cast(v, point.params)
        solution = solution.then(lambda found: dataclasses.replace(found, value=rounded))
        grads = trees.subtract(direct, crossed)
        point.finite("hypergradient", trees.norm(grads), "raise damping, or look for extreme values in the batches")
        return Answer(point.execution.later(value), grads, solution, point.notes)

    def _solve(self, point: Point, system: LinearSystem) -> tuple[Tree, Pending[Solution]]:
        if point.recording:
            return self.solver.record(system, point.execution)
        start, preconditioner = system.start, system.preconditioner
        solution = self.solver.solve(system.operator, system.b, start=start, preconditioner=preconditioner)
        return self._finite(point, solution).value, Pending.ready(solution)

    def _finite(self, point: Point, solution: Solution) -> Solution:
        if solution.status is Status.NON_FINITE:
            blame = point.culprits()
            raise NonFiniteError(f"{self.solver!r}: {solution.status.value}{blame and f' Here {blame}.'}")
        return solution

    def inverse(self, point: Point) -> Callable[[Tree], Solution]:
        """b ↦ (A + δI)⁻¹ b for stacked right-hand sides, with A measured once at ``point``."""
        return self.inverse_and_eigenbases(point)[0]

    def inverse_and_eigenbases(self, point: Point) -> tuple[Callable[[Tree], Solution], dict[str, Eigenbasis]]:
        """:meth:`inverse`, and the eigenbases of the blocks that it is computed from; without products alone."""
        operator = self.curvature.operator(point, self.state.curvature)
        preconditioner = self._preconditioner(point, self.state)

        def solve(b: Tree) -> Solution:
            if not b and isinstance(operator, Invertible):  # all of b is solved for in the eigenbases
                return Solution({}, operator.status)
            return self._finite(point, self.solver.solve_stacked(operator, b, preconditioner=preconditioner))

        direct = isinstance(operator, Invertible) and not self.solver.needs_products
        return solve, operator.eigenbases() if direct and isinstance(operator, Invertible) else {}

    def _preconditioner(self, point: Point, state: ImplicitState) -> Invertible | None:
        if self.preconditioner is None:
            return None
        made = self.preconditioner.operator(point, state.preconditioner)
        if not isinstance(made, Invertible):
            raise HyperkronError(
                f"preconditioner={type(self.preconditioner).__name__} has no inverse; use KFAC, EKFAC or Identity."
            )
        return made.definite()

    def _stats(self, solution: Solution) -> dict[str, float | int | str]:
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
            stats |= memory.stats()
        return stats

    @contextmanager
    def collected(self) -> Iterator[None]:
        memories = (self.state.curvature, self.state.preconditioner)
        try:
            for memory in memories:
                memory.collect()
            yield
        finally:
            for memory in memories:
                memory.uncollect()

    def state_dict(self) -> dict[str, Any]:
        return {
            "curvature": self.state.curvature.state_dict(),
            "preconditioner": self.state.preconditioner.state_dict(),
            "cross": self.state.cross.state_dict(),
            "start": None if self.state.start is None else dict(self.state.start),
            "calls": self.state.calls,
            "plain": self.state.plain,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        loaded = self._empty()
        loaded.curvature.load_state_dict(state["curvature"])
        loaded.preconditioner.load_state_dict(state["preconditioner"])
        loaded.cross.load_state_dict(state["cross"])
        if not self.cross.accepts(loaded.cross):
            loaded.cross = CrossState()
        loaded.start, loaded.calls, loaded.plain = state["start"], state["calls"], state["plain"]
        self.state = loaded
        self._forget_recordings()  # they use the generator and the inverses of the old state


def _outer_gradients(point: Point) -> tuple[Tensor, Tree, Tree]:
    """:func:`outer_gradients` as a pass; the next pass may overwrite b."""
    return point.run(
        Pass("outer gradient", lambda at, _: outer_gradients(at), temporary=lambda found: list(found[1].values()))
    )


def outer_gradients(point: Point) -> tuple[Tensor, Tree, Tree]:
    """(J_out, ∂_θ J_out, ∂_λ J_out) from one backward pass; absent dependences are zero."""
    loss = point.outer()
    wanted = [*point.params.values(), *point.hypers.values()]
    if not loss.value.requires_grad:
        raise independent("outer")
    found = torch.autograd.grad(loss.value, wanted, allow_unused=True)
    count = len(point.params)
    if all(g is None for g in found[:count]):
        raise independent("outer")
    b, direct = trees.filled(point.params, found[:count]), trees.filled(point.hypers, found[count:])
    point.finite("∂θ J_out", trees.norm(b), "look for overflow in the model or its loss")
    return loss.value.detach(), b, direct
