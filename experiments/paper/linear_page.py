"""The linear model at the paper's length: what the recorded runs say, as tables, verdicts and figures.

The verdicts follow the rules of :mod:`experiments.paper.linear_verdicts`, which are older than these runs. Figure 5 is
judged by the arm ``as printed``. There is no verdict before every line that the rule compares has three seeds, nor
where more than a fifth of the weights had not been updated at the look that counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments import records
from experiments.paper import linear_verdicts, plots, references
from experiments.paper.linear_contest import ARMS, BATCHES, DECAYS, ROWS, TAUS, Contest, Line
from experiments.paper.recipe import Judgement, Verdict
from experiments.paper.tuning import at_edge
from experiments.paper.visits import Visits, unvisited
from experiments.seeds import Difference, shown

SEEDS = 3
Rows = list[dict[str, Any]]


def summary(rows: Rows) -> dict[str, Any]:
    """The figures of a line's seeds side by side; a run that failed has no loss."""
    fine, ms = [row for row in rows if not row["failed"]], milliseconds(rows)
    return {
        "test_loss": [None if row["failed"] else row["best"]["test_loss"] for row in rows],
        "test_error": [None if row["failed"] else row["best"]["test_error"] for row in rows],
        "step_seconds": [None if ms is None else ms / 1e3],
        "curve": fine[0]["curve"] if fine else None,
        "setting": rows[0]["setting"],
    }


def milliseconds(rows: Rows) -> float | None:
    """Of the device for an outer step of these runs: their time divided by the number of runs that shared it."""
    found = [1e3 * row["seconds"] / row["wanted"] / row["workers"] for row in rows if "workers" in row]
    return statistics.median(found) if found else None


class Study(NamedTuple):
    """A study: its rule, and its figures from the finished runs."""

    verdict: Callable[[Mapping[str, Any]], Judgement]
    figures: Callable[[Contest, list[Line]], dict[str, Any]]


def _figure_5(contest: Contest, lines: list[Line], arm: str = "as printed") -> dict[str, Any]:
    found = {
        line.method: summary(rows) for line in lines if line.title.endswith(arm) and (rows := contest.results(line))
    }
    plain = {name: found.pop(name) for name in references.KINDS if name in found}
    if "AID-KFAC" in found:  # a direct solve leaves nothing to amortise
        found["AmIGO-KFAC"] = found["AID-KFAC"]
    return {"found": found, "references": plain}


