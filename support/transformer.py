"""A transformer encoder that classifies sequences of tokens (Vaswani et al., 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hyperkron.solution import HyperkronError


class SelfAttention(nn.Module):
    """Multi-head self-attention, with query, key, value and output as four linear modules.

    softmax(Q Kᵀ/√d) V for each head. Kept apart, the four projections are four Kronecker blocks.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(N, T, width) to the same; positions where ``mask`` (N, T) is false are not attended to."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        seen = None if mask is None else mask[:, None, None, :]
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))
        return mixed


class EncoderLayer(nn.Module):
    """Attention, then a network at each position, each normalised first and added to its input."""

    def __init__(self, width: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = SelfAttention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, ffn)
        self.gelu = nn.GELU()
        self.down = nn.Linear(ffn, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(N, T, width) to the same."""
        x = x + self.attention(self.norm1(x), mask)
        out: Tensor = x + self.down(self.gelu(self.up(self.norm2(x))))
        return out


class TransformerClassifier(nn.Module):
    """A transformer encoder over tokens, averaged over positions, with a linear head.

    Args:
        vocab: how many tokens there are.
        classes: how many logits come out.
        layers: how many encoder layers.
        width: size of a token's vector.
        heads: attention heads; must divide ``width``.
        ffn: size of the hidden layer at each position.
        max_len: the longest sequence; positions are learned vectors.

    References:
        Vaswani et al., 2017, "Attention is all you need"; normalisation before each part as in
        Xiong et al., 2020, "On layer normalization in the transformer architecture".

    Example:
        >>> import torch
        >>> sizes = dict(layers=2, width=32, heads=4, ffn=64, max_len=16)
        >>> model = TransformerClassifier(vocab=100, classes=4, **sizes)
        >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 4])
    """

    def __init__(self, vocab: int, classes: int, layers: int, width: int, heads: int, ffn: int, max_len: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise HyperkronError(f"heads={heads!r} must divide width={width!r}.")
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(max_len, width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, ffn) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Tokens (N, T) to logits (N, classes); where ``mask`` (N, T) is false, a token does not count."""
        length, longest = tokens.shape[1], self.positions.num_embeddings
        if length > longest:
            raise HyperkronError(
                f"tokens has {length} positions but max_len={longest}; cut the sequences, or raise max_len."
            )
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            x = layer(x, mask)
        x = self.norm(x)
        if mask is None:
            pooled = x.mean(1)
        else:
            weights = mask.to(x.dtype).unsqueeze(-1)
            pooled = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
        logits: Tensor = self.head(pooled)
        return logits
