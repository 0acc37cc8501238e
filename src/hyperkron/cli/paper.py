"""``hyperkron paper list``, ``run`` and ``report``."""

from __future__ import annotations

import shlex
from typing import Any

from hyperkron.cli.output import say, say_json

OUT_OF_TIME = 3
"""The exit code where a time limit ended the run."""


def list_recipes(options: Any, given: list[str]) -> int:
    """The recipes and their scales."""
    from hyperkron import paper

    recipes = paper.recipes().values()
    if options.json:
        named = [{"name": r.name, "place": r.place, "scales": [*r.scales], "title": r.title} for r in recipes]
        say_json({"recipes": named})
        return 0
    for recipe in recipes:
        print(f"{recipe.name:16} {recipe.place:24} {', '.join(recipe.scales):20} {recipe.title}")
    return 0


def run(options: Any, given: list[str]) -> int:
    """Run a recipe, or all; 3 where the time limit came first."""
    if not options.quiet:
        say(f"Running {options.name} at the scale {options.scale}; results go to {options.folder}")
    from hyperkron import paper

    def tell(message: str) -> None:
        if not options.quiet:
            say(message)

    shared = {
        name: getattr(options, name) for name in ("seeds", "device", "folder", "data", "limit_minutes", "workers")
    }
    shared |= {"command": shlex.join(["hyperkron", *given]), "say": tell}
    try:
        if options.name == "all":
            found = paper.run_all(options.scale, **shared)
            wanted = {recipe.name for recipe in paper.meant_for(options.scale, options.device)}
        else:
            found = {options.name: paper.run(options.name, options.scale, **shared)}
            wanted = set(found)
    except paper.OutOfTime as error:
        say(str(error))
        found, wanted = {}, {options.name}
    complete = wanted == set(found) and all(result.complete for result in found.values())
    judged = {name: paper.recipes()[name].judge(result) for name, result in found.items()}
    if options.json:
        verdicts = {name: {"verdict": one.verdict.value, "because": one.because} for name, one in judged.items()}
        say_json({"complete": complete, "verdicts": verdicts})
    else:
        for name, one in judged.items():
            print(f"{name}: {one.verdict.value}. {one.because}")
    return 0 if complete else OUT_OF_TIME


def write_page(options: Any, given: list[str]) -> int:
    """Write the page."""
    from hyperkron import paper

    written = [str(path) for path in paper.report(options.folder, options.out)]
    if options.json:
        say_json({"files": written})
    else:
        print(*written, sep="\n")
    return 0
