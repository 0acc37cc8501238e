"""What a run leaves on disk; the report and the command line read it."""

from __future__ import annotations

import base64
import errno
import hashlib
import io
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.data import Labelled, NewRows, RowHashes
from hyperkron.cleaning.data.files import np
from hyperkron.cleaning.data.kept import csv_line
from hyperkron.cleaning.fields import FORMAT, REMEDY, Fields, read_object, resume_command
from hyperkron.cleaning.recorded import digest
from hyperkron.cleaning.stages import Stages
from hyperkron.solution import HyperkronError
from hyperkron.training.files import put_tensors
from hyperkron.training.locks import FolderLock
from hyperkron.training.writing import in_words, open_ordinary, put, read_plain, remove_stale

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
SHOWN_FEATURES = 12
"""Columns of a table that a person sees of each row."""
_COLUMNS = ("row", "given", "suggested", "error_probability", "weight", "suspect")
"""Of rows.csv, where ids stand after the row."""
_EVENTS: dict[str, dict[str, tuple[type, ...]]] = {
    "stage": {"name": (str,), "steps": (int,)},
    "part": {"name": (str,), "seconds": (int, float)},
    "plan": {"epochs": (int, float), "least": (int,), "compare": (list,), "messages": (list,)},
}
"""What a line of log.jsonl holds, by its event."""


