"""A report opened in a real Chromium without a network, and everything it complained about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hyperkron.cleaning.report import write_report
from run_folder import CLASSES, make_rows, make_suspects, write_run_folder

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


@pytest.fixture(scope="package")
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
    made.set_default_timeout(60_000)
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


@pytest.fixture(scope="package")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run_folder(tmp_path_factory.mktemp("runs") / "mine"))


@pytest.fixture
def opened(browser: Browser, file: Path) -> Iterator[Opened]:
    opened = open_page(browser, file)
    yield opened
    opened.quiet()
    opened.page.context.close()
