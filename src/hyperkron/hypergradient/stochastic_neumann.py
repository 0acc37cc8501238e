"""H⁻¹b by a series of Hessian products, each on its own batch: the inverse of the stochastic methods.

    Neumann:  v = η Σ_{k=0}^{K} p_k ,   p_0 = b,  p_k = (I − ηH_k) p_{k−1}
    HIA:      v = Kη p_p ,              p uniform in {0, …, K−1}

The second is an unbiased estimate of the first's K terms for the price of at most K − 1 products, half of them on
average, and has a larger variance.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from hyperkron import trees
from hyperkron.cross import reverse
from hyperkron.curvature.hessian import HessianOperator
from hyperkron.evaluation.inputs import differentiable_batch
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.implicit import outer_gradients
from hyperkron.hypergradient.unrolled import Batches
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HypergradientResult, HyperkronError, Solution, Status
from hyperkron.trees import Tree
from hyperkron.validation import check_positive, check_whole


class StochasticNeumann(Hypergradient):
    """The implicit hypergradient whose inverse is a series with a fresh batch for every product.

    ``inner_batch`` is a :class:`~hyperkron.hypergradient.unrolled.Batches` of ``inner_batches`` batches, the first for
    the cross term and the others for the products, or one batch that is used for all.

    Args:
        terms: K.
        step: η, below 2/λmax of every batch.
        sampled: HIA, one random term in place of the sum.
        misscaled: ηp_K + Σ_{k=1}^{K} p_k, as the published code of stocBiO and of BOME's comparison computes the sum:
            too large by about 1/η. Only for comparison with their figures.
        seed: of the random term.

    References: Ji, Yang & Liang (ICML 2021) for the sum; Ghadimi & Wang (2018) and Hong et al. (2023) for HIA.

    Example:
        >>> StochasticNeumann(10, 0.1).inner_batches
        11
    """

    def __init__(
        self, terms: int = 10, step: float = 0.1, *, sampled: bool = False, misscaled: bool = False, seed: int = 0
    ) -> None:
        check_whole("terms", terms, 1 if sampled else 0)
        check_positive("step", step, "pass one below 2/λmax")
        check_whole("seed", seed, 0)
        if sampled and misscaled:
            raise HyperkronError("misscaled=True concerns the sum; it does not work with sampled=True (HIA).")
        self.terms, self.step, self.sampled, self.misscaled = terms, float(step), sampled, misscaled
        self.seed = seed
        self.generator = torch.Generator().manual_seed(seed)

    def fresh(self) -> StochasticNeumann:
        made = copy.copy(self)
        made.generator = torch.Generator().manual_seed(self.seed)
        return made

    @property
    def inner_batches(self) -> int:
        """Batches of J_in that one call uses: one for the cross term, one for each possible product."""
        return self.terms if self.sampled else self.terms + 1

    def compute(
        self, problem: BilevelProblem, model: nn.Module, hyper: nn.Module, inner_batch: Any, outer_batch: Any
    ) -> HypergradientResult:
        inner_batch = differentiable_batch(inner_batch)
        many = isinstance(inner_batch, Batches)
        if many and len(inner_batch) != self.inner_batches:
            raise HyperkronError(
                f"inner_batch holds {len(inner_batch)} batches but {self.inner_batches} are used with "
                f"terms={self.terms}; give that many, or a single batch for all."
            )
        batches = list(inner_batch) if many else [inner_batch] * self.inner_batches
        with Point(problem, model, hyper, batches[0], outer_batch) as point:
            value, b, direct = outer_gradients(point)
            v, products = self._inverse(point, b, batches[1:])
            grads = trees.subtract(direct, reverse(point, v))
            point.finite("hypergradient", trees.norm(grads), f"lower step={self.step}, which must be below 2/λmax")
        solution = Solution(v, Status.BUDGET, products, products)
        return HypergradientResult(grads, Status.BUDGET, float(value), solution, {"products": products})

    def _inverse(self, point: Point, b: Tree, batches: list[Any]) -> tuple[Tree, int]:
        count = self.terms
        if self.sampled:
            count = int(torch.randint(self.terms, (), generator=self.generator, device="cpu"))
        term, total = b, trees.zeros_like(b) if self.misscaled else b
        for batch in batches[:count]:
            point.curvature_batch = batch
            term = trees.add(term, HessianOperator(point, 0.0).matvec(term), alpha=-self.step)
            total = trees.add(total, term)
        if self.sampled:
            return trees.scale(term, self.terms * self.step), count
        if self.misscaled:
            return trees.add(total, term, alpha=self.step), count
        return trees.scale(total, self.step), count

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def hia(terms: int = 10, step: float = 0.1, *, seed: int = 0) -> StochasticNeumann:
    """HIA, the randomised Hessian inverse approximation: v = Kη Π_{k≤p}(I − ηH_k) b, p uniform in {0, …, K−1}.

    ``terms`` is K, ``step`` is η, ``seed`` that of the draws of p.

    Reference: Ghadimi & Wang, "Approximation methods for bilevel programming" (2018).
    """
    return StochasticNeumann(terms, step, sampled=True, seed=seed)
