"""Hypercleaning of weakly labelled texts with a tuned encoder.

    J_in = mean(clip(λ_n) · CE) on the weakly labelled rows ,      J_out = mean CE on the trusted rows

θ, the last layers of an encoder and a head, is moved by AdamW with a cosine schedule, λ by SGD with momentum 0.9. Its
step size ``outer`` is relative (see :mod:`experiments.paper.image_entries`): the root mean square by which the weights
of a batch move in the first step that counts; a setting ``rate`` gives an absolute one instead. All methods train the
same parameters on the same batches. On a GPU nine of ten inner steps replay one recorded graph; where that cannot be
recorded all take the ordinary way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from experiments.paper.image_entries import MEASURED, TINY, relative_step
from experiments.paper.references import KINDS
from experiments.paper.texts import Rows, TextSplit, joined
from experiments.paper.tuning import Clock, Grid, Setting
from hyperkron import losses
from hyperkron.algorithms import AID, SAMA, BatchSources, Updates
from hyperkron.algorithms.base import Algorithm, State
from hyperkron.batches import FunctionSource
from hyperkron.hyper import SampleWeights
from hyperkron.hypergradient import cg, kfac, neumann
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.training import Box, InnerLoop

MOMENTUM = 0.9
WARM = 4
"""Outer steps before the clock counts for a price."""


@dataclass(frozen=True)
class TextMethod:
    """A method: its name, its grid, and how a setting becomes an algorithm (``None``: plain training)."""

    name: str
    grid: Grid
    algorithm: Callable[[Setting, int], Algorithm] | None


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
    found += [
        TextMethod("SAMA", {**both, "alpha": rates.alpha}, lambda x, seed: SAMA(1, x["alpha"], seed=seed)),
        TextMethod("KFAC", damped, lambda x, seed: AID(kfac(x["damping"], seed=seed), 1, seed=seed)),
        TextMethod(
            "KFAC-EMP", damped, lambda x, seed: AID(kfac(x["damping"], fisher="empirical", seed=seed), 1, seed=seed)
        ),
        TextMethod("CG", damped, lambda x, seed: AID(cg(3, x["damping"]), 1, seed=seed)),
        TextMethod("Neumann-3", stepped, lambda x, seed: AID(neumann(3, step=x["step"]), 1, seed=seed)),
        TextMethod("Neumann-10", stepped, lambda x, seed: AID(neumann(10, step=x["step"]), 1, seed=seed)),
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


class Shuffled:
    """Batches of rows, each epoch in a new order; batches are full, what is left over joins the next epoch."""

    def __init__(self, rows: Rows, size: int, seed: int) -> None:
        self.rows, self.size = rows, min(size, len(rows))
        self.generator = torch.Generator().manual_seed(seed)
        self.left = torch.empty(0, dtype=torch.long, device=rows.labels.device)

    def __call__(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States, mask, labels and row numbers."""
        if len(self.left) < self.size:
            order = torch.randperm(len(self.rows), generator=self.generator).to(self.left.device)
            self.left = torch.cat([self.left, order])
        chosen, self.left = self.left[: self.size], self.left[self.size :]
        return (*self.rows.batch(chosen), self.rows.labels[chosen], chosen)


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
    """One run of one method, with its own clock.

    Attributes:
        records: whether inner steps are recorded as a graph; false for all runs once one could not be recorded.
    """

    records: ClassVar[bool] = True

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
        self.device = rows.labels.device
        plain = method.algorithm is None
        self.weights = SampleWeights(len(rows), init=1.0 if plain else None).to(self.device)
        parameters = [p for p in model.parameters() if p.requires_grad]
        inner = torch.optim.AdamW(parameters, lr=setting["inner"], fused=self.device.type == "cuda")
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, steps)
        self.loop = InnerLoop(case.problem(), model, self.weights, inner, graph=case.graph and TextTrial.records)
        self.batches = BatchSources(
            FunctionSource(Shuffled(rows, case.batch, seed)),
            FunctionSource(Shuffled(split.trusted, case.batch, seed + 1000)),
        )
        self.touched = min(case.batch, len(rows))
        self.wanted, self.rate = setting.get("outer", 0.0), setting.get("rate")
        self.algorithm = None if method.algorithm is None else method.algorithm(setting, seed)
        self.state: State | None = None
        if self.algorithm is not None:
            outer = torch.optim.SGD(self.weights.parameters(), lr=TINY, momentum=MOMENTUM)
            updates = Updates(inner, self.schedule)
            self.state = self.algorithm.init(
                case.problem(), model, self.weights, inner=updates, outer=outer, project=Box(0.0, 1.0)
            )
        self.clock, self.step, self.failed = Clock(self.device), 0, False
        self.norms: list[float] = []
        self.rows: list[dict[str, float]] = []

    def advance(self, steps: int) -> None:
        """Go on until ``steps`` outer steps are done."""
        while not self.failed and self.step < steps:
            try:
                with self.clock:
                    self._step()
            except (HyperkronError, torch.linalg.LinAlgError):
                self.failed = True
            self.step += 1

    def _step(self) -> None:
        """T inner steps and, unless training is plain, one of λ; the last inner step is the algorithm's own."""
        for _ in range(self.case.inner_steps - (self.algorithm is not None)):
            self._inner()
        if self.algorithm is None or self.state is None:
            self.schedule.step()
            return
        direction = self.algorithm.step(self.state, self.batches).direction
        if direction > 0 and len(self.norms) < MEASURED:
            self.norms.append(direction)
            if len(self.norms) == MEASURED:
                relative = self.wanted * relative_step(self.norms, self.touched)
                self.state.outer.set_lr(relative if self.rate is None else self.rate)

    def _inner(self) -> None:
        batch = self.batches.inner()
        try:
            self.loop.step(batch)
        except RuntimeError as error:
            recording = self.loop._wants_graph and self.loop._recorded is None
            if isinstance(error, torch.OutOfMemoryError) or not recording:
                raise
            warn_once("text-graph", f"the inner steps could not be recorded ({error!s:.200}); they run eagerly.")
            TextTrial.records = False
            self.loop = InnerLoop(self.case.problem(), self.model, self.weights, self.loop.optimizer, graph=False)
            self.loop.step(batch)

    def look(self, test: bool) -> None:
        """Add a row to the curve, off the clock."""
        row: dict[str, float] = {"step": self.step}
        for name, part in (("second", self.split.second), *((("test", self.split.test),) if test else ())):
            loss, error = (math.inf, 1.0) if self.failed else loss_and_error(self.model, part)
            row[f"{name}_loss"], row[f"{name}_error"] = loss if math.isfinite(loss) else math.inf, error
        self.rows.append(row)

    def run(self, test: bool) -> None:
        """The whole run, looked at in equal distances and at its end."""
        for i in range(self.case.looks):
            self.advance(math.ceil(self.steps * (i + 1) / self.case.looks))
            if not self.rows or self.rows[-1]["step"] != self.step:
                self.look(test)

    def price(self, steps: int) -> float:
        """Seconds of an outer step, after those that measure the unit of λ and record the graph."""
        self.advance(WARM)
        before = self.clock.seconds
        self.advance(WARM + steps)
        if self.failed:
            raise HyperkronError(f"a step of {self.name} failed, so that it has no price; try another setting.")
        return (self.clock.seconds - before) / steps

    def figures(self) -> dict[str, Any]:
        """The curve, the row with the lowest second validation error, and how well weights tell right from wrong."""
        best = min(self.rows, key=lambda row: (row["second_error"], row["second_loss"]))
        bilevel = self.state is not None
        return {
            "failed": self.failed,
            "best": best,
            "last": self.rows[-1],
            "graph": self.loop._recorded is not None,
            "auc": order_auc(self.weights.weight, self.split.clean) if bilevel else None,
            "outer_rate": self.state.outer.lr if self.state is not None else None,
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
