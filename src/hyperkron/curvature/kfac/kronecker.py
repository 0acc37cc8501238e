"""KFAC and EKFAC: block-diagonal curvature whose inverse is two small matrices a layer."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.curvature.base import Curvature, CurvatureState, Invertible, checked_damping
from hyperkron.curvature.kfac.capture import Fisher, Measured, accumulation_dtype, measure
from hyperkron.curvature.kfac.coverage import Block, Coverage, Fallback, Plan, plan
from hyperkron.curvature.kfac.factors import Factor, LowRank, dense
from hyperkron.curvature.kfac.inverse import (
    BlockInverse,
    EigenInverse,
    Split,
    eigen_bases,
    factored_inverses,
    load_inverse,
)
from hyperkron.curvature.kfac.layers import WeightSharing
from hyperkron.point import Point
from hyperkron.solution import (
    CoverageError,
    FactorizationError,
    HyperkronError,
    NonFiniteError,
    Status,
)
from hyperkron.trees import Tree

MAX_FAILURES = 3
"""After so many refreshes in a row that ended with the previous inverse, an error is raised."""


class KroneckerState(CurvatureState):
    """Factors, inverses and ages of a Kronecker curvature.

    Attributes:
        age: hypergradients computed since the inverse in use was made; 0 right after a refresh.
        refreshes: how many times it was made.
        failures: refreshes in a row that failed and kept the previous inverse.
        status: how the inverse in use was obtained.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator: torch.Generator | None = None
        self.age = 0
        self.refreshes = 0
        self.failures = 0
        self.status = Status.DIRECT
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}  # the moving averages, where there are any
        self.inverses: dict[str, BlockInverse] = {}
        self.diagonal: dict[str, Tensor] = {}
        self.parameters: list[str] = []  # those that were trained when the inverse was made

    def random(self, device: torch.device) -> torch.Generator:
        """The generator of Monte-Carlo vectors; every refresh draws anew."""
        if self.generator is None or self.generator.device.type != device.type:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator

    def state_dict(self) -> dict[str, Any]:
        return {
            "age": self.age,
            "refreshes": self.refreshes,
            "failures": self.failures,
            "status": self.status.name,
            "seed": self.seed,
            "generator": None if self.generator is None else self.generator.get_state(),
            "generator_device": "" if self.generator is None else str(self.generator.device),
            "factors": {name: {"a": a, "b": b} for name, (a, b) in self.factors.items()},
            "inverses": {name: inverse.state_dict() for name, inverse in self.inverses.items()},
            "diagonal": dict(self.diagonal),
            "parameters": list(self.parameters),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.age, self.refreshes, self.failures = state["age"], state["refreshes"], state["failures"]
        self.status, self.seed = Status[state["status"]], state["seed"]
        self.generator = None
        if state["generator"] is not None:
            self.generator = torch.Generator(state["generator_device"])
            self.generator.set_state(state["generator"])
        self.factors = {name: (f["a"], f["b"]) for name, f in state["factors"].items()}
        self.inverses = {name: load_inverse(inverse) for name, inverse in state["inverses"].items()}
        self.diagonal = dict(state["diagonal"])
        self.parameters = list(state["parameters"])


class KroneckerOperator(Invertible):
    """The damped block-diagonal curvature: Kronecker blocks, diagonal layers, and what neither reaches.

    A parameter that the inner loss does not depend on has neither; the solution is zero there, as its column of the
    cross term is. A preconditioner must not be zero anywhere: see :meth:`definite`.
    """

    def __init__(self, blocks: dict[str, Block], state: KroneckerState, damping: float) -> None:
        self.blocks = {name: blocks[name] for name in state.inverses}
        self.inverses, self.diagonal, self.status = state.inverses, state.diagonal, state.status
        self.products = 0
        self._damping, self._elsewhere = damping, 0.0

    def definite(self) -> KroneckerOperator:
        """The same operator with δ (1 if δ = 0) where there is no curvature: positive definite on all parameters."""
        self._elsewhere = self._damping or 1.0
        return self

    def matvec(self, v: Tree) -> Tree:
        self.products += 1
        return self._apply(v, lambda inverse, x: inverse.matvec(x), lambda x, d: x * d)

    def solve(self, b: Tree) -> Tree:
        return self._apply(b, lambda inverse, x: inverse.solve(x), lambda x, d: x / d)

    def _apply(self, v: Tree, on_block: Any, on_diagonal: Any) -> Tree:
        found: Tree = {}
        for name, inverse in self.inverses.items():
            block = self.blocks[name]
            matrix = on_block(inverse, block.join(v))
            found.update(block.part(matrix, v))
        for name, d in self.diagonal.items():
            found[name] = on_diagonal(v[name], d)
        for name in v.keys() - found.keys():
            found[name] = on_diagonal(v[name], self._elsewhere) if self._elsewhere else torch.zeros_like(v[name])
        return {name: found[name].to(x.dtype) for name, x in v.items()}


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

    def __post_init__(self) -> None:
        checked_damping(self.damping)
        for name, allowed in (
            ("fisher", ("mc", "type-2", "empirical")),
            ("sharing", ("expand", "reduce")),
            ("fallback", ("diagonal", "identity", "zero")),
        ):
            if getattr(self, name) not in allowed:
                raise HyperkronError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(allowed)}.")
        for name in ("samples", "refresh_every"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise HyperkronError(f"{name}={value!r} must be a whole number ≥ 1.")
        if not 0 <= self.ema < 1:
            raise HyperkronError(f"ema={self.ema!r} must lie in [0, 1); 0 uses the newest factors alone.")

    def init(self) -> KroneckerState:
        """A state without factors; the first call measures them."""
        return KroneckerState(self.seed)

    def coverage(self, model: nn.Module) -> Coverage:
        """Which curvature every trainable parameter of ``model`` gets; ``print`` it to see the table."""
        return plan(model, self.fallback).coverage()

    def operator(self, point: Point, state: CurvatureState) -> KroneckerOperator:
        """The curvature at ``point``, measured anew when it is ``refresh_every`` calls old."""
        assert isinstance(state, KroneckerState)
        made = plan(point.model, self.fallback)
        if self.strict:
            _refuse(made.coverage())
        if state.parameters != list(made.rows):  # the first call, or others are trained now: what is kept does not fit
            state.factors, state.inverses, state.diagonal = {}, {}, {}
            self._refresh(point, state, made)
        elif state.age + 1 >= self.refresh_every:
            self._refresh(point, state, made)
        else:
            state.age += 1
        return KroneckerOperator(made.blocks, state, self.damping)

    def _refresh(self, point: Point, state: KroneckerState, made: Plan) -> None:
        """New factors and inverses, or the previous ones where the new are unusable."""
        try:
            measured = self._measure(point, state, made)
            point.settle()
            if self.strict and measured.uncalled:
                raise CoverageError(
                    f"strict=True, but {', '.join(measured.uncalled)} belong to layers that were never called as "
                    "modules; call the layer itself, or use strict=False."
                )
            factors = self._average(state, measured)
            inverses, status = self._invert(point, state, made, measured, factors)
        except (FactorizationError, NonFiniteError) as error:
            state.failures += 1
            if not state.inverses or state.failures >= MAX_FAILURES:
                raise
            state.status, state.age = Status.KEPT_PREVIOUS, state.age + 1
            point.notes["factorisation"] = str(error)
            return
        state.factors = {name: (dense(a), dense(b)) for name, (a, b) in factors.items()} if self.ema > 0 else {}
        state.inverses, state.status = inverses, status
        state.diagonal, state.parameters = self._diagonal(made, measured), list(made.rows)
        state.age, state.failures, state.refreshes = 0, 0, state.refreshes + 1

    def _measure(
        self,
        point: Point,
        state: KroneckerState,
        made: Plan,
        basis: dict[str, tuple[Tensor, Tensor]] | None = None,
    ) -> Measured:
        return measure(
            point,
            made,
            fisher=self.fisher,
            samples=self.samples,
            sharing=self.sharing,
            generator=state.random(point.device),
            basis=basis,
            low_rank=self._low_rank,
        )

    @property
    def _low_rank(self) -> bool:
        """Whether factors may be kept as rows; averages and eigenbases need matrices."""
        return False

    def _average(self, state: KroneckerState, measured: Measured) -> dict[str, tuple[Factor, Factor]]:
        """β·old + (1−β)·new, after a finite check of the new."""
        new = {name: (measured.a[name], measured.b[name]) for name in measured.a}
        if not _finite([*measured.a.values(), *measured.b.values(), *measured.diagonal.values()]):
            bad = next((name for name, pair in new.items() if not _finite(pair)), "parameters outside the blocks")
            raise NonFiniteError(f"the factors of {bad} are not finite; look for nan, inf or overflow in inner_batch.")
        if self.ema == 0:
            return new
        averaged: dict[str, tuple[Factor, Factor]] = {}
        for name, (a, b) in new.items():
            old_a, old_b = state.factors.get(name, (dense(a), dense(b)))
            averaged[name] = (old_a.lerp(dense(a), 1 - self.ema), old_b.lerp(dense(b), 1 - self.ema))
        return averaged

    def _block_damping(self, made: Plan, measured: Measured, point: Point, name: str) -> Tensor:
        """δ + 2α: the curvature of L2 penalties joins the damping, averaged over the parameters of a block."""
        block = made.blocks[name]
        parts = [(made.rows[n].count, measured.l2.get(n, 0.0)) for n in block.names]
        total = sum(count for count, _ in parts)
        penalty = sum(count * (p.mean() if isinstance(p, Tensor) else p) for count, p in parts) / total
        return torch.as_tensor(self.damping + penalty, dtype=accumulation_dtype(point.dtype), device=point.device)

    def _diagonal(self, made: Plan, measured: Measured) -> dict[str, Tensor]:
        """The damped diagonal of every parameter outside the blocks that the inner loss depends on."""
        inside = {name for block in measured.a for name in made.blocks[block].names}
        found: dict[str, Tensor] = {}
        for name in (name for name in made.rows if name not in inside):
            declared = made.rows[name].curvature != "kronecker" or name in measured.uncalled
            if declared and self.fallback == "zero":
                continue
            if declared and self.fallback == "identity":
                curvature = torch.ones((), dtype=torch.float64)
            elif name in measured.diagonal:
                curvature = measured.diagonal[name]
            elif name in measured.l2:  # the penalty is all that depends on it
                curvature = torch.zeros((), dtype=torch.float64)
            else:
                continue
            found[name] = curvature + (measured.l2.get(name, 0.0) + self.damping)
        return found

    @abstractmethod
    def _invert(
        self,
        point: Point,
        state: KroneckerState,
        made: Plan,
        measured: Measured,
        factors: dict[str, tuple[Factor, Factor]],
    ) -> tuple[dict[str, BlockInverse], Status]:
        """Damped inverses of all blocks."""


@dataclass(frozen=True)
class KFAC(Kronecker):
    """Kronecker-factored approximate curvature: each layer's block of the Gauss–Newton matrix as B ⊗ A.

        A = mean_n a_n a_nᵀ ,   B = Σ_n (σ_n/N) g_n g_nᵀ ,   (B ⊗ A + damping)⁻¹ vec V

    with a_n the layer's input (and a 1 for its bias) and g_n = (∂z_n f)ᵀ s_n the output gradient of a vector s_n whose
    second moment is the loss's output Hessian. The L2 penalties of the inner loss join the damping.

    Args:
        damping: δ.
        split: how δ is divided between the factors: ``"pi"`` (Martens & Grosse), ``"plain"`` (√δ each), ``"exact"``
            (B ⊗ A + δI inverted exactly, by eigendecomposition), or a callable (A, B, δ) → (δ_A, δ_B).
        fisher: where s_n comes from: ``"mc"`` draws it from the model's own predictions, ``"type-2"`` uses all C exact
            vectors, ``"empirical"`` the gradient at the given labels.
        samples: Monte-Carlo draws per example.
        sharing: ``"expand"`` or ``"reduce"``, for weights used at several positions.
        refresh_every: τ; factors and inverses are reused for this many calls.
        ema: β of the moving average of factors.
        fallback: curvature of parameters outside Linear and Conv layers: ``"diagonal"`` measures it (exactly per
            example for norm layers and embeddings, as a multiple of the identity for anything else), ``"identity"``
            takes 1, ``"zero"`` keeps such parameters fixed.
        strict: refuse a model with parameters outside the Kronecker blocks.
        seed: of the Monte-Carlo draws.

    References: Martens & Grosse (2015); Grosse & Martens (2016) for convolutions; Eschenhagen et al. (2023) for weight
    sharing; Liao, Dangel & Yu (2026) for hypergradients.
    """

    split: Split = "pi"

    @property
    def _low_rank(self) -> bool:
        return self.ema == 0 and self.damping > 0 and self.split in ("pi", "plain")

    def _invert(
        self,
        point: Point,
        state: KroneckerState,
        made: Plan,
        measured: Measured,
        factors: dict[str, tuple[Factor, Factor]],
    ) -> tuple[dict[str, BlockInverse], Status]:
        damping = {name: self._block_damping(made, measured, point, name) for name in factors}
        if not factors:
            return {}, Status.DIRECT
        if self.split != "exact":
            return factored_inverses(factors, damping, self.split)
        inverses: dict[str, BlockInverse] = {}
        for name, (values_a, q_a, values_b, q_b) in eigen_bases(factors).items():
            spectrum = values_b[..., :, None] * values_a[..., None, :] + damping[name]
            inverses[name] = EigenInverse(q_a, q_b, spectrum)
        return inverses, Status.DIRECT


@dataclass(frozen=True)
class EKFAC(Kronecker):
    """KFAC with its spectrum corrected: the best diagonal in KFAC's eigenbasis (George et al., 2018).

        A⁻¹: V ↦ Q_B [(Q_Bᵀ V Q_A) / (S + δ)] Q_Aᵀ ,   S = Σ_n (σ_n/N) (Q_Bᵀ G_n Q_A)²

    with G_n the gradient of one example in the layer's weight. S minimises ‖G − Q diag(S) Qᵀ‖_F over all diagonals. It
    costs a second pass over the batch and an eigendecomposition; damping is exact (δ is added to the spectrum).

    Args:
        damping, fisher, samples, sharing, refresh_every, ema, fallback, strict, seed: as in :class:`KFAC`.
    """

    def _invert(
        self,
        point: Point,
        state: KroneckerState,
        made: Plan,
        measured: Measured,
        factors: dict[str, tuple[Factor, Factor]],
    ) -> tuple[dict[str, BlockInverse], Status]:
        bases = eigen_bases(factors)
        corrected = self._measure(point, state, made, {n: (q_a, q_b) for n, (_, q_a, _, q_b) in bases.items()})
        inverses: dict[str, BlockInverse] = {}
        for name, (_, q_a, _, q_b) in bases.items():
            damping = self._block_damping(made, measured, point, name)
            inverses[name] = EigenInverse(q_a, q_b, corrected.corrected[name] + damping)
        return inverses, Status.DIRECT


def _finite(factors: Iterable[Factor]) -> bool:
    """Whether all entries of all factors are finite; one copy to the host."""
    tensors = [f.rows if isinstance(f, LowRank) else f for f in factors]
    return not tensors or bool(torch.stack(torch._foreach_norm(tensors, float("inf"))).isfinite().all())


def _refuse(coverage: Coverage) -> None:
    if coverage.uncovered:
        listed = ", ".join(f"{row.parameter} ({row.reason})" for row in coverage.uncovered[:5])
        more = len(coverage.uncovered) - 5
        raise CoverageError(
            f"strict=True, but KFAC has no Kronecker block for {listed}{f' and {more} more' if more > 0 else ''}; "
            "use strict=False for the declared fallback, or freeze these parameters."
        )
