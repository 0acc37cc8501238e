"""How long factors and scores take, and how much memory, against kronfluence, in one process on an idle machine.

    python -m experiments.attribution.speed --data data/lds --device cuda

100 queries, and one aggregated query. The first call of each library is not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hyperkron as hk
from experiments.attribution.peers import kronfluence, loss
from experiments.attribution.settings import SETTINGS, Setting
from experiments.pieces import Cells

NAMES = ("fashion_mlp", "cifar_cnn")
RUNS = 3


def ours(setting: Setting, aggregate: bool) -> Callable[[torch.nn.Module], Any]:
    """Factors and scores by ``hk.attribute``, with what it does by default."""
    return lambda model: hk.attribute(loss, model, setting.train, setting.queries, aggregate=aggregate, batch_size=1000)


def theirs(setting: Setting, aggregate: bool) -> Callable[[torch.nn.Module], Any]:
    """The same by kronfluence."""
    return lambda model: kronfluence(None, aggregate)(model, setting)


def timed(call: Callable[[], Any], device: torch.device) -> tuple[float, float | None]:
    """Seconds, and on a GPU the peak of memory in MB above what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    return seconds, (torch.cuda.max_memory_allocated() - before) / 2**20 if device.type == "cuda" else None


def compare(setting: Setting, aggregate: bool) -> dict[str, Any]:
    """Seconds and memory of both, one run after the other in turn; an untrained network takes as long."""
    device = setting.train[0].device
    torch.manual_seed(0)
    model = setting.network().to(device)
    calls = {"hyperkron": ours(setting, aggregate), "kronfluence": theirs(setting, aggregate)}
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in calls}
    for _ in range(1 + RUNS):
        for name, call in calls.items():
            found[name].append(timed(lambda call=call: call(model), device))
    value: dict[str, Any] = {}
    for name, runs in found.items():
        value[name] = statistics.median(seconds for seconds, _ in runs[1:])
        if device.type == "cuda":
            value[f"{name} MB"] = max(mb or 0.0 for _, mb in runs[1:])
    return value | {"ratio": value["kronfluence"] / value["hyperkron"], "threads": torch.get_num_threads()}


def measure(
    cells: Cells, data: Path | None, device: str, end: float, keep: Callable[[list[Any], Any, float, float], None]
) -> None:
    """Every comparison that is missing, on the device and on the CPU."""
    for place in dict.fromkeys([device, "cpu"]):
        for name in NAMES:
            for aggregate in (False, True):
                key = ["speed", name, f"{'aggregate' if aggregate else '100 queries'}, {place}"]
                if cells.get(key) is None and time.monotonic() < end:
                    began = time.perf_counter()
                    value = compare(SETTINGS[name](data).to(torch.device(place)), aggregate)
                    keep(key, value, time.perf_counter() - began, 0.0)


def main(arguments: list[str] | None = None) -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--settings", nargs="*", default=NAMES, choices=list(SETTINGS))
    options = parser.parse_args(arguments)
    for name in options.settings:
        for aggregate in (False, True):
            setting = SETTINGS[name](options.data).to(torch.device(options.device))
            print(name, "aggregate" if aggregate else "100 queries", compare(setting, aggregate), flush=True)


if __name__ == "__main__":
    main()
