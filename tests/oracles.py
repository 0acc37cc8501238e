"""Dense float64 oracles: every piece of the formula as an explicit matrix, by the slowest and plainest way.

Nothing here shares code with the library: Jacobians and Hessians come from autograd one row at a time, Kronecker
factors from Python loops over examples and positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Tree = dict[str, Tensor]


def trainable(module: nn.Module) -> Tree:
    """The parameters that require a gradient, by name."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def flat(tree: Tree | Iterable[Tensor]) -> Tensor:
    """One vector from many tensors."""
    tensors = tree.values() if isinstance(tree, dict) else tree
    return torch.cat([t.detach().reshape(-1) for t in tensors])


def tree(vector: Tensor, like: Tree) -> Tree:
    """The inverse of :func:`flat`."""
    parts = vector.split([p.numel() for p in like.values()])
    return {name: part.reshape(p.shape) for (name, p), part in zip(like.items(), parts, strict=True)}


def relative(found: Tensor | Tree, wanted: Tensor | Tree) -> float:
    """‖found − wanted‖ / ‖wanted‖ (the absolute error where ``wanted`` is zero)."""
    a = flat(found) if isinstance(found, dict) else found
    b = flat(wanted) if isinstance(wanted, dict) else wanted
    assert a.shape == b.shape
    size = float(b.norm())
    return float((a - b).norm()) / (size or 1.0)


def gradient(value: Tensor, inputs: list[Tensor], graph: bool = False) -> Tensor:
    """The gradient of a scalar in all inputs, as one vector."""
    if not value.requires_grad:
        return torch.cat([torch.zeros_like(x).reshape(-1) for x in inputs])
    found = torch.autograd.grad(value, inputs, create_graph=graph, retain_graph=True, allow_unused=True)
    filled = [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]
    return torch.cat([g.reshape(-1) for g in filled])


def jacobian(outputs: Tensor, inputs: list[Tensor]) -> Tensor:
    """∂outputs/∂inputs, (numbers in outputs, numbers in inputs), one row at a time."""
    return torch.stack([gradient(entry, inputs).detach() for entry in outputs.reshape(-1)])


def hessian(value: Callable[[], Tensor], inputs: list[Tensor], others: list[Tensor] | None = None) -> Tensor:
    """∂²value/∂others∂inputs, (numbers in inputs, numbers in others); without ``others`` the Hessian."""
    with sdpa_kernel(SDPBackend.MATH):
        first = gradient(value(), inputs, graph=True)
    return jacobian(first, others or inputs)


def ggn(outputs: Tensor, criterion: Callable[[Tensor], Tensor], params: list[Tensor]) -> Tensor:
    """Jᵀ (∂²criterion/∂outputs²) J with a dense Jacobian and a dense Hessian of the criterion."""
    leaf = outputs.detach().requires_grad_()
    curvature = hessian(lambda: criterion(leaf), [leaf])
    j = jacobian(outputs, params)
    return j.T @ curvature @ j


def fisher(output: Tensor, vectors: Iterable[Tensor], params: list[Tensor]) -> Tensor:
    """Σ_vectors Σ_n G_n G_nᵀ with G_n the gradient of ⟨vector_n, output_n⟩, example by example."""
    size = sum(p.numel() for p in params)
    total = torch.zeros(size, size, dtype=output.dtype)
    for vector in vectors:
        for n in range(len(output)):
            g = gradient((vector[n].detach() * output[n]).sum(), params).detach()
            total += torch.outer(g, g)
    return total


def implicit(case: Any, curvature: Tensor, *, damping: float = 0.0) -> Tree:
    """∂_λ J_out − ∂²_λθ J_in (A + δI)⁻¹ ∂_θ J_out with everything dense."""
    params, hypers = list(trainable(case.model).values()), list(trainable(case.hyper).values())
    outer = case.plain_outer()
    b, direct = gradient(outer, params).detach(), gradient(outer, hypers).detach()
    eye = torch.eye(len(b), dtype=b.dtype)
    v = torch.linalg.solve(curvature + damping * eye, b)
    crossed = hessian(case.plain_inner, params, hypers)
    return tree(direct - crossed.T @ v, trainable(case.hyper))


def dense(product: Callable[[Tree], Tree], like: Tree) -> Tensor:
    """The matrix of a linear map on trees, column by column."""
    size = sum(p.numel() for p in like.values())
    eye = torch.eye(size, dtype=next(iter(like.values())).dtype)
    return torch.stack([flat(product(tree(e, like))) for e in eye], dim=1)


def block_diagonal(matrix: Tensor, like: Tree, blocks: list[list[str]]) -> Tensor:
    """``matrix`` with everything outside the blocks (lists of parameter names) set to zero."""
    ids = {name: i for i, names in enumerate(blocks) for name in names}
    label = torch.cat([torch.full((p.numel(),), ids[name]) for name, p in like.items()])
    return matrix * (label[:, None] == label[None, :])


# ---------------------------------------------------------------------------------------------------------------------
# Kronecker factors by loops


