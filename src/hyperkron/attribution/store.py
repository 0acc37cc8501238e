"""Scores on disk: written in pieces, resumed after an interruption to the same bits.

A folder holds ``vectors.safetensors`` (A⁻¹ ∂_θ of every query, computed once), ``scores.npy`` and ``progress.json``
with how many examples are done and what the run is made of.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree
from hyperkron.validation import check_interval


def digest(*parts: Any) -> str:
    """The SHA-256 of tensors and of anything else as it prints."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(str((part.dtype, tuple(part.shape))).encode())
            found.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, (list, tuple)):
            found.update(digest(*part).encode())
        elif isinstance(part, dict):
            found.update(digest(*(x for pair in part.items() for x in pair)).encode())
        else:
            found.update(repr(part).encode())
    return found.hexdigest()


class Store:
    """The folder of one attribution.

    Args:
        folder: made if it does not exist.
        shape: (queries, examples).
        identity: what the scores depend on, by name; another run's folder is refused.
    """

    def __init__(self, folder: str | Path, shape: tuple[int, int], identity: dict[str, str]) -> None:
        self.folder, self.shape, self.identity = Path(folder), shape, identity
        self.folder.mkdir(parents=True, exist_ok=True)
        self.done = self._begin()
        self._scores = self._open(new=self.done == 0 and not self._path("scores.npy").exists())
        if self._scores.shape != shape or self._scores.dtype.name != "float32":
            raise HyperkronError(f"{self._path('scores.npy')} was changed by another program; choose another out=.")

    def _open(self, new: bool = False) -> Any:
        """The file of scores as an array in memory that the disk backs."""
        try:
            import numpy
        except ImportError as error:
            raise HyperkronError("out= needs numpy; pip install 'hyperkron[data]'.") from error
        path = self._path("scores.npy")
        if new:
            return numpy.lib.format.open_memmap(path, mode="w+", dtype=numpy.float32, shape=self.shape)
        return numpy.lib.format.open_memmap(path, mode="r+")

    def _path(self, name: str) -> Path:
        return self.folder / name

    def _begin(self) -> int:
        path = self._path("progress.json")
        if not path.exists():
            return 0
        try:
            kept = json.loads(path.read_text("utf-8"))
            identity, done = kept["identity"], kept["done"]
        except (ValueError, KeyError, TypeError) as error:
            raise HyperkronError(f"{path} cannot be read ({error}); choose another out=.") from None
        if identity != self.identity:
            changed = sorted(k for k in {*identity, *self.identity} if identity.get(k) != self.identity.get(k))
            raise HyperkronError(
                f"out={str(self.folder)!r} holds scores of another run (different: {', '.join(changed)}); "
                "repeat that run's arguments to continue it, or choose another folder."
            )
        check_interval("done", done, 0, self.shape[1], remedy=f"{path} was changed: choose another out=")
        return int(done)

    def vectors(self) -> Tree | None:
        """The vectors of the queries, if an earlier call has kept them."""
        path = self._path("vectors.safetensors")
        return load_file(path) if path.exists() else None

    def keep(self, vectors: Tree) -> None:
        """Keep the vectors of the queries."""
        path = self._path("vectors.safetensors")
        save_file({name: v.detach().cpu().contiguous() for name, v in vectors.items()}, f"{path}.part")
        _replace(Path(f"{path}.part"), path)

    def write(self, start: int, scores: Tensor) -> None:
        """The scores of the next examples; they count as done only when they are on the disk."""
        self._scores[:, start : start + scores.shape[1]] = scores.cpu().numpy()
        self._scores.flush()
        self.done = start + scores.shape[1]
        path = self._path("progress.json")
        part = Path(f"{path}.part")
        part.write_text(json.dumps({"done": self.done, "identity": self.identity}, indent=1), "utf-8")
        _replace(part, path)

    def scores(self) -> Tensor:
        """All scores, read from the disk as needed."""
        return torch.from_numpy(self._open())


def _replace(part: Path, path: Path) -> None:
    """Put a finished file in its place, durably."""
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, path)
