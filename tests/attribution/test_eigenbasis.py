"""Scores in the eigenbasis of A are those of vectors that were solved for densely."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.attribution import layer_calls
from hyperkron.attribution.eigenbasis import EigenCoordinates
from hyperkron.attribution.inner_products import LayerProducts
from hyperkron.attribution.layer_calls import UnsuitableError
from hyperkron.curvature.base import Eigenbasis
from hyperkron.curvature.kfac.coverage import plan


class Tokens(nn.Module):
    """Linear layers over tokens, one of them without a bias and one called twice, and a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(5, 7), nn.Linear(7, 7, bias=False), nn.LayerNorm(7)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return self.head(self.norm(self.second(torch.tanh(x))).mean(1))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, 1e-3)


def made(kind: str, rows: int = 120) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = (Tokens() if kind == "tokens" else images()).double()
    x = torch.randn(rows, 4, 5) if kind == "tokens" else torch.randn(rows, 2, 4, 4)
    x, y = x.double(), torch.randint(0, 3, (rows,))
    return model, (x, y), (x[:9] + 0.1, y[:9])


def choose_all(self: EigenCoordinates, *_: Any) -> None:
    self.bases.update(self._known)


def choose_none(self: EigenCoordinates, *_: Any) -> None:
    pass


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Scores with the eigenbasis of every block, and with none; how many blocks there were."""

    def scores(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor, int]:
        counts, found = [], []
        real = EigenCoordinates.split

        def counted(self: EigenCoordinates, gradients: Any) -> Any:
            counts.append(len(self.bases))
            return real(self, gradients)

        for choose in (choose_all, choose_none):
            with monkeypatch.context() as patch:
                patch.setattr(EigenCoordinates, "choose", choose)
                patch.setattr(EigenCoordinates, "split", counted)
                found.append(hk.attribute(loss, *arguments, **options).scores)
        return found[0], found[1], max(counts)

    return scores


@pytest.mark.parametrize("batch_size", [40, 512], ids=["kept gradients", "a pass of its own"])
@pytest.mark.parametrize("kind", ["tokens", "images"])
def test_scores_are_those_of_dense_solves(chosen: Any, kind: str, batch_size: int) -> None:
    inside, dense, blocks = chosen(*made(kind), batch_size=batch_size)
    assert blocks
    torch.testing.assert_close(inside, dense, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("numbers", [1, 100])
def test_a_few_outputs_at_a_time_give_the_same(chosen: Any, monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    whole = chosen(*made("tokens"))[1]
    monkeypatch.setitem(layer_calls.PIECE, "cpu", numbers)
    inside, dense, _ = chosen(*made("tokens"))
    torch.testing.assert_close(inside, whole, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dense, whole, rtol=1e-10, atol=1e-12)


def test_queries_that_are_differentiated_alone_have_coordinates_too(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = chosen(*made("tokens"))[1]
    real, passes = LayerProducts.calls, []

    def refuses_later(self: LayerProducts, batch: Any, count: int) -> Any:
        passes.append(count)
        if len(passes) % 2 == 0:
            raise UnsuitableError("the second pass of each call is refused")
        return real(self, batch, count)

    monkeypatch.setattr("hyperkron.attribution.task.MAX_QUERIES", 5)
    monkeypatch.setattr(LayerProducts, "calls", refuses_later)
    inside, dense, blocks = chosen(*made("tokens"))
    assert blocks and passes == [5, 4] * 2
    torch.testing.assert_close(inside, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dense, wanted, rtol=1e-10, atol=1e-12)


def test_coordinates_become_vectors_where_the_way_by_layers_fails_later(
    chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = made("tokens")
    wanted = chosen(*arguments, batch_size=512)[1]
    real = LayerProducts.__call__

    def refuses_large(self: LayerProducts, batch: Any, vectors: Any, count: int) -> Tensor:
        if count > 50:
            raise UnsuitableError("only the first batch is accepted")
        return real(self, batch, vectors, count)

    monkeypatch.setattr(LayerProducts, "__call__", refuses_large)
    inside, _, blocks = chosen(*arguments, batch_size=512)
    assert blocks
    torch.testing.assert_close(inside, wanted, rtol=1e-10, atol=1e-12)


def test_queries_that_are_not_finite_are_refused(chosen: Any) -> None:
    model, train, (x, y) = made("tokens")
    x[3, 0, 0] = torch.nan
    with pytest.raises(hk.NonFiniteError):
        chosen(model, train, (x, y))


def test_the_eigenbasis_is_chosen_where_it_saves_multiplications() -> None:
    (block,) = plan(nn.Linear(64, 32), "zero").blocks.values()
    basis = Eigenbasis(torch.eye(65)[None], torch.eye(32)[None], torch.ones(1, 32, 65))

    def chosen(positions: float, queries: int, examples: int) -> bool:
        made = EigenCoordinates({"weight": block}, {"weight": basis})
        made.choose({"weight": positions}, queries, examples)
        return bool(made.bases)

    assert chosen(1, 100, 1000)
    assert chosen(8, 100, 500)
    assert not chosen(1, 1, 1000)
    assert not chosen(200, 100, 1000)
