"""Converts a nested state to a JSON tree with named tensors, and back, exactly and without executing code.

``docs/checkpoints.md`` lists what a state can contain; anything else is an error that names its place and type. A
tensor keeps its memory layout, because the layout of a matrix affects how products with it are rounded. One tensor in
two places is restored as one tensor. For a sharded tensor, each process has its rows.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.sharding import is_sharded, local
from hyperkron.solution import HyperkronError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes a checkpoint holds, by their names in safetensors."""

DEPTH = 100
"""How deep a state may be nested."""
LONG_TEXT = 4096
"""Longer strings (a history) are stored in the tensor file, so that the JSON tree stays small."""

_TAGS: dict[type[Any], str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


class CheckpointError(HyperkronError):
    """A checkpoint cannot be written, read or used; the message says why and what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is incomplete or was changed, or the folder is not a checkpoint."""


def split(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """``state`` as a tree for JSON, and the tensors it names."""
    splitter = _Splitter()
    return splitter.node(state, ()), splitter.tensors


def sharded_rows(state: Any) -> dict[str, Tensor]:
    """This process's rows of the sharded tensors, by the names :func:`split` gives them."""
    splitter = _Splitter()
    splitter.node(state, ())
    return {name: x for name, x in splitter.tensors.items() if name in splitter.sharded}


def join(
    tree: Any,
    tensor: Callable[[str], Tensor],
    device: torch.device | str | None = None,
    rows: Callable[[str, tuple[int, ...]], Any] | None = None,
) -> Any:
    """The inverse of :func:`split`; ``tensor`` returns a new tensor by its name.

    ``rows`` returns the value for a sharded tensor of this name and shape.
    """
    return _Joiner(tensor, device, rows).value(tree, ())


class _Splitter:
    """One walk through a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.sharded: set[str] = set()
        self._known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def node(self, x: Any, path: tuple[str, ...]) -> Any:
        if len(path) > DEPTH:
            raise CheckpointError(f"{_place(path[:5])}… is nested deeper than {DEPTH} levels, or holds itself.")
        kind = type(x)
        if x is None or kind is bool:
            return x
        if kind is int:
            return x if -(2**63) <= x < 2**63 else {"$int": hex(x)}
        if isinstance(x, float):  # numpy's float64 too, which is one
            return float(x) if math.isfinite(x) else {"$float": struct.pack(">d", x).hex()}
        if kind is str:
            return x if len(x) <= LONG_TEXT else {"$text": self._text(x, path)}
        if isinstance(x, Tensor):
            return self._tensor(x, path)
        if kind in (list, tuple):
            nodes = [self.node(value, (*path, str(i))) for i, value in enumerate(x)]
            return nodes if kind is list else {"$tuple": nodes}
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in x):
            return {key: self.node(value, (*path, key)) for key, value in x.items()}
        if kind not in _TAGS:
            raise CheckpointError(
                f"{_place(path)} is a {_kind(x)}, which a checkpoint cannot hold; let its state_dict() give tensors, "
                "numbers, strings, None, and lists, tuples or dictionaries of these."
            )
        return {_TAGS[kind]: [[_key(key, path), self.node(value, (*path, str(key)))] for key, value in x.items()]}

    def _tensor(self, x: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        if is_sharded(x):
            name = self._name(path)
            self.sharded.add(name)
            self.tensors[name] = local(x).contiguous()
            return {"$divided": name, "shape": list(x.shape)}
        if type(x) not in (Tensor, nn.Parameter) or x.layout is not torch.strided or x.dtype not in DTYPES:
            raise CheckpointError(
                f"{_place(path)} is a {_kind(x)} of {x.dtype} and {x.layout}; a checkpoint holds plain strided tensors "
                f"of {', '.join(str(dtype).removeprefix('torch.') for dtype in DTYPES)}."
            )
        if x.device.type == "meta":
            raise CheckpointError(f"{_place(path)} is on the meta device and has no values to save.")
        x = x.detach()
        where = (x.untyped_storage().data_ptr(), x.storage_offset(), x.shape, x.stride(), x.dtype, x.device)
        if x.numel() and where in self._known:
            return self._known[where]
        node: dict[str, Any] = {"$tensor": self._name(path)}
        stored = x.contiguous()
        if x.stride() != torch.empty(x.shape, device="meta").stride() and _dense(tuple(x.shape), x.stride()):
            stored = x.as_strided((x.numel(),), (1,), x.storage_offset())
            node |= {"shape": list(x.shape), "stride": list(x.stride())}
        if x.device.type != "cpu":
            node["device"] = str(x.device)
        self.tensors[node["$tensor"]] = stored
        self._known[where] = node
        return node

    def _text(self, text: str, path: tuple[str, ...]) -> str:
        name = self._name(path)
        self.tensors[name] = torch.frombuffer(bytearray(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)
        return name

    def _name(self, path: tuple[str, ...]) -> str:
        """A readable name that no other tensor has."""
        wanted = ".".join(path).encode("utf-8", "backslashreplace").decode() or "value"
        name, count = wanted, 1
        while name in self.tensors or name == "__metadata__":
            count += 1
            name = f"{wanted}~{count}"
        return name


class _Joiner:
    """One walk through a tree; every surprise is a :class:`DamagedCheckpoint`."""

    def __init__(
        self,
        tensor: Callable[[str], Tensor],
        device: torch.device | str | None,
        rows: Callable[[str, tuple[int, ...]], Any] | None,
    ) -> None:
        self._tensor, self._device, self._rows = tensor, device, rows
        self._made: dict[str, Tensor] = {}

    def value(self, x: Any, path: tuple[str, ...]) -> Any:
        if len(path) > DEPTH:
            raise DamagedCheckpoint(f"the tree is nested deeper than {DEPTH} levels.")
        if x is None or isinstance(x, (bool, int, float, str)):
            return x
        if isinstance(x, list):
            return [self.value(y, (*path, str(i))) for i, y in enumerate(x)]
        tag = next(iter(x), "")
        if not tag.startswith("$"):
            return {key: self.value(y, (*path, key)) for key, y in x.items()}
        try:
            return self._tagged(tag, x, path)
        except CheckpointError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError, struct.error) as error:
            raise DamagedCheckpoint(f"{_place(path)} has a malformed {tag}: {error}") from error

    def _tagged(self, tag: str, x: dict[str, Any], path: tuple[str, ...]) -> Any:
        content = x[tag]
        if tag == "$tensor":
            return self._placed(x, path)
        if tag == "$divided" and self._rows is not None:
            return self._rows(content, tuple(map(int, x["shape"])))
        if tag == "$tuple":
            return tuple(self.value(content, path))
        if tag == "$int":
            return int(content, 16)
        if tag == "$float":
            return struct.unpack(">d", bytes.fromhex(content))[0]
        if tag == "$text":
            text = self._tensor(content).to(torch.uint8).contiguous()
            return ctypes.string_at(text.data_ptr(), text.numel()).decode("utf-8", "surrogatepass")
        kind = next((kind for kind, own in _TAGS.items() if own == tag), None)
        if kind is None:
            raise DamagedCheckpoint(f"{_place(path)} has the unknown mark {tag!r}.")
        return kind({key: self.value(y, (*path, str(key))) for key, y in content})

    def _placed(self, node: dict[str, Any], path: tuple[str, ...]) -> Tensor:
        name = node["$tensor"]
        if name not in self._made:
            x = self._tensor(name)
            if "stride" in node:
                shape, stride = tuple(node["shape"]), tuple(node["stride"])
                if math.prod(shape) != x.numel() or not _dense(shape, stride):
                    raise DamagedCheckpoint(f"{_place(path)} has shape {shape} and strides {stride}, which do not fit.")
                x = x.as_strided(shape, stride)
            self._made[name] = self._moved(x, str(node.get("device", "cpu")), path)
        return self._made[name]

    def _moved(self, x: Tensor, device: str, path: tuple[str, ...]) -> Tensor:
        wanted = torch.device(device if self._device is None else self._device)
        if wanted.type == "cpu":
            return x
        try:
            return x.to(wanted)
        except (RuntimeError, AssertionError) as error:
            raise CheckpointError(
                f"{_place(path)} was on {wanted}, which is not available here; read it with device='cpu'."
            ) from error


def _dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the elements fill a stretch of memory, each once, in some order of the dimensions."""
    if len(shape) != len(stride) or not all(type(n) is int and n >= 0 for n in (*shape, *stride)):
        return False
    expected = 1
    for step, size in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n != 1):
        if step != expected:
            return False
        expected *= size
    return 0 not in shape


def _key(key: Any, path: tuple[str, ...]) -> str | int:
    if type(key) not in (str, int):
        raise CheckpointError(f"{_place(path)} has the key {key!r:.60}, a {_kind(key)}; use strings or whole numbers.")
    return key


def _kind(x: Any) -> str:
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _place(path: tuple[str, ...]) -> str:
    return "state" + "".join(f"[{key!r}]" for key in path)
