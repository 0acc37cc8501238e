"""The documentation site: every page is there, every link holds, and the reference has every public name."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import hyperkron as hk
from scripts import loaded

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ("experiments/", "benchmarks/")


@pytest.fixture(scope="module")
def sources() -> ModuleType:
    return loaded(ROOT / "docs/site/sources.py")


@pytest.fixture(scope="module")
def folder(sources: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("site") / "sources"
    made.mkdir()
    (made / "old.md").write_text("of an earlier build")
    assert sources.write(made) == len(list(made.rglob("*.md")))
    assert not (made / "old.md").exists()
    return made


def entries(nav: Any) -> list[str]:
    """The pages of a navigation, whatever they are grouped by."""
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in entries(item)]


def test_the_navigation_has_every_page_but_the_records(folder: Path) -> None:
    nav = entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))["nav"])
    made = {path.relative_to(folder).as_posix() for path in folder.rglob("*.md")}
    assert len(nav) == len(set(nav))
    assert set(nav) == {page for page in made if not page.startswith(RECORDS)}


def test_links_lead_to_files_of_the_site(folder: Path, sources: ModuleType) -> None:
    seen = 0
    for page in folder.rglob("*.md"):
        text = sources.CODE.sub("", page.read_text("utf-8"))
        for _, _, target in sources.LINK.findall(text):
            if not re.match(r"[a-z]+:|#", target):
                assert (page.parent / target.partition("#")[0]).is_file(), f"{page}: {target}"
                seen += 1
    assert seen > 50


def test_the_reference_has_every_public_name(folder: Path, sources: ModuleType) -> None:
    pages = {path.stem: path.read_text("utf-8") for path in (folder / "reference").iterdir()}
    everywhere = "".join(pages.values())
    parts = [importlib.import_module(f"hyperkron.{part}") for part in sources.PARTS]
    names = {name for module in (hk, *parts) for name in module.__all__} - set(sources.PARTS)
    assert names == set(re.findall(r"heading: (\w+)", everywhere))
    assert "::: hyperkron.hypergradient.named.kfac\n" in pages["hyperkron"]
    assert "::: hyperkron.curvature.kfac.kfac.KFAC\n" in pages["hyperkron.curvature"]


@pytest.mark.parametrize(
    ("text", "there"),
    [
        ("[a](cleaning.md#x)", "[a](cleaning.md#x)"),
        ("[a](../README.md)", "[a](../index.md)"),
        ("[a](../examples/digits.py)", "[a](../examples/digits.md)"),
        ("[a](../src/hyperkron/hyper.py)", "a (`src/hyperkron/hyper.py` in the repository)"),
        ("![a](images/none.png)", "a"),
        ("[a](https://pytorch.org) [b](#c)", "[a](https://pytorch.org) [b](#c)"),
        ("```\n[a](../examples/digits.py)\n```", "```\n[a](../examples/digits.py)\n```"),
    ],
)
def test_links(sources: ModuleType, text: str, there: str) -> None:
    site = {"docs/cleaning.md", "README.md", "examples/digits.py"}
    assert sources.linked(text, "docs/data.md", site) == there


def test_a_link_named_after_a_file_gets_the_title_of_the_page(sources: ModuleType) -> None:
    titles, text = {"docs/cleaning.md": "Cleaning labels"}, "[docs/cleaning.md](cleaning.md#x) [here](cleaning.md)"
    there = "[Cleaning labels](cleaning.md#x) [here](cleaning.md)"
    assert sources.linked(text, "docs/data.md", {"docs/cleaning.md"}, titles) == there
