"""Hypercleaning of weakly labelled texts with a tuned encoder.

    J_in = mean(clip(λ_n) · CE) on the weakly labelled rows ,      J_out = mean CE on the trusted rows

θ, the last layers of an encoder and a head, is moved by AdamW with a cosine schedule, λ by SGD with momentum 0.9. Its
step size ``outer`` is relative (:class:`experiments.trial.RelativeStep`): the root mean square by which the weights
of a batch move in the first step that counts; a setting ``rate`` gives an absolute one instead. All methods train the
same parameters on the same batches. On a GPU the inner steps replay one recorded graph; where that cannot be recorded
they take the ordinary way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.paper.references import KINDS
from experiments.paper.texts import Rows, TextSplit, joined
from experiments.paper.tuning import Grid, Setting
from experiments.trial import TINY, Looks, RelativeStep, Saved, clock_of
from hyperkron import losses
from hyperkron.algorithms import AID, SAMA, Algorithm, InnerOnly, Updates
from hyperkron.batches import Source
from hyperkron.hyper import SampleWeights
from hyperkron.hypergradient import Hypergradient, cg, kfac, neumann
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training import Box, fit

MOMENTUM = 0.9
WARM = 4
"""Outer steps before the clock counts for a price."""


@dataclass(frozen=True)
class TextMethod:
    """A method: its name, its grid, and how a setting, a number of inner steps and a seed become an algorithm.

    ``algorithm`` is ``None`` for plain training.
    """

    name: str
    grid: Grid
    algorithm: Callable[[Setting, int, int], Algorithm] | None


@dataclass(frozen=True)
class TextRates:
    """The values that grids are made of: every grid has (at least) four settings.

    Attributes:
        inner: AdamW's step size of the bilevel methods.
        plain: those of plain training, which has nothing else to tune.
        outer: relative step sizes of λ.
        damping: of KFAC and CG.
        step: of the Neumann series.
        alpha: SAMA's radius.
    """

    inner: tuple[float, ...] = (2e-4,)
    plain: tuple[float, ...] = (3e-5, 1e-4, 2e-4, 5e-4)
    outer: tuple[float, ...] = (0.02, 0.1)
    damping: tuple[float, ...] = (1e-3, 1e-1)
    step: tuple[float, ...] = (0.01, 0.1)
    alpha: tuple[float, ...] = (0.1, 1.0)


def text_methods(rates: TextRates) -> dict[str, TextMethod]:
    """Every method of the encoder experiment and every reference line, by name."""
    both: Grid = {"inner": rates.inner, "outer": rates.outer}
    damped, stepped = {**both, "damping": rates.damping}, {**both, "step": rates.step}
    found = [TextMethod(name, {"inner": rates.plain}, None) for name in ("Baseline", *KINDS)]

    def aid(name: str, grid: Grid, make: Callable[[Setting, int], Hypergradient]) -> TextMethod:
        return TextMethod(name, grid, lambda x, inner_steps, seed: AID(make(x, seed), inner_steps, seed=seed))

    found += [
        TextMethod("SAMA", {**both, "alpha": rates.alpha}, lambda x, t, seed: SAMA(t, x["alpha"], seed=seed)),
        aid("KFAC", damped, lambda x, seed: kfac(x["damping"], seed=seed)),
        aid("KFAC-EMP", damped, lambda x, seed: kfac(x["damping"], fisher="empirical", seed=seed)),
        aid("CG", damped, lambda x, seed: cg(3, x["damping"])),
        aid("Neumann-3", stepped, lambda x, seed: neumann(3, step=x["step"])),
        aid("Neumann-10", stepped, lambda x, seed: neumann(10, step=x["step"])),
    ]
    return {method.name: method for method in found}


@dataclass(frozen=True)
class TextCase:
    """What all runs share.

    Attributes:
        batch: of both levels; at most all rows.
        inner_steps: T, inner steps to an outer one.
        steps: outer steps of a full run.
        looks: how often it is looked at.
        tokens: after which a text is cut.
        graph: whether a GPU replays recorded inner steps.
    """

    batch: int = 128
    inner_steps: int = 10
    steps: int = 120
    looks: int = 6
    tokens: int = 64
    graph: bool = True

    def problem(self) -> BilevelProblem:
        """The two objectives; a batch holds states, mask, labels and row numbers."""
        return BilevelProblem(
            lambda model, weights, b: losses.cross_entropy(model(b[0], b[1]), b[2], weight=weights(b[3])),
            lambda model, weights, b: losses.cross_entropy(model(b[0], b[1]), b[2]),
        )


class Shuffled(Source):
    """Batches of rows, each epoch in a new order; batches are full, what is left over joins the next epoch."""

    def __init__(self, rows: Rows, size: int, seed: int) -> None:
        self.rows, self.size = rows, min(size, len(rows))
        self.generator = torch.Generator().manual_seed(seed)
        self.left = torch.empty(0, dtype=torch.long, device=rows.labels.device)

    def next(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States, mask, labels and row numbers."""
        if len(self.left) < self.size:
            order = torch.randperm(len(self.rows), generator=self.generator).to(self.left.device)
            self.left = torch.cat([self.left, order])
        chosen, self.left = self.left[: self.size], self.left[self.size :]
        return (*self.rows.batch(chosen), self.rows.labels[chosen], chosen)

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "left": self.left.cpu()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.left = state["left"].to(self.left.device)


