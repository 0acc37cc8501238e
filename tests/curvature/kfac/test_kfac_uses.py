"""Layers used in unusual ways: by keyword, as functions, without a batch, with repeated tokens."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import hyperkron as hk
import oracles
from cases import make
from hyperkron import solution
from tests.curvature.test_curvature_products import Once


class ByKeyword(nn.Module):
    """Calls its layers with ``input=``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(input=self.linear(input=x))


class AsFunction(nn.Module):
    """Uses the weights of a norm layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 2), nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(self.linear(x), (2,), self.norm.weight, self.norm.bias)


class OneByOne(nn.Module):
    """Convolves examples one at a time, without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.convolution(image).mean((1, 2)) for image in x])


class Bag(nn.Module):
    """The mean of token embeddings, tokens repeating."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(3, 2, **options), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.embedding(x).tanh().mean(1))


@pytest.mark.parametrize("fisher", ["mc", "type-2", "empirical"])
def test_calls_by_keyword_are_calls(fisher: Any) -> None:
    torch.manual_seed(0)
    case = make(ByKeyword(), (3,))
    plain = make(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)), (3,))
    plain.model.load_state_dict(dict(zip(plain.model.state_dict(), case.model.state_dict().values(), strict=True)))
    by_keyword, by_position = case.measured(fisher), plain.measured(fisher)
    assert oracles.relative(by_keyword.a["linear"], by_position.a["0"]) < 1e-14
    assert oracles.relative(by_keyword.b["linear"], by_position.b["0"]) < 1e-14
    assert oracles.relative(by_keyword.diagonal["norm.weight"], by_position.diagonal["1.weight"]) < 1e-14


def test_a_norm_used_as_a_function_gets_the_measured_multiple_of_the_identity() -> None:
    case = make(AsFunction(), (3,))
    curvature = hk.curvature.KFAC(0.1)
    with case.point() as point:
        v = curvature.operator(point, curvature.init()).solve({n: torch.ones_like(p) for n, p in case.params.items()})
        assert "norm.weight" in point.notes["uncalled"]
    assert float(v["norm.weight"].min()) == float(v["norm.weight"].max()) > 0


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_convolutions_without_a_batch_count_as_batches_of_one(sharing: Any) -> None:
    torch.manual_seed(0)
    case = make(OneByOne(), (2, 3, 3))
    batched = make(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten()), (2, 3, 3))
    batched.model.load_state_dict(dict(zip(batched.model.state_dict(), case.model.state_dict().values(), strict=True)))
    single, together = case.measured("type-2", sharing=sharing), batched.measured("type-2", sharing=sharing)
    assert oracles.relative(single.a["convolution"], together.a["0"]) < 1e-12
    assert oracles.relative(single.b["convolution"], together.b["0"]) < 1e-12


@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}], ids=["plain", "padding"])
def test_embedding_diagonals_are_exact_for_repeated_tokens(options: dict[str, Any]) -> None:
    case = make(Bag(**options), (5,), loss="cross_entropy", tokens=3)
    term = case.inner(case.model, case.hyper, case.inner_batch).terms[0]
    exact = oracles.fisher(term.output, list(term.vectors("type-2")), [case.params["embedding.weight"]]).diagonal()
    found = case.measured("type-2").diagonal["embedding.weight"].reshape(-1)
    assert oracles.relative(found, exact) < 1e-10


def test_unrolling_refuses_a_function_without_second_derivative() -> None:
    case = make(nn.Sequential(nn.Linear(3, 4), Once(), nn.Linear(4, 2)), (3,))
    with pytest.raises(hk.HyperkronError, match="twice"):
        hk.unrolled(3).compute(*case.arguments)


class Placed(nn.Module):
    """Tokens, and positions that are looked up once for all examples."""

    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        self.tokens, self.places, self.linear = nn.Embedding(5, 2), nn.Embedding(3, 2), nn.Linear(2, 2)
        self.register_buffer("ids", ids)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear((self.tokens(x) + self.places(self.ids)).tanh().mean(1))


@pytest.mark.parametrize("fisher", ["type-2", "empirical"])
@pytest.mark.parametrize("count", [3, 20], ids=["as many examples as positions", "more"])
@pytest.mark.parametrize("ids", [torch.arange(3), torch.arange(3)[None]], ids=["positions", "one row of them"])
def test_mixed_products_of_examples_vanish_on_average_where_a_layer_works_for_all(
    ids: Tensor, count: int, fisher: Any
) -> None:
    case = make(Placed(ids), (3,), loss="cross_entropy", tokens=5, count=count)
    term = case.inner(case.model, case.hyper, case.inner_batch).terms[0]
    exact = oracles.fisher(term.output, list(term.vectors(fisher)), [case.params["places.weight"]]).diagonal()
    draws = [case.measured(fisher, seed=seed).diagonal["places.weight"].reshape(-1) for seed in range(50)]
    assert oracles.relative(torch.stack(draws).mean(0), exact) < 0.3


class Shared(nn.Module):
    """A weight that is used by layers and, with ``outside``, by a function."""

    def __init__(self, outside: bool) -> None:
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(5, 3), nn.Linear(3, 3), nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight, self.outside = self.embed.weight, outside

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(torch.tanh(self.mix(torch.tanh(self.mix(self.embed(x))))))
        return F.linear(h, self.embed.weight) if self.outside else self.head(h)


@pytest.mark.parametrize("outside", [False, True])
def test_a_use_of_a_weight_outside_its_layers_is_said(outside: bool) -> None:
    case = make(Shared(outside), (3,), loss="cross_entropy", tokens=5)
    if outside:
        case.model.head = nn.Identity()
    result = hk.kfac(0.1).compute(*case.arguments)
    assert result.stats.get("used elsewhere") == ("embed.weight" if outside else None)


class Masked(nn.Module):
    """Calls its first layers with three times their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(3, 2), nn.LayerNorm(2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.norm):
            x = functional_call(layer, {"weight": 3 * layer.weight}, (x,))
        return self.second(x)


