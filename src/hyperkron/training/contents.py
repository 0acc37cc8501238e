"""What the objects of a run hold: tensors and arrays by their content, code by its instructions, others by parts."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import dis
import enum
import functools
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from hyperkron.collectives import Group

WHOLE = 2**26
"""Tensors of up to this many bytes are hashed whole."""
BLOCKS = 64
"""Of larger ones this many evenly spaced blocks are hashed, together ``WHOLE`` bytes."""
BYTECODE = f"{sys.implementation.cache_tag}.{sys.flags.optimize}"
"""Instructions can be compared only between interpreters with the same value."""
_PLAIN = (bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.layout)
HUB_ROWS = 64
"""Of a dataset of Hugging Face this many rows are described, evenly spaced."""
_UNSEEN = frozenset({"state", "generator", "order", "served", "params", "optimizer"})
_LONG = 200
_PADDING = frozenset({"EXTENDED_ARG", "CACHE", "NOP", "RESUME"})


def short(data: bytes) -> str:
    """The first 16 digits of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


# --- values ------------------------------------------------------------------------------------------------


def plain(x: Any) -> str | None:
    """A plain value as text, the same in every process; ``None`` for anything else."""
    if x is None or x is Ellipsis:
        return repr(x)
    if isinstance(x, enum.Enum):
        return f"{type(x).__name__}.{x.name}"
    if type(x).__module__ == "numpy" and hasattr(x, "item") and getattr(x, "ndim", None) == 0:
        return f"{x.dtype} {x.item()!r}"
    if not isinstance(x, _PLAIN):
        return None
    text = repr(x)
    return text if len(text) <= _LONG else f"{text[:60]}…, {len(text)} characters, sha256 {short(text.encode())}"


class Contents:
    """Digests of tensors and arrays, cached as long as these are alive and unchanged."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()  # the version of a tensor, and its digest

    def __call__(self, x: Any, room: int | None = None) -> str:
        """Dtype, shape and SHA-256 of a tensor or a numpy array; of ``room`` bytes of it where it is larger."""
        version = x._version if isinstance(x, Tensor) and not x.is_inference() else None
        known: tuple[int | None, str] | None = self._known.get(x)
        if known is None or known[0] != version:
            known = self._known[x] = version, _described(x, WHOLE if room is None else room)
        return known[1]


def _described(x: Any, room: int) -> str:
    head = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    try:
        if not isinstance(x, Tensor):
            if x.dtype == object:
                return f"{head}, sha256 {short(repr([plain(v) for v in x.ravel().tolist()]).encode())}"
            x = _as_tensor(x)
        digest = hashlib.sha256()
        for part in _sample(x.detach().resolve_conj().resolve_neg(), room):
            here = part.cpu().contiguous()
            count = here.numel() * here.element_size()
            digest.update((ctypes.c_char * count).from_address(here.data_ptr()) if count else b"")
        return f"{head}, sha256 {digest.hexdigest()[:16]}"
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # sparse, quantized, fake and other tensors
        return head


def _as_tensor(array: Any) -> Tensor:
    """The memory of a numeric array; that of others (text, dates) as bytes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it is not written to
            return torch.from_numpy(array)
    except (TypeError, ValueError):
        return torch.from_numpy(array.copy().view("u1"))


def _sample(x: Tensor, room: int) -> Iterator[Tensor]:
    """All of ``x``, or evenly spaced rows of it that fill ``room`` bytes."""
    if x.numel() * x.element_size() <= room or not x.dim():
        yield x
        return
    row = x.numel() * x.element_size() // len(x)
    blocks = min(BLOCKS, len(x))
    length = max(1, room // blocks // row)
    for i in range(blocks):
        begin = round(i * (len(x) - length) / max(1, blocks - 1))
        if row <= room // blocks:
            yield x[begin : begin + length]
        else:
            yield from _sample(x[begin], room // blocks)


# --- objects -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def is_library(module: str) -> bool:
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


def of_library(x: Any) -> bool:
    """Whether the code of a function or class is a library's; a decorated function has the decorator's code."""
    module = x.__globals__.get("__name__") if isinstance(x, FunctionType) else getattr(x, "__module__", None)
    return is_library(str(module or "builtins"))


def parts_of(x: Any) -> Iterable[tuple[str, Any]]:
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
    if not is_library(module) or isinstance(x, (SimpleNamespace, argparse.Namespace)):
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


# --- code --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """A description of a code object."""

    digest: str  # of instructions and constants; not of line numbers, file names, comments and docstrings
    globals: tuple[str, ...]  # the global names it reads, also within functions that it defines
    names: frozenset[str]  # all names it uses, attributes among them


@functools.lru_cache(maxsize=4096)
def code(x: CodeType) -> Code:
    """The description of a code object."""
    found: list[str] = [repr((x.co_argcount, x.co_kwonlyargcount, x.co_flags & 0x2AC, x.co_freevars))]
    read: dict[str, None] = {}
    names = set(x.co_names)
    for step in dis.get_instructions(x):
        if step.opname in _PADDING:
            continue
        if step.opcode in dis.hasconst:
            found.append(f"{step.opname} {_constant(step.argval)}")
            for inside in _codes(step.argval):
                read |= dict.fromkeys(code(inside).globals)
                names |= code(inside).names
            continue
        found.append(f"{step.opname} {step.argrepr or step.arg}")
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read[step.argval] = None
    return Code(short("\n".join(found).encode()), tuple(read), frozenset(names))


def _constant(x: Any) -> str:
    """A constant of a code object as text that does not depend on addresses or hashes of strings."""
    if isinstance(x, CodeType):
        return f"code {code(x).digest}"
    if isinstance(x, tuple):
        return f"({', '.join(map(_constant, x))})"
    if isinstance(x, frozenset):
        return f"{{{', '.join(sorted(map(_constant, x)))}}}"
    return f"{type(x).__name__} {x!r}"


def _codes(x: Any) -> Iterator[CodeType]:
    if isinstance(x, CodeType):
        yield x
    elif isinstance(x, tuple):
        for part in x:
            yield from _codes(part)
