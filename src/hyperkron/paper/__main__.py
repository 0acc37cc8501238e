"""``python -m hyperkron.paper list | run NAME | run all | report``."""

from __future__ import annotations

import argparse
import shlex
import sys

from hyperkron import paper
from hyperkron.paper.recipe import SCALES
from hyperkron.solution import HyperkronError


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(prog="python -m hyperkron.paper", description="The paper's experiments.")
    commands = top.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the recipes and their scales")
    run = commands.add_parser("run", help="run a recipe, or continue an interrupted run")
    run.add_argument("name", help="a recipe, or `all` for every one that this scale and device are meant for")
    run.add_argument("--scale", choices=SCALES, default="smoke")
    run.add_argument("--seeds", type=int, default=None, help="how many; by default the recipe's own number")
    run.add_argument("--device", default="cpu")
    run.add_argument("--folder", default="runs/paper", help="of results and cell caches")
    run.add_argument("--data", default=None, help="folder with mnist/, cifar10/, wrench/ (default: ./data)")
    run.add_argument("--limit-minutes", type=float, default=None)
    report = commands.add_parser("report", help="write the page")
    report.add_argument("--folder", default="docs/results/paper", help="of results")
    report.add_argument("--out", default="docs", help="where paper.md and paper.html go")
    return top


def main(arguments: list[str] | None = None) -> int:
    """Parse, call, print; 0 where all went well, 3 where a time limit ended the run, 2 for a mistake."""
    given = sys.argv[1:] if arguments is None else arguments
    options = parser().parse_args(given)
    try:
        if options.command == "list":
            for recipe in paper.recipes().values():
                print(f"{recipe.name:16} {recipe.place:24} {', '.join(recipe.scales):20} {recipe.title}")
            return 0
        if options.command == "report":
            print(*paper.report(options.folder, options.out), sep="\n")
            return 0
        command = shlex.join(["python", "-m", "hyperkron.paper", *given])
        shared = {"seeds": options.seeds, "device": options.device, "folder": options.folder, "data": options.data}
        shared |= {"limit_minutes": options.limit_minutes, "command": command}
        if options.name == "all":
            found = paper.run_all(options.scale, say=_say, **shared)
            wanted = {recipe.name for recipe in paper.meant_for(options.scale, options.device)}
        else:
            found = {options.name: paper.run(options.name, options.scale, say=_say, **shared)}
            wanted = set(found)
    except paper.OutOfTime as error:
        print(error, file=sys.stderr)
        return 3
    except HyperkronError as error:
        print(error, file=sys.stderr)
        return 2
    for name, result in found.items():
        judgement = paper.recipes()[name].judge(result)
        print(f"{name}: {judgement.verdict.value}. {judgement.because}")
    return 0 if wanted == set(found) and all(result.complete for result in found.values()) else 3


def _say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
