"""The row of ``faults.py`` about two writers of one folder, which must end as one writer alone leaves it."""

from __future__ import annotations

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

from faults_runtime import start
from forks import Child

import hyperkron as hk
from hyperkron.training import checkpoint

RACE_STEPS = 6


def write_until_done(folder: Path) -> int:
    """Run to the end with a checkpoint after every step; 0 if that was done, 3 if another writer was in the way."""
    try:
        start(folder=folder, resume=folder, steps=RACE_STEPS)
    except hk.training.CheckpointError as error:
        return 3 if "is being written by process" in str(error) or "is further than this run" in str(error) else 1
    return 0


def race(folder: Path, wanted: dict[str, Any], pause: float) -> str:
    """Two processes begin at once; empty if the folder ends as that of one writer, else what is wrong."""

    def writer(later: float) -> None:
        time.sleep(later)
        os._exit(write_until_done(folder))

    codes = sorted(c.wait() for c in [Child(lambda: writer(0.0)), Child(lambda: writer(pause))])
    if codes not in ([0, 0], [0, 3]):
        return f"exit codes {codes}"
    found = checkpoint.candidates(folder)
    damaged = [path.name for path in found if not _intact(path)]
    if damaged or not found:
        return f"damaged: {damaged}"
    if checkpoint.check(found[0])["files"] != wanted:
        return f"{found[0].name} differs from that of one writer"
    left = sorted(p.name for p in folder.iterdir() if p not in found)
    return "" if left == ["log-rank00000.jsonl"] else f"left behind: {left}"


def _intact(path: Path) -> bool:
    try:
        checkpoint.check(path)
    except hk.training.CheckpointError:
        return False
    return True


def writers(tries: int, scratch: Path) -> dict[str, Any]:
    """Races of two processes for one folder."""
    alone = scratch / "one-writer"
    Child(lambda: start(folder=alone, steps=RACE_STEPS)).wait()
    wanted = checkpoint.check(checkpoint.candidates(alone)[0])["files"]
    chance, wrong = random.Random(0), []
    for i in range(tries):
        told = race(scratch / f"race-{i}", wanted, chance.choice([0.0, chance.uniform(0, 0.1)]))
        wrong += [told] if told else []
        shutil.rmtree(scratch / f"race-{i}", ignore_errors=True)
    note = "; ".join(wrong[:3]) or "0 damaged; the second was refused by name or found the run done"
    return {"fault": "two writers of one folder", "tries": tries, "survived": tries - len(wrong), "note": note}
