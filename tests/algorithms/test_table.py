"""docs/algorithms.md is what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import hyperkron as hk

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_algorithms_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_algorithms_table", DOCS / "make_algorithms_table.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    written = (DOCS / "algorithms.md").read_text("utf-8")
    assert written == script.page(), "run `python docs/make_algorithms_table.py`"
    for name in ("AID", "AmIGO", "MRBO", "ScaleBiO"):
        assert hasattr(hk.algorithms, name)
        assert f"`{name}`" in written
