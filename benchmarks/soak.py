"""Ten thousand outer steps of a small problem: does memory, a hook or a file handle leak?

    python benchmarks/soak.py [--steps 10000]

KFAC through ``fit`` with every guard, the log and ten checkpoints. Resident memory is read from /proc after every 100
steps, when garbage has been collected and free memory been given back to the system; its slope is that of the
least-squares line after the first tenth, in which libraries and allocators warm up. The history, which grows with the
steps, is part of it. One line is printed, and the record goes to benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

from common import _resident, _return_free_memory, write_result

import hyperkron as hk
import resuming

LIMIT = 1.0
"""MB of growth that 1000 steps may leave."""


def hooks(model: torch.nn.Module) -> int:
    """Every hook on every module and parameter."""
    count = 0
    for module in model.modules():
        count += sum(len(value) for name, value in vars(module).items() if name.endswith("_hooks"))
    for p in model.parameters():
        count += len(p._backward_hooks or ()) + len(getattr(p, "_post_accumulate_grad_hooks", None) or ())
    return count


def handles() -> int:
    """Open file descriptors of this process, less the one that counts them."""
    return len(os.listdir("/proc/self/fd")) - 1


class Gauge(hk.training.Callback):
    """Memory, hooks and handles, read after every ``every`` steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.readings: list[dict[str, Any]] = []

    def on_boundary(self, run: hk.Run) -> None:
        if run.state.step % self.every == 0:
            gc.collect()
            _return_free_memory()
            reading = {"step": run.state.step, "resident": _resident("VmRSS"), "handles": handles()}
            reading["hooks"] = hooks(run.state.model) + hooks(run.state.hyper)
            self.readings.append(reading)


def slope(readings: list[dict[str, Any]]) -> float:
    """MB of resident memory that 1000 steps add, by least squares."""
    x = torch.tensor([float(r["step"]) for r in readings], dtype=torch.float64)
    y = torch.tensor([float(r["resident"]) for r in readings], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / (x * x).sum()) * 1000 / 1e6


def soak(steps: int, every: int, folder: Path) -> Gauge:
    """The run."""
    gauge = Gauge(every)
    guards = hk.training.default_guards(folder / "failed")
    callbacks = [*guards, gauge, hk.Checkpoint(folder / "run", every=max(1, steps // 10), keep=2, best="outer_loss")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resuming.start("KFAC", callbacks, steps)
    return gauge


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--no-record", action="store_true", help="print the line, write no file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        readings = soak(options.steps, options.every, Path(folder)).readings
    settled = readings[len(readings) // 10 :]
    found = {
        "seed": 5,
        "steps": options.steps,
        "seconds": round(time.perf_counter() - begin, 1),
        "slope_mb_per_1000_steps": round(slope(settled), 4),
        "resident_mb": [round(settled[0]["resident"] / 1e6, 2), round(settled[-1]["resident"] / 1e6, 2)],
        "hooks": sorted({r["hooks"] for r in readings}),
        "handles": sorted({r["handles"] for r in readings}),
    }
    print("steps   seconds  MB per 1000 steps  hooks  handles")
    print(
        f"{options.steps:<6d}  {found['seconds']:7.1f}  {found['slope_mb_per_1000_steps']:17.4f}  "
        f"{found['hooks']!s:5}  {found['handles']}"
    )
    if not options.no_record:
        write_result("soak.json", {**found, "readings": readings})
    flat = found["slope_mb_per_1000_steps"] < LIMIT
    return 0 if flat and len(found["hooks"]) == 1 and len(found["handles"]) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
