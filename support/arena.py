"""Where hostile files are let loose, and who judges the harm: a folder to tamper with, a secret beside it, a trace.

A case builds something hostile in a folder and hands it to the library, which must refuse it by a ``HyperkronError`` or
make nothing of it. Harmed is who runs its code (a trace appears), reads or writes a file elsewhere (the secret is in
what is returned, or altered), or needs more memory than the file deserves (the caller's limit).
"""

from __future__ import annotations

import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hyperkron as hk
import resuming
from hyperkron.training import checkpoint, files

SECRET = "the words that must not leave their file"
TENSORS, STATE, MANIFEST = "tensors-rank00000.safetensors", "state-rank00000.json", "manifest.json"


class Payload:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


class Arena:
    """A folder with a run's checkpoint to be tampered with, a secret beside it, and the place of a trace."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.elsewhere = folder, folder / "run", folder / "elsewhere"
        self.trace, self.secret = folder / "trace", folder / "elsewhere" / "secret.txt"
        self.elsewhere.mkdir(parents=True)
        self.secret.write_text(SECRET)
        self.pickle = pickle.dumps(Payload(self.trace))

    def saved(self) -> Path:
        """A true checkpoint."""
        return resuming.start("KFAC", steps=1).save(self.run)

    def forge(self, change: Callable[[dict[str, Any]], None] | None = None, **contents: bytes) -> Path:
        """A checkpoint with other files, whose hashes agree with them."""
        path = self.saved()
        manifest = json.loads((path / MANIFEST).read_text())
        del manifest["sha256"]
        for name, data in contents.items():
            name = {"state": STATE, "tensors": TENSORS}[name]
            (path / name).unlink()
            manifest["files"][name] = files.write(path / name, [data])
        if change is not None:
            change(manifest)
        (path / MANIFEST).write_bytes(checkpoint._sealed(manifest))
        return path

    def forge_state(self, change: Callable[[dict[str, Any]], None]) -> Path:
        """A checkpoint whose state was edited as JSON, with hashes that agree."""
        tree = json.loads((self.saved() / STATE).read_text())
        change(tree)
        return self.forge(state=json.dumps(tree).encode())

    def resume(self) -> Any:
        """What a user does with a folder of checkpoints."""
        return resuming.start("KFAC").resume(self.run)


CASES: dict[str, Callable[[Arena], Any]] = {}


def case(function: Callable[[Arena], Any]) -> Callable[[Arena], Any]:
    """Name a case by its docstring."""
    CASES[(function.__doc__ or "").strip().rstrip(".")] = function
    return function


def harm(act: Callable[[Arena], Any], folder: Path) -> str:
    """What harm a case has done; empty if it was refused, or came to nothing."""
    arena, told = Arena(folder), ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hk.HyperkronWarning)
            told = str(act(arena))
        expected = isinstance(told, str) and told in ("left alone", "not followed", "shown as text")
        if not expected:
            return f"it was accepted: {told[:100]}"
    except hk.HyperkronError as error:
        told = str(error)
    except AssertionError as error:
        return str(error)
    except BaseException as error:
        return f"it ended in a {type(error).__name__}: {str(error)[:100]}"
    if arena.trace.exists():
        return "its code was run"
    if SECRET in told:
        return "it read a file elsewhere"
    return "" if arena.secret.read_text() == SECRET else "it altered a file elsewhere"
