"""``python -m experiments.paper list``, ``run`` and ``report``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import paper
from experiments.paper.recipe import SCALES
from hyperkron.solution import HyperkronError

OK, ERROR, OUT_OF_TIME, INTERRUPTED = 0, 1, 3, 130
"""Exit codes; a mistake in the command is 2."""
PAGE_HELP = "folder for paper.md and figures (default: FOLDER/pages; of the recorded results, their pages)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    try:
        if options.command == "list":
            return _list(options)
        return _run(options, given) if options.command == "run" else _report(options)
    except KeyboardInterrupt:
        _say("Interrupted. Run the same command again to continue.")
        return INTERRUPTED
    except (HyperkronError, OSError) as error:
        _say(f"error: {error}")
        return ERROR


def _list(options: argparse.Namespace) -> int:
    """Print the recipes and their scales."""
    recipes, programs = paper.recipes().values(), paper.programs().values()
    if options.json:
        named = [{"name": r.name, "place": r.place, "scales": [*r.scales], "title": r.title} for r in recipes]
        own = [{"name": x.name, "place": x.place, "command": x.command, "title": x.title} for x in programs]
        print(json.dumps({"recipes": named, "programs": own}))
        return OK
    for recipe in recipes:
        print(f"{recipe.name:16} {recipe.place:24} {', '.join(recipe.scales):20} {recipe.title}")
    print("\nThese have a program of their own; `run NAME` tries it out at smoke scale and prints its command:")
    for program in programs:
        print(f"{program.name:16} {program.place:24} {'smoke':20} {program.title}")
    return OK


def _run(options: argparse.Namespace, given: list[str]) -> int:
    """Run one recipe, or all of them, and print the verdicts."""
    if options.name in paper.programs():
        return _try_out(options)
    tell = (lambda message: None) if options.quiet else _say
    tell(f"Running {options.name} at the scale {options.scale}; results go to {options.folder}")
    shared = {
        name: getattr(options, name) for name in ("seeds", "device", "folder", "data", "limit_minutes", "workers")
    }
    shared |= {"command": shlex.join(["python", "-m", "experiments.paper", *given]), "say": tell}
    try:
        if options.name == "all":
            found = paper.run_all(options.scale, **shared)
            wanted = {recipe.name for recipe in paper.meant_for(options.scale, options.device)}
        else:
            found = {options.name: paper.run(options.name, options.scale, **shared)}
            wanted = set(found)
    except paper.OutOfTime as error:
        _say(str(error))
        found, wanted = {}, {options.name}
    complete = wanted == set(found) and all(result.complete for result in found.values())
    judged = {name: paper.recipes()[name].judge(result) for name, result in found.items()}
    if options.json:
        verdicts = {name: {"verdict": one.verdict.value, "because": one.because} for name, one in judged.items()}
        print(json.dumps({"complete": complete, "verdicts": verdicts}))
    else:
        for name, one in judged.items():
            print(f"{name}: {one.verdict.value}. {one.because}")
    return OK if complete else OUT_OF_TIME


def _try_out(options: argparse.Namespace) -> int:
    """Run a program on made-up data; its long runs have a command of their own."""
    program = paper.programs()[options.name]
    if options.scale != "smoke":
        raise HyperkronError(f"scale={options.scale!r}: {program.name} has a program of its own: {program.command}")
    told = program.try_out(options.folder)
    print(json.dumps({"complete": True, "told": told}) if options.json else f"{program.name}: {told}")
    return OK


def _report(options: argparse.Namespace) -> int:
    """Write the page and print the names of its files."""
    folder = Path(options.folder)
    own = paper.PAGES if folder.resolve() == Path(paper.RESULTS).resolve() else folder / "pages"
    written = [str(path) for path in paper.report(folder, options.out or own)]
    print(json.dumps({"files": written}) if options.json else "\n".join(written))
    return OK


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m experiments.paper",
        description="The experiments of the paper: list them, run them, write the page.",
        epilog="exit codes: 0 success, 1 an error, 2 a mistake in the command, 3 stopped by --limit-minutes",
        allow_abbrev=False,
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parts = {
        name: commands.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
        for name, about in (
            ("list", "list the recipes and their scales"),
            ("run", "run a recipe, or continue an interrupted one"),
            ("report", "write the page"),
        )
    }
    run, report = parts["run"], parts["report"]
    run.add_argument("name", metavar="NAME", help="a recipe, or `all` for those meant for this scale and device")
    run.add_argument("--scale", choices=SCALES, default="smoke", help="how large (default: smoke)")
    run.add_argument("--seeds", type=int, metavar="N", help="number of seeds (default: the recipe's own)")
    run.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    run.add_argument("--limit-minutes", type=float, metavar="M", help="time limit; the same command continues")
    run.add_argument("--workers", type=int, default=1, metavar="N", help="processes, for recipes that can share work")
    run.add_argument("--folder", default="runs/paper", help="results and unfinished work (default: runs/paper)")
    run.add_argument("--data", metavar="FOLDER", help="folder with mnist/, cifar10/, wrench/ (default: ./data)")
    run.add_argument("--quiet", action="store_true", help="print only errors and the result")
    report.add_argument("--folder", default=paper.RESULTS, help="folder of results")
    report.add_argument("-o", "--out", help=PAGE_HELP)
    for part in parts.values():
        part.add_argument("--json", action="store_true", help="print one JSON object")
    return top


if __name__ == "__main__":
    sys.exit(main())
