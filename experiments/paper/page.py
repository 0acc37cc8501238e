"""Every table and figure of the paper, with a plain verdict and a link to what it rests on.

``paper.md`` has a paragraph for each; ``paper/NAME.md`` is the whole record of a recipe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments import records
from experiments.paper import budget
from experiments.paper.budget import Missing
from experiments.paper.long_runs import Program
from experiments.paper.recipe import SCALES, Judgement, Recipe, Result, Table, Verdict
from experiments.paper.visits import Visits

TITLE = "The paper, reproduced"
INTRODUCTION = (
    "Every table and figure of Liao, Dangel & Yu, “Efficient bilevel optimization with KFAC-based hypergradients” "
    "(AISTATS 2026). A verdict follows a rule that is part of the experiment; the page behind each link prints it, "
    "with ours beside the numbers of the paper's tables (its figures have none) and how the set-up differs. All "
    "methods of a comparison have the same parameters, batches and seeds; each is tuned over its own grid on a second"
    " validation part, and the test figure that counts is the one where that part is best. ± is half a 95 % interval "
    "over seeds. Where weights of examples are learned, a verdict needs runs of 1000 outer steps, or as many updates "
    "of a weight. GPU minutes are those of one NVIDIA H200: spent on all recorded runs of the row, and missing for a "
    "verdict by the measured time of a step."
)


@dataclass(frozen=True)
class Section:
    """What the page says about one table or figure.

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


def of_program(program: Program) -> Section:
    """The section of a program."""
    return Section(
        program.title,
        program.place,
        program.judge(),
        longer=program.page,
        rule=program.rule,
        spent="with Figure 2" if program.spent is None else budget.rounded(program.spent()),
    )


def section(
    recipe: Recipe,
    result: Result | None,
    figures: Path,
    longer: tuple[Judgement, str] | None = None,
    missing: Missing | None = None,
) -> Section:
    """The section of a recipe, with its figures drawn into ``figures``.

    Args:
        longer: the verdict of its runs of the paper's length, which is the one that counts, and their page.
        missing: GPU minutes that a verdict needs; shown where there is none.
    """
    shown = result if result is not None and result.scale in recipe.judged else None
    paths: list[Path] = []
    if shown is not None and recipe.plot is not None:
        figures.mkdir(parents=True, exist_ok=True)
        paths = recipe.plot(shown, figures)
    own = recipe.judge(result)
    counts, page = (own, "") if longer is None else longer
    return Section(
        recipe.title,
        recipe.place,
        counts,
        shorter=None if longer is None else own,
        longer=page,
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
    most = "up to " if result.figures.get("cut_short") and count > 1 else ""
    alone = result.busy if result.hardware.get("threads") == 1 and "gpu" not in result.hardware else None
    busy = "" if alone is None else f", {alone:.0f} s of them computing"
    return (
        f"{result.scale} scale, {most}{count} seed{'s' * (count > 1)}{part}; "
        f"`{result.command or 'by a script'}`; {machine}; "
        f"torch {result.versions.get('torch')}; {result.seconds:.0f} s{busy}; "
        f"experiments/results/paper/{result.name}-{result.scale}.json"
    )


def markdown(sections: Sequence[Section]) -> str:
    """The short page: the verdicts at a glance, then a paragraph and links for each."""
    lines = [f"# {TITLE}", "", INTRODUCTION, "", records.markdown(OVERVIEW, _overview(sections)), ""]
    for x in sections:
        links = [f"[Tables, rule and command]({x.longer})"] if x.longer else []
        if x.anchor:
            links.append(_link(x, "the record of shorter runs" if x.longer else "The record"))
        lines += [f"## {x.place}: {x.title}", "", f"{_verdict(x)} {'; '.join(links)}.", ""]
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
    return f"**{x.judgement.verdict.value.capitalize()}.** {x.judgement.because}{needs}"


def _link(x: Section, words: str) -> str:
    return f"[{words}](paper/{x.anchor}.md)"


OVERVIEW = ("where", "what", "verdict", "GPU minutes spent", "missing for a verdict")


def _overview(sections: Sequence[Section]) -> list[tuple[str, ...]]:
    return [(x.place, x.title, x.judgement.verdict.value, x.spent or "–", _needs(x)) for x in sections]


def _needs(x: Section) -> str:
    if x.missing is None:
        return "on its page" if x.judgement.verdict is Verdict.REFUSED else "–"
    return f"about {budget.rounded(x.missing.minutes)}"


def write(sections: Sequence[Section], out: str | Path) -> list[Path]:
    """Write ``paper.md`` and the records ``paper/NAME.md`` into ``out``."""
    folder = Path(out)
    (folder / "paper").mkdir(parents=True, exist_ok=True)
    made = {folder / "paper.md": markdown(sections)}
    made |= {folder / "paper" / f"{x.anchor}.md": record(x) for x in sections if x.anchor}
    for path, text in made.items():
        path.write_text(text, "utf-8")
    return list(made)
