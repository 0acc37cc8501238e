"""docs/algorithms.md is what the code says."""

from __future__ import annotations

from pathlib import Path

import hyperkron as hk
from scripts import loaded

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_table_of_algorithms_is_current() -> None:
    script = loaded(DOCS / "make_algorithms_table.py")
    written = (DOCS / "algorithms.md").read_text("utf-8")
    assert written == script.page(), "run `python docs/make_algorithms_table.py`"
    for name in ("AID", "AmIGO", "MRBO", "ScaleBiO"):
        assert hasattr(hk.algorithms, name)
        assert f"`{name}`" in written
