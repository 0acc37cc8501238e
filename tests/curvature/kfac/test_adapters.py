"""Low-rank adapters on a frozen model: their curvature against dense oracles, and a base that nothing touches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, make, mlp, random_weights
from lora import LoRALinear, add_adapters

DAMPING = 0.05


def adapted(*widths: int, activation: type[nn.Module] = nn.Identity, trained: str = "") -> nn.Module:
    """Linear layers with adapters of rank 2 whose weights are not zero; only those with ``trained`` in their names."""
    torch.manual_seed(0)
    model = add_adapters(mlp(*widths, activation=activation), 2, 4.0)
    for name, p in model.named_parameters():
        if p.requires_grad:
            nn.init.normal_(p, std=0.5)
            p.requires_grad_(trained in name)
    return model


def kfac(**options: Any) -> hk.Implicit:
    curvature = hk.curvature.KFAC(DAMPING, fisher="type-2", split="exact", **options)
    return hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse")


@pytest.mark.parametrize("trained", ["0.down", "0.up", "2.down", "2.up"])
@pytest.mark.parametrize(
    "build", [kfac, lambda: hk.ekfac(DAMPING, fisher="type-2", cross="reverse")], ids=["kfac", "ekfac"]
)
def test_one_factor_of_an_adapter_has_the_exact_hypergradient(build: Any, trained: str) -> None:
    """The model is linear in it, so that KFAC is the Hessian of a squared loss."""
    case = make(adapted(3, 5, 2, trained=trained), (3,))
    wanted = oracles.implicit(case, case.hessian(), damping=DAMPING)
    assert oracles.relative(build().compute(*case.arguments).grads, wanted) < 1e-10


def test_all_adapters_have_the_blocks_of_the_exact_curvature() -> None:
    case = make(adapted(3, 5, 2), (3,))
    blocks = oracles.block_diagonal(case.ggn(), case.params, [[name] for name in case.params])
    assert len(case.params) == 4
    wanted = oracles.implicit(case, blocks, damping=DAMPING)
    assert oracles.relative(kfac().compute(*case.arguments).grads, wanted) < 1e-10


@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
def test_products_with_the_exact_curvature_of_all_adapters(loss: str) -> None:
    case = make(adapted(3, 5, 3, activation=nn.Tanh), (3,), loss=loss, hyper=random_weights(5))
    method = hk.cg(200, tolerance=1e-13, curvature=hk.curvature.GGN(DAMPING), cross="reverse")
    wanted = oracles.implicit(case, case.ggn(), damping=DAMPING)
    assert oracles.relative(method.compute(*case.arguments).grads, wanted) < 1e-10


METHODS = {
    "kfac": lambda: hk.kfac(DAMPING),
    "ekfac": lambda: hk.ekfac(DAMPING),
    "cg": lambda: hk.cg(3, curvature=hk.curvature.GGN(DAMPING)),
    "identity": hk.identity,
}


@pytest.mark.parametrize("method", METHODS)
def test_the_base_has_no_hooks_no_factors_and_no_gradients(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (nn.Linear(9, 11), nn.LayerNorm(11), nn.Tanh(), nn.Linear(11, 7))
    torch.manual_seed(0)
    model = add_adapters(nn.Sequential(*layers, nn.Sequential()), 2, 4.0)
    model[4].add_module("lm_head", nn.Linear(7, 13).requires_grad_(False))
    case = make(model, (9,), loss="cross_entropy")
    before = copy.deepcopy(model.state_dict())
    hooked: set[nn.Module] = set()
    register = nn.Module.register_forward_hook

    def watched(module: nn.Module, *args: Any, **options: Any) -> Any:
        hooked.add(module)
        return register(module, *args, **options)

    monkeypatch.setattr(nn.Module, "register_forward_hook", watched)
    found = METHODS[method]()
    result = found.compute(*case.arguments)
    parts = [part for m in model.modules() if isinstance(m, LoRALinear) for part in (m.down, m.up)]
    assert hooked == (set(parts) if method in ("kfac", "ekfac") else set())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert result.solution is not None and list(result.solution.value) == list(case.params)
    assert all(p.grad is None for p in model.parameters())
    assert [n for n, p in model.named_parameters() if p.requires_grad] == list(case.params)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    kept = [x.shape for x in tensors(found.state_dict())]
    assert not any(13 in shape for shape in kept)  # of the frozen output layer
    if method == "kfac":
        assert any(9 in shape for shape in kept) and any(11 in shape for shape in kept)


def tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, dict):
        return [x for part in tree.values() for x in tensors(part)]
    if isinstance(tree, (list, tuple)):
        return [x for part in tree for x in tensors(part)]
    return [tree] if isinstance(tree, Tensor) else []


def test_adapters_in_float32_on_a_base_in_bfloat16() -> None:
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        base = mlp(6, 12, 5).to(torch.bfloat16).to(dtype)  # the same numbers
        model = add_adapters(base, 2, 4.0)
        for name, p in model.named_parameters():
            if "up" in name:
                nn.init.normal_(p, std=0.5)
        x, y = torch.randn(32, 6).bfloat16(), torch.randint(5, (32,))
        weights = hk.SampleWeights(32)
        problem = hk.BilevelProblem(
            lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
            lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
        )
        batch = x.to(dtype), y, torch.arange(32)
        result = hk.kfac(DAMPING, fisher="empirical").compute(problem, model, weights, batch, batch)
        found[dtype] = result.grads["weight"]
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert result.solution is not None
        assert {v.dtype for v in result.solution.value.values()} == {torch.float32}
    assert torch.cosine_similarity(found[torch.bfloat16], found[torch.float32], dim=0) > 0.99


# --- peft ------------------------------------------------------------------------------------------------------------


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=20, use_cache=False, num_key_value_heads=1, **sizes)
    model: nn.Module = transformers.LlamaForCausalLM(config).to(DOUBLE)
    return model


@pytest.mark.parametrize("method", METHODS)
def test_peft_adapters_are_those_written_by_hand(method: str) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(language_model(), config).to(DOUBLE)
    ours = add_adapters(language_model(), 2, 4.0)
    torch.manual_seed(1)
    pairs = list(zip(oracles.trainable(theirs).values(), oracles.trainable(ours).values(), strict=True))
    assert len(pairs) == 2 * 7 * 2  # layers, linear layers in each, adapter weights in each of these
    with torch.no_grad():
        for p, q in pairs:
            q.copy_(p.normal_(std=0.3))
    tokens, domain = torch.randint(20, (4, 8)), torch.tensor([0, 1, 0, 1])
    mixture = hk.DomainWeights(2).to(DOUBLE)

    def inner(model: nn.Module, mixture: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]).logits[:, :-1], batch[0][:, 1:], weight=mixture(batch[1]))

    def outer(model: nn.Module, mixture: nn.Module, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]).logits[:, :-1], batch[0][:, 1:])

    problem, batch = hk.BilevelProblem(inner, outer), (tokens, domain)
    found = [METHODS[method]().compute(problem, m, mixture, batch, batch).grads for m in (theirs, ours)]
    assert oracles.relative(found[0], found[1]) < 1e-9
    assert hk.curvature.KFAC().coverage(theirs).covered == 1.0
