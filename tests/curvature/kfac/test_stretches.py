"""Inverses of some blocks at a time are those of all blocks together."""

from __future__ import annotations

import pytest
import torch

from hyperkron.curvature.kfac import stretches
from hyperkron.curvature.kfac.factors import FactoredInverses, Factors, LowRank
from hyperkron.curvature.kfac.inverse import blocks_by_shape, factored_inverses
from hyperkron.curvature.kfac.stretches import StretchedInverses
from hyperkron.kernels.execution import Execution


def test_stretches_of_blocks_are_solved_as_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(0)

    def rows(count: int, d: int) -> torch.Tensor:
        return torch.randn(1, count, d, generator=draw, dtype=torch.float64)

    factors: Factors = {f"square {i}": (_spd(rows(9, 4)), _spd(rows(9, 3))) for i in range(5)}
    factors |= {f"low rank {i}": (LowRank(rows(2, 6)), _spd(rows(9, 5))) for i in range(3)}
    sizes: list[int] = []

    def invert(some: Factors) -> FactoredInverses:
        sizes.append(len(some))
        begun = factored_inverses(
            some, dict.fromkeys(some, 0.1), "pi", torch.tensor(True), Execution(torch.device("cpu"))
        )
        return begun.wait()[0]

    v = {name: torch.randn(1, *((3, 4) if name[0] == "s" else (5, 6)), generator=draw).double() for name in factors}
    whole = invert(dict(factors))
    for count, expected in ((1, [8]), (3, [3, 3, 2]), (100, [1] * 8)):
        monkeypatch.setattr(stretches, "STRETCHES", count)
        sizes.clear()
        made = StretchedInverses(factors, blocks_by_shape(factors), invert)
        torch.testing.assert_close(made.solve(v), whole.solve(v), rtol=1e-12, atol=1e-12)
        assert sizes == expected
        torch.testing.assert_close(made.solve(v), whole.solve(v), rtol=1e-12, atol=1e-12)
        assert len(sizes) == 2 * len(expected)  # kept from now on
        torch.testing.assert_close(made.matvec(made.solve(v)), v)
        assert len(sizes) == 2 * len(expected)
        assert made.strategies() == whole.strategies()


def _spd(rows: torch.Tensor) -> torch.Tensor:
    return rows.mT @ rows
