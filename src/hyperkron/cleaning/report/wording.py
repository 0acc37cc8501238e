"""Numbers and sentences of the report, in words."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from hyperkron.cleaning import choice
from hyperkron.cleaning.config import OURS
from hyperkron.cleaning.data.checks import SEEN
from hyperkron.cleaning.report.folder import Candidate, RunContents
from hyperkron.cleaning.stages import RULES

UNKNOWN = "–"
NBSP = "\u00a0"


def percent(x: float | None, digits: int = 1) -> str:
    """A share, such as 0.914, as a percentage.

    Example:
        >>> percent(0.25)
        '25.0%'
    """
    return UNKNOWN if x is None else f"{x:.{digits}%}"


def count(n: float | None) -> str:
    """A whole number with separators."""
    return UNKNOWN if n is None else f"{n:,.0f}"


def share(n: float | None, of: float | None) -> str:
    """How many of how many."""
    return UNKNOWN if n is None or not of else f"{count(n)} of {count(of)}"


def duration(seconds: float | None) -> str:
    """A time that a person can compare.

    Example:
        >>> [duration(x).replace(NBSP, " ") for x in (0.123, 75, 7380)]
        ['0.12 s', '1 min 15 s', '2 h 3 min']
    """
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.2f}{NBSP}s" if seconds < 10 else f"{seconds:.0f}{NBSP}s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}{NBSP}min{NBSP}{whole % 60}{NBSP}s"
    return f"{whole // 3600}{NBSP}h{NBSP}{whole % 3600 // 60}{NBSP}min"


def memory(mb: float | None) -> str:
    """Megabytes, or gigabytes where they are many."""
    if mb is None:
        return UNKNOWN
    return f"{mb / 1024:.1f}{NBSP}GB" if mb >= 1024 else f"{mb:.0f}{NBSP}MB"


def moment(iso: str) -> str:
    """A time stamp for people; what is not a time stamp stays as it is."""
    try:
        return datetime.fromisoformat(iso.replace("Z", "+00:00")).strftime("%Y-%m-%d %H:%M %Z").strip()
    except ValueError:
        return iso


def value(x: Any) -> str:
    """A value of the configuration or a feature, with the nine digits that tell any float32 from the others.

    Example:
        >>> value(1482262.0), value(123456.78), value([1, 2]), value(None)
        ('1482262', '123456.78', '[1, 2]', '–')
    """
    if x is None or isinstance(x, str):
        return "–" if x is None else x
    if isinstance(x, float) and x.is_integer() and abs(x) < 1e15:
        return str(int(x))
    if isinstance(x, float):
        return f"{x:.9g}"
    return json.dumps(x, ensure_ascii=False)


def settings(config: dict[str, Any], within: str = "") -> list[tuple[str, str]]:
    """The configuration line by line, without what is not set; a part of it is named before its own settings.

    Example:
        >>> settings({"config": {"seed": 0, "epochs": None}, "source": {"train": "a.csv"}, "names": ["a", "b"]})
        [('seed', '0'), ('source: train', 'a.csv'), ('names', 'a, b')]
    """
    found: list[tuple[str, str]] = []
    for key, x in config.items():
        name = f"{within}: {key}" if within else key
        if isinstance(x, dict) and within.count(": ") < 3:
            found += settings(x, "" if name == "config" else name)
        elif isinstance(x, list) and not any(isinstance(part, dict | list) for part in x):
            found.append((name, ", ".join(map(value, x)) or "none"))
        elif x is not None:
            found.append((name, value(x)))
    return found


def heading(run: RunContents) -> str:
    """What to do, in a few words."""
    if run.result.items("unfinished"):
        return "First result: the alternatives are still being compared."
    if not run.chosen:
        return "No model was chosen."
    if run.chosen == OURS:
        return "Use the cleaned model."
    return "Train on the trusted rows alone." if run.chosen == "trusted" else f"Use the alternative “{run.chosen}”."


def few_trusted(run: RunContents) -> bool:
    """Whether there are too few trusted rows to conclude anything from them."""
    rows = run.result.child("data").count("trusted_rows")
    return rows is not None and choice.few(rows, len(run.classes))


def interval(low: float | None, high: float | None) -> str:
    """An interval of shares, as the verdict writes it."""
    return UNKNOWN if low is None or high is None else choice.interval(low, high)


def of_rows(accuracy: float | None, rows: float | None) -> str:
    """An accuracy next to its interval: never just 100%.

    Example:
        >>> of_rows(0.95, 60), of_rows(1.0, 60)
        ('95.0% of 60 rows', 'all 60 rows')
    """
    if accuracy is None or rows is None:
        return ""
    return f"all {count(rows)} rows" if accuracy >= 0.9995 else f"{percent(accuracy)} of {count(rows)} rows"


def tested_on(run: RunContents) -> tuple[int, float, float] | None:
    """How many test rows there are, and the 95 % interval of the chosen model's accuracy on them."""
    lines = run.result.children("per_class")
    rows, right = (sum(line.count(key) or 0 for line in lines) for key in ("test_rows", "test_right"))
    return (rows, *choice.wilson(right / rows, rows)) if 0 < rows >= right else None


def test_rows_are(run: RunContents) -> str:
    """What the test rows are good for."""
    seen = any(SEEN in message for message in run.result.child("data").texts("messages"))
    return "some were also learnt from, see The data" if seen else "never used for choosing"


def reason(run: RunContents) -> str:
    """Why the chosen candidate was chosen; empty for a run that had another rule, or has not compared yet."""
    known = run.config.get("rules") == RULES and not run.result.items("unfinished")
    if not known or OURS not in (c.name for c in run.candidates):
        return ""
    better = "significantly better"
    if run.chosen == OURS:
        kind = f" ({learner})" if (learner := run.result.text("learner")) else ""
        return f"The cleaned model{kind} is chosen unless an alternative is {better} on the same rows; none is."
    return f"“{run.chosen}” was chosen because it is {better} than the cleaned model on the same rows."


def difference(candidate: Candidate, winner: Candidate | None) -> str:
    """How far a candidate is from the chosen one, in points, and whether that is significant."""
    if winner is None or candidate is winner or candidate.accuracy is None or winner.accuracy is None:
        return UNKNOWN
    points = f"{100 * (candidate.accuracy - winner.accuracy):+.1f}".replace("-", "−")
    if candidate.different is None:
        return points
    return f"{points}, {'' if candidate.different else 'not '}significant"
