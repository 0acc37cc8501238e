"""Named hypergradients: each is :class:`Implicit` with its parts chosen, under the name of its paper."""

from __future__ import annotations

import torch

from hyperkron.cross import Mode
from hyperkron.curvature import EKFAC, GGN, KFAC, AdamDiagonal, Curvature, Hessian
from hyperkron.curvature import Identity as IdentityCurvature
from hyperkron.curvature.kfac.inverse import Split
from hyperkron.curvature.kfac.layers import WeightSharing
from hyperkron.hypergradient.implicit import Graph, Implicit
from hyperkron.losses import Fisher
from hyperkron.solution import HyperkronError
from hyperkron.solvers import CG, Direct, GradientDescent, Neumann
from hyperkron.validation import check_positive


def kfac(
    damping: float = 1e-3,
    *,
    fisher: Fisher = "mc",
    samples: int = 1,
    sharing: WeightSharing = "expand",
    split: Split = "pi",
    refresh_every: int = 1,
    ema: float = 0.0,
    cross: Mode = "auto",
    seed: int = 0,
    graph: Graph = False,
    keep_previous: bool = True,
) -> Implicit:
    """The KFAC hypergradient: v = (B ⊗ A + damping)⁻¹ ∂_θ J_out, layer by layer, without iterations.

    Args:
        damping, fisher, samples, sharing, split, refresh_every, ema, seed, keep_previous: see
            :class:`hyperkron.curvature.KFAC`.
        cross, graph: see :class:`hyperkron.Implicit`.

    Reference: Liao, Dangel & Yu, "Efficient bilevel optimization with KFAC-based hypergradients" (AISTATS 2026).

    Example:
        >>> import torch, hyperkron as hk
        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> model, weights = torch.nn.Linear(4, 3), hk.SampleWeights(8)
        >>> x, y, index = torch.randn(8, 4), torch.randint(3, (8,)), torch.arange(8)
        >>> problem = hk.BilevelProblem(
        ...     lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        ...     lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
        ... )
        >>> result = hk.kfac(damping=1e-2).backward(problem, model, weights, (x, y, index), (x, y, index))
        >>> print(result.status.value)
        The system was solved directly from its factorisation.
        >>> weights.weight.grad.shape
        torch.Size([8])
    """
    curvature = KFAC(
        damping,
        fisher=fisher,
        samples=samples,
        sharing=sharing,
        split=split,
        refresh_every=refresh_every,
        ema=ema,
        seed=seed,
        keep_previous=keep_previous,
    )
    return Implicit(curvature, Direct(), cross=cross, graph=graph)


def ekfac(
    damping: float = 1e-3,
    *,
    fisher: Fisher = "mc",
    samples: int = 1,
    sharing: WeightSharing = "expand",
    refresh_every: int = 1,
    ema: float = 0.0,
    basis_every: int = 1,
    cross: Mode = "auto",
    seed: int = 0,
    keep_previous: bool = True,
    graph: Graph = False,
) -> Implicit:
    """The EKFAC hypergradient: KFAC's eigenbasis with corrected eigenvalues.

        v = Q (S + damping)⁻¹ Qᵀ ∂_θ J_out    for each layer

    Args:
        damping, fisher, samples, sharing, refresh_every, ema, basis_every, seed, keep_previous: see
            :class:`hyperkron.curvature.EKFAC`.
        cross, graph: see :class:`hyperkron.Implicit`.

    Reference: George et al., "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis"
    (NeurIPS 2018).

    Example: a new eigenbasis at every tenth call, new eigenvalues at each.
        >>> ekfac(damping=1e-2, basis_every=10).curvature.basis_every
        10
    """
    curvature = EKFAC(
        damping,
        fisher=fisher,
        samples=samples,
        sharing=sharing,
        refresh_every=refresh_every,
        ema=ema,
        seed=seed,
        keep_previous=keep_previous,
        basis_every=basis_every,
    )
    return Implicit(curvature, Direct(), cross=cross, graph=graph)


def cg(
    iterations: int = 3,
    damping: float = 1e-3,
    *,
    curvature: Curvature | None = None,
    tolerance: float = 0.0,
    warm_start: bool = False,
    cross: Mode = "auto",
    graph: Graph = False,
) -> Implicit:
    """AID-CG: a few conjugate-gradient iterations on (H + damping·I) v = ∂_θ J_out.

    Args:
        iterations: number of iterations; each is one product with the curvature.
        damping: δ in H + δI; not used when ``curvature`` is given.
        curvature: default: ``Hessian(damping)``. ``GGN(damping)`` is positive semi-definite.
        tolerance: stop early at this relative residual.
        warm_start: start from the previous solution.
        cross, graph: see :class:`hyperkron.Implicit`.

    Reference: Grazzi et al., "On the iteration complexity of hypergradient computation" (ICML 2020).

    Example: three iterations with the Gauss–Newton matrix, where the Hessian may be indefinite.
        >>> cg(3, curvature=GGN(1e-2), warm_start=True).solver
        CG(iterations=3, tolerance=0.0)
    """
    solver, curvature = CG(iterations, tolerance), Hessian(damping) if curvature is None else curvature
    return Implicit(curvature, solver, warm_start=warm_start, cross=cross, graph=graph)


