"""PZOBO: the Jacobian of the inner solution by finite differences of whole inner runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hyperkron import trees
from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.evaluation.point import placed
from hyperkron.optimizers import load_scaler
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree


@dataclass(frozen=True)
class PZOBO(Algorithm):
    r"""dθ_T/dλ is estimated by running the inner steps again at λ + µu; no second derivatives.

        θ_T(λ): T inner steps from θ ;      u_q ~ N(0, I), q ≤ Q
        λ ← λ − γ [ ∂_λ f + (1/Q) Σ_q u_q ⟨(θ_T(λ + µu_q) − θ_T(λ))/µ, ∂_θ f⟩ ] ;      θ ← θ_T(λ)

    All runs use the same batches and random numbers, and start from the same θ and the same state of the optimizer
    and of its scaler. λ + µu may leave the set that λ is projected onto: g must be defined within about 3µ of it.

    Reference: Sow, Ji & Liang, "On the convergence theory for Hessian-free bilevel algorithms" (NeurIPS 2022).

    Args:
        inner_steps: T.
        samples: Q.
        radius: µ.
    """

    inner_steps: Count = 10
    samples: Count = 10
    radius: Positive = 0.1

    def prepare(self, state: State) -> None:
        if state.inner.each_update:
            raise HyperkronError(
                "inner optimizer has schedule='update', but PZOBO compares runs of T steps at one learning rate; use "
                "Updates(optimizer, scheduler, schedule='step')."
            )

    def step(self, state: State, batches: BatchSources) -> StepReport:
        inner_batches = [batches.inner() for _ in range(self.inner_steps)]
        hyper = state.outer.values()
        directions = [trees.normal_like(hyper, state.generator) for _ in range(self.samples)]
        ends = []
        for u in directions:
            with placed(state.hypers, trees.add(hyper, u, alpha=self.radius)):
                ends.append(self._run(state, inner_batches))
        for batch in inner_batches:
            inner = derivatives.gradients(state, "inner", batch, live=True, hyper=False)
            state.inner.step(inner.theta)
        end = state.inner.values()
        found = derivatives.gradients(state, "outer", batches.outer())
        direction = found.hyper
        for u, moved in zip(directions, ends, strict=True):
            along = trees.dot(trees.subtract(moved, end), found.theta) / (self.radius * self.samples)
            direction = trees.add(direction, trees.map(lambda x, a=along: a.to(x.dtype) * x, u))  # type: ignore[misc]
        state.outer.step(direction)
        return state.finish(found.value, direction, inner.value)

    def _run(self, state: State, inner_batches: list[Any]) -> Tree:
        """θ_T from the current θ at the current λ; model, optimizer, scaler and random states are left as they were."""
        twin = state.inner.twin(memory=True)
        scaler = twin.scaler
        kept = {} if scaler is None else scaler.state_dict()
        with derivatives.kept_buffers(state.model, state.hyper), derivatives.kept_random(state):
            for batch in inner_batches:
                found = derivatives.gradients(state, "inner", batch, theta=twin.params, live=True, hyper=False)
                twin.step(found.theta)
        if scaler is not None:
            load_scaler(scaler, kept)
        return twin.values()