def _averages(contest: Contest, lines: list[Line]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        batch, damping = f"{line.fixed.get('batch', ROWS):.0f}", f"{line.fixed['damping']:g}"
        rows = {f"{beta:g}": contest.results(line, {"ema": beta}) for beta in DECAYS}
        found.setdefault(batch, {})[damping] = {beta: summary(of) for beta, of in rows.items() if of}
    return {"found": found}


def _batches(contest: Contest, lines: list[Line]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {}
    for line in lines:
        batch = f"{line.fixed.get('batch', ROWS):.0f}"
        if rows := contest.results(line):
            found.setdefault(batch, {})[line.method] = summary(rows)
    return {"batches": list(BATCHES), "found": found}


def _intervals(contest: Contest, lines: list[Line]) -> dict[str, Any]:
    found: dict[str, dict[str, Any]] = {str(tau): {} for tau in TAUS}
    for line in lines:
        for tau in TAUS:
            if rows := contest.results(line, {"refresh": float(tau)}):
                found[str(tau)][line.method] = summary(rows)
    return {"intervals": list(TAUS), "found": found}


STUDIES = {
    "figure 5": Study(linear_verdicts.methods, _figure_5),
    "averages": Study(linear_verdicts.averages, _averages),
    "batches": Study(linear_verdicts.batches, _batches),
    "intervals": Study(linear_verdicts.intervals, _intervals),
}


def needed(contest: Contest, study: str) -> list[tuple[Line, Mapping[str, float]]]:
    """The lines and variants that the rule of a study compares; of figure 5 the pairs, as printed."""
    lines = [line for line in contest.lines if line.study == study]
    if study == "figure 5":
        names = {name for pair in linear_verdicts.PAIRS for name in pair}
        lines = [line for line in lines if line.method in names and line.title.endswith("as printed")]
    return [(line, variant) for line in lines for variant in line.variants]


def visits(row: Mapping[str, Any], title: str) -> Visits:
    """How often weights had been updated at the look that counts."""
    return Visits(title, row["best"]["step"], int(row["setting"].get("batch", ROWS)), ROWS)


def judgement(study: str, contest: Contest) -> Judgement:
    """The verdict of the recorded runs; none where something that the rule compares is missing."""
    wanted = needed(contest, study)
    done = [(line, variant, contest.results(line, variant)) for line, variant in wanted]
    whole = [rows for _, _, rows in done if len(rows) >= SEEDS]
    if not wanted or len(whole) < len(wanted):
        text = f"{len(whole)} of {len(wanted)} runs of {contest.plan.steps} outer steps have {SEEDS} seeds."
        return Judgement(Verdict.REFUSED, text)
    seen = [visits(row, line.title) for line, _, rows in done for row in rows if not row["failed"]]
    lines = [line for line in contest.lines if line.study == study]
    found = STUDIES[study].verdict(STUDIES[study].figures(contest, lines))
    if refused := unvisited(seen):
        return Judgement(Verdict.REFUSED, f"{refused} What was measured: {found.because}")
    return Judgement(found.verdict, f"{contest.plan.steps} outer steps, {SEEDS} seeds. {found.because}")


def tables(contest: Contest) -> str:
    """Verdicts and tables of all studies in the contest."""
    shows = {"figure 5": _methods, "averages": _betas, "batches": _sizes, "intervals": _taus}
    parts = []
    for study in dict.fromkeys(line.study for line in contest.lines):
        found = judgement(study, contest)
        parts += [f"{study}: **{found.verdict.value}**. {found.because}", *shows[study](contest)]
    return "\n\n".join(parts)


def _losses(rows: Rows) -> list[float]:
    return [row["best"]["test_loss"] for row in rows if not row["failed"]]


def _edges(line: Line, setting: Mapping[str, float]) -> str:
    """The values of a setting that lie at an edge of their grid."""
    grid = {name: values for name, values in line.grid.items() if name != "momentum"}
    return ", ".join(at_edge(dict(setting), grid)) or "–"


def _methods(contest: Contest) -> list[str]:
    """Figure 5: test loss and error where the held-out loss is lowest, for both arms."""
    parts = []
    for arm in ARMS:
        lines = [line for line in contest.lines if line.study == "figure 5" and line.title.endswith(arm)]
        ran = [(line, rows) for line in lines if (rows := contest.results(line))]
        ran.sort(key=lambda pair: _mean(pair[1]))
        ours = next((rows for line, rows in ran if line.method == "AID-KFAC"), [])
        if ran:
            cells = [[line.method, *_cells(line, rows, ours)] for line, rows in ran]
            parts.append(records.markdown([arm, *COLUMNS], cells))
        if absent := [line.method for line in lines if line.method not in [done.method for done, _ in ran]]:
            parts.append(f"Not run, {arm}: {', '.join(absent)}.")
    return parts


def _mean(rows: Rows) -> float:
    found = _losses(rows)
    return statistics.fmean(found) if len(found) == len(rows) else float("inf")


COLUMNS = ("test loss", "KFAC's less it", "at step", "seeds", "at an edge")


def _cells(line: Line, rows: Rows, ours: Rows) -> list[str]:
    """The cells of a line, as :data:`COLUMNS` names them; ``ours``: the runs of KFAC beside it."""
    fine = [row for row in rows if not row["failed"]]
    if not fine:
        return ["diverged", *["–"] * 3, _edges(line, rows[0]["setting"])]
    learned = line.method not in references.KINDS
    other = line.method != "AID-KFAC" and bool(ours)
    gap = Difference.of(summary(rows)["test_loss"], summary(ours)["test_loss"]) if other else None
    unit = 1 if learned else 10
    return [
        shown(_losses(rows)),
        "–" if gap is None else f"{gap:.3f}".partition(" (")[0],
        f"{statistics.median(row['best']['step'] for row in fine) / unit:.0f}",
        f"{len(fine)}" + (f" ({len(rows) - len(fine)} diverged)" if len(fine) < len(rows) else ""),
        _edges(line, rows[0]["setting"]),
    ]


def _betas(contest: Contest) -> list[str]:
    """Figure 6: test loss by batch, damping and decay."""
    rows = []
    for line in (line for line in contest.lines if line.study == "averages"):
        of = [contest.results(line, {"ema": beta}) for beta in DECAYS]
        if any(of):
            first = next(found for found in of if found)[0]["setting"]
            steps = _edges(line, first)
            losses = [shown(_losses(x)) if x else "–" for x in of]
            rows.append([line.title, *losses, _seeds(of), steps, _never([row for x in of for row in x])])
    head = ["test loss", *(f"β = {beta:g}" for beta in DECAYS), "seeds", "at an edge", NEVER]
    return [records.markdown(head, rows)] if rows else []


NEVER = "weights not updated then"


def _never(rows: Rows) -> str:
    """The largest share of weights that had not been updated at the look that counts."""
    seen = [visits(row, "") for row in rows if not row["failed"]]
    return f"{max(x.never for x in seen):.0%}" if seen else "–"


def _seeds(of: Sequence[Rows]) -> str:
    counts = sorted({len(rows) for rows in of})
    return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _sizes(contest: Contest) -> list[str]:
    """Figures 3 and 7."""
    rows = []
    lines = [line for line in contest.lines if line.study == "batches"]
    for line in lines:
        beside = next(x for x in lines if x.fixed == line.fixed and x.method == "AID-KFAC")
        if found := contest.results(line):
            rows.append([line.title, *_cells(line, found, contest.results(beside)), _never(found)])
    return [records.markdown(["batches", *COLUMNS, NEVER], rows)] if rows else []


def _taus(contest: Contest) -> list[str]:
    """Table 2 with the linear model."""
    lines, rows = [line for line in contest.lines if line.study == "intervals"], []
    for tau in TAUS:
        of = [contest.results(line, {"refresh": float(tau)}) for line in lines]
        ms = [milliseconds(x) for x in of]
        if any(of):
            cells = [shown(_losses(x)) if x else "–" for x in of]
            never = _never([row for x in of for row in x])
            rows.append([f"{tau}", *cells, *("–" if x is None else f"{x:.1f}" for x in ms), _seeds(of), never])
    head = ["τ", *(f"{x.method}, test loss" for x in lines), *(f"{x.method}, GPU ms a step" for x in lines), "seeds"]
    return [records.markdown([*head, NEVER], rows)] if rows else []


def figures(contest: Contest, folder: Path) -> list[Path]:
    """Test loss by outer step, of the first seed, in both arms."""

    def fill(axes: Any) -> None:
        for axis, arm in zip(axes, ARMS, strict=True):
            lines = [x for x in contest.lines if x.study == "figure 5" and x.title.endswith(arm)]
            shown_rows = {x.method: contest.results(x)[0] for x in lines if contest.results(x)}
            curves = {
                name: row["curve"]
                for name, row in shown_rows.items()
                if not row["failed"] and name not in references.KINDS
            }
            drawn = {name: (c["step"][1:], plots.numbers(c["test_loss"][1:])) for name, c in curves.items()}
            plain = [name for name in shown_rows if name in references.KINDS]
            level: dict[str, float] = {str(name): shown_rows[name]["best"]["test_loss"] for name in plain}
            plots.curves(axis, drawn, f"outer steps, {arm}", "test loss", log_x=True, level=level)
            axis.set_ylim(0.28, 0.6)

    return [plots.draw(folder / "linear-length.svg", len(ARMS), fill, height=4.0)]