def pcg(
    iterations: int = 10,
    damping: float = 1e-3,
    *,
    curvature: Curvature | None = None,
    preconditioner: Curvature | None = None,
    tolerance: float = 1e-6,
    warm_start: bool = False,
    cross: Mode = "auto",
) -> Implicit:
    """Conjugate gradients preconditioned by KFAC: an accurate solution with few products.

        (G + damping·I) v = ∂_θ J_out ,    preconditioned by (B ⊗ A + damping·I)⁻¹

    Args:
        iterations: maximum number of iterations.
        damping: of the default curvature and the default preconditioner.
        curvature: default: ``GGN(damping)``.
        preconditioner: default: ``KFAC(damping)``.
        tolerance: stop at this relative residual.
        warm_start: start from the previous solution.
        cross: see :class:`hyperkron.Implicit`.

    Example:
        >>> pcg(3, damping=1e-2).preconditioner.damping
        0.01
    """
    return Implicit(
        GGN(damping) if curvature is None else curvature,
        CG(iterations, tolerance),
        preconditioner=KFAC(damping) if preconditioner is None else preconditioner,
        warm_start=warm_start,
        cross=cross,
    )


def neumann(
    terms: int = 10,
    damping: float = 0.0,
    *,
    step: float | None = None,
    curvature: Curvature | None = None,
    cross: Mode = "auto",
    graph: Graph = False,
) -> Implicit:
    """AID-Neumann: v = η Σ_{k=0}^{K} (I − ηH)^k ∂_θ J_out.

    Args:
        terms: K, the last power in the series.
        damping: δ in H + δI; not used when ``curvature`` is given.
        step: η; ``None`` computes a safe step by power iteration.
        curvature: default: ``Hessian(damping)``.
        cross, graph: see :class:`hyperkron.Implicit`; a graph needs ``step``.

    Reference: Lorraine et al., "Optimizing millions of hyperparameters by implicit differentiation" (AISTATS 2020).

    Example:
        >>> neumann(10, step=0.1).solver.terms
        10
    """
    curvature = Hessian(damping) if curvature is None else curvature
    return Implicit(curvature, Neumann(terms, step), cross=cross, graph=graph)


def gradient_descent(
    iterations: int = 10,
    damping: float = 0.0,
    *,
    step: float | None = None,
    curvature: Curvature | None = None,
    preconditioner: Curvature | None = None,
    warm_start: bool = True,
    cross: Mode = "auto",
    graph: Graph = False,
) -> Implicit:
    """AmIGO's linear solve: gradient steps v ← v − ηM⁻¹(Hv − ∂_θ J_out) from the previous solution.

    Args:
        iterations: number of steps; each is one product with the curvature.
        damping: δ in H + δI; not used when ``curvature`` is given.
        step: η; ``None`` computes a safe step by power iteration, or uses 1 with a preconditioner.
        curvature: default: ``Hessian(damping)``.
        preconditioner: M, a curvature with an inverse such as ``KFAC(1.0)``; ``None``: M = I.
        warm_start: start from the previous solution.
        cross, graph: see :class:`hyperkron.Implicit`; ``graph=True`` needs ``step`` and no preconditioner.

    Reference: Arbel & Mairal, "Amortized implicit differentiation for stochastic bilevel optimization" (ICLR 2022).

    Example: in AmIGO, one step preconditioned by KFAC in place of ten plain ones.
        >>> gradient_descent(1, step=1.0, preconditioner=KFAC(1.0)).warm_start
        True
    """
    return Implicit(
        Hessian(damping) if curvature is None else curvature,
        GradientDescent(iterations, step),
        preconditioner=preconditioner,
        warm_start=warm_start,
        cross=cross,
        graph=graph,
    )


def identity(scale: float = 1.0, *, cross: Mode = "auto", graph: Graph = False) -> Implicit:
    """The hypergradient without curvature: v = scale·∂_θ J_out (as in DARTS, H = I).

    Args:
        scale: the number used for A⁻¹.
        cross, graph: see :class:`hyperkron.Implicit`.

    Reference: Liu et al., "DARTS: differentiable architecture search" (ICLR 2019).

    Example:
        >>> identity(scale=0.1).curvature
        Identity(scale=0.1)
    """
    return Implicit(IdentityCurvature(scale), Direct(), cross=cross, graph=graph)


def sama(optimizer: torch.optim.Optimizer | None = None, *, alpha: float = 0.1, graph: Graph = False) -> Implicit:
    """The SAMA hypergradient: A is replaced by the inner optimizer's scaling; the cross term is a finite difference.

        v = lr·D ⊙ ∂_θ J_out ,    ε = alpha/‖v‖

    If λ only weights examples or penalties, the difference is taken of the losses, not of ∂_λ J_in, so that weights
    computed from detached losses (``MetaWeightNet``) stay constant. If a difference would be wrong because gradients
    are stopped elsewhere, double backward is used instead, with a warning. A model in half precision cannot make so
    small a step; there ∂²_λθ J_in · v itself is computed.

    Args:
        optimizer: the inner optimizer; D is the diagonal of an Adam step, or 1 for others. ``None``: v = ∂_θ J_out.
        alpha: scale of the finite-difference radius ε.
        graph: see :class:`hyperkron.Implicit`.

    Reference: Choe et al., "Making scalable meta learning practical" (NeurIPS 2023).

    Example: with Adam in the inner loop, whose scaling becomes D.
        >>> adam = torch.optim.Adam(torch.nn.Linear(2, 1).parameters(), lr=1e-3)
        >>> sama(adam).curvature.invertible
        True
    """
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise HyperkronError(f"optimizer={optimizer!r} is not a torch.optim.Optimizer; pass the inner one, or None.")
    check_positive("alpha", alpha)
    curvature = IdentityCurvature() if optimizer is None else AdamDiagonal(optimizer)
    return Implicit(curvature, Direct(), cross="difference", radius=alpha, graph=graph)
