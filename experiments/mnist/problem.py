"""MNIST hypercleaning as ``experiments/mnist/compare.py`` runs it: the data, the objectives, the methods, one run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hyperkron as hk
from experiments import records
from experiments.paper import networks
from experiments.paper.cleaning import Part, Split, loss_and_error, noisy_split, pretrain, problem
from experiments.paper.datasets import read_mnist
from experiments.trial import Looks
from hyperkron.algorithms import Examples

DECAY = 1e-3
DAMPINGS = (1e-2, 1e-1, 1.0, 10.0)
STEPS = (0.01, 0.03, 0.1, 0.3)
SOLVER = {
    "AID-CG": ("damping", DAMPINGS),
    "AID-KFAC": ("damping", DAMPINGS),
    "AmIGO": ("step of v", STEPS),
    "AmIGO-KFAC": ("damping", DAMPINGS),
    "MRBO": ("step of the series", STEPS),
    "MRBO-KFAC": ("damping", DAMPINGS),
    "AmIGO-PCG": ("damping", DAMPINGS),
    "AmIGO-PGD": ("damping", (0.7, 2.0, 7.0, 20.0)),  # 2/δ is 10ρ for the ρ of AmIGO
}

# --- the problem -------------------------------------------------------------------------------------------


def noisy_mnist(folder: str | Path, counts: tuple[int, int, int], seed: int = 0) -> Split:
    """MNIST's training part cut at random into training, validation and second validation; noise in the first."""
    return noisy_split(read_mnist(folder), counts, seed)


# --- how much is run ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much is run: the small version, for two cores of a CPU."""

    counts: tuple[int, int, int] = (10_000, 5_000, 5_000)
    batch: int = 2_000
    iterations: int = 100
    single_loop_iterations: int = 160
    inner: tuple[float, ...] = (0.1, 0.2)
    outer: tuple[float, ...] = (3e2, 1e3, 3e3, 1e4)
    seeds: tuple[int, ...] = (4, 5, 6)
    block: int = 4
    refresh: int = 5

    def steps(self, name: str) -> int:
        """MRBO moves θ once an iteration, the others ten times."""
        return self.single_loop_iterations if name.startswith("MRBO") else self.iterations

    def batches(self, name: str) -> tuple[int, int]:
        """How many examples a method sees at once, of training and of validation."""
        return self.batch, self.batch


@dataclass(frozen=True)
class PaperPlan(Plan):
    """The paper's split; all methods but the stochastic ones, whose names start so, see all of their data at once."""

    counts: tuple[int, int, int] = (50_000, 5_000, 5_000)
    iterations: int = 200
    single_loop_iterations: int = 320
    inner: tuple[float, ...] = (0.1, 0.3)
    outer: tuple[float, ...] = (3e2, 2e3, 1.5e4, 1e5)
    stochastic: tuple[str, ...] = ("MRBO",)

    def batches(self, name: str) -> tuple[int, int]:
        return (self.batch, self.batch) if name.startswith(self.stochastic) else self.counts[:2]


# --- the methods -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is tuned: the step sizes of θ and λ, and the number of the solver."""

    inner: float
    outer: float
    solver: float


def clock(device: torch.device) -> str:
    """The time that counts: the processor's on a CPU, the wall's on a GPU, of which the processor knows nothing."""
    return "cpu" if device.type == "cpu" else "seconds"


def prepare(device: str) -> None:
    """What every process does first: one thread, and full precision everywhere on a GPU."""
    torch.set_num_threads(1)
    if torch.device(device).type == "cuda":
        torch.backends.cudnn.allow_tf32 = False  # matrix products have no TF32 unless it is asked for


def algorithm(name: str, setting: Setting, seed: int, refresh: int) -> hk.algorithms.Algorithm:
    rates: dict[str, Any] = {"inner_rate": setting.inner, "outer_rate": setting.outer, "seed": seed}
    falling = rates | {k: hk.algorithms.Rate(rates[k], 1 / 3) for k in ("inner_rate", "outer_rate")}
    kfac = hk.kfac(setting.solver, refresh_every=refresh, seed=seed) if name.endswith("KFAC") else None
    if name == "AID-CG":
        return hk.AID(hk.cg(3, setting.solver), **rates)
    if name == "AID-KFAC" and kfac is not None:
        return hk.AID(kfac, **rates)
    if name == "AmIGO":
        return hk.algorithms.AmIGO(linear_rate=setting.solver, **rates)
    if name == "AmIGO-KFAC":
        return hk.algorithms.AmIGO(hypergradient=kfac, **rates)
    if name == "AmIGO-PCG":  # KFAC not in place of the solve, but of its many steps: one, from the last solution
        near = hk.curvature.KFAC(setting.solver, refresh_every=refresh, seed=seed)
        exact = hk.curvature.Hessian(setting.solver)
        step = hk.pcg(1, curvature=exact, preconditioner=near, tolerance=0.0, warm_start=True)
        return hk.algorithms.AmIGO(hypergradient=step, **rates)
    if name == "AmIGO-PGD":  # two steps from the last solution, as long as AmIGO's ten where there is no curvature
        near = hk.curvature.KFAC(setting.solver, split="exact", refresh_every=4 * refresh, seed=seed)
        two = hk.gradient_descent(2, step=1.0, curvature=hk.curvature.Hessian(0.02), preconditioner=near)
        return hk.algorithms.AmIGO(hypergradient=two, **rates)
    if name == "MRBO":
        return hk.algorithms.MRBO(hk.algorithms.StochasticNeumann(10, setting.solver), **falling)
    return hk.algorithms.MRBO(kfac, **falling)


@dataclass
class Trial:
    """One run of one method that can be advanced a few steps at a time, timed by the wall and by the processor."""

    name: str
    setting: Setting
    split: Split
    plan: Plan
    seed: int

    def __post_init__(self) -> None:
        (x, y), device = self.split.train, self.split.device
        model = networks.linear(x.shape[1]).to(device)
        pretrain(model, self.split, self.plan.batch, seed=0, passes=2)  # all methods start at the same point
        sizes = self.plan.batches(self.name)  # a batch of all is a view: nothing is copied
        self.run = hk.fit(
            problem(DECAY),
            model,
            hk.SampleWeights(len(x)).to(device),
            algorithm(self.name, self.setting, self.seed, self.plan.refresh),
            Examples(x, y, torch.arange(len(x), device=device), batch_size=sizes[0], seed=self.seed),
            Examples(*self.split.validation, batch_size=sizes[1], seed=self.seed + 1),
            steps=0,
            projection=hk.Box(0.0, 1.0),
            record_failure=True,
            seed=None,
        )
        self.seconds = self.cpu = 0.0
        self.curve: list[dict[str, float]] = []

    def advance(self, steps: int) -> None:
        """``steps`` more steps, on the clock."""
        records.synchronize(self.split.device)
        wall, cpu = time.perf_counter(), time.process_time()
        self.run.advance(steps)
        records.synchronize(self.split.device)
        self.seconds += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu

    @property
    def failed(self) -> bool:
        """Whether a step failed."""
        return self.run.failure is not None

    @property
    def spent(self) -> float:
        """The time that counts in a comparison."""
        return float(getattr(self, clock(self.split.device)))

    def look(self, **parts: Part) -> None:
        """Add a row to the curve, off the clock."""
        found = Looks(parts, loss_and_error, start=True).look(self.run)
        row = {name: x if math.isfinite(x) else 1e9 for name, x in found.items()}
        self.curve.append({"step": self.run.state.step, "seconds": self.seconds, "cpu": self.cpu, **row})
