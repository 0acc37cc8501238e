"""Describes what a run computes in readable lines: the structure of its modules, the code of its functions, the data.

    problem.inner               inner, code 5d0c62b1…
    problem.inner.alpha         0.1
    model.layers.3              Dropout(inplace=False, p=0.1)
    inner_data.tensors.0        float32 [20, 6], sha256 9a0f3c…

Two runs of one program have the same lines in every process; ``docs/checkpoints.md`` lists what is not described. A
checkpoint of another program is refused with a list of the lines that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from hyperkron.algorithms import Algorithm, Source, State
from hyperkron.training import contents
from hyperkron.training.contents import Contents, is_library, of_library, parts_of, plain, short

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
LISTED = 20
"""Differences that a message lists."""
_SETTINGS = ("rate", "optimizer", "scheduler", "each_update", "clip", "project", "autocast", "scaler")
_ENTRIES = frozenset({"forward", "next", "__call__", "__getitem__", "__getitems__", "__iter__", "__next__", "__len__"})
_MODULE = frozenset(vars(nn.Module())) | {"training"}
_CODE = re.compile(r"code [0-9a-f]{16}")
Line = str | Callable[[], str]
"""A line, or a function that makes it when it is needed."""


class Program:
    """The lines of a run, and which of them it changes itself.

    ``parts`` are by the names that lines begin with. The parameters and buffers of the modules in ``own`` are the run's
    state: their values are not described.
    """

    def __init__(self, parts: Mapping[str, Any], own: Iterable[nn.Module]) -> None:
        self._parts, self._own = dict(parts), list(own)
        self._contents = Contents()
        self._begin = self._describe()

    def _describe(self) -> dict[str, Line]:
        walker = _Walker(self._contents, self._own)
        for name, part in self._parts.items():
            walker.walk(part, name)
        walker.finish()
        return {BYTECODE: contents.BYTECODE, **walker.lines}

    def begin(self) -> dict[str, str]:
        """The lines as they were when the run was made."""
        return _read(self._begin)

    def code(self) -> dict[str, str]:
        """The lines of code alone, and the interpreter; no tensor is read for them."""
        found = {path: line for path, line in self._begin.items() if isinstance(line, str)}
        return {path: line for path, line in found.items() if path == BYTECODE or _CODE.search(line)}

    def lines(self) -> dict[str, str]:
        """The lines as they were when the run was made; those that are others by now are ``MOVING``."""
        begin, now = self.begin(), _read(self._describe())
        return {path: begin[path] if begin.get(path) == now.get(path) else MOVING for path in {**begin, **now}}


def _read(lines: dict[str, Line]) -> dict[str, str]:
    return {path: line if isinstance(line, str) else line() for path, line in lines.items()}


def settings(algorithm: Algorithm, state: State) -> dict[str, Any]:
    """The settings of a run except its data: the algorithm, and the optimizers of both levels."""
    levels = {"inner": state.inner, "outer": state.outer}
    return {"algorithm": algorithm} | {
        level: {name: getattr(optimizer, name) for name in _SETTINGS} for level, optimizer in levels.items()
    }


def tensors(module: nn.Module) -> dict[str, str]:
    """The dtype and shape of every parameter and buffer that a module saves."""
    found = {name: x for name, x in module.state_dict().items() if isinstance(x, Tensor)}
    return {name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in found.items()}


def differences(title: str, saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The differences between the lines of two runs, one line each; of those that can be compared."""
    lines, (saved, now) = [], _comparable(saved, now)
    for name in [*saved, *(name for name in now if name not in saved)]:
        if name not in now:
            lines.append(f"{title} {name}: only in the checkpoint ({saved[name]})")
        elif name not in saved:
            lines.append(f"{title} {name}: only in this run ({now[name]})")
        elif saved[name] != now[name]:
            lines.append(f"{title} {name}: {saved[name]} in the checkpoint, {now[name]} in this run")
    return lines


def listed(lines: list[str]) -> str:
    """The first lines of many, indented."""
    more = [f"… and {len(lines) - LISTED} more"] if len(lines) > LISTED else []
    return "".join(f"\n  {line}" for line in lines[:LISTED] + more)


def _comparable(saved: Mapping[str, str], now: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The lines that can be compared: without moving ones and, of two interpreters, without code."""
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


class _Walker:
    """Collects lines; the contents of an object are described only the first time it occurs."""

    def __init__(self, digest: Contents, own: Iterable[nn.Module]) -> None:
        self.lines: dict[str, Line] = {}
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
        first = id(x) not in self._seen
        self._seen[id(x)] = x
        try:
            self._walk(x, path, depth, first)
        except Exception as error:  # an object that does not let itself be looked at must not stop a run
            self.lines[path] = f"{type(x).__qualname__}, not described ({type(error).__name__})"

    def _walk(self, x: Any, path: str, depth: int, first: bool) -> None:
        if isinstance(x, (list, tuple, Mapping, set, frozenset)):
            self._collection(x, path, depth)
        elif isinstance(x, Tensor) or (type(x).__module__ == "numpy" and hasattr(x, "dtype") and hasattr(x, "shape")):
            self.lines[path] = f"{x.dtype} {list(x.shape)}" if id(x) in self._state else self._content(x)
        elif isinstance(x, nn.Module):
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
            parts = list(parts_of(x)) if first else []
            if _read_by_name(x):
                self._objects += [(x, name, part, f"{path}.{name}", depth + 1) for name, part in parts]
            else:
                for name, part in parts:
                    self.walk(part, f"{path}.{name}", depth + 1)

    def _content(self, x: Any, room: int | None = None) -> Line:
        """The line of a tensor or array; a tensor is read when that is needed, if it was not written to by then."""
        if isinstance(x, Tensor) and x.dim() and not x.is_inference():  # a single number is read now: a learning rate
            version, digest = x._version, self._digest  # not the walker, which keeps all that it has seen
            return lambda: digest(x, room) if x._version == version else MOVING
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
        own, library = id(x) in self._own, of_library(type(x))
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
            if name not in told and not (library and of_library(type(value)) and not alone):
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
        library, what = of_library(f), contents.code(f.__code__)
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
            if not is_library(value.__name__):
                for name in sorted(set(names) & set(vars(value))):
                    self._read(vars(value)[name], f"{path}.{name}", (), depth)
            return
        plain_name = isinstance(value, (type, FunctionType, BuiltinFunctionType)) and of_library(value)
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
                if not of_library(base)
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
    bases = [base for base in type(x).__mro__ if of_library(base) and base not in (Dataset, IterableDataset, Source)]
    return not of_library(type(x)) and {base.__module__ for base in bases} <= {"builtins", "abc", "typing"}
