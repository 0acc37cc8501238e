"""The bilevel problems whose cost is measured.

BERT-base and two ResNet-18 with one weight per training example; and, under bfloat16 autocast, causal language models
of Llama's shape with one weight for each of four domains, and BERT-base with dropout and masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "support"))

import torch
from torch import Tensor, nn

import hyperkron as hk
from resnet import resnet18
from transformer import TransformerClassifier

INNER_STEPS = 10


@dataclass
class Workload:
    """A model in training, its λ and its batches; ``inner_steps`` does the ten steps between two hypergradients."""

    name: str
    model: nn.Module
    hyper: nn.Module
    optimizer: torch.optim.Optimizer
    batches: list[tuple[Any, Tensor, Tensor]]
    outer_batch: tuple[Any, Tensor, Tensor]
    autocast: bool = False
    outer_optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.outer_optimizer = torch.optim.SGD(self.hyper.parameters(), lr=1e-3, momentum=0.9)

    @cached_property
    def problem(self) -> hk.BilevelProblem:
        """Weighted cross-entropy inside, plain cross-entropy outside; always the same, as recordings need it."""
        if not self.autocast:
            return hk.BilevelProblem(inner, outer)
        device = self.batches[0][1].device.type
        return hk.BilevelProblem(under_autocast(inner, device), under_autocast(outer, device), autocast=True)

    def inner_step(self, i: int) -> None:
        """One optimizer step on batch i."""
        self.optimizer.zero_grad(set_to_none=True)
        self.problem.inner(self.model, self.hyper, self.batches[i % len(self.batches)]).backward()
        self.optimizer.step()

    def inner_steps(self) -> None:
        """The steps between two hypergradients."""
        for i in range(INNER_STEPS):
            self.inner_step(i)

    def outer_step(self, hypergradient: Callable[[], Any]) -> None:
        """Hypergradient and λ step."""
        self.outer_optimizer.zero_grad(set_to_none=True)
        hypergradient()
        self.outer_optimizer.step()


def inner(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    """J_in: cross-entropy weighted per example."""
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=hyper(index))


def outer(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    """J_out: cross-entropy on trusted data."""
    x, y, _ = batch
    return hk.losses.cross_entropy(model(x), y)


def under_autocast(function: Any, device: str) -> Any:
    """The objective as a user writes it with bfloat16 autocast inside."""

    def wrapped(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
        with torch.autocast(device, torch.bfloat16):
            return function(model, hyper, batch)

    return wrapped


class Bert(nn.Module):
    """BERT with random weights, its embeddings frozen, and a linear head on the first token."""

    def __init__(self, small: bool, classes: int = 6) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        sizes = (
            {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512}
            if small
            else {}
        )
        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
        self.bert = BertModel(config, add_pooling_layer=False)
        self.bert.embeddings.requires_grad_(False)
        self.head = nn.Linear(config.hidden_size, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Class scores."""
        # Nothing is padded. ``self.bert(tokens)`` would make a mask where a CUDA graph is recorded, and attention with
        # a mask takes a slower kernel.
        hidden = self.bert.encoder(self.bert.embeddings(input_ids=tokens))
        return self.head(hidden.last_hidden_state[:, 0])


def bert(device: str, small: bool) -> Workload:
    """BERT-base, all 12 layers trained, AdamW; 128 × 100 tokens (small: 2 layers of 128, 16 × 32 tokens)."""
    torch.manual_seed(0)
    batch, length = (16, 32) if small else (128, 100)
    try:
        with torch.device(device):
            model: nn.Module = Bert(small)
    except ImportError:
        if not small:
            raise
        model = TransformerClassifier(vocab=1000, classes=6, layers=2, width=128, heads=2, ffn=512, max_len=length)
    model.train()
    hyper = hk.SampleWeights(batch * INNER_STEPS).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5)
    data = _batches(lambda: torch.randint(1000, (batch, length), device=device), batch, 6, device)
    return Workload("BERT-12" if not small else "BERT-small", model, hyper, optimizer, data[:-1], data[-1])


