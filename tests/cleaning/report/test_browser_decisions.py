"""Suspects are accepted, rejected and relabelled in a real Chromium: by mouse, keyboard and phone, and saved."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from browsing import SUSPECTS, Opened, open_page
from hyperkron.cleaning.loading import read_decisions
from hyperkron.cleaning.report import write_report
from run_folder import CLASSES, write_run_folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = write_run_folder(tmp_path / "mine")
    config = json.loads((folder / "config.json").read_text()) | {"data": f"sha of {tmp_path.name}"}
    (folder / "config.json").write_text(json.dumps(config))
    return write_report(folder)


@pytest.fixture
def opened(browser: Browser, file: Path) -> Iterator[Opened]:
    opened = open_page(browser, file, accept_downloads=True)
    yield opened
    opened.quiet()
    opened.page.context.close()


def saved(opened: Opened, to: Path) -> list[dict[str, Any]]:
    with opened.page.expect_download() as download:
        opened.page.get_by_role("button", name="Save decisions.json").click()
    assert download.value.suggested_filename == "decisions.json"
    download.value.save_as(to)
    found: list[dict[str, Any]] = json.loads(to.read_text("utf-8"))["decisions"]
    return found


def other(suspect: dict[str, Any]) -> str:
    return next(name for name in reversed(CLASSES) if name not in (suspect["given"], suspect["suggested"]))


def test_by_mouse(opened: Opened, file: Path, tmp_path: Path) -> None:
    page, save = opened.page, opened.page.get_by_role("button", name="Save decisions.json")
    assert page.locator("#decided").inner_text() == "No decision yet." and save.is_disabled()
    row = page.locator("#rows tr")
    row.nth(0).get_by_role("button", name="Accept").click()
    row.nth(1).get_by_role("button", name="Reject").click()
    row.nth(2).get_by_role("combobox").select_option(label=other(SUSPECTS[2]))
    row.nth(3).get_by_role("combobox").select_option(label=SUSPECTS[3]["suggested"])  # which is to accept
    row.nth(4).get_by_role("button", name="Accept").click()
    row.nth(4).get_by_role("button", name="Accept").click()  # undone
    said = page.locator("#decided").inner_text()
    assert said == f"4 of {len(SUSPECTS)} suspects decided: 2 accepted, 1 rejected, 1 relabelled."
    pressed = [row.nth(i).get_by_role("button", name="Accept").get_attribute("aria-pressed") for i in range(5)]
    assert pressed == ["true", "false", "false", "true", "false"]
    expected = [
        {"row": SUSPECTS[0]["row"], "decision": "accept", "label": SUSPECTS[0]["suggested"]},
        {"row": SUSPECTS[1]["row"], "decision": "reject", "label": SUSPECTS[1]["given"]},
        {"row": SUSPECTS[2]["row"], "decision": "relabel", "label": other(SUSPECTS[2])},
        {"row": SUSPECTS[3]["row"], "decision": "accept", "label": SUSPECTS[3]["suggested"]},
    ]
    assert saved(opened, tmp_path / "decisions.json") == expected
    found = read_decisions(tmp_path / "decisions.json", file.parent)
    assert found == {entry["row"]: entry["label"] for entry in expected}


def test_by_keyboard(opened: Opened, tmp_path: Path) -> None:
    page, press = opened.page, opened.page.keyboard.press
    press("a")  # no row is chosen yet
    for key in ("j", "a", "r", "ArrowDown", "l"):
        press(key)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Another label"
    for _ in range(1 + CLASSES.index(other(SUSPECTS[3]))):  # over the given and the suggested one too
        press("ArrowDown")
    press("Escape")
    press("k")
    press("a")
    press("ArrowUp")
    press("u")  # row 2 again
    found = {entry["row"]: entry["decision"] for entry in saved(opened, tmp_path / "decisions.json")}
    assert found == dict(zip((SUSPECTS[i]["row"] for i in (0, 1, 3)), ("accept", "reject", "relabel"), strict=True))
    page.get_by_role("searchbox", name="Search", exact=True).fill("jar")  # letters of a search decide nothing
    assert page.locator("#decided").inner_text().startswith("3 of")


def test_the_keyboard_turns_the_page(opened: Opened) -> None:
    opened.page.locator("#rows tr").last.focus()
    opened.page.keyboard.press("a")
    assert opened.page.locator("#page").inner_text().startswith("Page 2 of")
    assert opened.page.evaluate("document.activeElement.querySelector('td').textContent") == "51"
    opened.page.keyboard.press("k")
    assert opened.page.evaluate("document.activeElement.querySelector('td').textContent") == "50"


def test_they_are_kept_and_can_be_forgotten(opened: Opened, browser: Browser, file: Path) -> None:
    page = opened.page
    for i in range(2):
        page.locator("#rows tr").nth(i).get_by_role("button", name="Reject").click()
    page.reload()
    assert page.locator("#decided").inner_text() == f"2 of {len(SUSPECTS)} suspects decided: 2 rejected."
    page.get_by_role("checkbox", name="Only undecided").check()
    assert opened.column("#")[0] == "3" and opened.status.endswith(
        f"{len(SUSPECTS) - 2} suspects that match, of {len(SUSPECTS)}"
    )
    page.evaluate("window.confirm = () => true")
    page.get_by_role("button", name="Forget all").click()
    assert page.locator("#decided").inner_text() == "No decision yet." and opened.column("#")[0] == "1"
    page.reload()
    assert page.locator("#decided").inner_text() == "No decision yet."


def test_the_table_stays_in_its_part(opened: Opened) -> None:
    for width in (900, 1200, 1600):
        opened.page.set_viewport_size({"width": width, "height": 900})
        table, part = (opened.page.locator(name).bounding_box() for name in ("#table", "#suspects"))
        assert table is not None and part is not None
        assert table["x"] + table["width"] <= part["x"] + part["width"], width


def test_different_kinds_come_first(opened: Opened) -> None:
    opened.page.get_by_role("checkbox", name="Different kinds first").check()
    pairs = list(zip(opened.column("Given"), opened.column("Suggested"), strict=True))
    kinds = len({(s["given"], s["suggested"]) for s in SUSPECTS})
    first = min(kinds, 50)
    assert len(set(pairs[:first])) == first > 5 and opened.column("#")[0] == "1"


def test_on_a_phone(browser: Browser, file: Path, tmp_path: Path) -> None:
    opened = open_page(browser, file, viewport={"width": 390, "height": 800}, has_touch=True, accept_downloads=True)
    page = opened.page
    page.locator("#rows tr").first.get_by_role("button", name="Accept").tap()
    page.locator("#rows tr").nth(1).get_by_role("combobox").select_option(label=other(SUSPECTS[1]))
    for part in page.locator("#rows tr:nth-child(-n+3) .decision > *, .deciding button, label.tick").all():
        box = part.bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390 and box["height"] >= 30
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert [entry["decision"] for entry in saved(opened, tmp_path / "decisions.json")] == ["accept", "relabel"]
    opened.quiet()
    opened.page.context.close()
