"""The same hypergradients the way other code computes them, to be timed beside ours.

- ``sama_betty``: outer gradient, then ∂_λ J_in at θ ± εv with θ still requiring gradients (the Betty library's way);
- ``kfac_curvlinops``: curvlinops' KFAC with heuristic damping, then double backward for the cross term;
- ``cg_normal_equations``: three CG iterations on the normal equations (seven Hessian products), then double backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Workload, inner, outer

DAMPING = 1e-3


def _set_grad(work: Workload, value: Tensor) -> None:
    weight = work.hyper.weight
    weight.grad = -value  # type: ignore[union-attr]


def sama_betty(work: Workload) -> None:
    """SAMA with the identity adaptation."""
    params = [p for p in work.model.parameters() if p.requires_grad]
    v = torch.autograd.grad(outer(work.model, work.hyper, work.outer_batch).value, params)
    epsilon = 0.1 / torch.stack([x.norm() for x in v]).norm().item()
    sides = []
    for factor in (1.0, -2.0):
        with torch.no_grad():
            torch._foreach_add_(params, v, alpha=factor * epsilon)
        loss = inner(work.model, work.hyper, work.batches[0]).value
        sides.append(torch.autograd.grad(loss, list(work.hyper.parameters()))[0])
        del loss  # and with it the graph, before the other side is evaluated
    with torch.no_grad():
        torch._foreach_add_(params, v, alpha=epsilon)
    _set_grad(work, (sides[0] - sides[1]) / (2 * epsilon))


def _gradient_graph(work: Workload, params: list[Tensor]) -> tuple[Tensor, ...]:
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels cannot be differentiated twice
        loss = inner(work.model, work.hyper, work.batches[0]).value
        return torch.autograd.grad(loss, params, create_graph=True)


def _double_backward(work: Workload, params: list[Tensor], v: list[Tensor]) -> Tensor:
    gradients = _gradient_graph(work, params)
    return torch.autograd.grad(gradients, list(work.hyper.parameters()), v)[0]


def kfac_curvlinops(work: Workload) -> None:
    """KFAC of the Linear and Conv2d weights by curvlinops, then double backward."""
    from curvlinops import KFACInverseLinearOperator, KFACLinearOperator

    covered = (nn.Linear, nn.Conv2d)
    params = [p for m in work.model.modules() if isinstance(m, covered) for p in m.parameters(False) if p.requires_grad]
    b = torch.autograd.grad(outer(work.model, work.hyper, work.outer_batch).value, params)
    x, y, _ = work.batches[0]
    kfac = KFACLinearOperator(
        work.model,
        nn.CrossEntropyLoss(),
        params,
        [(x, y)],
        check_deterministic=False,
        fisher_type="mc",
        kfac_approx="expand",
        separate_weight_and_bias=False,
    )
    inverse = KFACInverseLinearOperator(kfac, damping=DAMPING, use_heuristic_damping=True)
    v = inverse @ list(b)
    _set_grad(work, _double_backward(work, params, v))


def cg_normal_equations(work: Workload, iterations: int = 3) -> None:
    """CG on HᵀH v = Hᵀb: one product to begin and two an iteration."""
    params = [p for p in work.model.parameters() if p.requires_grad]
    b = list(torch.autograd.grad(outer(work.model, work.hyper, work.outer_batch).value, params))
    gradients = _gradient_graph(work, params)

    def product(v: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(gradients, params, v, retain_graph=True)
        return torch._foreach_add(list(found), v, alpha=DAMPING)

    def dot(a: list[Tensor], c: list[Tensor]) -> Tensor:
        return torch.stack([(s * t).sum() for s, t in zip(a, c, strict=True)]).sum()

    r = product(b)
    p, v = list(r), [torch.zeros_like(x) for x in r]
    rr = dot(r, r)
    for _ in range(iterations):
        hp = product(product(p))
        alpha = rr / dot(p, hp)
        v = torch._foreach_add(v, torch._foreach_mul(p, alpha))
        r = torch._foreach_sub(r, torch._foreach_mul(hp, alpha))
        new = dot(r, r)
        p = torch._foreach_add(r, torch._foreach_mul(p, new / rr))
        rr = new
    found = torch.autograd.grad(gradients, list(work.hyper.parameters()), v)[0]
    _set_grad(work, found)