class RunFolder:
    """The folder of one run.

    Args:
        path: made if it does not exist; None for a run that keeps nothing.
        new: whether a run begins here (:func:`replacing` has looked that there is none); False continues the run.
        writes: False leaves the folder as it is.

    Attributes:
        finished: whether the run that is continued had finished: then its result, rows and model stay in place until
            they are written again as a whole.
    """

    def __init__(self, path: str | Path | None, *, new: bool, writes: bool = True) -> None:
        self.kept, self.path = path is not None, Path(path or "")
        self.writes = writes and self.kept
        self.finished = not new and has_whole_result(self.path)
        if not self.kept:
            return
        if not new and not (self.path / "config.json").exists():
            raise HyperkronError(f"out={str(path)!r} holds no run: there is no config.json in it.")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise HyperkronError(
                f"out={str(path)!r} cannot be written to ({error.strerror or error}); choose another folder, or make "
                "it one that you may write to."
            ) from error

    def lock(self) -> AbstractContextManager[Any]:
        """Nobody else may write into the folder meanwhile."""
        return FolderLock(self.path) if self.kept else nullcontext()

    def stages(self, device: torch.device, while_waiting: Callable[[], None] | None = None) -> Stages:
        """Finished stages, of all that the run began with; with ``while_waiting`` several processes compute them."""
        if not self.kept:
            return Stages(None)
        return Stages(self.path / "stages", digest(self.read_config().raw), device, while_waiting)

    def record(self, name: str, found: Any, check: Callable[[Fields], None]) -> None:
        """Put into config.json what the run works with; where something is there already, the whole is checked."""
        if not self.kept:
            return
        before = self.read_config()
        if name in before.raw:
            check(before)
        else:
            self.write_json("config.json", {**before.raw, name: found})

    def read_config(self) -> Fields:
        """The configuration the run began with."""
        file = self.path / "config.json"
        found = read_object(file, f"{file} does not exist; {REMEDY}.")
        if found.raw.get("format") != FORMAT:
            raise HyperkronError(f"{file} has another format than {FORMAT}; {REMEDY}.")
        return found

    def write_json(self, name: str, content: Any) -> None:
        """Put a JSON file in place as a whole."""
        if self.writes:
            self._put(name, json.dumps(content, indent=2, allow_nan=False).encode("ascii"))

    def write_hashes(self, hashes: RowHashes) -> dict[str, Any]:
        """Put ``HASHES`` in place; what config.json says of it."""
        self._put(HASHES, hashes.each)
        return {"count": len(hashes), "sha256": hashes.sha256, "version": hashes.VERSION}

    def _put(self, name: str, data: bytes) -> None:
        if self.writes:
            put(self.path / name, data, self._then())

    def _then(self) -> str:
        """What to do after freeing space on a disk that was full."""
        begun = (self.path / "config.json").exists()
        return f"then continue with {resume_command(self.path)}" if begun else ""

    def log(self, event: str, **fields: Any) -> None:
        """Add one line to log.jsonl."""
        if not self.writes:
            return
        line = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": event, **fields}
        path = self.path / "log.jsonl"
        with (
            in_words(path, then=self._then()),
            os.fdopen(open_ordinary(path, os.O_RDWR | os.O_CREAT, follow=False), "r+b") as file,
        ):
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - 1))
            torn = end > 0 and file.read(1) != b"\n"
            file.write(b"\n" * torn + json.dumps(line).encode("ascii") + b"\n")

    def logged(self, event: str) -> Iterator[dict[str, Any]]:
        """The lines of log.jsonl about one kind of event; a torn or damaged line is passed over."""
        path = self.path / "log.jsonl"
        try:
            there = self.kept and path.exists()
            lines = read_plain(path).decode("ascii", "replace").splitlines() if there else []
        except OSError as error:
            raise HyperkronError(
                f"{path} cannot be read ({error.strerror or error}); delete it and continue: only the times of "
                "finished stages are lost."
            ) from error
        for line in lines:
            try:
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict) and found.get("event") == event and _sound(found, event):
                yield found

    def write_model(self, network: nn.Module) -> None:
        """model.safetensors: parameters and buffers by name."""
        if self.writes:
            put_tensors(self.path / "model.safetensors", network.state_dict(), self._then())

    def write_inputs(self, about: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """inputs.json and inputs.safetensors: how new rows become inputs of the network."""
        if not self.writes:
            return
        record = put_tensors(self.path / "inputs.safetensors", tensors, self._then())
        self.write_json("inputs.json", {"format": FORMAT, **about, "file": record, "tensors": sorted(tensors)})

    def write_rows(self, train: Labelled, scores: dict[str, Tensor]) -> None:
        """rows.csv, left_out.csv and suspects.jsonl, where ``row`` is the position of a row in the source.

        Rows without a label have no given label, error probability and weight.

        ``scores``: suggested, error_probability, weight, suspect, history (N, steps) of the rows that were used.
        """
        if not self.writes:
            return
        probability, weight, suspect = (scores[name].tolist() for name in ("error_probability", "weight", "suspect"))
        given = ["" if k < 0 else train.classes[k] for k in train.labels.tolist()]
        suggested = [train.classes[k] for k in scores["suggested"].tolist()]
        ids = {f"id {name}" if name in _COLUMNS else name: values for name, values in train.ids.items()}
        table = [csv_line(["row", *ids, *_COLUMNS[1:]])]
        for i, row in enumerate(train.rows.tolist()):
            numbers = [f"{x[i]:.6f}" if given[i] else "" for x in (probability, weight)]
            known = ["" if values[i] is None else str(values[i]) for values in ids.values()]
            table.append(csv_line([str(row), *known, given[i], suggested[i], *numbers, str(suspect[i]).lower()]))
        self._put("rows.csv", "".join(table).encode("utf-8", "surrogatepass"))
        gone = sorted((int(row), why) for why, rows in train.left_out.items() for row in rows)
        self._put("left_out.csv", "".join(f"{row},{why}\n" for row, why in [("row", "why"), *gone]).encode("utf-8"))
        order = scores["error_probability"].argsort(descending=True, stable=True).tolist()
        lines = []
        for i in filter(suspect.__getitem__, order):
            lines.append(
                {
                    "row": int(train.rows[i]),
                    "id": {name: "" if values[i] is None else str(values[i]) for name, values in ids.items()},
                    "given": given[i],
                    "suggested": suggested[i],
                    "error_probability": round(probability[i], 6),
                    "weight": round(weight[i], 6),
                    "weights": [round(w, 4) for w in scores["history"][i].tolist()],
                    **shown(train, train, i),
                }
            )
        self._put("suspects.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode("ascii"))


def _sound(line: dict[str, Any], event: str) -> bool:
    """Whether a line of the log holds what its event needs, within reason."""
    wanted = _EVENTS.get(event, {})
    if not all(isinstance(line.get(name), kinds) for name, kinds in wanted.items()):
        return False
    numbers = [line[name] for name in wanted if isinstance(line[name], (int, float))]
    names = [x for name in wanted if isinstance(line[name], list) for x in line[name]]
    return all(0 <= x < 1e12 for x in numbers) and all(isinstance(x, str) for x in names)


def shown(train: Labelled, rows: Labelled | NewRows, i: int) -> dict[str, Any]:
    """What a person sees of one of some rows in the form of ``train``: its text, picture, or features."""
    found: dict[str, Any] = {"text": None, "image": None, "features": None}
    if train.kind == "text":
        found["text"] = str(rows.inputs[i])
    elif train.kind == "image":
        found["image"] = _picture(rows.inputs[i])
    else:
        cells = {} if train.encoding is None else train.encoding.cells(np.asarray(rows.inputs[i]))
        cells |= {name: names[i] for name, names in rows.written.items()}
        found["features"] = dict(list(cells.items())[:SHOWN_FEATURES])
    return found


def _picture(pixels: Any) -> str | None:
    """A small PNG as a data: address, enlarged when tiny."""
    from PIL import Image

    channels = pixels.shape[0]
    if channels not in (1, 3):
        return None
    image = Image.fromarray(pixels[0] if channels == 1 else pixels.transpose(1, 2, 0))
    scale = max(1, 64 // max(image.size))
    image = image.resize((image.width * scale, image.height * scale), Image.Resampling.NEAREST)
    image.thumbnail((96, 96))
    data = io.BytesIO()
    image.save(data, format="PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode("ascii")


def fingerprint(parts: list[Labelled]) -> str:
    """A SHA-256 of inputs, labels and their places in the source, by which a resumed run knows its data."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(repr((part.kind, part.classes, len(part))).encode())
        digest.update(part.labels.tobytes() + part.rows.tobytes())
        if part.votes is not None:
            digest.update(repr(part.annotators).encode() + part.votes.tobytes())
        if isinstance(part.inputs, list):
            for text in part.inputs:
                digest.update(text.encode("utf-8", "surrogatepass") + b"\0")
        else:
            digest.update(part.inputs.tobytes())
    return digest.hexdigest()


def has_whole_result(folder: Path) -> bool:
    """Whether there is a result with all alternatives."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_plain(folder / "result.json"))
        return isinstance(found, dict) and "unfinished" not in found
    return False


@contextmanager
def replacing(folder: str | Path | None, overwrite: bool, say: Callable[[str], None]) -> Iterator[None]:
    """A place for a new run: an earlier one there is refused or, with ``overwrite``, put aside.

    It comes back if the new one does not begin, and goes when that has finished.
    """
    out = Path(folder or "")
    if out.exists() and not out.is_dir():
        raise HyperkronError(f"out={str(out)!r} is a file, but a run is a folder; choose another name.")
    begun = (out / "config.json").exists()
    if folder is None or not (begun or (overwrite and (out / "result.json").exists())):
        yield
        return
    if not overwrite:
        with nullcontext() if has_whole_result(out) else FolderLock(out):  # one that is still written is told as such
            pass
        interrupted = f"a run that was interrupted; continue it with resume({str(out)!r}),"
        what = "a finished run;" if has_whole_result(out) else interrupted
        raise HyperkronError(f"out={str(out)!r} holds {what} replace it with overwrite=True, or use another folder.")
    if out.is_symlink():
        raise HyperkronError(f"out={str(out)!r} is a link; name the folder itself to overwrite it.")
    with FolderLock(out):  # a process that still writes the earlier run would go on, in the folder of the new one
        pass
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
        remove_stale(folder / name)
    for name in FOLDERS:
        if (folder / name).is_dir() and not (folder / name).is_symlink():
            shutil.rmtree(folder / name)
    try:
        folder.rmdir()
    except OSError:
        say(f"Files that do not belong to the earlier run are kept in {folder}")
