"""One page with every table and figure of the paper: what it printed, what we found, and a plain verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

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
    "`hyperkron paper`, it is `python -m experiments.paper` today."
)


@dataclass(frozen=True)
class Section:
    """What the page says about one recipe, or about a place of the paper without one."""

    title: str
    place: str
    judgement: Judgement
    rule: str = ""
    note: str = ""
    made: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[str] = ()
    anchor: str = ""
    answer: Sequence[str] = ()


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


def section(recipe: Recipe, result: Result | None, figures: Path) -> Section:
    """The section of a recipe, with its figures drawn into ``figures``."""
    shown = result if result is not None and result.scale in recipe.judged else None
    paths: list[Path] = []
    if shown is not None and recipe.plot is not None:
        figures.mkdir(parents=True, exist_ok=True)
        paths = recipe.plot(shown, figures)
    rule = " ".join((recipe.verdict.__doc__ or "").split())
    return Section(
        recipe.title,
        recipe.place,
        recipe.judge(result),
        rule,
        recipe.note,
        _made(result),
        [*recipe.tables(shown), *_updates(recipe.weights(shown) if shown is not None else ())],
        [f"figures/paper/{path.name}" for path in paths],
        recipe.name,
        recipe.answer(shown) if shown is not None and recipe.answer is not None else (),
    )


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
    """The page as Markdown."""
    lines = [f"# {TITLE}", "", INTRODUCTION, "", *_grid(("where", "what", "verdict"), _overview(sections)), ""]
    for x in sections:
        lines += [
            f"## {x.place}: {x.title}",
            "",
            f"**{_capital(x.judgement.verdict.value)}.** {x.judgement.because}",
            "",
            *(f"- {text}" for text in x.answer),
            *([""] if x.answer else []),
        ]
        lines += [line for text in (x.note, f"*Rule:* {x.rule}" if x.rule else "") if text for line in (text, "")]
        for table in x.tables:
            lines += [f"{table.title}:", "", *_grid(table.columns, table.rows), ""]
        lines += [line for path in x.figures for line in (f"![{x.title}]({path})", "")]
        lines += [f"*Made by:* {x.made}", ""] if x.made else []
    return "\n".join(lines).rstrip() + "\n"


def _overview(sections: Sequence[Section]) -> list[tuple[str, str, str]]:
    return [(x.place, x.title, x.judgement.verdict.value) for x in sections]


def _grid(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [columns, ["---"] * len(columns), *rows]
    return ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells]


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
        title=TITLE, introduction=INTRODUCTION, sections=sections, kinds=kinds, capital=_capital
    )


def write(sections: Sequence[Section], out: str | Path) -> list[Path]:
    """Write ``paper.md`` and ``paper.html`` into ``out``."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    made = {folder / "paper.md": markdown(sections), folder / "paper.html": html(sections)}
    for path, text in made.items():
        path.write_text(text, "utf-8")
    return list(made)
