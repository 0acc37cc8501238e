"""Damped inverses of Kronecker blocks: factorise once, apply many times.

For a block B ⊗ A with damping δ the inverse acts on a matrix V of the weight's shape as

- factored damping (``pi``, ``plain`` or a callable):  V ↦ (B + δ_B I)⁻¹ V (A + δ_A I)⁻¹, see :class:`FactoredInverses`;
- ``exact`` and EKFAC:  V ↦ Q_B [(Q_Bᵀ V Q_A) / (S + δ)] Q_Aᵀ, see :mod:`~hyperkron.curvature.kfac.eigen`.

Martens & Grosse (2015) split δ as δ_A = π√δ, δ_B = √δ/π with π = √((tr A/dim A) / (tr B/dim B)).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from hyperkron.curvature.kfac.eigen import EigenBlock, EigenInverses
from hyperkron.curvature.kfac.factors import (
    Factor,
    FactoredInverses,
    Factors,
    LowRank,
    ShapeClass,
    System,
    dense,
    dimension,
    inverses_of,
    load_factored,
    stored,
)
from hyperkron.kernels.execution import Execution, Pending
from hyperkron.kernels.linalg import Cholesky, Factorization, factorize
from hyperkron.kernels.split_products import full_precision
from hyperkron.kernels.streams import stream
from hyperkron.solution import FactorizationError, Status

SplitFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Split = Literal["pi", "plain", "exact"] | SplitFunction
"""How δ is shared between the factors; a callable takes (A, B, δ) and returns (δ_A, δ_B), one number per group."""


BlockInverses = FactoredInverses | EigenInverses
MOST_RATIO = 1e24
"""The largest ratio of two factors' sizes; beyond it (vanishing gradients, or a factor of 0) one damping would be 0."""


def load_inverses(state: dict[str, Any]) -> BlockInverses:
    """The inverses whose :meth:`state_dict` this is."""
    if state["kind"] == "eigen":
        return EigenInverses({name: EigenBlock(**tensors) for name, tensors in state["blocks"].items()})
    return load_factored(state)


