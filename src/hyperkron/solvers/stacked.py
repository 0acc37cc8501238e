"""Conjugate gradients for many right-hand sides at once; each system has its own step sizes and stops on its own."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.curvature.base import Invertible, Operator
from hyperkron.solution import NonFiniteError, Solution, Status, worst
from hyperkron.solvers.base import LinearSystem
from hyperkron.trees import Tree


def stacked_cg(
    operator: Operator, b: Tree, preconditioner: Invertible | None, iterations: int, tolerance: float
) -> Solution:
    """:class:`hyperkron.solvers.CG` for every right-hand side along the leading dimension of ``b``.

    Returns:
        All solutions, stacked; the worst status, all iterations and products, and the largest residual.
    """
    given, b = b, trees.widened(trees.map(Tensor.detach, b))
    peak = torch.stack([x.reshape(len(x), -1).abs().amax(1) for x in b.values()]).amax(0)
    if not bool(peak.isfinite().all()):
        raise NonFiniteError("b holds NaN or infinity; check the outer loss and its batch")
    unit = torch.ldexp(torch.ones_like(peak), peak.frexp().exponent.clamp(-126, 126))  # squares of b/unit are in range
    eps, b = LinearSystem(operator, b).epsilon, _scaled(b, 1 / unit)
    size = _dot(b, b).sqrt()
    goal, r = max(tolerance, eps), _scaled(b, torch.where(size > 0, 1 / size, 0.0))  # systems of unit size
    active = size > 0
    v, p = trees.zeros_like(r), _inverse(preconditioner, r)
    rz, largest, residual = _dot(r, p), torch.zeros_like(size), (size > 0).to(size.dtype)
    done, products = torch.zeros_like(size, dtype=torch.long), 0
    nonpositive, non_finite = torch.zeros_like(active), torch.zeros_like(active)
    for i in range(iterations):
        product = operator.matvec_stacked(p)
        products += int(active.sum())
        curvature, pp = _dot(p, product), _dot(p, p)
        largest = torch.maximum(largest, (_dot(product, product) / pp).sqrt().nan_to_num(0.0))
        finite = curvature.isfinite() & rz.isfinite()
        usable = finite & (rz > 0) & (curvature > eps * largest * pp)
        non_finite, nonpositive = non_finite | (active & ~finite), nonpositive | (active & finite & ~usable)
        if i == 0:  # a bad first direction is the solution, or b if the preconditioner is not positive definite
            first = torch.where(rz > 0, 1.0, 0.0)
            fallback = trees.add(_scaled(p, first.nan_to_num(0.0)), _scaled(r, 1 - first))
            v = {name: torch.where(_column(nonpositive, x), x, v[name]) for name, x in fallback.items()}
        active = active & usable
        step = torch.where(active, rz / curvature, 0.0)
        v, r = _moved(v, p, step), _moved(r, product, -step)
        done = done + active
        residual = torch.where(active, _dot(r, r).sqrt(), residual)
        active = active & (residual > goal)
        if i + 1 == iterations or not bool(active.any()):
            break
        z = _inverse(preconditioner, r)
        rz_next = _dot(r, z)
        p, rz = _moved(z, p, torch.where(active, rz_next / rz, 0.0)), rz_next
    statuses = [
        Status.NON_FINITE if x else Status.NONPOSITIVE_CURVATURE if y else Status.CONVERGED if c else Status.BUDGET
        for x, y, c in zip(non_finite.tolist(), nonpositive.tolist(), (residual <= goal).tolist(), strict=True)
    ]
    value = trees.cast(_scaled(v, size * unit), given)
    return Solution(value, worst(statuses), int(done.sum()), products, float(residual.max()))


def _dot(a: Tree, b: Tree) -> Tensor:
    """The inner product of each system."""
    return torch.stack([(x * b[name]).reshape(len(x), -1).sum(1) for name, x in a.items()]).sum(0)


def _scaled(a: Tree, c: Tensor) -> Tree:
    return {name: _column(c, x) * x for name, x in a.items()}


def _moved(a: Tree, b: Tree, c: Tensor) -> Tree:
    """a + c·b; exactly a where c is zero, even if b is not finite."""
    return {name: torch.where(_column(c, x) == 0, x, x + _column(c, x) * b[name]) for name, x in a.items()}


def _column(c: Tensor, x: Tensor) -> Tensor:
    """One number per system, shaped to broadcast with a stacked tensor."""
    return c.reshape(-1, *[1] * (x.dim() - 1)).to(x.dtype if c.is_floating_point() else c.dtype)


def _inverse(preconditioner: Invertible | None, r: Tree) -> Tree:
    return r if preconditioner is None else preconditioner.solve_stacked(r)
