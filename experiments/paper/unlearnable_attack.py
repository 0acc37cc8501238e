"""Unlearnable examples: the bilevel problem, the methods, and the training of attackers.

    min_λ  mean max_{y' ≠ y} CE(θ*(λ); x, y')      subject to      θ*(λ) = argmin_θ mean CE(θ; clamp(x + g_λ(x)), y)

λ is a generator g of small perturbations. Whoever trains on the published images x + g_λ(x) should get a model that is
useless on clean ones. The outer loss is bounded: it is small where the model rules out no class but the true one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments.paper import costs
from experiments.paper.networks import seeded
from experiments.paper.unlearnable_networks import SampleNoise, UNet, published
from experiments.paper.unlearnable_victims import Case, Data, Sampled, classifier, half_precision, judge
from hyperkron import losses, trees
from hyperkron.algorithms import (
    AID,
    BOME,
    Algorithm,
    Examples,
    InnerOnly,
    StepReport,
    StocBiO,
    Updates,
    derivatives,
)
from hyperkron.algorithms.base import Count, State
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import cg, ekfac, kfac
from hyperkron.losses import Loss
from hyperkron.problem import BilevelProblem
from hyperkron.training import Box, Checkpoint, Evaluate, Run, fit

Arm = Literal["printed", "own", "long"]


def least_likely(output: Tensor, target: Tensor) -> Loss:
    """The bounded surrogate of −CE: mean max_{y' ≠ y} CE(z, y').

    Example:
        >>> round(float(least_likely(torch.tensor([[0.0, 2.0, 1.0]]), torch.tensor([0]))), 4)  # the class is 2
        1.4076
    """
    other = output.detach().scatter(1, target[:, None], math.inf).argmin(1)
    return losses.cross_entropy(output, other)


def inner(model: nn.Module, noise: nn.Module, batch: Any) -> Loss:
    """CE on published images."""
    x, y, index = batch
    return losses.cross_entropy(model((x + noise(x, index)).clamp(0, 1)), y)


def outer(model: nn.Module, noise: nn.Module, batch: Any) -> Loss:
    """The surrogate on clean images."""
    x, y, _ = batch
    return least_likely(model(x), y)


PROBLEM = BilevelProblem(inner, outer)


@dataclass(frozen=True)
class ErrorMinimising(Algorithm):
    """Noise that makes the training loss small, so that nothing is left to learn: min over θ and over each δ_n.

        θ ← T steps on J_in                              before every pass over the images
        δ ← clip(δ − γ sign ∂_δ J_in, ±ε)     K times      on each batch of the pass

    Reference: Huang et al., "Unlearnable examples: making personal data unexploitable" (ICLR 2021).
    """

    inner_steps: Count = 10
    sign_steps: Count = 10
    pass_length: Count = 1

    def step(self, state: State, batches: BatchSources) -> StepReport:
        """One batch of a pass."""
        if state.step % self.pass_length == 0:
            derivatives.descend(state, batches, self.inner_steps)
        batch = batches.outer()
        for _ in range(self.sign_steps):
            found = derivatives.gradients(state, "inner", batch)
            state.outer.step(trees.map(torch.sign, found.hyper))
        return state.finish(found.value, found.hyper)


METHODS: dict[str, Callable[[float, int], Algorithm]] = {
    "AID-KFAC": lambda damping, seed: AID(kfac(damping, fisher="empirical", seed=seed, graph=True), 1, seed=seed),
    "AID-KFAC-mc": lambda damping, seed: AID(kfac(damping, seed=seed, graph=True), 1, seed=seed),
    "AID-EKFAC": lambda damping, seed: AID(ekfac(damping, refresh_every=10, seed=seed), 1, seed=seed),
    "AID-CG": lambda damping, seed: AID(cg(3, damping, graph=True), 1, seed=seed),
    "AID-CG-16": lambda damping, seed: AID(cg(16, damping, graph=True), 1, seed=seed),
    "stocBiO": lambda damping, seed: StocBiO(1, terms=3, step_size=0.1, seed=seed),
    "BOME": lambda damping, seed: BOME(10, eta=1.5, seed=seed),
}
"""Bilevel methods. AID-KFAC has the empirical Fisher matrix, as printed; a step of θ and one of λ take turns."""
PRINTED_RATE = {"BOME": 0.1}
"""The printed step size of λ (SGD); 1 for the others."""
NO_NOISE, UNTRAINED, ERROR_MINIMISING = "None", "Untrained generator", "EM"


@dataclass(frozen=True)
class Attack:
    """How an attacker is trained.

    Attributes:
        method: one of ``METHODS``, :data:`ERROR_MINIMISING`, or :data:`~experiments.paper.costs.FOLLOWER`.
        arm: ``printed``: λ moves by SGD at ``rate``; ``own`` and ``long``: by Adam, whose steps do not depend on the
            scale of the hypergradient.
        rate: step size of λ.
        radius: ε.
        seed: of θ, λ and the batches.
    """

    method: str
    arm: Arm
    rate: float
    radius: float
    seed: int


def first_noise(case: Case, data: Data, given: Attack) -> nn.Module:
    """λ as an attack begins: free noise for error-minimising noise, else a generator."""
    shape, radius = tuple(data.train[0].shape), given.radius
    free = given.method == ERROR_MINIMISING
    noise: nn.Module = seeded(
        lambda: SampleNoise(shape[0], shape[1:], radius) if free else UNet(radius, case.unet), given.seed, data.device
    )
    return noise


def start(
    case: Case, data: Data, given: Attack, callbacks: Any = (), *, steps: int = 0, folder: Path | None = None
) -> Run:
    """A run of an attack, after ``steps``, perhaps continued from ``folder``; its λ is ``run.state.hyper``."""
    method, seed, radius = given.method, given.seed, given.radius
    model, noise = classifier(case, data, seed), first_noise(case, data, given)
    size = case.batch // 2 if method == "BOME" else case.batch
    momentum = 0.0 if method == "BOME" else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate, momentum=momentum)
    updates = Updates(optimizer, autocast=half_precision(data.device))
    shared = {"steps": steps, "seed": None, "graph": True, "record_failure": True, "callbacks": callbacks}
    shared |= {"inner_optimizer": updates, "resume": folder}
    if method == ERROR_MINIMISING:
        x, y = data.train
        passes = Examples(x, y, torch.arange(len(x), device=x.device), batch_size=4 * case.batch, seed=seed)
        algorithm: Algorithm = ErrorMinimising(pass_length=len(passes), outer_rate=radius / 5, seed=seed)
        batches, clip = Sampled(data.train, case.batch, seed), Box(-radius, radius)
        return fit(PROBLEM, model, noise, algorithm, batches, passes, projection=clip, **shared)
    kind: Any = torch.optim.SGD if given.arm == "printed" else torch.optim.Adam
    return fit(
        PROBLEM,
        model,
        noise,
        InnerOnly(1, seed=seed) if method == costs.FOLLOWER else METHODS[method](case.damping, seed),
        Sampled(data.train, size, seed),
        Sampled(data.train, size, seed + 100),
        outer_optimizer=kind(noise.parameters(), lr=given.rate),
        **shared,
    )


class Selection(Evaluate):
    """Judges the attacker several times on held-out images and keeps the best one.

    Attributes:
        best: its accuracy, its step and its λ; ``None`` where no attacker could be judged.
    """

    def __init__(self, case: Case, data: Data, seed: int) -> None:
        super().__init__(self._look, times=case.looks)
        self.case, self.data, self.seed = case, data, seed
        self.best: tuple[float, int, dict[str, Tensor]] | None = None

    def _look(self, run: Run) -> dict[str, Any] | None:
        noise = run.state.hyper
        if not bool(published(noise, self.data.train[0][:CHANGED]).isfinite().all()):
            return None
        found = judge(self.case, self.data, noise, self.seed)
        if self.best is None or found < self.best[0]:
            kept = {name: x.detach().clone() for name, x in noise.state_dict().items()}
            self.best = found, run.state.step, kept
        return {"held_out": found}

    def state_dict(self) -> dict[str, Any]:
        """What was seen, and the best attacker."""
        best = {} if self.best is None else dict(zip(("score", "step", "noise"), self.best, strict=True))
        return {**super().state_dict(), "best": best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict`."""
        super().load_state_dict(state)
        best = state["best"]
        self.best = (best["score"], best["step"], best["noise"]) if best else None


