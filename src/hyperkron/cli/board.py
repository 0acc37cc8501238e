"""The log of a run for TensorBoard."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any


def write_board(folder: Path) -> Path:
    """Write ``folder/tensorboard`` from ``log.jsonl``.

    A figure ``f`` of an event ``e`` becomes the scalar ``e/f``, at the event's ``step`` or else at its number among the
    events of its name. An earlier ``tensorboard`` is replaced.
    """
    import shutil

    from hyperkron.training.history import read_log
    from hyperkron.validation import need

    board: Any = need("torch.utils.tensorboard", "track", "--tensorboard")
    target = folder / "tensorboard"
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    writer = board.SummaryWriter(str(target))
    try:
        seen: Counter[str] = Counter()
        for row in read_log(folder / "log.jsonl") if (folder / "log.jsonl").exists() else []:
            event = str(row.get("event", "log"))
            step = row["step"] if type(row.get("step")) is int and abs(row["step"]) < 2**62 else seen[event]
            seen[event] += 1
            for name, value in row.items():
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if name != "step" and number and abs(value) < 1e300:
                    writer.add_scalar(f"{event}/{name}", value, step)
    finally:
        writer.close()
    return target
