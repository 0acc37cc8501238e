"""A finished run, from its folder: its result, and what a person decided about its suspects."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hyperkron.cleaning.data import InputForm
from hyperkron.cleaning.data.values import spelt
from hyperkron.cleaning.fields import FORMAT, REMEDY, parse, read_object, read_result, read_text, resume_command
from hyperkron.cleaning.given import Given
from hyperkron.cleaning.models import TextEncoder
from hyperkron.cleaning.models.trees import rebuilt
from hyperkron.cleaning.prepare import InputTransform, network_builder
from hyperkron.cleaning.recorded import encoder_identity, refuse_other_encoder, refuse_other_model
from hyperkron.cleaning.result import CleanResult
from hyperkron.solution import HyperkronError
from hyperkron.training.encoding import DamagedCheckpoint
from hyperkron.training.files import TensorFile
from hyperkron.validation import check_device


def load(
    run: str | Path,
    *,
    model: Callable[[], nn.Module] | None = None,
    encoder: str | None = None,
    device: str = "cpu",
) -> CleanResult:
    """The result of a finished run, ready to ``predict``; the training data is not needed.

    Arrays are tensors over the rows of the source, as :class:`CleanResult` has them; probabilities have six decimals.

    Args:
        run: the run folder.
        model: the same function as in the run, if that had one.
        encoder: another place of the run's text encoder; None uses the one that is recorded.
        device: where the model computes.

    Example:
        >>> import tempfile
        >>> from hyperkron.cleaning import CleanConfig, clean
        >>> x = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
        >>> folder, config = Path(tempfile.mkdtemp()) / "run", CleanConfig(epochs=1, compare=())
        >>> result = clean((x[:40], x[:40, 0] > 0), (x[40:], x[40:, 0] > 0), out=folder, config=config)
        >>> torch.equal(load(folder).predict(x), result.predict(x))
        True
    """
    folder = Path(run)
    summary = read_result(folder)
    classes = summary.child("data").texts("classes")
    rows = finished_rows(folder)
    place = {name: k for k, name in enumerate(classes)}
    scores = {
        "error_probability": torch.tensor([row.error_probability for row in rows]),
        "suspect": torch.tensor([row.suspect for row in rows], dtype=torch.bool),
        "suggested": torch.tensor([place.get(row.suggested, -1) for row in rows], dtype=torch.long),
    }
    silent = torch.tensor([row.row for row in rows if not row.given], dtype=torch.long)
    given = Given(torch.tensor([row.row for row in rows], dtype=torch.long), left_out(folder), unlabelled=silent)
    transform, network = _predictor(folder, model, encoder, device)
    checked: dict[str, Any] = {key: summary.text(key) for key in ("chosen", "verdict")}
    checked |= {"candidates": summary.items("candidates"), "data": {**summary.child("data").raw, "classes": classes}}
    return CleanResult.of(given, scores, {**summary.raw, **checked}, network, folder=folder, transform=transform)


class CsvRow(NamedTuple):
    """A line of rows.csv; without a given label, error probability and weight are NaN."""

    row: int
    given: str
    suggested: str
    error_probability: float
    weight: float
    suspect: bool


def read_rows(folder: Path) -> list[CsvRow] | None:
    """The lines of rows.csv; None where there is no such file."""
    file = folder / "rows.csv"
    text = read_text(file)
    if text is None:
        return None
    lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        absent = [name for name in CsvRow._fields if name not in (lines.fieldnames or ())]
        rows = [] if absent else [_row(line) for line in lines]
    except (TypeError, ValueError, KeyError, csv.Error) as error:
        raise HyperkronError(f"{file}:{lines.line_num} is not a line of a run; {REMEDY}.") from error
    if absent:
        raise HyperkronError(f"{file}: its header lacks {', '.join(absent)}; {REMEDY}.")
    return rows


def _row(line: dict[str, Any]) -> CsvRow:
    probability, weight = (float(line[name] or "nan") for name in ("error_probability", "weight"))
    suspect = {"true": True, "false": False}[line["suspect"]]
    if (
        math.isnan(probability) != (line["given"] == "")
        or line["suggested"] is None
        or not 0 <= int(line["row"]) < 2**62
    ):
        raise ValueError
    return CsvRow(int(line["row"]), str(line["given"]), line["suggested"], probability, weight, suspect)


def finished_rows(folder: Path) -> list[CsvRow]:
    """The lines of rows.csv; refused where there is no such file."""
    rows = read_rows(folder)
    if rows is None:
        raise HyperkronError(
            f"run={str(folder)!r} has no rows.csv: it has not finished; continue with {resume_command(folder)}."
        )
    return rows


def left_out(folder: Path) -> dict[str, torch.Tensor]:
    """left_out.csv: for each reason, positions."""
    found: dict[str, list[int]] = {}
    for line in (read_text(folder / "left_out.csv") or "").splitlines()[1:]:
        row, _, why = line.partition(",")
        if not row.isdecimal() or len(row) > 18:
            raise HyperkronError(f"{folder / 'left_out.csv'}: {line!r:.80} is not a line of a run; {REMEDY}.")
        found.setdefault(why, []).append(int(row))
    return {why: torch.tensor(rows) for why, rows in found.items()}


def _predictor(
    folder: Path, model: Callable[[], nn.Module] | None, encoder: str | None, device: str
) -> tuple[InputTransform, nn.Module]:
    """What makes inputs of new rows, and the network."""
    why = f"it was made by an earlier version, or has not finished; finish it with {resume_command(folder)}"
    about = read_object(folder / "inputs.json", f"run={str(folder)!r} has no inputs.json: {why}.")
    refuse_other_model(about, model)
    try:
        with TensorFile(folder / "inputs.safetensors", about.raw["file"]) as stored:
            tensors = {name: stored(name) for name in about.texts("tensors")}
        form = InputForm.from_json(about.raw)
    except (DamagedCheckpoint, OSError, KeyError, TypeError, ValueError) as error:
        raise HyperkronError(f"{folder / 'inputs.safetensors'} is damaged ({error}); {REMEDY}.") from error
    where = check_device("device", device)
    layers, shape = int(about.raw.get("layers") or 0), tuple(int(n or 0) for n in about.numbers("input_shape"))
    vectors = None
    if about.child("encoder").raw:
        vectors = TextEncoder(encoder or about.child("encoder").text("name"), device=where)
        refuse_other_encoder(about, encoder_identity(vectors))
    transform = InputTransform.load(form, tensors, vectors, layers)
    build = network_builder(transform, shape, len(about.texts("classes")), model)
    return transform, _stored_model(build, folder / "model.safetensors").to(where).eval()


def _stored_model(build: Callable[[], nn.Module], file: Path) -> nn.Module:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return rebuilt(build, load_file(file))
    except (OSError, SafetensorError, RuntimeError, HyperkronError) as error:
        reason = " ".join(str(error).split())[:200]
        raise HyperkronError(f"{file} is not the network of this run ({reason}); {REMEDY}.") from error


KINDS = ("accept", "reject", "relabel")
"""Take the suggested label, keep the given one, or take another."""


def read_decisions(file: str | Path, run: str | Path) -> dict[int, str]:
    """The label of every row that was decided, by the position of the row in the source.

    Args:
        file: as the report of the run saves it (decisions.json).
        run: the run folder; decisions about other data are refused.

    Example:
        >>> import json, tempfile
        >>> run = Path(tempfile.mkdtemp())
        >>> _ = (run / "result.json").write_text('{"format": 1, "data": {"classes": ["cat", "dog"]}}')
        >>> made = {"format": 1, "data": "", "decisions": [{"row": 3, "decision": "accept", "label": "dog"}]}
        >>> _ = (run / "decisions.json").write_text(json.dumps(made))
        >>> read_decisions(run / "decisions.json", run)
        {3: 'dog'}
    """
    file, run = Path(file), Path(run)
    content = read_object(file, f"decisions={str(file)!r} does not exist; save it in report.html of the run.")
    remedy = f"save it again in the report of {str(run)!r}"
    if content.raw.get("format") != FORMAT:
        raise HyperkronError(f"decisions={str(file)!r} is not a file of decisions; {remedy}.")
    config = read_text(run / "config.json")
    digest = "" if config is None else parse(config, run / "config.json").raw.get("data") or ""
    if content.text("data") != digest:
        raise HyperkronError(
            f"decisions={str(file)!r} are about other data (run {content.text('run')!r}) than the run in {str(run)!r}; "
            f"{remedy}."
        )
    classes = read_result(run).child("data").texts("classes")
    given = {row.row: row.given for row in read_rows(run) or ()}
    found: dict[int, str] = {}
    for entry in content.children("decisions"):
        row, label, kind = entry.count("row"), spelt(entry.label("label"), classes), entry.text("decision")
        if row is None or kind not in KINDS or label not in classes:
            raise HyperkronError(
                f"decisions={str(file)!r} holds {entry.raw!r:.120}, which is not a decision; {remedy}."
            )
        if kind == "reject" and label != given.get(row, label):
            raise HyperkronError(
                f"decisions={str(file)!r} rejects the suggestion for row {row}, so its label is {given[row]!r} and not "
                f'{label!r}; write that label, or "relabel" in place of "reject".'
            )
        if found.setdefault(row, label) != label:
            raise HyperkronError(
                f"decisions={str(file)!r} gives row {row} two labels, {found[row]!r} and {label!r}; delete one of them."
            )
    return found
