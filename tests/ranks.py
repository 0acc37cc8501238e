"""A small language model on several processes: what each of them computes, for tests that compare them.

``python tests/ranks.py folder`` is run by every process; it does all checks one after the other, on all processes and
on the first two, and the first writes the results into the folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.steps import Adam

EXAMPLES, TOKENS, WORDS, CLASSES = 22, 3, 9, 4
STEPS = 50


class Network(nn.Module):
    """Every kind of curvature: Kronecker blocks, an exact diagonal (norm, embedding) and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.norm = nn.Embedding(WORDS, 5), nn.Linear(5, 6), nn.LayerNorm(6)
        self.scale, self.out = nn.Parameter(torch.ones(6)), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.scale * self.norm(torch.tanh(self.mix(self.words(tokens)))))  # type: ignore[no-any-return]


class Lambda(nn.Module):
    """Example weights and a weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.decay = hk.SampleWeights(EXAMPLES, "sigmoid"), hk.as_hyper(torch.tensor(-4.0))


def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    tokens, classes, index = batch
    loss = hk.losses.cross_entropy(model(tokens), classes, weight=hyper.weights(index))
    return loss + hk.losses.l2(model, hyper.decay().exp())


def outer(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def make(dtype: torch.dtype) -> tuple[hk.BilevelProblem, nn.Module, nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Problem, model, λ and two batches whose masked tokens are spread unevenly over the examples."""
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, hyper = Network().to(dtype), Lambda().to(dtype)
    batches = []
    for masked in (9, 5):
        tokens = torch.randint(WORDS, (EXAMPLES, TOKENS), generator=generator)
        classes = torch.randint(CLASSES, (EXAMPLES, TOKENS), generator=generator)
        classes[:masked, 1:] = -100
        batches.append((tokens, classes, torch.arange(EXAMPLES)))
    return hk.BilevelProblem(inner, outer), model, hyper, *batches


METHODS: dict[str, Callable[[], Hypergradient]] = {
    "identity": lambda: hk.identity(cross="reverse"),
    "sama": lambda: hk.sama(),
    "kfac mc": lambda: hk.kfac(0.1, samples=2, cross="reverse"),
    "kfac empirical": lambda: hk.kfac(0.1, fisher="empirical", cross="reverse"),
    "kfac type-2": lambda: hk.kfac(0.1, fisher="type-2", split="exact", cross="reverse"),
    "kfac reduce": lambda: hk.kfac(0.1, sharing="reduce", cross="forward"),
    "ekfac": lambda: hk.ekfac(0.1, cross="reverse"),
    "cg": lambda: hk.cg(5, 0.1),
    "pcg": lambda: hk.pcg(5, 0.1, cross="reverse"),
    "neumann": lambda: hk.neumann(5, 0.1),
    "unrolled": lambda: hk.unrolled(3),
    "unrolled adam": lambda: hk.unrolled(3, Adam(0.01)),
    "kfac auto": lambda: hk.kfac(0.1),
}


def hypergradients(group: dist.ProcessGroup | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """The gradient by every method, and J_out."""
    found = {}
    for name, method in METHODS.items():
        problem, model, hyper, *batches = make(dtype)
        result = method().compute(hk.training.DataParallel(problem, group), model, hyper, *batches)
        found[name] = torch.cat([g.reshape(-1) for g in result.grads.values()])
        found[f"{name} loss"] = torch.tensor(result.outer_loss)
    return found


def trained(
    group: dist.ProcessGroup | None, steps: int, folder: Path | None = None, method: str = "kfac mc"
) -> tuple[dict[str, Tensor], hk.Run]:
    """λ and θ after ``steps`` steps of ``fit`` on shuffled batches; with a folder, continued from it and saved."""
    problem, model, hyper, rows, trusted = make(torch.float64)
    data = torch.utils.data.TensorDataset(*rows)
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True, drop_last=True)
    run = hk.fit(
        hk.training.DataParallel(problem, group),
        model,
        hyper,
        hk.AID(METHODS[method](), inner_steps=2),
        loader,
        trusted,
        steps=steps,
        inner_optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        outer_optimizer=torch.optim.Adam(hyper.parameters(), lr=0.05),
        callbacks=[] if folder is None else [hk.Checkpoint(folder, every=10)],
        resume=folder,
    )
    return {name: p.detach().clone() for m in (hyper, model) for name, p in m.state_dict().items()}, run
