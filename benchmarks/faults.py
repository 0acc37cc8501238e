"""Runs are killed, signalled, fed hostile files and bad numbers; one table says how many survived.

    python benchmarks/faults.py [--kills 200 --mutations 500 --signals 50 --steps 40 --full 20 --races 20]

Every run is a process of its own, forked from this one, which has imported torch and never computes. A run *survives*
if the one that resumes it ends bit for bit where the uninterrupted one does: θ, λ, both optimizers and schedules,
factors and inverses, the order of the data, all random states and the history. A damaged checkpoint is survived if it
is refused and the one before it is taken instead, with a warning. A hostile file is survived if it is refused without
running, reading or writing anything else; a number that goes wrong if it ends in its documented status and leaves λ
where it was, or where the closed form says. The record goes to benchmarks/results/faults.json.
"""

from __future__ import annotations

import argparse
import errno
import gc
import mmap
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not in every child

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

import faults_clean
import faults_files
import faults_runtime
import faults_writers
import hostile
from common import write_result
from forks import Child, written

import hyperkron as hk
import numerics
import resuming
from hyperkron.training import checkpoint

METHODS = tuple(resuming.ALGORITHMS)
RUN_STEPS = 8
"""Steps of the runs that are killed at random."""
WIDTH = 42
"""Of the first column."""


def state(run: hk.Run) -> dict[str, Any]:
    """All of a run's state but where its checkpoints are."""
    return {key: value for key, value in run.state_dict().items() if key != "callbacks"}


def finished(method: str, steps: int, scratch: Path, resume: Path | None = None, at: int | None = None) -> str:
    """The digest of a run at ``steps``, continued from a checkpoint that must be intact; in this process."""
    warnings.simplefilter("error", hk.HyperkronWarning)
    run = resuming.start(method, [hk.Checkpoint(scratch / "elsewhere", every=10**9)])
    if resume is not None and checkpoint.candidates(resume):
        run.resume(resume, step=at)
    shutil.rmtree(scratch / "elsewhere", ignore_errors=True)
    run.advance(steps - run.state.step)
    return resuming.digest(state(run), scratch)


# --- SIGKILL at random moments -----------------------------------------------------------------------------


def killed(folder: Path, method: str, moment: float, during_save: int) -> None:
    """Run ``method`` with a checkpoint after every step and SIGKILL it.

    ``during_save``: after the beginning of so many saves; 0: after the fork. Then ``moment`` seconds later.
    """
    reader, writer = os.pipe()

    def victim() -> None:
        original = checkpoint.write

        def announced(*args: Any, **options: Any) -> Path:
            os.write(writer, b"s")
            return original(*args, **options)

        checkpoint.write = announced
        resuming.start(method, [hk.Checkpoint(folder, every=1, keep=2)], RUN_STEPS)

    child = Child(victim)
    os.close(writer)
    for _ in range(during_save):
        os.read(reader, 1)
    time.sleep(moment)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    os.close(reader)


def sigkill(tries: int, scratch: Path, chance: random.Random) -> dict[str, Any]:
    """Half of the kills at any moment of the run, half within the time of a save."""
    wanted = {m: written(lambda m=m: finished(m, RUN_STEPS, scratch), scratch / "wanted") for m in METHODS}
    begin = time.perf_counter()
    Child(lambda: resuming.start("SAMA", [hk.Checkpoint(scratch / "timing", every=1)], RUN_STEPS)).wait()
    duration = time.perf_counter() - begin
    survived, within, before_any = 0, 0, 0
    for i in range(tries):
        method, folder = METHODS[i % len(METHODS)], scratch / f"kill-{i}"
        save = chance.randint(1, RUN_STEPS) if (i // len(METHODS)) % 2 else 0
        killed(folder, method, chance.uniform(0, 0.04 if save else duration), save)
        within += any(folder.glob(".tmp-*")) if folder.exists() else 0
        before_any += not checkpoint.candidates(folder)
        got = written(lambda f=folder, m=method: finished(m, RUN_STEPS, scratch, f), scratch / "got")
        survived += got == wanted[method] != ""
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "fault": "SIGKILL at a random moment",
        "tries": tries,
        "survived": survived,
        "note": f"{within} while a checkpoint was half written, {before_any} before the first one",
    }


# --- SIGKILL in each of many consecutive steps -------------------------------------------------------------


