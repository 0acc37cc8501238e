"""The performance page shows what the result files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_tables_are_those_of_the_result_files() -> None:
    spec = importlib.util.spec_from_file_location("make_performance_tables", DOCS / "make_performance_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "performance.md").read_text("utf-8")
    assert module.rendered(page) == page, "run python docs/make_performance_tables.py"
