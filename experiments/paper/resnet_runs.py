"""One run of a network on CIFAR-10 with noisy labels, as long as the paper's: the data, the methods, and what is kept.

The set-up of the reference code: ResNet-18 with the 7×7 stem, 40 000 images of which half get a label drawn at random,
5000 trusted and 5000 held-out ones, ten inner steps, α = 5e-4, momentum 0.9 on θ and λ, weights within [0, 1] that
begin at 0.5. Batches of 500 divide all parts, so that every step has one shape and can be recorded as a CUDA graph.
Rows are drawn in a new order in every pass. Products are in TF32 for all methods. BatchNorm trains on the batch of each
evaluation, and its statistics advance in θ's own steps alone.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments import trial
from experiments.paper import cleaning, references
from experiments.paper.cleaning import Split
from experiments.paper.networks import cnn, seeded
from experiments.paper.tuning import Setting
from hyperkron.algorithms import AID, BOME, BSG1, BVFSM, MRBO, AmIGO, InnerOnly, Rate, StocBiO, StochasticNeumann
from hyperkron.algorithms.base import Algorithm, StepReport
from hyperkron.batches import Source
from hyperkron.curvature import GGN
from hyperkron.hyper import SampleWeights
from hyperkron.hypergradient import Hypergradient, cg, ekfac, gradient_descent, identity, kfac, neumann
from hyperkron.solution import HyperkronError
from hyperkron.training import Box, Callback, Run, fit
from support.resnet import resnet18

INNER_STEPS = 10
DECAY = 5e-4
MOMENTUM = 0.9
TAUS = (1, 5, 10, 50)
"""How many outer steps a curvature serves in table 2."""


Network = Literal["resnet18", "cnn"]


@dataclass(frozen=True)
class Size:
    """What a run is made of besides its method.

    Attributes:
        counts: noisy, trusted and held-out rows.
        batch: of both levels; divides the first two counts.
        width: channels of the first stage.
        looks: evaluations of a long run, of a trial half as many; further ones are early, where losses change fastest.
        network: ``resnet18`` with the 7×7 stem, or the three-layer ``cnn`` with half of ``width``.
    """

    counts: tuple[int, int, int] = (40_000, 5_000, 5_000)
    batch: int = 500
    width: int = 64
    looks: int = 25
    network: Network = "resnet18"


Make = Callable[[Setting, int], Algorithm]


def _aid(make: Callable[[Setting, int], Hypergradient]) -> Make:
    return lambda x, seed: AID(make(x, seed), INNER_STEPS, seed=seed)


def _mrbo(make: Callable[[Setting, int], Hypergradient]) -> Make:
    def algorithm(x: Setting, seed: int) -> Algorithm:
        inner, outer = Rate(x["inner"], 1 / 3), Rate(x["outer"], 1 / 3)
        return MRBO(make(x, seed), inner_rate=inner, outer_rate=outer, seed=seed)

    return algorithm


METHODS: dict[str, Make] = {
    "AID-KFAC": _aid(lambda x, seed: kfac(x["damping"], seed=seed, graph=True)),
    "AID-CG-3": _aid(lambda x, seed: cg(3, x["damping"], graph=True)),
    "AmIGO": lambda x, seed: AmIGO(
        inner_steps=INNER_STEPS,
        hypergradient=gradient_descent(10, step=x["step"], warm_start=True, graph=True),
        seed=seed,
    ),
    "MRBO": _mrbo(lambda x, seed: StochasticNeumann(10, x["step"], seed=seed)),
    "MRBO-KFAC": _mrbo(lambda x, seed: kfac(x["damping"], seed=seed, graph=True)),
    "AID-identity": _aid(lambda x, seed: identity(graph=True)),
    "AID-GGN-CG-3": _aid(lambda x, seed: cg(3, curvature=GGN(x["damping"]), graph=True)),
    "AID-Neumann-10": _aid(lambda x, seed: neumann(10, step=x["step"], graph=True)),
    "AID-GGN-CG-10": _aid(lambda x, seed: cg(10, curvature=GGN(x["damping"]), graph=True)),
    "AID-CG-10": _aid(lambda x, seed: cg(10, x["damping"], graph=True)),
    "BSG-1": lambda x, seed: BSG1(INNER_STEPS, x["epsilon"], seed=seed),
    "BOME": lambda x, seed: BOME(INNER_STEPS, x["eta"], seed=seed),
    "stocBiO": lambda x, seed: StocBiO(inner_steps=INNER_STEPS, step_size=x["step"], seed=seed),
    "BVFSM": lambda x, seed: BVFSM(INNER_STEPS, weight=x["weight"], seed=seed),
    **{
        f"AID-{name}-τ{tau}": _aid(
            lambda x, seed, make=make, tau=tau: make(x["damping"], refresh_every=tau, seed=seed, graph=True)  # type: ignore[misc]
        )
        for name, make in (("KFAC", kfac), ("EKFAC", ekfac))
        for tau in TAUS
        if (name, tau) != ("KFAC", 1)
    },
}
"""Each makes its algorithm from a setting; AmIGO with KFAC is AID with KFAC, because a direct solve leaves nothing to
amortise. AmIGO's ten steps of v share a batch, so that they can be recorded. Without a GPU ``graph`` has no effect.
"""

NO_MOMENTUM = ("BOME", "BVFSM", "MRBO", "MRBO-KFAC")
"""Methods whose θ has none, as in BOME's comparison; MRBO has momentum of its own kind on both levels."""


