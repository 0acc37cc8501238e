"""Where each algorithm comes to rest on a :class:`quadratic.Quadratic`, in closed form.

With θ as a vector (rows of the weight one after the other) both gradients are affine,

    ∂_θ g = Hθ − c − Cλ ,    ∂_λ g = Gλ − d − Cᵀθ ,    X(v) = −Cᵀv ,    b = ∂_θ f = Kθ − e ,    ∂_λ f = ρλ

so an algorithm that is biased by construction rests where a small linear system says, and not at λ*. Here every such
system is written down as the algorithm's equations are in its paper, and solved densely in float64; nothing is shared
with the library. Where a multiplier depends on the point itself (BOME, BVFSM) it is the root of one scalar equation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from quadratic import Quadratic


def extremes(matrix: Tensor) -> tuple[float, float]:
    """The smallest and the largest eigenvalue of a symmetric matrix."""
    values = torch.linalg.eigvalsh(matrix)
    return float(values[0]), float(values[-1])


class Dense:
    """The matrices of a quadratic, the constants of its convergence, and the points of rest.

    Args:
        quadratic: which.
    """

    def __init__(self, quadratic: Quadratic) -> None:
        (x, y, features), (outer_x, outer_y) = quadratic.data()
        self.inner_data = x, y, features
        self.ridge, self.rho, n, m = quadratic.ridge, quadratic.direct, len(x), len(outer_x)
        both = torch.eye(2, dtype=x.dtype)
        self.factor = x.T @ x / n
        self.eye, self.eye_hyper = torch.eye(6, dtype=x.dtype), torch.eye(3, dtype=x.dtype)
        self.H = torch.kron(both, self.factor) + 2 * self.ridge * self.eye
        self.C = torch.einsum("nok,ni->oik", features, x).reshape(6, 3) / n
        self.c = (y.T @ x / n).reshape(-1)
        self.G = torch.einsum("nok,nol->kl", features, features) / n
        self.d = -torch.einsum("nok,no->k", features, y) / n
        self.K = torch.kron(both, outer_x.T @ outer_x / m)
        self.e = (outer_y.T @ outer_x / m).reshape(-1)

    # --- the constants of the problem

    @cached_property
    def inner(self) -> tuple[float, float]:
        """µ and L of g(λ, ·)."""
        return extremes(self.H)

    @cached_property
    def outer(self) -> tuple[float, float]:
        """µ and L of Φ."""
        jacobian = torch.linalg.solve(self.H, self.C)
        return extremes(jacobian.T @ self.K @ jacobian + self.rho * self.eye_hyper)

    @cached_property
    def outer_smoothness(self) -> float:
        """L of f(λ, ·)."""
        return extremes(self.K)[1]

    @cached_property
    def gap_smoothness(self) -> float:
        """L_g + L_v of the value gap in (θ, λ) jointly, L_v = L_g(1 + L_g/2µ) (Shen & Chen, 2023)."""
        both = torch.cat([torch.cat([self.H, -self.C], 1), torch.cat([-self.C.T, self.G], 1)])
        smooth = extremes(both)[1]
        return smooth * (2 + smooth / (2 * self.inner[0]))

    def batch_smoothness(self, batch_size: int) -> float:
        """The largest L of a batch's share of g, cut in order."""
        parts = self.inner_data[0].split(batch_size)
        whole = len(self.inner_data[0]) / len(parts)
        return max(extremes(x.T @ x / whole)[1] for x in parts) + 2 * self.ridge

    # --- gradients, for rules that have to be followed step by step

    def theta(self, hyper: Tensor) -> Tensor:
        """θ*(λ)."""
        return torch.linalg.solve(self.H, self.c + self.C @ hyper)

    def b(self, theta: Tensor) -> Tensor:
        """∂_θ f."""
        return self.K @ theta - self.e

    def g_theta(self, theta: Tensor, hyper: Tensor) -> Tensor:
        """∂_θ g."""
        return self.H @ theta - self.c - self.C @ hyper

    def g_hyper(self, theta: Tensor, hyper: Tensor) -> Tensor:
        """∂_λ g."""
        return self.G @ hyper - self.d - self.C.T @ theta

    def g(self, theta: Tensor, hyper: Tensor) -> Tensor:
        """The value of g, example by example."""
        x, y, features = self.inner_data
        rows = x @ theta.reshape(2, 3).T - y - features @ hyper
        return 0.5 * rows.square().sum() / len(x) + self.ridge * theta.square().sum()

    # --- points of rest

    def solution(self) -> Tensor:
        """λ*: where ρλ + CᵀH⁻¹b = 0 at θ*(λ)."""
        return self.implicit(torch.linalg.inv(self.H))

    def implicit(self, inverse: Tensor) -> Tensor:
        """ρλ + Cᵀ·inverse·b(θ) = 0 with θ = θ*(λ): what stands for H⁻¹ decides."""
        return self._rest(
            [self.H, -self.C, self.c],
            [self.C.T @ inverse @ self.K, self.rho * self.eye_hyper, self.C.T @ inverse @ self.e],
        )

    def powers(self, step: float, count: int) -> list[Tensor]:
        """(I − ηH)^k for k < count."""
        return [torch.linalg.matrix_power(self.eye - step * self.H, k) for k in range(count)]

    def series(self, terms: int, step: float) -> Tensor:
        """η Σ_{k≤K} (I − ηH)^k, the truncated inverse; K = T − 1 for T unrolled steps."""
        return step * sum(self.powers(step, terms + 1), torch.zeros_like(self.H))

    def misscaled(self, terms: int, step: float) -> Tensor:
        """η(I − ηH)^K + Σ_{k=1}^{K} (I − ηH)^k, as stocBiO's code has it."""
        powers = self.powers(step, terms + 1)
        return step * powers[-1] + sum(powers[1:], torch.zeros_like(self.H))

    def restarted(self, steps: int, step: float) -> Tensor:
        """The minimum of f(λ, θ_T(λ)) with θ_T from T steps from zero: θ_T = S(c + Cλ)."""
        reach = self.series(steps - 1, step)
        return self._rest(
            [self.eye, -reach @ self.C, reach @ self.c],
            [self.C.T @ reach @ self.K, self.rho * self.eye_hyper, self.C.T @ reach @ self.e],
        )

    def factored(self, damping: float) -> Tensor:
        """KFAC's inverse, the damping (with the ridge's share) split by π: (B + √δ/π)⁻¹ ⊗ (A + π√δ)⁻¹, B = I."""
        root = math.sqrt(damping + 2 * self.ridge)
        pi = math.sqrt(float(self.factor.trace()) / 3)
        a = self.factor + pi * root * self.eye_hyper
        return torch.linalg.inv(torch.kron((1 + root / pi) * torch.eye(2, dtype=a.dtype), a))

    def penalty(self, multiplier: float) -> Tensor:
        """b(y) + ℓ∂_θ g(y) = 0, ∂_θ g(z) = 0, ρλ + ℓ(∂_λ g(y) − ∂_λ g(z)) = 0."""
        o = torch.zeros_like(self.H)
        pull = multiplier * self.C.T
        return self._rest(
            [self.K + multiplier * self.H, o, -multiplier * self.C, self.e + multiplier * self.c],
            [o, self.H, -self.C, self.c],
            [-pull, pull, self.rho * self.eye_hyper, torch.zeros_like(self.d)],
        )

    def penalty_curvature(self, multiplier: float) -> float:
        """µ of the penalty function with θ minimised away: of ρ + ℓCᵀ(H⁻¹ − ℓ(K + ℓH)⁻¹)C."""
        inner, pulled = torch.linalg.inv(self.H), torch.linalg.inv(self.K + multiplier * self.H)
        matrix = self.C.T @ (inner - multiplier * pulled) @ self.C
        return extremes(self.rho * self.eye_hyper + multiplier * matrix)[0]

    def envelope(self, multiplier: float, proximal: float) -> Tensor:
        """MEHA: ∂g(θ̂) + γ(θ̂ − θ) = 0, b/c + ∂g(θ) − γ(θ − θ̂) = 0, ρλ/c + ∂_λ g(θ) − ∂_λ g(θ̂) = 0."""
        near = proximal * self.eye
        return self._rest(
            [self.K / multiplier + self.H - near, near, -self.C, self.e / multiplier + self.c],
            [-near, self.H + near, -self.C, self.c],
            [-self.C.T, self.C.T, self.rho / multiplier * self.eye_hyper, torch.zeros_like(self.d)],
        )

    def barrier(self, r: float, weight: float, margin: float) -> tuple[Tensor, float]:
        """BVFSM at a fixed r: λ, and the weight p = r/(margin + g(z) + w·r‖z‖²) of the gap it settles on."""
        o, pull = torch.zeros_like(self.H), 2 * weight * r * self.eye

        def at(p: float) -> tuple[Tensor, float]:
            rest = self._solve(
                [self.K + p * self.H + pull, o, -p * self.C, self.e + p * self.c],
                [o, self.H + pull, -self.C, self.c],
                [-p * self.C.T, p * self.C.T, self.rho * self.eye_hyper, torch.zeros_like(self.d)],
            )
            z, hyper = rest[6:12], rest[12:]
            value = self.g(z, hyper) + weight * r * z.square().sum()
            return hyper, p * (margin + float(value)) - r

        p = root(lambda p: at(p)[1])
        return at(p)[0], p

    def dynamic(self, steps: int, rate: float, eta: float, epsilon: float, by_value: bool) -> Tensor:
        """BOME: (θ, θ*, λ) and µ in one vector, with ∇f + µ∇q = 0 and µϵ = φ, which is what µ's own rule says there."""
        left = self.eye - torch.linalg.matrix_power(self.eye - rate * self.H, steps)  # θ − θ̂ = left (θ − θ*)
        pull = self.C.T @ left

        def at(mu: float) -> tuple[Tensor, float]:
            o = torch.zeros_like(self.H)
            rest = self._solve(
                [self.K + mu * self.H, o, -mu * self.C, self.e + mu * self.c],
                [o, self.H, -self.C, self.c],
                [-mu * pull, mu * pull, self.rho * self.eye_hyper, torch.zeros_like(self.d)],
            )
            theta, best, hyper = rest[:6], rest[6:12], rest[12:]
            hat = theta - left @ (theta - best)
            slope = torch.cat([self.g_theta(theta, hyper), self.g_hyper(theta, hyper) - self.g_hyper(hat, hyper)])
            gap = self.g(theta, hyper) - self.g(hat, hyper) if by_value else slope.square().sum()
            return rest, mu * epsilon - eta * float(gap)

        mu = root(lambda mu: at(mu)[1])
        return torch.cat([at(mu)[0], torch.tensor([mu], dtype=self.H.dtype)])

    def rank_one(self, theta: Tensor, hyper: Tensor, steps: int, rates: tuple[float, float], epsilon: float) -> Tensor:
        """One step of BSG-1 as a map: (θ, λ) ↦ (θ, λ), in one vector."""
        for _ in range(steps):
            theta = theta - rates[0] * self.g_theta(theta, hyper)
        slope = self.g_theta(theta, hyper)
        ratio = (self.b(theta) @ slope) / (slope @ slope + epsilon)
        return torch.cat([theta, hyper - rates[1] * (self.rho * hyper - ratio * self.g_hyper(theta, hyper))])

    def _rest(self, *rows: list[Tensor]) -> Tensor:
        return self._solve(*rows)[-3:]

    def _solve(self, *rows: list[Tensor]) -> Tensor:
        """The unknowns of block rows [A_1, …, A_k, right-hand side]; λ is the last one."""
        matrix = torch.cat([torch.cat(row[:-1], 1) for row in rows])
        return torch.linalg.solve(matrix, torch.cat([row[-1] for row in rows]))


def root(function: Callable[[float], float]) -> float:
    """The positive root of an increasing function, by bisection of its logarithm."""
    low, high = -20.0, 30.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if function(math.exp(middle)) < 0 else (low, middle)
    return math.exp(low)
