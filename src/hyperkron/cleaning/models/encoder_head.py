"""The upper part of a text encoder as a network of its own, and the states it starts from."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class Hidden:
    """States of N texts of different lengths, one after the other without padding.

    Attributes:
        values: the states (Σ T_i, H).
        starts: where each text begins, and the end of the last; (N + 1,).
        device: where batches go; None leaves them with the states.

    Example:
        >>> import torch
        >>> hidden = pack([torch.ones(2, 4), torch.ones(3, 4)], 4, torch.float16)
        >>> states, mask = hidden.batch([1, 0])
        >>> states.shape, mask.sum(1)
        (torch.Size([2, 3, 4]), tensor([3, 2]))
    """

    values: Tensor
    starts: Tensor
    device: torch.device | None = None

    def __len__(self) -> int:
        return len(self.starts) - 1

    def batch(
        self, rows: Sequence[int] | Tensor, device: torch.device | str | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """States (n, T, H) of some rows, padded with zeros to their longest, and the mask (n, T) of what is real."""
        rows = torch.as_tensor(rows, dtype=torch.long, device=self.starts.device)
        begin, end = self.starts[rows], self.starts[rows + 1]
        lengths = end - begin
        position = torch.arange(int(lengths.max()) if len(rows) else 0, device=self.starts.device)
        mask = position < lengths[:, None]
        index = (begin[:, None] + position).clamp(max=max(len(self.values) - 1, 0))
        states = self.values[index].to(dtype) * mask.unsqueeze(-1)
        device = device or self.device
        return states.to(device), mask.to(device)

    def select(self, rows: Sequence[int] | Tensor) -> Hidden:
        """The states of some rows, in that order."""
        wanted = torch.as_tensor(rows, dtype=torch.long).tolist()
        parts = [self.values[self.starts[i] : self.starts[i + 1]] for i in wanted]
        return pack(parts, self.values.shape[1], self.values.dtype)


def pack(states: Sequence[Tensor], dim: int, dtype: torch.dtype) -> Hidden:
    """One :class:`Hidden` of the states (T_i, dim) of each text."""
    lengths = torch.tensor([0, *map(len, states)], dtype=torch.long)
    values = torch.cat([s.to(dtype) for s in states]) if states else torch.empty(0, dim, dtype=dtype)
    return Hidden(values, lengths.cumsum(0))


def mean_pool(states: Tensor, mask: Tensor) -> Tensor:
    """The mean of states (N, T, H) over the positions where ``mask`` (N, T) is not zero."""
    weights = mask.unsqueeze(-1).to(states.dtype)
    return (states * weights).sum(1) / weights.sum(1).clamp(min=1)


class EncoderHead(nn.Module):
    """Logits from the states that enter the last layers: those layers, the mean over tokens, a linear head.

    Made by :meth:`hyperkron.cleaning.models.TextEncoder.with_head` from a Hugging Face encoder, which is copied and
    never changed. Only the copied layers and the head are trainable; what they share with the lower part, such as a
    table of relative positions, is kept but frozen.
    """

    def __init__(self, model: Any, classes: int, layers: int) -> None:
        super().__init__()
        self.layers, width = layers, int(model.config.hidden_size)
        self.upper: nn.Module | None = None
        self._prepares = False
        if layers:
            self.upper = _upper(model, layers)
            _keep_positions(self.upper, width)
            self._prepares = _takes_prepared(self.upper, width)
            for module in self.upper.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        self.head = nn.Linear(width, classes).to(next(model.parameters()).device)

    def features(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """What the head receives (N, H)."""
        if self.upper is not None:
            given = _prepared(mask, hidden.dtype) if self._prepares else mask.long()
            hidden = self.upper(inputs_embeds=hidden, attention_mask=given).last_hidden_state
        return mean_pool(hidden, mask)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """States (N, T, H) and the mask (N, T) of real tokens, as from :meth:`Hidden.batch`, to logits (N, classes)."""
        logits: Tensor = self.head(self.features(hidden, mask))
        return logits


def _prepared(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores (N, 1, 1, T): nothing at real tokens, nearly −∞ elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask.bool(), torch.finfo(dtype).min)[:, None, None]


@torch.no_grad()
def _takes_prepared(upper: nn.Module, width: int) -> bool:
    """Whether an encoder takes such a mask as it is.

    Those that do not make their own from the plain one at every call; some copy a number from the CPU to do so, which
    a CUDA graph cannot record.
    """
    was, place = upper.training, next(upper.parameters())
    states = torch.linspace(-1, 1, 3 * width, device=place.device, dtype=place.dtype).reshape(1, 3, width)
    mask = torch.tensor([[True, True, False]], device=place.device)
    upper.eval()
    try:
        plain = upper(inputs_embeds=states, attention_mask=mask.long()).last_hidden_state[:, :2]
        ours = upper(inputs_embeds=states, attention_mask=_prepared(mask, place.dtype)).last_hidden_state[:, :2]
    except (ValueError, RuntimeError, IndexError):
        return False
    finally:
        upper.train(was)
    return bool(torch.allclose(plain, ours, rtol=1e-4, atol=1e-5))


@torch.no_grad()
def _keep_positions(upper: Any, width: int) -> None:
    """Let an encoder with a bias for relative positions, such as MPNet, look up their buckets in a buffer.

    It computes them at every call, with older versions of transformers (4.57) on the CPU, which a CUDA graph cannot
    record. The bias is still made of its parameters at every call. Where the two ways differ, nothing is changed.
    """
    parts = ("compute_position_bias", "relative_position_bucket", "relative_attention_bias")
    for module in [m for m in upper.modules() if all(hasattr(m, name) for name in parts)]:
        weight, most = module.relative_attention_bias.weight, int(upper.config.max_position_embeddings)
        buckets = module.relative_position_bucket(torch.arange(1 - most, most)).to(weight.device)
        module.register_buffer("position_buckets", buckets, persistent=False)
        states = torch.empty(1, most, width, device=weight.device)
        if torch.equal(_position_bias(module, states), module.compute_position_bias(states)):
            module.compute_position_bias = partial(_position_bias, module)


def _position_bias(module: Any, states: Tensor) -> Tensor:
    """What is added to attention scores (N, heads, T, T) of states (N, T, H): a number for every distance of tokens."""
    place = torch.arange(states.shape[1], device=states.device)
    distance = place - place[:, None] + len(module.position_buckets) // 2
    bias: Tensor = module.relative_attention_bias(module.position_buckets[distance]).permute(2, 0, 1)
    return bias.expand(len(states), -1, -1, -1).contiguous()


class _Given(nn.Module):
    """Stands in for the embeddings of an encoder: the states are given."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The one argument that holds real numbers."""
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.is_floating_point():
                return x
        raise HyperkronError("inputs_embeds is missing; call the network with states and a mask.")


def encoder_layers(model: Any) -> nn.ModuleList:
    """The list of an encoder's layers."""
    count = model.config.num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count and count > 0]
    if not found or not hasattr(model, "embeddings"):
        raise HyperkronError(
            f"an encoder of type {model.config.model_type!r} has no embeddings followed by a list of {count} layers; "
            "use layers=0, or an encoder such as BERT, RoBERTa or MPNet."
        )
    return found[0]


def _upper(model: Any, layers: int) -> nn.Module:
    """A copy of a frozen encoder without its embeddings and without all but its last layers, which are trainable."""
    kept, places = encoder_layers(model), dict(model.named_modules())
    [name] = [key for key, module in places.items() if module is kept]
    # deepcopy takes an entry of its memo for the copy, so the parts that are left out are never copied.
    top = nn.ModuleList([copy.deepcopy(layer) for layer in kept[-layers:]]).requires_grad_(True)
    below = {id(child): _Given() for key, child in model.named_children() if key.startswith("embeddings")}
    upper: nn.Module = copy.deepcopy(model, {id(kept): top, **below})
    assert upper.get_submodule(name) is top
    return upper
