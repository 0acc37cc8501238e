"""A short soak: hooks and file handles stay what they were; ``make soak`` does 10 000 steps and measures memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import soak

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="handles are counted in /proc")


@needs_proc
@pytest.mark.long
def test_hooks_and_handles_are_constant(tmp_path: Path) -> None:
    readings = soak.soak(90, 15, tmp_path).readings
    assert [r["step"] for r in readings] == list(range(15, 91, 15))
    assert {r["hooks"] for r in readings} == {0}
    assert len({r["handles"] for r in readings}) == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "log-rank00000.jsonl").open()]
    assert steps == list(range(90))


@needs_proc
def test_the_gauge_sees_leaks(tmp_path: Path) -> None:
    import torch

    layer = torch.nn.Linear(2, 2)
    before = soak.handles()
    layer.register_forward_hook(lambda *_: None)
    layer.weight.register_hook(lambda g: g)
    with (tmp_path / "file").open("w"):
        assert soak.handles() == before + 1
    assert soak.hooks(torch.nn.Sequential(layer)) == 2
    grown = [{"step": 100 * i, "resident": 10**9 + 300_000 * i} for i in range(5)]
    assert soak.slope(grown) == pytest.approx(3.0)


def test_the_recorded_soak_is_flat() -> None:
    found = json.loads((Path(soak.__file__).parent / "results" / "soak.json").read_text("utf-8"))
    assert found["steps"] >= 10_000 and found["slope_mb_per_1000_steps"] < soak.LIMIT
    assert len(found["hooks"]) == len(found["handles"]) == 1
