"""InnerOnly: training of θ at fixed λ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, State, StepReport
from hyperkron.batches import BatchSources


@dataclass(frozen=True)
class InnerOnly(Algorithm):
    """Steps of θ on J_in and nothing else: plain training, for baselines, warm starts and models at a learned λ.

        θ ← θ − α ∂_θ g(λ, θ)     ``inner_steps`` times ,      λ stays

    Args:
        inner_steps: steps of θ in a step of the algorithm.
        report_every: J_in is read from the device, and checked to be finite, every ``report_every`` steps. Between two
            readings the device is not waited for.

    Example:
        >>> import torch, hyperkron as hk
        >>> model, x = torch.nn.Linear(1, 1, bias=False), torch.ones(2, 1)
        >>> problem = hk.BilevelProblem(lambda m, h, batch: hk.losses.mse(m(batch), 3 * batch))
        >>> run = hk.fit(problem, model, None, hk.algorithms.InnerOnly(10, inner_rate=0.3), x, steps=10)
        >>> round(float(model.weight.detach()), 3)
        3.0
    """

    inner_steps: Count = 1
    report_every: Count = 1
    moves_hyper: ClassVar[bool] = False

    def step(self, state: State, batches: BatchSources) -> StepReport:
        loss = derivatives.descend(state, batches, self.inner_steps)
        return state.finish(None, {}, loss if (state.step + 1) % self.report_every == 0 else None)
