"""Tiny models of every kind: θ of a cell. Each takes (x, shift), where a shift is added to inputs or embeddings.

The oracle never runs a model itself but its *twin*: the same parameters in float64, not compiled, without activation
checkpointing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Inputs = Literal["vectors", "images", "sequences", "tokens"]
VOCABULARY, LENGTH, CLASSES = 11, 4, 3
SHAPES = {"vectors": (5,), "images": (1, 5, 5), "sequences": (LENGTH, 5), "tokens": (LENGTH, 6)}


class Net(nn.Module):
    """A body of layers on continuous inputs."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.body(x if shift is None else x + shift)


class Checkpointed(nn.Module):
    """Layers whose activations are computed again in the backward pass, or kept where ``reentrant`` is None."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
        self.last = nn.Linear(6, CLASSES)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.last(self.first(x))
        if self.reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()  # as its documentation asks for
        return self.last(checkpoint(self.first, x, use_reentrant=self.reentrant))


class Convolutions(nn.Module):
    """Two convolutions with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 3, 2, stride=2, padding=1), nn.BatchNorm2d(3), nn.Tanh(), nn.Conv2d(3, 4, 1, bias=False),
            nn.BatchNorm2d(4), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """Self-attention over a sequence, then the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last((x + self.attention(x, x, x, need_weights=False)[0]).mean(1))


class Recurrent(nn.Module):
    """An LSTM or GRU whose last output is classified."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.cell = kind(5, 5, batch_first=True)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(x)[0][:, -1])


class Repeated(nn.Module):
    """One layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.again(torch.tanh(self.again(x)))))


class LowRank(nn.Module):
    """LoRA: a frozen layer plus the product of two small ones."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class StraightThrough(nn.Module):
    """Activations rounded to quarters, with the gradient of the identity."""

    def forward(self, x: Tensor) -> Tensor:
        return x + ((4 * x).round() / 4 - x).detach()


class Encoder(nn.Module):
    """A transformer encoder with dropout whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True, activation="gelu")
        self.head = nn.Linear(6, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        embedded = self.embedding(x)
        return self.head(self.layer(embedded if shift is None else embedded + shift))


class Language(nn.Module):
    """A model of transformers, from tokens or shifted embeddings to logits."""

    def __init__(self, model: Any, decoder: bool = False) -> None:
        super().__init__()
        self.model, self.decoder = model, decoder

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        more = {"decoder_input_ids": x.flip(1)} if self.decoder else {}
        if shift is None:
            return self.model(input_ids=x, **more).logits
        return self.model(inputs_embeds=self.model.get_input_embeddings()(x) + shift, **more).logits


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=6,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Language(GPT2LMHeadModel(config))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=6,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
    )
    return Language(BertForSequenceClassification(config))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY, d_model=6, d_kv=3, d_ff=8, num_layers=1, num_heads=2, use_cache=False, dropout_rate=0.0
    )
    return Language(T5ForConditionalGeneration(config), decoder=True)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=6,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return Language(LlamaForCausalLM(config))


def _mlp(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), activation(), nn.Linear(6, CLASSES))


def _parametrised(how: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(how(nn.Linear(5, 6)), nn.Tanh(), how(nn.Linear(6, CLASSES)))


@dataclass(frozen=True)
class Spec:
    """How a model is made, and what is to be known about it.

    Attributes:
        build: makes it; parameters are drawn from torch's random state.
        twin: makes the oracle's, with the same parameter names, where ``build`` does not do.
        inputs: what it reads; ``tokens`` with a loss at each token where ``lengthwise``.
        training: its mode.
        compiled: by this backend of ``torch.compile``.
        coarse: it computes in float32 inside whatever the dtype, so that finite differences cannot be fine.
        stops: it stops gradients inside, or moves its buffers.
        draws: it draws random numbers.
    """

    build: Callable[[], nn.Module]
    twin: Callable[[], nn.Module] | None = None
    inputs: Inputs = "vectors"
    lengthwise: bool = False
    training: bool = True
    dtype: torch.dtype = torch.float64
    compiled: str = ""
    coarse: bool = False
    stops: bool = False
    draws: bool = False

    @property
    def classes(self) -> int:
        """How many logits a row has."""
        return VOCABULARY if self.lengthwise else CLASSES

    @property
    def width(self) -> tuple[int, ...]:
        """The shape of one example's shift."""
        return SHAPES[self.inputs]

    def make(self, seed: int = 0) -> tuple[nn.Module, nn.Module]:
        """The model and its twin."""
        torch.manual_seed(seed)
        model = self.build().to(self.dtype).train(self.training)
        _spread(model)
        torch.manual_seed(seed)
        twin = (self.twin or self.build)().to(torch.float64).train(self.training)
        twin.load_state_dict(model.state_dict())
        return (torch.compile(model, backend=self.compiled) if self.compiled else model), twin  # type: ignore[return-value]


