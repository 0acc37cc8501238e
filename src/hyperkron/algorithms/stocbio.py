"""stocBiO: stochastic bilevel optimization with a Neumann series over fresh batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hyperkron.algorithms import oracles
from hyperkron.algorithms.base import Algorithm, Facts, State, StepReport, check_counts
from hyperkron.algorithms.draw import Draw
from hyperkron.algorithms.inverse import StochasticNeumann


@dataclass(frozen=True)
class StocBiO(Algorithm):
    r"""T steps on θ, then one on λ with a stochastic Neumann series; constant rates, every oracle on its own batch.

        θ ← θ − α ∂_θ g_B(λ, θ)                                       T times
        v = η Σ_{k=0}^{K} Π_{j≤k} (I − ηH_j) ∂_θ f ,   H_j on batch j
        λ ← λ − γ (∂_λ f − X_B(v))

    The published code, and the comparison in BOME's, compute ηv_K + Σ_{k≥1} v_k instead of the sum, which is too large
    by about 1/η; ``misscaled=True`` reproduces that.

    Reference: Ji, Yang & Liang, "Bilevel optimization: convergence analysis and enhanced design" (ICML 2021).

    Args:
        inner_steps: T.
        terms: K.
        step_size: η, below 2/λmax of every batch.
        misscaled: reproduce the published code's scaling.
    """

    inner_steps: int = 10
    terms: int = 10
    step_size: float = 0.1
    misscaled: bool = False

    facts: ClassVar[Facts] = Facts(
        name="stocBiO",
        reference="Ji, Yang & Liang, ICML 2021",
        calls="inner_steps ∂g, terms Hv, 1 ∂f, 1 X",
        memory="nothing",
        accuracy="the optimum, up to the series' tail (1 − ηµ)^terms and the noise of the batches",
        use="stochastic problems with well-conditioned inner Hessians",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "inner_steps")
        self._method()

    def _method(self) -> StochasticNeumann:
        return StochasticNeumann(self.terms, self.step_size, misscaled=self.misscaled)

    def prepare(self, state: State) -> None:
        """The stochastic series."""
        state.hypergradient = self._method()

    def step(self, state: State, draw: Draw) -> StepReport:
        """T inner steps, one outer step."""
        inner_loss = oracles.descend(state, draw, self.inner_steps)
        result = oracles.hypergradient(state, draw)
        state.outer.step(result.grads)
        return state.finish(result.outer_loss, result.grads, inner_loss, status=result.status, stats=result.stats)
