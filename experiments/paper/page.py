"""Every table and figure of the paper: what it printed, what we found, and a plain verdict.

``paper.md`` has a screen for each; ``paper/NAME.md`` is the whole record of one; ``paper.html`` has all in one file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from experiments import records
from experiments.paper import budget
from experiments.paper.budget import Missing
from experiments.paper.longer import Longer
from experiments.paper.recipe import SCALES, Judgement, Recipe, Result, Table, Verdict
from experiments.paper.visits import Visits
from hyperkron.solution import HyperkronError

TITLE = "The paper, reproduced"
INTRODUCTION = (
    "Every table and figure of Liao, Dangel & Yu, “Efficient bilevel optimization with KFAC-based hypergradients” "
    "(AISTATS 2026), with the printed number beside ours. A verdict follows a rule that is part of the recipe and is "
    "printed with it. Results are JSON files with the command, seeds, hardware and versions that made them. All "
    "methods of a comparison have the same parameters, batches, seeds and time; each is tuned over its own grid with "
    "the same number of trials, on a second validation part; the test loss that counts is the one where the second "
    "validation loss is lowest. ± is half a 95 % interval over seeds. Where a result names the command "
    "`hyperkron paper`, it is `python -m experiments.paper` today. Where there are runs of the paper's own length, "
    "their verdict counts, and the shorter runs are in the record. Where weights of examples are learned, a verdict "
    "needs runs of at least 1000 outer steps. GPU minutes are those of one NVIDIA H200: spent on all recorded runs of "
    "the row, and missing for a verdict by the measured time of a step."
)
ROWS = 12
"""Rows of a table on the short page."""
ANSWERS = 2
"""Sentences of an answer on the short page."""


@dataclass(frozen=True)
class Section:
    """What the page says about one recipe.

    Attributes:
        judgement: that counts: of the runs of the paper's length, where there are any.
        shorter: of the recipe's own result, where the other counts.
        longer: the page of the runs of the paper's length.
        anchor: the recipe's name; its record is ``paper/NAME.md``.
        spent: GPU minutes of all runs, as text.
        missing: what a verdict still needs.
    """

    title: str
    place: str
    judgement: Judgement
    shorter: Judgement | None = None
    longer: str = ""
    rule: str = ""
    note: str = ""
    made: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[str] = ()
    anchor: str = ""
    answer: Sequence[str] = ()
    spent: str = ""
    missing: Missing | None = None


def results(folders: Sequence[str | Path]) -> dict[str, dict[str, Result]]:
    """All results in the folders, by recipe and scale; a later folder wins."""
    found: dict[str, dict[str, Result]] = {}
    for folder in folders:
        for path in sorted(Path(folder).glob("*.json")):
            result = Result.read(path)
            found.setdefault(result.name, {})[result.scale] = result
    return found


def best(of: Mapping[str, Result] | None) -> Result | None:
    """The result at the largest scale."""
    return next((of[scale] for scale in reversed(SCALES) if scale in of), None) if of else None


def section(
    recipe: Recipe,
    result: Result | None,
    figures: Path,
    longer: Longer | None = None,
    missing: Missing | None = None,
) -> Section:
    """The section of a recipe, with its figures drawn into ``figures``.

    Args:
        longer: what its long runs found.
        missing: GPU minutes that a verdict needs; shown where there is none.
    """
    shown = result if result is not None and result.scale in recipe.judged else None
    paths: list[Path] = []
    if shown is not None and recipe.plot is not None:
        figures.mkdir(parents=True, exist_ok=True)
        paths = recipe.plot(shown, figures)
    own = recipe.judge(result)
    counts = own if longer is None else longer.judgement
    return Section(
        recipe.title,
        recipe.place,
        counts,
        shorter=None if longer is None else own,
        longer="" if longer is None else longer.page,
        rule=" ".join((recipe.verdict.__doc__ or "").split()),
        note=recipe.note,
        made=_made(result),
        tables=[*recipe.tables(shown), *_updates(recipe.weights(shown) if shown is not None else ())],
        figures=[f"figures/paper/{path.name}" for path in paths],
        anchor=recipe.name,
        answer=recipe.answer(shown) if shown is not None and recipe.answer is not None else (),
        spent=_spent(recipe, result),
        missing=missing if counts.verdict is Verdict.REFUSED else None,
    )


def _spent(recipe: Recipe, result: Result | None) -> str:
    """GPU minutes; an upper bound where it is not recorded how many processes shared the device."""
    found = budget.spent(result, recipe.name)
    if found is None:
        return "–"
    shared = recipe.stages is not None and result is not None and "gpu" in result.hardware
    unknown = shared and result is not None and "--workers" not in result.command
    return ("≤ " if unknown else "") + budget.rounded(found)


def _updates(found: Sequence[Visits]) -> list[Table]:
    """How often the weights of every run were updated."""
    rows = [[x.name, f"{x.updates:.0f}", str(x.batch), str(x.rows), f"{x.mean:.2g}", f"{x.never:.0%}"] for x in found]
    columns = ["run", "updates of λ", "batch", "rows", "visits of a weight", "weights never updated"]
    return [Table("How often the weights were updated", columns, rows)] if rows else []


def _made(result: Result | None) -> str:
    if result is None:
        return ""
    machine = result.hardware.get("gpu") or f"{result.hardware.get('cpu')}, {result.hardware.get('threads')} thread(s)"
    part = "" if result.complete else ", cut short by its time limit"
    count = len(result.seeds)
    alone = result.busy if result.hardware.get("threads") == 1 and "gpu" not in result.hardware else None
    busy = "" if alone is None else f", {alone:.0f} s of them computing"
    return (
        f"{result.scale} scale, {count} seed{'s' * (count > 1)}{part}; `{result.command or 'by a script'}`; {machine}; "
        f"torch {result.versions.get('torch')}; {result.seconds:.0f} s{busy}; "
        f"experiments/results/paper/{result.name}-{result.scale}.json"
    )


def markdown(sections: Sequence[Section]) -> str:
    """The short page: a screen for each section, the rest behind a link."""
    lines = [f"# {TITLE}", "", INTRODUCTION, "", records.markdown(OVERVIEW, _overview(sections)), ""]
    for x in sections:
        lines += [f"## {x.place}: {x.title}", "", _verdict(x), ""]
        if x.longer:
            lines += [f"[Table, figure and command]({x.longer}); {_link(x, 'the record of the shorter runs')}.", ""]
            continue
        lines += [*(f"- {text}" for text in x.answer[:ANSWERS]), *([""] if x.answer else [])]
        lines += _first_table(x.tables)
        lines += [line for path in x.figures[:1] for line in (f"![{x.title}]({path})", "")]
        if x.anchor:
            lines += [_link(x, "The record") + ": the rule, how ours differs, every table, and the command.", ""]
    return "\n".join(lines).rstrip() + "\n"


def record(x: Section) -> str:
    """All that there is about one section."""
    lines = [f"# {x.place}: {x.title}", "", _verdict(x), ""]
    if x.shorter is not None:
        told = f"These are runs of the paper's length ([{x.longer}](../{x.longer})). The shorter runs below"
        lines += [f"{told}: {x.shorter.verdict.value}. {x.shorter.because}", ""]
    lines += [*(f"- {text}" for text in x.answer), *([""] if x.answer else [])]
    lines += [line for text in (x.note, f"*Rule:* {x.rule}" if x.rule else "") if text for line in (text, "")]
    for table in x.tables:
        lines += [f"{table.title}:", "", records.markdown(table.columns, table.rows), ""]
    lines += [line for path in x.figures for line in (f"![{x.title}](../{path})", "")]
    lines += [f"*Made by:* {x.made}", ""] if x.made else []
    return "\n".join([*lines, "[All tables and figures](../paper.md)"]) + "\n"


def _verdict(x: Section) -> str:
    needs = "" if x.missing is None else f" {x.missing}"
    return f"**{_capital(x.judgement.verdict.value)}.** {x.judgement.because}{needs}"


def _link(x: Section, words: str) -> str:
    return f"[{words}](paper/{x.anchor}.md)"


def _first_table(tables: Sequence[Table]) -> list[str]:
    if not tables:
        return []
    table, more = tables[0], len(tables[0].rows) - ROWS
    lines = [f"{table.title}:", "", records.markdown(table.columns, table.rows[:ROWS]), ""]
    return [*lines, f"{more} more rows are in the record.", ""] if more > 0 else lines


OVERVIEW = ("where", "what", "verdict", "GPU minutes spent", "missing for a verdict")


def _overview(sections: Sequence[Section]) -> list[tuple[str, ...]]:
    return [(x.place, x.title, x.judgement.verdict.value, x.spent or "–", _needs(x)) for x in sections]


def _needs(x: Section) -> str:
    if x.missing is None:
        return "on its page" if x.judgement.verdict is Verdict.REFUSED else "–"
    return f"about {budget.rounded(x.missing.minutes)}" + ("" if x.missing.unit == "GPU-minutes" else " (CPU)")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def html(sections: Sequence[Section]) -> str:
    """The page as HTML."""
    try:
        from jinja2 import Environment
    except ImportError as error:
        raise HyperkronError("the page in HTML needs jinja2; pip install 'hyperkron[report]'.") from error
    template = (files("experiments.paper") / "page.html").read_text("utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    kinds = dict.fromkeys(Verdict, "none")
    kinds |= {Verdict.REPRODUCED: "yes", Verdict.TREND: "trend", Verdict.FAILED: "no"}
    return environment.from_string(template).render(
        title=TITLE, introduction=INTRODUCTION, sections=sections, kinds=kinds, capital=_capital, needs=_needs
    )


def write(sections: Sequence[Section], out: str | Path) -> list[Path]:
    """Write ``paper.md``, ``paper.html`` and the records ``paper/NAME.md`` into ``out``."""
    folder = Path(out)
    (folder / "paper").mkdir(parents=True, exist_ok=True)
    made = {folder / "paper.md": markdown(sections), folder / "paper.html": html(sections)}
    made |= {folder / "paper" / f"{x.anchor}.md": record(x) for x in sections if x.anchor}
    for path, text in made.items():
        path.write_text(text, "utf-8")
    return list(made)