def _spread(model: nn.Module) -> None:
    """Move what begins at 0, at 1 or close to 0, so that every parameter matters."""
    for name, p in model.named_parameters():
        if p.numel() > 1 and p.requires_grad and "original0" not in name and "weight_g" not in name:
            with torch.no_grad():
                p.add_(0.2 * torch.randn(p.shape).to(p.dtype))


_weight_norm = torch.nn.utils.parametrizations.weight_norm
_spectral_norm = torch.nn.utils.parametrizations.spectral_norm
_orthogonal = torch.nn.utils.parametrizations.orthogonal

MODELS: dict[str, Spec] = {
    "mlp": Spec(lambda: Net(_mlp())),
    "linear": Spec(lambda: Net(nn.Linear(5, CLASSES))),
    "mlp dropout": Spec(
        lambda: Net(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, CLASSES))), draws=True
    ),
    "cnn batchnorm train": Spec(lambda: Net(Convolutions()), inputs="images"),
    "cnn batchnorm eval": Spec(lambda: Net(Convolutions()), inputs="images", training=False),
    "mha": Spec(lambda: Net(Attention()), inputs="sequences"),
    "lstm": Spec(lambda: Net(Recurrent(nn.LSTM)), inputs="sequences"),
    "gru": Spec(lambda: Net(Recurrent(nn.GRU)), inputs="sequences"),
    "encoder": Spec(Encoder, inputs="tokens", lengthwise=True, draws=True),
    "gpt2": Spec(_gpt2, inputs="tokens", lengthwise=True, draws=True),
    "bert": Spec(_bert, inputs="tokens", training=False),
    "t5": Spec(_t5, inputs="tokens", lengthwise=True, coarse=True),
    "llama": Spec(_llama, inputs="tokens", lengthwise=True, coarse=True),
    "lora": Spec(lambda: Net(nn.Sequential(LowRank(5, 6), nn.Tanh(), LowRank(6, CLASSES)))),
    "weight norm": Spec(lambda: Net(_parametrised(_weight_norm))),
    "spectral norm": Spec(lambda: Net(_parametrised(_spectral_norm)), stops=True),
    "orthogonal": Spec(lambda: Net(_parametrised(_orthogonal))),
    "old weight norm": Spec(lambda: Net(_parametrised(torch.nn.utils.weight_norm))),
    "old spectral norm": Spec(lambda: Net(_parametrised(torch.nn.utils.spectral_norm)), stops=True),
    "straight-through": Spec(
        lambda: Net(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), StraightThrough(), nn.Linear(6, CLASSES))), stops=True
    ),
    "repeated": Spec(lambda: Net(Repeated())),
    "checkpointed": Spec(lambda: Net(Checkpointed(False)), lambda: Net(Checkpointed(None))),
    "checkpointed reentrant": Spec(lambda: Net(Checkpointed(True)), lambda: Net(Checkpointed(None))),
    "compiled": Spec(lambda: Net(_mlp()), compiled="eager"),
    "compiled ahead": Spec(lambda: Net(_mlp()), compiled="aot_eager"),
    "compiled mha": Spec(lambda: Net(Attention()), inputs="sequences", compiled="eager"),
    "mlp float32": Spec(lambda: Net(_mlp(nn.ReLU)), dtype=torch.float32),
    "cnn float32": Spec(lambda: Net(Convolutions()), inputs="images", dtype=torch.float32),
    "lstm float32": Spec(lambda: Net(Recurrent(nn.LSTM)), inputs="sequences", dtype=torch.float32),
    "mlp bfloat16": Spec(lambda: Net(_mlp()), dtype=torch.bfloat16),
    "llama bfloat16": Spec(_llama, inputs="tokens", lengthwise=True, coarse=True, dtype=torch.bfloat16),
}
