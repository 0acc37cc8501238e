"""The performance pages show what the result files say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from scripts import loaded

DOCS = Path(__file__).resolve().parent.parent / "docs"


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return loaded(DOCS / "make_performance_tables.py")


def test_tables_are_those_of_the_result_files(tables: ModuleType) -> None:
    for path in tables.PAGES:
        page = path.read_text("utf-8")
        assert tables.rendered(page) == page, "run python docs/make_performance_tables.py"


def test_every_table_is_on_one_page(tables: ModuleType) -> None:
    pages = [path.read_text("utf-8") for path in tables.PAGES]
    for name in tables.TABLES:
        assert sum(page.count(f"<!-- {name} -->\n") for page in pages) == 1, name
