"""The page of an explanation: each query, its prediction, and the training rows that speak for and against it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyperkron.cleaning.explain import Explanation, Witness
from hyperkron.cleaning.recorded import installed_version
from hyperkron.cleaning.report import wording
from hyperkron.cleaning.report.templates import filled
from hyperkron.training.writing import in_words, whole_file

MAX_TEXT = 1000
"""Characters of a text on the page."""


def write_explanation(explanation: Explanation, target: str | Path) -> Path:
    """Write an explanation as one web page, as :func:`hyperkron.cleaning.report.write_report` does a run."""
    target = Path(target)
    page = filled("explained.html.j2", **_context(explanation)).encode("utf-8", "replace")
    with in_words(target, len(page)), whole_file(target) as temporary:
        temporary.write_bytes(page)
    return target


def _context(explanation: Explanation) -> dict[str, Any]:
    queries = [
        {
            "row": query.row,
            "label": query.label,
            "prediction": query.prediction,
            "probability": query.probability,
            "right": query.label == query.prediction,
            **_shown(query.shown),
            "sides": [
                ("Speaks for it", [_witness(x, query.helpful) for x in query.helpful]),
                ("Speaks against it", [_witness(x, query.harmful) for x in query.harmful]),
            ],
        }
        for query in explanation.queries
    ]
    stats = explanation.attribution.stats
    return {
        "name": explanation.name,
        "kind": explanation.kind,
        "queries": queries,
        "right": sum(query["right"] for query in queries),
        "rows": explanation.attribution.scores.shape[1],
        "messages": explanation.messages,
        "status": "" if stats["status"].ok else stats["status"].value,
        "hyperkron": installed_version("hyperkron"),
    }


def _witness(witness: Witness, side: list[Witness]) -> dict[str, Any]:
    """A row as the template takes it; its strength is relative to the strongest on its side."""
    return {
        "row": witness.row,
        "label": witness.label,
        "learnt": witness.learnt,
        "trusted": witness.trusted,
        "strength": witness.score / side[0].score,
        **_shown(witness.shown),
    }


def _shown(given: dict[str, Any]) -> dict[str, Any]:
    text = given["text"] or ""
    features = [(name, wording.value(x)) for name, x in (given["features"] or {}).items()]
    return {"text": text[:MAX_TEXT], "cut": len(text) > MAX_TEXT, "picture": given["image"], "features": features}
