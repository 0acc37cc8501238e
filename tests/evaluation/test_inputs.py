"""Tensors that autograd cannot take, and parameters, λ and batches that are to blame for a bad result."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import hyperkron as hk
from hyperkron.batch_tensors import tensors_of
from hyperkron.evaluation.inputs import differentiable_batch
from hyperkron.hypergradient.unrolled import Batches
from tests.hypergradient.test_compiled import METHODS, PROBLEM, modules

Pair = namedtuple("Pair", ["x", "y"])


def unfit(batch: Any) -> Any:
    """The same tensors, made in inference mode."""
    with torch.inference_mode():
        return tuple(x.clone() for x in batch)


@pytest.mark.parametrize("name", METHODS)
def test_batches_made_in_inference_mode(name: str) -> None:
    model, weights, batch = modules()
    wanted = METHODS[name]().compute(PROBLEM, model, weights, batch, batch).grads["weight"]
    found = METHODS[name]().compute(PROBLEM, model, weights, unfit(batch), unfit(batch)).grads["weight"]
    assert torch.equal(found, wanted)
    with torch.inference_mode():
        found = METHODS[name]().compute(PROBLEM, model, weights, unfit(batch), unfit(batch)).grads["weight"]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("data", ["batch", "function", "examples"])
@pytest.mark.parametrize(
    "algorithm", [hk.algorithms.aid_cg(2, inner_steps=2), hk.algorithms.F2SA()], ids=["AID-CG", "F2SA"]
)
def test_fit_takes_them(algorithm: Any, data: str) -> None:
    reached = []
    for make in (lambda batch: batch, unfit):
        model, weights, batch = modules()
        given = make(batch)
        sources: Any = {
            "batch": given,
            "function": lambda given=given: given,
            "examples": hk.algorithms.Examples(*given, batch_size=4),
        }
        hk.fit(PROBLEM, model, weights, algorithm, sources[data], given, steps=2)
        reached.append(weights.weight.detach())
    assert torch.equal(*reached)


def test_curvature_batches_too() -> None:
    model, weights, batch = modules()
    other = (2 * batch[0], *batch[1:])
    wanted = hk.kfac().compute(PROBLEM, model, weights, batch, batch, curvature_batch=other).grads["weight"]
    found = hk.kfac().compute(PROBLEM, model, weights, batch, batch, curvature_batch=unfit(other)).grads["weight"]
    assert torch.equal(found, wanted)


def test_batches_of_any_kind() -> None:
    x, y = unfit((torch.ones(2), torch.zeros(3)))
    kinds = [x, (x, y), [x, [y]], Pair(x, y), {"x": x, "y": (y, "text")}, UserDict(x=x), MappingProxyType({"x": x})]
    for batch in [*kinds, Batches([(x, y), (y, x)])]:
        made = differentiable_batch(batch)
        assert type(made) is (dict if isinstance(batch, MappingProxyType) else type(batch))
        pairs = list(zip(tensors_of("", batch), tensors_of("", made), strict=True))
        assert pairs
        assert all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)
        assert not any(b.is_inference() for _, (_, b) in pairs)
        assert all(a.is_inference() for (_, a), _ in pairs)
    usual = {"x": torch.ones(2)}
    assert differentiable_batch(usual) is usual


def test_what_cannot_be_looked_into_is_refused_with_a_remedy() -> None:
    model, weights, batch = modules()
    problem = hk.BilevelProblem(lambda m, w, b: PROBLEM.inner(m, w, b.tensors), PROBLEM.outer)
    with pytest.raises(hk.HyperkronError, match=r"inner uses a tensor made in torch.inference_mode.*clone\(\)"):
        hk.cg().compute(problem, model, weights, SimpleNamespace(tensors=unfit(batch)), batch)


@pytest.mark.parametrize("which", ["model", "hyper"])
def test_parameters_made_in_inference_mode_are_refused(which: str) -> None:
    model, weights, batch = modules()
    with torch.inference_mode():
        bad = modules()[0 if which == "model" else 1]
    given = {"model": (bad, weights), "hyper": (model, bad)}[which]
    for use in (
        lambda: hk.kfac().compute(PROBLEM, *given, batch, batch),
        lambda: hk.unrolled(2).compute(PROBLEM, *given, batch, batch),
        lambda: hk.fit(PROBLEM, *given, hk.algorithms.SOBA(), batch, batch, steps=1),
    ):
        with pytest.raises(hk.HyperkronError, match=rf"{which} parameter .* torch.inference_mode.*deepcopy\({which}\)"):
            use()
    mended = copy.deepcopy(bad)  # the remedy
    given = {"model": (mended, weights), "hyper": (model, mended)}[which]
    hk.kfac().compute(PROBLEM, *given, batch, batch)


SCALES = [1e6, 1e9, 1e20, 1e37, torch.inf, torch.nan]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_diverged_theta_is_not_told_to_raise_damping(name: str, loss: str) -> None:
    """Whatever fails there is blamed on θ; in float32, where most of it fails."""
    told = []
    x, y, index = torch.randn(8, 4), torch.randn(8, 3).softmax(1), torch.arange(8)
    criterion = getattr(hk.losses, loss)
    problem = hk.BilevelProblem(
        lambda m, w, b: criterion(m(x), y, weight=w(index)), lambda m, w, b: criterion(m(x), y.flip(0))
    )
    for scale in SCALES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(scale)
        try:
            METHODS[name]().compute(problem, model, hk.SampleWeights(8), None, None)
        except hk.HyperkronError as error:
            told.append(str(error))
    assert len(told) >= 4
    assert all("model parameter" in x and "lower the inner learning rate" in x for x in told)
    assert not any("raise damping" in x for x in told)


def failing(touch: Any) -> str:
    """The message of a KFAC hypergradient after ``touch`` spoilt the model, λ or the inner batch."""
    torch.manual_seed(0)
    model, weights = nn.Linear(4, 3), hk.as_hyper(torch.ones(8))
    batch = torch.randn(8, 4), torch.randn(8, 3)
    with torch.no_grad():
        touch(model, weights, batch)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.mse(m(b[0]), b[1], weight=w().square()), lambda m, w, b: hk.losses.mse(m(b[0]), b[1])
    )
    with pytest.raises(hk.NonFiniteError) as caught:
        hk.kfac().compute(problem, model, weights, batch, (torch.randn(8, 4), torch.randn(8, 3)))
    return str(caught.value)


def test_the_extreme_one_of_theta_lambda_and_batch_is_named() -> None:
    theta = failing(lambda model, weights, batch: model.weight.mul_(1e25))
    assert "model parameter weight reaches" in theta and "lower the inner learning rate" in theta
    hyper = failing(lambda model, weights, batch: weights.value.fill_(1e25))
    assert "hyper parameter value reaches 1e+25" in hyper and "lower the outer learning rate" in hyper
    batch = failing(lambda model, weights, batch: batch[0].mul_(1e25))
    assert "inner_batch[0] reaches" in batch and "scale" in batch and "learning rate" not in batch


def test_an_ordinary_failure_keeps_its_own_remedy() -> None:
    class Log(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight.sqrt()  # an infinite slope at a harmless θ

    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.mse(m(b), b, weight=w()), lambda m, w, b: hk.losses.mse(m(b), 2 * b)
    )
    with pytest.raises(hk.NonFiniteError, match="look for overflow in the model"):
        hk.identity().compute(problem, Log(), hk.as_hyper(torch.ones(4)), torch.ones(4, 1), torch.ones(4, 1))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_models_are_refused_by_name(nested: bool) -> None:
    case = cases.make(nn.Linear(3, 2), (3,))
    scripted = torch.jit.script(case.model)
    case.model = nn.Sequential(scripted) if nested else scripted
    with pytest.raises(hk.HyperkronError, match=r"torch.jit.script or torch.jit.trace.*pass the module it was made of"):
        hk.cg(3, 0.1).compute(*case.arguments)


@pytest.mark.parametrize("outside", ["batch", "closure"])
def test_a_graph_made_outside_the_inner_loss_is_named(outside: str) -> None:
    model, hyper, x = nn.Linear(3, 2), hk.as_hyper(torch.tensor(0.5)), torch.randn(4, 3)
    scaled = x * hyper()
    problem = hk.BilevelProblem(
        lambda m, h, b: hk.losses.mse(m(b if outside == "batch" else scaled), torch.zeros(4, 2)),
        lambda m, h, b: m(x).square().mean(),
    )
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hk.HyperkronError, match="computed from hyper or model before the call"):
        hk.cg(2, 1.0, cross="difference").compute(problem, model, hyper, scaled, None)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
