"""What a finished run says at its end, in twenty lines."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from hyperkron.cleaning.report.folder import Candidate, RunContents, Suspect, read_run
from hyperkron.cleaning.report.wording import percent
from hyperkron.cli.output import lasting

TOP = 5
"""Suspects that are named."""
_WIDTH = 100


def summary(folder: Path) -> str:
    """The verdict, the candidates, the suspects, the files and the next commands of a finished run."""
    run = read_run(folder)
    parts = [run.result.text("verdict"), _candidates(run.candidates), _suspects(run), _files(run), _next(run)]
    return "\n" + "\n\n".join(part for part in parts if part)


def _table(lines: Sequence[Sequence[str]]) -> str:
    """Cells in columns, the first to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = (
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in shown)


def _candidates(found: list[Candidate]) -> str:
    if not found:
        return ""
    tested = any(c.test_accuracy is not None for c in found)
    lines = [["  candidate", *(["test accuracy"] if tested else []), "held-out accuracy", "its 95% interval"]]
    for c in sorted(found, key=lambda c: (c.accuracy is None, -(c.accuracy or 0.0))):
        between = "" if c.low is None or c.high is None else f"{percent(c.low)[:-1]}–{percent(c.high)}"
        test = [percent(c.test_accuracy)] if tested else []
        lines.append([f"{'*' if c.chosen else ' '} {c.name}", *test, percent(c.accuracy), between])
    return _table(lines) + "\n* chosen on held-out trusted rows; its model is the one saved"


def _suspects(run: RunContents) -> str:
    count = run.result.child("suspects").count("count")
    rows = sum(1 for row in run.rows if row.given) if run.rows else run.result.child("data").count("train_rows")
    count = len(run.suspects) if count is None else count
    if not count:
        return "No row looks mislabelled."
    share = f" of {rows} ({count / rows:.0%})" if rows else ""
    unlabelled = any(not row.given for row in run.rows or ())
    what = "labelled rows" if unlabelled else "rows"
    text = f"{count}{share} {what} {'looks' if count == 1 else 'look'} mislabelled."
    if run.suspects:
        text += " The most suspicious (rows count from 0, without a header):"
    return "\n".join([text, *(_suspect(s) for s in run.suspects[:TOP])])


def _suspect(s: Suspect) -> str:
    known = "".join(f" ({name} {value})" for name, value in s.id.items())
    line = f"  row {s.row}{known}: {s.given} → {s.suggested}"
    if s.error_probability is not None:  # a percentage that never claims to be certain
        sure = "over 99" if s.error_probability >= 0.995 else f"{100 * s.error_probability:.0f}"
        line += f", {sure}% likely wrong"
    shown = " ".join(s.text.split())
    if shown:
        room = max(20, _WIDTH - len(line) - 3)
        line += f"   {shown if len(shown) <= room else shown[: room - 1] + '…'}"
    return line


def _files(run: RunContents) -> str:
    names = (("report", "report.html"), ("rows", "rows.csv"), ("model", "model.safetensors"))
    lines = [f"{title:7} {run.folder / file}" for title, file in names if (run.folder / file).exists()]
    if learner := run.result.text("learner"):
        lines = [f"{line} ({learner})" if line.startswith("model") else line for line in lines]
    total = run.result.child("seconds").number("total")
    return "\n".join([*lines, *([f"{'time':7} {lasting(total)}"] if total is not None else [])])


def _next(run: RunContents) -> str:
    source, suffix = run.config.get("source"), run.suffix
    reading = source.get("reading") if isinstance(source, dict) else None
    votes = isinstance(reading, dict) and reading.get("annotators")  # such rows have no label that could be replaced
    folder = shlex.quote(str(run.folder))
    return "\n".join(
        [
            f"next:\n  hyperkron export {folder} --drop suspects -o clean{suffix}",
            *([] if votes else [f"  hyperkron export {folder} --relabel suspects -o relabelled{suffix}"]),
            f"  hyperkron predict {folder} NEW -o predictions.csv",
        ]
    )
