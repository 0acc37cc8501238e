"""Scores by segments of training: against dense matrices, and against training that is unrolled step by step."""

import copy

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.attribution import attribute_unrolled, training_time
from hyperkron.curvature import EKFAC, KFAC

CURVATURE = EKFAC(1e-13, fisher="type-2")  # exact for a linear model and squared errors
DECAY = 0.01


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.mse(model(batch[0]), batch[1]) + hk.losses.l2(model, DECAY)


def made() -> tuple[nn.Module, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(11, 3, dtype=torch.float64) * torch.tensor([1.0, 0.3, 0.05])
    y = torch.randn(11, 2, dtype=torch.float64)
    return nn.Linear(3, 2, bias=False).double(), (x[:8], y[:8]), (x[8:], y[8:])


def moved(model: nn.Module, seed: int) -> nn.Module:
    """The network at another point."""
    other = copy.deepcopy(model)
    other.weight.data += torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return other


def errors(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return (x @ w.mT - y).square().mean(1)


def gradients(w: Tensor, rows: tuple[Tensor, Tensor]) -> Tensor:
    """Of each row's error, (rows, entries of W)."""
    return torch.autograd.functional.jacobian(lambda t: errors(t.reshape(2, 3), *rows), w.detach().reshape(-1))


def hessian(train: tuple[Tensor, Tensor]) -> Tensor:
    def objective(t: Tensor) -> Tensor:
        return errors(t.reshape(2, 3), *train).mean() + DECAY * t.square().sum()

    return torch.autograd.functional.hessian(objective, torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize("times", [[3.0], [0.7, 4.0], [0.2, 1.0, 30.0]])
def test_scores_are_those_of_dense_matrices(times):
    model, train, queries = made()
    networks = [moved(model, seed) for seed in range(len(times))]
    found = attribute_unrolled(
        loss, model, list(zip(networks, times, strict=True)), train, queries, curvature=CURVATURE, batch_size=3
    )
    h, v = hessian(train), gradients(model.weight, queries)
    wanted = torch.zeros(3, 8, dtype=torch.float64)
    for network, time in reversed(list(zip(networks, times, strict=True))):
        decay = torch.linalg.matrix_exp(-time * h)
        wanted += v @ torch.linalg.inv(h) @ (torch.eye(6, dtype=h.dtype) - decay) @ gradients(network.weight, train).T
        v = v @ decay
    assert torch.allclose(found.scores, wanted / 8, rtol=1e-9, atol=1e-11)
    assert found.stats["segments"] == len(times)


def unrolled(w: Tensor, train: tuple[Tensor, Tensor], queries: tuple[Tensor, Tensor], rate: float, steps: int):
    """−df_q/dw_n by differentiating gradient descent, with the points it passes; no part of the library is used."""

    def trained(weights: Tensor) -> tuple[Tensor, list[Tensor]]:
        theta, points = w.detach().clone().requires_grad_(), []
        for _ in range(steps):
            points.append(theta.detach().clone())
            value = (weights * errors(theta, *train)).mean() + DECAY * theta.square().sum()
            theta = theta - rate * torch.autograd.grad(value, theta, create_graph=True)[0]
        return theta, points

    weights = torch.ones(8, dtype=torch.float64)
    theta, points = trained(weights)
    scores = -torch.autograd.functional.jacobian(lambda u: errors(trained(u)[0], *queries), weights)
    return scores, theta.detach(), points


def with_weight(model: nn.Module, w: Tensor) -> nn.Module:
    other = copy.deepcopy(model)
    other.weight.data = w.clone()
    return other


def test_a_segment_for_each_step_approaches_gradient_descent_that_is_unrolled():
    """e^(−ηA) is 1 − ηA up to η², so that the error halves with the step size."""
    model, train, queries = made()
    gaps = []
    for rate, steps in ((0.02, 20), (0.01, 40)):
        wanted, last, points = unrolled(model.weight, train, queries, rate, steps)
        segments = [(with_weight(model, point), training_time([rate])) for point in points]
        found = attribute_unrolled(loss, with_weight(model, last), segments, train, queries, curvature=CURVATURE)
        gaps.append(float((found.scores - wanted).norm() / wanted.norm()))
    assert gaps[1] < 0.006 and 1.8 < gaps[0] / gaps[1] < 2.2


def test_one_segment_at_a_minimum_is_gradient_descent_that_is_unrolled():
    """There the gradients stand still, so that one segment is enough, however long."""
    model, train, queries = made()
    x, y = train
    ridge = x.mT @ x / 8 + 2 * DECAY * torch.eye(3, dtype=torch.float64)  # an error is a mean over two outputs
    w = torch.linalg.solve(ridge, x.mT @ y / 8).mT
    model = with_weight(model, w)
    wanted, last, _ = unrolled(w, train, queries, 1e-3, 300)
    assert torch.allclose(last, w, atol=1e-12)
    segments = [(model, training_time([1e-3] * 300))]
    found = attribute_unrolled(loss, model, segments, train, queries, curvature=CURVATURE)
    assert torch.allclose(found.scores, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))
    far = hk.attribute(loss, model, train, queries, method=hk.ekfac(1e-13, fisher="type-2")).scores
    assert not torch.allclose(far, wanted, rtol=0, atol=0.1 * float(wanted.abs().max()))
    endless = attribute_unrolled(loss, model, [(model, 1e6)], train, queries, curvature=CURVATURE)
    assert torch.allclose(endless.scores, far, rtol=1e-8, atol=1e-12)


def test_what_makes_no_sense_is_refused():
    model, train, queries = made()
    with pytest.raises(hk.HyperkronError, match="segments is empty"):
        attribute_unrolled(loss, model, [], train, queries)
    with pytest.raises(hk.HyperkronError, match=r"segments has Linear.* in it; pass pairs \(network, time\)"):
        attribute_unrolled(loss, model, [model], train, queries)
    with pytest.raises(hk.HyperkronError, match="time=-1"):
        attribute_unrolled(loss, model, [(model, -1.0)], train, queries)
    with pytest.raises(hk.HyperkronError, match="other parameters than model"):
        attribute_unrolled(loss, model, [(nn.Linear(3, 1).double(), 1.0)], (train[0], train[1][:, :1]), queries)
    with pytest.raises(hk.HyperkronError, match="needs its eigenvalues"):
        attribute_unrolled(loss, model, [(model, 1.0)], train, queries, curvature=KFAC(1e-3))
