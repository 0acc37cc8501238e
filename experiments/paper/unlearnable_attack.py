"""Unlearnable examples: the bilevel problem, the methods, and the training of attackers and victims.

    min_λ  mean max_{y' ≠ y} CE(θ*(λ); x, y')      subject to      θ*(λ) = argmin_θ mean CE(θ; clamp(x + g_λ(x)), y)

λ is a generator g of small perturbations. Whoever trains on the published images x + g_λ(x) should get a model that is
useless on clean ones. The outer loss is bounded: it is small where the model rules out no class but the true one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experiments.paper.unlearnable_networks import SampleNoise, UNet, cnn, crop_and_flip, published
from hyperkron import losses, trees
from hyperkron.algorithms import AID, BOME, Algorithm, Examples, InnerOnly, StepReport, StocBiO, Updates, derivatives
from hyperkron.algorithms.base import Count, State
from hyperkron.batches import BatchSources
from hyperkron.cleaning.models import resnet18
from hyperkron.hypergradient import cg, ekfac, kfac
from hyperkron.losses import Loss
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training import Box, Evaluate, Run, fit

Part = tuple[Tensor, Tensor]
Arm = Literal["printed", "own"]
Victim = Literal["CNN", "ResNet-18"]


@dataclass(frozen=True)
class Case:
    """Sizes and lengths.

    Attributes:
        unet, width, hidden: channels of the generator's and the CNN's first layers, and the CNN's hidden units.
        resnet: channels of ResNet-18's first stage.
        batch: of both levels; BOME has half of it, as printed.
        steps: of λ; of θ as many. BOME, whose step is that of ten others, makes a share of them.
        rate: step size of θ (SGD with momentum 0.9; BOME without).
        looks: how often a short run of a fresh CNN judges the attacker on held-out images; the best one is kept.
        scratch: epochs of such a run.
        epochs: of a victim's training, by victim.
        rounds: passes of error-minimising noise over all images, each with ten steps of θ before it.
        damping: of all hypergradients.
        padding: of crops.
        bome: BOME's share of the steps.
    """

    unet: int = 64
    width: int = 64
    hidden: int = 256
    resnet: int = 64
    batch: int = 512
    steps: int = 4900
    rate: float = 0.03
    looks: int = 10
    scratch: int = 5
    epochs: tuple[int, int] = (100, 100)
    victim_batch: int = 256
    rounds: int = 20
    damping: float = 1e-3
    padding: int = 4
    bome: float = 1.0


@dataclass(frozen=True)
class Data:
    """Images in [0, 1] with labels: those to be published, held-out ones that judge attackers, and the test images."""

    train: Part
    held_out: Part
    test: Part

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.train[0].device

    @property
    def size(self) -> int:
        """Pixels along an edge."""
        return int(self.train[0].shape[-1])


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


def sampled(part: Part, size: int, seed: int, padding: int = 0) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """A function that returns random batches: images, labels, and the numbers of the images; epoch after epoch.

    Where ``padding`` is positive, the images of an epoch are shifted and mirrored, all at once.
    """
    x, y = part
    generator = torch.Generator(x.device).manual_seed(seed)
    size = min(size, len(x))

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(x), device=x.device, generator=generator)[: len(x) // size * size]
            if not padding:
                yield from ((x[index], y[index], index) for index in order.split(size))
                continue
            images = crop_and_flip(x[order], padding, generator)
            yield from zip(images.split(size), y[order].split(size), order.split(size), strict=True)

    return batches().__next__


def seeded(make: Callable[[], nn.Module], seed: int, device: torch.device) -> Any:
    """A network with the initial weights of a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().to(device)


def _half(device: torch.device) -> torch.dtype | None:
    return torch.bfloat16 if device.type == "cuda" else None


def train(network: nn.Module, part: Part, steps: int, *, batch: int, rate: float, padding: int, seed: int) -> None:
    """Plain training in one cycle of the step size, with crops and mirror images where ``padding`` is positive."""
    device = part[0].device
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1, cycle_momentum=False)
    fit(
        BilevelProblem(lambda m, _, b: losses.cross_entropy(m(b[0]), b[1])),
        network,
        None,
        InnerOnly(report_every=steps),
        sampled(part, batch, seed, padding),
        steps=steps,
        seed=None,
        graph=True,
        inner_optimizer=Updates(optimizer, cycle, autocast=_half(device)),
    )


@torch.no_grad()
def accuracy(network: nn.Module, part: Part) -> float:
    """The share of images in per cent whose class is found."""
    network.eval()
    hits = [network(x).argmax(1).eq(y).sum() for x, y in zip(part[0].split(2000), part[1].split(2000), strict=True)]
    network.train()
    return 100 * float(torch.stack(hits).sum()) / len(part[1])


