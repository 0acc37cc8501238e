"""Strongly convex quadratic bilevel problems with a known solution, for the conformance suite.

    g(λ, θ) = mean_n ½‖θx_n − (y_n + F_n λ)‖² + α‖θ‖²        f(λ, θ) = mean_n ½‖θx'_n − y'_n‖² + (ρ/2)‖λ‖²

with θ a Linear layer without bias. θ*(λ) is affine, Φ(λ) = f(λ, θ*(λ)) is quadratic, and λ* solves one linear system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import hyperkron as hk


@dataclass(frozen=True)
class Quadratic:
    """One instance; λ is a vector of three, θ a 2×3 matrix.

    Args:
        ridge: α. 0 with three inner examples makes the inner problem interpolate (g* = 0).
        direct: ρ, the weight of λ itself in the outer objective.
        examples: inner and outer examples.
        isotropic: whether the inner Hessian is a multiple of the identity.
        realizable: whether f(λ*, θ*(λ*)) = 0 (needs direct = 0).
        noise: how much examples differ around a common design, so that batches disagree.
    """

    ridge: float = 0.05
    direct: float = 0.1
    examples: int = 3
    isotropic: bool = False
    realizable: bool = False
    noise: float = 0.0

    def data(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """((x, y, F), (x', y')), float64."""
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        count = self.examples
        axes = torch.eye(3, dtype=torch.float64).repeat(-(-count // 3), 1)[:count] * 3**0.5
        if not self.isotropic:
            axes = axes * torch.tensor([1.0, 0.8, 1.25], dtype=torch.float64)
        x = axes + self.noise * normal(count, 3)
        y = normal(count, 2)
        basis = 3**0.5 * torch.linalg.qr(normal(6, 3)).Q.reshape(3, 2, 3)  # λ moves θ in orthogonal directions
        features = basis.repeat(-(-count // 3), 1, 1)[:count] + self.noise * normal(count, 2, 3)
        outer_x = axes + self.noise * normal(count, 3)
        outer_y = normal(count, 2)
        if self.realizable:
            outer_y = outer_x @ self._theta(torch.ones(3, dtype=torch.float64), x, y, features).T
        return (x, y, features), (outer_x, outer_y)

    def _theta(self, hyper: Tensor, x: Tensor, y: Tensor, features: Tensor) -> Tensor:
        hessian = x.T @ x / len(x) + 2 * self.ridge * torch.eye(3, dtype=x.dtype)
        return torch.linalg.solve(hessian, x.T @ (y + features @ hyper) / len(x)).T

    def theta(self, hyper: Tensor) -> Tensor:
        """θ*(λ)."""
        return self._theta(hyper, *self.data()[0])

    def value(self, hyper: Tensor) -> Tensor:
        """Φ(λ) = f(λ, θ*(λ))."""
        x, y = self.data()[1]
        residual = x @ self.theta(hyper).T - y
        return 0.5 * residual.square().sum(1).mean() + 0.5 * self.direct * hyper.square().sum()

    def solution(self) -> Tensor:
        """λ*."""
        zero = torch.zeros(3, dtype=torch.float64)
        hessian = torch.autograd.functional.hessian(self.value, zero)
        gradient = torch.autograd.functional.jacobian(self.value, zero)
        return -torch.linalg.solve(hessian, gradient)

    def problem(self) -> hk.BilevelProblem:
        """The two objectives, as a user would write them."""

        def inner(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
            x, y, features = batch
            loss = hk.losses.mse(model(x), y + features @ hyper())
            return loss + hk.losses.l2(model, self.ridge) if self.ridge else loss

        def outer(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
            x, y = batch
            return hk.losses.mse(model(x), y) + 0.5 * self.direct * hyper().square().sum()

        return hk.BilevelProblem(inner, outer)

    def modules(self, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, nn.Module]:
        """Model and hyper at zero."""
        model = nn.Linear(3, 2, bias=False, dtype=dtype)
        nn.init.zeros_(model.weight)
        return model, hk.as_hyper(torch.zeros(3, dtype=dtype))

    def batches(self, batch_size: int | None = None, dtype: torch.dtype = torch.float64) -> hk.algorithms.BatchSources:
        """Both levels in batches, by default one full batch."""
        inner, outer = ([x.to(dtype) for x in part] for part in self.data())
        size = self.examples if batch_size is None else batch_size
        return hk.algorithms.BatchSources(
            hk.algorithms.Examples(*inner, batch_size=size, seed=1),
            hk.algorithms.Examples(*outer, batch_size=size, seed=2),
        )
