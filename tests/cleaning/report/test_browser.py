"""The report in a real Chromium: it renders, works offline, and runs no script but its own."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browsing import SUSPECTS, Opened, open_page
from hyperkron.cleaning.config import DESCRIPTIONS
from hyperkron.cleaning.report import write_report
from run_folder import picture, write_json, write_run_folder, write_suspects

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# --- it renders --------------------------------------------------------------------------------------------


def test_it_renders_offline_without_a_word(opened: Opened) -> None:
    assert opened.page.get_by_role("heading", level=1).inner_text() == "Use the cleaned model."
    assert opened.page.get_by_role("heading", level=2).count() == 7
    assert opened.column("#") == [str(i) for i in range(1, 51)]
    assert opened.column("Row") == [str(s["row"]) for s in SUSPECTS[:50]]
    assert opened.page.locator(".spark polyline").count() == 50
    assert opened.page.locator("svg.plot .dot").count() == 6
    box = opened.page.locator("svg.plot").first.bounding_box()
    assert box is not None and box["width"] > 100 and box["height"] > 50


@pytest.mark.parametrize("kind", ["image", "table"])
def test_pictures_and_features(browser: Browser, tmp_path: Path, kind: str) -> None:
    opened = open_page(browser, write_report(write_run_folder(tmp_path, kind=kind)))
    if kind == "image":
        first = opened.page.locator("img.picture").first
        assert first.evaluate("picture => picture.decode().then(() => picture.naturalWidth)") == 16
    else:
        assert opened.page.locator("#rows tr").first.locator("dt").count() == 8
        opened.page.get_by_role("button", name="Show 4 more").first.click()
        assert opened.page.locator("#rows tr").first.locator("dt").count() == 12
    opened.quiet()
    opened.page.context.close()


@pytest.mark.parametrize("content", [{}, {"suspects": {"count": 0}}, {"candidates": []}])
def test_a_folder_with_little_in_it(browser: Browser, tmp_path: Path, content: dict[str, Any]) -> None:
    write_json(tmp_path / "result.json", {"format": 1, **content})
    opened = open_page(browser, write_report(tmp_path))
    assert opened.page.get_by_role("heading", level=1).inner_text() == "No model was chosen."
    assert opened.page.locator("#table").count() == 0
    opened.quiet()
    opened.page.context.close()


def test_nothing_is_wider_than_the_screen(browser: Browser, tmp_path: Path) -> None:
    names = tuple(f"a class with a rather long name {'x' * 60} {i}" for i in range(25))
    file = write_report(write_run_folder(tmp_path, classes=names))
    opened = open_page(browser, file)
    for width in (360, 800, 1300):
        opened.page.set_viewport_size({"width": width, "height": 800})
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.page.context.close()


CONTRASTS = """() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = (c) => c.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = rgba(getComputedStyle(e).backgroundColor);
      if (color[3] === 255) return color;
    }
    return [255, 255, 255, 255];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest("title")) continue;
    const style = getComputedStyle(element), drawn = element instanceof SVGElement;
    const [a, b] = [light(rgba(drawn ? style.fill : style.color)), light(behind(element))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
  }
  return found;
}"""


def test_every_text_has_the_contrast_of_wcag_aa(browser: Browser, tmp_path: Path) -> None:
    graded = [[0.1 if i == j else 0.9 * j / 45 for j in range(10)] for i in range(10)]
    noise, unstable = {"rate": 0.4, "matrix": graded}, {"cut": 0.5, "stable": 0.5}  # with an alarm
    file = write_report(write_run_folder(tmp_path, classes=tuple("0123456789"), noise=noise, suspects=unstable))
    opened = open_page(browser, file)
    opened.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    shades = opened.page.evaluate("new Set([...document.querySelectorAll('.heat td')].map((c) => c.className)).size")
    assert shades == 12  # ten of noise, the diagonal and the corner
    white = "rgb(255, 255, 255)"  # paper
    schemes: list[tuple[Any, Any, str]] = [("light", "screen", "rgb(246, 246, 243)")]
    for scheme, media, page in [*schemes, ("dark", "screen", "rgb(18, 21, 25)"), ("dark", "print", white)]:
        opened.page.emulate_media(color_scheme=scheme, media=media)
        assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == page
        contrasts = opened.page.evaluate(CONTRASTS)
        assert len(contrasts) > 500
        assert [pair for pair in contrasts if pair[0] < 4.5] == []
    opened.page.context.close()


BOXES = """lines => lines.map((line) =>
  [".name", ".value"].map((part) => line.querySelector(part).getBoundingClientRect().toJSON()))"""


def test_a_phone_shows_every_figure_of_the_candidates(browser: Browser, tmp_path: Path) -> None:
    names = [*DESCRIPTIONS][:12]
    figures = {"accuracy": 1.0, "low": 0.9412, "high": 1.0, "rows": 60, "seconds": 9.5, "test_accuracy": 0.9}
    known = [{"name": x, "description": DESCRIPTIONS[x], "different": False, **figures} for x in names]
    file = write_report(write_run_folder(tmp_path, candidates=known))
    opened = open_page(browser, file, viewport={"width": 390, "height": 800})
    drawn = opened.page.locator(".plot .candidate").evaluate_all(BOXES)
    assert len(drawn) == 12 and all(name["left"] >= 0 and name["right"] < value["left"] for name, value in drawn)
    opened.page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    for cells in ("#accuracy td", "#messages td"):
        boxes = [cell.bounding_box() for cell in opened.page.locator(cells).all()]
        assert len(boxes) >= 12
        assert all(box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
    assert not opened.page.locator("#accuracy thead").is_visible()  # each figure bears its own name
    first = opened.page.locator("#accuracy tbody tr").first.locator("td")
    names = first.evaluate_all("cells => cells.map((cell) => getComputedStyle(cell, '::before').content)")
    assert names == [
        f'"{name}"' for name in ("95% interval", "Accuracy", "Points from the chosen", "Test accuracy", "Time")
    ]
    opened.quiet()


# --- hostile data cannot run a script ----------------------------------------------------------------------

LONE = "\ud800"  # half of a character: JSON can hold it, UTF-8 cannot
ATTACKS = (
    "<script>window.__owned=1;alert(1)</script>",
    "</script><script>window.__owned=1;alert(1)</script>",
    "</textarea></title></style></option></select></svg><script>window.__owned=1</script>",
    "<img src=x onerror='window.__owned=1;alert(1)'>",
    "<svg onload='window.__owned=1;alert(1)'><animate onbegin='window.__owned=1'></svg>",
    "<a href='javascript:window.__owned=1'>click</a>",
    "javascript:window.__owned=1",
    "\" onmouseover=\"window.__owned=1\" autofocus onfocus=\"window.__owned=1\" x=\"",
    "' onfocus='window.__owned=1' autofocus '",
    "<iframe srcdoc='<script>parent.__owned=1</script>'></iframe>",
    "<meta http-equiv=refresh content='0;url=https://example.com'>",
    "<link rel=stylesheet href=https://example.com/a.css><base href=https://example.com/>",
    "<!--<script>", "]]>", "{{7*7}}{% raw %}${7*7}<%= 7*7 %>", "{{ self.__init__.__globals__ }}",
    "line\u2028separator\u2029window.__owned=1", "\u202egnorw\u202c right-to-left \u2066", "\x00\x1b[31m", LONE,
    "__proto__", "constructor",
)  # fmt: skip
PICTURES = (
    "data:image/svg+xml;base64," + base64.b64encode(b"<svg xmlns='http://www.w3.org/2000/svg' onload='a()'/>").decode(),
    "data:text/html;base64," + base64.b64encode(b"<script>parent.__owned=1</script>").decode(),
    "javascript:window.__owned=1",
    "https://example.com/a.png",
    picture(0) + "' onerror='window.__owned=1",
    "x\" onerror=\"window.__owned=1",
)  # fmt: skip


def write_hostile_folder(folder: Path) -> Path:
    """Every string that can be hostile is."""
    write_run_folder(folder, classes=tuple(a for a in ATTACKS if a != LONE))
    result = json.loads((folder / "result.json").read_text("utf-8"))
    for key in ("verdict", "command", "hardware", "created", "hyperkron"):
        result[key] = "".join(ATTACKS)
    result["data"]["messages"] = list(ATTACKS)
    result["versions"] = dict.fromkeys(ATTACKS, ATTACKS[0])
    result["candidates"] = [{"name": a, "description": a, "accuracy": 0.5} for a in ATTACKS]
    result["chosen"] = ATTACKS[1]
    write_json(folder / "result.json", result)
    write_json(folder / "config.json", {a: [a] for a in ATTACKS})
    suspects = [
        {"row": i, "given": a, "suggested": ATTACKS[i - 1], "text": a, "features": {a: a, "__proto__": {a: a}}}
        for i, a in enumerate(ATTACKS)
    ]
    write_suspects(folder, suspects + [{"row": 99, "given": "g", "suggested": "s", "image": p} for p in PICTURES])
    return folder


def test_hostile_data_cannot_run_a_script(browser: Browser, tmp_path: Path) -> None:
    opened = open_page(browser, write_report(write_hostile_folder(tmp_path)))
    page = opened.page
    assert opened.column("#") == [str(i) for i in range(1, len(ATTACKS) + len(PICTURES) + 1)]
    shown = page.locator("#rows .text").evaluate_all("texts => texts.map((text) => text.textContent)")
    assert shown[:18] == list(ATTACKS[:18])  # all of them are there, as words
    assert "{{7*7}}" in page.locator("#configuration").evaluate("part => part.textContent")
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.evaluate(
        "for (const e of document.querySelectorAll('*'))"
        " for (const kind of ['mouseover', 'focus', 'load', 'error']) e.dispatchEvent(new Event(kind))"
    )
    for name in ("Given", "Example", "Suggested"):
        opened.sort(name)
    for chip in page.locator(".chip").all():
        chip.click()
        assert len(opened.column("Given")) == int(chip.locator("b").inner_text())
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("searchbox", name="Search", exact=True).fill("</script>")
    page.wait_for_timeout(100)
    assert page.evaluate("window.__owned") is None and page.url == (tmp_path / "report.html").as_uri()
    counts = page.evaluate(
        "['script', 'iframe', 'img', 'base', 'link[rel=stylesheet]', 'a:not([href^=\"#\"])', 'animate']"
        ".map((name) => document.querySelectorAll(name).length)"
    )
    assert counts == [2, 0, 0, 0, 0, 0, 0]
    opened.quiet()
    page.context.close()


def test_the_policy_stops_what_slips_through(browser: Browser, file: Path, tmp_path: Path) -> None:
    """The second wall: a script, a handler and a request that somehow got into the page do not work."""
    text = file.read_text("utf-8")
    extra = "<script>window.__owned=1</script><img src='https://example.com/a.png' onerror='window.__owned=1'>"
    (tmp_path / "report.html").write_text(text.replace("<main>", f"<main>{extra}", 1), "utf-8")
    opened = open_page(browser, tmp_path / "report.html")
    opened.page.wait_for_timeout(100)
    assert opened.page.evaluate("window.__owned") is None
    assert len(opened.complaints) >= 2 and all("Content Security Policy" in c for c in opened.complaints)
    assert len(opened.column("#")) == 50  # the report's own script does
    opened.page.context.close()