def loss_and_error(model: nn.Module, part: Rows, chunk: int = 500) -> tuple[float, float]:
    """Mean cross entropy and share of wrong predictions."""
    total, wrong = torch.zeros((), device=part.labels.device), torch.zeros((), device=part.labels.device)
    with torch.no_grad():
        for rows in torch.arange(len(part), device=part.labels.device).split(chunk):
            output = model(*part.batch(rows))
            total += nn.functional.cross_entropy(output, part.labels[rows], reduction="sum")
            wrong += (output.argmax(1) != part.labels[rows]).sum()
    return float(total) / len(part), float(wrong) / len(part)


def order_auc(weights: Tensor, clean: Tensor) -> float:
    """The probability that a rightly labelled row weighs more than a wrongly labelled one; ties count half.

    Example:
        >>> order_auc(torch.tensor([0.9, 0.1, 0.5]), torch.tensor([True, False, False]))
        1.0
    """
    clean = clean.cpu()
    _, place, count = weights.detach().double().cpu().unique(return_inverse=True, return_counts=True)
    rank = (count.cumsum(0) - (count - 1) / 2)[place]
    right, wrong = int(clean.sum()), int((~clean).sum())
    if not right or not wrong:
        return math.nan
    return float((rank[clean].sum() - right * (right + 1) / 2) / (right * wrong))


class TextTrial:
    """One run of one method.

    Attributes:
        run: what ``fit`` made; an outer step is one of its steps, also where training is plain.
        rows: the looks of :meth:`train`.
    """

    def __init__(
        self,
        case: TextCase,
        split: TextSplit,
        model: nn.Module,
        method: TextMethod,
        setting: Setting,
        seed: int,
        steps: int,
    ) -> None:
        self.case, self.split, self.model, self.steps, self.name = case, split, model, steps, method.name
        rows = _rows(split, method.name)
        device, self.plain = rows.labels.device, method.algorithm is None
        self.weights = SampleWeights(len(rows), init=1.0 if self.plain else None).to(device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        inner = torch.optim.AdamW(parameters, lr=setting["inner"], fused=device.type == "cuda")
        unit = RelativeStep(setting.get("outer", 0.0), min(case.batch, len(rows)), setting.get("rate"))
        bilevel: dict[str, Any] = {
            "outer_data": Shuffled(split.trusted, case.batch, seed + 1000),
            "outer_optimizer": torch.optim.SGD(self.weights.parameters(), lr=TINY, momentum=MOMENTUM),
            "projection": Box(0.0, 1.0),
            "callbacks": [unit],
        }
        self.run = fit(
            case.problem(),
            model,
            self.weights,
            InnerOnly(case.inner_steps)
            if method.algorithm is None
            else method.algorithm(setting, case.inner_steps, seed),
            Shuffled(rows, case.batch, seed),
            steps=0,
            graph=case.graph,
            inner_optimizer=Updates(inner, torch.optim.lr_scheduler.CosineAnnealingLR(inner, steps)),
            clock=clock_of(device),
            record_failure=True,
            seed=None,
            **({} if self.plain else bilevel),
        )
        self.rows: list[dict[str, Any]] = []

    @property
    def failed(self) -> bool:
        """Whether a step failed."""
        return self.run.failure is not None

    def advance(self, steps: int) -> None:
        """Go on until ``steps`` outer steps are done."""
        self.run.advance(max(0, steps - self.run.state.step))

    def train(self, test: bool, saved: Saved | None = None) -> None:
        """The whole run, looked at in equal distances and at its end; with ``saved`` what is left of one cut off."""
        parts = {"second": self.split.second} | ({"test": self.split.test} if test else {})
        looks = Looks(parts, lambda model, part: loss_and_error(model, part), times=self.case.looks)
        self.run.callbacks.append(looks)
        if saved is not None:
            saved.begin(self.run)
        self.advance(self.steps)
        if saved is not None:
            saved.end()
        self.rows = [{key: value for key, value in row.items() if key != "seconds"} for row in looks.of(self.run)]

    def price(self, steps: int) -> float:
        """Seconds of an outer step, after those that measure the unit of λ and record the graph."""
        before = self.run.advance(WARM, seconds=math.inf).seconds
        self.run.advance(steps, seconds=math.inf)
        if self.failed:
            raise HyperkronError(f"a step of {self.name} failed, so that it has no price; try another setting.")
        return (self.run.seconds - before) / steps

    def figures(self) -> dict[str, Any]:
        """The curve, the row with the lowest second validation error, and how well weights tell right from wrong."""
        best = min(self.rows, key=lambda row: (row["second_error"], row["second_loss"]))
        return {
            "failed": self.failed,
            "best": best,
            "last": self.rows[-1],
            "graph": self.run.state.loop.recorded,
            "rows": None if self.plain else len(self.split.train),
            "auc": None if self.plain else order_auc(self.weights.weight, self.split.clean),
            "outer_rate": None if self.plain else self.run.state.outer.lr,
            "curve": {key: [float(f"{row[key]:.5g}") for row in self.rows] for key in self.rows[0]},
        }


def _rows(split: TextSplit, name: str) -> Rows:
    """The rows that a method trains on."""
    if name == "trusted only":
        return split.trusted
    if name == "trusted + noisy":
        return joined([split.trusted, split.train])
    if name == "trusted + correct":
        return joined([split.trusted, split.train.take(split.clean.nonzero().flatten().cpu())])
    return split.train
