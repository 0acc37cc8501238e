"""How many operations a hypergradient launches, and that the ways taken on a GPU give what the others give."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import launches
import pytest
import torch

import hyperkron as hk

CONVOLUTIONS = 20
"""Of ResNet-18, and as many batch norms."""


@pytest.fixture(scope="module")
def counted() -> dict[str, dict[str, int]]:
    """KFAC at τ = 1, by stage."""
    copies, tolist = [], torch.Tensor.tolist

    def copied(x: torch.Tensor) -> Any:
        copies.append(x.numel())
        return tolist(x)

    with launches.as_on_gpu(), patch.object(torch.Tensor, "tolist", copied):
        found = launches.measure(launches.workload("7x7"), launches.METHODS["KFAC mc"], 1)
    reads = sum(count for (_, name), count in found["names"].items() if name == "aten::_local_scalar_dense")
    return {**found["stages"], "all": found["total"], "reads": {"launches": reads + len(copies)}}


@pytest.mark.parametrize(
    ("stage", "most"),
    [
        ("state kept and rewound", 4 * 2),  # four evaluations, buffers of two dtypes
        ("Gram matrices", 7 * CONVOLUTIONS),  # pad, patches, product, order; gradients, product
        ("diagonals", 3),
        ("damping", 35),
        ("factorisation", 140),
        ("solve", 170),
        ("reads", 4 * 3),  # four steps: how the factorisations went, whether all is finite, and the value of J_out
    ],
)
def test_what_is_ours_is_launched_for_many_layers_at_once(
    stage: str, most: int, counted: dict[str, dict[str, int]]
) -> None:
    assert 0 < counted[stage]["launches"] <= most


def test_the_network_launches_more_than_kfac(counted: dict[str, dict[str, int]]) -> None:
    """Half of all are the network's own passes: one with both directions, one without weights, two forward."""
    own = counted["outer gradient"]["launches"] + counted["cross term"]["launches"]
    passes = counted["passes of the factors"]["launches"] - 4 * CONVOLUTIONS  # sums of the batch norms
    assert own + passes > 0.5 * counted["all"]["launches"]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("stem", ["7x7", "3x3"])
def test_the_way_of_a_gpu_agrees_with_that_of_a_cpu(dtype: torch.dtype, tolerance: float, stem: str) -> None:
    found = []
    for way in (False, True):
        work = launches.workload(stem)
        work.model.to(dtype), work.hyper.to(dtype)
        (x, y, index), outer = work.batches[0], work.outer_batch
        batches = [(x[:8].to(dtype), y[:8], index[:8]), (outer[0][:8].to(dtype), outer[1][:8], outer[2][:8])]
        method = hk.Implicit(hk.curvature.KFAC(damping=0.1), hk.solvers.Direct(), cross="reverse")
        with launches.as_on_gpu() if way else torch.enable_grad():
            result = method.compute(work.problem, work.model, work.hyper, *batches)
        assert result.solution is not None
        found.append(torch.cat([x.reshape(-1) for x in (*result.solution.value.values(), *result.grads.values())]))
    assert float((found[1] - found[0]).norm() / found[0].norm()) < tolerance
