"""stocBiO: stochastic bilevel optimization with a Neumann series over fresh batches."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron.algorithms import derivatives
from hyperkron.algorithms.base import Algorithm, Count, Positive, State, StepReport, Whole
from hyperkron.batches import BatchSources
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.stochastic_neumann import StochasticNeumann
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class StocBiO(Algorithm):
    r"""T steps on θ, then one on λ with a stochastic Neumann series; constant rates, every oracle on its own batch.

        θ ← θ − α ∂_θ g_B(λ, θ)                                       T times
        v = η Σ_{k=0}^{K} Π_{j≤k} (I − ηH_j) ∂_θ f ,   H_j on batch j
        λ ← λ − γ (∂_λ f − X_B(v))

    With ``hypergradient`` the series is replaced: ``StocBiO(hypergradient=hk.kfac())`` is stocBiO-KFAC, and
    ``hk.fit(…, curvature_data=…)`` gives KFAC a batch of its own, too.

    The published code, and the comparison in BOME's, compute ηv_K + Σ_{k≥1} v_k instead of the sum, which is too large
    by about 1/η; ``misscaled=True`` reproduces that.

    Reference: Ji, Yang & Liang, "Bilevel optimization: convergence analysis and enhanced design" (ICML 2021).

    Args:
        inner_steps: T.
        terms: K.
        step_size: η, below 2/λmax of every batch.
        misscaled: reproduce the published code's scaling.
        hypergradient: in place of the series, which ``None`` means.
    """

    inner_steps: Count = 10
    terms: Whole = 10
    step_size: Positive = 0.1
    misscaled: bool = False
    hypergradient: Hypergradient | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {name: getattr(self, name) for name in ("terms", "step_size", "misscaled")}
        if self.hypergradient is not None and any(given[name] != getattr(StocBiO, name) for name in given):
            raise HyperkronError(
                f"{', '.join(f'{name}={value}' for name, value in given.items())} belong to the Neumann series, which "
                f"hypergradient={type(self.hypergradient).__name__} replaces; leave them out, or leave it out."
            )

    def method(self) -> Hypergradient:
        return self.hypergradient or StochasticNeumann(self.terms, self.step_size, misscaled=self.misscaled)

    def step(self, state: State, batches: BatchSources) -> StepReport:
        return derivatives.alternate(state, batches, self.inner_steps)
