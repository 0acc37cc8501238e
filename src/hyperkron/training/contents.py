"""Digests of the parts of a run: tensors and arrays by their content, code by its instructions."""

from __future__ import annotations

import ctypes
import dis
import enum
import functools
import hashlib
import sys
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import Tensor

WHOLE = 2**26
"""Tensors of up to this many bytes are hashed whole."""
BLOCKS = 64
"""Of larger ones this many evenly spaced blocks are hashed, together ``WHOLE`` bytes."""
BYTECODE = f"{sys.implementation.cache_tag}.{sys.flags.optimize}"
"""Instructions can be compared only between interpreters with the same value."""
_PLAIN = (bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device, torch.layout)
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
        self._known: dict[int, tuple[weakref.ref[Any], int | None, str]] = {}

    def __call__(self, x: Any, room: int | None = None) -> str:
        """Dtype, shape and SHA-256 of a tensor or a numpy array; of ``room`` bytes of it where it is larger."""
        found = self._known.get(id(x))
        version = _version(x)
        if found is not None and found[0]() is x and found[1] == version:
            return found[2]
        text = _described(x, WHOLE if room is None else room)
        self._known[id(x)] = (weakref.ref(x), version, text)
        return text


def _version(x: Any) -> int | None:
    return x._version if isinstance(x, Tensor) and not x.is_inference() else None


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
