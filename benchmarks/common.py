"""What the benchmarks share: timing, peak memory, and the record that is written beside a result.

Scripts in this folder are run by their path (``python benchmarks/x.py``) and import this file as ``common``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

import provenance
from provenance import hardware as hardware

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("hyperkron", "torch", "numpy", "curvlinops-for-pytorch")


# --- time --------------------------------------------------------------------------------------------------


def synchronize(device: str | torch.device = "cpu") -> None:
    """Wait until the device has done what it was asked."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def freed(device: str | torch.device = "cpu", *, workspaces: bool = True) -> None:
    """Give back memory that nothing uses; ``workspaces`` of cuBLAS too, unless CUDA graphs that use them are alive."""
    gc.collect()
    if torch.device(device).type == "cuda":
        if workspaces:
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def seconds(function: Callable[[], object], device: str | torch.device = "cpu") -> float:
    """How long one call takes, the device synchronised before and after."""
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def alternating(
    functions: Mapping[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    device: str | torch.device = "cpu",
) -> dict[str, list[float]]:
    """Times of every function, called in turns and in an order that reverses each round.

    What slows the machine for a while then slows all of them, and none always runs first.
    """
    for _ in range(warmup):
        for function in functions.values():
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(repeats):
        for name in list(functions)[:: 1 if i % 2 == 0 else -1]:
            gc.collect()
            times[name].append(seconds(functions[name], device))
    return times


# --- memory ------------------------------------------------------------------------------------------------


def peak_memory(function: Callable[[], object], device: str | torch.device = "cpu") -> int:
    """The most memory, in bytes, that a call needs on top of what is in use before it.

    On CUDA, what the allocator hands out. On the CPU, resident memory of this process: for a comparison run
    each candidate in a process of its own, because memory freed earlier may stay resident and hide a need.
    """
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _return_free_memory()
    before = _resident("VmRSS")
    if _reset_high_water_mark():
        function()
        return _resident("VmHWM") - before
    return _sampled_peak(function) - before


def _resident(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; memory on the CPU is measured on Linux only.")


def _reset_high_water_mark() -> bool:
    """Let VmHWM, the peak of resident memory, start again from now; false where that is not allowed."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return _resident("VmHWM") - _resident("VmRSS") < 2**22


def _return_free_memory() -> None:
    """Give memory that malloc keeps for later back to the system, so that it is not counted as in use."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _sampled_peak(function: Callable[[], object]) -> int:
    """The largest resident memory a thread sees, looking every millisecond, while ``function`` runs."""
    done, peak = threading.Event(), [_resident("VmRSS")]

    def watch() -> None:
        while not done.wait(1e-3):
            peak[0] = max(peak[0], _resident("VmRSS"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        function()
    finally:
        done.set()
        watcher.join()
    return peak[0]


# --- the record --------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those that are installed."""
    return provenance.versions(_PACKAGES)


def line_writer(out: str | None) -> Callable[[dict[str, Any]], None]:
    """Prints each row at once as a line of JSON, and appends it to ``out``; a bare name is a file among the results."""
    path = None if out is None else Path(out)
    path = RESULTS / path if path is not None and path.parent == Path() else path

    def keep(row: dict[str, Any]) -> None:
        line = json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, ensure_ascii=False)
        print(line, flush=True)
        if path is not None:
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    return keep


def write_result(path: str | Path, result: Mapping[str, Any]) -> Path:
    """Write a result as JSON, with the command that made it, the hardware and the versions.

    A bare file name goes to ``benchmarks/results``. The caller puts the seed into ``result``. A list of numbers is one
    line.
    """
    path = Path(path)
    path = RESULTS / path if path.parent == Path() else path
    path.parent.mkdir(parents=True, exist_ok=True)
    script = Path(sys.argv[0])
    command = shlex.join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]])
    record = {"command": command, **result, "hardware": hardware(), "versions": versions()}
    path.write_text(provenance.in_lines(record) + "\n", "utf-8")
    return path
