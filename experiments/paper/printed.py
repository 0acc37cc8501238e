"""The numbers that the paper prints; they ship with the package as ``printed.json``."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from hyperkron.solution import HyperkronError


@cache
def _all() -> dict[str, Any]:
    return dict(json.loads((files("experiments.paper") / "printed.json").read_text("utf-8")))


def printed(table: str) -> dict[str, Any]:
    """A table of the paper by its name in ``printed.json``.

    Reference: Liao, Dangel & Yu, "Efficient bilevel optimization with KFAC-based hypergradients" (AISTATS 2026).

    Example:
        >>> printed("table_diagnostic_relative_error")["rows"]["KFAC"]
        [0.00762, 0.00762, 0.00762]
    """
    found = _all()
    if table not in found:
        names = ", ".join(name for name in found if name.startswith("table"))
        raise HyperkronError(f"table={table!r} is unknown; choose one of {names}.")
    return dict(found[table])
