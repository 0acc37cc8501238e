"""`hyperkron clean` over earlier runs and interrupted, and `hyperkron resume`: what they keep and leave behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import clean_command
import hyperkron
import run_folder
from clean_command import CLEAN, OUT, Captured
from fake_cleaning import FakeCleaning
from hyperkron.cli import main
from hyperkron.solution import HyperkronError
from hyperkron.training import Interrupted
from hyperkron.training.locks import FolderLock

_here, fake = clean_command.here, clean_command.fake


# --- earlier runs ------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_overwritten(fake: FakeCleaning, capsys: Captured) -> None:
    run_folder.write_run_folder(OUT)
    before = (OUT / "result.json").read_bytes()
    assert main(CLEAN) == 1
    assert "holds a finished run" in capsys.readouterr().err and fake.calls == []
    assert (OUT / "result.json").read_bytes() == before


def test_an_unfinished_run_is_named_for_resuming(fake: FakeCleaning, capsys: Captured) -> None:
    OUT.mkdir(parents=True)
    (OUT / "config.json").write_text("{}")
    assert main(CLEAN) == 1
    assert "hyperkron resume runs/mine" in capsys.readouterr().err and fake.calls == []


def test_overwrite_replaces_a_run(fake: FakeCleaning) -> None:
    run_folder.write_run_folder(OUT, chosen="old")
    (OUT / "stages").mkdir()
    (OUT / "stages" / "teacher.json").write_text("{}")
    fake.before = lambda: OUT.mkdir()  # it finds no folder
    assert main([*CLEAN, "--overwrite"]) == 0
    assert json.loads((OUT / "result.json").read_text())["chosen"] == "hyperkron"
    assert not (OUT / "stages").exists() and [p.name for p in Path("runs").iterdir()] == ["mine"]


def test_overwrite_keeps_what_is_not_of_a_run(fake: FakeCleaning, capsys: Captured) -> None:
    run_folder.write_run_folder(OUT)
    (OUT / "notes.txt").write_text("mine")
    assert main([*CLEAN, "--overwrite"]) == 0
    [aside] = [path for path in Path("runs").iterdir() if path != OUT]
    assert [path.name for path in aside.iterdir()] == ["notes.txt"] and str(aside) in capsys.readouterr().err


def test_overwrite_with_data_that_cannot_be_read_keeps_the_earlier_run(fake: FakeCleaning, capsys: Captured) -> None:
    run_folder.write_run_folder(OUT, chosen="old")

    def fail() -> None:
        raise HyperkronError("train='train.csv' does not exist.")

    fake.before = fail
    assert main([*CLEAN, "--overwrite"]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert json.loads((OUT / "result.json").read_text())["chosen"] == "old"
    assert [path.name for path in Path("runs").iterdir()] == ["mine"]


def test_overwrite_that_fails_on_the_way_keeps_the_earlier_run_aside(fake: FakeCleaning, capsys: Captured) -> None:
    run_folder.write_run_folder(OUT, chosen="old")

    def fail() -> None:
        raise HyperkronError("NaN")

    fake.during = fail
    assert main([*CLEAN, "--overwrite"]) == 1
    [aside] = [path for path in Path("runs").iterdir() if path != OUT]
    assert json.loads((aside / "result.json").read_text())["chosen"] == "old" and str(aside) in capsys.readouterr().err


def test_overwrite_leaves_a_run_that_is_being_written(fake: FakeCleaning, capsys: Captured) -> None:
    """Its process would go on writing, into the folder of the new run."""
    run_folder.write_run_folder(OUT, chosen="old")
    with FolderLock(OUT):
        assert main([*CLEAN, "--overwrite"]) == 1
    assert f"{OUT} is being written by process {os.getpid()}" in capsys.readouterr().err
    (begun := OUT.with_name("begun")).mkdir()
    run_folder.write_json(begun / "config.json", {})
    with FolderLock(begun):  # nor is it called interrupted
        assert main([*CLEAN[:-1], str(begun)]) == 1
    assert f"{begun} is being written by process {os.getpid()}" in capsys.readouterr().err
    shutil.rmtree(begun)
    assert json.loads((OUT / "result.json").read_text())["chosen"] == "old"
    assert [path.name for path in Path("runs").iterdir()] == ["mine"]


@pytest.mark.parametrize("text", ['{"unfinished": []}', "{", "5", "[]", "[" * 100_000])
def test_a_result_that_is_not_whole_is_continued(text: str, fake: FakeCleaning, capsys: Captured) -> None:
    run_folder.write_run_folder(OUT)
    (OUT / "result.json").write_text(text)
    assert main(["resume", str(OUT)]) == 0
    assert capsys.readouterr().err.startswith(f"Continuing {OUT}\n")


# --- interruptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "code"),
    [(KeyboardInterrupt(), 130), (Interrupted(signal.SIGINT), 130), (Interrupted(signal.SIGTERM), 143)],
)
def test_an_interrupted_run_says_how_to_go_on(
    reason: BaseException, code: int, fake: FakeCleaning, capsys: Captured
) -> None:
    def stop() -> None:
        (OUT / "rows.csv").touch()
        raise reason

    fake.during = stop
    assert main([*CLEAN, "--json"]) == code
    out, err = capsys.readouterr()
    assert "continue with: hyperkron resume runs/mine" in err and "Traceback" not in err
    assert "known already: see rows.csv there." in err  # there is no report yet
    assert json.loads(out)["type"] == "Interrupted"
    fake.during = lambda: None
    assert main(["resume", "runs/mine"]) == 0
    assert fake.calls[-1] == {"out": OUT, "model": None, "expected": {}}
    assert "held-out accuracy" in capsys.readouterr().out and (OUT / "report.html").exists()


def test_an_interruption_while_reading_has_nothing_to_resume(fake: FakeCleaning, capsys: Captured) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    fake.before = stop
    assert main(CLEAN) == 130
    err = capsys.readouterr().err
    assert "Nothing was written" in err and "resume" not in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_during_an_import_comes_after_it(
    number: int, code: int, fake: FakeCleaning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C++ code of a module may lose the exception, or abort."""
    lost = f"import signal\ntry:\n    signal.raise_signal({number})\nexcept BaseException:\n    pass\nwhole = True\n"
    Path("losing.py").write_text(lost)
    monkeypatch.syspath_prepend(str(Path.cwd()))

    def importing() -> None:
        assert import_module("losing").whole
        time.sleep(2)

    fake.before = importing
    assert main(CLEAN) == code
    del sys.modules["losing"]
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_a_timer_of_the_caller_goes_on() -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        assert main(["--version"]) == 0 and signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def test_an_interrupted_sweep_keeps_its_trials(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("stopped.py").write_text("def error(trial):\n    raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(".")
    assert main(["sweep", "stopped:error", "--search", "x=0..4", "--trials", "2", "-o", "trials.csv"]) == 130
    err = capsys.readouterr().err
    assert "Trials that were finished are kept" in err and "Nothing was written" not in err


def test_an_interruption_after_the_end_does_not_speak_of_resuming(
    fake: FakeCleaning, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def stop(folder: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hyperkron.cleaning.report.write_report", stop)
    assert main(CLEAN) == 130
    err = capsys.readouterr().err
    assert "The run in runs/mine is finished; see `hyperkron report runs/mine`" in err


def test_the_handler_of_sigterm_is_put_back(fake: FakeCleaning) -> None:
    before = signal.getsignal(signal.SIGTERM)
    during: list[Any] = []
    fake.during = lambda: during.append(signal.getsignal(signal.SIGTERM))
    main(CLEAN)
    assert during[0] is not before and signal.getsignal(signal.SIGTERM) is before


PROCESS = """
import sys, time, types
package = types.ModuleType("hyperkron")
package.__path__, package.__version__ = [{package!r}], "0"
sys.modules["hyperkron"] = package
from pathlib import Path
fake = types.ModuleType("hyperkron.cleaning")
fake.__path__ = [{package!r} + "/cleaning"]
def clean(*data, out, **more):
    if {begun}:
        out.mkdir(parents=True)
        (out / "config.json").write_text("{{}}")
    print("ready", file=sys.stderr, flush=True)
    time.sleep(60)
fake.clean, fake.CleanConfig = clean, dict
sys.modules["hyperkron.cleaning"] = fake
from hyperkron.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("number", "begun", "code", "message"),
    [
        (signal.SIGINT, True, 130, "hyperkron resume 'runs/my run'"),
        (signal.SIGTERM, False, 143, "Nothing was written"),
    ],
)
def test_signals_to_a_process(number: int, begun: bool, code: int, message: str) -> None:
    code_text = PROCESS.format(package=str(Path(hyperkron.__file__).parent), begun=begun)
    arguments = [sys.executable, "-c", code_text, "clean", "train.csv", "--trusted", "t.csv", "--out", "runs/my run"]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        begin = time.monotonic()
        while "ready" not in process.stderr.readline():
            assert process.poll() is None and time.monotonic() - begin < 60
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == code and message in err and "Traceback" not in err and out == ""


# --- resume ------------------------------------------------------------------------------------------------


def test_resuming_what_is_no_run(fake: FakeCleaning, capsys: Captured) -> None:
    assert main(["resume", "runs/none"]) == 1
    assert "holds no run" in capsys.readouterr().err and fake.calls == []


def test_resume_takes_a_model(fake: FakeCleaning, capsys: Captured) -> None:
    main(CLEAN)
    capsys.readouterr()
    assert main(["resume", "runs/mine", "--model", "collections:OrderedDict", "--json", "--no-report"]) == 0
    assert fake.calls[-1]["model"].__name__ == "OrderedDict"
    assert json.loads(capsys.readouterr().out)["folder"] == "runs/mine"
