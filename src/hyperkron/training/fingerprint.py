"""Describes a run in readable lines, so that a checkpoint of another run is refused with a list of differences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hyperkron.algorithms import Algorithm, State

SHOWN = 20
"""Differences that a message lists."""
_SETTINGS = ("rate", "optimizer", "scheduler", "clip", "project")
_OPTIONS = ("autocast", "scaler", "each_update")


def settings(algorithm: Algorithm, state: State) -> dict[str, Any]:
    """The settings of a run except its data: the algorithm, and the optimizers of both levels."""
    found: dict[str, Any] = {"algorithm": algorithm}
    for level, optimizer in (("inner", state.inner), ("outer", state.outer)):
        found[level] = {name: getattr(optimizer, name) for name in _SETTINGS} | {
            name: value for name in _OPTIONS if (value := getattr(optimizer, name))
        }
    return found


def tensors(module: nn.Module) -> dict[str, str]:
    """The dtype and shape of every parameter and buffer that a module saves."""
    found = {name: x for name, x in module.state_dict().items() if isinstance(x, Tensor)}
    return {name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for name, x in found.items()}


def differences(title: str, saved: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The differences between two descriptions, one line each."""
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
