"""Every file of a finished run, damaged in every way: the commands say so in a sentence, and never hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobs import quicken
from hyperkron.cleaning import CleanConfig, clean
from hyperkron.cleaning.folder import HASHES
from hyperkron.cli import main

Captured = pytest.CaptureFixture[str]
Damage = Callable[[Path], None]


def _text(change: Callable[[str], str]) -> Damage:
    return lambda path: _put(path, change(path.read_bytes().decode("latin-1")).encode("latin-1"))


def _put(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "x").write_text("x")


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


DAMAGES: dict[str, Damage] = {
    "empty": lambda path: _put(path, b""),
    "absent": lambda path: path.unlink(),
    "not UTF-8": lambda path: _put(path, b"\xff\xfe\x00" + path.read_bytes()),
    "zero bytes": lambda path: _put(path, bytes(100)),
    "half": _text(lambda text: text[: len(text) // 2]),
    "a list": lambda path: _put(path, b"[1, 2]\n"),
    "a number": lambda path: _put(path, b"7\n"),
    "null": lambda path: _put(path, b"null\n"),
    "an empty object": lambda path: _put(path, b"{}\n"),
    "nested": lambda path: _put(path, b'{"format": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"),
    "nested a little": lambda path: _put(path, b'{"format": 1, "config": ' + b"[" * 900 + b"]" * 900 + b"}\n"),
    "huge numbers": _text(lambda text: text.replace("1", "1" * 400)),
    "too many digits": _text(lambda text: text.replace("1", "1" * 5000)),
    "not a number": _text(lambda text: text.replace("0", "NaN")),
    "other types": _text(lambda text: text.replace('"', "").replace("true", "[]").replace("false", "{}")),
    "texts for numbers": _text(lambda text: text.replace(": 0", ': "0"').replace(": 1,", ': ["1"],')),
    "values gone": _text(lambda text: text.replace('": {', '": null, "gone": {').replace('": [', '": 5, "gone": [')),
    "names gone": _text(lambda text: text.replace('"s', '"_s').replace('"n', '"_n').replace("row", "wor")),
    "a long line": _text(lambda text: text + "x" * 300_000 + "\n"),
    "quotes": _text(lambda text: text + '"'),
    "a folder": _folder,
    "a pipe": _pipe,
    "a link to itself": _to_itself,
}
READ_BY = {
    "config.json": ("report", "export", "resume"),
    "result.json": ("report",),
    "rows.csv": ("report", "export"),
    "suspects.jsonl": ("report",),
    HASHES: ("export",),
    "log.jsonl": ("resume",),
    "report.html": ("report",),
}
COMMANDS = {
    "report": ["report", "run"],
    "export": ["export", "run", "--drop", "suspects", "-o", "out.csv", "--overwrite"],
    "resume": ["resume", "run", "--tensorboard", "--quiet"],
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a small table, and the table."""
    folder = tmp_path_factory.mktemp("finished")
    rows = [(i, (i * 37 % 100) / 50 - 1, i * 53 % 97) for i in range(60)]
    lines = [f"{x:.3f},{z},{'yes' if (x > 0) != (i % 9 == 0 and i < 40) else 'no'}\n" for i, x, z in rows]
    (folder / "train.csv").write_text("x,z,label\n" + "".join(lines[:40]))
    (folder / "trusted.csv").write_text("x,z,label\n" + "".join(lines[40:]))
    settings = CleanConfig(epochs=1, compare=(), device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        clean(str(folder / "train.csv"), str(folder / "trusted.csv"), out=folder / "run", config=settings)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, beside which the test runs."""
    shutil.copytree(finished / "run", tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "run"


def test_the_run_is_sound(run: Path, capsys: Captured) -> None:
    for command in COMMANDS.values():
        assert main(command) == 0
    assert set(READ_BY) <= {path.name for path in run.iterdir()}
    assert "Traceback" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("file", "command"), [(file, one) for file, all_of in READ_BY.items() for one in all_of])
@pytest.mark.long
def test_a_damaged_file_is_no_traceback(file: str, command: str, damage: str, run: Path, capsys: Captured) -> None:
    if file == "report.html":
        (run / file).write_text("x")
    DAMAGES[damage](run / file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(COMMANDS[command])
    out, err = capsys.readouterr()
    assert code in (0, 1) and "Traceback" not in out + err, err
    assert code == 0 or (err.startswith(f"hyperkron {command}: error: ") and len(err) < 2000), err
    if code and command != "resume":
        assert file in err or "train.csv" in err or "run" in err


# --- streams -----------------------------------------------------------------------------------------------


class _Left:
    """A stream whose reader has left, or whose disk is full."""

    encoding = "utf-8"

    def __init__(self, error: OSError) -> None:
        self.error = error

    def write(self, text: str) -> int:
        raise self.error

    def flush(self) -> None:
        raise self.error

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise ValueError("it has none")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_stderr_that_takes_nothing_does_not_end_the_work(
    command: str, error: OSError, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", _Left(error))
    assert main(COMMANDS[command]) == 0


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), OSError(28, "No space left on device")])
def test_stdout_that_takes_nothing_is_an_error(
    error: OSError, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdout", _Left(error))
    assert main(COMMANDS["report"]) == 1
    assert "Traceback" not in capsys.readouterr().err


def test_predictions_that_find_no_room_on_stdout_do_not_blame_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdout", _Left(OSError(28, "No space left on device")))
    assert main(["predict", "run", "train.csv"]) == 1
    assert "the disk is full (No space left on device): the output cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [*COMMANDS.values(), ["report", "no-such-run"], ["--bogus"], ["--help"]])
def test_streams_that_are_closed(arguments: list[Any], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    wanted = {"no-such-run": 1, "--bogus": 2}.get(arguments[-1], 0)
    assert main(arguments) == wanted


def test_streams_closed_by_the_shell(run: Path) -> None:
    """What is printed goes nowhere, and above all not into a file that is open."""
    program = "import sys; from hyperkron.cli import main; sys.exit(main(['report', 'run']))"
    assert (
        subprocess.run(["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, program], check=False).returncode == 0
    )
    page = (run / "report.html").read_text("utf-8")
    assert page.startswith("<!") and page.rstrip().endswith("</html>")
