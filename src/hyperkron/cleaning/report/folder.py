"""What a run folder says, checked and typed; whatever is absent from the folder is absent here."""

from __future__ import annotations

import base64
import binascii
import csv
import io
import re
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyperkron.cleaning.fields import REMEDY, Fields, parse, read_result, read_text
from hyperkron.solution import HyperkronError

MAX_PICTURE = 2**18
"""Characters of a picture."""
_PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/]+={0,2})\Z")
_PNG = b"\x89PNG\r\n\x1a\n"
_COLUMNS = ("weight", "suspect")


@dataclass(frozen=True)
class Candidate:
    """One of the models that were compared; ``different``: significantly, from the chosen one."""

    name: str
    description: str
    accuracy: float | None
    low: float | None
    high: float | None
    rows: int | None
    seconds: float | None
    chosen: bool
    test_accuracy: float | None
    different: bool | None = None


@dataclass(frozen=True)
class Suspect:
    """A training row whose label looks wrong. ``picture`` is a PNG as a data: address, or empty."""

    row: int | None
    ids: dict[str, Any]
    given: str
    suggested: str
    error_probability: float | None
    weight: float | None
    history: list[float | None]
    text: str
    picture: str
    features: dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A quantity over the course of the run."""

    name: str
    x_label: str
    x: list[float | None]
    y: list[float | None]


@dataclass
class Rows:
    """The weights of all training rows, those of the suspects apart."""

    kept: array[float] = field(default_factory=lambda: array("d"))
    suspect: array[float] = field(default_factory=lambda: array("d"))


@dataclass(frozen=True)
class RunContents:
    """A run folder. ``result`` holds the fields that the page shows as they are; ``notes`` says what was left out."""

    folder: Path
    result: Fields
    config: dict[str, Any]
    chosen: str
    candidates: list[Candidate]
    classes: list[str]
    matrix: list[list[float]]
    curves: list[Curve]
    suspects: list[Suspect]
    rows: Rows | None
    notes: list[str]


def read_run(folder: Path) -> RunContents:
    """Read a run folder.

    Args:
        folder: with ``result.json`` and, as far as there are, ``config.json``, ``rows.csv`` and ``suspects.jsonl``.
    """
    result = read_result(folder)
    data = result.child("data")
    classes = data.texts("classes")
    matrix = _read_matrix(result, classes)
    candidates = [_candidate(fields, result.text("chosen")) for fields in result.children("candidates")]
    curves = [
        Curve(c.text("name"), c.text("x_label"), c.numbers("x"), c.numbers("y")) for c in result.children("curves")
    ]
    config_text = read_text(folder / "config.json")
    config = result.child("config").raw if config_text is None else parse(config_text, folder / "config.json").raw
    suspects, notes = _read_suspects(folder / "suspects.jsonl")
    return RunContents(
        folder=folder,
        result=result,
        config=config,
        chosen=result.text("chosen") or next((c.name for c in candidates if c.chosen), ""),
        candidates=candidates,
        classes=classes or [str(i) for i in range(len(matrix))],
        matrix=matrix,
        curves=curves,
        suspects=suspects,
        rows=_read_rows(folder / "rows.csv"),
        notes=notes,
    )


def _candidate(fields: Fields, chosen: str) -> Candidate:
    name = fields.text("name")
    return Candidate(
        name=name,
        description=fields.text("description"),
        accuracy=fields.number("accuracy"),
        low=fields.number("low"),
        high=fields.number("high"),
        rows=fields.count("rows"),
        seconds=fields.number("seconds"),
        chosen=name == chosen if chosen else fields.flag("chosen"),
        test_accuracy=fields.number("test_accuracy"),
        different=None if fields.raw.get("different") is None else fields.flag("different"),
    )


def _read_matrix(result: Fields, classes: list[str]) -> list[list[float]]:
    """P(given | true) as a square table; unknown entries count as 0."""
    rows = result.child("noise").items("matrix")
    matrix = [Fields({"row": row}, result.file, f"noise.matrix[{i}]").numbers("row") for i, row in enumerate(rows)]
    size = len(classes) or len(matrix)
    if matrix and (len(matrix) != size or any(len(row) != size for row in matrix)):
        shape = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
        raise HyperkronError(f"{result.file}: noise.matrix has {shape} numbers but there are {size} classes; {REMEDY}.")
    return [[value or 0.0 for value in row] for row in matrix]


# --- suspects ----------------------------------------------------------------------------------------------


def _read_suspects(file: Path) -> tuple[list[Suspect], list[str]]:
    """The suspects, most suspicious first, and what is to be said about them."""
    text = read_text(file)
    if text is None:
        return [], ["The folder has no suspects.jsonl, so no suspects can be listed."]
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    suspects, refused = [], 0
    for number, line in lines:
        fields = parse(line, file, f"line {number}")
        picture = _picture(fields.text("image"))
        refused += picture is None
        suspects.append(
            Suspect(
                row=fields.count("row"),
                ids=fields.child("id").raw,
                given=fields.label("given"),
                suggested=fields.label("suggested"),
                error_probability=fields.number("error_probability"),
                weight=fields.number("weight"),
                history=fields.numbers("weights"),
                text=fields.text("text"),
                picture=picture or "",
                features=fields.child("features").raw,
            )
        )
    notes = []
    if refused:
        limit = f"only PNG in base64 of at most {MAX_PICTURE // 1024} KiB is"
        notes.append(f"Pictures of {refused} suspects are not shown: {limit}.")
    return suspects, notes


def _picture(address: str) -> str | None:
    """The address of a picture if it is a PNG and nothing else; empty if there is none, None if it is refused."""
    if not address:
        return ""
    match = _PICTURE.match(address) if len(address) <= MAX_PICTURE else None
    try:
        good = match is not None and base64.b64decode(match[1], validate=True).startswith(_PNG)
    except binascii.Error:
        good = False
    return address if good else None


# --- rows --------------------------------------------------------------------------------------------------


def _read_rows(file: Path) -> Rows | None:
    """What rows.csv says; None where there is no such file."""
    rows, text = Rows(), read_text(file)
    if text is None:
        return None
    try:
        for weight, suspect in _cells(csv.reader(io.StringIO(text, newline=""), strict=True), file):
            (rows.suspect if suspect else rows.kept).append(weight)
    except csv.Error as error:
        raise HyperkronError(f"{file} cannot be read as CSV ({error}); {REMEDY}.") from error
    return rows


def _cells(lines: Iterator[list[str]], file: Path) -> Iterator[tuple[float, bool]]:
    header = next(iter(lines), [])
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        raise HyperkronError(f"{file}: the header {header!r:.80} lacks {', '.join(missing)}; {REMEDY}.")
    places = [header.index(name) for name in _COLUMNS]
    for number, cells in enumerate(lines, 2):
        if not cells:
            continue
        try:
            weight, suspect = (cells[place] for place in places)
            yield float(weight), {"true": True, "false": False}[suspect.lower()]
        except (ValueError, KeyError, IndexError) as error:
            raise HyperkronError(f"{file}: row {number} is damaged: {cells!r:.80}; {REMEDY}.") from error
