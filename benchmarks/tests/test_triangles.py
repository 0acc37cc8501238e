"""The benchmark of small triangles: both ways are run, and solve."""

from __future__ import annotations

from unittest.mock import patch

import triangles

from hyperkron.kernels import triangles as kernel


def test_both_ways_solve_and_only_one_cuts_into_blocks() -> None:
    asked: list[bool] = []
    real = kernel.inverse
    with patch.object(kernel, "inverse", lambda m, blocks=False: asked.append(blocks) or real(m, blocks)):
        row = triangles.compared(3, 150, "cpu")
    assert max(row["library error"], row["blocks error"]) < 2e-6 and min(row["library"], row["blocks"]) > 0
    assert set(asked) == {False, True}
