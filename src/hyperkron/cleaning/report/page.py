"""The pages: what a run folder says, in the order in which a person asks; and the rows behind each prediction."""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from shlex import quote
from typing import Any

from hyperkron.cleaning.choice import FEW_PER_CLASS, STABLE
from hyperkron.cleaning.explain import Explanation
from hyperkron.cleaning.recorded import installed_version
from hyperkron.cleaning.report import plots, wording
from hyperkron.cleaning.report.folder import RunContents, Suspect, read_run
from hyperkron.training.writing import put
from hyperkron.validation import need

PAGE_SIZE = 50
"""Suspects on one page of the table."""
MAX_TEXT = 4000
"""Characters of a suspect's text on the page."""
MAX_EXPLAINED_TEXT = 1000
"""Characters of a text on the page of an explanation."""
MAX_EXAMPLES = 2**25
"""Characters of all texts, pictures and features on the page; further suspects are listed without theirs."""
_CHIPS = 6


def filled(template: str, script: str | None = None, data: str = "", **context: Any) -> str:
    """The text of a page; what is put into the template is escaped.

    ``script`` is the file of its only script, whose hash a Content-Security-Policy names, and ``data`` JSON for it.
    """
    jinja, plain = need("jinja2", "report"), need("markupsafe", "report").Markup
    environment = jinja.Environment(
        autoescape=True,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja.FunctionLoader(_package_text),
    )
    words = ("percent", "count", "duration", "memory", "value", "moment")
    environment.filters.update({name: getattr(wording, name) for name in words}, plain=plots.plain)
    code, style = "" if script is None else _package_text(script), _package_text("report.css")
    allowed = "'none'" if script is None else _source(code)
    policy = f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {allowed}; "
    policy += "base-uri 'none'; form-action 'none'"
    given = {"policy": policy, "script": plain(code), "style": plain(style), "data": plain(data)}
    page: str = environment.get_template(template).render(**given, **context)
    return page


def _package_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _source(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def write_report(run_folder: str | Path) -> Path:
    """Write ``report.html`` into a finished run folder and return its path.

    The page is one file: it makes no request, runs no script but its own (a Content-Security-Policy names its hash),
    and shows whatever the folder holds; what is absent is left out. It contains texts or pictures of the data.

    Raises:
        HyperkronError: where result.json is missing, damaged or of another format, or another file is damaged.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "result.json").write_text('{"format": 1, "chosen": "trusted only"}')
        >>> write_report(folder).name
        'report.html'
    """
    folder = Path(run_folder)
    return _write(render(read_run(folder)), folder / "report.html")


def write_explanation(explanation: Explanation, target: str | Path) -> Path:
    """Write an explanation as one web page, as :func:`write_report` does a run."""
    status = explanation.attribution.stats["status"]
    page = filled(
        "explained.html.j2",
        found=explanation,
        right=sum(query.label == query.prediction for query in explanation.queries),
        rows=explanation.attribution.scores.shape[1],
        status="" if status.ok else status.value,
        most=MAX_EXPLAINED_TEXT,
        hyperkron=installed_version("hyperkron"),
    )
    return _write(page, Path(target))


def _write(page: str, target: Path) -> Path:
    put(target, page.encode("utf-8", "replace"))
    return target


def render(run: RunContents) -> str:
    """The page of a run as text."""
    return filled("template.html.j2", "report.js", data=_data(run), **_context(run))


# --- what the script gets ----------------------------------------------------------------------------------


def embed(value: Any) -> str:
    """JSON that can stand within a script element: ASCII only, and no character that HTML would read.

    Example:
        >>> print(embed("</script>&"))
        "\\u003c/script\\u003e\\u0026"
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _data(run: RunContents) -> str:
    top = max([1.0, *(w for s in run.suspects for w in s.weights if w is not None)])
    suspects: list[dict[str, Any]] = []
    room = MAX_EXAMPLES
    for rank, s in enumerate(run.suspects, 1):
        shown = _suspect(rank, s, top)
        room -= len(shown["text"]) + len(shown["picture"]) + 20 * len(shown["features"])
        suspects.append(shown if room > 0 else shown | {"text": "", "picture": "", "features": [], "cut": 0})
    givens, suggestions = _labels(run)
    about = {"page_size": PAGE_SIZE, "spark": plots.SPARK_SIZE, "givens": givens, "suggestions": suggestions}
    digest = run.config.get("data")
    key = digest if isinstance(digest, str) else ""
    about |= {"classes": run.classes, "run": run.folder.resolve().name, "key": key, "suspects": suspects}
    return embed(about)


def _labels(run: RunContents) -> tuple[list[str], list[str]]:
    """The given and the suggested labels of the suspects, in the order in which the filters list them."""
    return sorted({s.given for s in run.suspects}), sorted({s.suggested for s in run.suspects})


def _suspect(rank: int, s: Suspect, top: float) -> dict[str, Any]:
    history = [w for w in s.weights if w is not None]
    return {
        "rank": rank,
        "row": s.row,
        "ids": [[name, wording.value(x)] for name, x in s.id.items()],
        "given": s.given,
        "suggested": s.suggested,
        "probability": s.error_probability,
        "weight": s.weight,
        "first": history[0] if history else None,
        "last": history[-1] if history else None,
        "spark": plots.sparkline(history, top),
        "text": s.text[:MAX_TEXT],
        "cut": max(0, len(s.text) - MAX_TEXT),
        "picture": s.image,
        "features": [[name, wording.value(x)] for name, x in s.features.items()],
    }


# --- what the template gets --------------------------------------------------------------------------------


def _context(run: RunContents) -> dict[str, Any]:
    """What must be computed; the template takes everything else from ``run`` itself."""
    candidates = sorted(run.candidates, key=lambda c: (c.accuracy is None, -(c.accuracy or 0.0)))
    (givens, suggestions), sources = _labels(run), run.result.children("sources")
    weights = ([row.weight for row in run.rows or () if row.suspect is which] for which in (False, True))
    return {
        "run": run,
        "name": run.folder.resolve().name,
        "export": f"hyperkron export {quote(str(run.folder))} --decisions decisions.json -o clean{run.suffix}",
        "wording": wording,
        "candidates": candidates,
        "winner": next((c for c in candidates if c.chosen), None),
        "axis": plots.accuracy_axis(candidates),
        "suspect_count": run.result.child("suspects").count("count"),
        "least_stable": STABLE,
        "givens": givens,
        "suggestions": suggestions,
        "corrections": _corrections(run),
        "bars": plots.histogram(*weights) if run.rows else None,
        "noise": plots.noise_table(run.classes, run.matrix) if run.matrix else None,
        "sources": sources,
        "reliability": [right for s in sources if (right := s.number("right")) is not None],
        "per_class": {fields.label("name"): fields for fields in run.result.children("per_class")},
        "few_per_class": FEW_PER_CLASS,
        "config": [pair for pair in wording.settings(run.config) if pair[0] not in ("format", "command")],
    }


def _corrections(run: RunContents) -> list[tuple[str, str, int]]:
    """The commonest pairs of given and suggested label among the suspects that are listed."""
    pairs = Counter((s.given, s.suggested) for s in run.suspects if s.given != s.suggested)
    ranked = sorted(pairs.items(), key=lambda item: (-item[1], item[0]))
    return [(given, suggested, n) for (given, suggested), n in ranked[:_CHIPS]]
