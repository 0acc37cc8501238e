"""The oracle of one (model, λ): every piece of the formula in float64, by plain differentiation of the twin.

What is detached is a constant, as in autograd. Attention takes its plain kernel, and ``torch._weight_norm``, whose
second derivative is wrong in torch, is written out. :meth:`Truth.doubt` compares second derivatives with differences of
first ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from .hypers import Kind, Plain, PlainLoss

Tree = dict[str, Tensor]


def trainable(module: nn.Module) -> Tree:
    """Parameters that require a gradient, by name; those of a compiled module by the names of the original."""
    return {n.removeprefix("_orig_mod."): p for n, p in module.named_parameters() if p.requires_grad}


def flat(tensors: Sequence[Tensor | None], like: Sequence[Tensor]) -> Tensor:
    """One float64 vector; ``None`` stands for zeros."""
    pairs = zip(tensors, like, strict=True)
    return torch.cat([(torch.zeros_like(p) if x is None else x).reshape(-1).double() for x, p in pairs])


def relative(found: Tensor, wanted: Tensor) -> float:
    """‖found − wanted‖ / ‖wanted‖; the absolute error where ``wanted`` is zero."""
    return float((found - wanted).norm()) / (float(wanted.norm()) or 1.0)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    axes = [i for i in range(v.ndim) if i != dim % v.ndim] if dim != -1 else list(range(v.ndim))
    return g * v / v.square().sum(axes, keepdim=True).sqrt()


@contextmanager
def _plainly() -> Iterator[None]:
    old = sys.modules["torch.nn.utils.weight_norm"]
    ours = {"_weight_norm": _weight_norm}
    with sdpa_kernel(SDPBackend.MATH), mock.patch.multiple(torch, **ours), mock.patch.multiple(old, **ours):
        yield


class Truth:
    """J_in and J_out of one problem with their derivatives; vectors are flat, in the order of the parameters."""

    def __init__(self, kind: Kind, model: nn.Module, hyper: nn.Module, inner: Any, outer: Any, seed: int) -> None:
        self.kind, self.model, self.hyper, self.seed = kind, model, hyper, seed
        self.batches = {"inner": inner, "outer": outer}
        self.named, self.hypers = trainable(model), list(trainable(hyper).values())
        self.params = list(self.named.values())
        self._buffers = [(m, dict(m._buffers)) for m in (*model.modules(), *hyper.modules())]
        value = self.evaluate("outer").value
        self.outer_value = float(value.detach())
        found = torch.autograd.grad(value, [*self.params, *self.hypers], allow_unused=True)
        self.b = flat(found[: len(self.params)], self.params)
        self.direct = flat(found[len(self.params) :], self.hypers)
        loss = self.evaluate("inner")
        self.terms, self.penalties = loss.terms, loss.penalties
        self._sizes: dict[str, float] = {}
        self._gradient = self._slopes(loss.value, self.params)

    def evaluate(self, level: str, params: Tree | None = None, draw: int = 0) -> PlainLoss:
        """J from the same random state and buffers every time; ``params`` replace the model's."""
        torch.manual_seed(self.seed)
        if draw:
            torch.manual_seed(int(torch.randint(2**62, ())) + draw)
        for module, own in self._buffers:
            for name, buffer in own.items():
                module._buffers[name] = None if buffer is None else buffer.clone()
        function = self.kind.inner if level == "inner" else self.kind.outer
        with _plainly():
            if params is None:
                return function(Plain, self.model, self.hyper, self.batches[level])
            caller = _Caller(self.model, lambda model: function(Plain, model, self.hyper, self.batches[level]))
            return functional_call(caller, {f"model.{n}": p for n, p in params.items()}, ())

    @staticmethod
    def _slopes(value: Tensor, params: list[Tensor]) -> list[Tensor]:
        with _plainly():
            found = torch.autograd.grad(value, params, create_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for g, p in zip(found, params, strict=True)]

    def _again(self, vector: Tensor, by: list[Tensor]) -> Tensor:
        """∂⟨∂_θ J_in, vector⟩/∂by."""
        pairs = [(g, v) for g, v in zip(self._gradient, self.split(vector), strict=True) if g.requires_grad]
        if not pairs:
            return flat([None] * len(by), by)
        with _plainly():
            found = torch.autograd.grad(
                [g for g, _ in pairs], by, [v for _, v in pairs], retain_graph=True, allow_unused=True
            )
        return flat(found, by)

    def split(self, vector: Tensor) -> list[Tensor]:
        """A flat vector in the shapes of the parameters."""
        parts = vector.split([p.numel() for p in self.params])
        return [part.reshape(p.shape) for part, p in zip(parts, self.params, strict=True)]

    def cross(self, v: Tensor) -> Tensor:
        """X(v) = ∂_λ ⟨∂_θ J_in, v⟩."""
        return self._again(v, self.hypers)

    def hessian(self, v: Tensor) -> Tensor:
        """∂²_θθ J_in · v."""
        return self._again(v, self.params)

    def ggn(self, v: Tensor) -> Tensor:
        """(Jᵀ ∂²_f c J + 2α) v, with Jv as the derivative of Jᵀu in u."""
        total = torch.zeros_like(v)
        for output, criterion in self.terms:
            u = torch.zeros_like(output, requires_grad=True)
            with _plainly():
                pulled = torch.autograd.grad(output, self.params, u, create_graph=True, allow_unused=True)
                live = [(g, x) for g, x in zip(pulled, self.split(v), strict=True) if g is not None]
                (jv,) = torch.autograd.grad([g for g, _ in live], u, [x for _, x in live])
                f = output.detach().requires_grad_()
                (slope,) = torch.autograd.grad(criterion(f), f, create_graph=True)
                (hjv,) = torch.autograd.grad(slope, f, jv)
                back = torch.autograd.grad(output, self.params, hjv, retain_graph=True, allow_unused=True)
            total += flat(back, self.params)
        return total + self.l2() * v

    def l2(self) -> Tensor:
        """2α of the penalties in J_in, for each number of θ."""
        total = [torch.zeros_like(p) for p in self.params]
        for parameter, alpha in self.penalties:
            for mine, p in zip(total, self.params, strict=True):
                if p is parameter:
                    mine += 2 * alpha
        return flat(total, self.params)

    def damping(self, matrix: str) -> float:
        """A δ in proportion to ‖A‖, the Hessian or the Gauss–Newton matrix, so that A + δI is well conditioned."""
        if matrix not in self._sizes:
            x = torch.randn(len(self.b), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            for _ in range(6):
                x = getattr(self, matrix)(x / x.norm())
            self._sizes[matrix] = max(float(x.norm()), 1e-3) * (1.5 if matrix == "hessian" else 0.3)
        return self._sizes[matrix]

    def damped(self, matrix: str, v: Tensor) -> Tensor:
        """(A + δI) v."""
        return getattr(self, matrix)(v) + self.damping(matrix) * v

    def step(self, matrix: str) -> float:
        """A safe step for A + δI."""
        return 0.2 / self.damping(matrix) if matrix == "hessian" else 0.1 / self.damping(matrix)

    def doubt(self, v: Tensor, step: float = 1e-5) -> float:
        """How far X(v) and Hv are from central differences of the first derivatives, where nothing is detached."""
        direction = v / v.norm()
        return relative(self._seen(direction, step), torch.cat([self.hessian(direction), self.cross(direction)]))

    def difference(self, v: Tensor, radius: float) -> Tensor:
        """[∂_λ J_in(θ + εv) − ∂_λ J_in(θ − εv)] / 2ε with ε = radius/‖v‖, which is SAMA's cross term."""
        return self._seen(v / v.norm(), radius)[len(v) :] * v.norm()

    def _seen(self, direction: Tensor, step: float) -> Tensor:
        """The central difference of ∂_θ J_in and ∂_λ J_in along a unit vector."""
        sides = []
        for sign in (1, -1):
            moved = [p.detach() + sign * step * x for p, x in zip(self.params, self.split(direction), strict=True)]
            params = dict(zip(self.named, [p.requires_grad_() for p in moved], strict=True))
            wanted = [*params.values(), *self.hypers]
            value = self.evaluate("inner", params).value
            sides.append(flat(torch.autograd.grad(value, wanted, allow_unused=True), wanted))
        return (sides[0] - sides[1]) / (2 * step)

    def unrolled(self, steps: int, update: Callable[..., Any], constant: int = 0) -> Tensor:
        """dΦ_T/dλ with all steps in one graph; what precedes step ``constant`` is held constant."""
        params = {n: p.detach().requires_grad_() for n, p in self.named.items()}
        memory: Any = None
        for t in range(steps):
            if t == constant:
                params = {n: p.detach().requires_grad_() for n, p in params.items()}
                memory = None if memory is None else [x.detach() for x in memory]
            slopes = self._slopes(self.evaluate("inner", params, draw=t).value, list(params.values()))
            moved, memory = update(list(params.values()), slopes, memory, t + 1)
            params = dict(zip(params, moved, strict=True))
        found = torch.autograd.grad(self.evaluate("outer", params).value, self.hypers, allow_unused=True)
        return flat(found, self.hypers)


class _Caller(nn.Module):
    """What ``functional_call`` substitutes the parameters of."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self) -> Any:
        return self.function(self.model)
