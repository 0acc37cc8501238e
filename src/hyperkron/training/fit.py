"""``fit``: run an algorithm with optimizers, projection, callbacks and a history."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyperkron.algorithms import Algorithm, BatchSources, Updates
from hyperkron.optimizers import Project
from hyperkron.problem import BilevelProblem, check_problem
from hyperkron.solution import HyperkronError
from hyperkron.training import checkpoint
from hyperkron.training.callback import Callback
from hyperkron.training.data_parallel import synchronised
from hyperkron.training.randomness import random_state, seed_all
from hyperkron.training.run import Run
from hyperkron.validation import check_folder, check_whole


def fit(
    problem: BilevelProblem,
    model: nn.Module,
    hyper: nn.Module | None,
    algorithm: Algorithm,
    inner_data: Any,
    outer_data: Any = None,
    *,
    steps: int | None = None,
    seconds: float | None = None,
    curvature_data: Any = None,
    inner_optimizer: torch.optim.Optimizer | Updates | None = None,
    outer_optimizer: torch.optim.Optimizer | Updates | None = None,
    projection: Project | None = None,
    graph: bool = False,
    callbacks: Sequence[Callback] = (),
    clock: Callable[[], float] = time.perf_counter,
    record_failure: bool = False,
    seed: int | None = 0,
    resume: str | Path | None = None,
    allow_changes: bool = False,
    progress: bool = False,
) -> Run:
    """Train λ and θ for ``steps`` steps of ``algorithm`` or for ``seconds``, whichever comes first.

    Args:
        problem: the two objectives; as :class:`hyperkron.training.DataParallel` on several processes.
        model: θ; trained in place.
        hyper: λ; trained in place. ``None`` with :class:`hyperkron.algorithms.InnerOnly`, which trains θ alone.
        algorithm: ``AID(hk.kfac())``, ``AmIGO()``, …
        inner_data: batches of J_in: a loader, a function, a fixed batch, or :class:`hyperkron.algorithms.Examples`.
        outer_data: batches of J_out; ``None`` if J_out takes none.
        curvature_data: separate batches of J_in to measure A on, for example larger ones; ``None`` uses the inner batch
            of the cross term.
        steps: number of steps of the algorithm (each may contain several steps of θ); 0 only prepares the run, ``None``
            leaves the end to ``seconds``.
        seconds: time to train for, by ``clock``: the time spent in steps, without callbacks, evaluation and saving. If
            it is given, every step ends by waiting for the GPU; ``math.inf`` measures the time without a limit.
        inner_optimizer: optimizer of θ, or :class:`hyperkron.algorithms.Updates` with scheduler and clipping; ``None``
            uses the algorithm's own step sizes.
        outer_optimizer: the same for λ.
        projection: applied to every parameter of λ: :class:`Box`, :class:`Simplex`, :class:`Ball` or a function.
        graph: replay θ's own steps as a CUDA graph (see :class:`InnerLoop`; no effect without a GPU). The
            hypergradient has its own: ``hk.kfac(graph=True)``.
        callbacks: see :class:`Callback`; :class:`Evaluate` calls a function at chosen steps.
        clock: measures ``seconds``; ``time.process_time`` counts processor time instead of wall time.
        record_failure: if a step fails with a :class:`HyperkronError` (a divergence) or a failed factorisation, end the
            run and keep the error as ``run.failure`` instead of raising it, so that a sweep can continue.
        seed: seed of torch, numpy and ``random``, set before the first step (default: 0); ``None`` sets none. What has
            a seed of its own keeps it: ``Examples``, the algorithm, and hypergradients such as ``hk.kfac(seed=1)``.
        resume: a checkpoint folder, usually that of a :class:`Checkpoint` callback. If it has an intact checkpoint, the
            run continues from the newest one; ``steps`` and ``seconds`` include what was already done.
        allow_changes: continue even if this run differs from the saved one; see :meth:`Run.resume`.
        progress: show a progress bar.

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
        >>> run = hk.fit(problem, model, shift, hk.algorithms.aid_cg(1, outer_rate=0.5), x, x, steps=50)
        >>> round(float(shift().detach()), 3)  # inner targets that fit the outer ones
        3.0
        >>> run.history.column("outer_loss")[-1] < 1e-6
        True
    """
    if not isinstance(algorithm, Algorithm):
        kind = "class" if isinstance(algorithm, type) else type(algorithm).__name__
        raise HyperkronError(
            f"algorithm={algorithm!r:.60} is a {kind}, not an Algorithm; wrap a hypergradient "
            "as hyperkron.AID(hypergradient, inner_steps=10)."
        )
    check_problem(problem)
    model = synchronised(problem, model, hyper)
    if seed is not None:
        check_whole("seed", seed, 0, "None sets none")
        seed_all(seed)
    levels = {"inner": inner_optimizer, "outer": outer_optimizer}
    state = algorithm.init(problem, model, hyper, **levels, project=projection, graph=graph)
    sources = BatchSources(inner_data, outer_data, curvature_data)
    run = Run(algorithm, state, sources, callbacks, clock=clock, record_failure=record_failure)
    run._set_goal(steps, seconds)
    with nullcontext() if run._ended else run._writing():  # what is read here is not overtaken by another run
        if resume is not None and run.group.numbers(bool(checkpoint.candidates(check_folder("resume", resume))))[0][0]:
            run.resume(resume, allow_changes=allow_changes)
            steps = None if steps is None else max(0, steps - run.state.step)
            seconds = None if seconds is None else max(0.0, seconds - run.seconds)
        if steps == 0 or seconds == 0:
            run._random = random_state()
            return run
        return run.advance(steps, seconds=seconds, progress=progress and run.group.rank == 0)
