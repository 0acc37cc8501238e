"""No Markdown page has a dead link."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def pages() -> list[str]:
    """All tracked Markdown files; without git, all that lie here."""
    try:
        done = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
        return sorted(name for name in done.stdout.split("\n") if name and (ROOT / name).exists())
    except (OSError, subprocess.CalledProcessError):
        kept = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
        return sorted(str(path) for path in kept if not path.parts[0].startswith("."))


def anchors(text: str) -> set[str]:
    """What a link can point to after ``#``: headings, as GitHub spells them."""
    headings = re.findall(r"^#+ +(.*?)\s*$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead(page: Path, text: str) -> list[str]:
    """The relative links of a page that lead nowhere."""
    found = []
    for link in _LINK.findall(_CODE.sub("", text)):
        path, _, anchor = unquote(link).partition("#")
        if re.match(r"[a-z][a-z+.-]*:", path):
            continue
        target = page.parent / path if path else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))
        ):
            found.append(link)
    return found


@pytest.mark.parametrize("name", pages())
def test_relative_links_lead_somewhere(name: str) -> None:
    assert dead(ROOT / name, (ROOT / name).read_text("utf-8")) == []


def test_dead_links_are_seen(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One heading: `x`\n", "utf-8")
    text = "[a](other.md) [b](missing.md) ![c](no.png) [d](https://x.y/z.md)"
    text += " [e](other.md#one-heading-x) [f](other.md#two)"
    page = tmp_path / "page.md"
    page.write_text(text, "utf-8")
    assert dead(page, text + " `[g](code.md)`") == ["missing.md", "no.png", "other.md#two"]


def test_there_are_pages() -> None:
    assert {"README.md", "docs/paper.md", "experiments/README.md"} <= set(pages())
