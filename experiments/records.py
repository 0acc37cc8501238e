"""Result files: the command, the hardware and the versions that made a result are written beside its figures."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
PAGES = ROOT / "experiments" / "pages"
_PACKAGES = ("hyperkron", "numpy", "transformers", "pillow", "kronfluence")


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def hardware(device: torch.device | str | None = None) -> dict[str, Any]:
    """What figures made on ``device`` were measured on; ``None`` is the GPU, if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
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


def command() -> str:
    """The command line of this process, as it is typed in the checkout."""
    script = Path(sys.argv[0]).resolve().with_suffix("")
    name = script.name
    if script.is_relative_to(ROOT):
        parts = script.relative_to(ROOT).parts
        name = "-m " + ".".join(parts[:-1] if parts[-1] == "__main__" else parts)
    return " ".join(["python", name, *map(shlex.quote, sys.argv[1:])])


def write_result(path: str | Path, result: Mapping[str, Any]) -> Path:
    """Write a result as JSON, with the command, the hardware and the versions; a list of numbers is one line.

    A relative path is one in ``experiments/results``. The caller puts the seed into ``result``.
    """
    path = RESULTS / path
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": command(), **result, "hardware": hardware(), "versions": versions()}
    text = json.dumps(record, indent=2, ensure_ascii=False)
    text = re.sub(r"\[[\s\d.,eE+-]*\]", lambda found: " ".join(found[0].split()), text)
    path.write_text(text + "\n", "utf-8")
    return path


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
