"""What KFAC measures layer by layer: factors against loops, weights used several times, and coverage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Mean, make, mlp, random_weights
from hyperkron.curvature.kfac import layers, recorder
from hyperkron.curvature.kfac.factors import dense as as_matrix
from hyperkron.curvature.kfac.grams import summed
from hyperkron.curvature.kfac.layers import CHUNK_ELEMENTS, kronecker_layer
from storages import Storages

Build = Callable[[], nn.Module]


def conv_net(layer: nn.Module, channels: int) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), Mean(True), nn.Linear(channels, 3))


def frozen(layer: nn.Module, part: str) -> nn.Module:
    getattr(layer, part).requires_grad_(False)
    return layer


LAYERS: dict[str, tuple[Build, tuple[int, ...]]] = {
    "linear": (lambda: mlp(3, 4, 3), (3,)),
    "linear without bias": (lambda: mlp(3, 4, 3, bias=False), (3,)),
    "linear over tokens": (lambda: nn.Sequential(mlp(3, 4, 3), nn.Tanh(), Mean(), nn.Linear(3, 2)), (4, 3)),
    "linear over an image": (lambda: nn.Sequential(mlp(3, 4, 3), nn.Tanh(), Mean(), nn.Linear(3, 2)), (2, 3, 3)),
    "frozen weight": (lambda: nn.Sequential(frozen(nn.Linear(3, 4), "weight"), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "frozen bias": (lambda: nn.Sequential(frozen(nn.Linear(3, 4), "bias"), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "conv1d": (lambda: conv_net(nn.Conv1d(2, 3, 3, stride=2, padding=1), 3), (2, 7)),
    "conv1d same": (lambda: conv_net(nn.Conv1d(2, 3, 4, padding="same"), 3), (2, 5)),
    "conv2d": (lambda: conv_net(nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(2, 1)), 3), (2, 4, 5)),
    "conv1d, one pixel": (lambda: conv_net(nn.Conv1d(2, 3, 1), 3), (2, 1)),
    "conv2d, one pixel": (lambda: conv_net(nn.Conv2d(4, 3, 1), 3), (4, 1, 1)),
    "conv2d in groups, one pixel padded": (lambda: conv_net(nn.Conv2d(4, 4, 3, padding=1, groups=2), 4), (4, 1, 1)),
    "conv2d valid, no bias": (lambda: conv_net(nn.Conv2d(2, 3, 2, padding="valid", bias=False), 3), (2, 4, 3)),
    "conv2d circular": (lambda: conv_net(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), 3), (2, 3, 4)),
    "conv2d reflect": (lambda: conv_net(nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="reflect"), 3), (2, 3, 4)),
    "conv2d replicate, same": (
        lambda: conv_net(nn.Conv2d(2, 3, 2, padding="same", padding_mode="replicate"), 3),
        (2, 3, 3),
    ),
    "conv2d dilated": (lambda: conv_net(nn.Conv2d(2, 3, 2, dilation=(2, 1), padding=1), 3), (2, 4, 3)),
    "conv2d dilated, same": (lambda: conv_net(nn.Conv2d(2, 3, 2, dilation=2, padding="same"), 3), (2, 3, 3)),
    "conv2d groups": (lambda: conv_net(nn.Conv2d(4, 6, 2, groups=2, stride=2), 6), (4, 4, 4)),
    "conv2d depthwise": (lambda: conv_net(nn.Conv2d(3, 6, 2, groups=3, dilation=2, padding=1), 6), (3, 3, 3)),
    "conv2d frozen weight": (lambda: conv_net(frozen(nn.Conv2d(2, 4, 2, groups=2), "weight"), 4), (2, 3, 3)),
    "conv2d frozen bias": (lambda: conv_net(frozen(nn.Conv2d(2, 4, 2, groups=2), "bias"), 4), (2, 3, 3)),
    "conv3d": (lambda: conv_net(nn.Conv3d(1, 2, 2, stride=(1, 2, 1), padding=(0, 1, 1)), 2), (1, 2, 2, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
def test_factors_equal_loops_over_examples_and_positions(name: str, sharing: str, fisher: str) -> None:
    build, shape = LAYERS[name]
    case = make(build(), shape, count=3, loss="cross_entropy", hyper=random_weights(3))
    found = case.measured(fisher, sharing, samples=2)
    wanted = case.slow_factors(fisher, sharing, samples=2)
    assert set(found.a) == set(found.b) == set(wanted)
    for block, (a, b) in wanted.items():
        assert oracles.relative(as_matrix(found.a[block]), a) < 1e-13
        assert oracles.relative(as_matrix(found.b[block]), b) < 1e-13


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("conv")])
def test_patches_may_come_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    build, shape = LAYERS[name]
    case = make(build(), shape, loss="cross_entropy")
    whole = case.measured().a
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 1)  # one example at a time
    parts = case.measured().a
    assert set(parts) == set(whole)
    for block in whole:
        assert oracles.relative(as_matrix(parts[block]), as_matrix(whole[block])) < 1e-14


def test_factors_larger_than_their_input_wait_until_activations_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, deep = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 20, 3, padding=1)
    last = nn.Conv2d(20, 2, 2)  # its factor has 81² entries, its input 5·20·4
    case = make(nn.Sequential(wide, nn.Tanh(), nn.AdaptiveAvgPool2d(2), deep, last, Mean(True)), (2, 9, 9))
    expected, order = case.slow_factors(), []
    for name in ("_on_input", "_on_gradient"):
        true = getattr(recorder.Recorder, name)

        def noted(*args: Any, name: str = name, true: Any = true) -> None:
            order.append((name, args[1].block.name))
            true(*args)

        monkeypatch.setattr(recorder.Recorder, name, noted)
    found = case.measured(fisher="empirical").a
    backward = [("_on_gradient", name) for name in ("4", "3", "0")]
    assert order == [("_on_input", "0"), *backward, ("_on_input", "3"), ("_on_input", "4")]
    assert list(found) == ["0", "3", "4"]
    for name, (a, _) in expected.items():
        assert oracles.relative(as_matrix(found[name]), a) < 1e-13


def test_a_chunk_is_let_go_before_the_next_is_made() -> None:
    size = 4 * 1000 * 8
    with Storages() as count:
        total, rows = summed((torch.ones(1, 1000, 8) for _ in range(4)), torch.float32, None, low_rank=False)
    assert rows == 4000
    assert torch.equal(as_matrix(total), torch.full((1, 8, 8), 4000.0))
    assert size <= count.peak < 1.1 * size


@pytest.mark.parametrize("name", LAYERS)
def test_the_operator_is_the_damped_kronecker_product(name: str) -> None:
    """[W | b] is put together and taken apart in the right order, for every kind of layer."""
    build, shape = LAYERS[name]
    case = make(build(), shape, count=3, loss="cross_entropy")
    size = sum(p.numel() for p in case.params.values())
    wanted = torch.zeros(size, size, dtype=DOUBLE)
    for block, (a, b) in case.slow_factors().items():
        order = oracles.joint_order(case.model.get_submodule(block), f"{block}.", case.params)
        wanted[order[:, None], order] = oracles.kron(a, b) + 0.1 * torch.eye(len(order), dtype=DOUBLE)
    curvature = hk.curvature.KFAC(0.1, fisher="type-2", split="exact")
    with case.point() as point:
        operator = curvature.operator(point, curvature.init())
        assert oracles.relative(oracles.dense(operator.matvec, case.params), wanted) < 1e-12
        assert oracles.relative(oracles.dense(operator.solve, case.params), torch.linalg.inv(wanted)) < 1e-11


# --- several uses of one weight ------------------------------------------------------------------------------------


class Twice(nn.Module):
    """One layer called twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(torch.tanh(self.layer(x))))