class UsualBert(nn.Module):
    """BERT as users have it: dropout 0.1, masks of padded tokens, all parameters trained, a classifier on top."""

    def __init__(self, small: bool, classes: int = 6) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = (
            {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
            if small
            else {}
        )
        self.bert = BertForSequenceClassification(BertConfig(num_labels=classes, **sizes))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of tokens, of which zeros are padding."""
        return self.bert(input_ids=x, attention_mask=(x > 0).long()).logits


def usual_bert(device: str, small: bool) -> Workload:
    """BERT-base with dropout, AdamW, bfloat16 autocast; 128 × 100 tokens, a quarter of them padding (small: 8 × 16)."""
    torch.manual_seed(0)
    batch, length = (8, 16) if small else (128, 100)
    with torch.device(device):
        model = UsualBert(small)
    model.train()

    def draw() -> Tensor:
        tokens = torch.randint(1, 1000, (batch, length), device=device)
        lengths = torch.randint(length // 2, length + 1, (batch, 1), device=device)
        return tokens * (torch.arange(length, device=device) < lengths)

    hyper = hk.SampleWeights(batch * INNER_STEPS).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    data = _batches(draw, batch, 6, device)
    return Workload("BERT-base, dropout", model, hyper, optimizer, data[:-1], data[-1], autocast=True)


@dataclass(frozen=True)
class Llama:
    """The shape of a causal language model: RMSNorm, grouped queries, gated MLP, output layer tied to the embedding."""

    name: str
    layers: int
    width: int
    keys: int
    hidden: int
    vocabulary: int = 32000
    batch: int = 4
    tokens: int = 512

    def model(self, **options: Any) -> nn.Module:
        """With random weights."""
        from transformers import LlamaConfig, LlamaForCausalLM

        head = min(128, self.width // 2)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.width,
            intermediate_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.width // head,
            num_key_value_heads=self.keys // head,
            max_position_embeddings=self.tokens,
            tie_word_embeddings=True,
            use_cache=False,
            **options,
        )
        return Logits(LlamaForCausalLM(config))


SHAPES = {
    "llama07": Llama("Llama 16 x 2048 (0.7B)", 16, 2048, 2048, 4096),
    "llama3": Llama("Llama 28 x 3072 (3B)", 28, 3072, 1024, 8192),
    "llama01": Llama("Llama 8 x 768 (0.1B)", 8, 768, 768, 2048),
}
TOY = Llama("Llama 2 x 32", 2, 32, 16, 64, vocabulary=64, tokens=24)
DOMAINS = 4


class Logits(nn.Module):
    """A language model of transformers that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        return self.model(input_ids=tokens).logits


def language(device: str, small: bool, name: str) -> Workload:
    """AdamW on a causal language model; an example of each of four domains in every batch, the outer batch of two.

    Domain d counts through its own quarter of the vocabulary, in steps of d + 1 or at random every fourth time.
    """
    torch.manual_seed(0)
    shape = TOY if small else SHAPES[name]
    with torch.device(device):
        model = shape.model()
    model.train()
    hyper = hk.DomainWeights(DOMAINS).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4 if not small else 1e-2)
    inside = torch.arange(shape.batch, device=device) % DOMAINS
    data = [_sequences(shape, domain) for domain in (*[inside] * INNER_STEPS, inside % 2)]
    return Workload(shape.name, model, hyper, optimizer, data[:-1], data[-1], autocast=True)


def _sequences(shape: Llama, domain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the tokens that follow them, and domains."""
    size, count = (len(domain), shape.tokens + 1), shape.vocabulary // DOMAINS
    steps = torch.randint(0, count, size, device=domain.device)
    regular = torch.rand(size, device=domain.device) < 0.75
    walk = torch.where(regular, (domain + 1)[:, None], steps).cumsum(1) % count
    tokens = walk + domain[:, None] * count
    return tokens[:, :-1], tokens[:, 1:], domain


def resnet(device: str, small: bool, stem: str) -> Workload:
    """ResNet-18 on 32 × 32 images, SGD with momentum, batch 512 (small: width 16, batch 32; 3×3 stem 8)."""
    torch.manual_seed(0)
    batch, width = (32 if stem == "7x7" else 8, 16) if small else (512, 64)
    model = resnet18(classes=10, stem=stem, width=width).to(device).train()  # type: ignore[arg-type]
    hyper = hk.SampleWeights(batch * INNER_STEPS).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = _batches(lambda: torch.randn(batch, 3, 32, 32, device=device), batch, 10, device)
    return Workload(f"ResNet-18 ({stem})", model, hyper, optimizer, data[:-1], data[-1])


def _batches(draw: Callable[[], Tensor], size: int, classes: int, device: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Ten inner batches and one outer batch of random inputs and labels."""
    return [
        (
            draw(),
            torch.randint(classes, (size,), device=device),
            torch.arange(size, device=device) + size * (i % INNER_STEPS),
        )
        for i in range(INNER_STEPS + 1)
    ]


WORKLOADS: dict[str, Callable[[str, bool], Workload]] = {
    "bert": bert,
    "resnet7": lambda device, small: resnet(device, small, "7x7"),
    "resnet3": lambda device, small: resnet(device, small, "3x3"),
}
LANGUAGE: dict[str, Callable[[str, bool], Workload]] = {
    **{name: partial(language, name=name) for name in SHAPES},
    "bert-dropout": usual_bert,
}
