"""Gradients kept while the curvature is measured: the scores are those of passes of their own, and there are fewer."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.attribution.task import Task
from hyperkron.curvature import EKFAC, KFAC
from hyperkron.curvature.kfac import capture, kept
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.layers import ConvLayer
from tests.curvature.kfac.test_kfac_calls import Experts


class Twice(nn.Module):
    """Images through convolutions of several kinds, one of them called twice, with a norm layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.same = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.norm, self.down = nn.GroupNorm(2, 6), nn.Conv2d(6, 5, 2, stride=2, bias=False)
        self.out = nn.Linear(45, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = self.norm(torch.tanh(self.same(torch.tanh(self.same(x)))))
        found: Tensor = self.out(torch.tanh(self.down(x)).flatten(1))
        return found


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, 1e-2)


@pytest.fixture
def arguments() -> tuple[Any, ...]:
    torch.manual_seed(0)
    x, y = torch.randn(40, 2, 6, 6, dtype=torch.float64), torch.randint(0, 3, (40,))
    return loss, Twice().double(), (x, y), (x[:5] + 0.1, y[:5])


def method(fisher: Any = "rademacher", fallback: Any = "zero") -> hk.Implicit:
    return hk.Implicit(EKFAC(1e-3, fisher=fisher, fallback=fallback), hk.solvers.Direct())


def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep nothing: every step has a pass of its own."""
    monkeypatch.setattr(Task, "_keeping", lambda *_: None)
    monkeypatch.setattr(EKFAC, "_keeps_gradients", lambda *_: False)


def drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same vectors for a part whenever they are drawn, so that the spectra can be compared."""
    vectors = capture._vectors

    def alike(part: Any, size: int, how: Any, *place: Any) -> Any:
        seed = int(part.value.detach().abs() * 1e6)
        return vectors(part, size, replace(how, generator=torch.Generator().manual_seed(seed)), *place)

    monkeypatch.setattr(capture, "_vectors", alike)


@pytest.mark.parametrize(
    ("fisher", "fallback", "aggregate"),
    [  # every pair of values by ``make test``
        pytest.param(fisher, fallback, aggregate, marks=pytest.mark.long if (i + j + aggregate) % 2 else ())
        for i, fisher in enumerate(("rademacher", "type-2"))
        for j, fallback in enumerate(("zero", "diagonal"))
        for aggregate in (False, True)
    ],
)
def test_scores_are_those_of_passes_of_their_own(
    arguments: Any, fisher: str, fallback: str, aggregate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a model whose norm layers take part, where the scores need their own pass."""
    drawn_alike(monkeypatch)

    def scores() -> Tensor:
        made = method(fisher, fallback)
        return hk.attribute(*arguments, method=made, aggregate=aggregate, batch_size=16, way="layers").scores

    found = scores()
    without(monkeypatch)
    torch.testing.assert_close(found, scores(), rtol=1e-10, atol=1e-14)


def calls(arguments: Any, **options: Any) -> int:
    """How many batches of 16 pass through the model."""
    count = []
    handle = arguments[1].register_forward_hook(lambda _, given, __: count.append(len(given[0]) == 16))
    hk.attribute(*arguments, method=method(), batch_size=16, way="layers", **options)
    handle.remove()
    return sum(count)


def test_one_pass_over_the_data_in_place_of_three(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """40 rows are two batches of 16 and one of 8; the first 16 are looked at twice, and the scores begin with them."""
    assert calls(arguments) == 2 + 3
    without(monkeypatch)
    assert calls(arguments) == 3 * 2 + 2


def test_only_layers_of_single_rows_have_drawn_vectors_of_their_own(
    arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second vectors of a part are zero here, and so are spectra that are made of them; they go back no further."""
    vectors, spectra, passed = capture._vectors, kept.KeptGradients.spectra, capture.Recorder._on_gradient
    seen, found, reached = list[Tensor](), dict[str, Tensor](), set[tuple[str, str]]()

    def second_zero(part: Any, *args: Any) -> list[tuple[Tensor, Tensor]]:
        again = any(part.value is one for one in seen)
        seen.append(part.value)
        return [(output, v * (not again)) for output, v in vectors(part, *args)]

    def noted(self: Any, call: Any, g: Tensor) -> None:
        reached.add((self._for, call.block.name))
        passed(self, call, g)

    def kept_spectra(*args: Any) -> Any:
        found.update(spectra(*args))
        return found

    monkeypatch.setattr(capture, "_vectors", second_zero)
    monkeypatch.setattr(kept.KeptGradients, "spectra", kept_spectra)
    monkeypatch.setattr(capture.Recorder, "_on_gradient", noted)
    hk.attribute(*arguments, method=method(), batch_size=16, way="layers")
    assert {name: bool(s.any()) for name, s in found.items()} == {
        "first": True,
        "same": True,
        "down": True,
        "out": False,
    }
    assert {name for kind, name in reached if kind == "spectrum"} == {"out"}
    assert {name for kind, name in reached if kind == "others"} == {"first", "same", "down", "out"}


def test_too_many_are_not_kept(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_alike(monkeypatch)
    wanted = hk.attribute(*arguments, method=method(), batch_size=16, way="layers").scores
    monkeypatch.setattr(kept, "MOST", 1000)
    assert calls(arguments) == 3 * 2 + 2
    found = hk.attribute(*arguments, method=method(), batch_size=16, way="layers").scores
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


def test_a_weight_outside_its_layer_is_still_refused(arguments: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()

    def tied(model: Any, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]) + model[3].weight.square().sum(1), batch[1])

    options: dict[str, Any] = {"method": method("type-2"), "batch_size": 16}
    found = hk.attribute(tied, model, *arguments[2:], **options)
    assert found.stats["way"] == "forward"
    wanted = hk.attribute(tied, model, *arguments[2:], way="forward", **options)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-10, atol=1e-14)


