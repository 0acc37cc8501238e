"""How long factors and scores take, and how much memory, against kronfluence, in one process on an idle machine.

    python -m experiments.attribution.speed --data data/lds --device cuda

100 queries, and one aggregated query. The first call of each library is not counted. On a CPU memory is that of live
tensors in a call of its own, without what operations use inside.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import hyperkron as hk
from experiments.attribution.peers import kronfluence, loss
from experiments.attribution.settings import SETTINGS, Setting
from experiments.pieces import Cells
from support.storages import Storages

RUNS = 3
BATCH_SIZE, PEER_BATCH_SIZE = 256, 128
"""The default of hyperkron, and the fastest one of kronfluence on a CPU."""


def ours(setting: Setting, aggregate: bool, batch_size: int, share: int = 1) -> Callable[[torch.nn.Module], Any]:
    """Factors and scores by ``hk.attribute``, with what it does by default; A on one of ``share`` rows."""
    x, y = setting.train
    given = None if share == 1 else (x[: len(x) // share], y[: len(x) // share])
    return lambda model: hk.attribute(
        loss, model, (x, y), setting.queries, aggregate=aggregate, batch_size=batch_size, curvature_data=given
    )


def theirs(setting: Setting, aggregate: bool, batch_size: int, share: int = 1) -> Callable[[torch.nn.Module], Any]:
    """The same by kronfluence."""
    return lambda model: kronfluence(None, aggregate, share, batch_size)(model, setting)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    """Seconds (on a CPU of the processor), and on a GPU the peak of memory in MB above what was there before."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - began
    return seconds, (torch.cuda.max_memory_allocated() - before) / 2**20 if device.type == "cuda" else None


def counted(call: Callable[[], Any], setting: Setting, model: torch.nn.Module) -> float:
    """The peak of memory in MB of the tensors that a call makes."""
    with Storages([*setting.train, *setting.queries, *model.parameters()]) as count:
        call()
    return count.peak / 2**20


def compare(
    setting: Setting,
    aggregate: bool,
    batch_size: int = BATCH_SIZE,
    peer_batch_size: int = PEER_BATCH_SIZE,
    times: int = RUNS,
    quarter: bool = False,
) -> dict[str, Any]:
    """Seconds and memory of both, one run after the other in turn; an untrained network takes as long.

    With ``quarter`` also where factors and spectrum are measured on a quarter of the rows.
    """
    device = setting.train[0].device
    torch.manual_seed(0)
    model = setting.network().to(device)
    calls = {
        "hyperkron": ours(setting, aggregate, batch_size),
        "kronfluence": theirs(setting, aggregate, peer_batch_size),
    }
    if quarter:
        calls["hyperkron, A on a quarter"] = ours(setting, aggregate, batch_size, 4)
        calls["kronfluence, A on a quarter"] = theirs(setting, aggregate, peer_batch_size, 4)
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in calls}
    for _ in range(1 + times):
        for name, call in calls.items():
            found[name].append(timed(functools.partial(call, model), device))
    value: dict[str, Any] = {}
    for name, runs in found.items():
        value[name] = statistics.median(seconds for seconds, _ in runs[1:])
        if device.type == "cuda":
            value[f"{name} MB"] = max(mb or 0.0 for _, mb in runs[1:])
        elif "," not in name:
            value[f"{name} MB"] = counted(functools.partial(calls[name], model), setting, model)
    return value | {"ratio": value["kronfluence"] / value["hyperkron"], "threads": torch.get_num_threads()}


def measure(
    cells: Cells, data: Path | None, device: str, end: float, keep: Callable[[list[Any], Any, float, float], None]
) -> None:
    """Every comparison on the device that is missing."""
    torch.set_num_threads(os.cpu_count() or 1)
    for name, load in SETTINGS.items():
        keys = {way: ["speed", name, f"{'aggregate' if way else '100 queries'}, {device}"] for way in (False, True)}
        missing = {way: key for way, key in keys.items() if cells.get(key) is None}
        if missing and time.monotonic() < end:
            setting = load(data).to(torch.device(device))
            for aggregate, key in missing.items():
                began = time.perf_counter()
                keep(key, compare(setting, aggregate), time.perf_counter() - began, 0.0)


def main(arguments: list[str] | None = None) -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--settings", nargs="*", default=["fashion_mlp", "cifar_cnn"], choices=list(SETTINGS))
    parser.add_argument("--rows", type=int, help="training rows. Default: all")
    parser.add_argument("--batch-size", type=int, default=BATCH_SIZE, help="of hyperkron")
    parser.add_argument("--peer-batch-size", type=int, default=PEER_BATCH_SIZE, help="of kronfluence")
    parser.add_argument("--runs", type=int, default=RUNS, help="of each, after one that is not counted")
    parser.add_argument("--quarter", action="store_true", help="also with A on a quarter of the rows")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    for name in options.settings:
        whole = SETTINGS[name](options.data).to(torch.device(options.device))
        x, y = whole.train
        setting = replace(whole, train=(x[: options.rows], y[: options.rows]))
        for aggregate in (False, True):
            sizes = options.batch_size, options.peer_batch_size
            found = compare(setting, aggregate, *sizes, options.runs, options.quarter)
            print(json.dumps({"setting": name, "queries": "aggregate" if aggregate else "100 queries", **found}))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
