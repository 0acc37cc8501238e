"""A small transformer whose parameters, and the weights of whose examples, are divided among processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.collectives import Group
from hyperkron.hypergradient import Hypergradient
from hyperkron.sharding import whole
from transformer import EncoderLayer

EXAMPLES, TOKENS, WORDS, CLASSES = 12, 4, 7, 3


class Transformer(nn.Module):
    """Two layers of attention over tokens and positions, their mean, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, 6), nn.Embedding(TOKENS, 6)
        self.layers = nn.ModuleList(EncoderLayer(6, 2, 10) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(TOKENS).expand(tokens.shape))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


class Lambda(nn.Module):
    """Example weights, divided among ``group`` or not, and a weight decay, which every process has."""

    def __init__(self, group: Group | None = None, count: int = EXAMPLES) -> None:
        super().__init__()
        self.weights = hk.SampleWeights(count, "sigmoid", group=group)
        self.decay = hk.as_hyper(torch.tensor(-4.0))


def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    tokens, classes, index = batch
    loss = hk.losses.cross_entropy(model(tokens), classes, weight=hyper.weights(index))
    return loss + hk.losses.l2(model, hyper.decay().exp())


def outer(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Transformer().to(dtype)


def batches() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, ...]:
        tokens = torch.randint(WORDS, (EXAMPLES, TOKENS), generator=generator)
        classes = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        return tokens, classes, torch.randperm(EXAMPLES, generator=generator)

    return batch(), batch()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """``fully_shard`` of every layer and of the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = options.pop("mesh", None) or init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


METHODS: dict[str, Callable[[], Hypergradient]] = {
    "identity": lambda: hk.identity(),
    "identity reverse": lambda: hk.identity(cross="reverse"),
    "identity forward": lambda: hk.identity(cross="forward"),
    "identity difference": lambda: hk.identity(cross="difference"),
    "sama": lambda: hk.sama(),
    "kfac": lambda: hk.kfac(0.1),
    "kfac exact": lambda: hk.kfac(0.1, fisher="type-2", split="exact"),
    "ekfac": lambda: hk.ekfac(0.1),
    "cg": lambda: hk.cg(5, 0.1),
    "pcg": lambda: hk.pcg(5, 0.1),
    "ggn": lambda: hk.cg(5, curvature=hk.curvature.GGN(0.1)),
    "neumann": lambda: hk.neumann(5, 0.1),
    "unrolled": lambda: hk.unrolled(2),
}


def hypergradient(method: Hypergradient, problem: hk.BilevelProblem, model: nn.Module, hyper: nn.Module) -> Tensor:
    """The gradient by ``method``, all of it."""
    grads = method.compute(problem, model, hyper, *batches()).grads
    return torch.cat([whole(g).reshape(-1) for g in grads.values()])
