"""Several processes on this computer: the same numbers on 1 to 4, seconds of a step, and one of them killed.

    python benchmarks/ranks.py [--kills 20 --steps 40] [--only torchrun]
    python benchmarks/ranks.py --nccl         # one process on a GPU; the record goes to benchmarks/results/nccl.json

Processes are forked from this one, which never computes, and meet by gloo. Compared with one process are hypergradients
by every method and runs of 50 steps: of models and λ that all processes hold alike, of models that ``fully_shard`` has
sharded, and of sharded example weights. A kill is *survived* if the other process ends with a message within a minute,
and the two that are started again end where an uninterrupted run does (float64: to 1e-10); as often torchrun starts
them again. The record goes to benchmarks/results/ranks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

from common import RESULTS, write_result

import hyperkron as hk
import parallel_runs
import sharded_runs
from hyperkron.training import checkpoint
from parallel_runs import exit_codes, started

WAYS = ("auto", "reverse", "forward", "difference")


def results(size: int, function: Callable[[], dict[str, Any]], folder: Path) -> dict[str, torch.Tensor]:
    """The tensors that ``function()`` returns on the first of ``size`` processes."""

    def work(rank: int) -> None:
        found = function()
        if rank == 0:
            save_file(found, folder / "found.safetensors")

    assert exit_codes(started(size, work, folder)) == [0] * size, (folder / "errors-0").read_text()
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

    assert exit_codes(started(size, work, folder)) == [0] * size, (folder / "errors-0").read_text()
    ranks = [json.loads((folder / f"traffic-{rank}.json").read_text()) for rank in range(size)]
    return {
        method: {
            kind: n if kind == "products" else sum(rank[method][kind] for rank in ranks) for kind, n in one.items()
        }
        for method, one in ranks[0].items()
    }


def sharded(mode: str, runs: list[str]) -> dict[str, torch.Tensor]:
    """Hypergradients and ends of runs with θ (``f``), λ (``w``) or both sharded; with "" neither."""
    found = {}
    for dtype, names in ((torch.float64, sharded_runs.METHODS), (torch.float32, (*sharded_runs.NAMED, "kfac reverse"))):
        for name, x in sharded_runs.named(None, list(names), mode, dtype).items():
            found[f"{dtype} {name}"] = x
    for name in runs:
        found |= {f"run {name} {k}": x for k, x in sharded_runs.ended(None, name, mode, parallel_runs.STEPS).items()}
    return found


def weights_held() -> dict[str, torch.Tensor]:
    """Of 24 and of 240 thousand example weights: what a process holds and sends."""
    tables = [sharded_runs.costs(None, count) for count in (24, 240_000)]
    return {kind: torch.tensor([table[kind] for table in tables]) for kind in tables[0]}


def trained() -> dict[str, torch.Tensor]:
    """λ and θ after 50 steps."""
    return parallel_runs.trained(None, parallel_runs.STEPS)[0]


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
    exit_codes(pids)
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


def restarted(count: int, folder: Path) -> dict[str, Any]:
    """How often of ``count`` times torchrun starts the example again when one of two processes is killed at random, and
    it ends as on one process."""
    script = Path(__file__).parents[1] / "examples" / "data_parallel.py"
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    here["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else they may look for each other where they were before
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    alone, moment, continued = folder / "alone", random.Random(0), 0
    subprocess.run([sys.executable, str(script), str(alone)], env=here, check=True)
    wanted = checkpoint.newest(alone).state["state"]["hyper"]["weight"]
    for number in range(count):
        together = folder / f"together-{number}"
        process = subprocess.Popen([sys.executable, *options, str(script), str(together)], env=here)
        while not any(together.glob("step-*")):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(moment.uniform(0.0, 0.3))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[moment.randrange(2)]), signal.SIGKILL)
        ended = process.wait(120)
        found = checkpoint.newest(together).state["state"]["hyper"]["weight"]
        continued += ended == 0 and float((found - wanted).norm() / wanted.norm()) < 1e-10
        print(f"torchrun, kill {number}: {continued} continued", flush=True)
    return {"kills": count, "continued": continued}


def errors_of(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The largest relative difference of hypergradients by dtype, and the largest difference of ends of runs."""
    record: dict[str, Any] = {}
    for kind in ("torch.float64", "torch.float32", "run"):
        errors = {
            name: float((found[name] - x).abs().max() if kind == "run" else (found[name] - x).norm() / x.norm())
            for name, x in wanted.items()
            if name.startswith(kind)
        }
        if errors:
            worst = max(errors, key=errors.__getitem__)
            record[kind] = {"largest": errors[worst], "where": worst}
    return record