def consecutive(method: str, steps: int, scratch: Path) -> dict[str, Any]:
    """Resume, do one step, save it, die in the middle of the next; each time also run on to the end and compare."""
    folder, end = scratch / f"steps-{method}", steps + 3
    wanted = written(lambda: finished(method, end, scratch), scratch / "wanted")
    survived = 0
    for step in range(1, steps + 1):

        def victim(step: int = step) -> None:
            run = resuming.start(method, [hk.Checkpoint(folder, every=1, keep=2)])
            if checkpoint.candidates(folder):
                run.resume(folder)
            run.advance(step - run.state.step)
            run.state.outer.step = lambda direction: os.kill(os.getpid(), signal.SIGKILL)  # θ has moved, λ not yet
            run.advance(1)

        killed_as_meant = Child(victim).wait() == -signal.SIGKILL
        got = written(lambda step=step: finished(method, end, scratch, folder, step), scratch / "got")
        survived += killed_as_meant and got == wanted != ""
    shutil.rmtree(folder, ignore_errors=True)
    return {"fault": f"SIGKILL within each of {steps} steps, {method}", "tries": steps, "survived": survived}


# --- SIGTERM and SIGINT ------------------------------------------------------------------------------------


class Clock(hk.training.Callback):
    """Tells the parent, through shared memory, how many steps are done."""

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory

    def on_boundary(self, run: hk.Run) -> None:
        self.memory[:8] = run.state.step.to_bytes(8, "little")


def signals(tries: int, scratch: Path, chance: random.Random) -> dict[str, Any]:
    """The exit code is 143 or 130, every finished step is in the checkpoint, and the run continues from it."""
    survived, lost = 0, 0
    for i in range(tries):
        memory, folder = mmap.mmap(-1, 8), scratch / f"signal-{i}"
        method, number = METHODS[i % len(METHODS)], (signal.SIGTERM, signal.SIGINT)[i // len(METHODS) % 2]

        def victim(method: str = method, folder: Path = folder, memory: mmap.mmap = memory) -> None:
            resuming.start(method, [hk.Checkpoint(folder, every=10**9), Clock(memory)], 10**6)

        child = Child(victim)
        while int.from_bytes(memory[:8], "little") == 0:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.2))
        os.kill(child.pid, number)
        code, done = child.wait(), int.from_bytes(memory[:8], "little")

        def continued(method: str = method, folder: Path = folder, done: int = done) -> str:
            run = resuming.start(method, [hk.Checkpoint(folder, every=10**9), Clock(mmap.mmap(-1, 8))])
            return resuming.digest(state(run.resume(folder).advance(1)), scratch) if done else ""

        saved = int(checkpoint.candidates(folder)[0].name.removeprefix("step-")) if folder.exists() else 0
        lost = max(lost, done - saved)
        got = written(continued, scratch / "got")
        wanted = written(lambda m=method, n=saved: finished(m, n + 1, scratch), scratch / "wanted")
        survived += code == 128 + number and done - saved <= 1 and got == wanted != ""
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "fault": "SIGTERM or SIGINT at a random moment",
        "tries": tries,
        "survived": survived,
        "note": f"exit code 143 or 130; at most {lost} finished steps lost",
    }


# --- damaged checkpoints -----------------------------------------------------------------------------------

DAMAGES = ("bit flip", "truncation", "deletion", "zeroed stretch", "appended bytes", "file of another step")


def damage(folder: Path, other: Path, kind: str, chance: random.Random) -> None:
    """Alter one file of a checkpoint so that it differs from what was written."""
    path = chance.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    if kind == "bit flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "truncation":
        del data[chance.randrange(len(data)) :]
    elif kind == "zeroed stretch":
        begin = chance.choice([i for i, byte in enumerate(data) if byte])
        end = min(len(data), begin + chance.randint(1, 4096))
        data[begin:end] = bytes(end - begin)
    elif kind == "appended bytes":
        data += chance.randbytes(chance.randint(1, 64))
    elif kind == "file of another step":
        data = bytearray((other / path.name).read_bytes())
    path.unlink()
    if kind != "deletion":
        path.write_bytes(data)


def mutations(tries: int, scratch: Path, chance: random.Random) -> dict[str, Any]:
    """Two checkpoints, the newer one damaged: it must be refused and the older one taken."""
    whole = scratch / "whole"
    Child(lambda: resuming.start("KFAC", [hk.Checkpoint(whole, every=1, keep=2)], 4)).wait()
    silent, survived = 0, 0
    for i in range(tries):
        folder = scratch / "damaged"
        shutil.copytree(whole, folder)
        newer, older = checkpoint.candidates(folder)
        damage(newer, older, DAMAGES[i % len(DAMAGES)], chance)
        try:
            checkpoint.read(newer)
            silent += 1
        except hk.training.DamagedCheckpoint:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                taken = checkpoint.newest(folder)
            named = any(newer.name in str(w.message) for w in caught if w.category is hk.HyperkronWarning)
            survived += taken.path == older and named
        shutil.rmtree(folder)
    return {
        "fault": "damaged checkpoint",
        "tries": tries,
        "survived": survived,
        "note": f"{silent} loaded silently; {', '.join(DAMAGES)}",
    }


