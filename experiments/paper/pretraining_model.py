"""Fine-tuning with masked-language modelling as an auxiliary loss: a network with two heads, λ, and the objectives.

    J_in(λ, θ) = mean CE of the task + (1/M) Σ_t w(ℓ_n(t); λ) CE_t ,     J_out(θ) = mean CE of the task

over the M masked tokens t of a batch; ℓ_n is the mean loss of the masked tokens of text n, detached; w is a small
network (or one number) with values in (0, 2). It begins at 1, which is training with equal weights (TARTAN-MT).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.paper.networks import seeded
from experiments.paper.pretraining_data import IGNORED
from hyperkron import losses
from hyperkron.hyper import MetaWeightNet
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError

Batch = tuple[Tensor, ...]


class TwoHeads(nn.Module):
    """An encoder with a head for the classes of texts and one for masked tokens.

    The head for tokens is BERT's: a dense layer, GELU and a norm, then the transposed word embeddings (tied) and a
    bias. Encoders without pretrained language-model head begin with a fresh one. Dropout is 0, so that every evaluation
    is the same function.

    Args:
        encoder: a Hugging Face encoder such as BERT, RoBERTa or MPNet; it is copied.
        classes: of texts.
    """

    def __init__(self, encoder: Any, classes: int) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(encoder).requires_grad_(True)
        for module in self.encoder.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        words = self.encoder.get_input_embeddings()
        if not isinstance(words, nn.Embedding):
            raise HyperkronError(f"encoder={type(encoder).__name__} has no table of word embeddings; use another one.")
        width = words.embedding_dim
        self.classifier = nn.Linear(width, classes)
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.decoder = nn.Linear(width, words.num_embeddings)
        self.decoder.weight = words.weight
        nn.init.zeros_(self.decoder.bias)
        self.to(words.weight.device)
        self._additive = _takes_additive(self.encoder)

    def token_head(self) -> list[nn.Parameter]:
        """The parameters of the head for tokens that it does not share."""
        return [*self.transform.parameters(), self.decoder.bias]

    def states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """The last layer (N, L, H)."""
        given = _additive(mask, self.classifier.weight.dtype) if self._additive else mask.long()
        last: Tensor = self.encoder(input_ids=ids, attention_mask=given).last_hidden_state
        return last

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Logits of the classes (N, C) and, at ``positions`` (K, M) of the last K texts, of tokens (K, M, V).

        With ``positions`` the logits of the classes are those of the first N − K texts.
        """
        states, labelled = self.states(ids, mask), len(ids) - (0 if positions is None else len(positions))
        real = mask[:labelled, :, None].to(states.dtype)
        pooled = (states[:labelled] * real).sum(1) / real.sum(1).clamp(min=1)
        if positions is None:
            return self.classifier(pooled), None
        index = positions[:, :, None].expand(-1, -1, states.shape[2])
        return self.classifier(pooled), self.decoder(self.transform(states[labelled:].gather(1, index)))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores (N, 1, 1, L): 0 at real tokens, the lowest number elsewhere."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)[:, None, None]


@torch.no_grad()
def _takes_additive(encoder: Any) -> bool:
    """Whether an encoder takes such a mask as it is, without reading from the device, as a CUDA graph needs."""
    place = next(encoder.parameters())
    ids = torch.tensor([[2, 3, 4]], device=place.device)
    mask = torch.tensor([[True, True, False]], device=place.device)
    try:
        plain, ours = (
            encoder(input_ids=ids, attention_mask=given).last_hidden_state[:, :2]
            for given in (mask.long(), _additive(mask, place.dtype))
        )
    except (ValueError, RuntimeError, IndexError):
        return False
    return bool(torch.allclose(plain, ours, rtol=1e-4, atol=1e-5))


class AuxiliaryWeight(nn.Module):
    """One weight for the whole auxiliary loss: w = 2 sigmoid(λ), with the value ``first`` in (0, 2) at first."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.full((1,), first / 2).logit())

    def forward(self, per_example: Tensor) -> Tensor:
        """The weights (N,) of examples with these losses (N,)."""
        return 2 * self.logit.sigmoid().expand(len(per_example))


def weight_network(hidden: int = 100, seed: int = 0) -> MetaWeightNet:
    """w(ℓ) = 2 sigmoid(MLP(ℓ)); the last layer begins at 0, so that every weight begins at 1."""
    made = seeded(lambda: MetaWeightNet(hidden, scale=2.0), seed)
    last = made.net[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return made


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean loss of each text's masked tokens (N,), detached; 0 for a text without any."""
    with torch.no_grad():
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return each.reshape(targets.shape).sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


def inner(model: nn.Module, weights: nn.Module, batch: Batch) -> losses.Loss:
    """J_in; a batch without auxiliary texts has the task's loss alone."""
    ids, mask, labels, *auxiliary = batch
    if not auxiliary:
        return losses.cross_entropy(model(ids, mask)[0], labels)
    positions, targets = auxiliary
    logits, tokens = model(ids, mask, positions)
    weight = weights(token_losses(tokens, targets))
    auxiliary_loss = losses.cross_entropy(tokens, targets, weight=weight, ignore_index=IGNORED)
    return losses.cross_entropy(logits, labels) + auxiliary_loss


def outer(model: nn.Module, weights: nn.Module, batch: Batch) -> losses.Loss:
    """J_out: the task's loss on held-out training rows."""
    ids, mask, labels = batch
    return losses.cross_entropy(model(ids, mask)[0], labels)


PROBLEM = BilevelProblem(inner, outer)


def token_objective(model: nn.Module, batch: Batch) -> losses.Loss:
    """The auxiliary loss alone, on batches of :class:`experiments.paper.pretraining_data.Masked`."""
    ids, mask, positions, targets = batch
    return losses.cross_entropy(model(ids, mask, positions)[1], targets, ignore_index=IGNORED)
