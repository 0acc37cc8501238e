"""What is written beside every result: the command, the machine and the versions that made it."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("hyperkron", "numpy", "transformers", "pillow")


def hardware(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What figures made on ``device`` were measured on."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(torch.device(device))
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    """Versions of Python, torch and the other packages that matter, where they are installed."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def plain(value: Any) -> Any:
    """``value`` as JSON can hold it: tuples become lists, keys strings, and numbers that are not finite ``None``.

    Example:
        >>> plain({1: (2.0, float("inf"))})
        {'1': [2.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(x) for x in value]
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a result cannot hold {value!r:.60}, a {type(value).__name__}; use numbers, strings, lists, dicts")


def rounded(value: Any, digits: int = 6) -> Any:
    """``value`` with its numbers rounded to so many significant digits, so that result files stay small.

    Example:
        >>> rounded([0.123456789, 3])
        [0.123457, 3]
    """
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, list):
        return [rounded(x, digits) for x in value]
    if isinstance(value, dict):
        return {key: rounded(x, digits) for key, x in value.items()}
    return value


def dumps(value: Any, indent: int = 0, width: int = 118) -> str:
    """JSON that a person can read and compare: what fits on a line stays on it."""
    flat = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if len(flat) + indent <= width or not isinstance(value, (dict, list)) or not value:
        return flat
    pad, inner = " " * indent, " " * (indent + 1)
    if isinstance(value, list):
        return "[\n" + ",\n".join(inner + dumps(x, indent + 1, width) for x in value) + f"\n{pad}]"
    rows = (f"{inner}{json.dumps(key, ensure_ascii=False)}: {dumps(x, indent + 1, width)}" for key, x in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{pad}}}"
