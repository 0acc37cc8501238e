"""The point (λ, θ): what an evaluation sees, and what it leaves."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cases
import hyperkron as hk
from hyperkron import trees
from hyperkron.cross import ways
from hyperkron.evaluation.point import Point, trainable
from hyperkron.kernels.execution import Execution

N, D, C = 5, 3, 2


class Counting(nn.Module):
    """A linear layer that counts its calls and remembers the last input in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, C)
        self.calls: Tensor
        self.last: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(N, D))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x.detach()  # replaced, not written
        return self.linear(x) * self.calls


def inner(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.mse(model(batch[0]), batch[1], weight=hyper(torch.arange(len(batch[0]))))


def outer(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.mse(model(batch[0]), batch[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def make(model: nn.Module | None = None, **extra: Any) -> Point:
    torch.manual_seed(0)
    x, y = torch.randn(2 * N, D), torch.randn(2 * N, C)
    return Point(PROBLEM, model or nn.Linear(D, C), hk.SampleWeights(N), (x[:N], y[:N]), (x[N:], y[N:]), **extra)


def test_values_are_those_of_the_objectives() -> None:
    with make() as point:
        assert point.inner().item() == inner(point.model, point.hyper, point.inner_batch).item()
        assert point.outer().item() == outer(point.model, point.hyper, point.outer_batch).item()
        assert point.inner(point.outer_batch).item() == inner(point.model, point.hyper, point.outer_batch).item()
        assert set(point.params) == {"weight", "bias"}
        assert set(point.hypers) == {"weight"}
        assert (point.device, point.dtype) == (torch.device("cpu"), torch.float32)


def test_the_curvature_batch_is_the_inner_batch_unless_given() -> None:
    other = (torch.ones(N, D), torch.ones(N, C))
    assert make().curvature_batch is not None
    with make() as point:
        assert point.curvature_batch is point.inner_batch
    with make(curvature_batch=other) as point:
        assert point.curvature_batch is other


def test_only_trainable_parameters_are_theta() -> None:
    model = nn.Sequential(nn.Linear(D, C), nn.Linear(C, C))
    model[0].weight.requires_grad_(False)
    assert list(trainable(model, "model")) == ["0.bias", "1.weight", "1.bias"]


def test_every_evaluation_begins_at_the_same_buffers() -> None:
    model = Counting()
    own = model.calls, model.last
    with make(model) as point:
        values = [point.inner().item() for _ in range(3)]
        assert values[0] == values[1] == values[2]
        assert int(model.calls) == 1
    assert (model.calls, model.last) == own or all(a is b for a, b in zip((model.calls, model.last), own, strict=True))
    assert int(model.calls) == 0
    assert float(model.last.abs().sum()) == 0


@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([1.5, -0.0, float("nan"), float("inf")]),
        torch.tensor([[1.5, 2.0], [3.0, 4.0]], dtype=torch.float64).T,
        torch.tensor([1.5, 2.0], dtype=torch.bfloat16),
        torch.tensor([1.5, 2.0]).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j]),
        torch.tensor(2**62 + 1),
        torch.tensor([3, 255], dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.zeros(0),
        torch.ones(1, 2).expand(3, 2),
    ],
    ids=lambda x: f"{x.dtype} {tuple(x.shape)}",
)
def test_an_evaluation_sees_copies_of_buffers_of_any_kind(values: Tensor) -> None:
    model = nn.Linear(D, C)
    model.register_buffer("kept", values)
    seen: list[Tensor] = []
    hook = model.register_forward_pre_hook(lambda module, _: seen.append(module.kept))
    with make(model) as point:
        point.inner()
    hook.remove()
    assert model.kept is values
    (copy,) = seen
    assert copy.dtype == values.dtype and copy.shape == values.shape
    assert copy.numel() == 0 or copy.data_ptr() != values.data_ptr()
    assert repr(copy) == repr(values)  # which also tells -0 from 0


@pytest.mark.parametrize("before", [False, True], ids=["its first", "another"])
def test_a_buffer_that_an_evaluation_registers_is_taken_away(before: bool) -> None:
    model = nn.Linear(D, C)
    if before:
        model.register_buffer("kept", torch.ones(2), persistent=False)
    hook = model.register_forward_pre_hook(lambda module, _: module.register_buffer("new", torch.ones(1), False))
    with make(model) as point:
        point.inner()
        assert "new" in model._buffers
    hook.remove()
    assert list(model._buffers) == ["kept"] * before and model._non_persistent_buffers_set == set(model._buffers)


def test_a_buffer_that_modules_share_stays_shared() -> None:
    model = nn.Sequential(Counting(), Counting())
    model[1].calls = model[0].calls
    with make(model[0]) as point:
        point.inner()
        assert point.model.calls is not model[1].calls  # the other is not a part of this model
    model[1].linear = nn.Linear(C, C)
    with make(model) as point:
        point.inner()
        assert model[0].calls is model[1].calls
        assert int(model[0].calls) == 2
    assert model[0].calls is model[1].calls
    assert int(model[0].calls) == 0


def test_substituted_parameters_are_attached() -> None:
    with make() as point:
        doubled = {name: (2 * p.detach()).requires_grad_() for name, p in point.params.items()}
        loss = point.evaluate("inner", point.inner_batch, doubled, differentiable=True, where="at 2θ")
        gradients = torch.autograd.grad(loss.value, list(doubled.values()))
        assert all(float(g.norm()) > 0 for g in gradients)
        with point.moved(trees.map(Tensor.detach, doubled)):
            assert point.inner().item() == pytest.approx(loss.item(), rel=1e-6)
        assert point.inner().item() != pytest.approx(loss.item(), rel=1e-3)


def test_moved_parameters_are_detached_and_come_back_also_on_error() -> None:
    with make() as point:
        before = {name: (p.data_ptr(), p._version, p.detach().clone()) for name, p in point.params.items()}
        elsewhere = trees.map(lambda p: p.detach() + 1, point.params)

        def stumble() -> None:
            with point.moved(elsewhere):
                assert not any(p.requires_grad for p in point.params.values())
                torch.testing.assert_close(dict(point.params), elsewhere)
                loss = point.inner()
                with pytest.raises(RuntimeError, match="does not require grad"):
                    torch.autograd.grad(loss.value, list(point.params.values()))
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            stumble()
        for name, p in point.params.items():
            assert p.requires_grad
            assert (p.data_ptr(), p._version) == before[name][:2]
            assert torch.equal(p, before[name][2])


def test_embeddings_that_renormalise_themselves_are_put_back() -> None:
    model = nn.Sequential(nn.Embedding(4, D, max_norm=0.1), nn.Flatten(), nn.Linear(2 * D, C))
    before = model[0].weight.detach().clone()
    x, y = torch.randint(4, (N, 2)), torch.randn(N, C)
    hk.kfac().backward(PROBLEM, model, hk.SampleWeights(N), (x, y), (x, y))
    assert torch.equal(model[0].weight, before)
    model(x)
    assert not torch.equal(model[0].weight, before)  # this is what a forward pass does to it


def test_checks_of_finiteness_name_the_first_that_failed() -> None:
    with make() as point:
        point.finite("a number", torch.ones(()), "nothing to do")
        with pytest.raises(hk.NonFiniteError, match="the step is infinite; make it smaller"):
            point.finite("the step", torch.tensor([1.0, float("inf")]), "make it smaller")
        point.settle()  # read once


def test_checks_that_wait_for_the_device_are_read_when_the_block_ends() -> None:
    def check(point: Point, *then: Exception) -> None:
        with patch.object(Execution, "settle"):  # as on a GPU
            point.finite("the step", torch.tensor(float("nan")), "make it smaller")
        for error in then:
            raise error

    with pytest.raises(hk.NonFiniteError, match="the step is nan; make it smaller"), make() as point:
        check(point)
    with pytest.raises(KeyError, match="first"), make() as point:
        check(point, KeyError("first"))


def test_a_recording_leaves_its_checks_to_the_replay() -> None:
    with make(recording=True) as point:
        point.finite("the step", torch.tensor(float("inf")), "make it smaller")
        point.settle()
        assert not point.execution.replayed(point.execution.unread())


def test_a_point_is_used_inside_its_block() -> None:
    with pytest.raises(AssertionError, match="with block"):
        make().inner()


def decayed_by_hand(model: Any, log_decay: Any, batch: Any) -> hk.losses.Loss:
    penalty = sum((p.square().sum() for p in model.parameters() if p.requires_grad), torch.zeros(()))
    return outer(model, log_decay, batch) + log_decay().exp() * penalty


def pseudo_labelled(model: Any, weights: Any, batch: Any) -> hk.losses.Loss:
    labels = model(batch[0]).detach().softmax(-1)
    logits = model(batch[0] + 0.1)
    return hk.losses.cross_entropy(logits, labels, weight=weights(torch.arange(len(logits))))


def teacher_without_grad(model: Any, weights: Any, batch: Any) -> hk.losses.Loss:
    with torch.no_grad():
        labels = model(batch[0]).softmax(-1)
    return hk.losses.cross_entropy(model(batch[0] + 0.1), labels, weight=weights(torch.arange(len(labels))))


def straight_through(model: Any, weights: Any, batch: Any) -> hk.losses.Loss:
    z = model(batch[0])
    z = z + (z.round() - z).detach()
    return hk.losses.mse(z, batch[1], weight=weights(torch.arange(len(z))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [decayed_by_hand, pseudo_labelled, teacher_without_grad, straight_through])
def test_an_inner_loss_that_stops_gradients_does_not_fool_the_cross_term(function: Any, dtype: torch.dtype) -> None:
    """Its value moves with θ otherwise than its gradient says: no difference is right, and forward mode not always."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, C)).to(dtype)
    hyper: nn.Module = hk.SampleWeights(N) if function is not decayed_by_hand else hk.as_hyper(torch.tensor(-1.0))
    hyper.to(dtype)
    x, y = torch.randn(2 * N, D, dtype=dtype), torch.randn(2 * N, C, dtype=dtype)
    problem = hk.BilevelProblem(function, outer)
    arguments = problem, model, hyper, (x[:N], y[:N]), (x[N:], y[N:])
    wanted = hk.identity(cross="reverse").compute(*arguments)
    found = hk.identity().compute(*arguments)
    exact = ("reverse",) if function is teacher_without_grad else ("reverse", "forward")  # which honours detach()
    assert found.stats["cross"] in exact
    torch.testing.assert_close(found.grads, wanted.grads)
    assert wanted.solution is not None
    with Point(*arguments) as point:  # J_out does not see λ, so that the cross term is all there is
        naive = trees.add(ways.difference(point, wanted.solution.value, 1e-3), wanted.grads)
    assert float(trees.norm(naive)) > 0.2 * float(trees.norm(wanted.grads))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("activation", [nn.Tanh, nn.ReLU])
def test_an_ordinary_inner_loss_keeps_the_cheap_cross_term(activation: type[nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 16), nn.BatchNorm1d(16), activation(), nn.Linear(16, C)).to(dtype)
    x, y = torch.randn(64, D, dtype=dtype), torch.randn(64, C, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):  # at the start, and where the gradient has become small
        arguments = PROBLEM, model, hk.SampleWeights(64).to(dtype), (x, y), (x.flip(0), y)
        assert hk.identity().compute(*arguments).stats["cross"] in ("difference", "forward")
        for _ in range(20):
            optimizer.zero_grad()
            outer(model, None, (x, y)).backward()
            optimizer.step()


@pytest.mark.parametrize("pending", [False, True])
def test_numpy_random_numbers_are_the_same_in_every_evaluation_and_put_back(pending: bool) -> None:
    """Also the normal number that numpy keeps for its next call, which is not in its generator's memory."""
    np.random.seed(3)
    if pending:
        np.random.randn()
    drawn: list[float] = []

    def loss(model: nn.Module, hyper: nn.Module, batch: Any) -> torch.Tensor:
        drawn.append(float(np.random.randn()))
        return (model.weight * hyper()).sum() * drawn[-1]

    def left() -> tuple[Any, ...]:
        kind, words, *rest = np.random.get_state()
        return kind, words.tolist(), *rest

    model, hyper = nn.Linear(2, 1, bias=False), hk.as_hyper(torch.ones(()))
    before = left()
    for _ in range(2):
        with Point(hk.BilevelProblem(loss, loss), model, hyper, None, None) as point:
            point.inner()
            point.outer()
        assert left() == before
    assert len(drawn) == 4 and len(set(drawn)) == 1
    assert np.random.randn() == drawn[0]


@pytest.mark.parametrize(
    "method", [hk.cg(3, 1.0), hk.kfac(1.0), hk.sama(), hk.unrolled(2)], ids=lambda m: type(m).__name__
)
@pytest.mark.parametrize("owner", ["nobody", "model", "hyper", "frozen"])
def test_parameters_of_neither_level_that_the_inner_loss_uses_are_said(
    method: Any, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a criterion are trained with the model, but were constants for hypergradients, without a word."""
    monkeypatch.setattr("hyperkron.solution._warned", set())
    case = cases.make(nn.Linear(3, 2), (3,), loss="cross_entropy")
    scale = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=owner != "frozen")
    if owner in ("model", "hyper"):
        getattr(case, owner).scale = scale

    def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> Any:
        found: Tensor = getattr(model, "scale", getattr(hyper, "scale", scale))
        return case.inner(model, hyper, batch) * found.exp()

    problem = hk.BilevelProblem(inner, case.outer)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        method.fresh().compute(problem, *case.arguments[1:])
    said = [str(one.message) for one in told if "neither to model nor to hyper" in str(one.message)]
    assert len(said) == (owner == "nobody")
    assert all("a parameter of shape () that belongs" in one for one in said)


def test_hooks_that_may_change_gradients_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperkron.solution._warned", set())
    case = cases.make(cases.mlp(3, 2), (3,))
    handle = case.model.get_parameter("0.weight").register_hook(lambda g: 2 * g)
    with pytest.warns(hk.HyperkronWarning, match="0.weight. Hypergradients use the gradients that hooks return"):
        hk.identity().compute(*case.arguments)
    handle.remove()
    case.model.get_parameter("0.weight").register_post_accumulate_grad_hook(lambda p: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.identity().compute(*case.arguments)
