"""Every hypergradient with its cross modes, and what is known of its v.

A method is made for a :class:`Setting` and judged by ``v``, one of

- ``solved``: (A + δI) v = b by a product of the oracle's, where the status says that it was solved; where the budget
  ran out, the residual it reports;
- ``equals``: a vector that the oracle computes by the method's definition (K steps of CG, a series, a multiple of b);
- ``blocks``: KFAC's or EKFAC's, layer by layer, and how much of the model they cover;
- nothing, where v is random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.hypergradient.steps import SGD, Adam

from .truth import Truth

MODES = ("auto", "reverse", "forward", "difference")
DAMPING, ALPHA = 0.1, 1e-3


@dataclass
class Setting:
    """What some methods need to be made: the model, the oracle, and an optimizer in the middle of its work."""

    model: nn.Module
    truth: Truth

    @property
    def alpha(self) -> float:
        """SAMA's radius: the default where a smaller step would be lost in the rounding of the weights."""
        return 0.1 if next(self.model.parameters()).dtype == torch.bfloat16 else ALPHA

    def adam(self) -> torch.optim.Optimizer:
        """Adam after two steps that left θ where it was."""
        params = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(params, lr=0.01)
        generator = torch.Generator().manual_seed(5)
        before = [p.detach().clone() for p in params]
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            optimizer.step()
        with torch.no_grad():
            for p, old in zip(params, before, strict=True):
                p.copy_(old)
        return optimizer


@dataclass(frozen=True)
class Method:
    """One column of the grid.

    Attributes:
        make: the hypergradient.
        mode: how its cross term is computed; ``sama`` for its finite difference, ``none`` where there is none.
        solved: the matrix of the system that v solves, ``hessian`` or ``ggn``, with the oracle's damping.
        equals: v, or dΦ/dλ where there is no v, from the oracle.
        blocks: (δ, fisher, sharing, split) of KFAC, or with split ``ekfac``.
        calls: it is called this many times, and the last one judged.
        random: v cannot be known.
        radius: of SAMA's finite difference.
    """

    make: Callable[[Setting], hk.hypergradient.Hypergradient]
    mode: str = "auto"
    solved: str | None = None
    equals: Callable[[Truth], Tensor] | None = None
    blocks: tuple[float, str, str, str] | None = None
    calls: int = 1
    random: bool = False
    radius: float = 0.0


def _steps_of_cg(matrix: str, count: int) -> Callable[[Truth], Tensor]:
    def run(truth: Truth) -> Tensor:
        v, r = torch.zeros_like(truth.b), truth.b.clone()
        p = r.clone()
        for _ in range(count):
            product = truth.damped(matrix, p)
            alpha = (r @ r) / (p @ product)
            v, after = v + alpha * p, r - alpha * product
            p, r = after + (after @ after) / (r @ r) * p, after
        return v

    return run


def _descent(matrix: str, count: int) -> Callable[[Truth], Tensor]:
    def run(truth: Truth) -> Tensor:
        v = torch.zeros_like(truth.b)
        for _ in range(count):
            v = v - truth.step(matrix) * (truth.damped(matrix, v) - truth.b)
        return v

    return run


def _adam_diagonal(truth: Truth) -> Tensor:
    """lr·D ⊙ b of the optimizer in :meth:`Setting.adam`, from its moments before the last step."""
    generator = torch.Generator().manual_seed(5)
    grads = [torch.cat([torch.randn(p.shape, generator=generator).reshape(-1) for p in truth.params]) for _ in range(2)]
    first, g = (x.double() for x in grads)
    m, s = 0.1 * first, 0.001 * first.square()
    after = 0.999 * s + 0.001 * g.square()
    top = 0.1 * 0.999 * s - 0.9 * 0.001 * g * m
    return 0.01 * top / (after.sqrt() + 1e-8) ** 3 * truth.b


def _sgd(lr: float, momentum: float = 0.0) -> Callable[..., Any]:
    def update(params: list[Tensor], grads: list[Tensor], memory: Any, t: int) -> Any:
        if momentum and memory is not None:
            grads = [momentum * m + g for m, g in zip(memory, grads, strict=True)]
        return [p - lr * g for p, g in zip(params, grads, strict=True)], grads if momentum else None

    return update


def _adam(lr: float, eps: float) -> Callable[..., Any]:
    def update(params: list[Tensor], grads: list[Tensor], memory: Any, t: int) -> Any:
        count = len(params)
        old = memory or [torch.zeros_like(p) for p in params] * 2
        m = [0.9 * x + 0.1 * g for x, g in zip(old[:count], grads, strict=True)]
        s = [0.999 * x + 0.001 * g * g for x, g in zip(old[count:], grads, strict=True)]
        moved = []
        for p, x, y in zip(params, m, s, strict=True):
            bare = y == 0  # a gradient that is always zero moves nothing
            root = torch.where(bare, 0.0, torch.where(bare, 1.0, y).sqrt())
            moved.append(p - lr / (1 - 0.9**t) * x / (root / (1 - 0.999**t) ** 0.5 + eps))
        return moved, [*m, *s]

    return update


