"""The package's face: its names come when they are asked for, and are the same for a type checker."""

from __future__ import annotations

import ast
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import hyperkron as hk

SRC = Path(hk.__file__).parent


def run(program: str) -> str:
    """What a program prints in an interpreter of its own."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_alone_loads_nothing_a_name_what_it_needs_and_there_are_many_ways_to_it() -> None:
    assert 30 < len(set(hk.__all__)) == len(hk.__all__) <= 45
    assert len({name.lower() for name in hk.__all__}) == len(hk.__all__), "names that differ by case only"
    program = """
import sys, hyperkron as hk
assert hk.__version__ and "torch" not in sys.modules
assert not hasattr(hk, "__wrapped__") and not hasattr(hk, "_private") and "torch" not in sys.modules
assert hk.kfac(1e-3) is not None and "kfac" in vars(hk) and "torch" in sys.modules
assert not {"hyperkron.training", "hyperkron.cleaning", "hyperkron.algorithms"} & set(sys.modules)

import hyperkron
assert {*hyperkron.__all__, "losses", "training", "cleaning", "__version__"} <= set(dir(hyperkron))
from hyperkron import SampleWeights, clean, losses
from hyperkron import *
assert set(hyperkron.__all__) <= set(globals())
print(clean.__module__, hyperkron.training.__name__)
"""
    assert run(program) == "hyperkron.cleaning.api hyperkron.training"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'hyperkron' has no attribute 'kfacc'"):
        hk.kfacc  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"'no\.such'"):
        getattr(hk, "no.such")
    with pytest.raises(ImportError, match="cannot import name 'kfacc' from 'hyperkron'"):
        from hyperkron import kfacc  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.long
def test_every_part_can_be_the_first_that_is_imported() -> None:
    """The names come late, so no part may count on the others having been imported before it."""
    parts = [f"hyperkron.{part.name}" for part in pkgutil.iter_modules([str(SRC)]) if part.name != "__main__"]
    assert len(parts) >= 18
    program = f"""
import importlib, sys, torch
for name in {parts!r}:
    for known in [known for known in sys.modules if known.split(".")[0] == "hyperkron"]:
        del sys.modules[known]
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, error)
"""
    assert run(program) == ""


def test_a_type_checker_sees_the_names_and_no_getattr() -> None:
    """With a __getattr__ in its sight every misspelt name would be of the type Any."""
    tree = ast.parse((SRC / "__init__.py").read_text("utf-8"))
    [choice] = [node for node in tree.body if isinstance(node, ast.If)]
    assert ast.unparse(choice.test) == "TYPE_CHECKING"
    shown: dict[str, str] = {}
    for node in choice.body:
        assert isinstance(node, ast.ImportFrom) and len(node.names) == 1 and node.module is not None
        shown[str(node.names[0].asname)] = (*node.module.split("."), "__init__")[1]
    assert shown == {name: part for part, names in hk._NAMES.items() for name in names.split()}
    assert {node.name for node in choice.orelse if isinstance(node, ast.FunctionDef)} == {"__getattr__", "__dir__"}
    assert not any(isinstance(node, ast.FunctionDef) for node in tree.body)
