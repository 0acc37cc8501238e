"""Points besides θ at which algorithms evaluate J_in and J_out: they leave no trace, and differ by λ alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.optimizers import Updates
from quadratic import Quadratic

FIRST_ORDER: dict[str, tuple[Any, int]] = {
    "BSG1": (hk.algorithms.BSG1(2), 2),
    "F2SA": (hk.algorithms.F2SA(2), 2),
    "BOME": (hk.algorithms.BOME(2), 1),
    "PBGD": (hk.algorithms.PBGD(2), 1),
    "MEHA": (hk.algorithms.MEHA(), 1),
    "BVFSM": (hk.algorithms.BVFSM(2), 2),
    "MRBO": (hk.algorithms.MRBO(), 1),
    "ScaleBiO": (hk.algorithms.ScaleBiO(), 1),
    "PZOBO": (hk.algorithms.PZOBO(2), 2),
}
"""Algorithms that evaluate more than θ's own steps, and how many of those one step has."""

FOUR = hk.BilevelProblem(
    lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(torch.arange(4))),
    lambda m, w, b: hk.losses.cross_entropy(m(b[0]), 1 - b[1]),
)
"""Weights of four examples."""


class Counting(nn.Module):
    """A linear layer, or a network of λ, that counts its calls in a buffer which every call replaces."""

    def __init__(self, value: nn.Module) -> None:
        super().__init__()
        self.value = value
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *given: Tensor) -> Tensor:
        self.calls = self.calls + 1
        found: Tensor = self.value(*given)
        return found


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_replaced_buffers_count_the_real_steps_only(name: str) -> None:
    problem, (algorithm, steps) = Quadratic(examples=6, noise=0.2), FIRST_ORDER[name]
    model, hyper = map(Counting, problem.modules())
    state = algorithm.init(problem.problem(), model, hyper)
    algorithm.step(state, problem.batches())
    assert int(model.calls) == steps
    assert int(hyper.calls) == steps


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_sparse_embeddings_move_as_dense_ones(name: str) -> None:
    ends = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 3, sparse=sparse), nn.Linear(3, 2)).double()
        weights, batch = hk.SampleWeights(4, "sigmoid").double(), (torch.tensor([0, 3, 3, 1]), torch.arange(4) % 2)
        state = FIRST_ORDER[name][0].init(FOUR, model, weights)
        for _ in range(2):
            FIRST_ORDER[name][0].step(state, hk.algorithms.BatchSources(batch, batch))
        ends.append(torch.cat([p.detach().flatten() for p in (*model.parameters(), *weights.parameters())]))
    torch.testing.assert_close(*ends)


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_sparse_adam_moves_the_rows_in_use_only(name: str, clip: float | None) -> None:
    """It takes no dense gradients, and algorithms compute with dense ones, as clipping does."""
    torch.manual_seed(0)
    model, weights = nn.Embedding(5, 3, sparse=True).double(), hk.SampleWeights(4, "sigmoid").double()
    before, batch = model.weight.detach().clone(), (torch.tensor([0, 3, 3, 1]), torch.arange(4) % 2)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.01)
    state = FIRST_ORDER[name][0].init(FOUR, model, weights, inner=Updates(optimizer, clip=clip))
    for _ in range(2):
        FIRST_ORDER[name][0].step(state, hk.algorithms.BatchSources(batch, batch))
    decays = name == "BVFSM"  # it adds ‖θ‖² to both losses
    assert (model.weight != before).any(1).tolist() == [True, True, decays, True, decays]


class Dropped(nn.Module):
    """The layer of the quadratic problem behind dropout."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.drop = layer, nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(self.drop(x))
        return found


@pytest.mark.parametrize("wrapped", [nn.Identity, Dropped])
@pytest.mark.parametrize(
    "made",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05),
    ],
    ids=["momentum", "nesterov", "plain"],
)
def test_pzobo_compares_runs_that_differ_by_lambda_alone(made: Callable[..., Any], wrapped: Any) -> None:
    """θ_T is affine in λ, so that the directions of all steps are the same whatever the radius."""
    found = []
    for radius in (1.0, 1e-4):
        torch.manual_seed(0)
        problem = Quadratic()
        layer, hyper = problem.modules()
        model = layer if wrapped is nn.Identity else wrapped(layer)
        algorithm = hk.algorithms.PZOBO(3, samples=2, radius=radius, outer_rate=0.01)
        state = algorithm.init(problem.problem(), model, hyper, inner=made(model.parameters()))
        for _ in range(3):
            algorithm.step(state, problem.batches())
        found.append(hyper().detach())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-9)


def test_pzobo_refuses_a_learning_rate_that_changes_within_a_run() -> None:
    problem = Quadratic()
    model, hyper = problem.modules()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = Updates(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), schedule="update")
    with pytest.raises(hk.HyperkronError, match=r"schedule='update'.*schedule='step'"):
        hk.algorithms.PZOBO().init(problem.problem(), model, hyper, inner=updates)


def test_pzobo_leaves_out_the_same_steps_in_every_run() -> None:
    """Under a scale at which every step overflows θ stays where it is in all runs, and so does λ."""
    torch.manual_seed(0)
    model, weights, batch = nn.Linear(3, 2), hk.SampleWeights(4, "sigmoid"), (torch.randn(4, 3), torch.arange(4) % 2)
    before, scaler = weights.weight.detach().clone(), torch.amp.GradScaler("cpu", init_scale=2.0**100)
    inner = Updates(torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.float16, scaler=scaler)
    algorithm = hk.algorithms.PZOBO(3, samples=2)
    state = algorithm.init(FOUR, model, weights, inner=inner)
    algorithm.step(state, hk.algorithms.BatchSources(batch, batch))
    assert torch.equal(weights.weight, before)
    assert scaler.get_scale() == 2.0**97  # halved by the three steps of θ, not by those of the other runs
