"""The rules that hold for every source file: its layer, what it may import, no pickle, not too long."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "hyperkron"
SOURCES = sorted(SRC.rglob("*.py"))
MAX_LINES = 415

# Each module imports only from those before it (docs/architecture.md). The package's __init__ may import all.
LAYERS = (
    "sharding",
    "trees",
    "batch_tensors",
    "kernels",
    "solution",
    "validation",
    "collectives",
    "sharded_functions",
    "losses",
    "problem",
    "evaluation",
    "curvature",
    "solvers",
    "cross",
    "hypergradient",
    "batches",
    "optimizers",
    "algorithms",
    "hyper",
    "training",
    "sweeps",
    "attribution",
    "cleaning.data",
    "cleaning.models",
    "cleaning",
    "cleaning.report",
    "cli",
)

PICKLERS = frozenset({"pickle", "_pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"})
OBJECTS = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list", "send_object_list")
PICKLING = frozenset(
    {"torch.load", "torch.save", "pandas.read_pickle", *(f"torch.distributed.{name}" for name in OBJECTS)}
)
PICKLING_NAMES = frozenset(name.rpartition(".")[2] for name in PICKLING)
PICKLING_WORD = re.compile(rf"\b({'|'.join((*PICKLERS, *PICKLING_NAMES, 'allow_pickle'))})\b")


def _name(path: Path) -> str:
    return str(path.relative_to(SRC))


# --- the layers --------------------------------------------------------------------------------------------


def _layer(module: str) -> str | None:
    """The layer of a dotted module name; None for the package itself and for other packages."""
    parts = module.split(".")
    if parts[0] != "hyperkron" or len(parts) == 1:
        return None
    inner = ".".join(parts[1:3])  # the application's parts have an order of their own
    return inner if inner in LAYERS else parts[1]


def _statements(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """These and all within them; no expressions, which are most of a tree."""
    for node in nodes:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, part, ()))


@cache
def _imports(source: str, module: str, is_package: bool = False) -> list[tuple[int, str]]:
    """(line, absolute dotted name) for everything a module imports, wherever in the file it does.

    `from hyperkron import x` counts as hyperkron.x; imports for type checking count too.
    """
    found = []
    for node in _statements(ast.parse(source).body):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def _layer_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """What in a module of the package breaks the order of LAYERS."""
    own = _layer(module)
    if own is None or own == "__main__":
        return []  # the package's face may import all
    if own not in LAYERS:
        return [f"{module}: layer {own!r} is not in LAYERS; give it its place in the order"]
    faults = []
    for line, name in _imports(source, module, is_package):
        if name.split(".")[0] != "hyperkron":
            continue
        other = _layer(name)
        if other not in LAYERS:
            faults.append(f"{module}:{line} imports {name} from the package's face; name the module it lives in")
        elif LAYERS.index(other) > LAYERS.index(own):
            faults.append(f"{module}:{line} imports {name}, which lies below {own!r}")
    return faults


def _import_graph(names: Mapping[str, Path]) -> dict[str, set[str]]:
    """By the name of each module those of ``names`` that it imports, wherever in the file it does."""
    graph: dict[str, set[str]] = {}
    for name, path in names.items():
        found = _imports(path.read_text("utf-8"), name, path.name == "__init__.py")
        graph[name] = {full if full in names else full.rpartition(".")[0] for _, full in found} & names.keys() - {name}
    return graph


def _dotted(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    "src": {_dotted(path, SRC.parent): path for path in SOURCES if path.name != "__init__.py"},
    "experiments": {_dotted(path, ROOT): path for path in (ROOT / "experiments").rglob("*.py")},
    "benchmarks": {path.stem: path for path in (ROOT / "benchmarks").glob("*.py")},  # they import each other by name
}


@pytest.mark.parametrize(("folder", "least"), [("src", 500), ("experiments", 300), ("benchmarks", 50)])
def test_no_two_modules_import_each_other(folder: str, least: int) -> None:
    """Not even for type checking, and not by way of others: a reader can begin at the top and go down."""
    graph = _import_graph(MODULES[folder])
    assert sum(map(len, graph.values())) > least
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_the_check_of_circles_sees(tmp_path: Path) -> None:
    """Also those by way of a third module, within a function, or for type checking."""
    sources = {
        "a": "from b import x",
        "b": "def f():\n    import c",
        "c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a import y",
        "d": "import a, b",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    names = {name: tmp_path / f"{name}.py" for name in sources}
    with pytest.raises(CycleError):
        TopologicalSorter(_import_graph(names)).prepare()
    del names["c"]
    TopologicalSorter(_import_graph(names)).prepare()


# What each folder may not import: the library nothing outside itself, tests and benchmarks not each other.
APART = {
    "src/hyperkron": ("experiments", "benchmarks", "tests", "support", "examples"),
    "experiments": ("benchmarks", "tests", "examples"),
    "support": ("experiments", "benchmarks", "tests", "examples"),
    "benchmarks": ("experiments", "tests", "examples"),
    "tests": ("benchmarks",),
}


def _stranger_faults(
    source: str, strangers: tuple[str, ...], module: str = "outside", is_package: bool = False
) -> list[str]:
    """Imports of other folders, by their name or that of a module in them, and other folders put on ``sys.path``."""
    modules = {path.stem: name for name in strangers for path in (ROOT / name).glob("*.py")}
    modules |= {name: name for name in strangers}
    found = [(line, modules.get(name.split(".")[0])) for line, name in _imports(source, module, is_package)]
    for node in ast.walk(ast.parse(source)) if "sys.path." in source else ():
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("sys.path."):
            words = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            found += [(node.lineno, word) for word in words if word in strangers]
    return [f"line {line} reaches into {name}/" for line, name in found if name is not None]


@pytest.mark.parametrize("folder", APART)
def test_folders_that_are_apart_do_not_import_each_other(folder: str) -> None:
    faults = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        module = _dotted(path, ROOT / "src" if folder.startswith("src") else ROOT)
        source, is_package = path.read_text("utf-8"), path.name == "__init__.py"
        if found := _stranger_faults(source, APART[folder], module, is_package):
            faults[str(path.relative_to(ROOT))] = found
    assert faults == {}


@pytest.mark.parametrize(
    ("source", "strangers", "faults"),
    [
        ("import scaling", ("benchmarks",), 1),
        ("def f():\n    from benchmarks.common import seconds", ("benchmarks",), 1),
        ("sys.path.append(str(ROOT / 'benchmarks'))", ("benchmarks",), 1),
        ("subprocess.run(['python', 'benchmarks/faults.py'])", ("benchmarks",), 0),
        ("import oracles", ("experiments", "tests"), 1),
        ("from experiments.paper import page", ("experiments", "tests"), 1),
        ("import resuming", ("benchmarks",), 0),
    ],
)
def test_the_check_of_folders_sees(source: str, strangers: tuple[str, ...], faults: int) -> None:
    assert len(_stranger_faults(source, strangers)) == faults


def test_imports_respect_the_layers() -> None:
    for path in SOURCES:
        assert _layer_faults(path.read_text("utf-8"), _dotted(path, SRC.parent), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "faults"),
    [
        ("hyperkron.curvature.kfac.factors", "from ...trees import dot", 0),
        ("hyperkron.curvature.kfac.factors", "from ..base import Operator", 0),
        ("hyperkron.curvature.kfac.factors", "from ...solvers.cg import CG", 1),
        ("hyperkron.curvature.kfac.factors", "from hyperkron import trees, solvers", 1),
        ("hyperkron.trees", "def f():\n    import hyperkron.losses", 1),
        (
            "hyperkron.trees",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from . import cross",
            1,
        ),
        ("hyperkron.cross", "from . import trees\nfrom .solution import Status\nimport torch", 0),
        ("hyperkron.cross", "import hyperkron as hk", 1),
        ("hyperkron.cross", "from . import kfac", 1),
        ("hyperkron.newcomer", "import torch", 1),
        ("hyperkron", "from hyperkron.cli import main", 0),
    ],
)
def test_the_layer_check_sees(module: str, source: str, faults: int) -> None:
    assert len(_layer_faults(source, module)) == faults


def test_the_layer_check_resolves_relative_imports_of_a_package() -> None:
    assert _layer_faults("from .cg import CG", "hyperkron.solvers", is_package=True) == []
    assert _layer_faults("from ..curvature import KFAC", "hyperkron.solvers", is_package=True) == []
    assert len(_layer_faults("from ..cross import product", "hyperkron.solvers", is_package=True)) == 1


# --- no pickle, no long files ------------------------------------------------------------------------------


def _pickle_faults(source: str) -> list[str]:
    """Imports of pickling modules, and uses of functions that pickle, also under another name."""
    if not PICKLING_WORD.search(source):
        return []
    tree = ast.parse(source)
    known = {}  # local name -> what it stands for
    faults = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.asname or alias.name.split(".")[0], alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        else:
            continue
        for local, full in names:
            known[local] = full if isinstance(node, ast.ImportFrom) or local != full.split(".")[0] else local
            if full.split(".")[0] in PICKLERS or full in PICKLING:
                faults.append(f"line {node.lineno}: imports {full}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PICKLING_NAMES:
            root, _, rest = ast.unparse(node).partition(".")
            if f"{known.get(root, root)}.{rest}" in PICKLING:
                faults.append(f"line {node.lineno}: uses {ast.unparse(node)}")
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            faults.append(f"line {node.value.lineno}: allow_pickle")
    return faults


def test_nothing_pickles() -> None:
    """A file from a stranger must never run code: safetensors and JSON instead."""
    assert {_name(path): found for path in SOURCES if (found := _pickle_faults(path.read_text("utf-8")))} == {}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ("import pickle", 1),
        ("def f():\n    from cloudpickle import dumps", 1),
        ("import torch\nx = torch.load('a')", 1),
        ("import torch as t\nt.save({}, 'a')", 1),
        ("from torch import load as read", 1),
        ("import torch.nn as nn\nimport torch\ntorch.load('a')", 1),
        ("import numpy as np\nnp.load('a', allow_pickle=True)", 1),
        ("import torch.distributed as dist\ndist.broadcast_object_list([])", 1),
        ("import json\njson.load(open('a'))", 0),
        ("from safetensors.torch import load, save_file", 0),
    ],
)
def test_the_pickle_check_sees(source: str, faults: int) -> None:
    assert len(_pickle_faults(source)) == faults


def test_files_are_short() -> None:
    """A longer one is split by concept; better 400 lines than MAX_LINES."""
    lines = {_name(path): len(path.read_text("utf-8").splitlines()) for path in SOURCES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_there_are_sources_to_check() -> None:
    assert {"trees.py", "solution.py", "problem.py"} <= {path.name for path in SOURCES}