def length(case: Case, data: Data, method: str) -> int:
    """Steps of a whole attack."""
    if method == ERROR_MINIMISING:
        return case.rounds * math.ceil(len(data.train[1]) / (4 * case.batch))
    return case.steps


def attack(
    case: Case, data: Data, given: Attack, steps: int | None = None, folder: Path | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Train an attacker: the perturbations that were best on held-out images, and what became of λ on the way.

    Where the run failed before it could be judged, λ is as it began.

    Args:
        steps: of λ; ``None`` for a whole attack. BOME makes its share of them.
        folder: the run is saved here from time to time and continues from there.
    """
    steps = length(case, data, given.method) if steps is None else steps
    steps = max(1, round(steps * case.bome)) if given.method == "BOME" else steps
    selection = Selection(case, data, given.seed)
    saving = [] if folder is None else [Checkpoint(folder, every=max(1, steps // SAVES), keep=1)]
    noise = first_noise(case, data, given)
    part = data.train[0][:CHANGED]
    first = published(noise, part)
    begin = {name: x.detach().clone() for name, x in noise.state_dict().items()}
    callbacks = [selection, *saving]
    run = start(case, data, given, callbacks, steps=steps, folder=folder)
    noise = run.state.hyper
    directions = [float(x) for row in run.history.to_rows() if (x := row.get("direction")) is not None]
    noise.load_state_dict(begin if selection.best is None else selection.best[2])
    change = {name: p.detach() - begin[name] for name, p in run.state.hypers.items()}
    size = trees.norm({name: begin[name] for name in change})
    last = published(noise, part)
    return noise, {
        "held_out": None if selection.best is None else selection.best[0],
        "step": None if selection.best is None else selection.best[1],
        "steps": run.state.step,
        "curve": [[row["step"], row["held_out"]] for row in selection.rows],
        "moved": float(trees.norm(change) / size),
        "noise_moved": float((last - first).square().mean().sqrt()) / given.radius,
        "noise_size": float((last - part).square().mean().sqrt()) / given.radius,
        "direction": statistics.median(directions) if directions else None,
        "failure": None if run.failure is None else f"{type(run.failure).__name__}: {run.failure}"[:200],
    }


CHANGED = 500
"""Images whose perturbations are compared before and after."""
SAVES = 40
"""How often an attack is saved on its way."""


def prices(case: Case, data: Data, methods: Sequence[str], steps: int, blocks: int = 5) -> dict[str, float]:
    """Seconds of one step of λ with its steps of θ: the median of ``blocks`` measurements of each method.

    The methods take turns, so that others who use the device slow them all down alike and their ratios hold.
    """
    runs = {name: start(case, data, Attack(name, "own", 1e-4, 25 / 255, 0)) for name in methods}
    found: dict[str, list[float]] = {name: [] for name in methods}
    for run in runs.values():
        run.advance(1 + steps // 3, seconds=math.inf)
    for _ in range(blocks):
        for name, run in runs.items():
            before = run.seconds
            run.advance(steps, seconds=math.inf)
            found[name].append((run.seconds - before) / steps)
    for run in runs.values():
        if run.failure is not None:
            raise run.failure
    return {name: statistics.median(values) for name, values in found.items()}
