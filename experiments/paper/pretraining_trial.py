"""One run of continued pretraining: a method on a task, scored by F1 on dev along the way and once on test."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.paper.datasets import find
from experiments.paper.pretraining_data import Joined, Labelled, Masked, Split, Texts, Tokens, read_task, split
from experiments.paper.pretraining_model import (
    PROBLEM,
    AuxiliaryWeight,
    TwoHeads,
    token_losses,
    token_objective,
    weight_network,
)
from experiments.paper.texts import MADE_UP, unpack, write_tiny
from experiments.trial import clock_of, train
from hyperkron.algorithms import AID, InnerOnly, Updates
from hyperkron.hypergradient import Hypergradient, ekfac, kfac, sama
from hyperkron.solution import HyperkronError
from hyperkron.training import Evaluate, Run, fit

WARM = 3
"""Outer steps before the clock counts for a price."""
DAMPING, ALPHA = 1e-3, 0.3
"""Of KFAC and of SAMA, as printed."""
LOSSES = tuple(float(x) for x in range(13))
"""Losses at which the weight network is recorded."""


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        hypergradient: from θ's optimizer and a seed; ``None`` for plain training.
        auxiliary: whether masked-language modelling is part of J_in.
        scalar: one weight for the whole auxiliary loss in place of the weight network.
        all_rows: θ is also trained on the rows that others hold out for J_out.
        leaky: the files as they are, with test texts in training.
        head: how many times longer than usual the fresh head for tokens is trained beforehand.
        weight: of the auxiliary loss in plain training.
    """

    hypergradient: Callable[[torch.optim.Optimizer, int], Hypergradient] | None = None
    auxiliary: bool = True
    scalar: bool = False
    all_rows: bool = False
    leaky: bool = False
    head: int = 1
    weight: float = 1.0


def _empirical(optimizer: torch.optim.Optimizer, seed: int) -> Hypergradient:
    return kfac(DAMPING, fisher="empirical", seed=seed, graph=True)


METHODS: dict[str, Method] = {
    "Baseline": Method(auxiliary=False),
    "TARTAN-MT": Method(),
    "SAMA": Method(lambda optimizer, seed: sama(optimizer, alpha=ALPHA)),
    "KFAC-EMP": Method(_empirical),
    "KFAC-mc": Method(lambda optimizer, seed: kfac(DAMPING, seed=seed, graph=True)),
    "EKFAC": Method(lambda optimizer, seed: ekfac(DAMPING, fisher="empirical", refresh_every=10, seed=seed)),
    "KFAC-EMP, one weight": Method(_empirical, scalar=True),
    "TARTAN-MT, all rows": Method(all_rows=True),
    "Baseline, files as they are": Method(auxiliary=False, leaky=True),
    "TARTAN-MT, longer head": Method(head=10),
    "TARTAN-MT, weight 0.1": Method(weight=0.1),
}
"""EKFAC's Fisher is the empirical one: its basis for the 30 000 rows of the word embeddings is then thin. As its
eigendecompositions cost as much as all else together, it is renewed at every tenth step of λ."""
BILEVEL = tuple(name for name, method in METHODS.items() if method.hypergradient is not None)


@dataclass(frozen=True)
class Case:
    """What all runs share.

    Attributes:
        batch: rows of each stream, and of J_out.
        inner_steps: of θ for one of λ.
        steps: of λ.
        looks: how often dev is scored.
        head_steps: steps of the fresh head for tokens, with the encoder frozen, before training begins.
        warm_up: share of θ's steps in which its rate rises; it then falls linearly to 0.
        graph: whether a GPU replays recorded inner steps.
    """

    batch: int = 16
    inner_steps: int = 10
    steps: int = 100
    looks: int = 10
    head_steps: int = 100
    warm_up: float = 0.06
    graph: bool = True


