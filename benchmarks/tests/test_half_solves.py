"""The comparison of solves in float16 and float32, at the size of a toy."""

from __future__ import annotations

import half_solves
import pytest
import workloads

from hyperkron.curvature.kfac import factors


@pytest.mark.long
def test_solves_in_float16_move_the_hypergradient_less_than_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "TOY", workloads.Llama("toy", 2, 32, 32, 128, vocabulary=64, tokens=12))
    work = workloads.language("cpu", True, "")
    work.inner_steps()
    made: list[str] = []
    plain = factors.System.half_inverse

    def counted(self: factors.System) -> factors.FactorInverse:
        found = plain(self)
        made.append(type(found).__name__)
        return found

    monkeypatch.setattr(factors.System, "half_inverse", counted)
    line = half_solves.compared(work, "empirical")
    assert set(made) == {"HalfPrimal", "HalfRows"}
    assert line["solves in float16 to float32"] > 0.9999
    assert line["autocast"] < line["solves in float16 to float32"]