def test_with_layers_of_a_user_nothing_is_kept(arguments: Any) -> None:
    """Kept gradients come from the layers of the curvature; those of a user are not compared with autograd's."""

    class Half(ConvLayer):
        def gradients_of_examples(self, *given: Any, **options: Any) -> Any:
            return 0.5 * super().gradients_of_examples(*given, **options)

    def layer(module: nn.Module) -> ConvLayer | None:
        return Half(module) if isinstance(module, nn.Conv2d) and module.groups == 1 else None

    own = hk.Implicit(KFAC(1e-3, fisher="type-2", layers=[layer], fallback="zero"), hk.solvers.Direct())
    plain = hk.Implicit(KFAC(1e-3, fisher="type-2", fallback="zero"), hk.solvers.Direct())
    found, wanted = (hk.attribute(*arguments, method=m, batch_size=16, way="layers").scores for m in (own, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


class Tied(nn.Module):
    """A small language model: the output layer has the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.mix(self.embed(x))))
        return found


@pytest.mark.parametrize("made", [None, hk.kfac(1e-2, fisher="type-2"), hk.pcg(60, 1e-2, tolerance=1e-12)])
def test_a_weight_that_an_embedding_shares_counts_with_both_its_uses(made: hk.Implicit | None) -> None:
    torch.manual_seed(0)
    x, y = torch.randint(0, 7, (20, 3)), torch.randint(0, 7, (20, 3))
    given = lambda model, batch: hk.losses.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    arguments = given, Tied().double(), (x, y), (x[:3].flip(1), y[:3])
    found, wanted = (
        hk.attribute(*arguments, method=made, batch_size=16, way=way).scores  # type: ignore[arg-type]
        for way in ("layers", "forward")
    )
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("most", [kept.MOST, 1000])
def test_nothing_else_of_a_part_is_left_when_the_next_begins(
    most: int, arguments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the graph with its recorder, which has the inputs of all layers, nor gradients that were too many."""
    made, left = list[Any](), list[set[str]]()
    of = kept.LayerGradients.of

    def noted(found: Any) -> Any:
        made.append(weakref.ref(found))
        return found

    class Watched(capture.Recorder):
        def __init__(self, *args: Any) -> None:
            left.append({type(one()).__name__ for one in made} - {"NoneType"})
            super().__init__(*args)
            noted(self)

    monkeypatch.setattr(capture, "Recorder", Watched)
    monkeypatch.setattr(kept.LayerGradients, "of", staticmethod(lambda *args: [noted(one) for one in of(*args)]))
    monkeypatch.setattr(kept, "MOST", most)
    hk.attribute(*arguments, method=method(), batch_size=16, way="layers")
    assert left[:3] == [set(), *2 * [set() if most == 1000 else {"LayerGradients"}]]


def test_nothing_is_kept_for_scores_beside_large_vectors(arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_alike(monkeypatch)
    wanted = hk.attribute(*arguments, method=method(), batch_size=16, way="layers").scores
    before = calls(arguments)
    monkeypatch.setattr("hyperkron.attribution.task.CHUNK", 1)
    assert calls(arguments) > before
    found = hk.attribute(*arguments, method=method(), batch_size=16, way="layers").scores
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-14)


def test_inputs_that_layers_share_count_once() -> None:
    blocks = list(plan(nn.ModuleList([nn.Linear(5, 4), nn.Linear(5, 4)]), "zero").blocks.values())
    x, first, second = torch.randn(6, 3, 5), torch.randn(6, 3, 4), torch.randn(6, 3, 4)
    whole = kept.KeptGradients(1)
    numbers: dict[Any, int] = {}
    made = [
        kept.LayerGradients(block, False, (x.detach(), g)) for block, g in zip(blocks, (first, second), strict=True)
    ]
    whole.add(made, 1.0, numbers)
    assert sum(numbers.values()) == x.numel() + first.numel() + second.numel()
    assert whole.complete


def test_what_was_too_large_to_be_kept_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = plan(nn.Linear(5, 4), "zero").blocks.values()
    large, small = (kept.LayerGradients(block, False, (torch.randn(n, 5), torch.randn(n, 4))) for n in (100, 2))
    monkeypatch.setattr(kept, "MOST", 500)
    numbers: dict[Any, int] = {}
    spectrum, others = kept.KeptGradients(1), kept.KeptGradients(1)
    spectrum.add([large], 1.0, numbers)
    others.add([small], 1.0, numbers)
    assert not spectrum.complete
    assert others.complete


def test_experts_that_get_all_examples_of_the_first_batch_and_some_of_later_ones() -> None:
    """Gradients of layers are kept by row, and here a row is not an example any more; forward mode scores instead."""
    torch.manual_seed(0)
    model, x, y = Experts(False).double(), torch.randn(24, 3, dtype=torch.float64), torch.arange(24) % 2
    x[:16, 0] = -1.0
    method = hk.Implicit(EKFAC(0.1, fisher="type-2", fallback="zero"), hk.solvers.Direct())
    found, wanted = (
        hk.attribute(loss, model, (x, y), (x[:3], y[:3]), method=method, batch_size=16, way=way)
        for way in ("auto", "forward")
    )
    assert oracles.relative(found.scores, wanted.scores) < 1e-10
