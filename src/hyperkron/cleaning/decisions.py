"""What a person decided about suspects in the report: a small file that `hyperkron export --decisions` applies."""

from __future__ import annotations

from pathlib import Path

from hyperkron.cleaning.fields import parse, read_result, read_text
from hyperkron.cleaning.folder import FORMAT
from hyperkron.solution import HyperkronError

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
    text = read_text(file)
    if text is None:
        raise HyperkronError(f"decisions={str(file)!r} does not exist; save it in report.html of the run.")
    content, remedy = parse(text, file), f"save it again in the report of {str(run)!r}"
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
    found: dict[int, str] = {}
    for entry in content.children("decisions"):
        row, label = entry.count("row"), entry.label("label")
        if row is None or entry.text("decision") not in KINDS or label not in classes:
            raise HyperkronError(
                f"decisions={str(file)!r} holds {entry.raw!r:.120}, which is not a decision; {remedy}."
            )
        found[row] = label
    return found
