"""Scores on disk: written in pieces, resumed after an interruption to the same bits.

A folder holds ``progress.json`` (how many examples are done, and what the call is made of), ``vectors.safetensors``
(A⁻¹ ∂_θ of every query, computed once, or its coordinates with their eigenbases) and ``scores.npy`` in float32. One
process at a time writes to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperkron.curvature.base import Eigenbasis
from hyperkron.solution import HyperkronError
from hyperkron.training import files
from hyperkron.training.locks import FolderLock
from hyperkron.training.program import differences, listed
from hyperkron.training.writing import in_words, put
from hyperkron.trees import Tree
from hyperkron.validation import check_interval, need

PROGRESS, VECTORS, SCORES, MEAN = "progress.json", "vectors.safetensors", "scores.npy", "mean.npy"
BLOCK = 2**24
"""Scores that are averaged at once."""


class Store:
    """The folder of one attribution of ``shape`` (queries, examples), a context manager that holds its lock.

    ``identity`` is what the scores depend on, a line each (:class:`hyperkron.training.program.Program`): the folder of
    another call is refused with the differences. ``done`` counts the examples that have their scores.
    """

    def __init__(self, folder: str | Path, shape: tuple[int, int], identity: Mapping[str, str]) -> None:
        self.folder, self.shape, self.identity = Path(folder), shape, dict(identity)
        self.done, self.stats = 0, dict[str, Any]()
        self._record: dict[str, Any] | None = None
        self._lock = FolderLock(self.folder)

    def __enter__(self) -> Store:
        self._lock.acquire()
        try:
            self._begin()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *reason: object) -> None:
        self._lock.release()

    def _begin(self) -> None:
        if (self.folder / PROGRESS).exists():
            self._continue()
        else:
            for name in (VECTORS, SCORES):
                if (self.folder / name).exists():
                    raise HyperkronError(
                        f"out={str(self.folder)!r} has {name} but no {PROGRESS}, so the call that wrote it is unknown; "
                        "move it away, or choose another folder."
                    )
            self._progress()
        new = not (self.folder / SCORES).exists()
        if new and self.done:
            raise self._damaged(f"{SCORES} is missing")
        with in_words(self.folder / SCORES, 4 * self.shape[0] * self.shape[1]):
            self._scores = _array(self.folder / SCORES, "w+" if new else "r+", self.shape)

    def _continue(self) -> None:
        """Read how far an earlier call came, and refuse one that was made of something else."""
        try:
            kept, _ = files.read_json(self.folder / PROGRESS)
            saved, done = kept["identity"], kept["done"]
            self.stats, self._record = dict(kept["stats"]), kept["vectors"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(str(error)) from error
        changed = differences("call", saved, self.identity)
        if changed:
            raise HyperkronError(
                f"out={str(self.folder)!r} holds scores of another call:{listed(changed)}\n"
                "Repeat that call's arguments to continue it, or choose another folder."
            )
        check_interval("done", done, 0, self.shape[1], remedy=f"{PROGRESS} was changed: choose another out=")
        self.done = int(done)

    def vectors(self, like: Tree) -> Tree | None:
        """The vectors of the queries, for parameters ``like``, if an earlier call has kept them."""
        if self._record is None:
            return None
        try:
            with files.TensorFile(self.folder / VECTORS, self._record) as file:
                return {name: file(name).to(p.device) for name, p in like.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(str(error)) from error

    def bases(self, device: torch.device) -> dict[str, Eigenbasis]:
        """The eigenbases of the blocks of which :meth:`vectors` has coordinates."""
        names = [] if self._record is None else self._record.get("bases", [])
        if self._record is None or not names:
            return {}
        try:
            with files.TensorFile(self.folder / VECTORS, self._record) as file:
                return {
                    name: Eigenbasis(*(file(f"{name} {field}").to(device) for field in Eigenbasis._fields))
                    for name in names
                }
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(str(error)) from error

    def keep(self, vectors: Tree, stats: Mapping[str, Any], bases: Mapping[str, Eigenbasis]) -> None:
        """Keep the vectors of the queries, of which those of blocks in ``bases`` are coordinates."""
        of_bases = {f"{name} {field}": x for name, basis in bases.items() for field, x in basis._asdict().items()}
        record = files.put_tensors(self.folder / VECTORS, vectors | of_bases)
        self.stats, self._record = dict(stats), {**record, "bases": list(bases)}
        self._progress()

    def write(self, start: int, scores: Tensor) -> None:
        """The scores of the next examples; they count as done only when they are on the disk."""
        with in_words(self.folder / SCORES):
            self._scores[:, start : start + scores.shape[1]] = scores.float().cpu().numpy()
            self._scores.flush()
        self.done = start + scores.shape[1]
        self._progress()

    def scores(self) -> Tensor:
        """All scores, read from the disk as needed."""
        return torch.from_numpy(_array(self.folder / SCORES, "c", self.shape))

    def _progress(self) -> None:
        told = {"done": self.done, "vectors": self._record, "stats": self.stats, "identity": self.identity}
        put(self.folder / PROGRESS, json.dumps(told, indent=1).encode("ascii"))

    def _damaged(self, why: str) -> HyperkronError:
        return HyperkronError(f"out={str(self.folder)!r} is damaged ({why}); choose another folder, or empty this one.")


def averaged(folder: Path, parts: Sequence[Tensor]) -> Tensor:
    """The mean of scores on disk, in ``folder/mean.npy``, without reading them all at once."""
    shape = (parts[0].shape[0], parts[0].shape[1])
    with in_words(folder / MEAN, 4 * shape[0] * shape[1]):
        total = _array(folder / MEAN, "w+", shape)
        size = max(1, BLOCK // shape[0])
        for start in range(0, shape[1], size):
            columns = [part[:, start : start + size] for part in parts]
            total[:, start : start + size] = torch.stack(columns).mean(0).numpy()
        total.flush()
    return torch.from_numpy(_array(folder / MEAN, "c", shape))


def _array(path: Path, mode: str, shape: tuple[int, int]) -> Any:
    """A file of float32 as an array that the disk backs; ``mode`` is that of numpy's memory maps."""
    numpy = need("numpy", who="out=")
    if mode == "w+":
        numpy.lib.format.open_memmap(path, mode=mode, dtype=numpy.float32, shape=shape)
        mode = "r+"
    if mode == "r+" and hasattr(os, "posix_fallocate"):  # where a disk is full, writing to a map ends the process
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    try:
        found = numpy.lib.format.open_memmap(path, mode=mode)
    except ValueError as error:
        raise HyperkronError(f"{path} is damaged ({error}); choose another out=.") from error
    if found.shape != shape or found.dtype != numpy.float32:
        raise HyperkronError(
            f"{path} holds {found.dtype} {list(found.shape)} instead of float32 {list(shape)}; choose another out=."
        )
    return found
