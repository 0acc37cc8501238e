"""``hyperkron predict``: labels and probabilities for new rows, from the model of a run."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data import ReadOptions
from hyperkron.cleaning.loading import load
from hyperkron.cli.cleaning import load_model
from hyperkron.cli.options import as_options
from hyperkron.cli.output import UsageError, say, say_json
from hyperkron.training.writing import in_words, whole_file

FORMATS = (".csv", ".jsonl")
"""What predictions are written as."""


def predict(options: Any, given: list[str]) -> int:
    """Write a line for each new row: where it stands, its ids, the label, and the probability of every class."""
    out = None if options.out is None else Path(options.out)
    if out is not None and out.suffix.lower() not in FORMATS:
        raise UsageError(f"--out={options.out!r} must end in {' or '.join(FORMATS)}.")
    if out is not None and out.exists() and not options.overwrite:
        raise FileExistsError(f"--out={options.out!r} exists already; choose another name, or add --overwrite.")
    result = load(options.run, model=load_model(options.model), encoder=options.encoder, device=options.device)
    reading = ReadOptions() if options.charset is None else ReadOptions(charset=options.charset)
    found, probabilities = result.predicted(options.rows, id=options.id, options=reading)
    notes = [as_options(message) for message in found.messages]
    for note in notes:
        say(f"warning: {note}")
    lines = [
        _line(i, {name: values[i] for name, values in found.ids.items()}, result.classes, row)
        for i, row in enumerate(probabilities.tolist())
    ]
    as_lines = out is not None and out.suffix.lower() == ".jsonl"
    text = "".join(json.dumps(line) + "\n" for line in lines) if as_lines else _csv(lines, result.classes, found.ids)
    if out is None:
        print(text, end="")
        return 0
    with in_words(out, len(text)):
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as beside:
            beside.write_bytes(text.encode("utf-8", "replace"))
    if options.json:
        say_json({"file": str(out), "rows": found.count, "classes": list(result.classes), "warnings": notes})
    elif not options.quiet:
        say(f"{found.count} rows predicted.")
        print(out)
    return 0


def _line(row: int, ids: dict[str, Any], classes: tuple[str, ...], probabilities: list[float]) -> dict[str, Any]:
    known = not math.isnan(probabilities[0])
    best = max(range(len(classes)), key=probabilities.__getitem__) if known else 0
    each = {name: round(p, 6) if known else None for name, p in zip(classes, probabilities, strict=True)}
    return {
        "row": row,
        "id": {name: value if isinstance(value, (int, float)) else str(value) for name, value in ids.items()},
        "label": classes[best] if known else None,
        "probability": round(probabilities[best], 6) if known else None,
        "probabilities": each,
    }


def _csv(lines: list[dict[str, Any]], classes: tuple[str, ...], ids: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", *ids, "label", "probability", *(f"p({name})" for name in classes)])
    for line in lines:
        writer.writerow(
            [line["row"], *line["id"].values(), line["label"], line["probability"], *line["probabilities"].values()]
        )
    return text.getvalue()
