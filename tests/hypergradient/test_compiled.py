"""Models given to ``torch.compile``: hypergradients are those of the model as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import hyperkron as hk

METHODS: dict[str, Any] = {
    "kfac": lambda: hk.kfac(0.01),
    "ekfac": lambda: hk.ekfac(0.01),
    "cg": lambda: hk.cg(5),
    "cg, GGN": lambda: hk.cg(5, curvature=hk.curvature.GGN(0.01)),
    "pcg": lambda: hk.pcg(5),
    "neumann": lambda: hk.neumann(3),
    "gradient_descent": lambda: hk.gradient_descent(3),
    "identity, reverse": lambda: hk.identity(cross="reverse"),
    "identity, forward": lambda: hk.identity(cross="forward"),
    "sama": hk.sama,
    "unrolled": lambda: hk.unrolled(3),
    "one_step": lambda: hk.one_step(0.1),
    "stochastic Neumann": lambda: hk.algorithms.StochasticNeumann(3),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).tanh())


def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=weights(index))


PROBLEM = hk.BilevelProblem(inner, lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]))


def modules() -> tuple[Net, hk.SampleWeights, Any]:
    torch.manual_seed(0)
    x, y, index = torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)), torch.arange(8)
    return Net().double(), hk.SampleWeights(8).double(), (x, y, index)


def compiled(model: nn.Module, kind: str, backend: Any) -> nn.Module:
    if kind == "module":
        made = torch.compile(model, backend=backend)
        assert isinstance(made, nn.Module)
        return made
    if kind == "in place":
        model.compile(backend=backend)
    else:  # a part
        model.a.compile(backend=backend)
    return model


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module", name="wanted")
def _wanted() -> dict[str, Tensor]:
    model, weights, batch = modules()
    return {k: make().compute(PROBLEM, model, weights, batch, batch).grads["weight"] for k, make in METHODS.items()}


@pytest.mark.parametrize("kind", ["module", "in place", "part"])
@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_the_same_as_of_the_model_as_written(kind: str, backend: str, wanted: dict[str, Tensor]) -> None:
    model, weights, batch = modules()
    model = compiled(model, kind, backend)
    if kind == "in place":  # it has run before, and was compiled without hooks
        model.eval()(batch[0].flip(0)).sum().backward()
        model.train()(batch[0].flip(0))
        model.load_state_dict(modules()[0].state_dict())
    before = {name: x.clone() for name, x in model.state_dict().items()}
    for name, make in METHODS.items():
        found = make().compute(PROBLEM, model, weights, batch, batch)
        assert torch.allclose(found.grads["weight"], wanted[name], rtol=1e-12, atol=1e-14), name
        if found.solution is not None:
            assert list(found.solution.value) == [name for name, _ in model.named_parameters()]
        after = model.state_dict()
        assert list(after) == list(before)
        assert all(torch.equal(after[x], before[x]) for x in before)


def test_hypergradients_compile_nothing_and_leave_the_model_compiled() -> None:
    made: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(graph)
        return graph.forward

    model, weights, batch = modules()
    model = torch.compile(model, backend=backend)
    for method in METHODS.values():
        method().compute(PROBLEM, model, weights, batch, batch)
    with pytest.raises(hk.HyperkronError):
        hk.cg().compute(PROBLEM, model, weights, (batch[0] * torch.nan, *batch[1:]), batch)
    assert not made
    model(batch[0])
    assert made


def test_a_compiled_lambda_keeps_its_names() -> None:
    model, weights, batch = modules()
    wanted = hk.cg(5).compute(PROBLEM, model, weights, batch, batch).grads["weight"]
    hyper = torch.compile(weights, backend="aot_eager")
    hk.cg(5).backward(PROBLEM, model, hyper, batch, batch)
    assert torch.allclose(weights.weight.grad, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "algorithm", [hk.algorithms.aid_kfac(0.1, inner_steps=2), hk.algorithms.SOBA()], ids=["AID", "SOBA"]
)
def test_fit_trains_the_compiled_model(algorithm: Any) -> None:
    reached = []
    for compile in (False, True):
        model, weights, batch = modules()
        given = torch.compile(model, backend="aot_eager") if compile else model
        hk.fit(PROBLEM, given, weights, algorithm, batch, batch, steps=3)
        reached.append(weights.weight.detach())
    assert torch.allclose(*reached, rtol=1e-10, atol=1e-12)
    assert not torch.equal(reached[0], torch.full_like(reached[0], 0.5))
