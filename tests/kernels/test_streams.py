"""Work side by side on a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from hyperkron.kernels import streams

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_work_side_by_side_gives_what_it_gives_one_by_one(device: str) -> None:
    rows = [
        torch.randn(1, n, n, generator=torch.Generator().manual_seed(n))
        for n in (5, 64, 200, 7, 129, 33, 65, 80, 90, 100, 110)
    ]
    matrices = [(x @ x.mT / x.shape[-1]).to(device) for x in rows]
    jobs = [lambda m=m: (torch.linalg.eigh(m), m.shape[-1]) for m in matrices]
    for _ in range(3):  # memory of earlier results is used again
        found = streams.side_by_side(jobs, torch.device(device))
        for ((values, vectors), size), matrix in zip(found, matrices, strict=True):
            assert size == matrix.shape[-1]
            torch.testing.assert_close(vectors * values[:, None] @ vectors.mT, matrix, rtol=1e-4, atol=1e-4)


def test_an_error_in_work_side_by_side_is_raised() -> None:
    with pytest.raises(torch.linalg.LinAlgError):
        streams.side_by_side([lambda: torch.linalg.cholesky(-torch.eye(2))] * 2, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_first_decompositions_of_a_process_may_be_side_by_side() -> None:
    """torch loads their library at the first call, and fails where two threads are the first."""
    script = (
        "import torch; from hyperkron.kernels import streams; m = torch.eye(40, device='cuda');"
        "streams.side_by_side([lambda: torch.linalg.eigh(m)] * 8, m.device); print('done')"
    )
    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "done\n"