def _kronecker() -> dict[str, Method]:
    def kfac(fisher: str = "type-2", sharing: str = "expand", split: str = "pi", **more: Any) -> Method:
        calls = more.pop("calls", 1)
        return Method(
            lambda s: hk.kfac(DAMPING, fisher=fisher, sharing=sharing, split=split, **more),  # type: ignore[arg-type]
            more.get("cross", "auto"),
            blocks=(DAMPING, fisher, sharing, split),
            calls=calls,
            random=fisher == "mc",
        )

    def ekfac(fisher: str = "type-2", sharing: str = "expand", **more: Any) -> Method:
        calls = more.pop("calls", 1)
        return Method(
            lambda s: hk.ekfac(DAMPING, fisher=fisher, sharing=sharing, **more),  # type: ignore[arg-type]
            blocks=(DAMPING, fisher, sharing, "ekfac"),
            calls=calls,
            random=fisher == "mc",
        )

    return {
        **{f"kfac, {mode}": kfac(cross=mode) for mode in MODES},
        "kfac mc": kfac("mc"),
        "kfac empirical": kfac("empirical"),
        "kfac reduce": kfac(sharing="reduce"),
        "kfac exact": kfac(split="exact"),
        "kfac plain": kfac(split="plain"),
        "kfac second call": kfac(calls=2),
        "ekfac": ekfac(),
        "ekfac mc": ekfac("mc"),
        "ekfac empirical": ekfac("empirical"),
        "ekfac reduce": ekfac(sharing="reduce"),
        "ekfac kept basis": ekfac(basis_every=5, calls=2),
    }


def _iterative() -> dict[str, Method]:
    def curvature(s: Setting, which: str) -> Any:
        return (hk.curvature.GGN if which == "ggn" else hk.curvature.Hessian)(s.truth.damping(which))

    def cg(
        which: str, count: int = 200, tolerance: float = 1e-7, **more: Any
    ) -> Callable[[Setting], hk.hypergradient.Hypergradient]:
        return lambda s: hk.cg(count, curvature=curvature(s, which), tolerance=tolerance, **more)

    def pcg(s: Setting) -> hk.hypergradient.Hypergradient:
        return hk.pcg(200, s.truth.damping("ggn"), tolerance=1e-7)

    def neumann(s: Setting) -> hk.hypergradient.Hypergradient:
        return hk.neumann(6, curvature=curvature(s, "hessian"), step=s.truth.step("hessian"))

    def descent(which: str, count: int, **more: Any) -> Callable[[Setting], hk.hypergradient.Hypergradient]:
        return lambda s: hk.gradient_descent(count, step=s.truth.step(which), curvature=curvature(s, which), **more)

    return {
        **{f"cg hessian, {mode}": Method(cg("hessian", cross=mode), mode, "hessian") for mode in MODES},
        **{f"cg ggn, {mode}": Method(cg("ggn", cross=mode), mode, "ggn") for mode in MODES},
        "cg 3": Method(cg("hessian", 3, 0.0), equals=_steps_of_cg("hessian", 3)),
        "cg warm": Method(cg("hessian", warm_start=True), solved="hessian", calls=2),
        "pcg": Method(pcg, solved="ggn"),
        "neumann": Method(neumann, equals=_descent("hessian", 7)),
        "neumann found step": Method(lambda s: hk.neumann(40, curvature=curvature(s, "hessian")), solved="hessian"),
        "descent": Method(descent("ggn", 5, warm_start=False), equals=_descent("ggn", 5)),
        "descent warm": Method(descent("hessian", 3), equals=_descent("hessian", 6), calls=2),
    }


METHODS: dict[str, Method] = {
    **{f"identity, {m}": Method(lambda s, m=m: hk.identity(cross=m), m, equals=lambda t: t.b) for m in MODES},  # type: ignore[misc]
    **_kronecker(),
    **_iterative(),
    "sama": Method(lambda s: hk.sama(alpha=s.alpha), "sama", equals=lambda t: t.b, radius=ALPHA),
    "sama wide": Method(lambda s: hk.sama(), "sama", equals=lambda t: t.b, radius=0.1),
    "sama sgd": Method(
        lambda s: hk.sama(torch.optim.SGD([p for p in s.model.parameters() if p.requires_grad], 0.3), alpha=s.alpha),
        "sama",
        equals=lambda t: 0.3 * t.b,
        radius=ALPHA,
    ),
    "sama adam": Method(lambda s: hk.sama(s.adam(), alpha=s.alpha), "sama", equals=_adam_diagonal, radius=ALPHA),
    "one step": Method(lambda s: hk.one_step(0.1), "none", equals=lambda t: t.unrolled(1, _sgd(0.1))),
    "unrolled": Method(lambda s: hk.unrolled(3, SGD(0.1)), "none", equals=lambda t: t.unrolled(3, _sgd(0.1))),
    "unrolled momentum": Method(
        lambda s: hk.unrolled(3, SGD(0.1, momentum=0.8), checkpoint_every=2),
        "none",
        equals=lambda t: t.unrolled(3, _sgd(0.1, 0.8)),
    ),
    "unrolled adam": Method(
        lambda s: hk.unrolled(2, Adam(0.05, eps=1e-2)), "none", equals=lambda t: t.unrolled(2, _adam(0.05, 1e-2))
    ),
    "truncated": Method(
        lambda s: hk.truncated(3, 2, SGD(0.1)), "none", equals=lambda t: t.unrolled(3, _sgd(0.1), constant=1)
    ),
}
