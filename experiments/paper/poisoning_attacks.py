"""How rows are poisoned in the benchmark: TGDA, BOME, label flipping, error-maximising noise; what cleaning finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments import trial
from experiments.paper import poisoning_problem as base
from experiments.paper.costs import FOLLOWER
from experiments.paper.poisoning_problem import CLASSES, Case, Part, Shuffled, Split, Starts, accuracy, joined
from experiments.paper.tuning import Setting
from hyperkron import losses
from hyperkron.algorithms import BOME, TGDA, InnerOnly
from hyperkron.algorithms.base import Algorithm
from hyperkron.cleaning import CleanConfig, clean
from hyperkron.hypergradient import Hypergradient, cg, ekfac, kfac
from hyperkron.solution import Status
from hyperkron.training import Callback, Checkpoint, Run, fit

WARM = 4
"""Steps before the time of a step is taken; the first ones record CUDA graphs."""
CG_ITERATIONS = 16
SAVES = 40
"""How often an attack is saved on its way."""

Made = Callable[[Case, float, int], Algorithm]


def _tgda(make: Callable[[float, int], Hypergradient]) -> Made:
    """TGDA with a hypergradient that is made for a damping and a seed."""
    return lambda case, damping, seed: TGDA(make(damping, seed), case.inner_steps)


ALGORITHMS: dict[str, Made] = {
    "TGDA-CG": _tgda(lambda damping, seed: cg(CG_ITERATIONS, damping, graph=True)),
    "TGDA-KFAC-EMP": _tgda(lambda damping, seed: kfac(damping, fisher="empirical", seed=seed, graph=True)),
    "TGDA-KFAC": _tgda(lambda damping, seed: kfac(damping, seed=seed, graph=True)),
    "TGDA-EKFAC": _tgda(lambda damping, seed: ekfac(damping, refresh_every=10, seed=seed, graph=True)),
    "BOME": lambda case, damping, seed: BOME(max(1, case.inner_steps // 2), 0.5),
}
"""The bilevel methods; without a GPU ``graph`` has no effect. CG's matrix is the Hessian of J_in."""


@dataclass(frozen=True)
class Poison:
    """The added rows, and what became of λ: ``facts`` are plain values for the record."""

    rows: Part
    facts: dict[str, Any]