def test_a_layer_called_with_a_function_of_its_weight_is_not_measured_as_if_it_were_the_weight() -> None:
    """The gradient at its output is that of the function, by which the factors were nine times too small."""
    solution._warned.clear()
    case = make(Masked(), (3,), loss="cross_entropy")
    found = case.measured("type-2")
    assert set(found.b) == {"second"}
    assert found.diagonal.keys() == {"first.weight", "first.bias", "norm.weight", "norm.bias"}
    with pytest.warns(hk.HyperkronWarning, match=r"first.weight \(2, 3\) \(its layer was not called with it\)"):
        result = hk.ekfac(0.1, fisher="type-2").compute(*case.arguments)
    assert result.stats["coverage"] == 6 / 18


def _detached(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.detach(), layer.bias.detach())


def _with_constants(layer: nn.Linear, x: Tensor) -> Tensor:
    return functional_call(layer, {name: p.detach() for name, p in layer.named_parameters()}, (x,))


def _with_other_leaves(layer: nn.Linear, x: Tensor) -> Tensor:
    return functional_call(layer, {name: p.detach().requires_grad_() for name, p in layer.named_parameters()}, (x,))


def _frozen(layer: nn.Linear, x: Tensor) -> Tensor:
    layer.requires_grad_(False)
    try:
        return layer(x)
    finally:
        layer.requires_grad_(True)


def _copied(layer: nn.Linear, x: Tensor) -> Tensor:
    return copy.deepcopy(layer)(x)


