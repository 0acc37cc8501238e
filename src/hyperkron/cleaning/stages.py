"""Finished stages on disk, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperkron.solution import HyperkronError, warn_once
from hyperkron.training.encoding import DamagedCheckpoint
from hyperkron.training.files import TensorFile, read_json, write_tensors
from hyperkron.training.writing import in_words, whole_file

Tensors = dict[str, Tensor]


class Stages:
    """A folder of results by name: safetensors with a SHA-256 beside each. Without a folder they stay in memory.

    Args:
        folder: where they lie.
        of: a digest of what they depend on; results of anything else are refused.
        device: where results go that are read.

    Every stage is a function of the data, the configuration and the stages before it, under seeds of its own, so a
    resumed run equals an uninterrupted one. A damaged result is computed again, with a warning.
    """

    def __init__(self, folder: Path | None, of: str = "", device: torch.device | str = "cpu") -> None:
        self.folder, self.of, self.device = folder, of, device
        self._found: dict[str, Tensors] = {}
        if folder is not None:
            with in_words(folder):
                folder.mkdir(parents=True, exist_ok=True)

    def __call__(self, name: str, compute: Callable[[], Tensors]) -> Tensors:
        """The result of a stage: from disk if it is there and sound, else computed and put there."""
        found = self.find(name)
        if found is None:
            found = compute()
            self._put(name, found)
        return found

    def find(self, name: str) -> Tensors | None:
        """The result of a stage that was finished, or None."""
        if self.folder is None:
            return self._found.get(name)
        if not (self.folder / f"{name}.json").exists():
            return None
        try:
            about, _ = read_json(self.folder / f"{name}.json")
            self._refuse_other(name, about.get("of"))
            with TensorFile(self.folder / f"{name}.safetensors", about["file"]) as file:
                return {key: file(key).to(self.device) for key in about["tensors"]}
        except (DamagedCheckpoint, OSError, KeyError, TypeError, AttributeError) as error:
            warn_once(f"stage {self.folder} {name}", f"stage {name} is damaged ({error}); it is computed again.")
            return None

    def _refuse_other(self, name: str, of: Any) -> None:
        if of != self.of:
            raise HyperkronError(
                f"stage {name} in {str(self.folder)!r} was computed with other data, settings, network or encoder than "
                "config.json names now, or by a version that did not record them; restore config.json, or begin a new "
                "run."
            )

    def _put(self, name: str, tensors: Tensors) -> None:
        if self.folder is None:
            self._found[name] = tensors
            return
        target, record = self.folder / f"{name}.safetensors", self.folder / f"{name}.json"
        needed = sum(x.numel() * x.element_size() for x in tensors.values())
        then = f"then continue with `hyperkron resume {shlex.quote(str(self.folder.parent))}`"
        with in_words(target, needed, then):
            record.unlink(missing_ok=True)
            target.unlink(missing_ok=True)
            about = {"file": write_tensors(target, tensors), "tensors": sorted(tensors), "of": self.of}
            with whole_file(record) as beside:
                beside.write_bytes(json.dumps(about).encode("ascii"))