def prepare(
    case: Case,
    split: Split,
    starts: Callable[[int], tuple[nn.Module, nn.Module]],
    name: str,
    setting: Setting,
    seed: int,
    *,
    relative: bool,
    folder: Path | None = None,
    **options: Any,
) -> Run:
    """A run of a bilevel method that has taken no step yet, or those of the last time.

    Args:
        starts: leader and follower of a seed.
        setting: ``inner``, ``outer`` and ``damping``.
        relative: ``outer`` is the root mean square by which the first step moves λ, not SGD's step size.
        folder: the run is saved here from time to time and continues from there.
    """
    lead, follower = starts(seed)
    algorithm = InnerOnly(case.inner_steps) if name == FOLLOWER else ALGORITHMS[name](case, setting["damping"], seed)
    count = sum(p.numel() for p in lead.parameters())
    rate = trial.TINY if relative else setting["outer"]
    callbacks: list[Callback] = [trial.RelativeStep(setting["outer"], count)] if relative else []
    if folder is not None:
        callbacks.append(Checkpoint(folder, every=max(1, case.steps // SAVES), keep=1))
    run = fit(
        base.problem(case.share),
        follower,
        lead,
        algorithm,
        base.Both(split, case, seed),
        Shuffled(split.validation, case.batch, seed + 2),
        steps=0,
        resume=folder,
        inner_optimizer=torch.optim.SGD(follower.parameters(), lr=setting["inner"]),
        outer_optimizer=torch.optim.SGD(lead.parameters(), lr=rate),
        callbacks=callbacks,
        graph=True,
        record_failure=True,
        seed=None,
        **options,
    )
    base.FixedRows(lead, split.origin, case.share).attach(run)
    return run


def bilevel(
    case: Case,
    split: Split,
    starts: Starts,
    name: str,
    setting: Setting,
    seed: int,
    *,
    relative: bool,
    part: float = 1,
    folder: Path | None = None,
) -> Poison:
    """Rows of a leader trained by a bilevel method for ``part`` of the case's steps.

    A run that fails on the way has made no rows: the copies that the leader began with are added. ``folder`` as in
    :func:`prepare`.
    """
    run = prepare(case, split, starts, name, setting, seed, relative=relative, folder=folder)
    before, _ = starts(seed)
    error, steps = "", max(trial.MEASURED + 1, math.ceil(part * case.steps))
    try:
        if run.state.step < steps:
            run.advance(steps - run.state.step)
    except RuntimeError as found:  # of the device; other runs go on
        error = f"{found!s:.200}"
    after = run.state.hyper
    first, rows = base.made(before, split.origin), base.made(after, split.origin)
    failed = bool(error) or run.failure is not None or not bool(torch.isfinite(rows).all())
    facts = {
        "failed": failed,
        "error": error or run.stopped or "",
        "steps": run.state.step,
        "indefinite": _share(run, Status.NONPOSITIVE_CURVATURE),
        "rate": float(run.state.outer.optimizer.param_groups[0]["lr"]),
        "moved": None if failed else base.distance(list(after.parameters()), list(before.parameters())),
        "pixels": None if failed else float((rows - first).square().mean().sqrt()),
    }
    return Poison((first if failed else rows, split.origin[1]), facts)


def _share(run: Run, status: Status) -> float:
    """Of the steps that ended with a status: where CG met a negative curvature it stopped early."""
    return sum(row.get("status") == status.name for row in run.history.to_rows()) / max(1, len(run.history))


def flipped(split: Split) -> Poison:
    """Copies of training rows under wrong labels, y → 9 − y."""
    x, y = split.origin
    return Poison((x, CLASSES - 1 - y), {"failed": False})


class Noise(nn.Module):
    """Rows x + bound · tanh(ν) cut off at ±1, with ν learned."""

    def __init__(self, x: Tensor, bound: float) -> None:
        super().__init__()
        self.x, self.bound = x, bound
        self.value = nn.Parameter(torch.zeros_like(x))

    def forward(self) -> Tensor:
        """The rows."""
        return (self.x + self.bound * self.value.tanh()).clamp(-1, 1)


def error_maximising(case: Case, split: Split, starts: Starts, bound: float, seed: int) -> Poison:
    """Copies of training rows with noise that maximises the loss of the pretrained follower, labels kept.

    The noise takes ``case.epochs`` steps of Adam.

    Reference: Fowl et al., "Adversarial examples make strong poisons" (NeurIPS 2021).
    """
    _, follower = starts(seed)
    follower.requires_grad_(False)
    x, y = split.origin
    noise = Noise(x, bound)
    trial.train(
        noise,
        lambda rows, batch: -losses.cross_entropy(follower(rows()), y) * len(y),
        None,
        torch.optim.Adam(noise.parameters(), lr=0.1),
        case.epochs,
    )
    rows = noise().detach()
    return Poison((rows, y), {"failed": False, "pixels": float((rows - x).square().mean().sqrt())})


def judged(case: Case, split: Split, poison: Poison | None, seed: int, *, test: bool = False) -> dict[str, Any]:
    """Accuracies in per cent of a network trained from scratch on clean and added rows."""
    rows = split.clean if poison is None else joined(split.clean, poison.rows)
    model = base.trained(case, rows, seed + 100)
    found = {"held_out": accuracy(model, split.held_out)}
    return {**found, "test": accuracy(model, split.test)} if test else found


def price(case: Case, split: Split, name: str, steps: int) -> float:
    """Seconds of one step of λ with its steps of θ (of ``FOLLOWER``: of these alone), without the first steps.

    Networks are not pretrained.
    """

    def starts(seed: int) -> tuple[nn.Module, nn.Module]:
        return base.leader(split.train, seed), base.network(case, split.train, seed)

    setting = {"inner": 0.01, "outer": 1e-6, "damping": 1e-3}
    run = prepare(case, split, starts, name, setting, 0, relative=False, clock=trial.clock_of(split.device))
    run.advance(WARM, seconds=math.inf)
    before = run.seconds
    run.advance(steps, seconds=math.inf)
    if run.failure is not None:
        raise run.failure
    return (run.seconds - before) / steps


# --- the defence --------------------------------------------------------------------------------------------


def pictures(x: Tensor) -> Tensor:
    """Rows in [−1, 1] as pictures of 0 to 255, on the CPU."""
    side = round(x[0].numel() ** 0.5) if x.ndim == 2 else 0
    shaped = x.reshape(-1, 1, side, side) if x.ndim == 2 else x
    return ((shaped + 1) * 127.5).round().to(torch.uint8).cpu()


def defended(case: Case, split: Split, poison: Poison, seed: int) -> dict[str, Any]:
    """What ``hyperkron clean`` finds in ``case.cleaned`` clean rows and ε of the added ones, and what that is worth.

    ``precision`` is the share of added rows among the suspects, ``recall`` the share of the added rows that are
    suspects; accuracies in per cent are those of the case's network trained on the clean rows alone, on all rows, and
    on all rows but the suspects.
    """
    generator = torch.Generator().manual_seed(seed)

    def some(part: Part, count: int) -> Part:
        chosen = torch.randperm(len(part[0]), generator=generator)[:count].to(part[0].device)
        return part[0][chosen], part[1][chosen]

    rows, added = some(split.clean, case.cleaned), some(poison.rows, round(case.share * case.cleaned))
    trusted, every = some(split.held_out, case.trusted), joined(rows, added)
    config = CleanConfig(seed=seed, compare=(), device=split.device.type)
    found = clean((pictures(every[0]), every[1].cpu()), (pictures(trusted[0]), trusted[1].cpu()), config=config)
    bad = torch.arange(len(every[0])) >= len(rows[0])
    suspect = torch.zeros(len(bad), dtype=torch.bool)
    suspect[found.suspects.cpu()] = True
    hits, kept = int((suspect & bad).sum()), (~suspect).to(split.device)
    small = replace(case, batch=min(case.batch, max(1, case.cleaned // 10)))
    sets = {"clean": rows, "poisoned": every, "defended": (every[0][kept], every[1][kept])}
    scores = {name: accuracy(base.trained(small, part, seed + 100), split.test) for name, part in sets.items()}
    return {
        "suspects": int(suspect.sum()),
        "added": int(bad.sum()),
        "precision": hits / max(1, int(suspect.sum())),
        "recall": hits / int(bad.sum()),
        **scores,
    }
