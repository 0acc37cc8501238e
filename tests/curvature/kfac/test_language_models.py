"""KFAC on a small Llama of transformers: checkpoints counted once, inputs shared, large vocabularies in pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.curvature.kfac import grams, recorder
from hyperkron.curvature.kfac.capture import measure
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.factors import Dual, dense
from hyperkron.curvature.kfac.measured import Measured, Measurement
from hyperkron.curvature.kfac.recorder import Recorder
from hyperkron.evaluation.point import Point
from hyperkron.losses import classification

transformers = pytest.importorskip("transformers")

N, T, VOCABULARY = 3, 5, 13


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=T,
            tie_word_embeddings=True,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(config).train()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def objective(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    tokens, domain = batch
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    return hk.losses.cross_entropy(logits, tokens[:, 1:], weight=hyper(domain))


PROBLEM = hk.BilevelProblem(objective, objective, autocast=True)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(0, VOCABULARY, (N, T + 1), generator=torch.Generator().manual_seed(1)), torch.arange(N) % 2


def measured(model: nn.Module, unmasked: bool = False) -> Measured:
    with Point(PROBLEM, model, hk.DomainWeights(2), batch(), batch()) as point:
        how = Measurement("mc", 1, "expand", torch.Generator().manual_seed(2), unmasked=unmasked)
        return measure(point, plan(model, "diagonal"), how)


def apart(found: Measured, wanted: Measured) -> float:
    assert found.a.keys() == wanted.a.keys() and found.b.keys() == wanted.b.keys()
    pairs = [(dense(x), dense(y)) for a, b in ((found.a, wanted.a), (found.b, wanted.b)) for x, y in _both(a, b)]
    return max(oracles.relative(x, y) for x, y in pairs)


def _both(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[Any, Any]]:
    return [(a[name], b[name]) for name in a]


def test_checkpointed_layers_are_counted_once() -> None:
    plain, again = Language(), Language()
    again.model.gradient_checkpointing_enable()
    wanted, found = measured(plain), measured(again)
    assert set(found.rows.values()) == {N * T}
    assert apart(found, wanted) < 1e-6
    results = [hk.kfac(0.1).compute(PROBLEM, m, hk.DomainWeights(2), batch(), batch()) for m in (plain, again)]
    assert [r.stats["cross"] for r in results] == ["adjoint", "adjoint"]
    assert oracles.relative(results[1].grads, results[0].grads) < 1e-5


def test_layers_of_one_input_share_its_sum_where_no_token_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = measured(Language())
    monkeypatch.setattr(classification, "answers_at_once", lambda x: False)  # as on a GPU
    found = measured(Language())
    first = "model.model.layers.0."
    q, k, v = (found.a[f"{first}self_attn.{name}_proj"] for name in "qkv")
    assert q is k and k is v
    assert found.a[f"{first}mlp.gate_proj"] is found.a[f"{first}mlp.up_proj"] is not q
    assert apart(found, wanted) < 1e-6
    after_forward = Recorder.after_forward
    for granted in (False, True):  # as in a recording, which reads nothing, or takes for granted that none is masked
        monkeypatch.setattr(Recorder, "after_forward", lambda self, loss, readable: after_forward(self, loss, False))
        recorded = measured(Language(), unmasked=granted)
        assert (recorded.a[f"{first}self_attn.q_proj"] is recorded.a[f"{first}self_attn.k_proj"]) is granted
        assert apart(recorded, wanted) < 1e-6  # also tokens without a gradient, such as queries of the first, count


@pytest.mark.parametrize("samples", [1, 3])
def test_vectors_of_a_large_vocabulary_are_made_in_pieces(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(4, 6, 9, generator=torch.Generator().manual_seed(3)).bfloat16()
    term = hk.losses.cross_entropy(logits, logits.argmax(-1), weight=torch.rand(4)).terms[0]

    def vectors() -> list[Tensor]:
        return list(term.vectors("mc", samples, torch.Generator().manual_seed(4)))

    wanted = vectors()
    monkeypatch.setattr(classification, "PIECE", 20)
    monkeypatch.setattr(type(term), "probabilities", property(lambda self: pytest.fail("made a copy of all")))
    found = vectors()
    assert all(torch.equal(x, y) and x.dtype == torch.bfloat16 for x, y in zip(found, wanted, strict=True))


@pytest.mark.parametrize("count", [7, 40, 45])
def test_rows_of_a_large_vocabulary_are_pooled_without_bias(count: int) -> None:
    rows = torch.randn(count, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    found = grams.pooled(rows, 10)
    assert len(found) == min(count, 10)
    if count > 10:  # every row is in one sum, with its sign
        mixing = grams.pooled(torch.eye(count, dtype=torch.float64), 10)
        assert torch.equal(mixing.abs().sum(0), torch.ones(count, dtype=torch.float64))
        assert torch.allclose(found, mixing @ rows)
        assert 0.2 * count < float((mixing < 0).sum()) < 0.8 * count


def test_the_factor_of_a_large_vocabulary_is_never_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Language()
    wanted = hk.kfac(0.1).compute(PROBLEM, model, hk.DomainWeights(2), batch(), batch())
    monkeypatch.setattr(recorder, "WIDE_OUTPUT", VOCABULARY)
    method = hk.kfac(0.1)
    found = method.compute(PROBLEM, model, hk.DomainWeights(2), batch(), batch())
    assert oracles.relative(found.grads, wanted.grads) < 1e-6  # fewer rows than are kept: nothing is pooled
    monkeypatch.setattr(recorder, "pooled", lambda g: grams.pooled(g, 4))
    method = hk.kfac(0.1)
    method.compute(PROBLEM, model, hk.DomainWeights(2), batch(), batch())
    inverses = method.state.curvature.inverses  # type: ignore[attr-defined]
    assert any(isinstance(c.b, Dual) and c.b.rows.shape[1:] == (4, VOCABULARY) for c in inverses.classes)
