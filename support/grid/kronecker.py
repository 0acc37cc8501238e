"""What KFAC and EKFAC say v is, block by block, from the rows that pass through each layer of the twin.

    A = mean a aᵀ,   B = Σ_c Σ g gᵀ,   type-2: s_c = √(w p_c)(e_c − p),   empirical: s = √w (p − y)

``expand`` takes every position for a row, ``reduce`` the mean of a and the sum of g over the positions of an example.
EKFAC's spectrum is that of whole examples' gradients G = Σ_s g_s a_sᵀ in the eigenbasis of A and B.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .truth import Truth, _plainly

COVERED = (nn.Linear, nn.Conv1d, nn.Conv2d)
_UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have a block of their own here: plain, trained, not tied to another module."""
    owners: dict[int, int] = {}
    for m in model.modules():
        for p in m._parameters.values():
            if p is not None:
                owners[id(p)] = owners.get(id(p), 0) + 1
    return {
        name: m
        for name, m in model.named_modules()
        if type(m) in COVERED
        and not isinstance(m, _UNCALLED)
        and isinstance(m._parameters.get("weight"), nn.Parameter)
        and all(owners[id(p)] == 1 for p in m.parameters())
        and any(p.requires_grad for p in m.parameters())
    }


def _rows(module: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (N, S, d_in), with a 1 for a trained bias, and output gradients (N, S, d_out)."""
    if isinstance(module, nn.Linear):
        a, b = x.reshape(len(x), -1, x.shape[-1]), g.reshape(len(g), -1, g.shape[-1])
    else:
        assert isinstance(module, nn.Conv2d) and module.groups == 1
        a = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
        b = g.flatten(2).mT
    parts = [a] if module.weight.requires_grad else []  # type: ignore[union-attr]
    if module.bias is not None and module.bias.requires_grad:  # type: ignore[union-attr]
        parts.append(a.new_ones(*a.shape[:-1], 1))
    return torch.cat(parts, -1), b


def _vectors(fisher: str, output: Tensor, weights: Tensor, target: Tensor) -> Iterator[Tensor]:
    p = output.detach().softmax(-1)
    root = weights.sqrt()[..., None]
    if fisher == "empirical":
        yield root * (p - target)
        return
    for c in range(p.shape[-1]):
        one = torch.zeros_like(p)
        one[..., c] = 1.0
        yield root * p[..., c : c + 1].sqrt() * (one - p)


class Blocks:
    """Rows of every layer, and from them v."""

    def __init__(self, truth: Truth) -> None:
        self.truth, self.layers = truth, layers(truth.model)
        self._passes: dict[str, dict[str, list[tuple[Tensor, Tensor]]]] = {}

    def passes(self, fisher: str) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """(a, g) of each layer, for each vector and each call."""
        if fisher not in self._passes:
            calls: list[tuple[str, Tensor, Tensor]] = []

            def hook(name: str) -> object:
                return lambda _, inputs, output: calls.append((name, inputs[0].detach(), output))

            handles = [m.register_forward_hook(hook(name)) for name, m in self.layers.items()]  # type: ignore[arg-type]
            loss = self.truth.evaluate("inner")
            for handle in handles:
                handle.remove()
            calls = [call for call in calls if call[2].requires_grad]  # others have no share in the curvature
            found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in self.layers}
            ((output, _),) = loss.terms
            for vector in _vectors(fisher, output, loss.weights, loss.target):
                with _plainly():
                    slopes = torch.autograd.grad(
                        output, [z for *_, z in calls], vector, retain_graph=True, allow_unused=True
                    )
                for (name, x, _), g in zip(calls, slopes, strict=True):
                    if g is not None:
                        found[name].append(_rows(self.layers[name], x, g))
            self._passes[fisher] = found
        return self._passes[fisher]

    def order(self, name: str) -> Tensor:
        """Where the entries of [W | b], row by row, lie in the flat vector of θ."""
        places, position = {}, 0
        for full, p in self.truth.named.items():
            places[full] = torch.arange(position, position + p.numel()).reshape(p.shape)
            position += p.numel()
        weight, bias = places.get(f"{name}.weight"), places.get(f"{name}.bias")
        parts = [] if weight is None else [weight.reshape(len(weight), -1)]
        return torch.cat([*parts, *([] if bias is None else [bias.reshape(-1, 1)])], 1)

    def factors(self, name: str, fisher: str, sharing: str) -> tuple[Tensor, Tensor]:
        """A and B of one layer."""
        passed = self.passes(fisher)[name]
        if sharing == "reduce":
            passed = [(a.mean(1, keepdim=True), g.sum(1, keepdim=True)) for a, g in passed]
        rows = torch.cat([a.reshape(-1, a.shape[-1]) for a, _ in passed])  # the same a for every vector
        slopes = torch.cat([g.reshape(-1, g.shape[-1]) for _, g in passed])
        return rows.T @ rows / len(rows), slopes.T @ slopes

    def kfac(self, name: str, damping: float, fisher: str, sharing: str, split: str) -> Tensor | None:
        """v of one layer, as [W | b]; ``None`` where the formula leaves open how penalties join the damping."""
        order = self.order(name)
        b, alpha = self.truth.b[order], self.truth.l2()[order]
        A, B = self.factors(name, fisher, sharing)
        if split == "exact":
            matrix = torch.kron(B, A) + torch.diag(alpha.reshape(-1) + damping)
            return torch.linalg.solve(matrix, b.reshape(-1)).reshape(b.shape)
        if bool(alpha.any()):
            return None
        mean_a, mean_b = A.diagonal().mean(), B.diagonal().mean()
        pi = (mean_a / mean_b).sqrt() if split == "pi" and mean_a > 0 and mean_b > 0 else torch.ones(())
        root = damping**0.5
        left = torch.linalg.solve(B + root / pi * torch.eye(len(B), dtype=B.dtype), b)
        return torch.linalg.solve(A + pi * root * torch.eye(len(A), dtype=A.dtype), left.T).T

    def ekfac(self, name: str, damping: float, fisher: str, sharing: str) -> Tensor | None:
        """v of one layer, as [W | b]; ``None`` where the eigenbasis is not unique, or penalties are uneven."""
        order = self.order(name)
        b, alpha = self.truth.b[order], self.truth.l2()[order]
        A, B = self.factors(name, fisher, sharing)
        if float(B.trace()) <= 1e-20 * float(self.factors(name, fisher, "expand")[1].trace()):
            return None  # nothing but rounding, as of the keys of attention, whose slopes cancel over positions
        bases = [torch.linalg.eigh(x) for x in (A, B)]
        if any(not _unique(values) for values, _ in bases) or float(alpha.max() - alpha.min()) > 0:
            return None
        (_, q_a), (_, q_b) = bases
        spectrum = torch.zeros_like(b)
        for a, g in self.passes(fisher)[name]:
            spectrum += torch.einsum("nsi,nsj->nij", g @ q_b, a @ q_a).square().sum(0)
        if not _within(bases, spectrum):
            return None
        return q_b @ ((q_b.T @ b @ q_a) / (spectrum + alpha + damping)) @ q_a.T


def _within(bases: list[tuple[Tensor, Tensor]], spectrum: Tensor) -> bool:
    """Whether nothing lies where a basis is arbitrary: in a null space of A or B of more than one dimension."""
    nulls = [values <= 1e-10 * values.max() for values, _ in bases]
    a, b = (null if int(null.sum()) > 1 else torch.zeros_like(null) for null in nulls)
    return float(spectrum[b[:, None] | a[None, :]].sum()) <= 1e-10 * float(spectrum.sum())


def _unique(values: Tensor) -> bool:
    """Whether the eigenvectors of all positive eigenvalues are determined."""
    positive = values[values > 1e-10 * values.max()]
    return len(positive) < 2 or float(positive.diff().min()) > 1e-6 * float(values.max())
