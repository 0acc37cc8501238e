"""The state of KFAC and EKFAC between calls, and the operator that applies it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hyperkron import trees
from hyperkron.curvature.base import CurvatureState, Eigenbasis, Invertible
from hyperkron.curvature.kfac.coverage import Block, Coverage, Fallback, Plan, plan
from hyperkron.curvature.kfac.eigen import EigenInverses
from hyperkron.curvature.kfac.factors import Matrices
from hyperkron.curvature.kfac.inverse import BlockInverses, all_inverses, load_inverses
from hyperkron.curvature.kfac.layers import LayerOf
from hyperkron.curvature.kfac.measured import Measured
from hyperkron.curvature.kfac.owners import Owners
from hyperkron.evaluation.point import Point
from hyperkron.kernels.execution import Pending
from hyperkron.sharding import any_sharded, is_sharded, local, place_of, sharded_like, with_rows
from hyperkron.solution import HyperkronError, Status
from hyperkron.trees import Tree


def layout(params: Tree) -> list[str]:
    """Name, shape and dtype of every parameter, to check whether factors and inverses still fit."""
    return [_described(name, p.shape, p.dtype) for name, p in params.items()]


@lru_cache(maxsize=2**12)
def _described(name: str, shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{name} {list(shape)} {dtype}"


class KroneckerState(CurvatureState):
    """Factors, inverses and ages of a Kronecker curvature.

    Attributes:
        age: hypergradients computed since the last refresh; 0 right after a refresh.
        refreshes: how many times factors and inverses were computed.
        basis_age: refreshes since the last new eigenbasis, which measured only the spectrum.
        failures: refreshes in a row that failed and kept the previous inverse.
        status: how the current inverse was obtained.
        strategy: how its blocks are inverted, in words.
        coverage: which curvature every parameter got in the last call.
    """

    _NUMBERS: ClassVar[tuple[str, ...]] = ("age", "refreshes", "basis_age", "failures", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.generator: torch.Generator | None = None
        self.age = self.refreshes = self.basis_age = self.failures = 0
        self.status = Status.DIRECT
        self.strategy = ""
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}  # moving averages, if ema > 0
        self.inverses: BlockInverses | None = None
        self.diagonal: dict[str, Tensor] = {}
        self.scales: Matrices = {}  # E of the blocks that are penalised unevenly
        self.parameters: list[str] = []  # the layout of the parameters at the last refresh
        self.uncalled: list[str] = []  # parameters of layers that were not called at the last refresh
        self.coverage: Coverage | None = None
        self.unmasked: bool | None = None  # whether all losses so far had a row for every token and masked none
        self.reached: tuple[str, ...] = ()  # the blocks of the current inverse, of all processes
        self.owners: Owners | None = None  # of the blocks, if several processes share them
        self.part = ""  # which part of the blocks this process has, such as "0 of 2"; "" for all
        self._reused = False  # whether later calls need them
        self._collected: dict[str, Any] | None = None
        self._planned: tuple[nn.Module, list[Tensor], Plan] | None = None

    def stats(self) -> dict[str, float | int | str]:
        found: dict[str, float | int | str] = {
            "curvature_age": self.age,
            "curvature_refreshes": self.refreshes,
            "curvature_strategy": self.strategy,
        }
        return found if self.coverage is None else {**found, "coverage": self.coverage.covered}

    def plan(self, model: nn.Module, params: Tree, fallback: Fallback, layers: Sequence[LayerOf] = ()) -> Plan:
        """The plan for ``model``, made again only when its trainable parameters have changed."""
        members = list(params.values())
        if self._planned is not None:
            known, old, planned = self._planned
            if known is model and len(old) == len(members) and all(x is y for x, y in zip(old, members, strict=True)):
                return planned
        self._planned = (model, members, plan(model, fallback, layers))
        return self._planned[2]

    def divide(self, plan: Plan, point: Point, reused: bool) -> None:
        """Keep only the factors and inverses of this process; ``reused`` tells whether later calls use them."""
        group, self._reused = point.problem.group, reused
        if group.size == 1:
            self.owners = None
        elif self.owners is None or self.owners.blocks is not plan.blocks or self.owners.group is not group:
            self.owners = Owners(plan, group)
        here = "" if self.owners is None else self.owners.part
        others = self.part not in ("", here)
        if others and reused and (self.factors or self.inverses is not None):
            raise HyperkronError(
                f"the state of this curvature is part {self.part} of one that was divided among processes, this is "
                f"{here or 'one process'}; load a checkpoint of Run.save, or the state_dict() that the first process "
                "made while all were inside `with hypergradient.collected():`, which have all of it, or begin a new "
                "state."
            )
        if others:
            self.factors, self.inverses = {}, None
        elif self.owners is not None and self.part != here:
            own = {name for name in self.owners.blocks if self.owners.mine(name)}
            self.factors = {name: pair for name, pair in self.factors.items() if name in own}
            if self.inverses is not None:
                self.inverses = self.inverses.only(own)
                self.strategy = self.inverses.strategies()
        self.part = here

    def collect(self) -> None:
        """Called by all processes: until :meth:`uncollect`, the first one's state_dict has the blocks of all.

        Blocks that no later call uses are left out.
        """
        owners = self.owners
        if owners is None:
            return
        whole: dict[str, Any] = {"part": "", "factors": {}, "inverses": None}
        if self._reused and self.inverses is not None:
            found = owners.group.of_all({name: x for name, x in self.state_dict().items() if name in whole})
            if found:
                whole["factors"] = {name: pair for one in found for name, pair in one["factors"].items()}
                whole["inverses"] = all_inverses([one["inverses"] for one in found])
        self._collected = whole

    def uncollect(self) -> None:
        self._collected = None

    def random(self, device: torch.device) -> torch.Generator:
        """The generator of Monte-Carlo vectors; every refresh draws new samples."""
        if self.generator is None or self.generator.device.type != device.type:
            self.generator = torch.Generator(device).manual_seed(self.seed)
        return self.generator

    def generators(self, device: torch.device) -> list[torch.Generator]:
        return [self.random(device)]

    def renew(
        self,
        inverses: BlockInverses,
        status: Status,
        diagonal: dict[str, Tensor],
        measured: Measured | KroneckerState,
        parameters: list[str],
        basis_age: int = 0,
    ) -> None:
        """Store the result of a successful refresh."""
        self.inverses, self.status, self.diagonal, self.scales = inverses, status, diagonal, measured.scales
        self.parameters, self.reached = parameters, tuple(measured.reached)
        self.age, self.failures, self.refreshes, self.basis_age = 0, 0, self.refreshes + 1, basis_age
        self.strategy = inverses.strategies()

    @property
    def kept(self) -> BlockInverses | None:
        return self.inverses

    def tensors(self) -> Any:
        assert self.inverses is not None
        return self.inverses.state_dict(), self.diagonal, self.scales

    def adopt(self, other: CurvatureState) -> None:
        assert isinstance(other, KroneckerState)
        self.inverses, self.diagonal, self.scales = other.inverses, other.diagonal, other.scales

    def let_go(self) -> None:
        self.inverses, self.diagonal, self.scales = None, {}, {}

    def replayed(self, made: CurvatureState | None) -> None:
        if made is None:
            self.age += 1
            return
        assert isinstance(made, KroneckerState)
        assert made.inverses is not None
        basis_age = self.basis_age + 1 if made.basis_age else 0
        self.renew(made.inverses, Status.DIRECT, made.diagonal, made, made.parameters, basis_age)

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in self._NUMBERS},
            "status": self.status.name,
            "generator": None if self.generator is None else self.generator.get_state(),
            "generator_device": "" if self.generator is None else str(self.generator.device),
            "factors": {name: {"a": a, "b": b} for name, (a, b) in self.factors.items()},
            "inverses": None if self.inverses is None else self.inverses.state_dict(),
            "diagonal": dict(self.diagonal),
            "scales": dict(self.scales),
            "parameters": list(self.parameters),
            "uncalled": list(self.uncalled),
            "reached": list(self.reached),
            "part": self.part,
            **(self._collected or {}),
        }

    def fits(self, params: Tree) -> bool:
        """Whether factors and inverses belong to these parameters; earlier versions saved only the names."""
        return self.parameters in (layout(params), list(params))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self._NUMBERS:
            setattr(self, name, state[name])
        self.status, self.generator = Status[state["status"]], None
        if state["generator"] is not None:
            self.generator = torch.Generator(state["generator_device"])
            self.generator.set_state(state["generator"])
        self.factors = {name: (f["a"], f["b"]) for name, f in state["factors"].items()}
        self.inverses = None if state["inverses"] is None else load_inverses(state["inverses"])
        self.strategy = "" if self.inverses is None else self.inverses.strategies()
        self.part = state.get("part", "")
        self.reached = tuple(state.get("reached", ())) or (() if self.inverses is None else self.inverses.names)
        self.diagonal, self.scales = dict(state["diagonal"]), dict(state.get("scales", {}))
        self.parameters, self.uncalled = list(state["parameters"]), list(state.get("uncalled", []))


class KroneckerOperator(Invertible):
    """The damped block-diagonal curvature: Kronecker blocks, diagonal layers, and parameters with neither.

    A parameter that the inner loss does not depend on has neither. The solution is zero there, like its column of the
    cross term. A preconditioner must not be zero anywhere: see :meth:`definite`.
    """

    def __init__(
        self,
        blocks: dict[str, Block],
        state: KroneckerState,
        damping: float,
        refresh: Pending[None] | None = None,
        used_once: bool = False,
    ) -> None:
        """The first use of the inverses waits for ``refresh``; with ``used_once`` the solve frees them."""
        self._blocks, self._state, self._used_once = blocks, state, used_once
        self._damping, self._uncovered_damping, self.products = damping, 0.0, 0
        self._refresh: Pending[None] | None = refresh or Pending.ready(None)
        if refresh is None:
            self._settle()

    def definite(self) -> KroneckerOperator:
        """The same operator with δ (1 if δ = 0) where there is no curvature: positive definite on all parameters."""
        self._uncovered_damping = self._damping or 1.0
        return self

    def _settle(self) -> None:
        """Wait for a pending refresh, and take its inverses; does nothing once they are taken."""
        if self._refresh is None:
            return
        refresh, self._refresh = self._refresh, None
        refresh.wait()
        assert self._state.inverses is not None
        self.blocks = {name: self._blocks[name] for name in self._state.reached}
        self.inverses, self.diagonal = self._state.inverses, self._state.diagonal
        self.scales = {name: e for name, e in self._state.scales.items() if name in self.blocks}
        self.status = self._state.status

    def release(self) -> None:
        if self._used_once:
            self._settle()
            self._state.let_go()
            del self.inverses, self.diagonal, self.scales

    def matvec(self, v: Tree) -> Tree:
        self._settle()
        self.products += 1
        return self._apply(v, self.inverses.matvec, torch.mul, torch._foreach_mul)

    def matvec_stacked(self, v: Tree) -> Tree:
        self._settle()
        if not self._vectorizes:
            return super().matvec_stacked(v)
        self.products += len(next(iter(v.values())))
        return self._apply_stacked(v, self.inverses.matvec, torch.mul)

    def solve(self, b: Tree) -> Tree:
        self._ready()
        # v would not fit into memory next to b and the inverses, which are freed after the solve
        overwrite = self.overwrites and self._used_once and _no_overlap(b)
        return self._apply(b, partial(self.inverses.solve, overwrite=overwrite), torch.div, torch._foreach_div)

    def solve_stacked(self, b: Tree) -> Tree:
        self._ready()
        return self._apply_stacked(b, self.inverses.solve, torch.div) if self._vectorizes else super().solve_stacked(b)

    def eigenbases(self) -> dict[str, Eigenbasis]:
        self._settle()
        if self._state.owners is not None or self.scales or not isinstance(self.inverses, EigenInverses):
            return {}
        complete = {name: block for name, block in self.inverses.blocks.items() if block.outside is None}
        return {name: Eigenbasis(block.a, block.b, block.spectrum) for name, block in complete.items()}

    def function(self, f: Callable[[Tensor], Tensor], v: Tree) -> Tree:
        """f(A + δI) v for stacked vectors, computed from the eigenvalues of the blocks; only with EKFAC."""
        self._ready()
        if self._state.owners is not None:
            raise HyperkronError("a function of the curvature needs one process; here several share the blocks.")
        if self.scales or not isinstance(self.inverses, EigenInverses):
            raise HyperkronError(
                "a function of the curvature needs its eigenvalues: use hk.curvature.EKFAC(), with the same L2 penalty "
                "for all parameters of a layer."
            )
        return self._apply_stacked(v, partial(self.inverses.function, f), lambda x, d: x * f(d))

    @property
    def _vectorizes(self) -> bool:
        return self.inverses.vectorizes and self._state.owners is None

    def _apply_stacked(
        self, v: Tree, on_blocks: Callable[[Matrices], Matrices], by: Callable[[Tensor, Tensor], Tensor]
    ) -> Tree:
        def one(x: Tree) -> Tree:
            return self._apply(x, on_blocks, by, lambda xs, ds: list(map(by, xs, ds)))

        return torch.func.vmap(one)(v)

    def _ready(self) -> None:
        """Before a solve: warn if few parameters are covered, and wait for a pending refresh."""
        if not self._uncovered_damping and self._state.coverage is not None:  # not for a preconditioner
            self._state.coverage.warn()
        self._settle()

    def _apply(
        self,
        v: Tree,
        on_blocks: Callable[[Matrices], Matrices],
        by: Callable[[Tensor, Tensor], Tensor],
        on_diagonal: Callable[[list[Tensor], list[Tensor]], Sequence[Tensor]],
    ) -> Tree:
        given, owners, sharded = v, self._state.owners, any_sharded(v.values())

        def on_own(tree: Tree) -> Tree:
            """The result for the blocks whose parameters are in ``tree``."""
            tree = trees.widened(tree)
            blocks = {name: block for name, block in self.blocks.items() if block.names[0] in tree}
            scales = {name: e for name, e in self.scales.items() if name in blocks}
            matrices = {name: block.join(tree) for name, block in blocks.items()}
            matrices = on_blocks(matrices | {name: by(matrices[name], e) for name, e in scales.items()})
            matrices |= {name: by(matrices[name], e) for name, e in scales.items()}
            return {n: x for name, matrix in matrices.items() for n, x in blocks[name].part(matrix, tree).items()}

        v = {name: local(x) if is_sharded(x) else x for name, x in v.items()} if sharded else v
        v = trees.widened(v)  # one process has all rows
        found = on_own(v) if owners is None else owners.applied(list(self.blocks), given, on_own)
        own = own_rows_of(self.diagonal, given) if sharded else self.diagonal
        shaped = {n: d for n, d in own.items() if d.shape == v[n].shape and d.device == v[n].device}
        numbers = {n: d for n, d in own.items() if n not in shaped}
        if self._uncovered_damping:
            missing = v.keys() - found.keys() - self.diagonal.keys()
            numbers |= {n: torch.tensor(self._uncovered_damping, dtype=torch.float64, device="cpu") for n in missing}
        for diagonal in (shaped, numbers):  # separately, because only tensors of the same shape share a launch
            if diagonal:
                found.update(zip(diagonal, on_diagonal([v[n] for n in diagonal], list(diagonal.values())), strict=True))
        for name in v.keys() - found.keys():
            found[name] = torch.zeros_like(v[name])
        # contiguous, because views would keep a whole stack of blocks in memory
        made = {name: found[name].to(x.dtype).contiguous() for name, x in given.items()}
        return {n: with_rows(made[n], x) if is_sharded(x) else made[n] for n, x in given.items()} if sharded else made


def _no_overlap(b: Tree) -> bool:
    """Whether no two entries of b share memory; autograd may return one gradient for two parameters."""
    places = {x.data_ptr() for x in b.values()}
    return len(places) == len(b) and not any(0 in x.stride() for x in b.values())


def own_diagonal(diagonal: dict[str, Tensor], params: Tree) -> dict[str, Tensor]:
    """``diagonal``, sharded like the parameters."""
    shaped = {n: d for n, d in diagonal.items() if is_sharded(params[n]) and d.shape == params[n].shape}
    return diagonal | {name: sharded_like(d, params[name]) for name, d in shaped.items()}


def own_rows_of(diagonal: dict[str, Tensor], v: Tree) -> dict[str, Tensor]:
    """The rows of ``diagonal`` that correspond to this process's rows of ``v``."""
    whole = {n: d[place_of(v[n])] for n, d in diagonal.items() if not is_sharded(d) and d.dim() and is_sharded(v[n])}
    return {name: whole[name] if name in whole else local(d) for name, d in diagonal.items()}
