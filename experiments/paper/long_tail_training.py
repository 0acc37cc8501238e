"""One run on a long-tailed data set: losses for imbalance, and a Meta-Weight-Net with several hypergradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hyperkron as hk
from experiments.paper.long_tail_data import Augmented, LongTail, Part, class_shares
from experiments.paper.networks import resnet32
from hyperkron.algorithms import AID, T1T2, InnerOnly, StepReport, Updates
from hyperkron.algorithms.base import Algorithm
from hyperkron.training import Callback, Evaluate, Run

SAVES = 20
"""How often a run is saved on its way."""
LOSSES = tuple(0.25 * i for i in range(41))
"""Where the weight of a loss is recorded: 0 to 10."""


@dataclass(frozen=True)
class Case:
    """What all methods share; the defaults are the printed ones.

    Attributes:
        batch, rate, momentum, decay: of SGD with Nesterov's momentum on θ.
        inner_steps: steps of θ between two of λ (T1–T2 has one).
        hidden: units of the weight network.
        damping: of KFAC and EKFAC.
        alpha: SAMA's radius.
        basis_every: outer steps that an eigenbasis of EKFAC serves.
        width, blocks: of the network; ResNet-32 has 16 and 5.
        shift: pixels by which training images are shifted.
        looks: evaluations of a run.
    """

    batch: int = 100
    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 5e-4
    inner_steps: int = 10
    hidden: int = 100
    damping: float = 1e-3
    alpha: float = 0.1
    basis_every: int = 10
    width: int = 16
    blocks: int = 5
    shift: int = 4
    looks: int = 10


@dataclass(frozen=True)
class Method:
    """A method and the one number that is tuned.

    Attributes:
        name: in the tables.
        tuned: what the number is.
        usual: its printed or published value.
        grid: values tried.
        make: for a learned weight network: the algorithm, from the case, the optimizer of θ and a seed; or
        loss: for a plain loss: the loss of a batch, from the images of each class, the number and whether training has
            reached the first drop of the step size.
    """

    name: str
    tuned: str = ""
    usual: float = 0.0
    grid: tuple[float, ...] = ()
    make: Callable[[Case, torch.optim.Optimizer, int], Algorithm] | None = None
    loss: Callable[[Sequence[int], float, Tensor], Callable[[Tensor, Tensor], Tensor]] | None = None


def _base(sizes: Sequence[int], value: float, late: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Softmax cross-entropy."""
    return F.cross_entropy


