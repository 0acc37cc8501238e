"""Guards: steps that run out of memory are repeated in pieces, with the same result."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hyperkron as hk
from guarding import network, prepare
from hyperkron.training.guards import out_of_memory
from resuming import CLASSES, EXAMPLES, FEATURES, digest


class Limited(nn.Module):
    """A network that runs out of memory above a batch size, forward or backward."""

    def __init__(self, limit: int, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> None:
        super().__init__()
        self.net, self.limit = network().to(dtype), limit
        self.dropout = nn.Dropout(dropout)
        self.largest = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)  # a failed attempt has drawn random numbers, too
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.largest = max(self.largest, len(x))
        return self.net(x)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=dtype)
    return x, torch.randint(CLASSES, (EXAMPLES,), generator=generator), torch.arange(EXAMPLES)


OOM_METHODS = {
    "KFAC": lambda: hk.AID(hk.kfac(1e-2, fisher="type-2", cross="reverse"), inner_steps=2),
    "EKFAC": lambda: hk.AID(hk.ekfac(1e-2, fisher="type-2", cross="reverse"), inner_steps=2),
    "CG": lambda: hk.AID(hk.cg(3, curvature=hk.curvature.GGN(1e-1), warm_start=True), inner_steps=2),
    "SAMA": lambda: hk.algorithms.SAMA(2),
    "MRBO": lambda: hk.algorithms.MRBO(hk.algorithms.StochasticNeumann(3, 0.1)),
    "SABA": lambda: hk.algorithms.SABA(),
    "BOME": lambda: hk.algorithms.BOME(),
    "Unroll": lambda: hk.algorithms.Unroll(3),
}


def limited(method: str, limit: int, guard: Any, steps: int = 3, data: Any = None, dropout: float = 0.0) -> hk.Run:
    model = Limited(limit, dropout=dropout)
    x, y, index = tensors()
    sources = data or [hk.algorithms.Examples(x, y, index, batch_size=10, seed=s) for s in (1, 2)]
    return prepare(OOM_METHODS[method](), *sources, guard, steps=steps, model=model, rates=None)


@pytest.mark.parametrize("method", OOM_METHODS)
@pytest.mark.long
def test_out_of_memory_gives_the_result_of_enough_memory(method: str, tmp_path: Path) -> None:
    whole = limited(method, 1000, [])
    guard = hk.training.HalveOnOutOfMemory()
    with pytest.warns(hk.HyperkronWarning, match="out of memory at step 0 with 10 examples.*micro-batches of 5"):
        pieces = limited(method, 3, [guard])
    assert guard.micro_batch == 3 and pieces.state.model.largest == 3
    assert pieces.history[-1]["micro_batch"] == 3
    close = {"rtol": 1e-6, "atol": 1e-9} if method == "CG" else {"rtol": 1e-9, "atol": 1e-11}
    for level in ("params", "hypers"):
        torch.testing.assert_close(getattr(pieces.state, level), getattr(whole.state, level), **close)


@pytest.mark.long
@pytest.mark.parametrize("loader", [False, True])
def test_a_repeated_step_is_the_one_that_would_have_been(loader: bool, tmp_path: Path) -> None:
    """Same batches, same random states: bit for bit the run that had the small pieces from the start."""

    def make(limit: int, size: int | None) -> hk.Run:
        torch.manual_seed(0)
        data = [DataLoader(TensorDataset(*tensors()), batch_size=8, shuffle=True) for _ in range(2)] if loader else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return limited("KFAC", limit, [hk.training.HalveOnOutOfMemory(size)], data=data, dropout=0.3)

    small, halved = make(1000, 3 if not loader else 2), make(3 if not loader else 2, None)
    a, b = small.state_dict(), halved.state_dict()
    assert digest([a[k] for k in ("state", "batches", "random")], tmp_path) == digest(
        [b[k] for k in ("state", "batches", "random")], tmp_path
    )


@pytest.mark.long
def test_the_micro_batch_is_kept_in_checkpoints(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = limited("KFAC", 3, [hk.training.HalveOnOutOfMemory()], steps=4)
        limited("KFAC", 3, [hk.training.HalveOnOutOfMemory()], steps=2).save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the resumed run knows the size already
        resumed = limited("KFAC", 3, [hk.training.HalveOnOutOfMemory()], steps=0).resume(tmp_path).advance(2)
    assert digest(resumed.state_dict(), tmp_path) == digest(whole.state_dict(), tmp_path)


def test_one_example_that_does_not_fit_is_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError):
            limited("KFAC", 0, [hk.training.HalveOnOutOfMemory()])
        with pytest.raises(torch.OutOfMemoryError):
            limited("KFAC", 3, [hk.training.HalveOnOutOfMemory(least=4)])


def test_batch_norm_has_no_exact_pieces() -> None:
    model = Limited(4)
    model.net = nn.Sequential(model.net, nn.BatchNorm1d(CLASSES).double())
    data = [hk.algorithms.Examples(*tensors(), batch_size=10) for _ in range(2)]
    with pytest.raises(hk.HyperkronError, match=r"BatchNorm.*GroupNorm"):
        prepare(hk.AID(hk.kfac(1e-2)), *data, [hk.training.HalveOnOutOfMemory()], 1, model=model, rates=None)


def test_what_counts_as_out_of_memory() -> None:
    assert out_of_memory(torch.OutOfMemoryError("x"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert not out_of_memory(RuntimeError("size mismatch"))
