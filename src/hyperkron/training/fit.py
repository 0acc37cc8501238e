"""``fit``: run an algorithm for a number of steps, with optimizers, projection, callbacks and a history."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from hyperkron.algorithms import Algorithm, Draw, State, StepReport, Updates
from hyperkron.algorithms.movers import Project
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError
from hyperkron.training.callbacks import Callback
from hyperkron.training.history import History, Value


class Run:
    """A run of an algorithm that can be advanced, looked at, saved and continued.

    Attributes:
        algorithm, state, draw: what runs, all it remembers, and where its batches come from.
        history: one row of figures for every step done.
        row: the row of the current step, while callbacks look at it.
        stopped: why it ended early, or ``None``.
    """

    def __init__(self, algorithm: Algorithm, state: State, draw: Draw, callbacks: Sequence[Callback] = ()) -> None:
        self.algorithm, self.state, self.draw = algorithm, state, draw
        self.callbacks = list(callbacks)
        self.history = History()
        self.row: dict[str, Value] = {}
        self.stopped: str | None = None

    def stop(self, reason: str) -> None:
        """End the run after this step."""
        self.stopped = reason

    def advance(self, steps: int, progress: bool = False) -> Run:
        """Do ``steps`` more steps, or fewer if a callback stops the run."""
        self.stopped = None
        for callback in self.callbacks:
            callback.on_start(self)
        with tqdm(total=steps, disable=not progress, unit="step", dynamic_ncols=True) as bar:
            for _ in range(steps):
                report = self.algorithm.step(self.state, self.draw)
                self._record(report)
                bar.update()
                bar.set_postfix(outer=f"{report.outer_loss:.4g}", refresh=False)
                if self.stopped is not None:
                    break
        for callback in self.callbacks:
            callback.on_end(self)
        return self

    def _record(self, report: StepReport) -> None:
        self.row = {"step": report.step, "outer_loss": report.outer_loss, "inner_loss": report.inner_loss}
        self.row["direction"] = report.direction
        if report.status is not None:
            self.row["status"] = report.status.name
        self.row.update(report.stats)
        for callback in self.callbacks:
            self.row.update(callback.on_step(self, report) or {})
        self.history.append(self.row)

    def state_dict(self) -> dict[str, Any]:
        """Everything the rest of the run depends on, the global random state included."""
        return {
            "state": self.state.state_dict(),
            "draw": self.draw.state_dict(),
            "history": self.history.state_dict(),
            "callbacks": {str(i): callback.state_dict() for i, callback in enumerate(self.callbacks)},
            "random": _random_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a :meth:`state_dict` of a run made with the same arguments."""
        if len(state["callbacks"]) != len(self.callbacks):
            raise HyperkronError(
                f"the state has {len(state['callbacks'])} callbacks but this run has {len(self.callbacks)}; "
                "make the run with the callbacks it was saved with."
            )
        self.state.load_state_dict(state["state"])
        self.draw.load_state_dict(state["draw"])
        self.history.load_state_dict(state["history"])
        for i, callback in enumerate(self.callbacks):
            callback.load_state_dict(state["callbacks"][str(i)])
        _set_random_state(state["random"])


def fit(
    problem: BilevelProblem,
    model: nn.Module,
    hyper: nn.Module,
    algorithm: Algorithm,
    inner_data: Any,
    outer_data: Any,
    *,
    steps: int,
    inner_optimizer: torch.optim.Optimizer | Updates | None = None,
    outer_optimizer: torch.optim.Optimizer | Updates | None = None,
    projection: Project | None = None,
    callbacks: Sequence[Callback] = (),
    seed: int | None = 0,
    progress: bool = False,
) -> Run:
    """Learn λ (and θ with it): ``steps`` steps of ``algorithm``.

    Args:
        problem: the two objectives.
        model: holds θ and ends at the learned one.
        hyper: holds λ and ends at the learned one.
        algorithm: ``AID(hk.kfac())``, ``AmIGO()``, …
        inner_data: batches of J_in: a loader, a function, a fixed batch, or :class:`hyperkron.Examples`.
        outer_data: batches of J_out.
        steps: how many steps of the algorithm (each may hold several of θ); 0 only prepares the run.
        inner_optimizer: of θ, bare or as :class:`hyperkron.Updates` with scheduler and clipping; ``None`` for the
            algorithm's own step sizes.
        outer_optimizer: of λ, likewise.
        projection: of every parameter of λ: :class:`Box`, :class:`Simplex`, :class:`Ball` or a function.
        callbacks: see :class:`Callback`.
        seed: of torch, numpy and ``random``, set before the first step; ``None`` leaves them.
        progress: show a bar with the time left.

    Returns:
        The run, with its ``history`` and ``state``; ``run.advance(more)`` continues it.

    Example:
        >>> import torch, hyperkron as hk
        >>> model, shift = torch.nn.Linear(1, 1, bias=False), hk.as_hyper(torch.zeros(1))
        >>> problem = hk.BilevelProblem(
        ...     lambda m, h, batch: hk.losses.mse(m(batch), h() * batch),
        ...     lambda m, h, batch: hk.losses.mse(m(batch), 3 * batch),
        ... )
        >>> x = torch.ones(2, 1)
        >>> run = hk.fit(problem, model, shift, hk.aid_cg(1, outer_rate=0.5), x, x, steps=50)
        >>> round(float(shift().detach()), 3)  # the inner targets that make the outer ones fit
        3.0
        >>> run.history.column("outer_loss")[-1] < 1e-6
        True
    """
    if not isinstance(algorithm, Algorithm):
        raise HyperkronError(
            f"algorithm={algorithm!r:.60} is a {type(algorithm).__name__}, not an Algorithm; wrap a hypergradient "
            "as hyperkron.AID(hypergradient, inner_steps=10)."
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise HyperkronError(f"steps={steps!r} must be a whole number ≥ 0.")
    if seed is not None:
        _seed_all(seed)
    state = algorithm.init(problem, model, hyper, inner=inner_optimizer, outer=outer_optimizer, project=projection)
    run = Run(algorithm, state, Draw(inner_data, outer_data), callbacks)
    return run.advance(steps, progress) if steps else run


def _seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _random_state() -> dict[str, Any]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found.update({f"cuda:{i}": x for i, x in enumerate(torch.cuda.get_rng_state_all())})
    return found


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    for name, value in state.items():
        if name.startswith("cuda:") and torch.cuda.is_available():
            torch.cuda.set_rng_state(value, int(name.removeprefix("cuda:")))
