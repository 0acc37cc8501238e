"""SUSTAIN: MRBO's momentum with the randomised inverse HIA."""

from __future__ import annotations

from dataclasses import dataclass

from hyperkron.algorithms.base import Positive
from hyperkron.algorithms.mrbo import MRBO
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.stochastic_neumann import hia
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class SUSTAIN(MRBO):
    r"""Recursive momentum on both levels, as :class:`MRBO`, with h by HIA.

        h(z) = ∂_λ f − X(v) ,    v = Kη Π_{k≤p} (I − ηH_k) ∂_θ f ,    p uniform in {0, …, K−1}

    The same p and the same batches serve z and z⁻.

    Reference: Khanduri et al., "A near-optimal algorithm for stochastic bilevel optimization via double-momentum"
    (NeurIPS 2021).

    Args:
        terms: K.
        step_size: η, below 2/λmax of every batch.
    """

    terms: int = 10
    step_size: Positive = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hypergradient is not None:
            raise HyperkronError(
                f"hypergradient={type(self.hypergradient).__name__}: SUSTAIN is MRBO with HIA and takes no other; "
                "use MRBO(hypergradient=…)."
            )

    def method(self) -> Hypergradient:
        return hia(self.terms, self.step_size, seed=self.seed)
