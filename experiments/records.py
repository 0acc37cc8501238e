"""Result files: the command, the hardware and the versions that made a result are written beside its figures."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from support import provenance
from support.provenance import hardware as hardware

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
PAGES = ROOT / "experiments" / "pages"
_PACKAGES = ("torch", "hyperkron", "numpy", "transformers", "pillow", "kronfluence")


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has finished its work."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def versions() -> dict[str, str]:
    """Versions of Python, torch and the other packages that matter, where they are installed."""
    return provenance.versions(_PACKAGES)


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
    path.write_text(provenance.in_lines(record) + "\n", "utf-8")
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


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown.

    Example:
        >>> print(markdown(["method", "loss"], [["KFAC", "0.1"]]))
        | method | loss |
        | --- | --- |
        | KFAC | 0.1 |
    """
    lines = (columns, ["---"] * len(columns), *rows)
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


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
