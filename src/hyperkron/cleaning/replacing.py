"""A new run in the place of an earlier one."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hyperkron.solution import HyperkronError

FILES = (
    "config.json",
    "log.jsonl",
    "result.json",
    "rows.csv",
    "left_out.csv",
    "suspects.jsonl",
    "model.safetensors",
    "inputs.json",
    "inputs.safetensors",
    "report.html",
)
"""The files of a run."""
HASHES = "rows.hashes"
"""A hash of every row of the source, by which `export` knows whether it still holds the rows of the run."""
FOLDERS = ("stages", "embeddings", "tensorboard")
"""The folders of a run."""


@contextmanager
def replacing(out: Path, overwrite: bool, say: Callable[[str], None]) -> Iterator[None]:
    """The earlier run is put aside; it comes back if the new one does not begin, and goes when that has finished."""
    if not overwrite or not any((out / name).exists() for name in ("config.json", "result.json")):
        yield
        return
    if out.is_symlink():
        raise HyperkronError(f"out={str(out)!r} is a link; name the folder itself to overwrite it.")
    aside = out.with_name(f"{out.name}.replaced-{secrets.token_hex(4)}")
    out.rename(aside)
    try:
        yield
    except BaseException:
        if (out / "config.json").exists():
            say(f"The earlier run is kept in {aside}")
        else:
            with suppress(OSError):
                out.rmdir()
            if not out.exists():
                aside.rename(out)
        raise
    _remove(aside, say)


def _remove(folder: Path, say: Callable[[str], None]) -> None:
    """Take away what a run has written; whatever else somebody put there stays."""
    for name in (*FILES, HASHES):
        (folder / name).unlink(missing_ok=True)
        (folder / f"{name}.part").unlink(missing_ok=True)
    for name in FOLDERS:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name)
    try:
        folder.rmdir()
    except OSError:
        say(f"Files that do not belong to the earlier run are kept in {folder}")
