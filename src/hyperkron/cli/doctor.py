"""``hyperkron doctor``: is everything here, and does it compute what it should?"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hyperkron.cli.output import say, say_json

EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "data": (("numpy", "sklearn", "pandas", "pyarrow", "PIL", "datasets"), "dataset readers"),
    "excel": (("pandas", "openpyxl"), "Excel sheets"),
    "text": (("transformers", "tokenizers"), "pretrained text encoders"),
    "report": (("jinja2", "matplotlib"), "reports"),
    "track": (("tensorboard",), "--tensorboard"),
    "compare": (("cleanlab",), "cleanlab among the alternatives"),
    "sweep": (("optuna",), "hyperkron sweep"),
    "cli": (("yaml", "rich"), "configuration files in YAML, and RichProgress for fit"),
}
"""The packages of every extra but single trackers, by the names they are imported by, and what they are for."""
LITTLE_DISK = 2**30
_REINSTALL = "install again: pip install --force-reinstall torch hyperkron"
TOLERANCE = 1e-8
"""Largest relative error of the self test, in float64."""


Found = tuple[str, str, str]
"""The state of something, ``ok``, ``missing`` (something optional) or ``bad``; what was found; and the remedy."""


def doctor(options: Any) -> int:
    """Look at everything and say what is missing; 1 where hyperkron cannot work."""
    found = []
    looks: dict[str, Callable[[], Found]] = {
        "python": _python,
        "disk": _disk,
        **{extra: partial(_extra, extra) for extra in EXTRAS},
        "torch": _torch,
        "device": _device,
        "threads": _threads,
        "encoder": _encoder,
        "self test": _self_test,
    }
    for name, look in looks.items():
        try:
            state, detail, remedy = look()
        except Exception as error:  # whatever is wrong here is what doctor is to say
            state, detail, remedy = "bad", f"{type(error).__name__}: {str(error)[:300]}", _REINSTALL
        found.append({"name": name, "state": state, "detail": detail, "remedy": remedy})
        if not options.json:
            say(f"{'BAD' if state == 'bad' else state:7}  {name:10} {detail}", sys.stdout)
            if remedy:
                say(f"{'':20} {remedy}", sys.stdout)
    well = all(finding["state"] != "bad" for finding in found)
    if options.json:
        say_json({"ok": well, "findings": found})
    else:
        print("Everything needed is installed." if well else "hyperkron does not work here; fix the lines marked BAD.")
    return 0 if well else 1


def _python() -> Found:
    return "ok", f"{platform.python_version()} at {sys.executable}, on {platform.platform()}", ""


def _disk() -> Found:
    free = shutil.disk_usage(Path.cwd()).free
    shown = f"{free / 2**30:.1f} GiB free in the current folder"
    if free < LITTLE_DISK:
        return "missing", shown, "runs need space for a model and its log; free some"
    if not os.access(Path.cwd(), os.W_OK):
        return "missing", "the current folder cannot be written to", "change to another, or use --out"
    return "ok", shown, ""


def _extra(extra: str) -> Found:
    packages, purpose = EXTRAS[extra]
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        return "missing", f"{', '.join(missing)}: needed for {purpose}", f"pip install 'hyperkron[{extra}]'"
    return "ok", f"{', '.join(packages)}: {purpose}", ""


def _torch() -> Found:
    wanted = next((text for text in requires("hyperkron") or [] if text.startswith("torch")), "torch>=2.8")
    try:
        found = version("torch")
        import torch
    except (PackageNotFoundError, ImportError, OSError) as error:
        return "bad", f"cannot be imported ({str(error)[:200]})", f"pip install '{wanted}'"
    least = tuple(int(part) for part in wanted.partition(">=")[2].split(".")[:2] if part.isdigit())
    if tuple(int(part) for part in found.split("+")[0].split(".")[:2]) < least:
        return "bad", f"{found} is too old", f"pip install '{wanted}'"
    return "ok", f"{torch.__version__}, {'with' if torch.version.cuda else 'without'} CUDA", ""


def _device() -> Found:
    import torch

    if not torch.cuda.is_available():
        return "ok", f"cpu: {platform.processor() or platform.machine()} (no GPU that torch can use)", ""
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return "ok", f"cuda: {name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free", ""


def _threads() -> Found:
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    used = torch.get_num_threads()
    remedy = "" if usable is None or used <= usable else f"more threads than cores are slow: OMP_NUM_THREADS={usable}"
    return "ok", f"torch uses {used}, {usable} cores are usable", remedy


def _encoder() -> Found:
    from hyperkron.cleaning.models import choose_encoder

    name = choose_encoder().name
    if Path(name).expanduser().is_dir():
        return "ok", f"{name} (a folder)", ""
    if find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        if isinstance(try_to_load_from_cache(name, "model.safetensors"), str):
            return "ok", f"{name} (in the Hugging Face cache)", ""
    remedy = "it is downloaded when first needed; offline, pass the folder of an encoder with --encoder"
    return "missing", f"{name} is not on this computer", remedy


def _self_test() -> Found:
    begin = time.perf_counter()
    error = self_test()
    if not error <= TOLERANCE:
        return "bad", f"a KFAC hypergradient is off by {error:.1e}", _REINSTALL
    took = time.perf_counter() - begin
    return "ok", f"a KFAC hypergradient agrees with a dense solve to {error:.0e} (in {took:.1f} s)", ""


def self_test() -> float:
    """The relative error of a KFAC hypergradient where KFAC is exact, against a dense solve in float64.

    For least squares with a linear model W the curvature is one Kronecker product, so that KFAC with exact damping must
    give dΦ/dw_n = −(Wx_n − y_n)ᵀ G A⁻¹ x_n / N with A = XᵀDiag(w)X / N + δI and G = ∂_W J_out, to rounding.

    Example:
        >>> self_test() < 1e-8
        True
    """
    import torch

    from hyperkron import losses
    from hyperkron.hyper import SampleWeights
    from hyperkron.hypergradient import kfac
    from hyperkron.problem import BilevelProblem

    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(12, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    u, v = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    model = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
    model.weight.data = torch.randn(2, 3, generator=generator, dtype=torch.float64)
    weights, index, damping = SampleWeights(12).double(), torch.arange(12), 0.1
    problem = BilevelProblem(
        lambda m, w, b: losses.mse(m(b[0]), b[1], weight=w(b[2])), lambda m, w, b: losses.mse(m(b[0]), b[1])
    )
    method = kfac(damping, fisher="type-2", split="exact", cross="reverse")
    found = next(iter(method.compute(problem, model, weights, (x, y, index), (u, v)).grads.values()))
    matrix, w = model.weight.detach(), weights(index).detach()
    curvature = x.T @ (w[:, None] * x) / 12 + damping * torch.eye(3, dtype=torch.float64)
    solved = torch.linalg.solve(curvature, u.T @ (u @ matrix.T - v) / 5)
    expected = -((x @ matrix.T - y) * (x @ solved)).sum(1) / 12
    return float((found - expected).norm() / expected.norm())
