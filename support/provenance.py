"""What a figure was measured on, and with which versions: written beside the figures of benchmarks and experiments."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


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


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = str(torch.__version__) if name == "torch" else version(name)
        except PackageNotFoundError:
            continue
    return found


def in_lines(value: Any) -> str:
    """JSON with every list of numbers on one line.

    Example:
        >>> in_lines({"times": [1.0, 2.0]})
        '{\\n  "times": [ 1.0, 2.0 ]\\n}'
    """
    text = json.dumps(value, indent=2, ensure_ascii=False)
    return re.sub(r"\[[\s\d.,eE+-]*\]", lambda found: " ".join(found[0].split()), text)
