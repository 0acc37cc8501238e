"""The table of suspects in a real Chromium: it sorts, filters and pages, by mouse, keyboard and phone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from browsing import SUSPECTS, Opened, open_page
from hyperkron.cleaning.report import write_report
from run_folder import write_run_folder, write_suspects

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# --- it sorts ----------------------------------------------------------------------------------------------


def test_it_sorts_by_numbers(opened: Opened) -> None:
    for name, key in (("Row", "row"), ("Error probability", "error_probability"), ("Weight", "weight")):
        found = {opened.sort(name): opened.column("#") for _ in range(2)}
        assert list(found) == (["ascending", "descending"] if key == "row" else ["descending", "ascending"])
        for way, sign in (("ascending", 1), ("descending", -1)):
            keys = [sign * suspect[key] for suspect in SUSPECTS]
            ranks = sorted(range(len(keys)), key=keys.__getitem__)
            assert found[way] == [str(rank + 1) for rank in ranks[:50]], name
        assert opened.page.locator("th[aria-sort]").count() == 1


def test_it_sorts_by_words_and_by_the_change_of_the_weight(opened: Opened) -> None:
    for name, key in (("Given", "given"), ("Suggested", "suggested")):
        assert opened.sort(name) == "ascending"
        ranked = sorted(enumerate(SUSPECTS, 1), key=lambda item: (item[1][key].lower(), item[0]))
        assert opened.column("#") == [str(rank) for rank, _ in ranked[:50]]
    assert opened.sort("Example") == "ascending"
    words = [text.split()[0] for text in opened.column("Example")]  # how a browser collates spaces is its own affair
    assert words == sorted(words) and len(set(words)) > 1
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


def test_cells_are_shown_as_they_stand_and_doubt_without_a_better_label_is_told(
    browser: Browser, tmp_path: Path
) -> None:
    folder = write_run_folder(tmp_path)
    features = {"income": 123456.78, "size": 2.0, "town": None}
    labels = [("cat", "cat"), ("cat", "cat"), ("cat", "dog")]
    suspects = [{"row": i, "given": a, "suggested": b, "features": features} for i, (a, b) in enumerate(labels)]
    write_suspects(folder, suspects)
    opened = open_page(browser, write_report(folder))
    assert " ".join(opened.column("Example")[0].split()) == "income 123456.78 size 2 town –"
    told = "in doubt, but no other label is more likely"
    assert [told in cell for cell in opened.column("Suggested")] == [True, True, False]
    assert [" ".join(chip.split()) for chip in opened.page.locator(".chip").all_inner_texts()] == ["cat → dog 1"]
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


def test_what_is_nearly_certain_is_not_called_certain(browser: Browser, tmp_path: Path) -> None:
    folder = write_run_folder(tmp_path)
    known = [{**s, "error_probability": p} for s, p in zip(SUSPECTS, (1.0, 0.9997, 0.9994), strict=False)]
    write_suspects(folder, known)
    opened = open_page(browser, write_report(folder))
    assert opened.column("Error probability") == ["100.0%", "> 99.9%", "99.9%"]


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
    assert opened.page.locator("#least-shown").inner_text() == "85%"
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
