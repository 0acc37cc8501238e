"""Describes what a run computes in readable lines: the structure of its modules, the code of its functions, the data.

    problem.inner               inner, code 5d0c62b1…
    problem.inner.alpha         0.1
    model.layers.3              Dropout(inplace=False, p=0.1)
    inner_data.tensors.0        float32 [20, 6], sha256 9a0f3c…

Two runs of one program have the same lines in every process; ``docs/checkpoints.md`` lists what is not described.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path, PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hyperkron.algorithms import Source
from hyperkron.collectives import Group
from hyperkron.training import contents
from hyperkron.training.contents import Contents, plain, short

MOVING = "changes during the run"
"""The line of a value that the run itself has changed; it is not compared."""
BYTECODE = "python bytecode"
COMPILED = "_torchdynamo_orig_callable"
"""Where torch.compile keeps the function that it was given."""
DEPTH = 12
SHOWN = 16
"""Longer collections of plain values are one line."""
SAMPLED = 1024
"""Of longer collections of other things this many are described, evenly spaced."""
TEACHER = 2**20
"""Bytes of a parameter of a module that is not the run's own, such as a teacher, that are hashed."""
HUB_ROWS = 64
"""Of a dataset of Hugging Face this many rows are described, evenly spaced."""
_ENTRIES = frozenset({"forward", "next", "__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "__len__"})
_MODULE = frozenset(vars(nn.Module())) | {"training"}
_UNSEEN = frozenset({"state", "generator", "order", "served", "params", "optimizer"})
_CODE = re.compile(r"code [0-9a-f]{16}")


class Program:
    """The lines of a run, and which of them it changes itself.

    ``parts`` are by the names that lines begin with. The parameters and buffers of the modules in ``own`` are the run's
    state: their values are not described.
    """

    def __init__(self, parts: Mapping[str, Any], own: Iterable[nn.Module]) -> None:
        self._parts, self._own = dict(parts), list(own)
        self._contents = Contents()
        self._begin = self._describe()

    def _describe(self) -> dict[str, str | _Unread]:
        walker = _Walker(self._contents, self._own)
        for name, part in self._parts.items():
            walker.walk(part, name)
        walker.finish()
        return {BYTECODE: contents.BYTECODE, **walker.lines}

    def begin(self) -> dict[str, str]:
        """The lines as they were when the run was made."""
        return {path: self._read(line) for path, line in self._begin.items()}

    def lines(self) -> dict[str, str]:
        """The lines as they were when the run was made; those that are others by now are ``MOVING``."""
        begin = self.begin()
        now = {path: self._read(line) for path, line in self._describe().items()}
        return {
            **{path: line if now.get(path) == line else MOVING for path, line in begin.items()},
            **{path: MOVING for path in now if path not in begin},
        }

    def _read(self, line: str | _Unread) -> str:
        if isinstance(line, str):
            return line
        return self._contents(line.tensor, line.room) if line.tensor._version == line.version else MOVING


@dataclasses.dataclass(frozen=True, eq=False)
class _Unread:
    """In place of a tensor's line: read when it is needed, and ``MOVING`` if the tensor has been written to by then."""

    tensor: Tensor
    version: int
    room: int | None


def comparable(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The lines of two runs that can be compared: without moving ones and, of two interpreters, without code."""
    moving = {path for lines in (saved, now) for path, line in lines.items() if line == MOVING}
    same = saved.get(BYTECODE) == now.get(BYTECODE)

    def kept(lines: Mapping[str, str]) -> dict[str, str]:
        found = {
            p: line
            for p, line in lines.items()
            if p != BYTECODE and not moving.intersection(accumulate(p.split("."), "{}.{}".format))
        }
        return found if same else {path: _CODE.sub("code", line) for path, line in found.items()}

    return kept(saved), kept(now)


@functools.lru_cache(maxsize=4096)
def _library(module: str) -> bool:
    """Whether a module belongs to Python or to an installed package, whose version is compared instead."""
    root = module.split(".")[0]
    if root in ("torch", "hyperkron", "builtins"):
        return True
    if root not in sys.modules or root == "__main__":
        return False
    file = getattr(sys.modules[root], "__file__", None)
    if file is None:
        return root in sys.stdlib_module_names
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return bool(installed) or Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def _of_library(x: Any) -> bool:
    """Whether the code of a function or class is a library's; a decorated function has the decorator's code."""
    module = x.__globals__.get("__name__") if isinstance(x, FunctionType) else getattr(x, "__module__", None)
    return _library(str(module or "builtins"))


class _Walker:
    """Collects lines; the contents of an object are described only the first time it occurs."""

    def __init__(self, digest: Contents, own: Iterable[nn.Module]) -> None:
        self.lines: dict[str, str | _Unread] = {}
        self._digest = digest
        self._seen: dict[int, Any] = {}  # by id, and kept so that no id is used twice
        self._state = {id(x) for m in own for x in (*m.parameters(), *m.buffers())}
        self._own = {id(m) for root in own for m in root.modules()}
        self._tied: dict[int, str] = {}
        self._classes: dict[type, str] = {}
        self._objects: list[tuple[Any, str, Any, str, int]] = []  # holder, name, value, path and depth
        self._names = set(_ENTRIES)

    def walk(self, x: Any, path: str, depth: int = 0) -> None:
        """Add the lines of ``x``, without addresses, paths and anything else that differs between processes."""
        text = plain(x)
        if isinstance(x, PurePath):
            return
        if text is not None or depth > DEPTH:
            self.lines[path] = text or f"{type(x).__qualname__}, nested too deep to be described"
            return
        try:
            self._walk(x, path, depth)
        except Exception as error:  # an object that does not let itself be looked at must not stop a run
            self.lines[path] = f"{type(x).__qualname__}, not described ({type(error).__name__})"

    def _walk(self, x: Any, path: str, depth: int) -> None:
        if isinstance(x, (list, tuple, Mapping, set, frozenset)):
            self._collection(x, path, depth)
        elif isinstance(x, Tensor) or (type(x).__module__ == "numpy" and hasattr(x, "dtype") and hasattr(x, "shape")):
            self.lines[path] = f"{x.dtype} {list(x.shape)}" if id(x) in self._state else self._content(x)
        else:
            first = id(x) not in self._seen
            self._seen[id(x)] = x
            self._thing(x, path, depth, first)

    def _thing(self, x: Any, path: str, depth: int, first: bool) -> None:
        if isinstance(x, nn.Module):
            self._module(x, path, depth, first)
        elif isinstance(x, FunctionType):
            self._function(x, path, depth, first)
        elif isinstance(x, MethodType):
            self.walk(x.__func__, path, depth + 1)
            self.walk(x.__self__, f"{path}.self", depth + 1)
        elif isinstance(x, type):
            self.lines[path] = x.__qualname__
            self._classes.setdefault(x, path)
        elif isinstance(x, BuiltinFunctionType):
            self.lines[path] = f"{x.__module__ or 'torch'}.{x.__name__}"
        elif not isinstance(x, ModuleType):
            self.lines[path] = type(x).__qualname__
            self._classes.setdefault(type(x), path)
            parts = list(_parts(x)) if first else []
            if _read_by_name(x):
                self._objects += [(x, name, part, f"{path}.{name}", depth + 1) for name, part in parts]
            else:
                for name, part in parts:
                    self.walk(part, f"{path}.{name}", depth + 1)

    def _content(self, x: Any, room: int | None = None) -> str | _Unread:
        if isinstance(x, Tensor) and x.dim() and not x.is_inference():  # a single number is read now: a learning rate
            return _Unread(x, x._version, room)
        return self._digest(x, room)

    def _collection(self, x: Any, path: str, depth: int) -> None:
        if isinstance(x, Mapping):
            pairs = [(k if isinstance(k, str) else plain(k) or str(i), v) for i, (k, v) in enumerate(x.items())]
        elif isinstance(x, (set, frozenset)):
            pairs = [(text, None) for text in sorted(str(plain(v)) for v in x)]
        else:
            pairs = [(str(i), v) for i, v in enumerate(x)]
        texts = [None if (text := plain(v)) is None else f"{k}: {text}" for k, v in pairs]
        if isinstance(x, (set, frozenset)) or (len(x) > SHOWN and None not in texts):
            digest = short("\n".join(sorted(map(str, texts)) if isinstance(x, Mapping) else map(str, texts)).encode())
            self.lines[path] = f"{type(x).__name__} of {len(x)}, sha256 {digest}"
            return
        if len(pairs) > SAMPLED:
            self.lines[path] = f"{type(x).__name__} of {len(x)}"
            pairs = [pairs[i * (len(pairs) - 1) // (SAMPLED - 1)] for i in range(SAMPLED)]
        elif not pairs:
            self.lines[path] = f"empty {type(x).__name__}"
        for name, part in pairs:
            self.walk(part, f"{path}.{name}", depth + 1)

    def _module(self, x: nn.Module, path: str, depth: int, first: bool) -> None:
        """Its type and settings, which of its parameters are frozen or shared, and the modules in it."""
        own, library = id(x) in self._own, _of_library(type(x))
        settings = {
            k: v for k, v in vars(x).items() if k not in _MODULE and not (library and (k[0] == "_" or k == "forward"))
        }
        told = {k: text for k, v in sorted(settings.items()) if (text := plain(v)) is not None} if library else {}
        self.lines[path] = type(x).__qualname__ + (
            f"({', '.join(f'{k}={v}' for k, v in told.items())})" if told else ""
        )
        self._classes.setdefault(type(x), path)
        if "." not in path and not x.training:
            self.lines[f"{path}.training"] = "False"
        if not first:
            return
        for name, value in settings.items():
            alone = callable(value) or isinstance(value, (Tensor, list, tuple, dict))  # more than a library's object
            if name not in told and not (library and _of_library(type(value)) and not alone):
                self.walk(value, f"{path}.{name}", depth + 1)
        for name, p in (*x._parameters.items(), *x._buffers.items()):
            if p is not None:
                self._parameter(p, f"{path}.{name}", own)
        for name, child in x._modules.items():
            if child is None:
                self.lines[f"{path}.{name}"] = "None"
            else:
                self.walk(child, f"{path}.{name}", depth)
                if child.training != x.training:
                    self.lines[f"{path}.{name}.training"] = str(child.training)
        hooks = [*x._forward_pre_hooks.values(), *x._forward_hooks.values()]
        for i, hook in enumerate(hook for hook in hooks if not str(hook.__module__).startswith("hyperkron.")):
            self.walk(hook, f"{path}.hook {i}", depth + 1)

    def _parameter(self, p: Tensor, path: str, own: bool) -> None:
        if self._tied.setdefault(id(p), path) != path:
            self.lines[path] = f"the same as {self._tied[id(p)]}"
        elif not own:
            self.lines[path] = self._content(p, TEACHER)
        elif isinstance(p, nn.Parameter) and not p.requires_grad:
            self.lines[path] = "frozen"

    def _function(self, f: FunctionType, path: str, depth: int, first: bool) -> None:
        """Its code and the values it reads: closure, defaults, globals; of a library's its name and closure."""
        library, what = _of_library(f), contents.code(f.__code__)
        name = f"{f.__globals__.get('__name__')}.{f.__code__.co_name}"
        self.lines[path] = name if library else f"{f.__name__}, code {what.digest}"
        if not first:
            return
        if hasattr(f, COMPILED):
            return self.walk(getattr(f, COMPILED), f"{path}.compiled", depth + 1)
        read: dict[str, Any] = {}
        if not library:
            self._names |= what.names
            positional = f.__code__.co_varnames[: f.__code__.co_argcount]
            read |= zip(reversed(positional), reversed(f.__defaults__ or ()), strict=False)
            read |= f.__kwdefaults__ or {}
            read |= {name: f.__globals__[name] for name in what.globals if name in f.__globals__}
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # not filled yet
                read[name] = cell.cell_contents
        read.pop("__class__", None)
        if library and hasattr(f, "__wrapped__"):
            read["wrapped"] = f.__wrapped__
        for name, value in read.items():
            self._read(value, f"{path}.{name}", what.names, depth + 1)

    def _read(self, value: Any, path: str, names: Iterable[str], depth: int) -> None:
        """Add a value that a function reads; for a module of the user, the members that the function uses by name."""
        if isinstance(value, ModuleType):
            if not _library(value.__name__):
                for name in sorted(set(names) & set(vars(value))):
                    self._read(vars(value)[name], f"{path}.{name}", (), depth)
            return
        plain_name = isinstance(value, (type, FunctionType, BuiltinFunctionType)) and _of_library(value)
        if not plain_name or getattr(value, "__closure__", None) or hasattr(value, "__wrapped__"):  # made by a factory
            self.walk(value, path, depth)

    def finish(self) -> None:
        """Add the methods and attributes of the user's objects that are entry points or that any code uses by name."""
        done: set[tuple[int, str]] = set()
        while True:
            members = [
                (base, name, vars(base)[name], f"{path}.{base.__name__}.{name}", 0)
                for cls, path in self._classes.items()
                for base in cls.__mro__
                if not _of_library(base)
                for name in vars(base)
            ]
            waiting = [*members, *self._objects]
            found = [item for item in waiting if item[1] in self._names and (id(item[0]), item[1]) not in done]
            if not found:
                return
            for holder, name, value, path, depth in found:
                done.add((id(holder), name))
                if isinstance(holder, type):
                    self._member(value, path)
                else:
                    self.walk(value, path, depth)

    def _member(self, member: Any, path: str) -> None:
        if isinstance(member, (staticmethod, classmethod)):
            member = member.__func__
        elif isinstance(member, (property, functools.cached_property)):
            member = member.fget if isinstance(member, property) else member.func
        if isinstance(member, FunctionType) or plain(member) is not None:
            self.walk(member, path)


def _read_by_name(x: Any) -> bool:
    """Whether only described code reads the attributes of an object; then only attributes it names are described."""
    if isinstance(x, (SimpleNamespace, argparse.Namespace)):
        return True
    bases = [base for base in type(x).__mro__ if _of_library(base) and base not in (Dataset, IterableDataset, Source)]
    return not _of_library(type(x)) and {base.__module__ for base in bases} <= {"builtins", "abc", "typing"}


def _parts(x: Any) -> Iterable[tuple[str, Any]]:
    """The parts of an object that are described, by name."""
    module = type(x).__module__
    if isinstance(x, (torch.Generator, Group)):  # a run continues with any number of processes
        return []
    if isinstance(x, torch.optim.Optimizer):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in x.param_groups]
        return list(groups[0].items()) if len(groups) == 1 else [(str(i), group) for i, group in enumerate(groups)]
    if isinstance(x, (LRScheduler, ReduceLROnPlateau)):
        kept = [name for name in vars(x) if name == "_schedulers" or (name[0] != "_" and name not in _UNSEEN)]
        return [(name, vars(x)[name]) for name in kept]
    if isinstance(x, DataLoader):
        names = ("dataset", "batch_size", "collate_fn", "sampler", "batch_sampler", "drop_last")
        return [(name, getattr(x, name)) for name in names]
    if isinstance(x, functools.partial):
        return [("func", x.func), ("args", x.args), ("keywords", x.keywords)]
    if module.split(".")[0] == "pandas":
        return [("columns", list(getattr(x, "columns", ()))), ("values", _hashed_rows(x))]
    if module.split(".")[0] == "datasets" and hasattr(x, "with_format") and hasattr(x, "__len__"):
        return _hub_rows(x)
    if dataclasses.is_dataclass(x):
        return [(field.name, getattr(x, field.name)) for field in dataclasses.fields(x) if hasattr(x, field.name)]
    if hasattr(x, "__wrapped__"):
        return [("wrapped", x.__wrapped__)]
    held = _held(x)
    if not _library(module) or isinstance(x, (SimpleNamespace, argparse.Namespace)):
        return [(k, v) for k, v in held.items() if not k.startswith("__")]
    if module.split(".")[0] in sys.stdlib_module_names or module.startswith("torch._"):
        return []
    return [(k, v) for k, v in held.items() if not k.startswith("_") and k not in _UNSEEN]


def _held(x: Any) -> dict[str, Any]:
    """The attributes of an object, in ``__dict__`` or in slots."""
    slots = [name for cls in type(x).__mro__ for name in _slots(cls)]
    return {**{k: getattr(x, k) for k in slots if hasattr(x, k)}, **getattr(x, "__dict__", {})}


def _slots(cls: type) -> Iterable[str]:
    names = vars(cls).get("__slots__", ())
    return [names] if isinstance(names, str) else [name for name in names if not name.startswith("__")]


def _hashed_rows(x: Any) -> Any:
    """A number for every row of a DataFrame or a Series."""
    with contextlib.suppress(Exception):
        return sys.modules["pandas"].util.hash_pandas_object(x).to_numpy()
    return None


def _hub_rows(x: Any) -> list[tuple[str, Any]]:
    """The length and evenly spaced rows of a dataset of Hugging Face, as they are stored."""
    count = min(len(x), HUB_ROWS)
    rows: Any = None
    with contextlib.suppress(Exception):
        stored = x.with_format("arrow")
        rows = [stored[i * (len(x) - 1) // max(1, count - 1)].to_pydict() for i in range(count)]
    return [("length", len(x)), ("rows", rows)]
