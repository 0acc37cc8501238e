"""The cross term from the gradients at layers: against double backward, in bfloat16, and where it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

import hyperkron as hk
import oracles
from hyperkron import trees
from hyperkron.cross import Cross, CrossState, reverse, weighting
from hyperkron.cross.adjoint import NoAdjointError, adjoint
from hyperkron.evaluation.point import Point

DOUBLE = torch.float64
N, T, VOCABULARY, WIDTH, DOMAINS = 4, 6, 11, 8, 2


class Scaled(nn.Module):
    """A norm layer that torch does not know, affine in its weight, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.weight) * x / x.square().mean(-1, keepdim=True).add(1e-3).sqrt()


class Language(nn.Module):
    """Embedding, attention over the tokens of an example, norms of two kinds, and an output layer, tied or not."""

    def __init__(self, tied: bool = False, checkpoints: bool = False, padding: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding)
        self.norm, self.last = Scaled(), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=b) for b in (True, False, True))
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.checkpoints, self.calls = checkpoints, 0
        if tied:
            self.head.weight = self.words.weight

    def block(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(x)
        x = x + F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True)
        return x + self.down(F.silu(self.up(self.last(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for _ in range(2):  # the same weights twice
            x = checkpoint.checkpoint(self.block, x, use_reentrant=False) if self.checkpoints else self.block(x)
        return self.head(self.last(x))


class Positions(Language):
    """Adds the embedding of positions, which is the same for all examples; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(T + 1, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions(torch.arange(tokens.shape[1])[None])
        return self.head(F.dropout(self.block(self.words(tokens) + places), 0.2))


class Images(nn.Module):
    """Convolutions, a group norm and a frozen first layer of which only the bias is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(T, T)
        self.first.weight.requires_grad_(False)
        self.convolution, self.norm = nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * (T - 2), VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.convolution(self.first(tokens.to(self.head.weight.dtype))[:, None]))
        return self.head(torch.tanh(x).flatten(1))[:, None].expand(-1, T, -1)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (N, T + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :2] = -100
    return tokens[:, :-1], labels, torch.arange(N) % DOMAINS


def inner(model: nn.Module, hyper: Any, given: Any) -> hk.losses.Loss:
    tokens, labels, domain = given
    loss = hk.losses.cross_entropy(model(tokens), labels, weight=hyper(domain))
    return 0.5 * loss + hk.losses.l2(model, 0.01 * hyper.logits.exp().sum())


def outer(model: nn.Module, hyper: Any, given: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(given[0].flip(0)), given[1].flip(0))


PROBLEM = hk.BilevelProblem(inner, outer)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "language": Language,
    "tied": lambda: Language(tied=True),
    "padding": lambda: Language(padding=2),
    "checkpoints": lambda: Language(checkpoints=True),
    "positions": Positions,
    "images": Images,
}


def made(kind: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model, hyper = MODELS[kind](), hk.DomainWeights(DOMAINS, torch.tensor([0.3, 0.7]))
    return model.to(DOUBLE), hyper.to(DOUBLE)


def along(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {n: torch.randn(p.shape, generator=generator).to(p) for n, p in oracles.trainable(model).items()}


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_double_backward(kind: str) -> None:
    model, hyper = made(kind)
    before = copy.deepcopy(model.state_dict())
    v = along(model)
    with Point(PROBLEM, model, hyper, batch(), batch()) as point:
        form = weighting.structure(point, point.inner())
        found = adjoint(point, v, form)
        assert oracles.relative(found.cross, reverse(point, v)) < 1e-12
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_checkpointed_block_is_computed_again_and_counted_once() -> None:
    model, hyper = made("checkpoints")
    with Point(PROBLEM, model, hyper, batch(), batch()) as point:
        form = weighting.structure(point, point.inner())
        model.calls = 0  # type: ignore[assignment]
        adjoint(point, along(model), form)
    assert model.calls == 4  # two blocks, each twice


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("penalised", [False, True])
def test_a_v_that_may_be_used_up_gives_the_same(kind: str, penalised: bool) -> None:
    def weighted(model: nn.Module, hyper: Any, given: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.bfloat16):
            return (inner if penalised else _without_penalty)(model, hyper, given)

    model, hyper = made(kind)
    model, hyper = model.float(), hyper.float()
    problem, v = hk.BilevelProblem(weighted, outer), along(model)
    with Point(problem, model, hyper, batch(), batch()) as point:
        form = weighting.structure(point, point.inner())
        expected = adjoint(point, v, form).cross
        point.consumes_vectors, given = True, dict(v)
        torch.testing.assert_close(adjoint(point, given, form).cross, expected, rtol=0, atol=0)
    assert bool(given) is penalised


def test_a_v_that_may_be_used_up_serves_one_precision() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = torch.tanh(self.layer(x))
            return self.layer(y.float())

    def weighted(model: nn.Module, hyper: Any, given: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(given[0]), given[1], weight=hyper(given[2]))

    torch.manual_seed(0)
    model, hyper = Twice(), hk.SampleWeights(6)
    rows = torch.randn(6, 4), torch.randint(4, (6,)), torch.arange(6)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with Point(hk.BilevelProblem(weighted, weighted), model, hyper, rows, rows) as point:
        form = weighting.structure(point, point.inner())
        adjoint(point, dict(v), form)
        point.consumes_vectors = True
        with pytest.raises(NoAdjointError, match="Linear is called in two precisions"):
            adjoint(point, dict(v), form)


def _without_penalty(model: nn.Module, hyper: Any, given: Any) -> hk.losses.Loss:
    tokens, labels, domain = given
    return hk.losses.cross_entropy(model(tokens), labels, weight=hyper(domain))


def exact(model: nn.Module, hyper: nn.Module, v: dict[str, Tensor]) -> Tensor:
    """X(v) in float64, by one Hessian-like product on a copy."""
    twin, double = copy.deepcopy(model).to(DOUBLE), copy.deepcopy(hyper).to(DOUBLE)
    with sdpa_kernel(SDPBackend.MATH):
        slopes = oracles.gradient(inner(twin, double, batch()).value, list(twin.parameters()), graph=True)
        return oracles.gradient(slopes @ oracles.flat(v).to(DOUBLE), list(double.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["autocast", "bfloat16 parameters"])
@pytest.mark.parametrize("kind", ["language", "tied", "checkpoints"])
def test_low_precision_takes_it_and_keeps_its_digits(kind: str, dtype: torch.dtype) -> None:
    model, hyper = made(kind)
    model, hyper = model.to(dtype), hyper.float()

    def rounded(function: Any) -> Any:
        def objective(*given: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                return function(*given)

        return objective

    problem = hk.BilevelProblem(rounded(inner), rounded(outer), autocast=True)
    for build in (hk.identity, hk.kfac):
        result = build().compute(problem, model, hyper, batch(), batch())
        assert result.stats["cross"] == "adjoint"
        assert result.solution is not None
        wanted = exact(model, hyper, result.solution.value)
        assert float(F.cosine_similarity(-result.grads["logits"].double(), wanted, dim=0)) > 0.9995
        assert oracles.relative(-result.grads["logits"].double(), wanted) < 0.03
        full = build().compute(PROBLEM, copy.deepcopy(model).float(), hyper, batch(), batch())
        assert float(F.cosine_similarity(result.grads["logits"], full.grads["logits"], dim=0)) > 0.99


# --- where it is not possible --------------------------------------------------------------------------------------


class Functional(Language):
    """Uses the weight of its output layer without calling it: no gradient at that layer's output is seen."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.block(self.words(tokens)), self.head.weight)


class Rows(Positions):
    """Looks positions up without a dimension for examples."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))))


class Bare(Language):
    """Has a parameter that is not one of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


class Mixing(Language):
    """Normalises over the examples of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.BatchNorm1d(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mixing(self.block(self.words(tokens)).mT).mT)


@pytest.mark.parametrize("kind", [Functional, Rows, Bare, Mixing])
def test_where_it_would_be_wrong_another_way_is_taken(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, hyper = kind().bfloat16(), hk.DomainWeights(DOMAINS)
    result = hk.identity().compute(PROBLEM, model, hyper, batch(), batch())
    assert result.stats["cross"] == "forward"
    assert result.solution is not None
    wanted = exact(model, hyper, result.solution.value)
    assert oracles.relative(-result.grads["logits"].double(), wanted) < 0.1


class Centred(nn.Module):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize("kind", ["frozen", "plain", "centred"])
def test_a_layer_without_parameters_of_theta_that_mixes_examples_is_noticed(kind: str) -> None:
    """Every pair of 512 examples mixes little, but all together a third of the cross term."""
    torch.manual_seed(0)
    mixing = Centred() if kind == "centred" else nn.BatchNorm1d(16, affine=kind == "frozen").requires_grad_(False)
    model = nn.Sequential(nn.Linear(6, 16), mixing, nn.Tanh(), nn.Linear(16, 4)).bfloat16()
    hyper, given = hk.SampleWeights(512), (torch.randn(512, 6), torch.randint(0, 4, (512,)), torch.arange(512))

    def weighted(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        output = model(batch[0].to(model[0].weight.dtype))  # type: ignore[index]
        return hk.losses.cross_entropy(output, batch[1], weight=hyper(batch[2]))

    problem, generator = hk.BilevelProblem(weighted, weighted), torch.Generator().manual_seed(1)
    v = {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters() if p.requires_grad}
    with Point(problem, model, hyper, given, given) as point:
        found = Cross().term(point, {name: x.bfloat16() for name, x in v.items()}, None, CrossState())
    with Point(problem, model.double(), hyper, given, given) as point:
        wanted = reverse(point, {name: x.bfloat16().double() for name, x in v.items()})
    assert oracles.relative(trees.map(Tensor.double, found), trees.map(Tensor.double, wanted)) < 0.02


class Bounded(nn.Module):
    """Near one v it looks linear in its parameter, and along −v or far away it is not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.weight.abs() if self.kind == "abs" else F.hardtanh(self.weight))


class Subclassed(nn.LayerNorm):
    """A norm that is not linear in its weight, although its class is derived from one that is."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.exp(), self.bias)


@pytest.mark.parametrize("kind", ["abs", "hardtanh", "subclass"])
def test_a_layer_is_not_taken_for_linear_by_one_look(kind: str) -> None:
    """Two calls at one point, along v and along −200 v: what was seen in the first must not spoil the second."""
    model, hyper = made("language")
    model.norm = (Subclassed(WIDTH) if kind == "subclass" else Bounded(kind)).to(DOUBLE)
    with Point(PROBLEM, model, hyper, batch(), batch()) as point:
        form = weighting.structure(point, point.inner())
        v = {name: 0.1 * torch.rand_like(p) for name, p in point.params.items()}
        for times in (1.0, -200.0):
            scaled = {name: times * x for name, x in v.items()}
            assert oracles.relative(adjoint(point, scaled, form).cross, reverse(point, scaled)) < 1e-12


def test_weights_of_single_tokens_are_refused() -> None:
    model, _ = made("language")
    hyper = hk.as_hyper(torch.rand(N, T, dtype=DOUBLE))

    def by_token(model: nn.Module, hyper: Any, given: Any) -> Any:
        return hk.losses.cross_entropy(model(given[0]), given[1], weight=hyper())

    with Point(hk.BilevelProblem(by_token, outer), model, hyper, batch(), batch()) as point:
        form = weighting.structure(point, point.inner())
        with pytest.raises(NoAdjointError, match="weights the rows of an example differently"):
            adjoint(point, along(model), form)


def test_two_weighted_criteria_are_refused() -> None:
    model, hyper = made("language")

    def twice(model: nn.Module, hyper: Any, given: Any) -> Any:
        return inner(model, hyper, given) + inner(model, hyper, given)

    with Point(hk.BilevelProblem(twice, outer), model, hyper, batch(), batch()) as point:
        form = weighting.structure(point, point.inner())
        with pytest.raises(NoAdjointError, match="λ weights 2 criteria"):
            adjoint(point, along(model), form)