def all_inverses(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of the inverses of all processes from that of each."""
    part = "blocks" if states[0]["kind"] == "eigen" else "classes"
    found = [item for state in states for item in state[part].items()]
    names = [name if part == "blocks" else str(i) for i, (name, _) in enumerate(found)]
    return {**states[0], part: dict(zip(names, (x for _, x in found), strict=True))}


def split_damping(mean_a: Tensor, mean_b: Tensor, damping: Tensor, split: str) -> tuple[Tensor, Tensor]:
    """(δ_A, δ_B) of blocks whose factors have the mean eigenvalues ``mean_a`` and ``mean_b``."""
    root = damping.sqrt()
    if split == "plain":
        return root, root
    pi = (mean_a / mean_b).nan_to_num(1.0).clamp(1 / MOST_RATIO, MOST_RATIO).sqrt()
    return pi * root, root / pi


UNBATCHED_SIZE = 512
"""On a CPU, matrices of at least this size are factorised one by one: batching gains nothing and would copy them."""


ALIGNED = {"cuda": (8, 64)}
"""(multiple, size): systems above this size are padded to this multiple, by device type. Tensor cores need rows of
sixteen bytes, but a bias makes 769 columns of 768 inputs."""

BRANCHES = 3
"""How many factorisations run at the same time in a CUDA graph; libraries keep memory for each."""


PART_SIZE = 2**28
"""If memory is short, at most this many numbers are inverted in one part."""


class FactorsNeeded(Exception):
    """A factorisation failed, but its factors are freed: measure them again with the same draws, and keep them."""


def factored_inverses(
    factors: Factors,
    damping: dict[str, Tensor | float],
    split: Split,
    finite: Tensor,
    execution: Execution,
    *,
    keep: bool = True,
    overwrite: bool = False,
    lean: bool = False,
    half: bool = False,
    at_once: bool = False,
) -> Pending[tuple[FactoredInverses, Status, bool]]:
    """Begin to compute the damped inverses of all blocks; on a GPU other work can be queued before waiting for them.

    Blocks are sorted by shape, and all systems of one size are factorised in one batch.

    Args:
        factors, damping: (A, B) and δ of each block.
        split: how δ is split between A and B.
        finite: a tensor that tells whether all factors are finite; read together with the factorisations' outcome.
        keep: keep the systems until the outcome is known; otherwise a failure raises :class:`FactorsNeeded`.
        overwrite: clear ``factors`` to save memory.
        lean: save memory at the price of more launches.
        half: allow solves in float16 (:mod:`~hyperkron.curvature.kfac.half_inverses`); δ_A and δ_B must be positive.
        at_once: compute the inverses before the outcome is known, so that the factorisations can be freed.

    Returns:
        The inverses, their status, and the value of ``finite``; if it is false the inverses are not usable.
    """
    by_shape = _by_shape(factors)
    names = [name for members in by_shape for name in members]
    if not names:
        return Pending(lambda: (FactoredInverses(()), Status.DIRECT, bool(finite)))
    systems = _Systems([factors[n][side] for side in (0, 1) for n in names], keep, lean)
    shifts = systems.shifts([damping[n] for n in names], split)
    if overwrite:
        factors.clear()
    infos = systems.factorize(shifts)

    def inverses() -> FactoredInverses:
        classes, first = [], 0
        for members in by_shape:
            last = first + len(members)
            places = [(first + skip, last + skip) for skip in (0, len(names))]
            a, b = inverses_of(systems.system(*places[0], shifts), systems.system(*places[1], shifts), half)
            classes.append(ShapeClass(tuple(members), tuple(systems.groups[first:last]), a, b))
            first = last
        systems.made = []
        return FactoredInverses(tuple(classes))

    made = inverses() if at_once and not keep else None

    def finish() -> tuple[FactoredInverses, Status, bool]:
        status, all_finite = systems.outcome(shifts, infos, finite, execution)
        return made or inverses(), status, all_finite

    return Pending(finish)


def max_parts(kept: bool) -> int:
    """The number of parts in which large systems are inverted, for inverses used once or ``kept`` for several calls.

    Every part is one more sequence of small kernels; this matters less if the inverses are used in several calls.
    Without ``expandable_segments`` of torch's allocator both large parts and many parts fragment the memory.
    """
    settings = (os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    if not any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings):
        return 3
    return 4 if kept else 2


def split_blocks(factors: Factors, most: int) -> list[Factors]:
    """The blocks divided into parts with equally many blocks; at most ``most`` parts, and fewer for small systems."""
    numbers = sum(len(x) * x.shape[1] ** 2 for pair in factors.values() for x in map(stored, pair))
    count = min(most, -(-numbers // PART_SIZE)) or 1
    names, step = list(factors), -(-len(factors) // count) or 1
    return [{n: factors[n] for n in names[begin : begin + step]} for begin in range(0, len(names), step)] or [factors]


def _by_shape(factors: Factors) -> list[list[str]]:
    """The blocks that are solved together."""
    found: dict[tuple[object, ...], list[str]] = {}
    for name, pair in factors.items():
        key = tuple((isinstance(f, LowRank), stored(f).dtype, *stored(f).shape[1:]) for f in pair)
        found.setdefault((*key, name) if any(_alone(f) for f in pair) else key, []).append(name)
    return list(found.values())


def _alone(factor: Factor) -> bool:
    """Whether the system of a factor is factorised outside a batch."""
    return stored(factor).device.type == "cpu" and stored(factor).shape[1] >= UNBATCHED_SIZE


class _Systems:
    """The linear systems of many factors, first all A and then all B, batched by size unless they are large."""

    def __init__(self, factors: list[Factor], keep: bool, lean: bool) -> None:
        self.count, self.keep, self.lean = len(factors) // 2, keep, lean
        self.factors = factors  # until the shifts are known; then only the rows of those that are kept as rows
        self.rows = [f if isinstance(f, LowRank) else None for f in factors]
        with full_precision():
            matrices = [f.kernel() if isinstance(f, LowRank) else f for f in factors]
        self.groups = [m.shape[0] for m in matrices]
        alone = [_alone(m) for m in matrices]
        together = {m.shape[-1] for m, single in zip(matrices, alone, strict=True) if not single}
        sizes = _common_sizes(together, *ALIGNED.get(matrices[0].device.type, (1, 0)))
        self.extra = [sizes.get(m.shape[-1], m.shape[-1]) - m.shape[-1] for m in matrices]
        by_size: dict[tuple[int, int], list[int]] = {}
        for i, m in enumerate(matrices):
            by_size.setdefault((m.shape[-1] + self.extra[i], i if alone[i] else -1), []).append(i)
        self.members = list(by_size.values())
        self.stacks: list[Tensor | None] = [
            matrices[members[0]] if alone[members[0]] else self._stacked(matrices, members) for members in self.members
        ]
        self.made: list[Factorization] = []
        self.branches: list[tuple[torch.cuda.Stream, Tensor]] = []
        self.begin: dict[int, int] = {}  # where a factor's groups begin when all stacks are put one after the other
        self.stack_of: dict[int, int] = {}
        position = 0
        for s, members in enumerate(self.members):
            for i in members:
                self.begin[i], self.stack_of[i] = position, s
                position += self.groups[i]

    def _stacked(self, matrices: list[Tensor], members: list[int]) -> Tensor:
        parts = []
        for extra, run in _runs(members, self.extra):
            part = torch.cat([matrices[i] for i in run])
            parts.append(F.pad(part, (0, extra) * 2) if extra else part)
            del part
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _border(self, stack: Tensor, members: list[int]) -> None:
        """A matrix's largest number on the diagonal of its border, so that the border does not decide its scale."""
        for extra, run in _runs(members, self.extra):
            if extra:
                first, last = (self.begin[i] - self.begin[members[0]] for i in (run[0], run[-1]))
                diagonal = stack.diagonal(dim1=-2, dim2=-1)[first : last + self.groups[run[-1]]]
                diagonal[:, -extra:] = diagonal[:, :-extra].amax(-1, keepdim=True)

    def shifts(self, damping: list[Tensor | float], split: Split) -> Tensor:
        """δ_A and δ_B of every group, in the order of the stacks."""
        like = self._like()
        groups = [(i, g) for i in range(self.count) for g in range(self.groups[i])]
        places = tuple(tuple(self.begin[i + side * self.count] + g for i, g in groups) for side in (0, 1))
        at_a, at_b = _sent(places, torch.long, like.device)
        if callable(split):
            delta_a, delta_b = self._by_callable(damping, split)
        else:
            traces = torch.cat([x.diagonal(dim1=-2, dim2=-1).sum(-1) for x in self.stacks if x is not None])
            sizes = tuple(tuple(dimension(self.factors[i + side * self.count]) for i, _ in groups) for side in (0, 1))
            mean_a, mean_b = torch.stack([traces[at_a], traces[at_b]]) / _sent(sizes, like.dtype, like.device)
            delta_a, delta_b = split_damping(mean_a, mean_b, _vector([damping[i] for i, _ in groups], like), split)
        found = like.new_empty(2 * len(groups))
        found[at_a], found[at_b] = delta_a, delta_b
        self.factors = []
        return found

    def _like(self) -> Tensor:
        assert self.stacks[0] is not None
        return self.stacks[0]

    def _by_callable(self, damping: list[Tensor | float], split: SplitFunction) -> tuple[Tensor, Tensor]:
        like = self._like()
        sides: list[list[Tensor]] = [[], []]
        for i, delta in enumerate(damping):
            a, b = dense(self.factors[i]), dense(self.factors[i + self.count])
            for side, value in enumerate(split(a, b, torch.as_tensor(delta, dtype=like.dtype, device=like.device))):
                sides[side].append(torch.as_tensor(value, dtype=like.dtype, device=like.device).expand(a.shape[0]))
        return torch.cat(sides[0]), torch.cat(sides[1])

    def factorize(self, shifts: Tensor) -> list[Tensor]:
        """Factorise M + shift·I for all stacks; returns tensors that are not zero where it failed, still unread.

        Stacks are kept for a second attempt. On a CPU, where reading is cheap, a stack is freed once it has succeeded.
        """
        infos: list[Tensor] = []
        for s, members in enumerate(self.members):
            stack = self._shifted(s, members, shifts)
            made, info = self._branched(stack)
            self.made.append(made)
            infos.append(info)
            if not self.keep or (stack.device.type == "cpu" and not bool(infos[-1].any())):
                self.stacks[s] = None
            del stack
        return infos

    def _shifted(self, s: int, members: list[int], shifts: Tensor) -> Tensor:
        """M + shift·I of one stack, in the memory of M if that is not needed any more."""
        given = self.stacks[s]
        assert given is not None
        stack = given.clone() if self.keep or given.device.type == "cpu" else given
        stack.diagonal(dim1=-2, dim2=-1).add_(self._of_stack(shifts, members)[:, None])
        self._border(stack, members)
        return stack

    def _branched(self, stack: Tensor) -> tuple[Factorization, Tensor]:
        """Factorise one stack; in a CUDA graph on its own branch.

        A factorisation is a sequence of small kernels that leave most of the GPU idle. In a graph the factorisations of
        different sizes run at the same time, together with the work that is recorded before :meth:`outcome`.
        """
        if not (stack.is_cuda and torch.cuda.is_current_stream_capturing()):
            return factorize(stack, self.lean, overwrite=True)
        branch = stream(stack.device, len(self.branches) % BRANCHES)
        branch.wait_stream(torch.cuda.current_stream(stack.device))
        with torch.cuda.stream(branch):
            made = factorize(stack, overwrite=True)
        self.branches.append((branch, stack))  # keeps the stack in memory while the branch runs
        return made

    def _of_stack(self, values: Any, members: list[int]) -> Any:
        """The slice of per-group values that belongs to one stack."""
        first, last = members[0], members[-1]
        return values[self.begin[first] : self.begin[last] + self.groups[last]]

    def outcome(self, shifts: Tensor, infos: list[Tensor], finite: Tensor, execution: Execution) -> tuple[Status, bool]:
        """Read the outcome and ``finite`` in one copy to the host; returns the status and the value of ``finite``.

        If a matrix failed, its stack is factorised in float64, then with 10, 100 and 1000 times the shift for the
        matrices that fail; then :class:`FactorizationError` is raised. Factors that are not finite are not retried.
        """
        for branch, used in self.branches:  # wait for all branches
            torch.cuda.current_stream(used.device).wait_stream(branch)
        self.branches = []
        unfit = finite.logical_not().to(infos[0].dtype).reshape(1)
        *failed, bad_input = execution.read_flags(torch.cat([*infos, unfit.to(shifts.device)]))
        if not bad_input and not any(failed):
            return Status.DIRECT, True
        if not self.keep:
            raise FactorsNeeded
        if bad_input:
            return Status.DIRECT, False
        for s, members in enumerate(self.members):
            if any(self._of_stack(failed, members)):
                shift, stack = self._of_stack(shifts, members), self.stacks[s]
                assert stack is not None
                self.made[s], more = _rescued(stack, shift)
                shift.copy_(more)  # the dual form uses δ again
        return Status.MORE_DAMPING, True

    def system(self, first: int, last: int, shifts: Tensor) -> System:
        """The system of the factors ``first`` to ``last``, which are adjacent in one stack."""
        stack = self.stack_of[first]
        start = self.begin[self.members[stack][0]]
        begin, end = self.begin[first], self.begin[last - 1] + self.groups[last - 1]
        whole = self.made[stack]
        complete = begin == start and self.members[stack][-1] == last - 1
        system = whole if complete else whole.part(begin - start, end - start)
        rows = [r for r in self.rows[first:last] if r is not None]
        self.rows[first:last] = [None] * (last - first)
        return System(system, shifts[begin:end], rows)


def _runs(members: list[int], extra: Sequence[int]) -> list[tuple[int, list[int]]]:
    """Neighbours that are padded alike, with their padding: each run is treated together."""
    return [(padding, list(run)) for padding, run in itertools.groupby(members, extra.__getitem__)]


def _common_sizes(sizes: set[int], multiple: int = 1, beyond: int = 0) -> dict[int, int]:
    """Maps each size to the size it is padded to.

    This is a size of the set that is at most 2 % larger (768 is padded to 769); sizes above ``beyond`` are then raised
    to the next ``multiple``.
    """
    found: dict[int, int] = {}
    for n in sorted(sizes):
        larger = [m for m in sizes if n < m <= 1.02 * n]
        found[n] = max(larger, default=n)
    joined = {n: found.get(m, m) for n, m in found.items()}
    return {n: -(-m // multiple) * multiple if m > beyond else m for n, m in joined.items()}


def _vector(values: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """Numbers, some of which may be tensors on the device, as one vector."""
    if any(isinstance(x, Tensor) for x in values):
        return torch.stack([x.to(like) if isinstance(x, Tensor) else like.new_full((), x) for x in values])
    return _sent(tuple(values), like.dtype, like.device)


@lru_cache(maxsize=64)
def _sent(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a tensor on ``device``, cached because every step needs the same ones; must not be written."""
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def _rescued(matrices: Tensor, shift: Tensor) -> tuple[Factorization, Tensor]:
    """Factorise in float64, with more damping where that is not enough; returns also the damping that was used."""
    wide, more = matrices.double(), shift.double().clone()
    eye = torch.eye(wide.shape[-1], dtype=wide.dtype, device=wide.device)
    bad = torch.ones_like(shift, dtype=torch.bool)
    for _ in range(4):
        factor, info = torch.linalg.cholesky_ex(wide + more[:, None, None] * eye)
        bad = info.ne(0) | ~torch.isfinite(factor).all(-1).all(-1)
        if not bool(bad.any()):
            return Cholesky(factor.to(matrices.dtype)), more
        more = torch.where(bad, 10 * more, more)
    worst = matrices[bad]
    raise FactorizationError(
        f"a factor of size {worst.shape[-1]} could not be factorised, even in float64 with 1000 times the damping "
        f"(largest entry {float(worst.abs().max()):.3g})"
    )