class Source:
    """The encoder, the texts of every task and the warmed-up heads, each made when it is first asked for.

    Args:
        name: of an encoder's folder in the data folder, or :data:`MADE_UP`.
        data: the data folder.
        device: of everything.
        lengths: tokens of a row, by task.
    """

    def __init__(self, name: str, data: Path | None, device: torch.device, lengths: dict[str, int]) -> None:
        self.device, self.data, self.lengths = device, data, lengths
        self.encoder, self.tokenizer = load_encoder(name, data)
        self.encoder.to(device)
        self._texts: dict[tuple[str, bool], Texts] = {}
        self._splits: dict[tuple[str, bool, int], Split] = {}
        self._heads: dict[tuple[Any, ...], list[Tensor]] = {}

    def split(self, dataset: str, seed: int, leaky: bool) -> Split:
        """The rows of a task, held-out rows drawn by ``seed``."""
        if (dataset, leaky) not in self._texts:
            self._texts[dataset, leaky] = read_task(dataset, self.data, leaky=leaky)
        if (dataset, leaky, seed) not in self._splits:
            texts, length = self._texts[dataset, leaky], self.lengths[dataset]
            self._splits[dataset, leaky, seed] = split(texts, self.tokenizer, length, seed, self.device)
        return self._splits[dataset, leaky, seed]

    def model(self, dataset: str, method: Method, seed: int, case: Case) -> TwoHeads:
        """The network with the initial weights of ``seed``; its head for tokens is trained first if it is used."""
        rows = self.split(dataset, seed, method.leaky)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = TwoHeads(self.encoder, rows.classes)
            with torch.no_grad():  # drawn on the CPU, so that a seed means the same on every device
                for layer in (made.classifier, made.transform[0]):
                    assert isinstance(layer, nn.Linear)
                    layer.weight.copy_(torch.randn(layer.weight.shape) * 0.02)
                    layer.bias.zero_()
        if method.auxiliary and case.head_steps:
            steps = method.head * case.head_steps
            key = (dataset, method.leaky, steps)
            if key not in self._heads:  # one for all seeds, as a pretrained one would be
                corpus = self.split(dataset, 0, method.leaky).auxiliary
                self._heads[key] = _warm_head(made, corpus, self.tokenizer, case, steps)
            with torch.no_grad():
                for p, value in zip(made.token_head(), self._heads[key], strict=True):
                    p.copy_(value)
        return made


def load_encoder(name: str, data: Path | None) -> tuple[Any, Any]:
    """Any Hugging Face encoder in a folder, in float32, and its tokenizer."""
    import transformers

    if name == MADE_UP:
        with tempfile.TemporaryDirectory() as place:
            write_tiny(Path(place))
            return _read(transformers, Path(place))
    where = find(name, data)
    unpack(where)
    return _read(transformers, where)


def _read(transformers: Any, where: Path) -> tuple[Any, Any]:
    transformers.utils.logging.set_verbosity_error()  # a pooler that is not used need not be reported as missing
    transformers.utils.logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "eager", "use_safetensors": True}
    encoder = transformers.AutoModel.from_pretrained(where, local_files_only=True, **options)
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder, transformers.AutoTokenizer.from_pretrained(where, local_files_only=True)


def _warm_head(model: TwoHeads, corpus: Tokens, tokenizer: Any, case: Case, steps: int) -> list[Tensor]:
    """The head for tokens after ``steps`` with everything else frozen, from initial weights of its own."""
    head = model.token_head()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        head[0].copy_(0.02 * torch.randn(head[0].shape))
    model.requires_grad_(False)
    for p in head:
        p.requires_grad_(True)
    optimizer = torch.optim.AdamW(head, lr=1e-3, weight_decay=0.0)
    batches = Masked(corpus, tokenizer, 4 * case.batch, 2000)
    train(model, token_objective, batches, optimizer, steps, graph=case.graph)
    model.requires_grad_(True)
    return [p.detach().clone() for p in head]


def f1(predicted: Tensor, labels: Tensor, *, micro: bool) -> float:
    """Micro F1 (the share of right answers), or the mean of F1 over the classes in ``labels`` or ``predicted``, in %.

    Example:
        >>> round(f1(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), micro=False), 1)
        66.7
    """
    if micro:
        return 100 * float((predicted == labels).double().mean())
    scores = []
    for c in torch.cat([predicted, labels]).unique().tolist():
        right = int(((predicted == c) & (labels == c)).sum())
        scores.append(2 * right / (int((predicted == c).sum()) + int((labels == c).sum())))
    return 100 * sum(scores) / len(scores)


@torch.no_grad()
def predictions(model: TwoHeads, part: tuple[Tokens, Tensor], chunk: int = 256) -> tuple[Tensor, float]:
    """The predicted classes, and the mean loss."""
    tokens, labels = part
    pairs = zip(tokens.ids.split(chunk), tokens.mask.split(chunk), strict=True)
    logits = torch.cat([model(ids, mask)[0] for ids, mask in pairs])
    return logits.argmax(1), float(nn.functional.cross_entropy(logits, labels))


