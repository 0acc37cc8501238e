"""What a notebook shows: a short result, progress where somebody looks, and a run in the place of an earlier one."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from blobs import blobs, quicken
from hyperkron.cleaning import CleanConfig, CleanResult, clean
from hyperkron.cleaning.models import encoder
from hyperkron.cleaning.progress import BarProgress, SilentProgress, shown_progress
from hyperkron.solution import HyperkronError, HyperkronWarning

CONFIG = CleanConfig(epochs=1, compare=())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def shown() -> tuple[CleanResult, str]:
    """A result, and what was shown while it was computed."""
    data, told = blobs(rows=90), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        patch.setattr(sys, "stderr", told)
        bar = BarProgress()
        bar.message("before")
        found = clean(data.train, data.trusted, test=data.test, config=CONFIG, progress=bar)
    return found, told.getvalue()


@pytest.fixture
def result(shown: tuple[CleanResult, str]) -> CleanResult:
    return shown[0]


def test_the_result_is_shown_in_two_lines(result: CleanResult) -> None:
    first, second = repr(result).splitlines()
    assert first == f"CleanResult(rows=90, suspects={len(result.suspects)}, chosen='hyperkron')"
    assert second == result.verdict and len(repr(result)) < 600


def test_a_notebook_gets_tables_and_no_markup_of_the_data(result: CleanResult) -> None:
    page = result._repr_html_()
    assert page.count("<table>") == 2 and result.verdict.replace("'", "&#x27;") in page
    assert f"<td>{int(result.suspects[0])}</td>" in page
    assert "<script>" not in replace(result, classes=("<script>", "b", "c"), verdict="<script>")._repr_html_()


def test_progress_is_shown_where_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SilentProgress()
    assert shown_progress(own) is own
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(shown_progress(None), SilentProgress) and isinstance(shown_progress(True), BarProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert isinstance(shown_progress(None), BarProgress) and isinstance(shown_progress(False), SilentProgress)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[misc]
    assert isinstance(shown_progress(None), BarProgress)


def test_the_bar_and_the_messages(shown: tuple[CleanResult, str]) -> None:
    _, told = shown
    assert "before\n" in told and "90 training rows, 24 trusted rows" in told
    assert "boosted trees of cleaned labels" in told and "left" in told


@pytest.mark.long
def test_a_run_is_replaced_if_that_is_asked_for(tmp_path: Path) -> None:
    data = blobs(rows=60)
    out = tmp_path / "run"
    clean(data.train, data.trusted, config=CONFIG, out=out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(HyperkronError, match=r"holds a finished run; .*overwrite=True"):
        clean(data.train, data.trusted, config=CONFIG, out=out)
    with pytest.raises(HyperkronError, match="x has 60 rows"):  # which cannot begin: the earlier one stays
        clean((data.x, data.noisy[:3]), data.trusted, config=CONFIG, out=out, overwrite=True)
    before = (out / "config.json").read_bytes()
    clean(data.train, data.trusted, config=replace(CONFIG, seed=1), out=out, overwrite=True)
    assert (out / "config.json").read_bytes() != before
    left = list(tmp_path.rglob("notes.txt"))
    assert len(left) == 1 and left[0].parent != out  # what is not of the run is not removed


def test_without_an_encoder_there_is_one_message_without_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERKRON_ENCODER", raising=False)

    def absent(name: str) -> None:
        raise encoder.EncoderUnavailable("It is not here.")

    monkeypatch.setattr(encoder, "_load", absent)
    texts = [f"{'good nice' if i % 2 else 'bad poor'} thing {i}" for i in range(30)]
    rows = (texts[:20], [i % 2 for i in range(20)]), (texts[20:], [i % 2 for i in range(10)])
    with pytest.warns(HyperkronWarning, match="Using hashed n-grams") as caught:
        result = clean(*rows, config=CONFIG, progress=False)
    [warning] = [w for w in caught if issubclass(w.category, HyperkronWarning)]
    assert warning.filename == "hyperkron"
    assert sum("hashed n-grams" in text for text in result.summary["data"]["messages"]) == 1
    told: list[str] = []

    class Shown(BarProgress):
        def message(self, text: str) -> None:
            told.append(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn_explicit", lambda *given: pytest.fail("said twice"))
        clean(*rows, config=CONFIG, progress=Shown())
    assert next(text for text in told if "encoder" in text).startswith(
        "Loading the text encoder sentence-transformers/"
    )
    assert sum(text.startswith("Using hashed n-grams") for text in told) == 1
