"""A method that is used again: with another model, as a copy, from a pickle, and for outer losses of any size."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import make, mlp


@pytest.mark.parametrize(
    "make",
    [
        lambda: hk.kfac(1e-2, fisher="type-2", refresh_every=5),
        lambda: hk.ekfac(1e-2, fisher="type-2", ema=0.9),
        lambda: hk.cg(2, warm_start=True),
        lambda: hk.pcg(2, preconditioner=hk.curvature.KFAC(1e-2, fisher="type-2", refresh_every=5)),
    ],
)
@pytest.mark.parametrize("width", [4, 5])
def test_what_is_known_of_a_model_is_not_used_for_another(make: Any, width: int) -> None:
    def inner(model: Any, weights: Any, batch: Any) -> Any:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights())

    def outer(model: Any, weights: Any, batch: Any) -> Any:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    torch.manual_seed(0)
    problem, weights = hk.BilevelProblem(inner, outer), hk.as_hyper(torch.rand(8))
    batch = torch.randn(8, 3), torch.randint(0, 2, (8,))
    first, second = (nn.Sequential(nn.Linear(3, w), nn.Tanh(), nn.Linear(w, 2)) for w in (4, width))
    used, fresh = make(), make()
    for _ in range(2):
        used.compute(problem, first, weights, batch, batch)
    for _ in range(2):  # the second call has a memory of its own
        found = used.compute(problem, second, weights, batch, batch)
        wanted = fresh.compute(problem, second, weights, batch, batch)
        assert torch.equal(found.grads["value"], wanted.grads["value"])
    resumed = make()
    resumed.load_state_dict(used.state_dict())
    moved = resumed.compute(problem, copy.deepcopy(second), weights, batch, batch)  # as in another process
    both = copy.deepcopy((used, second))
    wanted = used.compute(problem, second, weights, batch, batch)
    assert torch.equal(moved.grads["value"], wanted.grads["value"])
    assert torch.equal(both[0].compute(problem, both[1], weights, batch, batch).grads["value"], wanted.grads["value"])
    assert both[0].state.calls == used.state.calls


@pytest.mark.parametrize("name", ["kfac", "ekfac", "cg", "pcg", "neumann", "gradient_descent", "identity", "sama"])
@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_methods_are_copied_and_pickled_after_a_call(name: str, how: Any) -> None:
    """The copy continues as the method does, and the two share nothing that changes."""
    case = make(mlp(3, 4, 2), (3,), loss="cross_entropy")
    method = getattr(hk, name)()
    method.compute(*case.arguments)
    copied = how(method)
    assert copied.state.calls == 1
    wanted, found = (one.compute(*case.arguments) for one in (method, copied))
    assert all(torch.equal(found.grads[n], x) for n, x in wanted.grads.items())
    assert found.stats == wanted.stats


@pytest.mark.parametrize(
    ("name", "error"), [("kfac", 5e-5), ("ekfac", 5e-5), ("pcg", 2e-3), ("cg", 1e-6), ("identity", 1e-5)]
)
@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e30])
def test_hypergradients_are_as_large_as_the_outer_loss(name: str, error: float, size: float) -> None:
    """Also where float32 holds the gradients, but not their squares; PCG's last iterations are of rounding errors."""
    torch.manual_seed(0)
    model, weights = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), hk.SampleWeights(8)
    x, y, index = torch.randn(8, 3), torch.randint(0, 2, (8,)), torch.arange(8)

    def found(factor: float) -> Tensor:
        problem = hk.BilevelProblem(
            lambda m, h, b: hk.losses.cross_entropy(m(x), y, weight=h(index)),
            lambda m, h, b: factor * hk.losses.cross_entropy(m(1.3 * x.flip(0)), y),
        )
        (gradient,) = getattr(hk, name)().compute(problem, model, weights, None, None).grads.values()
        return gradient.double() / factor

    assert oracles.relative(found(size), found(1.0)) < error
