"""What a run is made of, as readable lines: so that a checkpoint of another run is refused with a list of differences.

Values that change while a run goes on are not part of it; data are described by their kind and shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from hyperkron.algorithms import Algorithm, BatchSources, State

DEPTH = 8
SHOWN = 20
"""Differences that a message lists."""
_SETTINGS = ("rate", "optimizer", "scheduler", "clip", "project")
_OPTIONS = ("autocast", "scaler", "each_update")
_MOVING = frozenset({"state", "generator", "order", "served", "params", "optimizer"})


def parts(algorithm: Algorithm, state: State, batches: BatchSources) -> dict[str, Any]:
    """What decides how a run goes, by name: the algorithm, how each level moves, and the data."""
    found: dict[str, Any] = {"algorithm": algorithm}
    for level, optimizer in (("inner", state.inner), ("outer", state.outer)):
        found[level] = {name: getattr(optimizer, name) for name in _SETTINGS} | {
            name: value for name in _OPTIONS if (value := getattr(optimizer, name))
        }
    found |= {"inner_data": batches.inner_source, "outer_data": batches.outer_source}
    return found if batches.curvature_source is None else {**found, "curvature_data": batches.curvature_source}


def tensors(module: nn.Module) -> dict[str, str]:
    """The dtype and shape of every parameter and buffer that a module saves.

    Example:
        >>> tensors(nn.Linear(3, 2))
        {'weight': 'float32 [2, 3]', 'bias': 'float32 [2]'}
    """
    return {name: _tensor(x) for name, x in module.state_dict().items() if isinstance(x, Tensor)}


def describe(parts: Mapping[str, Any]) -> dict[str, str]:
    """Configurations as one line for each setting.

    Example:
        >>> import hyperkron as hk
        >>> lines = describe({"algorithm": hk.AID(hk.kfac(refresh_every=5), inner_steps=3)})
        >>> lines["algorithm"], lines["algorithm.inner_steps"], lines["algorithm.hypergradient.curvature.refresh_every"]
        ('AID', '3', '5')
    """
    found: dict[str, str] = {}
    for name, part in parts.items():
        _walk(part, name, found, 0)
    return found


def differences(title: str, saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two descriptions, a line each.

    Example:
        >>> differences("model", {"a": "float32 [2]"}, {"a": "float32 [3]", "b": "int64 []"})
        ['model a: float32 [2] in the checkpoint, float32 [3] in this run', 'model b: only in this run (int64 [])']
    """
    lines = []
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
    more = [f"… and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in lines[:SHOWN] + more)


def _tensor(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"


def _walk(x: Any, path: str, found: dict[str, str], depth: int) -> None:
    """Add the lines of ``x``; never an address, a path or anything else that differs between two processes."""
    if isinstance(x, PurePath) or depth > DEPTH:
        return
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device)):
        found[path] = f"{x!r:.200}"
    elif isinstance(x, Tensor):
        found[path] = _tensor(x)
    elif isinstance(x, (type, FunctionType, MethodType, BuiltinFunctionType)):
        found[path] = x.__qualname__
    else:
        if not isinstance(x, (list, tuple, dict)):
            found[path] = type(x).__qualname__
        for name, part in _parts(x):
            _walk(part, f"{path}.{name}", found, depth + 1)


def _parts(x: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(x, Mapping):
        return [(str(name), part) for name, part in x.items()]
    if isinstance(x, (list, tuple)):
        return [(str(i), part) for i, part in enumerate(x)]
    if isinstance(x, torch.optim.Optimizer):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in x.param_groups]
        return _parts(groups[0] if len(groups) == 1 else groups)
    if isinstance(x, DataLoader):
        size = len(x.dataset) if hasattr(x.dataset, "__len__") else None
        return [("examples", size), ("batch_size", x.batch_size), ("sampler", x.sampler)]
    if dataclasses.is_dataclass(x):
        return [(field.name, getattr(x, field.name)) for field in dataclasses.fields(x)]
    if isinstance(x, (LRScheduler, ReduceLROnPlateau)) or type(x).__module__.startswith("hyperkron."):
        return [(k, v) for k, v in vars(x).items() if not k.startswith("_") and k not in _MOVING]
    return []
