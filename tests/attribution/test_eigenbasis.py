"""Scores in the eigenbasis of A are those of vectors that were solved for densely."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.attribution import layer_calls
from hyperkron.attribution.eigenbasis import EigenCoordinates
from hyperkron.attribution.forward_products import ForwardProducts
from hyperkron.attribution.inner_products import LayerProducts
from hyperkron.attribution.layer_calls import UnsuitableError
from hyperkron.attribution.store import PROGRESS, Store
from hyperkron.attribution.task import Task
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

    def refuses_later(self: LayerProducts, batch: Any, count: int, used: set[str] | None = None) -> Any:
        if used is None:  # of queries
            passes.append(count)
            if len(passes) % 2 == 0:
                raise UnsuitableError("the second pass of each call is refused")
        return real(self, batch, count, used)

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


class TiedTokens(nn.Module):
    """An output layer with the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(6, 5), nn.Linear(5, 5), nn.Linear(5, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(x))))


@pytest.mark.parametrize("batch_size", [40, 512])
def test_a_weight_that_an_embedding_shares_is_solved_for_densely(chosen: Any, batch_size: int) -> None:
    """The gradients that it has from the embedding are no rows of the block."""
    torch.manual_seed(0)
    x = torch.randint(0, 6, (120, 3))
    inside, dense, blocks = chosen(TiedTokens().double(), (x, x.roll(1, 0)), (x[:9], x[1:10]), batch_size=batch_size)
    assert blocks
    torch.testing.assert_close(inside, dense, rtol=1e-10, atol=1e-12)


def test_sequences_that_become_longer_later_have_the_same_scores(chosen: Any) -> None:
    """Gradients are kept as rows of the first batches, whose sequences are short, and in the weight of the last."""

    class Sums(nn.Module):
        """Rows of zeros, with which sequences are padded, change nothing."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(5, 16, bias=False), nn.Linear(16, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.first(x))).sum(1)

    def padded(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        return nn.utils.rnn.pad_sequence([x for x, _ in items], True), torch.tensor([y for _, y in items])

    torch.manual_seed(0)
    items = [(torch.randn(2 if n < 80 else 12, 5).double(), n % 3) for n in range(120)]
    inside, dense, blocks = chosen(Sums().double(), items, items[:9], batch_size=40, collate=padded)
    assert blocks
    torch.testing.assert_close(inside, dense, rtol=1e-10, atol=1e-12)


def test_a_folder_with_coordinates_is_continued_by_forward_mode(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, which may choose another way than the CPU on which the call began."""
    monkeypatch.setattr(EigenCoordinates, "choose", choose_all)
    wanted = hk.attribute(loss, *made("tokens"), batch_size=40).scores
    write = Store.write

    def interrupted(self: Store, start: int, scores: Tensor) -> None:
        if start:
            raise KeyboardInterrupt
        write(self, start, scores)

    def by_forward_mode(self: Task, point: Any, *_: Any) -> list[Any]:
        return [ForwardProducts(point)]

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            hk.attribute(loss, *made("tokens"), batch_size=40, out=tmp_path)
    assert json.loads((tmp_path / PROGRESS).read_text())["vectors"]["bases"]
    monkeypatch.setattr(Task, "ways", by_forward_mode)
    found = hk.attribute(loss, *made("tokens"), batch_size=40, out=tmp_path).scores
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
