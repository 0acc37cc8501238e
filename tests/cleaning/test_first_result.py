"""The suspects are on the disk before the alternatives are compared, and the alternatives are added as they finish."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hyperkron as hk
from blobs import blobs, quicken, write_csv
from hyperkron.cleaning import CleanConfig, run
from hyperkron.cleaning.method import Outcome, clean_labels
from hyperkron.cleaning.report import write_report
from hyperkron.cleaning.work import Work
from hyperkron.cli import main

ROWS = ("rows.csv", "suspects.jsonl", "left_out.csv", "inputs.json", "inputs.safetensors")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    monkeypatch.setattr(run, "SECONDS_BETWEEN_RESULTS", 0.0)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    data = blobs(rows=80)
    write_csv(tmp_path / "train.csv", data.train)
    write_csv(tmp_path / "trusted.csv", data.trusted)
    return tmp_path


def test_results_come_as_they_are_known(files: Path) -> None:
    seen: list[tuple[dict[str, Any], dict[str, bytes], str]] = []

    def look(folder: Path) -> None:
        result = json.loads((folder / "result.json").read_text())
        rows = {name: (folder / name).read_bytes() for name in ROWS}
        seen.append((result, rows, write_report(folder).read_text("utf-8")))
        assert len(hk.load(folder).predict(folder.parent / "train.csv")) == 80  # the cleaned model answers already

    config = CleanConfig(epochs=1, compare=("noisy", "pooled"))
    found = hk.clean("train.csv", "trusted.csv", out="run", config=config, on_result=look)
    names = [[c["name"] for c in result["candidates"]] for result, _, _ in seen]
    assert names == [[], ["hyperkron"], ["hyperkron", "noisy"]]
    assert [result["unfinished"] for result, _, _ in seen] == [["noisy", "pooled"], ["noisy", "pooled"], ["pooled"]]
    assert all("with 2 alternatives is still running." in result["verdict"] for result, _, _ in seen)
    for result, rows, _ in seen[1:]:  # the views are known: what is said of the rows stays
        assert rows == {name: (Path("run") / name).read_bytes() for name in ROWS}
        assert result["suspects"].items() <= found.summary["suspects"].items()
    assert seen[0][1]["rows.csv"] != seen[1][1]["rows.csv"] and "stable" not in seen[0][0]["suspects"]
    for _, _, page in seen:
        assert "First result: the alternatives are still being compared." in page and "to come: " in page
    assert "unfinished" not in json.loads(Path("run/result.json").read_text())
    assert "still" not in write_report("run").read_text("utf-8").split("<script")[0]


def test_a_result_that_lies_in_the_folder_of_a_new_run_is_not_taken_for_its_own(files: Path) -> None:
    Path("run").mkdir()
    Path("run/result.json").write_text("{}")
    seen: list[bool] = []

    def look(folder: Path) -> None:
        seen.append("unfinished" in json.loads((folder / "result.json").read_text()))

    hk.clean("train.csv", "trusted.csv", out="run", config=CleanConfig(epochs=1, compare=("noisy",)), on_result=look)
    assert seen and all(seen)


def stop_at_once(*given: object, **named: object) -> None:
    raise KeyboardInterrupt


def test_after_an_interruption_the_first_result_can_be_used(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = run.judged

    def stop(name: str, *given: object) -> object:
        if name == "noisy":
            raise KeyboardInterrupt
        return judged(name, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "judged", stop)
    command = ["clean", "train.csv", "--trusted", "trusted.csv", "--out", "run", "--epochs", "1", "--compare", "noisy"]
    assert main(command) == 130
    told = capsys.readouterr().err
    assert "First result: about" in told and "continue with: hyperkron resume run" in told
    assert "known already: see rows.csv and report.html there." in told and Path("run/report.html").exists()
    assert main(["export", "run", "--drop", "suspects", "-o", "clean.csv"]) == 0
    assert main(command) == 1 and "holds a run that was interrupted" in capsys.readouterr().err
    monkeypatch.setattr(run, "judged", judged)
    assert main(["resume", "run"]) == 0
    told = capsys.readouterr().err
    assert "Continuing run" in told and "unfinished" not in Path("run/result.json").read_text()
    written = list[Path]()
    hk.cleaning.resume("run", on_result=written.append)  # finished: no first result takes the place of the whole one
    assert main(["resume", "run"]) == 0 and not written
    told = capsys.readouterr().err
    assert "is finished" in told and "still running" not in told
    before = {name: (Path("run") / name).read_bytes() for name in (*ROWS, "result.json", "model.safetensors")}
    monkeypatch.setattr(run, "judge", stop_at_once)  # after the first result, before the choice
    assert main(["resume", "run"]) == 130
    assert before == {name: (Path("run") / name).read_bytes() for name in before}


def test_what_is_said_of_a_row_is_the_mean_over_the_whole_and_the_views(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, given = [], []

    def watched(works: Sequence[Work]) -> list[Outcome]:
        outcomes = clean_labels(works)
        found.extend(outcome.final.posterior for outcome in outcomes)
        given.append(works[0].given[works[0].noisy])
        return outcomes

    monkeypatch.setattr(run, "clean_labels", watched)
    result = hk.clean("train.csv", "trusted.csv", config=CleanConfig(epochs=1, compare=()))
    mean = torch.stack(found).mean(0)
    assert len(found) == 6 and not torch.allclose(mean, found[0])
    torch.testing.assert_close(result.error_probability, 1 - mean.gather(1, given[0][:, None])[:, 0])
    assert torch.equal(result.suggested, mean.argmax(1))
    assert result.summary["noise"]["rate"] == pytest.approx(float(result.error_probability.mean()))


def test_a_first_result_always_waits_for_something(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes may judge the cleaned model last: the result before that is no whole one."""
    seen: list[list[str]] = []
    monkeypatch.setattr(run, "in_turn", lambda stages, names, prefix: reversed(names))

    def look(folder: Path) -> None:
        seen.append(json.loads((folder / "result.json").read_text())["unfinished"])

    config = CleanConfig(epochs=1, compare=("noisy", "pooled"))
    hk.clean("train.csv", "trusted.csv", out="run", config=config, on_result=look)
    assert seen == [["noisy", "pooled"], ["noisy"]]
