"""Texts that users read are plain English; the list of odd phrases is short and grows when one is found."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ODD = (
    r"left away",
    r"leave \S+ away",
    r"(can|cannot) be had",
    r"go(es)? on with",
    r"going on with",
    r"dearest",
    r"apart by",
    r"anew",
    r"by means of",
    r"whereby",
    r"so many",
    r"it deserved",
    r"what it reached",
    r"of yours",
    r"(?<!there )is no (an? )?(file|folder|column|list|path|JSON|YAML|candidate|class|encoding|readable|whole|option)",
)
"""Phrases of the left column of our style guide, as regular expressions."""
_ODD = re.compile("|".join(rf"\b{phrase}\b" for phrase in ODD), re.IGNORECASE)
_READ = ("src", "docs", "README.md", "CONTRIBUTING.md", "benchmarks/performance-record.md", "examples")
_SUFFIXES = {".py", ".md", ".j2", ".js"}


def pages() -> list[Path]:
    """All tracked files that a user may read; without git, all that lie here."""
    try:
        done = subprocess.run(["git", "ls-files", *_READ], cwd=ROOT, capture_output=True, text=True, check=True)
        found = [ROOT / name for name in done.stdout.split("\n") if name]
    except (OSError, subprocess.CalledProcessError):
        places = [ROOT / name for name in _READ]
        found = [file for place in places for file in (place.rglob("*") if place.is_dir() else [place])]
    return sorted(path for path in found if path.suffix in _SUFFIXES and path.is_file())


def odd(text: str) -> list[str]:
    """The odd phrases of a text with what stands around them, also where a line ends within one."""
    joined = re.sub(r"\s+", " ", re.sub(r'"\s*\n\s*[frb]*"', "", text))
    return [joined[max(0, m.start() - 30) : m.end() + 30] for m in _ODD.finditer(joined)]


def test_texts_have_no_odd_phrases() -> None:
    found = {str(path.relative_to(ROOT)): hits for path in pages() if (hits := odd(path.read_text("utf-8")))}
    assert found == {}


def test_there_are_texts() -> None:
    names = {str(path.relative_to(ROOT)) for path in pages()}
    assert {"README.md", "docs/architecture.md", "src/hyperkron/cli/options.py"} <= names
    assert "src/hyperkron/cleaning/report/template.html.j2" in names


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("15 if left away", 1),
        ("apart by spaces or commas", 1),
        ("the encoder cannot\n    be had", 1),
        ('f"that is no "\n    f"column"', 1),
        ("'x' is no column of a.csv", 1),
        ("there is no file; it is no longer here", 0),
        ("Continue with the next step; another way", 0),
    ],
)
def test_odd_phrases_are_seen(text: str, count: int) -> None:
    assert len(odd(text)) == count


def named_paths(text: str) -> set[str]:
    """The files and folders that a page names in code: ``curvature/``, ``hypergradient/replay.py``."""
    spans = re.findall(r"`([\w./-]+(?:\.py|/))`", text)
    block = re.findall(r"^    ([\w/]+(?:\.py|/)) ", text, re.MULTILINE)
    return {*spans, *block}


def test_the_architecture_names_what_exists() -> None:
    """Every path on the page exists, and every part of the package is on the page."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    package = ROOT / "src" / "hyperkron"
    named = named_paths(text)
    assert len(named) > 25
    assert [name for name in sorted(named) if not ((ROOT / name).exists() or (package / name).exists())] == []
    parts = {path.name + "/" if path.is_dir() else path.name for path in package.iterdir() if path.name[0] not in "_."}
    assert parts - named - {"py.typed"} == set()
