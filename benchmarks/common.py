"""What the benchmarks share: timing, peak memory, and the record that is written beside a result.

Scripts in this folder are run by their path (``python benchmarks/x.py``) and import this file as ``common``.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import re
import shlex
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

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


def median_seconds(
    function: Callable[[], object], *, repeats: int = 5, warmup: int = 1, device: str | torch.device = "cpu"
) -> float:
    """The median time of one call."""
    times = alternating({"": function}, repeats=repeats, warmup=warmup, device=device)
    return statistics.median(times[""])


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


def hardware(device: str | torch.device | None = None) -> dict[str, Any]:
    """What the numbers were measured on; with the GPU if there is one, or if ``device`` is one."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(None if device is None else torch.device(device))
        found["cuda"] = torch.version.cuda
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = torch.__version__
    return found


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
    path.write_text(_in_lines(json.dumps(record, indent=2, ensure_ascii=False)) + "\n", "utf-8")
    return path


def _in_lines(text: str) -> str:
    """JSON with every list of numbers on one line."""
    return re.sub(r"\[[\s\d.,eE+-]*\]", lambda found: " ".join(found[0].split()), text)
