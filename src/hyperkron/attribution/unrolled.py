"""Attribution for networks that are not trained to the end, by unrolling their training in a few segments.

Training by gradient descent is cut into segments l = 1 … L of the times τ_l = Σ η/(1 − μ). Within one the curvature A_l
and the gradients of the examples count as constant, so that the weight of example n moves the final parameters by

    dθ/dw_n = −1/N Σ_l [Π_{k>l} e^(−τ_k A_k)] F_l ∂_θ c_n(θ_l) ,    F_l = (1 − e^(−τ_l A_l)) A_l⁻¹ ,

the later segments last. For one long segment at a minimum F is A⁻¹, and the score is that of an influence function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hyperkron import trees
from hyperkron.attribution.data import weighed
from hyperkron.attribution.result import Attribution
from hyperkron.attribution.task import LossOf, Task
from hyperkron.curvature import EKFAC
from hyperkron.curvature.kfac.state import KroneckerOperator
from hyperkron.hypergradient import Implicit
from hyperkron.solution import HyperkronError
from hyperkron.solvers import Direct
from hyperkron.trees import Tree
from hyperkron.validation import check_positive


def attribute_unrolled(
    loss: LossOf,
    model: nn.Module,
    segments: Sequence[tuple[nn.Module, float]],
    train: Any,
    queries: Any,
    *,
    curvature: EKFAC | None = None,
    query_loss: LossOf | None = None,
    batch_size: int = 256,
    collate: Callable[[list[Any]], Any] = default_collate,
    progress: bool = False,
) -> Attribution:
    """Score every training example for every query of a network that is not at a minimum.

        score(q, n) = −df_q/dw_n = 1/N Σ_l ⟨F_l v_l, ∂_θ c_n(θ_l)⟩ ,   v_L = ∂_θ f_q ,   v_{l−1} = e^(−τ_l A_l) v_l

    Each segment costs one EKFAC and one pass over the training examples. The arguments that are not listed are those of
    :func:`hyperkron.attribute`.

    Args:
        model: the trained network, whose predictions are explained.
        segments: the parts of its training, the first one first: a copy of the network from the middle of each, and the
            part's time (see :func:`training_time`).
        curvature: of each segment. Default: ``EKFAC(1e-8, fallback="zero")``; the damping only needs to be far below
            1/τ.

    Returns:
        An :class:`Attribution`, as of :func:`hyperkron.attribute`.

    Reference: Bae et al., "Training data attribution via approximate unrolled differentiation" (2024).

    Example:
        >>> import torch, hyperkron as hk
        >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [6.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.ones(1, 1))
        >>> loss = lambda m, batch: hk.losses.mse(m(batch[0]), batch[1])
        >>> time = hk.attribution.training_time([0.01] * 5)
        >>> found = hk.attribution.attribute_unrolled(loss, model, [(model, time)], (x, y), (x[2:], y[2:]))
        >>> found.helpful(0)[0][0]
        2
    """
    method = Implicit(EKFAC(1e-8, fallback="zero") if curvature is None else curvature, Direct())
    if not segments:
        raise HyperkronError("segments is empty; pass (network, time) of at least one part of the training.")
    for segment in segments:
        if not isinstance(segment, (tuple, list)) or len(segment) != 2 or not isinstance(segment[0], nn.Module):
            raise HyperkronError(f"segments has {segment!r:.60} in it; pass pairs (network, time).")
        check_positive("time", segment[1])

    def task(one: nn.Module) -> Task:
        return Task(loss, one, train, queries, method.fresh(), query_loss or loss, None, batch_size, collate)

    last = task(model)
    with last.point() as point:
        v = trees.joined(last.query_gradients(point, False, progress), len(last.queries))
    scores: Any = 0.0
    for one, time in reversed(segments):
        found, v = _segment(task(one), v, time, progress)
        scores = scores + found
    return Attribution(scores, {"segments": len(segments)})


def _segment(task: Task, v: Tree, time: float, progress: bool) -> tuple[Tensor, Tree]:
    """1/N ⟨F v_q, ∂_θ c_n⟩ of all examples, and e^(−τA) v."""
    if {name: p.shape for name, p in task.params.items()} != {name: x.shape[1:] for name, x in v.items()}:
        raise HyperkronError("a network of segments has other parameters than model; pass copies of one network.")
    with task.point() as point:
        operator = task.method.curvature.operator(point, task.method.state.curvature)
        if not isinstance(operator, KroneckerOperator):
            raise HyperkronError(f"curvature={task.method.curvature!r:.60} has no eigenvalues; pass EKFAC(...).")
        moved = operator.function(partial(_moved, time), v)
        ways = task.ways(point, "auto", len(next(iter(v.values()))))
        scores = weighed(found[1:] for found in task.pieces(ways, moved, progress=progress))
        return scores, trees.map(torch.Tensor.detach, operator.function(lambda a: (-time * a).exp(), v))


def _moved(time: float, a: Tensor) -> Tensor:
    """(1 − e^(−τa))/a, how far gradient descent moves along curvature a; τ for none."""
    safe = torch.where(a > 0, a, torch.ones_like(a))
    return torch.where(a > 0, -torch.expm1(-time * safe) / safe, torch.full_like(a, time))
