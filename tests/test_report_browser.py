"""The report in a real Chromium: it renders, sorts, filters, pages, works offline, and runs no script but its own."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hyperkron.report import write_report
from run_folder import CLASSES, make_rows, make_suspects, picture, write_json, write_run_folder, write_suspects

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
SUSPECTS = make_suspects(make_rows(CLASSES, 300, 0.4), "text")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None  # type: ignore[assignment]
    if CHROMIUM is None or sync_playwright is None:
        reason = "Chromium is not installed" if CHROMIUM is None else "playwright is not installed"
        if os.environ.get("HYPERKRON_REQUIRE_BROWSER") == "1":
            pytest.fail(f"{reason}, but HYPERKRON_REQUIRE_BROWSER=1 asks for it")
        pytest.skip(f"{reason}; set HYPERKRON_REQUIRE_BROWSER=1 to make this a failure")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page with everything it complained about, asked for, or popped up."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def column(self, name: str) -> list[str]:
        """The texts of one column on the current page of the table."""
        cells = self.page.locator(f'#rows td[data-label="{name}"]').all_inner_texts()
        return [cell.replace("\u00a0", " ").strip() for cell in cells]

    @property
    def status(self) -> str:
        return self.page.locator("#status").inner_text()

    def sort(self, name: str) -> str | None:
        """Click a header; how the column is sorted then."""
        self.page.get_by_role("columnheader", name=name, exact=True).get_by_role("button").click()
        return self.page.get_by_role("columnheader", name=name, exact=True).get_attribute("aria-sort")

    def quiet(self) -> None:
        """Nothing was complained about, asked for, or popped up."""
        assert (self.complaints, self.requests, self.dialogs) == ([], [], [])


def open_page(browser: Browser, file: Path, **context: Any) -> Opened:
    """Open a file without a network."""
    made = browser.new_context(reduced_motion="reduce", **context)
    made.set_default_timeout(10_000)
    made.set_offline(True)
    opened = Opened(made.new_page())

    def dismiss(dialog: Any) -> None:
        opened.dialogs.append(dialog.message)
        dialog.dismiss()

    def note_request(request: Any) -> None:
        if request.url != file.as_uri() and not request.url.startswith("data:"):
            opened.requests.append(request.url)

    opened.page.on("console", lambda message: opened.complaints.append(message.text))
    opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.page.on("dialog", dismiss)
    opened.page.on("request", note_request)
    opened.page.goto(file.as_uri())
    return opened


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run_folder(tmp_path_factory.mktemp("runs") / "mine"))


@pytest.fixture
def opened(browser: Browser, file: Path) -> Iterator[Opened]:
    opened = open_page(browser, file)
    yield opened
    opened.quiet()
    opened.page.context.close()


# --- it renders --------------------------------------------------------------------------------------------


def test_it_renders_offline_without_a_word(opened: Opened) -> None:
    assert opened.page.get_by_role("heading", level=1).inner_text() == "Use weighted and trusted."
    assert opened.page.get_by_role("heading", level=2).count() == 8
    assert opened.column("#") == [str(i) for i in range(1, 51)]
    assert opened.column("Row") == [str(s["row"]) for s in SUSPECTS[:50]]
    assert opened.page.locator(".spark polyline").count() == 50
    assert opened.page.locator("svg.plot .dot").count() == 6
    box = opened.page.locator("svg.plot .curve").first.bounding_box()
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


@pytest.mark.parametrize("content", [{}, {"suspects": {"count": 0}}, {"candidates": [], "curves": []}])
def test_a_folder_with_little_in_it(browser: Browser, tmp_path: Path, content: dict[str, Any]) -> None:
    write_json(tmp_path / "result.json", {"format": 1, **content})
    opened = open_page(browser, write_report(tmp_path))
    assert opened.page.get_by_role("heading", level=1).inner_text() == "No model was chosen."
    assert opened.page.locator("#table").count() == 0
    opened.quiet()
    opened.page.context.close()


@pytest.mark.parametrize("width", [360, 800, 1300])
def test_nothing_is_wider_than_the_screen(browser: Browser, tmp_path: Path, width: int) -> None:
    names = tuple(f"a class with a rather long name {'x' * 60} {i}" for i in range(25))
    file = write_report(write_run_folder(tmp_path, classes=names))
    opened = open_page(browser, file, viewport={"width": width, "height": 800})
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


@pytest.mark.parametrize(("scheme", "media"), [("light", "screen"), ("dark", "screen"), ("dark", "print")])
def test_every_text_has_the_contrast_of_wcag_aa(browser: Browser, tmp_path: Path, scheme: Any, media: Any) -> None:
    graded = [[0.1 if i == j else 0.9 * j / 45 for j in range(10)] for i in range(10)]
    noise = {"rate": 0.4, "matrix": graded}
    file = write_report(write_run_folder(tmp_path, classes=tuple("0123456789"), noise=noise, collapsed=True))
    opened = open_page(browser, file, color_scheme=scheme)
    opened.page.emulate_media(media=media)
    opened.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    shades = opened.page.evaluate("new Set([...document.querySelectorAll('.heat td')].map((c) => c.className)).size")
    contrasts = opened.page.evaluate(CONTRASTS)
    assert shades == 12 and len(contrasts) > 500  # ten shades, the diagonal and the corner
    assert [pair for pair in contrasts if pair[0] < 4.5] == []
    shade = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert shade == {"screen light": "rgb(246, 246, 243)", "screen dark": "rgb(18, 21, 25)"}.get(
        f"{media} {scheme}",
        "rgb(255, 255, 255)",  # paper is white
    )
    opened.page.context.close()


# --- it sorts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key"),
    [("Row", "row"), ("Error probability", "error_probability"), ("Weight", "weight")],
)
def test_it_sorts_by_numbers(opened: Opened, name: str, key: str) -> None:
    found = {opened.sort(name): opened.column("#") for _ in range(2)}
    assert list(found) == (["ascending", "descending"] if key == "row" else ["descending", "ascending"])
    for way, sign in (("ascending", 1), ("descending", -1)):
        keys = [sign * suspect[key] for suspect in SUSPECTS]
        ranks = sorted(range(len(keys)), key=keys.__getitem__)
        assert found[way] == [str(rank + 1) for rank in ranks[:50]]
    assert opened.page.locator("th[aria-sort]").count() == 1


@pytest.mark.parametrize(("name", "key"), [("Given", "given"), ("Suggested", "suggested"), ("Example", "text")])
def test_it_sorts_by_words(opened: Opened, name: str, key: str) -> None:
    assert opened.sort(name) == "ascending"
    ranked = sorted(enumerate(SUSPECTS, 1), key=lambda item: (item[1][key].lower(), item[0]))
    if key == "text":  # how a browser collates spaces is its own affair: the first words suffice
        words = [text.split()[0] for text in opened.column(name)]
        assert words == sorted(words) and len(set(words)) > 1
    else:
        assert opened.column("#") == [str(rank) for rank, _ in ranked[:50]]


def test_it_sorts_by_the_change_of_the_weight(opened: Opened) -> None:
    assert opened.sort("Weight history") == "ascending"
    ranked = sorted(enumerate(SUSPECTS, 1), key=lambda item: (item[1]["weights"][-1] - item[1]["weights"][0], item[0]))
    assert opened.column("#") == [str(rank) for rank, _ in ranked[:50]]


def test_unknown_values_come_last_either_way(browser: Browser, tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path)
    write_suspects(folder, [{"row": i, "weight": w} for i, w in enumerate((None, 0.2, float("nan"), 0.1))])
    opened = open_page(browser, write_report(folder))
    assert (opened.sort("Weight"), opened.column("Weight")) == ("descending", ["0.200", "0.100", "–", "–"])
    assert (opened.sort("Weight"), opened.column("Weight")) == ("ascending", ["0.100", "0.200", "–", "–"])
    opened.quiet()
    opened.page.context.close()


def test_headers_work_from_the_keyboard(opened: Opened) -> None:
    opened.page.get_by_role("columnheader", name="Row", exact=True).get_by_role("button").focus()
    opened.page.keyboard.press("Enter")
    assert opened.column("Row")[0] == str(min(s["row"] for s in SUSPECTS))
    opened.page.keyboard.press("Space")
    assert opened.column("Row")[0] == str(max(s["row"] for s in SUSPECTS))
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.textContent") == "Example"


def test_a_phone_sorts_by_a_list(browser: Browser, file: Path) -> None:
    opened = open_page(browser, file, viewport={"width": 390, "height": 800})
    assert not opened.page.locator("#table thead").is_visible()
    opened.page.get_by_role("combobox", name="Sort by", exact=True).select_option(label="Row ↓")
    assert opened.column("Row")[0] == str(max(s["row"] for s in SUSPECTS))
    opened.quiet()
    opened.page.context.close()


# --- it filters and pages ----------------------------------------------------------------------------------


def test_a_phone_shows_every_figure_of_the_candidates(browser: Browser, file: Path) -> None:
    opened = open_page(browser, file, viewport={"width": 390, "height": 800})
    opened.page.evaluate("for (const part of document.querySelectorAll('details')) part.open = true")
    for cells in ("#accuracy td", "#messages td"):
        boxes = [cell.bounding_box() for cell in opened.page.locator(cells).all()]
        assert len(boxes) >= 12
        assert all(box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
    assert not opened.page.locator("#accuracy thead").is_visible()  # each figure bears its own name
    first = opened.page.locator("#accuracy tbody tr").first.locator("td")
    names = first.evaluate_all("cells => cells.map((cell) => getComputedStyle(cell, '::before').content)")
    assert names == [f'"{name}"' for name in ("Accuracy", "Interval", "Test accuracy", "Held-out rows", "Time")]
    opened.quiet()


def test_what_is_nearly_certain_is_not_called_certain(browser: Browser, tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path)
    known = [{**s, "error_probability": p} for s, p in zip(SUSPECTS, (1.0, 0.9997, 0.9994), strict=False)]
    write_suspects(folder, known)
    opened = open_page(browser, write_report(folder))
    assert opened.column("Error probability") == ["100.0 %", "> 99.9 %", "99.9 %"]


def test_it_filters_by_text_and_row(opened: Opened) -> None:
    search = opened.page.get_by_role("searchbox", name="Search", exact=True)
    search.fill("  RIVER ")
    expected = [s for s in SUSPECTS if "river" in s["text"].lower()]
    assert 0 < len(expected) < len(SUSPECTS)
    assert opened.status.endswith(f"of {len(expected)} suspects that match, of {len(SUSPECTS)}")
    assert opened.column("Row") == [str(s["row"]) for s in expected[:50]]
    search.fill(str(SUSPECTS[70]["row"]))
    assert str(SUSPECTS[70]["row"]) in opened.column("Row")
    search.fill("no such words")
    assert opened.page.locator("#rows").inner_text() == "No suspect matches these filters."
    assert opened.status == f"0 suspects that match, of {len(SUSPECTS)}"


def test_it_filters_by_labels_and_probability_together(opened: Opened) -> None:
    opened.page.get_by_role("combobox", name="Given", exact=True).select_option(label="human")
    assert opened.column("Row") == [str(s["row"]) for s in SUSPECTS if s["given"] == "human"]
    opened.page.get_by_role("combobox", name="Suggested", exact=True).select_option(label="entity")
    both = [s for s in SUSPECTS if (s["given"], s["suggested"]) == ("human", "entity")]
    assert opened.column("Row") == [str(s["row"]) for s in both]
    opened.page.get_by_role("slider", name="Error probability at least").fill("85")
    likely = [s for s in both if s["error_probability"] >= 0.85]
    assert 0 < len(likely) < len(both) and opened.column("Row") == [str(s["row"]) for s in likely]
    assert opened.page.locator("#least-shown").inner_text() == "85 %"
    opened.sort("Weight")
    opened.page.get_by_role("button", name="Reset").click()
    opened.page.locator("th[data-key=rank][aria-sort=ascending]").wait_for()
    assert opened.status == f"1–50 of {len(SUSPECTS)} suspects"


def test_common_corrections_are_filters(opened: Opened) -> None:
    chip = opened.page.locator(".chip").first
    given, suggested = chip.locator("bdi").all_inner_texts()
    chip.click()
    assert chip.get_attribute("aria-pressed") == "true"
    assert set(opened.column("Given")) == {given} and set(opened.column("Suggested")) == {suggested}
    assert len(opened.column("Given")) == int(chip.locator("b").inner_text())
    chip.click()
    assert opened.status == f"1–50 of {len(SUSPECTS)} suspects"


def test_it_pages(opened: Opened) -> None:
    following, previous = opened.page.locator("#next"), opened.page.locator("#previous")
    assert previous.get_attribute("aria-disabled") == "true"
    seen = opened.column("#")
    for start in (51, 101):
        following.click()
        assert opened.status == f"{start}–{min(start + 49, len(SUSPECTS))} of {len(SUSPECTS)} suspects"
        seen += opened.column("#")
    assert seen == [str(i) for i in range(1, len(SUSPECTS) + 1)]
    assert following.get_attribute("aria-disabled") == "true"
    following.dispatch_event("click")
    assert opened.page.locator("#page").inner_text() == "Page 3 of 3"
    previous.click()
    assert opened.page.locator("#page").inner_text() == "Page 2 of 3"
    opened.page.get_by_role("combobox", name="Given", exact=True).select_option(label="human")
    assert not opened.page.locator(".pager").is_visible()


def test_long_texts_open(opened: Opened) -> None:
    more = opened.page.locator("#rows .more:visible").first
    assert more.inner_text() == "Show all"
    text = more.locator("xpath=preceding-sibling::div")
    before = text.bounding_box()
    more.click()
    after = text.bounding_box()
    assert before is not None and after is not None and after["height"] > before["height"]
    assert opened.page.get_by_role("button", name="Show less").get_attribute("aria-expanded") == "true"


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
    result["curves"] = [{"name": a, "x_label": a, "x": [0, 1], "y": [0, 1]} for a in ATTACKS]
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
