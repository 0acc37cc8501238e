"""Names in the sources: one class per name, words of the field, and arguments that are checked in one place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src" / "hyperkron"
SOURCES = sorted(SRC.rglob("*.py"))


def _name(path: Path) -> str:
    return str(path.relative_to(SRC))


# --- names -------------------------------------------------------------------------------------------------

# Words that named something here without saying what; the words of the field are in their place.
RETIRED = frozenset(
    {"doors", "met", "mover", "movers", "draw", "draws", "lesson", "lessons", "student", "students", "together"}
)
RETIRED_CONSTANTS = frozenset({"HASTE", "DOUBT", "THRIFT", "SURE", "MANY"})
RETIRED_MODULES = frozenset(
    {"simple", "products", "movers", "draw", "oracles", "rounding", "together", "students", "_everything"}
)


RETIRED_WORD = re.compile(rf"\b_*({'|'.join(RETIRED | RETIRED_CONSTANTS)})_*\b", re.IGNORECASE)


def test_every_class_has_a_name_of_its_own() -> None:
    places: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in re.findall(r"^ *class (\w+)[(:]", path.read_text("utf-8"), re.MULTILINE):
            places.setdefault(name, []).append(_name(path))
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def _retired(source: str) -> list[str]:
    """Parameters, attributes, functions, classes and constants that have a retired name."""
    found = []
    for node in ast.walk(ast.parse(source)) if RETIRED_WORD.search(source) else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = {node.name.strip("_").lower()}
        elif isinstance(node, ast.arg):
            names = {node.arg}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names = {node.attr.strip("_")}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = {node.target.id}
        else:
            names = {node.id} & RETIRED_CONSTANTS if isinstance(node, ast.Name) else set()
        found += [f"line {node.lineno}: {name}" for name in names & (RETIRED | RETIRED_CONSTANTS)]
    return found


def test_no_name_that_does_not_explain_itself_is_left() -> None:
    assert {path.stem for path in SOURCES} & RETIRED_MODULES == set()
    assert {_name(path): found for path in SOURCES if (found := _retired(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("class Mover: ...", 1),
        ("class Draw: ...", 1),
        ("def f(draw, *, movers=()): ...", 2),
        ("class A:\n    def __init__(self):\n        self.doors, self._met = [], False", 2),
        ("class A:\n    lesson: int", 1),
        ("SURE = 0.2", 1),
        ("def f(batches):\n    return [x for x in batches if x.met]", 0),
    ],
)
def test_the_check_of_names_sees(source: str, faults: int) -> None:
    assert len(_retired(source)) == faults


# --- checks of arguments ---------------------------------------------------------------------------------------


def _own_number_checks(source: str) -> list[str]:
    """Refusals by a test for whole numbers of its own: ``isinstance(x, bool)`` in a condition that raises."""
    return [
        f"line {node.lineno}: {ast.unparse(node.test)}"
        for node in (ast.walk(ast.parse(source)) if "isinstance" in source and "raise" in source else ())
        if isinstance(node, ast.If)
        and isinstance(node.body[0], ast.Raise)
        and re.search(r"isinstance\([^()]*(?:\([^()]*\)[^()]*)*, \(?(?:int|float)\b", ast.unparse(node.test))
        and re.search(r"[<>]", ast.unparse(node.test))
    ]


def test_numbers_are_checked_in_one_place() -> None:
    """``validation.py`` has the checks of arguments."""
    assert {_name(path): found for path in SOURCES if (found := _own_number_checks(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("if isinstance(n, bool) or not isinstance(n, int) or n < 1:\n    raise E", 1),
        ("if not (isinstance(x.y, (int, float)) and x.y > 0):\n    raise E", 1),
        ("if isinstance(n, int) and n < 1:\n    n = 2", 0),
        ("check_whole('n', n)", 0),
    ],
)
def test_the_check_of_number_checks_sees(source: str, faults: int) -> None:
    assert len(_own_number_checks(source)) == faults
