"""Embeddings with sparse gradients or rows of bounded norm, and bags, which have no second derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.curvature import GGN

METHODS: dict[str, Callable[[], hk.Hypergradient]] = {
    "kfac": lambda: hk.kfac(0.1, fisher="type-2"),
    "hessian": lambda: hk.cg(30, 5.0, tolerance=1e-12),
    "ggn": lambda: hk.cg(30, curvature=GGN(0.5), tolerance=1e-12),
    "identity": hk.identity,
    "unrolled": lambda: hk.unrolled(2),
}


class Words(nn.Module):
    def __init__(self, kind: Any = nn.Embedding, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = kind(7, 4, **options), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.words(x)
        return self.head(torch.tanh(h.mean(1) if h.dim() == 3 else h))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


PROBLEM = hk.BilevelProblem(
    lambda model, hyper, batch: hk.losses.cross_entropy(model(batch[0]), batch[1], weight=hyper().sigmoid()),
    lambda model, hyper, batch: loss(model, batch),
)


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randint(0, 7, (6, 5)), torch.randint(0, 3, (6,))


@pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")
@pytest.mark.parametrize("name", METHODS)
def test_sparse_gradients_are_dense_for_the_while(name: str) -> None:
    hyper, model = hk.as_hyper(torch.zeros(6)).double(), Words(sparse=True).double()
    found, wanted = (METHODS[name]().compute(PROBLEM, one, hyper, data(), data()) for one in (model, Words().double()))
    assert oracles.relative(oracles.flat(found.grads), oracles.flat(wanted.grads)) < 1e-9
    assert model.words.sparse


class Gated(nn.Module):
    """A layer of a user's own, with an attribute of that name."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.linear = True, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x.double())
        return h.relu() if self.sparse else h


def test_an_attribute_called_sparse_of_another_layer_stays() -> None:
    torch.manual_seed(0)
    model, hyper = Gated().double(), hk.as_hyper(torch.zeros(6)).double()
    found = hk.identity().compute(PROBLEM, model, hyper, data(), data())
    model.sparse = False
    other = hk.identity().compute(PROBLEM, model, hyper, data(), data())
    assert oracles.relative(oracles.flat(found.grads), oracles.flat(other.grads)) > 1e-2


@pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")
@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 0.5}])
@pytest.mark.parametrize("method", [None, hk.identity()])
def test_attribution_takes_them(options: dict[str, Any], method: hk.Implicit | None) -> None:
    plain, model, train = Words(), Words(**options), data()
    model(train[0])  # bounds its rows
    plain.load_state_dict(model.state_dict())
    found, wanted = (hk.attribute(loss, one, train, train, method=method).scores for one in (model, plain))
    torch.testing.assert_close(found, wanted)
    found, wanted = (hk.attribution.self_influence(loss, one, train, method=method) for one in (model, plain))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", ["hessian", "ggn", "unrolled"])
def test_bags_have_no_second_derivative(name: str) -> None:
    model, hyper = Words(nn.EmbeddingBag), hk.as_hyper(torch.zeros(6))
    with pytest.raises(hk.HyperkronError, match=r"cannot be differentiated twice .*use KFAC"):
        METHODS[name]().compute(PROBLEM, model, hyper, data(), data())
