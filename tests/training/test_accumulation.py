"""Micro-batches: the gradients, products and hypergradients of the whole batch, or a refusal."""

from __future__ import annotations

import warnings
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import cross, solution, trees
from hyperkron.curvature.hessian import HessianOperator
from hyperkron.evaluation.point import Point
from hyperkron.training.accumulation import check_is_mean, length, split

N, D, C = 13, 4, 3
TOLERANCE = {"rtol": 1e-12, "atol": 1e-14}


class Network(nn.Module):
    """Linear, LayerNorm (a diagonal for KFAC) and a raw parameter (its fallback)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, 5), nn.LayerNorm(5), nn.Linear(5, C)
        self.raw = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.tanh(self.first(x))) * self.raw)


class Setting:
    """Weighted cross-entropy with a penalty and, with ``masked``, rows that do not count."""

    def __init__(self, masked: bool = False) -> None:
        torch.manual_seed(0)
        self.model, self.hyper = Network().double(), hk.SampleWeights(N).double()
        with torch.no_grad():
            self.hyper.weight.uniform_(0.2, 0.9)
        x, y = torch.randn(N, D, dtype=torch.float64), torch.randint(C, (N,))
        if masked:
            y[[0, 1, 4, 9]] = -100
        self.batch = (x, y, torch.arange(N))
        self.problem = hk.BilevelProblem(self.inner, self.outer)

    @staticmethod
    def inner(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        x, y, index = batch
        return hk.losses.cross_entropy(model(x), y, weight=hyper(index)) + hk.losses.l2(model, 0.03)

    @staticmethod
    def outer(model: Any, hyper: Any, batch: Any) -> Tensor:
        x, y, index = batch
        keep = y >= 0
        losses = nn.functional.cross_entropy(model(x), y.clamp(min=0), reduction="none")
        return (losses * keep).mean() + 0.01 * hyper(index).square().mean()

    def state(self, problem: hk.BilevelProblem) -> Any:
        return hk.AID(hk.identity()).init(problem, self.model, self.hyper)


@pytest.mark.parametrize(("masked", "size"), [(False, 1), (False, 4), (False, 12), (True, 4), (True, 5)])
@pytest.mark.parametrize("level", ["inner", "outer"])
def test_gradients_are_those_of_the_whole_batch(level: Any, masked: bool, size: int) -> None:
    setting = Setting(masked)
    found = [
        hk.algorithms.derivatives.gradients(setting.state(problem), level, setting.batch)
        for problem in (setting.problem, hk.training.Accumulated(setting.problem, size))
    ]
    torch.testing.assert_close(found[1].value, found[0].value, **TOLERANCE)
    torch.testing.assert_close(found[1].theta, found[0].theta, **TOLERANCE)
    torch.testing.assert_close(found[1].hyper, found[0].hyper, **TOLERANCE)


@pytest.mark.parametrize("masked", [False, True])
def test_products_and_cross_terms_are_those_of_the_whole_batch(masked: bool) -> None:
    setting = Setting(masked)
    v = trees.normal_like(dict(setting.model.named_parameters()), torch.Generator().manual_seed(1))
    found = []
    for problem in (setting.problem, hk.training.Accumulated(setting.problem, 4)):
        with Point(problem, setting.model, setting.hyper, setting.batch, setting.batch) as point:
            ggn = hk.curvature.GGN(0.1).operator(point, hk.curvature.GGN().init())
            found.append(
                (
                    HessianOperator(point, 0.1).matvec(v),
                    ggn.matvec(v),
                    cross.reverse(point, v),
                    cross.difference(point, v, 1e-4),
                )
            )
    torch.testing.assert_close(found[1][:3], found[0][:3], **TOLERANCE)
    torch.testing.assert_close(found[1][3], found[0][3], rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found[1][3], found[0][2], rtol=1e-4, atol=1e-7)


def kronecker(kind: Any, **options: Any) -> hk.Implicit:
    """The raw parameter's curvature is estimated with random signs, which pieces draw otherwise: 1 for it here."""
    return hk.Implicit(kind(1e-2, fallback="identity", **options), hk.solvers.Direct(), cross="reverse")


