"""The performance pages show what the result files say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_performance_tables", DOCS / "make_performance_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_are_those_of_the_result_files(tables: ModuleType) -> None:
    for path in tables.PAGES:
        page = path.read_text("utf-8")
        assert tables.rendered(page) == page, "run python docs/make_performance_tables.py"


def test_every_table_is_on_one_page(tables: ModuleType) -> None:
    pages = [path.read_text("utf-8") for path in tables.PAGES]
    for name in tables.TABLES:
        assert sum(page.count(f"<!-- {name} -->\n") for page in pages) == 1, name
