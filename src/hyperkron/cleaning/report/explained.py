"""The page of an explanation: the training rows behind each prediction."""

from __future__ import annotations

from pathlib import Path

from hyperkron.cleaning.explain import Explanation
from hyperkron.cleaning.recorded import installed_version
from hyperkron.cleaning.report.templates import filled
from hyperkron.training.writing import in_words, whole_file

MAX_TEXT = 1000
"""Characters of a text on the page."""


def write_explanation(explanation: Explanation, target: str | Path) -> Path:
    """Write an explanation as one web page, as :func:`hyperkron.cleaning.report.write_report` does a run."""
    target, status = Path(target), explanation.attribution.stats["status"]
    page = filled(
        "explained.html.j2",
        found=explanation,
        right=sum(query.label == query.prediction for query in explanation.queries),
        rows=explanation.attribution.scores.shape[1],
        status="" if status.ok else status.value,
        most=MAX_TEXT,
        hyperkron=installed_version("hyperkron"),
    ).encode("utf-8", "replace")
    with in_words(target, len(page)), whole_file(target) as temporary:
        temporary.write_bytes(page)
    return target