METHODS = {
    "kfac": lambda: kronecker(hk.curvature.KFAC, fisher="type-2"),
    "kfac exact": lambda: kronecker(hk.curvature.KFAC, fisher="type-2", split="exact"),
    "ekfac": lambda: kronecker(hk.curvature.EKFAC, fisher="type-2"),
    "empirical": lambda: kronecker(hk.curvature.KFAC, fisher="empirical"),
    "cg": lambda: hk.cg(40, 1e-1, cross="reverse"),
    "ggn": lambda: hk.cg(40, curvature=hk.curvature.GGN(1e-1), cross="reverse"),
    "neumann": lambda: hk.neumann(5, step=0.1),
    "pcg": lambda: hk.Implicit(
        hk.curvature.GGN(0.1), hk.solvers.CG(60), preconditioner=hk.curvature.KFAC(0.1), cross="reverse"
    ),
    "unrolled": lambda: hk.unrolled(3),
    "identity": lambda: hk.identity(cross="reverse"),
}


@pytest.mark.parametrize("masked", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("name", METHODS)
def test_hypergradients_are_those_of_the_whole_batch(name: str, masked: bool) -> None:
    setting, found = Setting(masked), []
    for problem in (setting.problem, hk.training.Accumulated(setting.problem, 5)):
        result = METHODS[name]().compute(problem, setting.model, setting.hyper, setting.batch, setting.batch)
        found.append((result.grads, result.status))
    assert found[0][1] is found[1][1]
    # iterations amplify the rounding of their products
    close = {"rtol": 1e-6, "atol": 1e-9} if name in ("ggn", "pcg", "cg") else {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(found[1][0], found[0][0], **close)


def test_norm_layers_have_the_same_diagonal_in_parts() -> None:
    setting = Setting(masked=True)
    diagonals = []
    for problem in (setting.problem, hk.training.Accumulated(setting.problem, 5)):
        curvature = hk.curvature.KFAC(1e-2, fisher="type-2")
        with Point(problem, setting.model, setting.hyper, setting.batch, None) as point:
            diagonals.append(curvature.operator(point, curvature.init()).diagonal["norm.weight"])
    torch.testing.assert_close(diagonals[1], diagonals[0], rtol=1e-9, atol=1e-12)


def test_only_one_piece_is_alive_at_a_time() -> None:
    """The largest batch the model ever sees is the piece, in gradients, products and factors alike."""
    setting, seen = Setting(), []
    setting.model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    problem = hk.training.Accumulated(setting.problem, 4)
    for method in (hk.kfac(1e-2), hk.ekfac(1e-2), hk.cg(3, 0.1), hk.cg(3, curvature=hk.curvature.GGN(0.1))):
        method.compute(problem, setting.model, setting.hyper, setting.batch, setting.batch)
    assert max(seen) == 4


def test_dropout_draws_the_same_masks_in_gradient_and_products() -> None:
    """The Hessian of a loss with dropout is that of the drawn one: products repeat the draws of the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 1)).double()
    x = torch.randn(8, D, dtype=torch.float64)
    problem = hk.training.Accumulated(
        hk.BilevelProblem(lambda m, h, b: m(b).square().mean(), lambda m, h, b: m(b).mean()), 3
    )
    params = dict(model.named_parameters())
    v = trees.normal_like(params, torch.Generator().manual_seed(1))

    def gradient() -> trees.Tree:
        torch.manual_seed(7)
        value = problem.inner(model, nn.Module(), x).value
        return dict(zip(params, torch.autograd.grad(value, list(params.values())), strict=True))

    torch.manual_seed(7)
    value = problem.inner(model, nn.Module(), x).value
    after = torch.get_rng_state()
    graph = torch.autograd.grad(value, list(params.values()), create_graph=True)
    torch.manual_seed(1234)  # products must not depend on where the random state stands by then
    now = torch.get_rng_state()
    product = dict(zip(params, torch.autograd.grad(graph, list(params.values()), list(v.values())), strict=True))
    assert torch.equal(torch.get_rng_state(), now) and not torch.equal(after, now)
    step, sides = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for name, p in params.items():
                p.add_(v[name], alpha=sign * step)
        sides.append(gradient())
        with torch.no_grad():
            for name, p in params.items():
                p.sub_(v[name], alpha=sign * step)
    torch.testing.assert_close(product, trees.scale(trees.add(*sides, alpha=-1.0), 0.5 / step), rtol=1e-6, atol=1e-8)


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inner",
    [
        lambda m, h, b: m(b).square().sum(),
        lambda m, h, b: (m(b).square() / m(b).square().sum().detach()).sum(),
        lambda m, h, b: torch.cdist(m(b), m(b)).mean(),
    ],
    ids=["sum", "normalised", "pairs"],
)
@pytest.mark.parametrize("micro_batch", [4, 1])
def test_what_is_no_mean_over_examples_is_refused(inner: Any, micro_batch: int) -> None:
    model, x = nn.Linear(D, 2), torch.randn(12, D)
    problem = hk.training.Accumulated(hk.BilevelProblem(inner, lambda m, h, b: m(b).mean()), micro_batch)
    for _ in range(2):  # also the second time
        with pytest.raises(hk.HyperkronError, match="is not a mean over examples"):
            problem.inner(model, nn.Module(), x)
    torch.testing.assert_close(problem.outer(model, nn.Module(), x).value, model(x).mean())


OUTPUTS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": lambda out, y: hk.losses.cross_entropy(out, y),
    "sum": lambda out, y: out.logsumexp(-1).sum(),
    "centred over the batch": lambda out, y: hk.losses.cross_entropy(out - out.mean(0), y),
    "root of a mean": lambda out, y: nn.functional.cross_entropy(out, y, reduction="none").square().mean().sqrt(),
}


@pytest.mark.parametrize("inside", [True, False], ids=["autocast inside", "autocast around"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_is_no_mean_is_refused_under_autocast(name: str, inside: bool) -> None:
    """Half precision rounds a mean on halves otherwise than on the whole: so both are compared without it."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    batch = torch.randn(32, 16), torch.randint(2, (32,))

    def inner(model: Any, hyper: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16) if inside else nullcontext():
            out = model(batch[0])
        return OUTPUTS[name](out.float(), batch[1])

    around = nullcontext() if inside else torch.autocast("cpu", torch.bfloat16)
    refused = nullcontext() if name == "mean" else pytest.raises(hk.HyperkronError, match="is not a mean over examples")
    with around, refused:
        check_is_mean("inner", inner, model, nn.Module(), batch, set())


@pytest.mark.parametrize("mean", [True, False])
def test_an_objective_that_needs_autocast_is_compared_under_it(mean: bool) -> None:
    torch.manual_seed(2)
    model = nn.Linear(16, 2)
    batch = torch.randn(32, 16), torch.randint(2, (32,))

    def inner(model: Any, hyper: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(batch[0].bfloat16())  # which a layer in float32 refuses without autocast
        return hk.losses.cross_entropy(out.float(), batch[1]) if mean else out.float().logsumexp(-1).sum()

    with nullcontext() if mean else pytest.raises(hk.HyperkronError, match="is not a mean over examples"):
        check_is_mean("inner", inner, model, nn.Module(), batch, set())


def test_batch_norm_is_refused_in_training_only() -> None:
    model = nn.Sequential(nn.Linear(D, 3), nn.BatchNorm1d(3))
    problem = hk.training.Accumulated(hk.BilevelProblem(lambda m, h, b: m(b).mean(), lambda m, h, b: m(b).mean()), 4)
    x = torch.randn(12, D)
    with pytest.raises(hk.HyperkronError, match=r"BatchNorm \(1\).*GroupNorm"):
        problem.inner(model, nn.Module(), x)
    model.eval()
    torch.testing.assert_close(problem.inner(model, nn.Module(), x).value, model(x).mean())


def test_the_check_for_a_mean_leaves_buffers_as_they_are() -> None:
    """The powers of a spectral norm went on, so that a resumed run, which checks again, was another one."""
    setting = Setting()
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(D, C).double())
    before = {name: x.clone() for name, x in model.named_buffers()}
    means: set[Any] = set()
    check_is_mean("inner", setting.inner, model, setting.hyper, setting.batch, means)
    assert means == {"inner"} and before.keys() == dict(model.named_buffers()).keys()
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())


def test_differently_masked_criteria_are_refused() -> None:
    model, x = nn.Linear(D, C), torch.randn(8, D)
    y = torch.tensor([0, 1, 2, 0, -100, -100, -100, 1])

    def inner(model: Any, hyper: Any, batch: Any) -> Any:
        out = model(batch[0])
        return hk.losses.cross_entropy(out, batch[1]) + hk.losses.mse(out, torch.zeros_like(out))

    problem = hk.training.Accumulated(hk.BilevelProblem(inner, inner), 4)
    with pytest.raises(hk.HyperkronError, match="same mask"):
        problem.inner(model, nn.Module(), (x, y))


def test_a_piece_without_a_valid_row_is_refused() -> None:
    setting = Setting(masked=True)
    with pytest.raises(hk.HyperkronError, match="ignore_index"):
        hk.training.Accumulated(setting.problem, 1).inner(setting.model, setting.hyper, setting.batch)


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_bad_sizes_are_refused(size: Any) -> None:
    with pytest.raises(hk.HyperkronError, match="micro_batch"):
        hk.training.Accumulated(Setting().problem, size)


# --- batches -----------------------------------------------------------------------------------------------


def test_batches_of_any_structure_are_cut() -> None:
    Pair = namedtuple("Pair", "x y")
    batch = {"a": torch.arange(5), "b": [Pair(torch.arange(10).view(5, 2), "s")], "c": torch.tensor(3.0)}
    first, second = split(batch, 3)
    assert first["a"].tolist() == [0, 1, 2] and second["a"].tolist() == [3, 4]
    assert second["b"][0].x.tolist() == [[6, 7], [8, 9]] and second["b"][0].y == "s"
    assert isinstance(second["b"][0], Pair) and float(second["c"]) == 3.0
    assert split(batch, 5) == [batch] and split(None, 2) == [None] and length(None) == 0
    with pytest.raises(hk.HyperkronError, match=r"lengths \[3, 4\]"):
        split((torch.zeros(3), torch.zeros(4)), 2)


def test_texts_are_cut_with_the_tensors_beside_them() -> None:
    setting = Setting()
    x, y, index = setting.batch
    rows, words = {f"text {n}": n for n in range(N)}, [["a"] * n for n in range(N)]
    texts = (list(rows), (list(rows), ["train", "en"]), words, y, index)

    def inner(model: Any, hyper: Any, batch: Any) -> hk.losses.Loss:
        names, (again, about), tokens, *given = batch
        assert names == list(again) and about == ["train", "en"]
        assert [len(one) for one in tokens] == [rows[name] for name in names]
        return setting.inner(model, hyper, (x[[rows[name] for name in names]], *given))

    problem = hk.BilevelProblem(inner, setting.outer)
    given, method = (setting.model, setting.hyper), hk.cg(3, 0.1)
    wanted = method.compute(setting.problem, *given, setting.batch, setting.batch)
    found = method.fresh().compute(hk.training.Accumulated(problem, 4), *given, texts, setting.batch)
    torch.testing.assert_close(found.grads, wanted.grads, **TOLERANCE)


def test_words_are_not_cut_and_examples_may_have_none() -> None:
    names, x = ["a", "b", "c"], torch.arange(3)
    first, second = split((x, (names, "cap"), ("en", names), [["a"], [], ["b", "c"]]), 2)
    assert first[1:] == ((["a", "b"], "cap"), ("en", ["a", "b"]), [["a"], []])
    assert second[1:] == ((["c"], "cap"), ("en", ["c"]), [["b", "c"]])


class Tokens(nn.Module):
    """Words, and their places with or without a dimension for examples."""

    def __init__(self, expanded: bool) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(7, 4), nn.Embedding(5, 4), nn.Linear(4, 7)
        self.expanded = expanded

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])[None]
        return self.head(self.words(tokens) + self.places(places.expand_as(tokens) if self.expanded else places))


@pytest.mark.parametrize("expanded", [True, False])
def test_layers_without_a_dimension_for_examples_are_named(expanded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", {"kfac-coverage"})
    torch.manual_seed(0)
    model, weights = Tokens(expanded).double(), hk.SampleWeights(6).double()
    batch = torch.randint(7, (6, 5)), torch.arange(6)

    def inner(model: Any, weights: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[0], weight=weights(batch[1])[:, None].expand(-1, 5))

    whole = hk.BilevelProblem(inner, lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[0].flip(1)))
    found = []
    for problem in (whole, hk.training.Accumulated(whole, micro_batch=2)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found.append(hk.kfac(1e-2, fisher="type-2").compute(problem, model, weights, batch, batch).grads)
        told = [str(warning.message) for warning in caught if "not that of examples" in str(warning.message)]
        assert bool(told) is (problem is not whole and not expanded), told
    [(_, first)], [(_, second)] = (grads.items() for grads in found)
    assert torch.allclose(first, second, rtol=1e-6) is expanded
