"""``attribute``: which training examples speak for, and which against, what a model does with a query.

The score is the influence function (Koh & Liang, 2017), the hypergradient in the weight of example n,

    score(q, n) = −df_q/dw_n = 1/N ⟨A⁻¹ ∂_θ f_q, ∂_θ c_n⟩ ,    J_in = 1/N Σ_n w_n c_n :

leaving the example out raises the query's loss f_q by about that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from hyperkron.attribution.result import Attribution
from hyperkron.attribution.store import averaged
from hyperkron.attribution.task import LossOf, Task, Way
from hyperkron.curvature import EKFAC, Curvature
from hyperkron.hypergradient import Implicit
from hyperkron.solution import HyperkronError, worst
from hyperkron.solvers import Direct
from hyperkron.validation import check_folder, check_one_of


def attribute(
    loss: LossOf,
    model: nn.Module | Sequence[nn.Module],
    train: Any,
    queries: Any,
    *,
    method: Implicit | None = None,
    query_loss: LossOf | None = None,
    aggregate: bool = False,
    curvature_data: Any = None,
    batch_size: int = 256,
    way: Way = "auto",
    out: str | Path | None = None,
    collate: Callable[[list[Any]], Any] = default_collate,
    progress: bool = False,
) -> Attribution:
    """Score every training example for every query.

    The model is evaluated in evaluation mode and left as it was. Train it to a (nearly) stationary point first: the
    formula assumes one.

    Args:
        loss: ``loss(model, batch)``, what the model was trained on, a mean over the examples of the batch, as a loss of
            :mod:`hyperkron.losses` (with its L2 penalty, if there was one).
        model: the trained network, or several (checkpoints, seeds), whose scores are averaged.
        train: the training examples: tensors with one row per example, such as ``(x, y)``, or a dataset.
        queries: examples of the same kind whose loss is to be explained.
        method: how A⁻¹ is applied. Default: that of ``hk.ekfac(1e-4, fisher="rademacher")``, without parameters outside
            Linear and convolution layers; ``hk.pcg(10)`` is more exact, ``hk.identity()`` the product of gradients.
        query_loss: f, where it differs from ``loss``, for example a margin.
        aggregate: explain the loss of all queries together, with a single row of scores; the cheapest use.
        curvature_data: examples on which A is measured. Default: ``train``.
        batch_size: training examples per step. Default: 256.
        way: ``layers`` (one backward pass for all queries), ``forward`` (one forward-mode pass for each), or ``auto``.
        out: a folder for the scores, which then need no memory; an interrupted call continues where it stopped.
        collate: makes a batch from a list of items, where ``train`` is a dataset.
        progress: show a progress bar.

    Returns:
        An :class:`Attribution` with ``scores`` (queries × examples), ``helpful(q)`` and ``harmful(q)``.

    Example:
        >>> import torch, hyperkron as hk
        >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [6.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.copy_(23 / 14 * torch.ones(1, 1))  # least squares
        >>> loss = lambda m, batch: hk.losses.mse(m(batch[0]), batch[1])
        >>> found = hk.attribute(loss, model, (x, y), (x[2:], y[2:]), method=hk.kfac(0.0))
        >>> found.helpful(0)[0][0], found.harmful(0)[0][0]
        (2, 1)
    """
    check_one_of("way", way, ("auto", "layers", "forward"))
    models = _models(model)
    query_loss = loss if query_loss is None else query_loss
    tasks = [
        Task(loss, one, train, queries, _method(method), query_loss, curvature_data, batch_size, collate)
        for one in models
    ]
    top = None if out is None else check_folder("out", out)
    folders = [top and top / (f"model-{i}" if len(models) > 1 else "") for i in range(len(models))]
    found = [task.scores(aggregate, way, folder, progress) for task, folder in zip(tasks, folders, strict=True)]
    if len(found) == 1:
        return found[0]
    parts = [one.scores for one in found]
    scores = torch.stack(parts).mean(0) if top is None else averaged(top, parts)
    status = worst(one.stats["status"] for one in found)
    return Attribution(scores, {**found[0].stats, "status": status, "models": len(found)})


def self_influence(
    loss: LossOf,
    model: nn.Module | Sequence[nn.Module],
    train: Any,
    *,
    method: Implicit | None = None,
    curvature_data: Any = None,
    batch_size: int = 256,
    collate: Callable[[list[Any]], Any] = default_collate,
    progress: bool = False,
) -> Tensor:
    """By how much the loss of each training example would rise if it were left out: 1/N ⟨A⁻¹ ∂c_n, ∂c_n⟩, (N,).

    High values mark examples that the model had to learn by heart: rare ones, and wrong labels. The arguments are those
    of :func:`attribute`.

    Example: the last target does not lie on the line of the others.
        >>> import torch, hyperkron as hk
        >>> x, y = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [6.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = model.weight.data.copy_(torch.ones(1, 1))
        >>> loss = lambda m, batch: hk.losses.mse(m(batch[0]), batch[1])
        >>> int(hk.attribution.self_influence(loss, model, (x, y)).argmax())
        2
    """
    given = loss, curvature_data, batch_size, collate
    tasks = [Task(loss, one, train, train, _method(method), *given) for one in _models(model)]
    return torch.stack([task.self_influence(progress) for task in tasks]).mean(0)


def _models(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    models = list(model) if isinstance(model, Sequence) else [model]
    if not models:
        raise HyperkronError("model is an empty list; pass a network, or several.")
    return models


def _method(method: Implicit | None) -> Implicit:
    method = Implicit(EKFAC(1e-4, fisher="rademacher", fallback="zero"), Direct()) if method is None else method
    if isinstance(method, Curvature):
        raise HyperkronError(f"method={method!r:.60} is a curvature; pass hk.Implicit(method, hk.solvers.Direct()).")
    if not isinstance(method, Implicit):
        raise HyperkronError(f"method={method!r:.60} does not solve for v; pass hk.ekfac(), hk.kfac() or hk.pcg().")
    return method.fresh()
