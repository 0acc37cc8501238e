"""Encoders with a bias for relative positions: the cut one looks its buckets up, and a CUDA graph can record it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hyperkron.cleaning.models import EncoderHead, encoder_head

transformers = pytest.importorskip("transformers", reason="needs hyperkron[text]")

LENGTHS = (1, 7, 150)


def on_the_cpu(self: Any, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32) -> Tensor:
    """MPNet's bias as older versions of transformers (4.57) compute it."""
    place = torch.arange(x.shape[1])
    bucket = self.relative_position_bucket(place[None] - place[:, None], num_buckets=num_buckets).to(x.device)
    values = self.relative_attention_bias(bucket).permute([2, 0, 1]).unsqueeze(0)
    return values.expand((len(x), -1, -1, -1)).contiguous()


@pytest.fixture
def model() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    torch.manual_seed(0)
    made = transformers.MPNetModel(
        transformers.MPNetConfig(vocab_size=9, max_position_embeddings=150, **sizes), add_pooling_layer=False
    )
    torch.nn.init.normal_(made.encoder.relative_attention_bias.weight)  # so that positions matter
    return made.eval().requires_grad_(False)


Bias = Callable[..., Tensor]
BIASES = [None, on_the_cpu]
"""As installed, and that of older versions."""


def cut(model: Any, bias: Bias | None, patch: pytest.MonkeyPatch, *, kept: bool = True, layers: int = 1) -> EncoderHead:
    """The last layers, with buckets kept or computed at every call."""
    if bias is not None:
        patch.setattr(type(model.encoder), "compute_position_bias", bias)
    torch.manual_seed(1)
    with patch.context() as only:
        if not kept:
            only.setattr(encoder_head, "_keep_positions", lambda *_: None)
        return EncoderHead(model, 3, layers)


def batch(length: int) -> tuple[Tensor, Tensor]:
    states = torch.randn(4, length, 16, generator=torch.Generator().manual_seed(length))
    return states, torch.arange(length) < torch.tensor([[1], [length], [length // 2 + 1], [length]])


def inside(head: EncoderHead) -> Any:
    """What computes the bias."""
    return head.upper.encoder  # type: ignore[union-attr]


def loss_and_gradients(head: EncoderHead, length: int) -> dict[str, Tensor]:
    loss = head(*batch(length)).logsumexp(1).square().sum()
    trained = {name: p for name, p in head.named_parameters() if p.requires_grad}
    return {"loss": loss, **dict(zip(trained, torch.autograd.grad(loss, [*trained.values()]), strict=True))}


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("layers", [1, 2])
def test_kept_positions_change_no_bit(
    bias: Bias | None, layers: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the table of the bias is trained: it is not part of what is kept."""
    ours, plain = (cut(model, bias, monkeypatch, kept=kept, layers=layers) for kept in (True, False))
    assert "compute_position_bias" in vars(inside(ours)) and "compute_position_bias" not in vars(inside(plain))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    for trained in (False, True):
        for head in (ours, plain):
            inside(head).relative_attention_bias.requires_grad_(trained)
        for length in LENGTHS:
            found, expected = (loss_and_gradients(head, length) for head in (ours, plain))
            assert found.keys() == expected.keys() and all(torch.equal(found[x], expected[x]) for x in found)
    assert bool(found["upper.encoder.relative_attention_bias.weight"].any())


class OnlyMeta(TorchDispatchMode):
    """Refuses every operation that makes a tensor elsewhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type != "meta":
                raise RuntimeError(f"{func} makes a tensor on {x.device}")
        return out


def test_nothing_is_made_on_another_device(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph cannot record a copy from the CPU, which older versions make at every call."""
    ours, plain = (cut(model, on_the_cpu, monkeypatch, kept=kept).to("meta") for kept in (True, False))
    states, mask = (x.to("meta") for x in batch(7))
    with OnlyMeta():
        ours(states, mask).sum().backward()
        with pytest.raises(RuntimeError, match=r"arange.* makes a tensor on cpu"):
            plain(states, mask)


@pytest.mark.parametrize("bias", BIASES)
def test_copies_have_their_own_table(bias: Bias | None, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    head = cut(model, bias, monkeypatch)
    expected = head(*batch(7))
    for other in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        assert torch.equal(other(*batch(7)), expected)
        with torch.no_grad():
            inside(other).relative_attention_bias.weight.add_(torch.arange(64.0).reshape(32, 2))
        assert not torch.equal(other(*batch(7)), expected) and torch.equal(head(*batch(7)), expected)


def test_an_encoder_with_other_buckets_is_left_as_it_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, x: Tensor) -> Tensor:
        return on_the_cpu(self, x, num_buckets=16)

    ours, plain = (cut(model, other, monkeypatch, kept=kept) for kept in (True, False))
    assert "compute_position_bias" not in vars(inside(ours))
    assert torch.equal(ours(*batch(150)), plain(*batch(150)))
