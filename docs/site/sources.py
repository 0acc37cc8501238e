"""Puts together what the documentation site is made of: ``python docs/site/sources.py FOLDER``.

The folder has the layout of the repository, so that the links of its pages hold: README.md is the front page, ``docs/``
what a user reads, ``experiments/pages/`` the records. Programs of ``examples/`` become pages, and the reference has a
page for every part of the package, whose docstrings mkdocs fills in. A link to anything else becomes plain text.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import posixpath
import re
import shutil
from pathlib import Path

import hyperkron as hk

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("docs/*.md", "experiments/**/*.md", "benchmarks/*.md", "README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PICTURES = ("docs/images/*", "experiments/pages/**/*.png", "experiments/pages/**/*.svg")
PARTS = (
    *("losses", "curvature", "solvers", "hypergradient", "algorithms", "training"),
    *("attribution", "cleaning", "cleaning.data", "sweeps"),
)
"""The parts of the package that have names beside those at the top."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def pages(root: Path = ROOT) -> dict[str, str]:
    """Every page, by its path in the repository."""
    found = sorted(path for pattern in PAGES for path in root.glob(pattern))
    texts = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in found}
    return texts | {path: example(root / path) for path in examples(root)} | reference()


def examples(root: Path = ROOT) -> list[str]:
    """The programs of ``examples/``, which become pages of their own names."""
    return sorted(path.relative_to(root).as_posix() for path in root.glob("examples/*.py"))


def example(path: Path) -> str:
    """A program as a page."""
    return f"# {path.name}\n\n```python\n{path.read_text('utf-8').rstrip()}\n```\n"


def reference() -> dict[str, str]:
    """The pages of the reference: the names at the top, then those of every part."""
    top = [name for name in hk.__all__ if not inspect.ismodule(getattr(hk, name))]
    lists = {"hyperkron": (top, hk)}
    for part in PARTS:
        module = importlib.import_module(f"hyperkron.{part}")
        lists[f"hyperkron.{part}"] = ([name for name in module.__all__ if name not in top], module)
    return {f"reference/{title}.md": _listed(title, names, module) for title, (names, module) in lists.items()}


def _listed(title: str, names: list[str], module: object) -> str:
    about = (inspect.getdoc(module) or "").splitlines()[0]
    entries = [f"::: {_home(module, name)}\n    options:\n      heading: {name}\n" for name in names]
    return "\n".join([f"# {title}\n", f"{about}\n", *entries])


def _home(module: object, name: str) -> str:
    """Where a public name is defined: classes and functions there, all else where it is public."""
    found = getattr(module, name)
    if inspect.isclass(found) or inspect.isfunction(found):
        return f"{found.__module__}.{found.__qualname__}"
    return f"{getattr(module, '__name__', 'hyperkron')}.{name}"


def linked(text: str, page: str, site: set[str], titles: dict[str, str] | None = None) -> str:
    """``text`` of ``page`` with links that hold on the site: of programs to their pages, of what is not there none.

    A link whose words are the name of a file gets the title of that page.
    """
    titles = titles or {}

    def link(match: re.Match[str]) -> str:
        mark, words, target = match.groups()
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target) or not path:
            return match.group()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        if place in site:
            words = titles.get(place, words) if words.endswith(".md") else words
            there = posixpath.relpath(at(place), posixpath.dirname(at(page)) or ".")
            return f"{mark}[{words}]({there}{'#' if anchor else ''}{anchor})"
        return words if mark else f"{words} (`{place}` in the repository)"

    done, begin = [], 0
    for block in CODE.finditer(text):  # links in code stay
        done += [LINK.sub(link, text[begin : block.start()]), block.group()]
        begin = block.end()
    return "".join([*done, LINK.sub(link, text[begin:])])


def at(path: str) -> str:
    """Where a file of the repository lies on the site."""
    return {"README.md": "index.md"}.get(path, re.sub(r"\.py$", ".md", path))


def write(folder: Path, root: Path = ROOT) -> int:
    """Everything into ``folder``, which is emptied first; the number of pages."""
    shutil.rmtree(folder, ignore_errors=True)
    texts = pages(root)
    pictures = [p.relative_to(root).as_posix() for pattern in PICTURES for p in root.glob(pattern) if p.is_file()]
    site = {*texts, *pictures}
    titles = {page: match[1] for page, text in texts.items() if (match := re.match("# (.*)", text))}
    for page, text in texts.items():
        target = folder / at(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text if page.startswith("reference/") else linked(text, page, site, titles), "utf-8")
    for picture in pictures:
        (folder / picture).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / picture, folder / picture)
    return len(texts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The sources of the documentation site.")
    parser.add_argument("folder", type=Path, help="emptied first")
    where = parser.parse_args().folder
    print(f"{write(where)} pages in {os.fspath(where)}")
