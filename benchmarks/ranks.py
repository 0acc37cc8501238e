"""Several processes on this computer: the same numbers on 1 to 4, seconds of a step, and one of them killed.

    python benchmarks/ranks.py [--kills 20 --steps 40] [--traffic-only]

Processes are forked from this one, which never computes, and meet by gloo. A kill is *survived* if the other process
ends with a message within a minute, and the two that are started again end where an uninterrupted run does (float64:
to 1e-10). The record goes to benchmarks/results/ranks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not in every child
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

from common import RESULTS, write_result

import hyperkron as hk
import parallel_runs

WAYS = ("auto", "reverse", "forward", "difference")


def started(size: int, function: Callable[[int], object], folder: Path) -> list[int]:
    """The ids of ``size`` forked processes that meet and run ``function(rank)``; what they say goes to files."""
    meeting, found = tempfile.mktemp(dir=folder), []
    for rank in range(size):
        pid = os.fork()
        if pid:
            found.append(pid)
            continue
        code = 1
        try:
            os.dup2(os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            warnings.simplefilter("ignore")
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
            function(rank)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return found


def ended(pids: list[int]) -> list[int]:
    """Their exit codes; minus the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def results(size: int, function: Callable[[], dict[str, Any]], folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that ``function()`` returns on the first of ``size`` processes."""

    def work(rank: int) -> None:
        found = function()
        if rank == 0:
            save_file(found, folder / "found.safetensors")

    assert ended(started(size, work, folder)) == [0] * size, (folder / "errors-0").read_text()
    return load_file(folder / "found.safetensors")


def grid() -> dict[str, torch.Tensor]:
    """Hypergradients by every method and every way to the cross term, in both precisions."""
    found = {
        f"{dtype} {k}": x
        for dtype in (torch.float64, torch.float32)
        for k, x in parallel_runs.hypergradients(None, dtype).items()
    }
    for way in WAYS:
        problem, model, hyper, *batches = parallel_runs.make(torch.float64)
        result = hk.kfac(0.1, cross=way).compute(hk.training.DataParallel(problem), model, hyper, *batches)
        found[f"torch.float64 cross {way}"] = torch.cat([g.reshape(-1) for g in result.grads.values()])
    return found


def traffic(size: int, folder: Path) -> dict[str, dict[str, int]]:
    """Bytes of one hypergradient by every method, as all ranks together give them to collectives; and its products."""

    def work(rank: int) -> None:
        found: dict[str, dict[str, int]] = {}
        parallel_runs.hypergradients(None, torch.float64, found)
        (folder / f"traffic-{rank}.json").write_text(json.dumps(found))

    assert ended(started(size, work, folder)) == [0] * size, (folder / "errors-0").read_text()
    ranks = [json.loads((folder / f"traffic-{rank}.json").read_text()) for rank in range(size)]
    return {
        method: {
            kind: n if kind == "products" else sum(rank[method][kind] for rank in ranks) for kind, n in one.items()
        }
        for method, one in ranks[0].items()
    }


def seconds() -> dict[str, torch.Tensor]:
    """Seconds of a step of ``fit``, after ten."""
    _, run = parallel_runs.trained(None, 10)
    before = run.seconds
    run.advance(30, seconds=float("inf"))
    return {"seconds": torch.tensor((run.seconds - before) / 30)}


def killed(folder: Path, steps: int, moment: random.Random) -> tuple[float, str]:
    """Kill one of two processes after a random checkpoint; seconds until the other has ended, and what it says."""
    pids = started(2, lambda rank: parallel_runs.trained(None, steps, folder / "run", every=1), folder)
    wanted, victim = moment.randrange(1, steps - 5), moment.randrange(2)
    while not any(int(path.name[5:]) >= wanted for path in (folder / "run").glob("step-*")):
        time.sleep(0.002)
    time.sleep(moment.uniform(0.0, 0.05))
    begin = time.monotonic()
    os.kill(pids[victim], signal.SIGKILL)
    ended(pids)
    words = (folder / f"errors-{1 - victim}").read_text().strip().splitlines()
    return time.monotonic() - begin, words[-1] if words else ""


def kills(count: int, steps: int, folder: Path) -> dict[str, Any]:
    """How many of ``count`` kills were survived, and the longest wait."""
    moment, survived, waits = random.Random(0), 0, []
    wanted = results(1, lambda: parallel_runs.trained(None, steps)[0], folder)
    for number in range(count):
        with tempfile.TemporaryDirectory() as scratch:
            here = Path(scratch)
            wait, words = killed(here, steps, moment)
            waits.append(wait)
            found = results(2, lambda here=here: parallel_runs.trained(None, steps, here / "run")[0], here)  # type: ignore[misc]
            same = all(float((found[name] - x).abs().max()) < 1e-10 for name, x in wanted.items())
            survived += same and wait < 60 and "LostProcessError: another process has ended" in words
            print(f"kill {number}: {wait:.1f} s, {'same end' if same else 'ANOTHER END'}, {words[:90]}", flush=True)
    return {"kills": count, "survived": survived, "longest_wait": max(waits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--traffic-only", action="store_true", help="count bytes, and keep the rest of the record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"seed": 0, "errors": {}, "seconds": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        record["traffic"] = {size: traffic(size, folder) for size in (2, 4)}
        if options.traffic_only:
            kept = json.loads((RESULTS / "ranks.json").read_text("utf-8"))
            (RESULTS / "ranks.json").write_text(
                json.dumps(kept | {"traffic": record["traffic"]}, indent=2) + "\n", "utf-8"
            )
            return
        one = results(1, grid, folder)
        for size in (2, 3, 4):
            found = results(size, grid, folder)
            errors = {name: float((found[name] - x).norm() / x.norm()) for name, x in one.items()}
            for dtype in ("torch.float64", "torch.float32"):
                worst = max((name for name in errors if name.startswith(dtype)), key=errors.__getitem__)
                record["errors"][f"{size} {dtype}"] = {"largest": errors[worst], "method": worst}
                print(f"{size} processes, {dtype}: {errors[worst]:.1e} ({worst})", flush=True)
        for size in (1, 2, 4):
            record["seconds"][size] = float(results(size, seconds, folder)["seconds"])
            print(f"{size} processes: {1e3 * record['seconds'][size]:.1f} ms a step", flush=True)
        record |= kills(options.kills, options.steps, folder)
        print(f"{record['survived']} of {record['kills']} kills survived", flush=True)
    write_result("ranks.json", record)


if __name__ == "__main__":
    main()
