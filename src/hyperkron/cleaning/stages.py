"""Finished stages on disk, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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
        while_waiting: where several processes work on one run, called at every look whether another one has finished a
            stage; what it raises ends the wait. None: this process is alone.

    Every stage is a function of the data, the configuration and the stages before it, under seeds of its own, so a
    resumed run equals an uninterrupted one, and several processes compute what one would, bit for bit: each stage is
    computed by the process that asks for it first, and the others wait until it is there. A process that is killed
    loses its claim, and one that waits computes the stage. A damaged result is computed again, with a warning.

    Attributes:
        seconds: that computing each result took, whenever and wherever that was.
    """

    def __init__(
        self,
        folder: Path | None,
        of: str = "",
        device: torch.device | str = "cpu",
        while_waiting: Callable[[], None] | None = None,
    ) -> None:
        self.folder, self.of, self.device, self._while_waiting = folder, of, device, while_waiting
        self.seconds: dict[str, float] = {}
        self._found: dict[str, Tensors] = {}
        if folder is not None:
            with in_words(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, compute: Callable[[], Tensors]) -> Tensors:
        """The result of a stage: from disk if it is there and sound, else computed and put there."""
        while (found := self.find(name)) is None:
            with ExitStack() as claim:
                if self._while_waiting is not None:
                    try:
                        claim.enter_context(self._claim(name))
                    except HeldError:  # another process computes it
                        time.sleep(SECONDS_BETWEEN_LOOKS)
                        self._while_waiting()
                        continue
                    found = self.find(name)  # it may have been finished in between
                if found is None:
                    begin = time.perf_counter()
                    found = compute()
                    self.seconds[name] = round(time.perf_counter() - begin, 3)
                    self._put(name, found)
                return found
        return found

    def taken(self, name: str) -> bool:
        """Whether another process is computing this stage."""
        if self._while_waiting is None or self.folder is None or (self.folder / f"{name}.json").exists():
            return False
        try:
            with self._claim(name):
                return False
        except HeldError:
            return True

    def _claim(self, name: str) -> FolderLock:
        assert self.folder is not None
        return FolderLock(self.folder / "claims" / name)

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


def in_turn(stages: Stages, names: Sequence[str], prefix: str) -> Iterator[str]:
    """The names, in their order, but those whose stage another process is computing after the others."""
    left = list(names)
    while left:
        name = next((name for name in left if not stages.taken(prefix + name)), left[0])
        left.remove(name)
        yield name