class Trial:
    """A run of a method with step sizes ``inner`` of θ (AdamW) and ``outer`` of λ (Adam, without schedule)."""

    def __init__(
        self, source: Source, case: Case, dataset: str, name: str, inner: float, outer: float | None, seed: int
    ) -> None:
        method = METHODS[name]
        self.name, self.case, self.micro = name, case, dataset == "chemprot"
        self.split, self.tokenizer = source.split(dataset, seed, method.leaky), source.tokenizer
        self.model = source.model(dataset, method, seed, case)
        one = method.scalar or method.weight != 1
        self.weights = (AuxiliaryWeight(method.weight) if one else weight_network(seed=seed)).to(source.device)
        rows = _together(self.split) if method.all_rows else self.split.train
        batches: Any = Labelled(rows, case.batch, seed)
        if method.auxiliary:
            batches = Joined(batches, Masked(self.split.auxiliary, self.tokenizer, case.batch, seed + 3000))
        self.looks = Evaluate(self._look, times=case.looks)
        self._best: tuple[float, float] = (-math.inf, 0.0)
        self._kept: list[Tensor] = []
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=inner, weight_decay=0.0, fused=source.device.type == "cuda"
        )
        total = case.steps * case.inner_steps
        rising = max(1, round(case.warm_up * total))
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda t: min((t + 1) / rising, max(0.0, (total - t) / max(1, total - rising)))
        )
        bilevel: dict[str, Any] = {}
        algorithm: Any = InnerOnly(case.inner_steps)
        if method.hypergradient is not None:
            assert outer is not None
            algorithm = AID(method.hypergradient(optimizer, seed), case.inner_steps, seed=seed)
            bilevel = {
                "outer_data": Labelled(self.split.held_out, case.batch, seed + 1000),
                "outer_optimizer": torch.optim.Adam(self.weights.parameters(), lr=outer),
            }
        self.run = fit(
            PROBLEM,
            self.model,
            self.weights,  # plain training leaves it as it is: all weights are equal
            algorithm,
            batches,
            steps=0,
            graph=case.graph,
            inner_optimizer=Updates(optimizer, schedule, schedule="update"),
            clock=clock_of(source.device),
            record_failure=True,
            seed=None,
            **bilevel,
        )

    def _look(self, run: Run) -> dict[str, Any]:
        """F1 and loss on dev; the parameters of the best look are kept."""
        predicted, loss = predictions(self.model, self.split.dev)
        score = f1(predicted, self.split.dev[1], micro=self.micro)
        if (score, -loss) > self._best:
            self._best, self._kept = (score, -loss), [p.detach().clone() for p in self.model.parameters()]
        return {"dev": score, "dev_loss": loss}

    def train(self) -> dict[str, Any]:
        """The whole run: dev at every look, test once, at the parameters that were best on dev, and λ's changes."""
        self.run.callbacks.append(self.looks)
        before = self._token_loss()
        self.run.advance(self.case.steps)
        rows = self.looks.rows
        figures: dict[str, Any] = {
            "failed": str(self.run.failure) if self.run.failure is not None else None,
            "dev_curve": [round(float(row["dev"]), 3) for row in rows],  # type: ignore[arg-type]
            "recorded": self.run.state.loop.recorded,
            "weights": None if self.name not in BILEVEL else self._weights(),
            "token_loss": [before, self._token_loss()],
        }
        if not self._kept:
            return {**figures, "dev": None, "test": None}
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), self._kept, strict=True):
                p.copy_(value)
        predicted, _ = predictions(self.model, self.split.test)
        test = f1(predicted, self.split.test[1], micro=self.micro)
        return {**figures, "dev": self._best[0], "dev_loss": -self._best[1], "test": test}

    @torch.no_grad()
    def _per_text(self) -> Tensor:
        """The mean loss of the masked tokens of 256 auxiliary texts."""
        ids, mask, positions, targets = Masked(self.split.auxiliary, self.tokenizer, 256, 7)()
        parts = zip(ids.split(32), mask.split(32), positions.split(32), targets.split(32), strict=True)
        return torch.cat([token_losses(self.model(i, m, p)[1], t) for i, m, p, t in parts])

    def _token_loss(self) -> float | None:
        """The mean of that, where masked tokens are trained on."""
        return float(self._per_text().mean()) if METHODS[self.name].auxiliary else None

    @torch.no_grad()
    def _weights(self) -> dict[str, Any]:
        """The learned weights of 256 auxiliary texts, how far they are from 1 where they began, and the curve w(ℓ)."""
        per_text = self._per_text()
        found = self.weights(per_text)
        curve = self.weights(torch.tensor(LOSSES, device=found.device))
        return {
            "mean": float(found.mean()),
            "least": float(found.min()),
            "most": float(found.max()),
            "moved": float((found - 1).square().mean().sqrt()),
            "loss": float(per_text.mean()),
            "curve": [round(float(x), 4) for x in curve],
        }

    def price(self, steps: int) -> dict[str, Any]:
        """Seconds of an outer iteration, after those that record graphs; and the memory on a GPU."""
        before = self.run.advance(WARM, seconds=math.inf).seconds
        self.run.advance(steps, seconds=math.inf)
        if self.run.failure is not None:
            raise HyperkronError(f"a step of {self.name} failed ({self.run.failure}), so that it has no price.")
        device = self.split.train[1].device
        memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return {"seconds": (self.run.seconds - before) / steps, "bytes": memory}


def _together(rows: Split) -> tuple[Tokens, Tensor]:
    """Training rows and held-out rows."""
    (a, x), (b, y) = rows.train, rows.held_out
    joined = Tokens(torch.cat([a.ids, b.ids]), torch.cat([a.mask, b.mask]), torch.cat([a.special, b.special]))
    return joined, torch.cat([x, y])