class Shuffled(Source):
    """Batches of rows on the device, in a new random order in every pass; all have one size."""

    def __init__(self, tensors: tuple[Tensor, ...], batch: int, seed: int) -> None:
        if len(tensors[0]) % batch:
            raise HyperkronError(f"batch={batch} does not divide {len(tensors[0])} rows; choose one that does.")
        self.tensors, self.batch = tensors, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.left: list[Tensor] = []

    def next(self) -> tuple[Tensor, ...]:
        if not self.left:
            order = torch.randperm(len(self.tensors[0]), generator=self.generator)
            self.left = list(order.to(self.tensors[0].device).split(self.batch))
        rows = self.left.pop()
        return tuple(x[rows] for x in self.tensors)

    def state_dict(self) -> dict[str, Any]:
        left = torch.cat(self.left).cpu() if self.left else torch.zeros(0, dtype=torch.long)
        return {"generator": self.generator.get_state(), "left": left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        left = state["left"].to(self.tensors[0].device)
        self.left = list(left.split(self.batch)) if len(left) else []


def network(seed: int, size: Size) -> nn.Module:
    """The network with the initial weights of ``seed``."""
    if size.network == "cnn":
        return seeded(lambda: cnn(width=size.width // 2), seed)
    return seeded(lambda: resnet18(stem="7x7", width=size.width), seed)


def prepare(
    name: str,
    setting: Setting,
    split: Split,
    seed: int,
    size: Size,
    callbacks: tuple[Callback, ...] = (),
) -> Run:
    """A run of a method or reference line that has taken no step yet.

    ``outer`` of the setting is relative: by how much the weights of a batch move in the first step that counts, as a
    root mean square (:class:`experiments.trial.RelativeStep`); ``absolute`` in its place is the step size itself.
    """
    model = network(seed, size).to(split.device)
    if name in references.KINDS:
        return _reference(name, setting, split, seed, size, model, callbacks)
    x, y = split.train
    weights = SampleWeights(len(x)).to(split.device)
    falling = name.startswith("MRBO")  # has its own rates, which fall
    inner = torch.optim.SGD(model.parameters(), setting["inner"], 0.0 if name in NO_MOMENTUM else MOMENTUM)
    outer = torch.optim.SGD(weights.parameters(), trial.TINY, MOMENTUM)
    rows = torch.arange(len(x), device=split.device)
    return fit(
        cleaning.problem(DECAY),
        model,
        weights,
        METHODS[name]({**setting, "outer": trial.TINY}, seed),
        Shuffled((x, y, rows), size.batch, seed),
        Shuffled(split.validation, size.batch, seed + 1),
        steps=0,
        inner_optimizer=None if falling else inner,
        outer_optimizer=None if falling else outer,
        projection=Box(0.0, 1.0),
        graph=True,
        callbacks=[trial.RelativeStep(setting.get("outer", 0.0), size.batch, setting.get("absolute")), *callbacks],
        record_failure=True,
        seed=None,
    )


def _reference(
    name: Any,
    setting: Setting,
    split: Split,
    seed: int,
    size: Size,
    model: nn.Module,
    callbacks: tuple[Callback, ...],
) -> Run:
    """Plain training on the rows of a reference line, ten steps at a time, with the decay of the inner problem."""
    x, y = references.rows_of(split, name)
    whole = len(x) - len(x) % size.batch
    ones = SampleWeights(1, init=1.0).to(split.device)
    zeros = torch.zeros(whole, dtype=torch.long, device=split.device)
    return fit(
        cleaning.problem(DECAY),
        model,
        ones,
        InnerOnly(INNER_STEPS),
        Shuffled((x[:whole], y[:whole], zeros), size.batch, seed),
        steps=0,
        inner_optimizer=torch.optim.SGD(model.parameters(), setting["inner"], MOMENTUM),
        graph=True,
        callbacks=list(callbacks),
        record_failure=True,
        seed=None,
    )


def looks(split: Split, size: Size, steps: int, test: bool) -> trial.Looks:
    """Evaluations at the beginning, often in the first tenth, then at equal distances."""
    every = max(1, steps // (size.looks if test else max(1, size.looks // 2)))
    at = {1, *range(0, steps // 10, max(1, every // 3)), *range(0, steps, every), steps}
    parts = {"second": split.second} | ({"test": split.test} if test else {})
    return trial.Looks(parts, cleaning.loss_and_error, at=at - {0}, start=True)


class Until(Callback):
    """Stops a run at a time of ``time.time()``."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def on_step(self, run: Run, report: StepReport) -> None:
        if time.time() > self.deadline:
            run.stop("the time is up")


def run(
    name: str,
    setting: Setting,
    split: Split,
    seed: int,
    steps: int,
    size: Size,
    *,
    test: bool,
    deadline: float = math.inf,
    saved: trial.Saved | None = None,
) -> dict[str, Any]:
    """One run of ``steps`` outer steps, or fewer at a ``deadline``: its curve, and what became of the weights.

    With ``saved`` it continues where an earlier one was cut off, and leaves no checkpoint when it is done.
    """
    seen = looks(split, size, steps, test)
    made = prepare(name, setting, split, seed, size, (seen, Until(deadline)))
    if saved is not None:
        saved.begin(made)
    begin = time.perf_counter()
    made.advance(max(0, steps - made.state.step), seconds=math.inf)
    rows = seen.of(made)
    if saved is not None and (made.failure is not None or made.state.step >= steps):
        saved.end()
    spent = time.perf_counter() - begin
    found = {
        "failed": made.failure is not None,
        "steps": made.state.step,
        "best": min(rows, key=lambda row: row["second_loss"]),
        "last": rows[-1],
        "seconds": round(spent, 2),
        "step_ms": step_ms(rows),
        **({} if name in references.KINDS else _weights(made, split, size)),
        "curve": {key: [float(f"{row[key]:.5g}") for row in rows] for key in rows[0]},
    }
    del made
    gc.collect()  # the memory of CUDA graphs goes with them
    if split.device.type == "cuda":
        torch.cuda.empty_cache()
    return found


def step_ms(rows: list[dict[str, Any]]) -> float:
    """Milliseconds of a step after the fifth, before which graphs are recorded; of all steps in a shorter run.

    Example:
        >>> step_ms([{"step": 0, "seconds": 0.0}, {"step": 6, "seconds": 3.0}, {"step": 10, "seconds": 3.2}])
        50.0
    """
    begin = next((row for row in rows[:-1] if row["step"] > 5), rows[0])
    return round(1e3 * (rows[-1]["seconds"] - begin["seconds"]) / max(1, rows[-1]["step"] - begin["step"]), 2)


def _weights(made: Run, split: Split, size: Size) -> dict[str, Any]:
    """How often weights were updated, and how well they find the right labels."""
    weights = next(made.state.hyper.parameters()).detach()
    updates = max(0, made.state.step - trial.MEASURED)
    right, wrong = weights[split.clean], weights[~split.clean]
    return {
        "rate": float(f"{made.state.outer.lr:.4g}"),
        "visits": round(updates * size.batch / len(weights), 3),
        "never": float((weights == 0.5).float().mean()),
        "moved": float((weights - 0.5).abs().mean()),
        "zero": float((weights <= 0).float().mean()),
        "one": float((weights >= 1).float().mean()),
        "mean_right": float(right.mean()),
        "mean_wrong": float(wrong.mean()),
        "f1": cleaning.f1(weights, split.clean),
    }


def step_times(name: str, setting: Setting, split: Split, size: Size, steps: int, warm: int = 6) -> dict[str, float]:
    """Milliseconds of an outer step after ``warm`` ones, in which graphs are recorded: median and mean.

    Where a curvature serves τ steps, the steps before are enough for two refreshes more, and the mean counts.
    """
    made = prepare(name, setting, split, 0, size)
    made.advance(warm)
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        made.advance(1, seconds=math.inf)
        times.append(1e3 * (time.perf_counter() - begin))
    if made.failure is not None:
        raise HyperkronError(f"{name} failed: {made.failure}")
    del made
    gc.collect()
    return {"median": round(sorted(times)[len(times) // 2], 2), "mean": round(sum(times) / len(times), 2)}
