"""Language models' own layers are covered, what is not is said aloud, and the share is in every result."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, make, mlp, random_weights
from hyperkron import solution
from hyperkron.curvature.kfac import coverage

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())


def conv1d(nf: int, nx: int) -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    layer: nn.Module = Conv1D(nf, nx)
    return layer.double()


class GPT2(nn.Module):
    """A tiny GPT-2 with its tied head."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPT2Config(
            vocab_size=11,
            n_embd=8,
            bos_token_id=0,
            eos_token_id=0,
            n_layer=2,
            n_head=2,
            n_positions=6,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            initializer_range=0.2,
        )
        config._attn_implementation = "eager"
        self.gpt = transformers.GPT2LMHeadModel(config)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.gpt(tokens, use_cache=False).logits
        return logits


class TiedHead(nn.Module):
    """A language model whose output layer shares its weight with the embedding, or has one of the same numbers."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 5)
        if tied:
            self.out.weight = self.embed.weight
        else:
            self.out.weight = nn.Parameter(self.embed.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.out(self.embed(x).cumsum(1).tanh())
        return hidden


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell, self.head = kind(3, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0][:, -1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("split", ["pi", "exact"])
@pytest.mark.parametrize("shape", [(4,), (3, 4)], ids=["rows", "tokens"])
def test_conv1d_is_a_linear_layer_with_its_weight_transposed(shape: tuple[int, ...], split: Any) -> None:
    torch.manual_seed(0)
    plain = make(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), shape, loss="cross_entropy")
    case = make(nn.Sequential(conv1d(5, 4), nn.Tanh(), conv1d(3, 5)), shape, loss="cross_entropy")
    case.inner_batch, case.outer_batch = plain.inner_batch, plain.outer_batch
    with torch.no_grad():
        for name, p in plain.params.items():
            case.params[name].copy_(p.mT if p.dim() == 2 else p)
    assert hk.curvature.KFAC().coverage(case.model).covered == 1.0
    decay: dict[str, float | Tensor] = {"0.weight": 0.2, "2.bias": 0.1}
    plain.decay = case.decay = decay
    for method in (hk.kfac(0.1, fisher="type-2", split=split), hk.ekfac(0.1, fisher="type-2")):
        wanted, found = method.compute(*plain.arguments), method.compute(*case.arguments)
        assert oracles.relative(found.grads, wanted.grads) < 1e-9
        assert wanted.solution is not None and found.solution is not None
        for name, v in wanted.solution.value.items():
            assert oracles.relative(found.solution.value[name], v.mT if v.dim() == 2 else v) < 1e-9


@pytest.mark.long
def test_gpt2_is_covered_and_nearer_the_exact_answer_than_the_identity() -> None:
    """A GPT-2 that has learnt to count. Were it left to the fallback, KFAC would be as far as identity."""
    cosines: dict[str, list[float]] = {"kfac": [], "ekfac": [], "identity": []}
    for seed in range(2):
        torch.manual_seed(seed)
        case = make(GPT2(), (6,), loss="cross_entropy", tokens=11, count=24, hyper=random_weights(24), seed=seed)
        for tokens, following in (case.inner_batch, case.outer_batch):
            noisy = torch.rand(tokens.shape) < 0.2
            following.copy_(torch.where(noisy, following, (tokens + 1) % 11))
        optimizer = torch.optim.Adam(case.model.parameters(), lr=0.02)
        for _ in range(40):
            optimizer.zero_grad()
            case.inner(case.model, case.hyper, case.inner_batch).backward()
            optimizer.step()
        methods = {"kfac": hk.kfac(0.1), "ekfac": hk.ekfac(0.1), "identity": hk.identity()}
        direct = 0.1 * case.hyper.weight.detach()  # type: ignore[operator]
        exact = hk.cg(40, curvature=hk.curvature.GGN(0.1)).compute(*case.arguments).grads["weight"] - direct
        for name, method in methods.items():
            result = method.compute(*case.arguments)
            found = result.grads["weight"] - direct
            cosines[name].append(float(torch.cosine_similarity(found, exact, dim=0)))
            if name != "identity":
                assert float(result.stats["coverage"]) > 0.9
    mean = {name: sum(values) / len(values) for name, values in cosines.items()}
    assert min(mean["kfac"], mean["ekfac"]) > mean["identity"] + 0.04, mean


def test_a_tied_head_is_its_linear_block_with_the_embedding_in_the_damping() -> None:
    case, apart = (make(TiedHead(tied), (4,), loss="cross_entropy", tokens=5, count=6) for tied in (True, False))
    apart.inner_batch = case.inner_batch
    rows = {row.parameter: row for row in hk.curvature.KFAC().coverage(case.model).rows}
    assert rows["embed.weight"].reason == "Linear, with bias, tied to embed (Embedding)"
    a, b = apart.slow_factors()["out"]
    by_lookup = apart.measured().diagonal["embed.weight"].mean()
    block = oracles.kron(a, b) + (0.1 + by_lookup) * torch.eye(20, dtype=DOUBLE)
    curvature = hk.curvature.KFAC(0.1, fisher="type-2", split="exact")
    with case.point() as point:
        found = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    order = torch.cat([torch.arange(15).reshape(5, 3), torch.arange(15, 20)[:, None]], 1).reshape(-1)
    assert oracles.relative(found[order][:, order], block) < 1e-12
    assert float(by_lookup) > 1e-3


class HeadOfTransformers(TiedHead):
    """The output layer of BERT, whose bias another module holds too, with the embedding of Gemma, which is scaled."""

    def __init__(self, tied: bool = True) -> None:
        super().__init__(tied)
        from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

        weight = self.embed.weight
        self.embed, self.bias = GemmaTextScaledWordEmbedding(5, 3, None, 1.5), self.out.bias
        self.embed.weight = weight


def test_a_tied_head_is_a_block_where_the_embedding_is_scaled_and_the_bias_held_twice() -> None:
    case, apart = (
        make(HeadOfTransformers(tied), (4,), loss="cross_entropy", tokens=5, count=6) for tied in (True, False)
    )
    apart.inner_batch = case.inner_batch
    rows = {row.parameter: row for row in hk.curvature.KFAC().coverage(case.model).rows}
    assert rows["embed.weight"].reason == "Linear, tied to embed (Embedding)"
    assert rows["bias"].curvature == "scaled identity"
    term = apart.inner(apart.model, apart.hyper, apart.inner_batch).terms[0]
    exact = oracles.fisher(term.output, term.vectors("type-2"), [apart.params["embed.weight"]]).diagonal()
    assert oracles.relative(apart.measured().diagonal["embed.weight"].reshape(-1), exact) < 1e-12
    a, b = (factor[0] for factor in apart.slow_factors()["out"])
    block = oracles.kron(a[None, :3, :3], b[None]) + (0.1 + exact.mean()) * torch.eye(15, dtype=DOUBLE)
    curvature = hk.curvature.KFAC(0.1, fisher="type-2", split="exact")
    with case.point() as point:
        found = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    assert list(case.params) == ["bias", "embed.weight"]
    assert oracles.relative(found[5:, 5:], block) < 1e-12
    assert not found[:5, 5:].any()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_little_coverage_is_said_once_with_what_and_what_to_do(kind: type[nn.Module]) -> None:
    case = make(Recurrent(kind), (4, 3), loss="cross_entropy")
    method = hk.kfac(0.1)
    share = hk.curvature.KFAC().coverage(case.model).covered
    assert share < coverage.LEAST_COVERED
    with pytest.warns(hk.HyperkronWarning, match=rf"only {100 * share:.1f}% .*weight_hh_l0 .*{kind.__name__}.*pcg"):
        first = method.compute(*case.arguments)
    assert first.stats["coverage"] == share
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert method.compute(*case.arguments).stats["coverage"] == share
        assert hk.pcg(3).compute(*case.arguments).stats["coverage"] == share


def test_a_preconditioner_is_not_warned_about() -> None:
    case = make(Recurrent(nn.LSTM), (4, 3), loss="cross_entropy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hk.pcg(3).compute(*case.arguments)


class Uncalled(nn.Module):
    """Uses the weight of its larger layer without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.linear(x, self.large.weight, self.large.bias).tanh())  # type: ignore[no-any-return]


def test_layers_that_are_never_called_are_not_counted_as_covered() -> None:
    case = make(Uncalled(), (3,), loss="cross_entropy")
    method = hk.kfac(0.1, refresh_every=2)
    with pytest.warns(hk.HyperkronWarning, match=r"large.weight .*not called"):
        shares = [method.compute(*case.arguments).stats["coverage"] for _ in range(2)]
    assert shares == [18 / 50] * 2
    resumed = hk.kfac(0.1, refresh_every=2)
    resumed.load_state_dict(method.state_dict())
    assert resumed.compute(*case.arguments).stats["coverage"] == 18 / 50


def test_full_coverage_is_silent() -> None:
    case = make(mlp(3, 4, 2), (3,), loss="cross_entropy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hk.kfac(0.1).compute(*case.arguments).stats["coverage"] == 1.0
