"""The rows of ``faults.py`` about the files that `hyperkron` reads and writes.

An export is survived if it is refused where the source does not hold the rows of the run any more; a damaged run
folder if the command ends with its documented code and a sentence; a full disk and a kill if what was there before is
still there, whole, and nothing is left behind.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from faults_tables import tables
from forks import Child, written

from hyperkron.cleaning.data import row_hashes
from hyperkron.cli import main

ROWS = 60
SUSPECT = 5
"""Every so many rows one is a suspect."""
KILLS = 20
"""Of exports."""


def faults(scratch: Path) -> list[Callable[[], dict[str, Any]]]:
    """The rows, each a function that makes one."""
    return [
        lambda: _cases("export of a source that has changed", _changed_sources(), scratch),
        lambda: tables(scratch),
        lambda: _cases("formula cell in an export", _formulas(), scratch),
        lambda: _cases("damaged file of a finished run", _damaged(scratch), scratch),
        lambda: _cases("closed stdout or stderr", _streams(), scratch),
        lambda: _cases("disk full while a command writes", _full_disk(), scratch),
        lambda: _killed_exports(scratch),
    ]


def _cases(fault: str, cases: dict[str, Callable[[Path], str]], scratch: Path) -> dict[str, Any]:
    """Each case in a process and a folder of its own; it returns what is wrong, or nothing."""
    wrong = []
    for name, act in cases.items():
        folder = scratch / "case"

        def attempt(act: Callable[[Path], str] = act, folder: Path = folder) -> str:
            folder.mkdir()
            os.chdir(folder)
            signal.alarm(60)
            return act(folder) or "none"

        told = written(attempt, scratch / "told")
        shutil.rmtree(folder, ignore_errors=True)
        if told != "none":
            wrong.append(f"{name}: {told or 'it died'}")
    note = "; ".join(wrong) or "0 silent"
    return {"fault": fault, "tries": len(cases), "survived": len(cases) - len(wrong), "note": note}


def _command(*arguments: str) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(arguments))
    return code, out.getvalue(), err.getvalue()


# --- a run, without its training ---------------------------------------------------------------------------

Rows = list[dict[str, Any]]


def _rows(count: int = ROWS) -> Rows:
    return [{"text": f"a text of words {i}", "label": "ab"[i % 2], "n": i} for i in range(count)]


def _write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text", "label", "n"])
        writer.writeheader()
        writer.writerows(rows)


WRITERS: dict[str, Callable[[Path, Rows], None]] = {
    "csv": _write_csv,
    "jsonl": lambda path, rows: path.write_text("".join(json.dumps(row) + "\n" for row in rows)) and None,
    "json": lambda path, rows: path.write_text(json.dumps(rows)) and None,
    "parquet": lambda path, rows: pq.write_table(pa.Table.from_pylist(rows), path),
}


def _run_of(train: Path, rows: int = ROWS) -> None:
    """The run folder ``run`` of a source, as `clean` leaves it."""
    run, hashes = train.parent / "run", row_hashes(train)
    run.mkdir()
    record = {"count": len(hashes), "sha256": hashes.sha256, "version": hashes.VERSION}
    source = {"train": str(train), "trusted": None, "test": None, "reading": {"text": "text", "label": "label"}}
    (run / "config.json").write_text(json.dumps({"format": 1, "source": source, "rows": record}))
    (run / "rows.hashes").write_bytes(hashes.each)
    lines = [f"{i},a,b,{0.9 * (i % SUSPECT == 0)},1,{str(i % SUSPECT == 0).lower()}\n" for i in range(rows)]
    (run / "rows.csv").write_text("row,given,suggested,error_probability,weight,suspect\n" + "".join(lines))
    (run / "result.json").write_text('{"format": 1, "chosen": "hyperkron"}')


# --- other rows --------------------------------------------------------------------------------------------


def _changes() -> dict[str, Callable[[Rows], Rows]]:
    chance = random.Random(0)
    return {
        "shuffled": lambda rows: chance.sample(rows, len(rows)),
        "sorted the other way": lambda rows: rows[::-1],
        "two rows swapped": lambda rows: [rows[1], rows[0], *rows[2:]],
        "a text changed": lambda rows: [{**rows[0], "text": "another"}, *rows[1:]],
        "a label changed": lambda rows: [*rows[:-1], {**rows[-1], "label": "a"}],
        "a row added": lambda rows: [{"text": "new", "label": "a", "n": 0}, *rows],
        "a row removed": lambda rows: rows[1:],
        "a row doubled": lambda rows: [rows[0], *rows],
    }


def _changed_sources() -> dict[str, Callable[[Path], str]]:
    def case(suffix: str, change: Callable[[Rows], Rows], act: str) -> Callable[[Path], str]:
        def attempt(folder: Path) -> str:
            train, out = folder / f"train.{suffix}", folder / f"out.{suffix}"
            WRITERS[suffix](train, _rows())
            _run_of(train)
            if _command("export", "run", act, "suspects", "-o", str(out))[0] or not out.exists():
                return "the very rows of the run are refused"
            out.unlink()
            WRITERS[suffix](train, change(_rows()))
            code, _, err = _command("export", "run", act, "suspects", "-o", str(out))
            return "" if code == 1 and "no longer holds the rows" in err and not out.exists() else f"code {code}"

        return attempt

    return {
        f"{suffix}, {name}, {act}": case(suffix, change, act)
        for suffix in WRITERS
        for name, change in _changes().items()
        for act in ("--drop", "--relabel")
    }


# --- formulas ----------------------------------------------------------------------------------------------

FORMULAS = ("=1+1", "=HYPERLINK(A1)", "+1+1", "-1+1", "@SUM(A1)", "\tx", "\r=1")
NO_FORMULAS = ("-5", "+3.2", "-1e-3", "plain", "a=b")


def _formulas() -> dict[str, Callable[[Path], str]]:
    def case(cell: str, what: str) -> Callable[[Path], str]:
        def attempt(folder: Path) -> str:
            rows = _rows()
            rows[1]["text"] = cell
            _write_csv(folder / "train.csv", rows)
            _run_of(folder / "train.csv")
            told = ["export", "run", "--drop", "suspects", "-o", "out.csv", "--formulas", what]
            code, _, err = _command(*told)
            said, formula = "takes for a formula" in err, cell in FORMULAS
            if code != int(formula and what == "refuse") or said != formula:
                return f"code {code}, {'a' if said else 'no'} warning"
            if code:
                return "" if not Path("out.csv").exists() else "it was written"
            with Path("out.csv").open(newline="") as file:
                found = next(csv.DictReader(file))["text"]
            return "" if found == ("'" * (formula and what == "escape") + cell) else f"{found!r} was written"

        return attempt

    return {
        f"{cell!r}, {what}": case(cell, what)
        for cell in (*FORMULAS, *NO_FORMULAS)
        for what in ("keep", "escape", "refuse")
    }


# --- damaged runs ------------------------------------------------------------------------------------------


def _replaced(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: _replaced(path, b""),
    "not UTF-8": lambda path: _replaced(path, b"\xff\xfe" + path.read_bytes()),
    "zero bytes": lambda path: _replaced(path, bytes(100)),
    "half": lambda path: _replaced(path, path.read_bytes()[: path.stat().st_size // 2]),
    "a list": lambda path: _replaced(path, b"[1]\n"),
    "null": lambda path: _replaced(path, b"null\n"),
    "an empty object": lambda path: _replaced(path, b"{}\n"),
    "nested": lambda path: _replaced(path, b'{"format": 1, "x": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n"),
    "huge numbers": lambda path: _replaced(path, path.read_bytes().replace(b"1", b"1" * 400)),
    "many digits": lambda path: _replaced(path, path.read_bytes().replace(b"1", b"1" * 5000)),
    "other types": lambda path: _replaced(path, path.read_bytes().replace(b'"', b"").replace(b"true", b"[]")),
    "objects gone": lambda path: _replaced(path, path.read_bytes().replace(b": {", b': 5, "gone": {')),
    "names gone": lambda path: _replaced(path, path.read_bytes().replace(b'"s', b'"_s').replace(b"row", b"wor")),
    "a folder": _folder,
    "a pipe": _pipe,
}
FILES = {
    "config.json": ("report", "export", "resume"),
    "log.jsonl": ("resume",),
    "rows.csv": ("report", "export"),
    "result.json": ("report",),
    "suspects.jsonl": ("report",),
    "rows.hashes": ("export",),
}
ARGUMENTS = {
    "report": ("report", "run"),
    "export": ("export", "run", "--drop", "suspects", "-o", "out.csv"),
    "resume": ("resume", "run", "--quiet", "--tensorboard"),
}


def _damaged(scratch: Path) -> dict[str, Callable[[Path], str]]:
    whole = scratch / "finished"

    def finish() -> str:
        from hyperkron.cleaning import CleanConfig, clean

        whole.mkdir()
        lines = [f"{(i * 37 % 100) / 50 - 1},{i * 53 % 97},{'ab'[i % 3 == 0]}\n" for i in range(ROWS)]
        for name, part in (("train", lines[:40]), ("trusted", lines[40:])):
            (whole / f"{name}.csv").write_text("x,z,label\n" + "".join(part))
        settings = CleanConfig(epochs=1, compare=(), device="cpu")
        clean(str(whole / "train.csv"), str(whole / "trusted.csv"), out=whole / "run", config=settings)
        return "done"

    written(finish, scratch / "told")

    def case(file: str, damage: Callable[[Path], None], command: str) -> Callable[[Path], str]:
        def attempt(folder: Path) -> str:
            shutil.copytree(whole / "run", folder / "run")
            damage(folder / "run" / file)
            code, out, err = _command(*ARGUMENTS[command])
            told = code == 0 or (err.startswith(f"hyperkron {command}: error: ") and len(err) < 2000)
            return "" if code in (0, 1) and told and "Traceback" not in out + err else f"code {code}, {err[-200:]}"

        return attempt

    return {
        f"{command}, {file}, {name}": case(file, damage, command)
        for file, commands in FILES.items()
        for command in commands
        for name, damage in DAMAGES.items()
    }


# --- streams, disks and kills ------------------------------------------------------------------------------


def _streams() -> dict[str, Callable[[Path], str]]:
    def case(redirected: str, wanted: int) -> Callable[[Path], str]:
        def attempt(folder: Path) -> str:
            _write_csv(folder / "train.csv", _rows())
            _run_of(folder / "train.csv")
            program = "import sys; from hyperkron.cli import main; sys.exit(main(['report', 'run']))"
            shell = f'"$0" -c "$1" {redirected}'
            done = subprocess.run(
                ["bash", "-c", f"set -o pipefail; {shell}", sys.executable, program], capture_output=True
            )
            whole = (folder / "run" / "report.html").read_bytes().rstrip().endswith(b"</html>")
            noise = b"Traceback" in done.stderr or b"Exception ignored" in done.stderr
            right = done.returncode == wanted and whole and not noise
            return "" if right else f"code {done.returncode}, {done.stderr[-200:]!r}"

        return attempt

    cases = {">&-": 0, "2>&-": 0, ">&- 2>&-": 0, "<&- >&- 2>&-": 0, ">/dev/full": 1, "2>/dev/full": 0, "| true": 1}
    return {redirected: case(redirected, wanted) for redirected, wanted in cases.items()}


@contextlib.contextmanager
def _largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _full_disk() -> dict[str, Callable[[Path], str]]:
    """A limit on the size of files stands for the end of the disk."""
    clean = ("clean", "train.csv", "--trusted-column", "n", "--epochs", "1", "--compare", "none", "--out", "new")
    commands = {
        "report": (("report", "run"), (0, 100, 4000)),
        "export": ((*ARGUMENTS["export"], "--overwrite"), (0, 100, 500)),
        "clean": ((*clean, "--features", "x"), (0, 100, 600, 3000)),
    }

    def case(arguments: tuple[str, ...], size: int) -> Callable[[Path], str]:
        def attempt(folder: Path) -> str:
            lines = [f"{i},{'ab'[i % 2]},a text {i},{int(i > 40)}\n" for i in range(ROWS)]
            (folder / "train.csv").write_text("x,label,text,n\n" + "".join(lines))
            _run_of(folder / "train.csv")
            for old in ("out.csv", "run/report.html"):
                (folder / old).write_text("before")
            names = {path.name for path in [*folder.iterdir(), *(folder / "run").iterdir()]}
            with _largest_file(size):
                code, _, err = _command(*arguments)
            kept = all((folder / old).read_text() == "before" for old in ("out.csv", "run/report.html"))
            left = {path.name for path in [*folder.iterdir(), *(folder / "run").iterdir()]} - names - {"new"}
            told = "cannot be written" in err and "Traceback" not in err
            return "" if code == 1 and kept and told and not left else f"code {code}, {sorted(left)}, {err[-200:]}"

        return attempt

    return {f"{name}, {size} bytes": case(told, size) for name, (told, sizes) in commands.items() for size in sizes}


def _killed_exports(scratch: Path) -> dict[str, Any]:
    """SIGKILL at a random moment of an export that replaces another: one of the two is there, and nothing else."""
    folder, chance, survived, torn = scratch / "killed", random.Random(0), 0, 0
    folder.mkdir()
    train = folder / "train.csv"
    _write_csv(train, _rows(20_000))
    _run_of(train, 20_000)
    told = ("export", str(folder / "run"), "--drop", "suspects", "--overwrite", "-o", str(folder / "out.csv"))
    begin = time.perf_counter()
    Child(lambda: _command(*told)).wait()
    duration, whole = time.perf_counter() - begin, (folder / "out.csv").read_bytes()
    names = {path.name for path in folder.iterdir()}
    for _ in range(KILLS):
        (folder / "out.csv").write_text("before")
        victim = Child(lambda: _command(*told))
        time.sleep(chance.uniform(0, duration))
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait()
        torn += len({path.name for path in folder.iterdir()} - names)
        sound = (folder / "out.csv").read_bytes() in (b"before", whole)
        Child(lambda: _command(*told)).wait()
        survived += sound and {path.name for path in folder.iterdir()} == names
    shutil.rmtree(folder)
    return {
        "fault": "SIGKILL during an export",
        "tries": KILLS,
        "survived": survived,
        "note": f"{torn} left a file behind, which the next export removed",
    }
