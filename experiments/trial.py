"""What the trials of all experiments share: each is one run of ``hk.fit`` on its own clock, looked at off the clock.

A diverged run does not end an experiment: trials are made with ``record_failure=True``, and :class:`Looks` gives a
failed run an infinite loss.
"""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from hyperkron.algorithms import InnerOnly, StepReport, Updates
from hyperkron.problem import BilevelProblem
from hyperkron.training import Callback, Checkpoint, Evaluate, Run, fit

MEASURED = 2
"""Steps that measure the unit of λ's relative step size."""
TINY = 1e-20
"""λ's step size while the unit is measured; MRBO and others need one that is positive."""


def clock_of(device: torch.device) -> Callable[[], float]:
    """What a trial's time is measured by: the wall on a GPU, the processor's time on a CPU.

    With one thread the processor's time is what the wall would show on a machine that nobody else uses.
    """
    return time.process_time if device.type == "cpu" else time.perf_counter


@contextmanager
def tensor_cores() -> Iterator[None]:
    """Matrix products in TF32 where there is a GPU, as people train encoders."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Saved(NamedTuple):
    """Where the checkpoints of a run go, and how often, in outer steps."""

    folder: Path
    every: int

    @staticmethod
    def of(key: str, folder: Path | None, every: int) -> Saved | None:
        """For the run with this key, in a folder of its own; ``None`` where nothing is saved."""
        if folder is None:
            return None
        return Saved(folder / hashlib.sha256(key.encode()).hexdigest()[:16], max(1, every))

    def begin(self, run: Run) -> None:
        """Save ``run`` from now on; if there is a checkpoint, it goes on from there."""
        run.callbacks.append(Checkpoint(self.folder, self.every, keep=1))
        if any(self.folder.glob("step-*")):
            run.resume(self.folder)

    def reached(self) -> int:
        """Outer steps that the last checkpoint holds; 0 where there is none."""
        names = [x.name.removeprefix("step-") for x in self.folder.glob("step-*")]
        return max((int(name) for name in names if name.isdecimal()), default=0)

    def end(self) -> None:
        """Delete the checkpoints of a run that is done."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Looks(Evaluate):
    """Loss and error on named parts of the data; rows have ``NAME_loss`` and ``NAME_error``.

    Args:
        parts: by name.
        measure: loss and error of a model on a part.
        when: as in :class:`Evaluate`.
    """

    def __init__(
        self, parts: Mapping[str, Any], measure: Callable[[nn.Module, Any], tuple[float, float]], **when: Any
    ) -> None:
        super().__init__(self.look, **when)
        self.parts, self.measure = parts, measure

    def look(self, run: Run) -> dict[str, Any]:
        """The figures of one row."""
        row: dict[str, Any] = {}
        for name, part in self.parts.items():
            loss, error = (math.inf, 1.0) if run.failure is not None else self.measure(run.state.model, part)
            row[f"{name}_loss"], row[f"{name}_error"] = loss if math.isfinite(loss) else math.inf, error
        return row

    def of(self, run: Run) -> list[dict[str, Any]]:
        """All rows of a run that is over; a failed one has an infinite loss at its end."""
        if run.failure is not None:
            self.rows.append({"step": run.state.step, "seconds": run.seconds, **self.look(run)})
        return self.rows


def relative_step(norms: Sequence[float], touched: int) -> float:
    """The step size that moves ``touched`` weights by one each (root mean square), from norms of hypergradients.

    Example:
        >>> relative_step([0.2, 0.4], 4)  # 2 / 0.3
        6.666666666666666
    """
    return math.sqrt(touched) / (sum(norms) / len(norms))


class RelativeStep(Callback):
    """Sets λ's step size after the first steps along which λ would move, which measure the unit.

    Args:
        wanted: by how much the weights of a batch move in the first step that counts, as a root mean square.
        touched: weights of a batch.
        rate: an absolute step size in place of the relative one.

    Attributes:
        norms: of the hypergradients that were measured.
    """

    remembers = ("norms",)

    def __init__(self, wanted: float, touched: int, rate: float | None = None) -> None:
        self.wanted, self.touched, self.rate = wanted, touched, rate
        self.norms: list[float] = []

    def on_step(self, run: Run, report: StepReport) -> None:
        """Measure, or set the step size."""
        if report.direction <= 0 or len(self.norms) == MEASURED:
            return
        self.norms.append(report.direction)
        if len(self.norms) == MEASURED:
            size = self.wanted * relative_step(self.norms, self.touched) if self.rate is None else self.rate
            outer = run.state.outer
            outer.set_lr(size) if outer.rate is None else outer.rescale(size / TINY)


def train(
    model: nn.Module,
    loss: Callable[[nn.Module, Any], Any],
    batches: Any,
    optimizer: torch.optim.Optimizer | Updates,
    steps: int,
    **options: Any,
) -> Run:
    """Plain training on ``loss(model, batch)``; ``batches`` and ``options`` as in :func:`hyperkron.fit`."""
    problem = BilevelProblem(lambda m, _, batch: loss(m, batch))
    plain = InnerOnly(report_every=steps)
    return fit(problem, model, None, plain, batches, steps=steps, inner_optimizer=optimizer, seed=None, **options)
