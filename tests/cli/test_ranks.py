"""Commands under torchrun."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from hyperkron.cli import main, ranks
from tables import write_table

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def become(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "here")
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr(ranks, "silence", lambda stream: None)


def test_other_commands_are_carried_out_once(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    become(monkeypatch, 1)
    assert main(["report", "nowhere"]) == 0
    assert capsys.readouterr() == ("", "")
    become(monkeypatch, 0)
    assert main(["report", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("hyperkron report uses one of the 2 processes.\nhyperkron report: error:")


def test_only_torchrun_makes_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    become(monkeypatch, 1)
    assert ranks.processes() == (1, 2)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert ranks.processes() == (0, 1)


def test_each_process_is_a_worker_of_a_sweep(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    Path("mine.py").write_text("def error(trial):\n    return (trial['x'] - 2) ** 2\n")
    monkeypatch.syspath_prepend(".")
    sweep = ["sweep", "mine:error", "--search", "x=0..4", "--trials", "3", "-o", "trials.csv", "--quiet"]
    become(monkeypatch, 1)
    assert main(sweep) == 0 and not Path("trials.csv").exists()
    become(monkeypatch, 0)
    assert main(sweep) == 0
    with Path("trials.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3


def test_a_failure_says_which_process_it_was(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    become(monkeypatch, 1)
    assert main(["sweep", "missing:error", "--search", "x=0..4"]) == 1
    assert "hyperkron sweep: error: process 1: " in capsys.readouterr().err


def test_wrong_usage_is_told_once(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    for rank in (1, 0):
        become(monkeypatch, rank)
        assert main(["sweep", "mine:error"]) == main(["clean", "--bogus"]) == 2
    err = capsys.readouterr().err
    assert err.count("--search is missing") == err.count("unrecognized arguments: --bogus") == 1


def test_other_processes_resume_with_the_options_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("hyperkron.cleaning.api.assist", lambda folder, size, **more: told.append((folder, more)))
    monkeypatch.setattr(ranks.Meeting, "__enter__", lambda meeting: meeting)
    monkeypatch.setattr(ranks.Meeting, "folder", lambda meeting: "/run")
    become(monkeypatch, 1)
    assert main(["resume", "run", "--encoder", "moved", "--seed", "3"]) == 0
    assert main(["clean", "train.csv", "--encoder", "here"]) == 0  # config.json says all
    assert told == [
        ("/run", {"model": None, "expected": {"encoder": "moved", "seed": 3}}),
        ("/run", {"model": None, "expected": None}),
    ]


@pytest.fixture
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchrun keeps no store, the first process does."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    for name, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": False}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.usefixtures("own_store")
@pytest.mark.parametrize("folder", [Path("here"), None])
def test_others_hear_of_the_folder_or_that_there_is_nothing_to_do(folder: Path | None) -> None:
    def first() -> None:
        with ranks.Meeting(0, 2) as meeting:
            if folder is not None:
                meeting.tell(folder)
        heard.wait(60)  # the store lives as long as the meeting

    heard, thread = threading.Event(), threading.Thread(target=first)
    thread.start()
    with ranks.Meeting(1, 2) as second:
        assert second.folder() == (None if folder is None else str(folder.resolve()))
    heard.set()
    thread.join(60)


@pytest.mark.usefixtures("own_store")
def test_a_program_with_a_process_group_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        become(monkeypatch, 0, 1)
        with ranks.Meeting(0, 1):
            assert dist.is_initialized()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_cannot_be_reached_is_told_in_words(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    become(monkeypatch, rank)
    assert main(["clean", "train.csv"]) == 1
    err = capsys.readouterr().err
    assert "the store of torchrun cannot be reached" in err and "leave RANK" in err and "Traceback" not in err


def start(count: int, *arguments: str) -> Any:
    """The command under torchrun."""
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    command += ["-m", "hyperkron", *arguments]
    return subprocess.Popen(command, env=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_clean_under_torchrun(capsys: Captured) -> None:
    write_table()
    given = ["clean", "train.csv", "--label", "kind", "--trusted-column", "checked", "--epochs", "1", "--out"]
    assert main([*given, "one"]) == 0
    told = capsys.readouterr().out
    wrong = start(2, *given, "wrong", "--text", "chekced")
    out, err = wrong.communicate(timeout=300)
    assert wrong.returncode != 0 and out == "" and err.count("hyperkron clean: error: --text='chekced'") == 1
    two = start(2, *given, "two")
    out, err = two.communicate(timeout=300)
    assert two.returncode == 0, err
    assert Path("one/rows.csv").read_bytes() == Path("two/rows.csv").read_bytes()
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()
    assert out.split("report ")[0] == told.split("report ")[0]  # printed once


@pytest.mark.long
def test_a_process_that_is_killed_ends_the_command_and_the_run_continues(capsys: Captured) -> None:
    write_table()
    given = ["clean", "train.csv", "--label", "kind", "--trusted-column", "checked", "--out"]
    assert main([*given, "one", "--quiet"]) == 0
    two = start(2, *given, "two")
    while not Path("two/stages/claims/without-fold-trusted-expert").exists():  # the second process has begun
        assert two.poll() is None
        time.sleep(0.01)
    children = Path(f"/proc/{two.pid}/task/{two.pid}/children").read_text().split()
    ranks_of = {int(pid): dict(x.split("=", 1) for x in _environment(pid)) for pid in children}
    os.kill(next(pid for pid, x in ranks_of.items() if x.get("RANK") == "1"), signal.SIGKILL)
    _, err = two.communicate(timeout=300)
    assert two.returncode != 0 and "continue with: hyperkron resume two" in err
    again = start(2, "resume", "two")
    again.communicate(timeout=300)
    assert again.returncode == 0
    assert Path("one/rows.csv").read_bytes() == Path("two/rows.csv").read_bytes()


def _environment(pid: str) -> list[str]:
    return [x for x in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0") if "=" in x]
