"""Several processes on the CPU: the same hypergradients, the same run, and what they send."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import hyperkron as hk
import parallel_runs
from hyperkron.collectives import balanced
from hyperkron.training import checkpoint

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that four processes, the first two of them also by themselves, have left their results in."""
    folder = tmp_path_factory.mktemp("ranks")
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", parallel_runs.__file__, str(folder)]
    started = [subprocess.Popen(command, env={**here, "RANK": str(rank)}) for rank in range(4)]
    try:
        assert [process.wait(300) for process in started] == [0] * 4
    finally:
        for process in started:
            process.kill()
    return folder


@pytest.fixture(scope="module")
def tensors(four: Path) -> dict[str, Tensor]:
    return load_file(four / "tensors.safetensors")


@pytest.fixture(scope="module")
def texts(four: Path) -> list[dict[str, Any]]:
    return [json.loads((four / f"texts-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")
def test_one_two_and_four_processes_give_the_same_hypergradient(tensors: dict[str, Tensor], dtype: torch.dtype) -> None:
    for name, wanted in parallel_runs.hypergradients(None, dtype).items():
        for size in (2, 4) if dtype == torch.float64 else (4,):
            error = float((tensors[f"{size} {dtype} {name}"] - wanted).norm() / wanted.norm())
            assert error < TOLERANCES[dtype], f"{name} on {size} processes differs by {error:.1e}"


@pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")
def test_a_run_ends_at_the_same_point_and_continues_with_another_number_of_processes(
    four: Path, tensors: dict[str, Tensor], texts: list[dict[str, Any]]
) -> None:
    """50 steps on 1, 2 and 4 processes; and 20 on 2, 20 on 4 and 10 on 1, from one checkpoint to the next."""
    wanted, whole = parallel_runs.trained(None, parallel_runs.STEPS)
    resumed, run = parallel_runs.trained(None, parallel_runs.STEPS, four / "run")
    for name, x in wanted.items():
        for size in (2, 4):
            assert float((tensors[f"{size} trained {name}"] - x).abs().max()) < 1e-10, (size, name)
        assert float((resumed[name] - x).abs().max()) < 1e-10, name
    assert all(text["same"] and text["history"] == 40 for text in texts)  # to the last bit, on all of them
    losses = whole.history.column("outer_loss")
    assert run.state.step == parallel_runs.STEPS and texts[3]["loss"] == pytest.approx(losses[:40], rel=1e-10)
    assert wanted["weights.weight"].std() > 0.01  # λ has moved


def test_what_cannot_be_divided_is_refused_on_every_process(texts: list[dict[str, Any]]) -> None:
    wanted = {
        "different": "different batches of inner",
        "small": "3 examples, too few for 4 processes",
        "normalised": "not a mean over examples",
        "nan": "∂θ J_out is nan|outer loss is nan|inner loss is nan",
        "pieces": "divided among 4 processes",
        "plain": r"DataParallel\(problem\)",
    }
    for text in texts:
        for name, message in wanted.items():
            assert any(part in text["refusals"][name] for part in message.replace("\\", "").split("|")), text[
                "refusals"
            ]


def test_own_batches_wrapped_models_and_random_numbers(texts: list[dict[str, Any]]) -> None:
    for text in texts:
        assert all(text["use"].values()), text["use"]


def test_the_bytes_of_a_hypergradient_are_those_of_the_formula(texts: list[dict[str, Any]]) -> None:
    """docs/scaling.md: θ and λ are one number for each entry and tensor, an evaluation is three numbers."""
    _, model, hyper, *_ = parallel_runs.make(torch.float64)
    theta, lam = (sum(p.numel() + 1 for p in module.parameters()) for module in (model, hyper))
    sides = [(6, 6), (7, 4)]  # (d_in + 1, d_out) of the two Kronecker blocks
    factors = sum(d * (d + 1) // 2 for pair in sides for d in pair) + len(sides)  # and the rows of each
    factors += model.get_parameter("words.weight").numel() + 2 * 6  # exact diagonals
    triangles = sum(d * (d + 1) // 2 + 1 for pair in sides for d in pair)
    bases = sum(d * (d + 1) + 1 for pair in sides for d in pair)
    spectra = sum(a * b for a, b in sides)
    traffic = texts[0]["traffic"]
    products = {name: one["products"] for name, one in traffic.items()}
    assert products["pcg"] == 5 and min(products["cg"], products["neumann"]) > 1
    cases = {  # evaluations; sums of θ and of λ; other numbers summed, and shared
        "identity": (2, 2, 1, 0, 0),
        "cg": (2, 2 + products["cg"], 1, 0, 0),
        "neumann": (2, 2 + products["neumann"], 1, 0, 0),
        "kfac mc": (3, 2 + 2, 1, factors, triangles),  # a sum for each of two samples: of the bare parameter
        "kfac empirical": (3, 2 + 1, 1, factors, triangles),
        "kfac auto": (4, 1 + 1, 1, factors, triangles),
        "ekfac": (4, 2 + 1, 1, factors + spectra, bases),
        "pcg": (4, 3 + 1 + products["pcg"], 1, factors, triangles),
        "unrolled": (6, 9, 3, 0, 0),
    }
    for name, (evaluations, of_theta, of_lambda, others, shared) in cases.items():
        names = 8 * (bool(shared) + (name == "ekfac"))  # whether all have measured the same layers
        assert traffic[name]["sum"] == 8 * (of_theta * theta + of_lambda * lam + others), name
        assert traffic[name]["gather"] == 8 * 3 * evaluations + names, name
        assert sum(text["traffic"][name]["share"] for text in texts) == 8 * shared, name


@pytest.mark.parametrize("size", [2, 4, 8])
def test_inversions_are_balanced(size: int) -> None:
    """The work of the factors of a BERT-base and of a Llama with 16 layers of 2048."""
    bert = 12 * ([769] * 4 + [768] * 4 + [769, 3072, 3073, 768])
    llama = 16 * ([2048] * 8 + [2048, 8192] * 2 + [8192, 2048])
    for sizes in (bert, llama):
        costs = [float(n) ** 3 for n in sizes]
        load = [0.0] * size
        for cost, owner in zip(costs, balanced(costs, size), strict=True):
            load[owner] += cost
        assert max(load) <= 1.1 * sum(costs) / size


def test_one_process_is_the_problem_itself() -> None:
    problem, model, hyper, rows, trusted = parallel_runs.make(torch.float64)
    divided = hk.training.DataParallel(problem)
    assert divided.group.size == 1
    found, wanted = (hk.kfac().compute(p, model, hyper, rows, trusted).grads for p in (divided, problem))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(hk.HyperkronError, match="divided already"):
        hk.training.DataParallel(divided)


def _children(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes in /proc")
def test_torchrun_restarts_a_killed_process_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example on two processes, one of which is killed: both are started again and continue to the same end."""
    script = Path(__file__).parents[2] / "examples" / "data_parallel.py"
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    here["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else they may look for each other where they were before
    options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    run = [sys.executable, *options]
    folder = tmp_path / "run"
    started = subprocess.Popen([*run, str(script), str(folder)], env=here, stderr=subprocess.PIPE, text=True)
    try:
        while not any(folder.glob("step-*")):
            assert started.poll() is None
            time.sleep(0.05)
        os.kill(_children(started.pid)[1], signal.SIGKILL)
        errors = started.communicate(timeout=120)[1]
    finally:
        started.kill()
    assert started.returncode == 0, errors
    monkeypatch.syspath_prepend(script.parent)
    importlib.import_module("data_parallel").main(str(tmp_path / "alone"))
    ends = [checkpoint.newest(one).state["state"]["hyper"]["weight"] for one in (folder, tmp_path / "alone")]
    assert float((ends[0] - ends[1]).norm() / ends[1].norm()) < 1e-10
