"""Finished stages on disk, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hyperkron.cleaning.fields import resume_command
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.training.encoding import DamagedCheckpoint
from hyperkron.training.files import TensorFile, put_tensors, read_json
from hyperkron.training.locks import FolderLock, HeldError
from hyperkron.training.writing import in_words, put

Tensors = dict[str, Tensor]
RULES = 7
"""How stages are computed, and what is made of them: raise it whenever that changes, so that no run mixes two ways."""
SECONDS_BETWEEN_LOOKS = 0.2
"""How often a process looks whether another one has finished a stage."""


class Stages:
    """A folder of results by name: safetensors with a SHA-256 beside each. Without a folder they stay in memory.

    Args:
        folder: where they lie.
        of: a digest of what they depend on; results of anything else are refused.
        device: where results go that are read.

    Every stage is a function of the data, the configuration and the stages before it, under seeds of its own, so a
    resumed run equals an uninterrupted one. A damaged result is computed again, with a warning.

    Attributes:
        seconds: that computing each result took, whenever and wherever that was.
    """

    def __init__(self, folder: Path | None, of: str = "", device: torch.device | str = "cpu") -> None:
        self.folder, self.of, self.device = folder, of, device
        self.seconds: dict[str, float] = {}
        self._found: dict[str, Tensors] = {}
        if folder is not None:
            with in_words(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, compute: Callable[[], Tensors]) -> Tensors:
        """The result of a stage: from disk if it is there and sound, else computed and put there."""
        found = self.find(name)
        if found is None:
            begin = time.perf_counter()
            found = compute()
            self.seconds[name] = round(time.perf_counter() - begin, 3)
            self._put(name, found)
        return found

    def taken(self, name: str) -> bool:
        """Whether another process is computing this stage."""
        return False

    def find(self, name: str) -> Tensors | None:
        """The result of a stage that was finished, or None."""
        if self.folder is None:
            return self._found.get(name)
        if not (self.folder / f"{name}.json").exists():
            return None
        try:
            about, _ = read_json(self.folder / f"{name}.json")
            if about.get("of") == self.of:
                with TensorFile(self.folder / f"{name}.safetensors", about["file"]) as file:
                    self.seconds[name] = float(about.get("seconds", 0.0))
                    return {key: file(key).to(self.device) for key in about["tensors"]}
        except (DamagedCheckpoint, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            warn_once(f"stage {self.folder} {name}", f"stage {name} is damaged ({error}); it is computed again.")
            return None
        raise HyperkronError(
            f"stage {name} in {str(self.folder)!r} was computed with other data, settings, network or encoder than "
            "config.json names now, or by a version that did not record them; restore config.json, or begin a new run."
        )

    def _put(self, name: str, tensors: Tensors) -> None:
        if self.folder is None:
            self._found[name] = tensors
            return
        then = f"then continue with {resume_command(self.folder.parent)}"
        file = put_tensors(self.folder / f"{name}.safetensors", tensors, then)
        about = {"file": file, "tensors": sorted(tensors), "of": self.of, "seconds": self.seconds.get(name, 0.0)}
        put(self.folder / f"{name}.json", json.dumps(about).encode("ascii"), then)


class SharedStages(Stages):
    """Stages of a run that several processes work on: each is computed by the one that asks for it first.

    The others wait until it is there. A process that is killed loses its claim, and one that waits computes the stage.
    Results do not depend on who computed what, so they are those of one process, bit for bit.

    ``while_waiting`` is called at every look whether another process has finished; what it raises ends the wait.
    """

    def __init__(self, folder: Path, of: str, device: torch.device, while_waiting: Callable[[], None]) -> None:
        super().__init__(folder, of, device)
        self._while_waiting = while_waiting

    def __call__(self, name: str, compute: Callable[[], Tensors]) -> Tensors:
        while (found := self.find(name)) is None:
            claim = self._claim(name)
            try:
                claim.acquire()
            except HeldError:  # another process computes it
                time.sleep(SECONDS_BETWEEN_LOOKS)
                self._while_waiting()
                continue
            try:
                return super().__call__(name, compute)
            finally:
                claim.release()
        return found

    def taken(self, name: str) -> bool:
        assert self.folder is not None
        if (self.folder / f"{name}.json").exists():
            return False
        try:
            with self._claim(name):
                return False
        except HeldError:
            return True

    def _claim(self, name: str) -> FolderLock:
        assert self.folder is not None
        return FolderLock(self.folder / "claims" / name)


def in_turn(stages: Stages, names: Sequence[str], prefix: str) -> Iterator[str]:
    """The names, in their order, but those whose stage another process is computing after the others."""
    left = list(names)
    while left:
        name = next((name for name in left if not stages.taken(prefix + name)), left[0])
        left.remove(name)
        yield name