class Tied(nn.Module):
    """One Parameter in two layers."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3, bias=bias), nn.Linear(3, 3, bias=bias)
        self.two.weight, self.two.bias = self.one.weight, self.one.bias
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(torch.tanh(self.one(x))))


def test_a_module_called_twice_sums_its_uses() -> None:
    case = make(Twice(), (3,), loss="cross_entropy")
    found, wanted = case.measured(), case.slow_factors()
    for block in ("layer", "head"):
        assert oracles.relative(as_matrix(found.a[block]), wanted[block][0]) < 1e-13
        assert oracles.relative(as_matrix(found.b[block]), wanted[block][1]) < 1e-13


@pytest.mark.parametrize("bias", [True, False])
def test_a_parameter_tied_between_layers_sums_its_uses(bias: bool) -> None:
    case = make(Tied(bias), (3,), loss="cross_entropy")
    rows = {row.parameter: row for row in hk.curvature.KFAC().coverage(case.model).rows}
    assert rows["one.weight"].curvature == "kronecker"
    assert "tied over 2 modules" in rows["one.weight"].reason
    assert "two.weight" not in rows
    found, wanted = case.measured(), case.slow_factors()
    assert set(found.a) == {"one", "head"}
    (a1, b1), (a2, b2) = wanted["one"], wanted["two"]
    assert oracles.relative(as_matrix(found.a["one"]), (a1 + a2) / 2) < 1e-13
    assert oracles.relative(as_matrix(found.b["one"]), b1 + b2) < 1e-13


class TiedConv(nn.Module):
    """One kernel with two strides: its uses are rows of different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 2, 2, padding=1), nn.Conv2d(2, 2, 2, stride=2)
        self.two.weight, self.two.bias = self.one.weight, self.one.bias
        self.mean = Mean(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.mean(self.two(torch.tanh(self.one(x))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(x, x, x)[0].mean(1))


class Raw(nn.Module):
    """Parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale, self.head = nn.Linear(3, 4), nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.first(x) * self.scale))


OUTSIDE: dict[str, tuple[Build, tuple[int, ...], int, dict[str, str]]] = {
    "tied strides": (TiedConv, (2, 4, 4), 0, {"one.weight": "tied between one (Conv2d) and two (Conv2d)"}),
    "attention": (
        Attention,
        (3, 4),
        0,
        {"attend.in_proj_weight": "MultiheadAttention", "attend.out_proj.weight": "out_proj of MultiheadAttention"},
    ),
    "raw": (Raw, (3,), 0, {"scale": "Raw"}),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
        (3,),
        0,
        {"0.parametrizations.weight.original0": "ParametrizationList"},
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_kfac_does_not_cover_is_named_and_gets_the_scaled_identity(name: str) -> None:
    build, shape, tokens, reasons = OUTSIDE[name]
    case = make(build(), shape, loss="cross_entropy", tokens=tokens)
    coverage = hk.curvature.KFAC().coverage(case.model)
    rows = {row.parameter: row for row in coverage.rows}
    assert set(rows) == set(case.params)
    for parameter, reason in reasons.items():
        assert rows[parameter].curvature == "scaled identity"
        assert rows[parameter].reason == reason
        assert f"{parameter} " in str(coverage)
    strict = hk.Implicit(hk.curvature.KFAC(strict=True), hk.solvers.Direct())
    with pytest.raises(
        hk.solution.CoverageError, match=r"no Kronecker block for .*" + next(iter(reasons)).replace(".", r"\.")
    ):
        strict.compute(*case.arguments)
    for fallback, curvature in (("identity", 1.0), ("zero", None)):
        made = hk.curvature.KFAC(0.25, fallback=fallback)  # type: ignore[arg-type]
        assert {row.curvature for row in made.coverage(case.model).uncovered} == {fallback}
        with case.point() as point:
            solved = made.operator(point, made.init()).solve({n: torch.ones_like(p) for n, p in case.params.items()})
        for parameter in reasons:
            wanted = 0.0 if curvature is None else 1 / (curvature + 0.25)
            assert float((solved[parameter] - wanted).abs().max()) < 1e-15
    assert hk.kfac(0.1).compute(*case.arguments).status is hk.Status.DIRECT


@pytest.mark.parametrize("fisher", ["type-2", "mc", "empirical"])
@pytest.mark.parametrize("name", ["attention", "raw"])
@pytest.mark.long
def test_scaled_identity_has_the_right_trace_on_average(name: str, fisher: str) -> None:
    """The mean over 200 seeds is tr F / dim within 4.5 standard errors, F being the dense Fisher of the block."""
    build, shape, tokens, reasons = OUTSIDE[name]
    case = make(build(), shape, count=3, loss="mse", tokens=tokens, hyper=random_weights(3))
    loss = case.inner(case.model, case.hyper, case.inner_batch)
    term = loss.terms[0]
    for parameter in reasons:
        p = case.params[parameter]
        exact = oracles.fisher(term.output, term.vectors("empirical" if fisher == "empirical" else "type-2"), [p])
        draws = torch.stack([case.measured(fisher, seed=s).diagonal[parameter] for s in range(200)])
        spread = float(draws.std()) / len(draws) ** 0.5
        assert abs(float(draws.mean()) - float(exact.trace()) / p.numel()) < 4.5 * spread + 1e-12


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("conv2d")])
@pytest.mark.parametrize("most", [1, 5])
@pytest.mark.parametrize("few", [0, 4])
def test_gradients_of_examples_are_those_of_patches(
    name: str, most: int, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "FEW_CHANNELS", few)
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    module = build().double()[0]  # type: ignore[index]
    layer, x = kronecker_layer(module), torch.randn(5, *shape, dtype=DOUBLE)
    assert layer is not None
    g = torch.randn_like(module(x))
    weight, bias = (torch.cat(parts) for parts in zip(*layer.gradients_of_examples(x, g, most), strict=True))
    a, b = (torch.cat(parts) for parts in zip(*layer.positions(x, g), strict=True))
    torch.testing.assert_close(weight, b.mT @ a)
    torch.testing.assert_close(bias, b.sum(-2))
    alone = next(iter(layer.gradients_of_examples(x[0], g[0], most)))[0]
    torch.testing.assert_close(alone, weight[:1])
    several = list(zip(*layer.gradients_of_several(x, [g, -2 * g], most), strict=True))
    for chunks, factor in zip(several, (1, -2), strict=True):
        for found, wanted in zip(map(torch.cat, zip(*chunks, strict=True)), (weight, bias), strict=True):
            torch.testing.assert_close(found, factor * wanted)