class WithTeacher(nn.Module):
    """Calls a layer with its parameters, and with constants in their place on an input that depends on θ."""

    def __init__(self, constant: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.constant = nn.Linear(3, 2), nn.Linear(2, 2), constant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.second(x) + self.constant(self.second, x.sin())


@pytest.mark.parametrize("constant", [_with_constants, _with_other_leaves, _frozen, _copied])
def test_calls_of_a_layer_with_constants_in_the_place_of_its_parameters_are_not_measured(
    constant: Callable[[nn.Linear, Tensor], Tensor],
) -> None:
    case = make(WithTeacher(constant), (3,), loss="cross_entropy")
    found = case.measured("type-2")
    case.model.constant = _detached
    wanted = case.measured("type-2")
    for factors, truth in ((found.a, wanted.a), (found.b, wanted.b)):
        assert factors.keys() == truth.keys() == {"first", "second"}
        for name, factor in truth.items():
            assert oracles.relative(factors[name], factor) < 1e-12


@pytest.mark.parametrize("size", [(2, 1), (1, 2), (2, 2)])
def test_a_single_image_may_have_its_channels_last(size: tuple[int, int]) -> None:
    """Hooks must not change how the memory of an output is laid out: the backward pass of batch norm goes by that."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.GELU(), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(1, 2, *size))
    case = make(net.eval(), (2, *size), count=1)
    wanted = case.measured("type-2").b["0"]
    x, y = case.inner_batch
    case.inner_batch = (x.contiguous(memory_format=torch.channels_last), y)
    assert oracles.relative(case.measured("type-2").b["0"], wanted) < 1e-12


@pytest.mark.parametrize("fallback", ["diagonal", "zero", "identity"])
def test_an_embedding_that_is_not_measured_is_no_use_outside_the_layers(fallback: Any) -> None:
    case = make(Shared(False), (3,), loss="cross_entropy", tokens=5)
    curvature = hk.curvature.KFAC(0.1, fallback=fallback)
    with case.point() as point:
        curvature.operator(point, curvature.init())
        assert "used elsewhere" not in point.notes


class Mixing(nn.Module):
    """Attention over tokens, with a loss at each of them."""

    def __init__(self, places: bool, scale: bool = False) -> None:
        super().__init__()
        self.tokens, self.q, self.head = nn.Embedding(5, 2), nn.Linear(2, 2), nn.Linear(2, 3)
        self.places = nn.Embedding(4, 2) if places else None
        self.scale = nn.Parameter(torch.ones(2)) if scale else 1.0  # outside any layer that KFAC knows

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) if self.places is None else self.tokens(x) + self.places(torch.arange(4))
        return self.head(self.scale * ((self.q(h) @ h.mT).softmax(-1) @ h))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(("places", "scale"), [(False, False), (True, False), (False, True)])
def test_factors_of_a_loss_over_flattened_tokens_are_those_of_tokens_in_rows(
    places: bool, scale: bool, sharing: str
) -> None:
    """Random signs of examples change no factor; random signs of tokens would."""
    case = make(Mixing(places, scale), (4,), loss="cross_entropy", tokens=5, count=3)
    x, y = case.inner_batch

    def inner(flat: bool) -> Any:
        def loss(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
            output = model(x)
            weight = hyper()[:, None].expand(y.shape)
            if flat:
                return hk.losses.cross_entropy(output.flatten(0, 1), y.flatten(), weight=weight.flatten())
            return hk.losses.cross_entropy(output, y, weight=weight)

        return loss

    found = []
    for flat in (False, True):
        case.inner = inner(flat)  # type: ignore[method-assign]
        found.append(case.measured("empirical", sharing))
    for name in ("q", "head"):
        assert oracles.relative(found[1].a[name], found[0].a[name]) < 1e-12
        assert oracles.relative(found[1].b[name], found[0].b[name]) < 1e-12


class Scaled(nn.Module):
    """Goes on with a multiple of the output of its first layer, by the code of the model or by a hook on the layer."""

    def __init__(self, hooked: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.factor = 1.0 if hooked else 3.0
        if hooked:
            self.first.register_forward_hook(lambda module, given, output: 3.0 * output)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.factor * self.first(x)))


def test_hooks_that_change_the_output_of_a_layer_are_not_part_of_it() -> None:
    cases = [make(Scaled(hooked), (3,), loss="cross_entropy") for hooked in (False, True)]
    cases[1].model.load_state_dict(cases[0].model.state_dict())
    wanted, found = (case.measured("type-2") for case in cases)
    for name in ("first", "second"):
        assert oracles.relative(found.b[name], wanted.b[name]) < 1e-12


def test_scores_by_layers_do_not_depend_on_hooks_that_change_outputs() -> None:
    cases = [make(Scaled(hooked), (3,), loss="cross_entropy") for hooked in (False, True)]
    cases[1].model.load_state_dict(cases[0].model.state_dict())
    rows = cases[0].inner_batch

    def loss(model: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    wanted, found = (hk.attribute(loss, case.model, rows, rows, way="layers").scores for case in cases)
    assert oracles.relative(found, wanted) < 1e-12


class Mapped(nn.Module):
    """Calls its second layer on one example at a time, by ``torch.vmap``, where hooks see no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.second)(torch.tanh(self.first(x)))


