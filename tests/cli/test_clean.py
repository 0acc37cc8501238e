"""`hyperkron clean`: what it asks for and prints. test_cli_resume.py stops it and goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import clean_command
import run_folder
from clean_command import CLEAN, OUT, Captured
from fake_cleaning import FakeCleaning
from hyperkron.cleaning.progress import SilentProgress
from hyperkron.cli import main, output
from hyperkron.cli.options import ALTERNATIVES
from hyperkron.solution import HyperkronError

_here, fake = clean_command.here, clean_command.fake


# --- what is asked for -------------------------------------------------------------------------------------


def test_the_options_reach_the_task(fake: FakeCleaning) -> None:
    more = ["--test", "test.csv", "--budget", "5m", "--epochs", "7", "--layers", "2", "--encoder", "e", "--seed", "3"]
    more += ["--device", "cpu", "--compare", "noisy, pooled", "--features", "a,b", "--model", "collections:OrderedDict"]
    assert main([*CLEAN, *more]) == 0
    [call] = fake.calls
    del call["progress"], call["on_result"]
    from collections import OrderedDict

    command = (
        "hyperkron clean train.csv --trusted trusted.csv --text text --label label --out runs/mine --test test.csv"
    )
    assert call.pop("command").startswith(command)
    assert call.pop("config") == {
        **{"seed": 3, "epochs": 7, "device": "cpu", "encoder": "e", "layers": 2},
        **{"budget": 300.0, "compare": ("noisy", "pooled")},
    }
    assert call == {
        **{"train": "train.csv", "trusted": "trusted.csv", "test": "test.csv", "out": OUT, "model": OrderedDict},
        **{"text": "text", "label": "label", "features": ["a", "b"]},
    }


@pytest.mark.parametrize(("given", "wanted"), [("all", ALTERNATIVES), ("none", ()), ("sama", ("sama",))])
def test_the_alternatives(given: str, wanted: Any, fake: FakeCleaning) -> None:
    assert main([*CLEAN, "--compare", given]) == 0
    assert fake.calls[0]["config"]["compare"] == wanted


def test_what_is_not_given_is_left_to_the_reader(fake: FakeCleaning) -> None:
    assert main(["clean", "data/train.v2.csv", "--trusted-column", "ok", "--features", "a", "b,c"]) == 0
    call = fake.calls[0]
    assert "text" not in call and "label" not in call and call["trusted"] is None and call["trusted_column"] == "ok"
    assert call["features"] == ["a", "b,c"] and call["out"] == Path("runs/train")
    assert main(["clean", "data/train.csv", "--trusted-column", "ok"]) == 0
    assert fake.calls[1]["out"] == Path("runs/train-2")


def test_a_configuration_file_gives_options(fake: FakeCleaning) -> None:
    Path("c.yaml").write_text("train: t.csv\nlabel: 'y'\nseed: 5\nquiet: true\nout: runs/c\n")
    assert main(["clean", "--config", "c.yaml", "--seed", "6"]) == 0
    assert fake.calls[0]["train"] == "t.csv" and fake.calls[0]["config"]["seed"] == 6


def test_print_config_runs_nothing(fake: FakeCleaning) -> None:
    assert main([*CLEAN, "--print-config"]) == 0
    assert fake.calls == [] and not OUT.exists()


def test_a_file_is_no_folder_for_a_run(fake: FakeCleaning, capsys: Captured) -> None:
    Path("mine").write_text("notes")
    assert main([*CLEAN[:-1], "mine", "--overwrite"]) == 1
    assert "--out='mine' is a file, but a run is a folder; choose another name." in capsys.readouterr().err
    assert fake.calls == [] and Path("mine").read_text() == "notes"


def test_a_model_that_is_not_there(fake: FakeCleaning, capsys: Captured) -> None:
    assert main([*CLEAN, "--model", "no.such:thing"]) == 1
    assert "the module 'no.such' cannot be imported" in capsys.readouterr().err
    assert not OUT.exists()


# --- what is printed ---------------------------------------------------------------------------------------


def test_the_summary(fake: FakeCleaning, capsys: Captured) -> None:
    assert main(CLEAN) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[1].startswith("The cleaned model is right on 88.4% to 94.4% of new rows")
    assert "  candidate   test accuracy  held-out accuracy  its 95% interval" in lines
    assert "* hyperkron           90.6%              91.4%        88.4–94.4%" in lines
    assert "  noisy               73.3%              74.1%        71.1–77.1%" in lines
    suspects = [json.loads(line) for line in (OUT / "suspects.jsonl").read_text().splitlines()]
    assert f"{len(suspects)} of 40 ({len(suspects) / 0.4:.0f}%) rows look mislabelled." in out
    assert "%" in out and " %" not in out
    first = suspects[0]
    named = [line for line in lines if line.startswith("  row ")]
    assert len(named) == 5
    assert named[0].startswith(f"  row {first['row']}: {first['given']} → {first['suggested']}, 9")
    assert first["text"][:20] in named[0] and all(len(line) <= 100 for line in named)
    assert "report  runs/mine/report.html" in lines and "rows    runs/mine/rows.csv" in lines
    assert "  hyperkron export runs/mine --drop suspects -o clean.csv" in lines
    assert err.splitlines()[0] == "Reading train.csv and trusted.csv"
    assert "4 rows without a label were left out" in err
    assert (OUT / "report.html").exists()


def test_a_sign_of_life_comes_before_anything_slow(
    fake: FakeCleaning, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    said: list[str] = []
    fake.before = lambda: said.append(capsys.readouterr().err)
    main(CLEAN)
    assert said == ["Reading train.csv and trusted.csv\n"]


def test_json_is_one_object_on_stdout(fake: FakeCleaning, capsys: Captured) -> None:
    assert main([*CLEAN, "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["chosen"] == "hyperkron" and found["folder"] == "runs/mine"
    assert found["files"]["report.html"] == "runs/mine/report.html" and out.count("\n") == 1
    assert "Reading train.csv" in err


def test_quiet_and_no_report(fake: FakeCleaning, capsys: Captured) -> None:
    assert main([*CLEAN, "--quiet", "--no-report", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "report.html" not in json.loads(out)["files"]


def test_quiet_says_that_there_are_notices_about_the_data(fake: FakeCleaning, capsys: Captured) -> None:
    assert main([*CLEAN, "--quiet"]) == 0
    count = len(json.loads((OUT / "result.json").read_text())["data"]["messages"])
    assert count > 1
    assert capsys.readouterr().err == f"{count} notices about the data: see data.messages in runs/mine/result.json.\n"


def test_texts_of_the_data_cannot_speak_to_the_terminal(fake: FakeCleaning, capsys: Captured) -> None:
    def hostile() -> None:
        main_write = run_folder.write_suspects

        def write(folder: Path, suspects: list[dict[str, Any]]) -> None:
            for s in suspects:
                s["text"], s["given"] = "\x1b]0;owned\x07 [bold]hi[/bold] \u202eolleh\n\n--", "\x1b[2J\x9b31m"
            main_write(folder, suspects)

        run_folder.write_suspects = write  # type: ignore[assignment]

    before = run_folder.write_suspects
    fake.during = hostile
    try:
        assert main(CLEAN) == 0
    finally:
        run_folder.write_suspects = before  # type: ignore[assignment]
    out = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(out) and "[bold]hi[/bold]" in out


def test_a_run_without_suspects(fake: FakeCleaning, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    write = run_folder.write_run_folder
    changes: dict[str, Any] = {"suspects": {"cut": 0.5, "count": 0}, "candidates": []}
    monkeypatch.setattr(run_folder, "write_run_folder", lambda folder, rows: write(folder, rows=rows, **changes))
    assert main(CLEAN) == 0
    out = capsys.readouterr().out
    assert "No row looks mislabelled." in out and "candidate" not in out


def test_a_report_that_fails_does_not_lose_the_run(
    fake: FakeCleaning, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(folder: Path) -> None:
        raise HyperkronError("no page: do this")

    monkeypatch.setattr("hyperkron.cleaning.report.write_report", fail)
    assert main(CLEAN) == 0
    out, err = capsys.readouterr()
    assert "warning: no page: do this" in err and "held-out accuracy" in out


@pytest.mark.parametrize(("package", "extra"), [("jinja2", "report"), ("tensorboard", "track")])
def test_a_missing_package_is_missed_before_the_training(
    package: str, extra: str, fake: FakeCleaning, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("hyperkron.cli.cleaning.find_spec", lambda name: None if name == package else object())
    assert main([*CLEAN, "--tensorboard"]) == 1
    assert f"pip install 'hyperkron[{extra}]'" in capsys.readouterr().err and fake.calls == []


def test_the_log_for_tensorboard(fake: FakeCleaning) -> None:
    assert main([*CLEAN, "--tensorboard"]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(OUT / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("step/loss")] == [(3, 0.5)]


# --- progress ----------------------------------------------------------------------------------------------


def test_lines_tell_the_time_left(capsys: Captured) -> None:
    now = [0.0]
    lines = output.Lines(lambda: now[0])
    lines.start(100)
    for second in (4.0, 9.0, 10.0, 15.0, 21.0):
        now[0] = second
        lines.advance(5, "teacher")
    lines.start(50)
    now[0] = 31.0
    lines.advance(5, "fold models")
    lines.stop()
    assert capsys.readouterr().err.splitlines() == [
        "[10 s] teacher: step 15 of 100 (15%), about 57 s left",
        "[21 s] teacher: step 25 of 100 (25%), about 1 min 3 s left",
        "[31 s] fold models: step 30 of 50 (60%), about 21 s left",
    ]


def test_lines_announce_what_makes_no_steps_and_guess_nothing_at_once(capsys: Captured) -> None:
    now = [-10.0]
    lines = output.Lines(lambda: now[0])
    now[0] = 0.0
    lines.start(100)
    lines.advance(1, "teacher")
    for second in (1.0, 3.0, 4.0, 6.0):  # too soon; said; the same again; the same again
        now[0] = second
        lines.advance(0, "boosted trees")
    now[0] = 14.0
    lines.advance(1, "fold models")  # 2 % would guess 11 minutes
    assert capsys.readouterr().err.splitlines() == [
        "[0 s] teacher: step 1 of 100 (1%)",
        "[3 s] boosted trees: step 1 of 100 (1%)",
        "[14 s] fold models: step 2 of 100 (2%)",
    ]


def test_after_a_stop_lines_begin_anew(capsys: Captured) -> None:
    now = [0.0]
    lines = output.Lines(lambda: now[0])
    lines.start(1000)
    lines.advance(1000, "embedding texts")
    lines.stop()
    now[0] = 20.0
    lines.start(100)
    now[0] = 30.0
    lines.advance(25, "teacher")
    assert capsys.readouterr().err == "[10 s] teacher: step 25 of 100 (25%), about 30 s left\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    assert isinstance(output.progress(False), output.Lines)
    assert isinstance(output.progress(True), SilentProgress)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = output.progress(False)
    bar.stop()  # nothing to close yet
    bar.message("[red]\x1b[2Jhello; pass overwrite=True")
    for total in (10, 8):
        bar.start(total)
        bar.advance(4, "teacher")
        bar.stop()
    err = capsys.readouterr().err
    assert "[red]\ufffd[2Jhello; pass --overwrite" in err and err.count("0%|") >= 2
