"""What KFAC and EKFAC share: block-diagonal curvature whose inverse is two small matrices per layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from hyperkron.curvature.base import Curvature, CurvatureState, check_damping
from hyperkron.curvature.kfac.capture import measure
from hyperkron.curvature.kfac.coverage import Coverage, Fallback, Plan
from hyperkron.curvature.kfac.coverage import plan as make_plan
from hyperkron.curvature.kfac.eigen import EigenInverses, checked, damped
from hyperkron.curvature.kfac.factors import Factor, Factors, dense, stored
from hyperkron.curvature.kfac.inverse import BlockInverses, FactorsNeeded
from hyperkron.curvature.kfac.layers import LayerOf, WeightSharing, checked_layers
from hyperkron.curvature.kfac.measured import Basis, Measured, Measurement
from hyperkron.curvature.kfac.owners import agreed
from hyperkron.curvature.kfac.penalty import mean_damping, scaled_factor
from hyperkron.curvature.kfac.state import KroneckerOperator, KroneckerState, layout, own_diagonal
from hyperkron.evaluation.passes import Pass
from hyperkron.evaluation.point import Point, independent
from hyperkron.kernels.execution import Pending
from hyperkron.losses import Fisher
from hyperkron.solution import CoverageError, FactorizationError, HyperkronError, NonFiniteError, Status
from hyperkron.trees import Tree
from hyperkron.validation import check_interval, check_one_of, check_whole

MAX_FAILURES = 3
"""After this many failed refreshes in a row an error is raised."""


@dataclass(frozen=True)
class Kronecker(Curvature):
    """What KFAC and EKFAC share: measuring, averaging, refreshing, and what happens when a factorisation fails."""

    damping: float = 1e-3
    fisher: Fisher = "mc"
    samples: int = 1
    sharing: WeightSharing = "expand"
    refresh_every: int = 1
    ema: float = 0.0
    fallback: Fallback = "diagonal"
    strict: bool = False
    seed: int = 0
    keep_previous: bool = True
    layers: Sequence[LayerOf] = field(default=(), kw_only=True)

    invertible: ClassVar[bool] = True
    records_inverse: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_damping(self.damping)
        for name, kind in (("fisher", Fisher), ("sharing", WeightSharing), ("fallback", Fallback)):
            check_one_of(name, getattr(self, name), get_args(kind))
        check_whole("samples", self.samples)
        check_whole("refresh_every", self.refresh_every)
        check_whole("seed", self.seed, 0)
        check_interval("ema", self.ema, 0, 1, brackets="[)", remedy="0 uses the newest factors alone")
        if not isinstance(self.keep_previous, bool):
            raise HyperkronError(
                f"keep_previous={self.keep_previous!r} must be True or False; False saves the memory of the previous "
                "inverses while new ones are made."
            )
        object.__setattr__(self, "layers", checked_layers(self.layers))

    def init(self) -> KroneckerState:
        return KroneckerState(self.seed)

    def coverage(self, model: nn.Module) -> Coverage:
        """Which curvature every trainable parameter of ``model`` gets; ``print`` it to see the table."""
        return make_plan(model, self.fallback, self.layers).coverage()

    def operator(self, point: Point, state: CurvatureState) -> KroneckerOperator:
        """The curvature at ``point``, measured again when it is ``refresh_every`` calls old."""
        assert isinstance(state, KroneckerState)
        plan = state.plan(point.model, point.params, self.fallback, self.layers)
        state.divide(plan, point, self._reuses)
        if self.strict:
            _refuse(plan.coverage())
        if not state.fits(point.params):  # the first call, or other parameters than before
            state.factors = {}
            state.let_go()
        if not self.due(state):
            state.age += 1
            state.coverage = plan.coverage(state.uncalled)
            return KroneckerOperator(plan.blocks, state, self.damping)
        refresh = self._refresh(point, state, plan)
        # queue more work before waiting for the factorisation, unless that work overwrites the factors
        if point.execution.queued and not point.reuses_pass_memory:
            return KroneckerOperator(plan.blocks, state, self.damping, refresh, self._used_once)
        refresh.wait()
        return KroneckerOperator(plan.blocks, state, self.damping, None, self._used_once)

    def due(self, state: CurvatureState) -> bool:
        assert isinstance(state, KroneckerState)
        return state.inverses is None or state.age + 1 >= self.refresh_every

    def constants(self, state: CurvatureState) -> Hashable | None:
        assert isinstance(state, KroneckerState)
        return (state.unmasked,)

    @property
    def records_refreshes(self) -> bool:
        return self.deferred

    def _refresh(self, point: Point, state: KroneckerState, plan: Plan) -> Pending[None]:
        """Begin to compute factors and inverses; waiting for the result stores them, or keeps the previous ones."""
        if self.lean:  # free the inverses in use first, so that both are never in memory
            state.let_go()
        generator = state.random(point.device)
        before = None if point.recording else generator.get_state()
        try:
            measured = self._measure(point, state, plan, checked=not (point.execution.queued and self.deferred))
            self._check(point, state, plan, measured)
            factors, averages = self._factors(point, state, measured)
            pending = self._invert(point, state, plan, measured, factors)
        except (FactorizationError, NonFiniteError) as error:
            self._fall_back(point, state, error)
            return Pending.ready(None)

        def finish() -> None:
            try:
                try:
                    inverses, status = pending.wait()
                except FactorsNeeded:  # measure again with the same draws, and keep the factors this time
                    assert before is not None
                    generator.set_state(before)
                    repeated = self._measure(point, state, plan)
                    factors, _ = self._factors(point, state, repeated)
                    inverses, status = self._invert(point, state, plan, repeated, factors, keep=True).wait()
            except (FactorizationError, NonFiniteError) as error:
                self._fall_back(point, state, error)
                return
            state.factors = averages
            diagonal = own_diagonal(self._diagonal(plan, measured), point.params)
            state.renew(inverses, status, diagonal, measured, layout(point.params))

        return Pending(finish)

    @property
    def lean(self) -> bool:
        return not self.keep_previous

    @property
    def _reuses(self) -> bool:
        """Whether later calls use parts of this measurement."""
        return self.refresh_every > 1 or self.ema > 0

    @property
    def _used_once(self) -> bool:
        """Whether inverses are used in one call only."""
        return self.lean and self.refresh_every == 1

    def _fall_back(self, point: Point, state: KroneckerState, error: HyperkronError) -> None:
        """Continue with the previous inverse, if there is one and it has not been kept too often."""
        state.failures += 1
        if isinstance(error, FactorizationError) and (blame := point.culprits()):
            error = FactorizationError(error.what, blame)
        if state.failures >= MAX_FAILURES:
            error.args = (f"{error} It was refresh {state.failures} in a row to fail.",)
        if state.inverses is None or state.failures >= MAX_FAILURES:
            raise error
        state.status, state.age = Status.KEPT_PREVIOUS, state.age + 1
        point.notes["factorisation"] = str(error)

    def _measure(
        self,
        point: Point,
        state: KroneckerState,
        plan: Plan,
        basis: Basis | None = None,
        checked: bool = True,
        diagonal: bool = True,
    ) -> Measured:
        generator = state.random(point.device)

        def work(at: Point, _: Tree) -> Measured:
            how = Measurement(
                fisher=self.fisher,
                samples=self.samples,
                sharing=self.sharing,
                generator=generator,
                basis=basis,
                low_rank=self._low_rank and state.owners is None,  # ranks add matrices, not rows
                checked=checked,
                diagonal=diagonal,
                wide=basis is None and self._wide,
                damping=self.damping,
                owners=state.owners,
                unmasked=bool(state.unmasked),
                keep=basis is None and state.owners is None and self._keeps_gradients(at),
                first=state.refreshes == 0 and basis is None and not at.recording,
            )
            found = measure(at, plan, how)
            if not at.recording and basis is None:
                state.unmasked = found.unmasked and state.unmasked is not False
            return found

        if checked:  # this waits for the device, so it cannot be recorded
            return work(point, {})

        def key() -> object:
            return id(plan), diagonal, state.unmasked

        return point.run(Pass("factors", work, key=key, temporary=Measured.large, generators=[generator]))

    def _keeps_gradients(self, point: Point) -> bool:
        """Whether gradients of single examples are kept while factors are measured."""
        return False

    @property
    def deferred(self) -> bool:
        """Whether a refresh never waits for the device before its inverses are used."""
        return False

    @property
    def _wide(self) -> bool:
        """Whether factors over all positions are measured besides the reduced ones."""
        return False

    @property
    def _low_rank(self) -> bool:
        """Whether factors may be kept as rows; averages need matrices."""
        return False

    def _check(self, point: Point, state: KroneckerState, plan: Plan, measured: Measured) -> None:
        """Refuse an inner loss that does not depend on the model, a penalty that makes the curvature negative, and,
        with ``strict``, layers that were never called as modules."""
        state.uncalled = measured.uncalled
        state.coverage = plan.coverage(measured.uncalled)
        if self.strict and measured.uncalled:
            raise CoverageError(
                f"strict=True, but {', '.join(measured.uncalled)} belong to layers that were never called as "
                "modules; call the layer itself, or use strict=False."
            )
        if measured.uncalled:
            point.notes["uncalled"] = f"{', '.join(measured.uncalled)}: fallback, for their layers were not called"
        if not (measured.reached or measured.diagonal or measured.l2) and (plan.blocks or self.fallback == "diagonal"):
            raise independent("inner")
        lowest = {n: x.detach().min().cpu() for n, x in measured.l2.items() if isinstance(x, Tensor)}
        lowest |= {n: torch.tensor(x, device="cpu") for n, x in measured.l2.items() if n not in lowest}
        for name, value in lowest.items():
            if value + self.damping < 0:
                raise HyperkronError(
                    f"the l2 penalty of {name} has curvature {float(value):.4g}, which with damping={self.damping} is "
                    f"negative ({float(value) + self.damping:.4g}); use coefficients ≥ 0 (exp or softplus of λ)."
                )

    def _factors(
        self, point: Point, state: KroneckerState, measured: Measured
    ) -> tuple[Factors, dict[str, tuple[Tensor, Tensor]]]:
        """A and B of every block, with the columns of A scaled if they are penalised unevenly, and, if β > 0, the
        moving averages β·old + (1−β)·new that they are computed from."""
        factors: Factors = {name: (measured.a[name], measured.b[name]) for name in measured.a}
        averages: dict[str, tuple[Tensor, Tensor]] = {}
        if self.ema > 0:
            agreed(point.problem.group, lambda: self._checked(point, measured))
            for name, (a, b) in factors.items():
                old_a, old_b = state.factors.get(name, (dense(a), dense(b)))
                averages[name] = (old_a.lerp(dense(a), 1 - self.ema), old_b.lerp(dense(b), 1 - self.ema))
            factors = {**averages}
        return {name: (scaled_factor(a, measured.scales.get(name)), b) for name, (a, b) in factors.items()}, averages

    def _finite(self, point: Point, measured: Measured, good: bool) -> None:
        """Unless ``good``, raise an error that names the first block whose factors are not finite."""
        if good:
            return
        point.settle()  # if the loss is not finite, its error is the better message
        bad = next((n for n in measured.a if not bool(finite(measured, n))), "parameters outside the blocks")
        remedy = point.culprits() or "look for overflow in the model, or use float64"
        raise NonFiniteError(f"the factors of {bad} are not finite; {remedy}.")

    def _checked(self, point: Point, measured: Measured) -> tuple[None, Status]:
        """:meth:`_finite` of what this process has measured."""
        self._finite(point, measured, bool(finite(measured)))
        return None, Status.DIRECT

    def _block_damping(self, plan: Plan, measured: Measured, name: str) -> Tensor | float:
        """δ plus the mean of 2α of the L2 penalties; ``measured.scales`` has the differences between columns.

        If a weight is also used as an embedding, the mean of the diagonal of that use is added too.
        """
        block = plan.blocks[name]
        damping = mean_damping(plan, block, measured.l2, self.damping)
        for tied in (measured.diagonal[n] for n in block.names if n in measured.diagonal):
            damping = damping + tied.mean()
        return damping

    def _diagonal(self, plan: Plan, measured: Measured) -> dict[str, Tensor]:
        """The damped diagonal of every parameter outside the blocks that the inner loss depends on."""
        inside = {name for block in measured.reached for name in plan.blocks[block].names}
        found: dict[str, Tensor] = {}
        by_kind: dict[bool, dict[str, Tensor | float]] = {True: {}, False: {}}  # δ + 2α: a number, or a tensor
        for name in (name for name in plan.rows if name not in inside):
            declared = plan.rows[name].curvature != "kronecker" or name in measured.uncalled
            if declared and self.fallback == "zero":
                continue
            damping = measured.l2.get(name, 0.0) + self.damping
            if declared and self.fallback == "identity":
                found[name] = torch.ones((), dtype=torch.float64, device="cpu") + damping
            elif name in measured.diagonal:
                by_kind[isinstance(damping, float)][name] = damping
            elif name in measured.l2:  # only the penalty depends on it
                found[name] = torch.zeros((), dtype=torch.float64, device="cpu") + damping
        for names in by_kind.values():
            if names:
                damped = self._damped([measured.diagonal[name] for name in names], list(names.values()))
                found.update(zip(names, damped, strict=True))
        return found

    def _damped(self, diagonals: list[Tensor], damping: list[Any]) -> Sequence[Tensor]:
        """d + δ, the diagonals of parameters outside the blocks, damped like the blocks.

        ``damping`` holds only numbers or only tensors; with numbers a few launches treat all parameters.
        """
        return torch._foreach_add(diagonals, damping)

    def _eigen_inverses(
        self, point: Point, plan: Plan, measured: Measured, found: Iterable[tuple[str, Tensor, Tensor, Tensor]]
    ) -> EigenInverses:
        """The damped inverses of blocks given as (name, Q_A, Q_B, spectrum)."""
        blocks = {name: damped(a, b, s, self._block_damping(plan, measured, name)) for name, a, b, s in found}
        group = point.problem.group
        return agreed(group, lambda: (checked(point, EigenInverses(blocks)), Status.DIRECT))[0]

    @abstractmethod
    def _invert(
        self, point: Point, state: KroneckerState, plan: Plan, measured: Measured, factors: Factors, keep: bool = False
    ) -> Pending[tuple[BlockInverses, Status]]:
        """Begin to compute the damped inverses of all blocks; the result is the inverses and their status."""


def finite(measured: Measured, block: str | None = None) -> Tensor:
    """Whether all entries of all factors, or of one block, are finite; a tensor that is not read yet."""
    names = list(measured.a) if block is None else [block]
    factors: list[Factor] = [side[name] for name in names for side in (measured.a, measured.b)]
    factors += measured.diagonal.values() if block is None else []
    if not factors:
        return torch.ones((), dtype=torch.bool, device="cpu")
    by_dtype: dict[torch.dtype, list[Tensor]] = {}  # one launch for each
    for tensor in map(stored, factors):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    norms = [torch.stack(torch._foreach_norm(given, float("inf"))) for given in by_dtype.values()]
    return torch.stack([x.isfinite().all() for x in norms]).all() if len(norms) > 1 else norms[0].isfinite().all()


def _refuse(coverage: Coverage) -> None:
    if coverage.uncovered:
        listed = ", ".join(f"{row.parameter} ({row.reason})" for row in coverage.uncovered[:5])
        more = len(coverage.uncovered) - 5
        raise CoverageError(
            f"strict=True, but KFAC has no Kronecker block for {listed}{f' and {more} more' if more > 0 else ''}; "
            "use strict=False for the declared fallback, or freeze these parameters."
        )