@pytest.mark.parametrize("made", [hk.kfac, hk.ekfac])
def test_a_layer_inside_vmap_has_the_fallback_and_not_zero(made: Any) -> None:
    case = make(Mapped(), (3,), loss="cross_entropy")
    result = made(0.1).compute(*case.arguments)
    assert result.stats["coverage"] == 16 / 26
    assert "second.weight" in result.stats["uncalled"]
    assert all(bool(v.any()) for v in result.solution.value.values())


class Sequences(nn.Module):
    """A layer over all steps of sequences of examples, which come first or second."""

    def __init__(self, examples_first: bool) -> None:
        super().__init__()
        self.each, self.head, self.examples_first = nn.Linear(3, 4), nn.Linear(4, 2), examples_first

    def forward(self, x: Tensor) -> Tensor:
        steps = 1 if self.examples_first else 0
        return self.head(torch.tanh(self.each(x if self.examples_first else x.transpose(0, 1))).mean(steps))


@pytest.mark.parametrize("made", [hk.ekfac, lambda: hk.kfac(sharing="reduce"), hk.kfac])
@pytest.mark.parametrize("examples_first", [True, False])
@pytest.mark.parametrize("steps", [4, 5])
def test_sequences_in_the_place_of_examples_are_said_where_they_matter(
    made: Any, examples_first: bool, steps: int, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    case = make(Sequences(examples_first), (steps, 3), count=8)
    made().compute(*case.arguments)
    told = [warning for warning in recwarn if "not that of examples" in str(warning.message)]
    assert bool(told) is (not examples_first and made is not hk.kfac)


def test_flattened_tokens_in_pieces_are_not_taken_for_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", {"coverage"})
    case = make(Mixing(False), (4,), loss="cross_entropy", tokens=5, count=6)

    def loss(model: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        hk.attribute(loss, case.model, case.inner_batch, case.inner_batch, batch_size=3)


class InPlace(nn.Module):
    """Adds to the input of a layer, of which autograd has kept a copy, because it was not contiguous."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(3, 2), layer, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).mT
        x += self.layer(x)
        return self.head(x.tanh().mean(1))


@pytest.mark.parametrize("method", [hk.kfac, hk.ekfac])
@pytest.mark.parametrize("kind", [lambda: nn.Linear(4, 4), lambda: nn.GroupNorm(1, 2)], ids=["linear", "norm"])
def test_an_input_that_changes_in_place_before_it_is_read_is_refused(kind: Any, method: Any) -> None:
    """Such a model trains, and A was that of the changed input."""
    layer = kind()
    case = make(InPlace(layer), (4, 3), loss="cross_entropy")
    case.inner(case.model, case.hyper, case.inner_batch).backward()
    with pytest.raises(hk.HyperkronError, match=r"input of layer.* was changed in place .*x = x \+ y"):
        method(0.1).compute(*case.arguments)
    layer.weight.requires_grad_(False)
    if isinstance(layer, nn.Linear):  # for a bias alone no input is read
        method(0.1).compute(*case.arguments)