# --- full disks --------------------------------------------------------------------------------------------


def full_disk(tries: int, scratch: Path, chance: random.Random) -> dict[str, Any]:
    """The disk has room for one checkpoint and a part of the next, from nothing to almost all of it."""
    disk = scratch / "disk"
    disk.mkdir()
    how = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    tiny = shutil.which("mount") is not None and subprocess.run(how, capture_output=True, check=False).returncode == 0
    survived = 0
    try:
        for _ in range(tries):
            share = chance.random()
            survived += Child(lambda share=share: _fill(disk, share, tiny, scratch)).wait() == 0
            for path in disk.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        if tiny:
            subprocess.run(["umount", str(disk)], check=True)
    means = "a tmpfs of 1 MiB" if tiny else "a limit on file sizes, for want of the right to mount a tmpfs"
    return {"fault": "disk full during a save", "tries": tries, "survived": survived, "note": f"by {means}"}


def _fill(disk: Path, share: float, tiny: bool, scratch: Path) -> None:
    """Save, let the next save run into the end of the disk, look whether the first is intact, and go on."""
    run = resuming.start("KFAC", [hk.Checkpoint(disk / "run", every=1)], 1)
    (first,) = checkpoint.candidates(disk / "run")
    before = checkpoint.check(first)
    needed = sum(record["size"] for record in before["files"].values())
    if tiny:
        free = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(bytes(free - int(share * needed)))
    else:
        largest = max(record["size"] for record in before["files"].values())
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * largest), resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run._record(run.algorithm.step(run.state, run.batches))
        run.callbacks[1].on_boundary(run)
    reasons = [os.strerror(errno.ENOSPC), os.strerror(errno.EFBIG)]
    said = [str(w.message) for w in caught if "could not be saved" in str(w.message)]
    assert any(reason in text for text in said for reason in reasons), "the save did not fail"
    left = {path.name for path in (disk / "run").iterdir()} - {"log-rank00000.jsonl"}
    assert left == {first.name}, "something was left behind"
    assert checkpoint.check(first) == before
    if tiny:
        (disk / "ballast").unlink()
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    run.advance(1)  # there is room again
    assert finished("KFAC", 3, scratch, disk / "run") == resuming.digest(state(run), scratch)


# --- the table ---------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("kills", 200), ("mutations", 500), ("signals", 50), ("steps", 40), ("full", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--races", type=int, default=20)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS, help="killed within each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cases", action="store_true", help="leave out hostile files and bad numbers")
    parser.add_argument("--no-record", action="store_true", help="print the table, write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what is here already stays shared with the children
    chance, begin, rows = random.Random(options.seed), time.perf_counter(), []
    print(f"{'fault':{WIDTH}}  tries  survived")
    with tempfile.TemporaryDirectory(prefix="faults-") as name:
        scratch = Path(name)
        faults = [
            lambda: sigkill(options.kills, scratch, chance),
            lambda: mutations(options.mutations, scratch, chance),
            lambda: full_disk(options.full, scratch, chance),
            lambda: signals(options.signals, scratch, chance),
            *(lambda method=method: consecutive(method, options.steps, scratch) for method in options.methods),
        ]
        faults += faults_runtime.faults(scratch)
        faults.append(lambda: faults_writers.writers(options.races, scratch))
        if not options.no_cases:
            faults += faults_files.faults(scratch)
            faults += faults_clean.faults(scratch)
            faults.append(lambda: hostile.malicious(scratch))
            faults += [lambda name=name: hostile.numbers(name, scratch) for name in numerics.CASES]
        for fault in faults:
            row = fault()
            rows.append(row)
            print(f"{row['fault']:{WIDTH}}  {row['tries']:5d}  {row['survived']:8d}  {row.get('note', '')}".rstrip())
            sys.stdout.flush()
    seconds = round(time.perf_counter() - begin, 1)
    if not options.no_record:
        write_result("faults.json", {"seed": options.seed, "seconds": seconds, "rows": rows})
    return 0 if all(row["survived"] == row["tries"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
