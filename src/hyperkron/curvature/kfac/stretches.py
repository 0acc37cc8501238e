"""Damped inverses of some blocks at a time, where memory counts.

All blocks together need their systems, which are as large as the factors, and their inverses at once. A stretch of
blocks needs its own only; where no later call uses the inverses, each stretch is solved right after it was inverted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

from torch import Tensor

from hyperkron.curvature.kfac.factors import Factor, FactoredInverses, Factors, LowRank, Matrices, dimension, stored

STRETCHES = 6
"""Blocks are inverted in about this many stretches: a factorisation of few matrices takes as long as one of many."""

Invert = Callable[[Factors], FactoredInverses]
"""Makes the inverses of some blocks from their factors."""


class StretchedInverses:
    """(B + δ_B I)⁻¹ ⊗ (A + δ_A I)⁻¹ of all blocks, made when they are applied and forgotten after that.

    The second time they are kept.

    Args:
        factors: (A, B) of each block, all finite.
        shapes: the names of blocks, those that are solved together in one list.
        invert: makes the inverses of some blocks.
    """

    vectorizes: ClassVar[bool] = False

    def __init__(self, factors: Factors, shapes: list[list[str]], invert: Invert) -> None:
        self._factors, self._shapes, self._invert = factors, shapes, invert
        self._kept: FactoredInverses | None = None
        self._applied = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._factors)

    def solve(self, v: Matrices) -> Matrices:
        """(B + δ_B I)⁻¹ V (A + δ_A I)⁻¹ for every block, each in memory of its own."""
        if self._applied:
            return self.kept().solve(v)
        self._applied = True
        found: dict[str, Tensor] = {}
        for names in self._stretches():
            solved = self._inverted(names).solve({name: v[name] for name in names})
            found.update((name, x.clone()) for name, x in solved.items())  # not views of all of them
        return found

    def matvec(self, v: Matrices) -> Matrices:
        """(B + δ_B I) V (A + δ_A I) for every block."""
        return self.kept().matvec(v)

    def kept(self) -> FactoredInverses:
        """All of them, kept from now on."""
        if self._kept is None:
            classes = [c for names in self._stretches() for c in self._inverted(names).classes]
            self._kept = FactoredInverses(tuple(classes))
        return self._kept

    def strategies(self) -> str:
        """How many factors are inverted as matrices, and how many by their rows, as words."""
        factors = [factor for pair in self._factors.values() for factor in pair]
        dual = sum(isinstance(factor, LowRank) for factor in factors)
        counts = {"primal": len(factors) - dual, "dual": dual}
        return ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)

    def only(self, names: Collection[str]) -> FactoredInverses:
        """Those of some of the blocks."""
        return self.kept().only(names)

    def damped(self, like: Matrices) -> dict[str, tuple[Tensor, Tensor]]:
        """A + δ_A I and B + δ_B I of every block."""
        return self.kept().damped(like)

    def state_dict(self) -> dict[str, Any]:
        return self.kept().state_dict()

    def _stretches(self) -> Iterator[list[str]]:
        """Some blocks at a time, those of one shape together as far as possible."""
        sizes = {name: _numbers(*self._factors[name]) for members in self._shapes for name in members}
        most, some, size = sum(sizes.values()) / STRETCHES, list[str](), 0
        for name, numbers in sizes.items():
            if some and size + numbers / 2 > most:
                yield some
                some, size = [], 0
            some.append(name)
            size += numbers
        if some:
            yield some

    def _inverted(self, names: list[str]) -> FactoredInverses:
        return self._invert({name: self._factors[name] for name in names})


def _numbers(a: Factor, b: Factor) -> int:
    """What a block takes while it is inverted and solved, in numbers of a system."""
    groups = len(stored(a))
    return groups * (stored(a).shape[1] ** 2 + stored(b).shape[1] ** 2 + dimension(a) * dimension(b) // 2)