def compared_sharded(folder: Path) -> dict[str, Any]:
    """Sharded θ and λ on 1, 2 and 4 processes against one process that has all of them."""
    runs = list(sharded_runs.ALGORITHMS)
    wanted = results(1, lambda: sharded("", runs), folder)
    record: dict[str, Any] = {}
    for mode, what in (("w", "λ"), ("f", "θ"), ("fw", "θ and λ")):
        for size in (1, 2, 4):
            chosen = runs if mode == "w" else ["kfac"] if (mode, size) == ("f", 2) else []
            found = results(size, lambda m=mode, c=chosen: sharded(m, c), folder)  # type: ignore[misc]
            here = {name: x for name, x in wanted.items() if name in found}
            record[f"{what} on {size}"] = errors_of(found, here)
            print(f"{what} sharded among {size}: {record[f'{what} on {size}']}", flush=True)
    for size in (1, 2, 4):
        record[f"weights on {size}"] = {k: x.tolist() for k, x in results(size, weights_held, folder).items()}
        print(f"24 and 240000 weights on {size}: {record[f'weights on {size}']}", flush=True)
    return record


def nccl() -> dict[str, Any]:
    """One process on the GPU that meets itself by NCCL, with θ and λ sharded, against a plain one."""
    meeting = tempfile.mktemp()
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=0, world_size=1)
    sharded_runs.KIND = "cuda"
    methods = ["identity", "sama", "kfac reverse", "ekfac reverse", "cg"]
    record: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for dtype in (torch.float64, torch.float32):
        wanted = sharded_runs.named(None, methods, "", dtype)
        for mode in ("w", "f", "fw"):
            found = sharded_runs.named(None, methods, mode, dtype)
            record[f"{dtype} {mode}"] = max(float((found[n] - x).norm() / x.norm()) for n, x in wanted.items())
    dist.destroy_process_group()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument(
        "--only", choices=("traffic", "torchrun", "kills"), help="one part, and keep the rest of the record"
    )
    parser.add_argument("--nccl", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.nccl:
        return write_result("nccl.json", nccl())
    record: dict[str, Any] = {"seed": 0, "errors": {}, "seconds": {}}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.only in (None, "traffic"):
            record["traffic"] = {size: traffic(size, folder) for size in (2, 4)}
        if options.only in (None, "torchrun"):
            record["torchrun"] = restarted(options.kills, folder)
        if options.only:
            kept = json.loads((RESULTS / "ranks.json").read_text("utf-8"))
            command = f"python benchmarks/ranks.py --only {options.only} --kills {options.kills}"
            found = kills(options.kills, options.steps, folder) if options.only == "kills" else record
            new = found if options.only == "kills" else {options.only: record[options.only]}
            new |= {f"command of {options.only}": command}
            (RESULTS / "ranks.json").write_text(json.dumps(kept | new, indent=2) + "\n", "utf-8")
            return
        one = results(1, grid, folder)
        for size in (2, 3, 4):
            found = results(size, grid, folder)
            errors = {name: float((found[name] - x).norm() / x.norm()) for name, x in one.items()}
            for dtype in ("torch.float64", "torch.float32"):
                worst = max((name for name in errors if name.startswith(dtype)), key=errors.__getitem__)
                record["errors"][f"{size} {dtype}"] = {"largest": errors[worst], "method": worst}
                print(f"{size} processes, {dtype}: {errors[worst]:.1e} ({worst})", flush=True)
        whole = results(1, trained, folder)
        for size in (2, 4):
            ends = results(size, trained, folder)
            record["errors"][f"{size} run"] = max(float((ends[name] - x).abs().max()) for name, x in whole.items())
            print(f"{size} processes, 50 steps: {record['errors'][f'{size} run']:.1e}", flush=True)
        record["sharded"] = compared_sharded(folder)
        for size in (1, 2, 4):
            record["seconds"][size] = float(results(size, seconds, folder)["seconds"])
            print(f"{size} processes: {1e3 * record['seconds'][size]:.1f} ms a step", flush=True)
        record |= kills(options.kills, options.steps, folder)
        print(f"{record['survived']} of {record['kills']} kills survived", flush=True)
    write_result("ranks.json", record)


if __name__ == "__main__":
    main()
