"""Unrolled and truncated differentiation: λ moves along the gradient through the inner steps themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, State, StepReport
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Unrolled
from hyperkron.hypergradient.steps import SGD, Step
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class Unroll(Algorithm):
    r"""θ moves by T functional optimizer steps, and λ along the derivative through them.

        θ^{t+1} = step(θ^t, ∂_θ g(λ, θ^t)) ,  t < T ;       λ ← λ − γ d/dλ f(λ, θ^T(λ)) ;       θ⁰ ← θ^T

    Every step has its own batch. ``last`` differentiates through the last K steps only. With ``restart`` every round
    begins at the θ with which the run began, instead of where the last one ended: the classical (unamortised) form.
    The functional optimizer starts each round without momentum; ``inner_rate`` is not used.

    Reference: Maclaurin et al. (2015); Franceschi et al. (2017); truncated: Shaban et al. (2019).

    Args:
        inner_steps: T.
        optimizer: the functional step that moves θ: ``SGD``, ``Adam`` or ``AdamW`` of
            :mod:`hyperkron.hypergradient.steps`.
        last: K, or ``None`` for all.
        restart: begin every round at the initial θ.
        checkpoint_every: keep every k-th iterate only.
    """

    inner_steps: Count = 10
    optimizer: Step = field(default=SGD(lr=0.1))
    last: int | None = None
    restart: bool = False
    checkpoint_every: Count = 1

    def method(self) -> Unrolled:
        return Unrolled(self.inner_steps, self.optimizer, self.last, self.checkpoint_every)

    def prepare(self, state: State) -> None:
        if state.inner.rate is None:
            raise HyperkronError(
                "inner optimizer: Unroll moves θ by functional steps that can be differentiated, not by a torch.optim "
                "optimizer; give Unroll(optimizer=SGD(lr=…)) of hyperkron.hypergradient.steps, or use AID."
            )
        if self.restart:
            state.trees["initial"] = state.inner.values()

    def step(self, state: State, batches: BatchSources) -> StepReport:
        method = self.method()
        inner_batches, outer_batch = batches.inners(self.inner_steps), batches.outer()
        if self.restart:
            state.inner.place(state.trees["initial"])
        result = method.compute(state.problem, state.model, state.hyper, inner_batches, outer_batch)
        state.inner.place(method.lookahead(state.problem, state.model, state.hyper, inner_batches))
        drew = state.model.training  # perhaps: without a number of its own each step would have the same dropout masks
        derivatives.advance(state, inner_batches if self.inner_steps > 1 else [inner_batches], drew=drew)
        return state.follow(result)