def _focal(sizes: Sequence[int], value: float, late: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """mean (1 − p_y)^γ · (−log p_y)  (Lin et al., 2017)."""

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        each = F.cross_entropy(logits, y, reduction="none")
        return ((-torch.expm1(-each)).clamp(min=1e-12) ** value * each).mean()

    return loss


def effective_weights(sizes: Sequence[int], beta: float, device: torch.device) -> Tensor:
    """(1 − β)/(1 − β^n_c) for each class, scaled to mean 1 (Cui et al., 2019)."""
    found = torch.tensor([(1 - beta) / (1 - beta**n) for n in sizes], dtype=torch.float32, device=device)
    return found / found.mean()


def _class_balanced(sizes: Sequence[int], value: float, late: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy weighted by the effective number of images of a class."""
    weights = effective_weights(sizes, value, late.device)
    return lambda logits, y: F.cross_entropy(logits, y, weight=weights)


def _adjusted(sizes: Sequence[int], value: float, late: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy of logits + τ log π_c, with π the shares of the classes (Menon et al., 2021)."""
    shift = value * class_shares(sizes, late.device).log()
    return lambda logits, y: F.cross_entropy(logits + shift, y)


def _deferred(sizes: Sequence[int], value: float, late: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross-entropy, class-balanced from the first drop of the step size on (Cao et al., 2019)."""
    weights = effective_weights(sizes, value, late.device)
    return lambda logits, y: F.cross_entropy(logits, y, weight=torch.lerp(torch.ones_like(weights), weights, late))


RATES = (1e-5, 1e-4, 1e-3, 1e-2)
"""Step sizes of λ with Adam; the first is the printed one."""
BETAS = (0.99, 0.999, 0.9999)


def _learned(name: str, make: Callable[[Case, torch.optim.Optimizer, int], Algorithm]) -> Method:
    return Method(f"MWN + {name}", "Adam's step size", 1e-5, RATES, make=make)


METHODS = {
    method.name: method
    for method in (
        Method("Base", loss=_base),
        Method("Focal", "γ", 1.0, (0.5, 1.0, 2.0), loss=_focal),
        Method("Class-balanced", "β", 0.9999, BETAS, loss=_class_balanced),
        Method("Logit adjustment", "τ", 1.0, (0.5, 1.0, 2.0), loss=_adjusted),
        Method("Deferred re-weighting", "β", 0.9999, BETAS, loss=_deferred),
        _learned("T1–T2", lambda case, optimizer, seed: T1T2(cross="auto", graph=True, seed=seed)),
        _learned(
            "SAMA",
            lambda case, optimizer, seed: AID(hk.sama(optimizer, alpha=case.alpha, graph=True), case.inner_steps),
        ),
        _learned(
            "KFAC-emp",
            lambda case, optimizer, seed: AID(
                hk.kfac(case.damping, fisher="empirical", seed=seed, graph=True), case.inner_steps
            ),
        ),
        _learned(
            "KFAC-mc",
            lambda case, optimizer, seed: AID(hk.kfac(case.damping, seed=seed, graph=True), case.inner_steps),
        ),
        _learned(
            "EKFAC",
            lambda case, optimizer, seed: AID(
                hk.ekfac(case.damping, seed=seed, basis_every=case.basis_every, graph=case.basis_every > 1),
                case.inner_steps,
            ),
        ),
    )
}


def weighted(model: nn.Module, net: nn.Module, batch: Part) -> hk.losses.Loss:
    """J_in: mean of w(ℓ_n; λ) · ℓ_n, with the losses detached inside w."""
    logits = model(batch[0])
    each = hk.losses.cross_entropy(logits, batch[1]).per_example
    return hk.losses.cross_entropy(logits, batch[1], weight=net(each))


def plain(model: nn.Module, net: nn.Module, batch: Part) -> hk.losses.Loss:
    """J_out: cross-entropy on the meta images."""
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


class Late(Callback):
    """Sets ``late`` to 1 after ``steps`` steps, also in a run that is continued."""

    def __init__(self, late: Tensor, steps: int) -> None:
        self.late, self.steps = late, steps

    def on_start(self, run: Run) -> None:
        """Before the first step."""
        self.late.fill_(float(run.state.step >= self.steps))

    def on_step(self, run: Run, report: StepReport) -> None:
        """After every step."""
        if run.state.step == self.steps:
            self.late.fill_(1.0)


class Training:
    """A run that has not begun; :meth:`train` does it all, :meth:`price` times a few steps.

    Args:
        case: what all methods share.
        data: on the device of the run.
        method, value: the method and its number.
        epochs: of the training images; the step size of θ drops at 80 and 90 % of them.
        seed: of the network, the batches and the weight network.
    """

    def __init__(self, case: Case, data: LongTail, method: Method, value: float, epochs: float, seed: int) -> None:
        self.case, self.data, self.method, self.value, self.seed = case, data, method, value, seed
        self.device = data.train[0].device
        classes = len(data.counts)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = resnet32(classes, case.width, case.blocks).to(self.device)
            self.net = hk.MetaWeightNet(case.hidden, normalise=True).to(self.device)
        self.first = self.curve()
        self.late = torch.zeros((), device=self.device)
        self.batches = Augmented(data.train, case.batch, shift=case.shift, seed=seed)
        self.meta = Augmented(data.meta, case.batch, shift=case.shift, seed=seed + 1)
        single = method.make is not None and "T1" in method.name
        self.inner_steps = 1 if single else case.inner_steps
        self.steps = max(1, round(epochs * len(self.batches) / self.inner_steps))
        self.updates = self.steps * self.inner_steps

    def _fit(self, steps: int, **options: Any) -> Run:
        """``hk.fit`` for this many steps of the algorithm."""
        case, drops = self.case, [int(share * self.updates) for share in (0.8, 0.9)]
        optimizer = torch.optim.SGD(
            self.model.parameters(), case.rate, momentum=case.momentum, weight_decay=case.decay, nesterov=True
        )
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, drops)
        common = {
            "steps": steps,
            "graph": True,
            "record_failure": True,
            "seed": None,
            "inner_optimizer": Updates(optimizer, scheduler, schedule="update"),
            **options,
        }
        if self.method.make is None:
            assert self.method.loss is not None
            loss = self.method.loss(self.data.counts, self.value, self.late)
            problem = hk.BilevelProblem(lambda model, _, batch: loss(model(batch[0]), batch[1]))
            rule = InnerOnly(self.inner_steps, report_every=max(1, self.steps // 20))
            return hk.fit(problem, self.model, None, rule, self.batches, **common)
        algorithm = self.method.make(case, optimizer, self.seed)
        outer = torch.optim.Adam(self.net.parameters(), self.value)
        problem = hk.BilevelProblem(weighted, plain)
        return hk.fit(
            problem, self.model, self.net, algorithm, self.batches, self.meta, outer_optimizer=outer, **common
        )

    def prepare(self) -> Run:
        """A run that has taken no step yet."""
        return self._fit(0)

    def price(self, timed: int, warm: int = 4) -> dict[str, Any]:
        """Seconds of an outer iteration (``inner_steps`` steps of θ and one of λ), the device waited for; and whether
        θ's steps were replayed as a CUDA graph.
        """
        run = self._fit(warm, seconds=math.inf)
        before = run.seconds
        run.advance(timed, seconds=math.inf)
        if run.failure is not None:
            raise run.failure
        seconds, steps = (run.seconds - before) / timed, self.inner_steps
        return {
            "seconds": seconds,
            "inner_steps": steps,
            "update": seconds / steps,
            "graph": run.state.loop.recorded,
        }

    def train(self, *, test: bool, folder: Path | None = None) -> dict[str, Any]:
        """Train to the end; what became of the network and the weights.

        Args:
            test: whether test images are looked at.
            folder: the run is saved here from time to time and continues from there.
        """
        parts = {"held_out": self.data.held_out, **({"test": self.data.test} if test else {})}

        def look(run: Run) -> dict[str, Any]:
            return {name: float(accuracies(self.model, part).mean()) for name, part in parts.items()}

        looks = Evaluate(look, times=self.case.looks)
        callbacks: list[Callback] = [looks, Late(self.late, max(1, int(0.8 * self.steps)))]
        if folder is not None:
            callbacks.append(hk.Checkpoint(folder, every=max(1, self.steps // SAVES), keep=1))
        run = self._fit(self.steps, callbacks=callbacks, resume=folder)
        loss = mean_loss(self.model, self.data.held_out)
        if run.failure is not None or not math.isfinite(loss):
            return {"failed": str(run.failure or "the held-out loss is not finite")}
        rows: list[dict[str, Any]] = [*looks.rows]
        curve = {name: [row[name] for row in rows] for name in parts}
        found = {
            "failed": "",
            "updates": self.updates,
            "outer_steps": self.steps if self.method.make is not None else 0,
            "held_out": curve["held_out"][-1],
            "held_out_loss": loss,
            "graph": run.state.loop.recorded,
            "curve": {"epoch": [row["step"] * self.inner_steps / len(self.batches) for row in rows], **curve},
        }
        if test:
            found |= {
                "test": curve["test"][-1],
                "best_test": max(curve["test"]),
                "per_class": accuracies(self.model, self.data.test).tolist(),
            }
        return found | (self._weights() if self.method.make is not None else {})

    def curve(self) -> list[float]:
        """The weights of :data:`LOSSES`, divided by their mean."""
        with torch.no_grad():
            found = self.net(torch.tensor(LOSSES, device=self.device))
        return [round(x, 4) for x in found.tolist()]

    def _weights(self) -> dict[str, Any]:
        """The learned curve, how far it moved, and the mean weight of the training images of each class."""
        last = self.curve()
        each = losses_of(self.model, self.data.train)
        with torch.no_grad():
            weights = self.net(each)
        y = self.data.train[1]
        by_class = [round(float(weights[y == c].mean()), 4) for c in range(len(self.data.counts))]
        return {
            "first_weights": self.first,
            "last_weights": last,
            "moved": max(abs(a - b) for a, b in zip(self.first, last, strict=True)),
            "class_weights": by_class,
        }


@torch.no_grad()
def outputs(model: nn.Module, part: Part, batch: int = 1000) -> Tensor:
    """Logits in evaluation mode; the model's mode is left as it was."""
    was = model.training
    model.eval()
    try:
        with torch.backends.cudnn.flags(benchmark=False, allow_tf32=True):  # no search for kernels of odd batches
            return torch.cat([model(x) for x in part[0].split(batch)])
    finally:
        model.train(was)


def accuracies(model: nn.Module, part: Part) -> Tensor:
    """The share of each class that is classified right."""
    right = (outputs(model, part).argmax(1) == part[1]).double()
    return (part[1].bincount(right) / part[1].bincount().clamp(min=1)).cpu()


def losses_of(model: nn.Module, part: Part) -> Tensor:
    """The cross-entropy of each image."""
    return F.cross_entropy(outputs(model, part), part[1], reduction="none")


def mean_loss(model: nn.Module, part: Part) -> float:
    """The mean cross-entropy."""
    return float(losses_of(model, part).mean())