def patches(module: nn.Module, x: Tensor) -> Tensor:
    """What each output position of a convolution reads: (N, groups, S, d_in), entry by entry."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode  # type: ignore[attr-defined]
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation  # type: ignore[attr-defined]
    groups: int = module.groups  # type: ignore[assignment]
    pads: list[int] = []
    for k, d, axis in zip(kernel, dilation, range(len(kernel)), strict=True):  # type: ignore[call-overload]
        if module.padding == "same":
            total = d * (k - 1)
            pads = [total // 2, total - total // 2, *pads]
        elif module.padding != "valid":
            pads = [module.padding[axis]] * 2 + pads  # type: ignore[index, operator]
    if any(pads):
        x = F.pad(x, pads, mode=mode)
    out = [
        (size - d * (k - 1) - 1) // s + 1
        for size, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)  # type: ignore[call-overload]
    ]
    per_group = x.shape[1] // groups
    rows = []
    for position in itertools.product(*[range(o) for o in out]):
        entries = []
        for c in range(per_group):
            for offset in itertools.product(*[range(k) for k in kernel]):  # type: ignore[call-overload]
                at = [p * s + o * d for p, s, o, d in zip(position, stride, offset, dilation, strict=True)]  # type: ignore[call-overload]
                column = torch.stack([x[(slice(None), g * per_group + c, *at)] for g in range(groups)], dim=1)
                entries.append(column)
        rows.append(torch.stack(entries, dim=-1))
    return torch.stack(rows, dim=2)


def layer_rows(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (N, groups, S, d_in) and output gradients (N, groups, S, d_out) of a Linear or Conv layer."""
    if isinstance(module, nn.Linear):
        count = 1 if x.dim() == 1 else x.shape[0]
        return x.reshape(count, 1, -1, x.shape[-1]), g.reshape(count, 1, -1, g.shape[-1])
    groups: int = module.groups  # type: ignore[assignment]
    rows = g.reshape(g.shape[0], groups, g.shape[1] // groups, -1).transpose(2, 3)
    return patches(module, x), rows


def with_one(module: nn.Module, a: Tensor) -> Tensor:
    """A column of ones where the bias is trained, and no other column where the weight is not."""
    ones = a.new_ones(*a.shape[:-1], 1)
    has_bias = module.bias is not None and module.bias.requires_grad  # type: ignore[union-attr]
    columns = [a] if module.weight.requires_grad else []  # type: ignore[union-attr]
    return torch.cat([*columns, ones] if has_bias else columns, dim=-1)


class Watch:
    """Inputs and outputs of every call of the watched layers that are trained, in the order of the calls."""

    def __init__(self, model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> None:
        self.modules = {
            name: m
            for name, m in model.named_modules()
            if isinstance(m, kinds) and any(p.requires_grad for p in m.parameters())
        }
        self.calls: list[tuple[str, Tensor, Tensor]] = []

    def __enter__(self) -> Watch:
        def hook(name: str) -> Callable[..., None]:
            return lambda module, inputs, output: self.calls.append((name, inputs[0].detach(), output))

        self.handles = [m.register_forward_hook(hook(name)) for name, m in self.modules.items()]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self.handles:
            handle.remove()


COVERED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def kfac_factors(
    model: nn.Module, run: Callable[[], Any], vectors: Callable[[Any], Iterable[tuple[Tensor, Tensor]]], sharing: str
) -> dict[str, tuple[Tensor, Tensor]]:
    """(A, B) of every layer, each (groups, d, d): A averages a aᵀ over all rows, B sums g gᵀ over rows and vectors.

    ``run`` evaluates the inner loss, ``vectors`` turns what it returns into pairs (output, vector).
    """
    with Watch(model, COVERED) as watch:
        made = run()
    outputs = [output for _, _, output in watch.calls]
    a_sum: dict[str, Tensor] = {}
    b_sum: dict[str, Tensor] = {}
    rows: dict[str, int] = {}
    for index, (output, vector) in enumerate(vectors(made)):
        grads = torch.autograd.grad(output, outputs, vector, retain_graph=True, allow_unused=True)
        for (name, x, z), g in zip(watch.calls, grads, strict=True):
            module = watch.modules[name]
            a, b = layer_rows(module, x, torch.zeros_like(z) if g is None else g)
            a = with_one(module, a)
            if sharing == "reduce":
                a, b = a.mean(2, keepdim=True), b.sum(2, keepdim=True)
            for n, s in itertools.product(range(a.shape[0]), range(a.shape[2])):
                outer_b = torch.stack([torch.outer(row, row) for row in b[n, :, s]])
                b_sum[name] = b_sum.get(name, torch.zeros_like(outer_b)) + outer_b
                if index == 0:
                    outer_a = torch.stack([torch.outer(row, row) for row in a[n, :, s]])
                    a_sum[name] = a_sum.get(name, torch.zeros_like(outer_a)) + outer_a
                    rows[name] = rows.get(name, 0) + 1
    return {name: (a_sum[name] / rows[name], b_sum[name]) for name in a_sum}


def kron(a: Tensor, b: Tensor) -> Tensor:
    """B ⊗ A over rows [W | b] of a layer (row-major), groups on the diagonal."""
    return torch.block_diag(*[torch.kron(b[g], a[g]) for g in range(len(a))])


def joint_order(module: nn.Module, prefix: str, like: Tree) -> Tensor:
    """Where the entries of [W | b], row-major and group by group, lie in the flat vector of all parameters."""
    offsets, position = {}, 0
    for name, p in like.items():
        offsets[name] = torch.arange(position, position + p.numel()).reshape(p.shape)
        position += p.numel()
    parts = []
    weight, bias = offsets.get(f"{prefix}weight"), offsets.get(f"{prefix}bias")
    if weight is not None:
        parts.append(weight.reshape(weight.shape[0], -1))
    if bias is not None:
        parts.append(bias.reshape(-1, 1))
    return torch.cat(parts, dim=1).reshape(-1)
