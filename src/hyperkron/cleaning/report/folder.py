"""What a run folder says, checked and typed; whatever is absent from the folder is absent here."""

from __future__ import annotations

import base64
import binascii
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.sources import suffix_written
from hyperkron.cleaning.fields import REMEDY, Fields, Label, parse, read_result, read_text
from hyperkron.cleaning.loading import CsvRow, read_rows
from hyperkron.solution import HyperkronError

MAX_PICTURE = 2**18
"""Characters of a picture."""
_PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/]+={0,2})\Z")
_PNG = b"\x89PNG\r\n\x1a\n"


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
    """A training row whose label looks wrong. ``image`` is a PNG as a data: address, or empty."""

    row: int | None
    id: dict[str, Any]
    given: Label
    suggested: Label
    error_probability: float | None
    weight: float | None
    weights: list[float | None]
    text: str
    image: str
    features: dict[str, Any]


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
    suspects: list[Suspect]
    rows: list[CsvRow] | None
    notes: list[str]

    @property
    def suffix(self) -> str:
        """What the name of a file with the exported rows may end in."""
        source = self.config.get("source")
        train = source.get("train") if isinstance(source, dict) else None
        return suffix_written(train) if isinstance(train, str) else ".csv"


def read_run(folder: Path) -> RunContents:
    """Read ``result.json`` and, as far as there are, ``config.json``, ``rows.csv`` and ``suspects.jsonl``."""
    result = read_result(folder)
    classes, chosen = result.child("data").texts("classes"), result.text("chosen")
    matrix = _read_matrix(result, classes)
    candidates = [fields.into(Candidate) for fields in result.children("candidates")]
    config_text = read_text(folder / "config.json")
    config = result.child("config").raw if config_text is None else parse(config_text, folder / "config.json").raw
    suspects, notes = _read_suspects(folder / "suspects.jsonl")
    return RunContents(
        folder=folder,
        result=result,
        config=config,
        chosen=chosen,
        candidates=[replace(c, chosen=c.name == chosen) for c in candidates],
        classes=classes or [str(i) for i in range(len(matrix))],
        matrix=matrix,
        suspects=suspects,
        rows=read_rows(folder),
        notes=notes,
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


def _read_suspects(file: Path) -> tuple[list[Suspect], list[str]]:
    """The suspects, most suspicious first, and what is to be said about them."""
    text = read_text(file)
    if text is None:
        return [], ["The folder has no suspects.jsonl, so no suspects can be listed."]
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    found = [parse(line, file, f"line {number}").into(Suspect) for number, line in lines]
    refused = sum(not _shows_png(suspect.image) for suspect in found)
    if not refused:
        return found, []
    limit = f"only PNG in base64 of at most {MAX_PICTURE // 1024} KiB is"
    found = [suspect if _shows_png(suspect.image) else replace(suspect, image="") for suspect in found]
    return found, [f"Pictures of {refused} suspects are not shown: {limit}."]


def _shows_png(address: str) -> bool:
    """Whether the address of a picture is a PNG and nothing else, or empty."""
    if not address:
        return True
    match = _PICTURE.match(address) if len(address) <= MAX_PICTURE else None
    try:
        return match is not None and base64.b64decode(match[1], validate=True).startswith(_PNG)
    except binascii.Error:
        return False
