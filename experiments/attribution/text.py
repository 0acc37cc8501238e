"""A text classifier whose last encoder layer is trained: TREC questions and MiniLM."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.paper import texts
from hyperkron.cleaning.models.encoder import TextEncoder

TOKENS = 24
"""Longer questions are cut."""


class LastLayer(nn.Module):
    """One BERT layer, the mean over tokens and a linear head; the mask of real tokens is the last feature."""

    def __init__(self, width: int, inner: int, heads: int, classes: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm, self.last_norm = nn.LayerNorm(width, eps=1e-12), nn.LayerNorm(width, eps=1e-12)
        self.head = nn.Linear(width, classes)

    def forward(self, packed: Tensor) -> Tensor:
        x, mask = packed[..., :-1], packed[..., -1]
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2) for f in (self.query, self.key, self.value))
        scores = q @ k.mT / q.shape[-1] ** 0.5 - 1e4 * (1 - mask)[..., None, None, :]
        x = self.norm(x + self.mixed((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2)))
        x = self.last_norm(x + self.second(F.gelu(self.first(x))))
        return self.head((x * mask[..., None]).sum(-2) / mask.sum(-1, keepdim=True))


BERT = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mixed": "attention.output.dense",
    "norm": "attention.output.LayerNorm",
    "first": "intermediate.dense",
    "second": "output.dense",
    "last_norm": "output.LayerNorm",
}
"""Our names of a layer's parts, and those of transformers."""


class Builder:
    """Makes networks that start from the pretrained layer, each with a head of its own."""

    def __init__(self, weights: dict[str, Tensor], inner: int, heads: int, classes: int) -> None:
        self.weights, self.inner, self.heads, self.classes = weights, inner, heads, classes

    def __call__(self) -> nn.Module:
        network = LastLayer(len(self.weights["norm.weight"]), self.inner, self.heads, self.classes)
        network.load_state_dict(self.weights, strict=False)
        return network


def packed(encoder: TextEncoder, rows: list[str]) -> Tensor:
    """The states that enter the last layer, padded, with the mask as a last feature: (N, T, width + 1)."""
    hidden = encoder.prefix(rows, 1, max_length=TOKENS, dtype=torch.float32)
    states, mask = hidden.batch(range(len(rows)))
    states = F.pad(states, (0, 0, 0, TOKENS - states.shape[1]))
    return torch.cat([states, F.pad(mask.float(), (0, TOKENS - mask.shape[1]))[..., None]], -1)


def load(
    data: Path | None, count: int, queries: int, name: str = "minilm", corpus: str = "trec"
) -> tuple[Builder, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The networks, and ``count`` training and ``queries`` test rows with their true labels."""
    folder = data if data is not None and (data / "wrench").is_dir() else None
    rows = texts.corpus(corpus, folder)
    encoder = texts.encoder(name, folder, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    state = encoder.with_head(rows.classes, 1).state_dict()
    weights = {
        f"{ours}.{kind}": next(x.cpu() for key, x in state.items() if key.endswith(f"layer.0.{theirs}.{kind}"))
        for ours, theirs in BERT.items()
        for kind in ("weight", "bias")
    }
    heads = int(encoder._model.config.num_attention_heads)
    build = Builder(weights, len(weights["first.bias"]), heads, rows.classes)
    train = packed(encoder, rows.train[:count]), rows.gold[0][:count]
    return build, train, (packed(encoder, rows.test[:queries]), rows.gold[2][:queries])
