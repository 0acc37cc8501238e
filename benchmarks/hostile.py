"""The rows of ``faults.py`` about hostile files and about numbers that go wrong; the cases are those of the tests."""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import _resident
from forks import written

import malice
import numerics

ROOM = 2**30
"""Bytes of memory that a hostile file may make the library ask for."""


def malicious(scratch: Path) -> dict[str, Any]:
    """Each in a process of its own, which may take 1 GiB more memory than it has."""
    wrong = []
    for name, act in malice.CASES.items():

        def attempt(act: Callable[[malice.Arena], Any] = act) -> str:
            limit = _resident("VmSize") + ROOM
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                return malice.harm(act, Path(folder) / "arena") or "none"

        told = written(attempt, scratch / "told")
        if told != "none":
            wrong.append(f"{name}: {told or 'it killed the process'}")
    count = len(malice.CASES)
    note = (
        "; ".join(wrong) or "0 executed, 0 escaped; checkpoints, logs, datasets, configurations, run folders, a report"
    )
    return {"fault": "hostile file", "tries": count, "survived": count - len(wrong), "note": note}


def numbers(name: str, scratch: Path) -> dict[str, Any]:
    """All variants of one case: survived where the status is the documented one and λ is where it must be."""

    def attempt() -> str:
        found = numerics.outcomes(name)
        seen = ", ".join(sorted({x.seen for x in found}))
        claims = ", ".join(sorted({x.claim for x in found}))
        return f"{sum(x.right for x in found)}|{seen}: {claims}"

    told = written(attempt, scratch / "told")
    right, _, note = told.partition("|")
    return {"fault": name, "tries": len(numerics.CASES[name]), "survived": int(right or 0), "note": note or "it died"}