def classifier(case: Case, data: Data, seed: int, victim: Victim = "CNN") -> nn.Module:
    """A fresh victim."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "CNN": lambda: cnn(data.size, case.width, case.hidden),
        "ResNet-18": lambda: resnet18(width=case.resnet),
    }
    if victim not in makers:
        raise HyperkronError(f"victim={victim!r} is unknown; choose one of {', '.join(makers)}.")
    network: nn.Module = seeded(makers[victim], seed, data.device)
    return network


def judge(case: Case, data: Data, noise: nn.Module | None, seed: int) -> float:
    """Held-out accuracy in per cent of a CNN trained briefly on the published images: lower is a better attacker."""
    network = classifier(case, data, seed)
    part = published(noise, data.train[0]), data.train[1]
    batch = min(case.batch, len(part[1]))
    steps = case.scratch * max(1, len(part[1]) // batch)
    train(network, part, steps, batch=batch, rate=2 * case.rate, padding=0, seed=seed)
    return accuracy(network, data.held_out)


def victim_accuracy(case: Case, data: Data, noise: nn.Module | None, victim: Victim, seed: int) -> dict[str, float]:
    """A victim trained from scratch on the published images, with crops and mirror images: what it gets right."""
    network = classifier(case, data, 1000 + seed, victim)
    part = published(noise, data.train[0]), data.train[1]
    batch = min(case.victim_batch, len(part[1]))
    steps = case.epochs[victim != "CNN"] * max(1, len(part[1]) // batch)
    rate = 1.5 * case.rate if victim == "CNN" else 0.1
    train(network, part, steps, batch=batch, rate=rate, padding=case.padding, seed=seed)
    return {"test": accuracy(network, data.test), "published": accuracy(network, part)}


def start(
    case: Case, data: Data, method: str, arm: Arm, rate: float, radius: float, seed: int, callbacks: Any = ()
) -> Run:
    """A run of a method, prepared but not begun; its λ is ``run.state.hyper``.

    Args:
        arm: ``printed``: λ moves by SGD at ``rate``; ``own``: by Adam, whose steps do not depend on the scale of the
            hypergradient.
    """
    model = classifier(case, data, seed)
    size = case.batch // 2 if method == "BOME" else case.batch
    momentum = 0.0 if method == "BOME" else 0.9
    optimizer = torch.optim.SGD(model.parameters(), lr=case.rate, momentum=momentum)
    updates = Updates(optimizer, autocast=_half(data.device))
    shared = {"steps": 0, "seed": None, "graph": True, "record_failure": True, "callbacks": callbacks}
    if method == ERROR_MINIMISING:
        x, y = data.train
        noise = seeded(lambda: SampleNoise(len(x), tuple(x.shape[1:]), radius), seed, data.device)
        passes = Examples(x, y, torch.arange(len(x), device=x.device), batch_size=4 * case.batch, seed=seed)
        algorithm: Algorithm = ErrorMinimising(pass_length=len(passes), outer_rate=radius / 5, seed=seed)
        clip = Box(-radius, radius)
        batches = sampled(data.train, case.batch, seed)
        return fit(
            PROBLEM, model, noise, algorithm, batches, passes, inner_optimizer=updates, projection=clip, **shared
        )
    noise = seeded(lambda: UNet(radius, case.unet), seed, data.device)
    kind: Any = torch.optim.SGD if arm == "printed" else torch.optim.Adam
    return fit(
        PROBLEM,
        model,
        noise,
        METHODS[method](case.damping, seed),
        sampled(data.train, size, seed),
        sampled(data.train, size, seed + 100),
        inner_optimizer=updates,
        outer_optimizer=kind(noise.parameters(), lr=rate),
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


def attack(
    case: Case, data: Data, method: str, arm: Arm, rate: float, radius: float, seed: int, steps: int | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Train an attacker: the perturbations that were best on held-out images, and what became of λ on the way.

    Where the run failed before it could be judged, λ is as it began.

    Args:
        steps: of λ; ``None`` for those of the case, or of ``case.rounds`` for error-minimising noise.
    """
    selection = Selection(case, data, seed)
    run = start(case, data, method, arm, rate, radius, seed, [selection])
    noise = run.state.hyper
    part = data.train[0][:CHANGED]
    first = published(noise, part)
    begin = {name: x.detach().clone() for name, x in noise.state_dict().items()}
    if method == ERROR_MINIMISING:
        steps = case.rounds * int(getattr(run.algorithm, "pass_length", 1))
    steps = case.steps if steps is None else steps
    run.advance(max(1, round(steps * case.bome)) if method == "BOME" else steps)
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
        "noise_moved": float((last - first).square().mean().sqrt()) / radius,
        "noise_size": float((last - part).square().mean().sqrt()) / radius,
        "direction": statistics.median(directions) if directions else None,
        "failure": None if run.failure is None else f"{type(run.failure).__name__}: {run.failure}"[:200],
    }


CHANGED = 500
"""Images whose perturbations are compared before and after."""


def prices(case: Case, data: Data, methods: Sequence[str], steps: int, blocks: int = 5) -> dict[str, float]:
    """Seconds of one step of λ with its steps of θ: the median of ``blocks`` measurements of each method.

    The methods take turns, so that others who use the device slow them all down alike and their ratios hold.
    """
    runs = {name: start(case, data, name, "own", 1e-4, 25 / 255, 0) for name in methods}
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
