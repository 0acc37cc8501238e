"""``attribute``: which training examples speak for, and which against, what a model does with a query.

The score is the influence function (Koh & Liang, 2017), the hypergradient in the weight of example n,

    score(q, n) = −df_q/dw_n = 1/N ⟨A⁻¹ ∂_θ f_q, ∂_θ c_n⟩ ,    J_in = 1/N Σ_n w_n c_n :

leaving the example out raises the query's loss f_q by about that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from tqdm.auto import tqdm

from hyperkron import trees
from hyperkron.attribution.data import ExampleRows, Parts
from hyperkron.attribution.inner_products import (
    CHUNK,
    ForwardProducts,
    LayerProducts,
    Products,
    UnsuitableError,
    without_penalties,
)
from hyperkron.attribution.result import Attribution
from hyperkron.attribution.store import Store, averaged
from hyperkron.evaluation.differentiation import gradient_tree
from hyperkron.evaluation.point import Level, Point, independent, trainable
from hyperkron.hyper import as_hyper
from hyperkron.hypergradient import Implicit, ekfac
from hyperkron.losses import Loss, as_loss
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError, HyperkronWarning, Solution, Status, warn_once, worst
from hyperkron.training.program import Program
from hyperkron.trees import Tree
from hyperkron.validation import check_one_of, check_whole

Way = Literal["auto", "layers", "forward"]
LossOf = Callable[[nn.Module, Any], Loss | Tensor]
"""J of a batch: a mean over its examples."""

TOGETHER = 32
"""Right-hand sides that are solved for at once."""
COMPARED = 16
"""Examples in the first batch, with which gradients by layers are compared with autograd's."""


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
        loss: ``loss(model, batch)``, what the model was trained on, as a loss of :mod:`hyperkron.losses` (with its
            L2 penalty, if there was one).
        model: the trained network, or several (checkpoints, seeds), whose scores are averaged.
        train: the training examples: tensors with one row per example, such as ``(x, y)``, or a dataset.
        queries: examples of the same kind whose loss is to be explained.
        method: how A⁻¹ is applied. Default: ``hk.ekfac(1e-4)``; ``hk.pcg(10)`` is more exact, ``hk.identity()`` the
            product of gradients.
        query_loss: f, where it differs from ``loss``, for example a margin.
        aggregate: explain the mean loss of all queries, with a single row of scores; the cheapest use.
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
    tasks = [
        _Task(loss, one, train, queries, _method(method), query_loss or loss, curvature_data, batch_size, collate)
        for one in models
    ]
    folders = [
        None if out is None else Path(out) / (f"model-{i}" if len(models) > 1 else "") for i in range(len(models))
    ]
    found = [task.scores(aggregate, way, folder, progress) for task, folder in zip(tasks, folders, strict=True)]
    if len(found) == 1:
        return found[0]
    parts = [one.scores for one in found]
    scores = torch.stack(parts).mean(0) if out is None else averaged(Path(out), parts)
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
    """
    given = loss, curvature_data, batch_size, collate
    tasks = [_Task(loss, one, train, train, _method(method), *given) for one in _models(model)]
    return torch.stack([task.self_influence(progress) for task in tasks]).mean(0)


def _models(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise HyperkronError("model is an empty list; pass a network, or several.")
    return models


def _method(method: Implicit | None) -> Implicit:
    method = ekfac(1e-4) if method is None else method
    if not isinstance(method, Implicit):
        raise HyperkronError(f"method={method!r:.60} does not solve for v; pass hk.ekfac(), hk.kfac() or hk.pcg().")
    return method.fresh()


class _TrainingProblem(BilevelProblem):
    """J_in and the loss of queries; the training set is measured batch by batch."""

    def parts(self, batch: Any) -> Any:
        return batch if isinstance(batch, Parts) else [batch]


class _Task:
    """One model with its data: the vectors of the queries, then the scores of the examples."""

    def __init__(
        self,
        loss: LossOf,
        model: nn.Module,
        train: Any,
        queries: Any,
        method: Implicit,
        query_loss: LossOf,
        curvature_data: Any,
        batch_size: int,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        check_whole("batch_size", batch_size)
        _warn_of_reduced(method, model)
        self.model, self.params, self.method = model, trainable(model, "model"), method
        self.loss, self.query_loss = _checked("loss", loss), _checked("query_loss", query_loss)
        first = next(iter(self.params.values()))

        def rows(name: str, given: Any) -> ExampleRows:
            return ExampleRows(name, given, first.device, collate)

        self.train, self.queries = Parts(rows("train", train), batch_size, COMPARED), rows("queries", queries)
        measured = self.train.rows if curvature_data is None else rows("curvature_data", curvature_data)
        self.curvature = Parts(measured, batch_size)
        self.given = {
            "loss": loss,
            "query_loss": query_loss,
            "model": model,
            "weights": dict(model.state_dict()),
            "train": train,
            "queries": queries,
            "curvature_data": curvature_data,
            "collate": collate,
            "method": method,
            "batch_size": batch_size,
        }
        self.hyper = as_hyper(torch.zeros(1, device=first.device, dtype=first.dtype))

    def scores(self, aggregate: bool, way: Way, folder: Path | None, progress: bool) -> Attribution:
        count, total = 1 if aggregate else len(self.queries), len(self.train.rows)
        with ExitStack() as stack:
            point = stack.enter_context(self._point())
            store: Store | None = None
            if folder is not None:
                told = Program({**self.given, "aggregate": aggregate, "way": way}, [self.model]).lines()
                store = stack.enter_context(Store(folder, (count, total), told))
            vectors, stats = (None, {}) if store is None else (store.vectors(self.params), store.stats)
            if vectors is None:
                vectors, stats = self._vectors(point, aggregate, progress)
                if store is not None:
                    store.keep(vectors, stats)
            ways = self._ways(point, way, count)
            first = 0 if store is None else store.done
            pieces: list[Tensor] = []
            spans = [span for span in self.train.spans if span[0] >= first]
            for start, stop in tqdm(spans, disable=not progress, unit="batch", desc="scores", dynamic_ncols=True):
                batch, size = self.train.rows.batch(start, stop), stop - start
                piece = _products(ways, batch, vectors, size) * (size / total)
                if store is None:
                    pieces.append(piece)
                else:
                    point.settle()
                    store.write(start, piece)
            scores = torch.cat(pieces, 1) if store is None else store.scores()
        stats = {"way": ways[0].name, **stats, "status": Status[stats["status"]]}
        _warn(stats)
        return Attribution(scores, stats)

    def self_influence(self, progress: bool) -> Tensor:
        found: list[Tensor] = []
        total, numbers = len(self.train.rows), sum(p.numel() for p in self.params.values())
        parts = Parts(self.train.rows, max(1, min(self.train.size, CHUNK // numbers)))
        statuses = set()
        with self._point() as point:
            inverse, layers = self.method.inverse(point), _layers(point)
            for start, stop in tqdm(parts.spans, disable=not progress, unit="batch", dynamic_ncols=True):
                gradients, layers = self._gradients(point, layers, start, stop)
                solution = inverse(gradients)
                statuses.add(solution.status)
                dots = [(solution.value[name] * g).reshape(len(g), -1).sum(1) for name, g in gradients.items()]
                found.append(torch.stack(dots).sum(0) / total)
        _warn({"status": worst(statuses)})
        return torch.cat(found)

    def _gradients(
        self, point: Point, layers: LayerProducts | None, start: int, stop: int
    ) -> tuple[Tree, LayerProducts | None]:
        """∂_θ of the losses of single training examples, stacked: by layers, or where that fails one by one."""
        if layers is not None:
            try:
                found = layers.gradients(self.train.rows.batch(start, stop), stop - start)
                return trees.scale(found, float(stop - start)), layers
            except UnsuitableError:
                pass
        each = [self._gradient(point, "inner", self.train.rows.batch(n, n + 1)) for n in range(start, stop)]
        return trees.stacked(each), None

    def _vectors(self, point: Point, aggregate: bool, progress: bool) -> tuple[Tree, dict[str, Any]]:
        """A⁻¹ ∂_θ f_q of every query, stacked, and what is to be told of the solves."""
        inverse, found = self.method.inverse(point), list[Solution]()
        count = len(self.queries)
        spans = [(0, count)] if aggregate else [(q, q + 1) for q in range(count)]
        batched = None if aggregate else self._batched(point)
        with tqdm(total=len(spans), disable=not progress, unit="query", dynamic_ncols=True) as bar:
            for i in range(0, len(spans), TOGETHER):
                part = spans[i : i + TOGETHER]
                if batched is None:
                    gradients = trees.stacked([self._mean_gradient(point, *span) for span in part])
                else:
                    batch = self.queries.batch(i, i + len(part))
                    gradients = trees.scale(batched.gradients(batch, len(part)), float(len(part)))
                found.append(inverse(gradients))
                bar.update(len(part))
        residuals = [x.residual for x in found if x.residual is not None]
        stats: dict[str, Any] = {
            "status": worst(x.status for x in found).name,
            "products": sum(x.products for x in found),
            **({"residual": max(residuals)} if residuals else {}),
        }
        return {name: torch.cat([x.value[name] for x in found]) for name in self.params}, stats

    def _batched(self, point: Point) -> LayerProducts | None:
        """The way to the gradients of many queries in one pass; ``None`` where they would not be those of each alone.

        They are if the loss is a mean over queries that are all counted alike, which the first shows: its gradient
        among others is a share of the one it has alone.
        """
        count = min(TOGETHER, len(self.queries))
        layers = _layers(point, "outer") if count > 1 else None
        if layers is None:
            return None
        loss = point.evaluate("outer", self.queries.batch(0, 1))
        if loss.opaque or any(term.valid is not None for term in loss.terms):
            return None
        try:
            found = layers.gradients(self.queries.batch(0, count), count)
        except UnsuitableError:
            return None
        first = next(trees.unstacked(trees.scale(found, float(count))))
        alone = self._gradient(point, "outer", self.queries.batch(0, 1))
        error = trees.norm(trees.add(first, alone, alpha=-1.0))
        return layers if error <= 1e3 * torch.finfo(point.dtype).eps * trees.norm(alone) else None

    def _mean_gradient(self, point: Point, start: int, stop: int) -> Tree:
        """∂_θ of the mean loss of some queries, batch by batch."""
        total = trees.zeros_like(self.params)
        for i in range(start, stop, self.train.size):
            end = min(i + self.train.size, stop)
            part = self._gradient(point, "outer", self.queries.batch(i, end))
            total = trees.add(total, part, alpha=(end - i) / (stop - start))
        return total

    def _gradient(self, point: Point, level: Level, batch: Any) -> Tree:
        """∂_θ of the loss of a batch, without penalties."""
        value = without_penalties(point.evaluate(level, batch))
        if not value.requires_grad:
            raise independent(level)
        return gradient_tree(value, self.params)

    @contextmanager
    def _point(self) -> Iterator[Point]:
        """The model in evaluation mode, with J_in and the loss of queries; each module gets its own mode back."""
        problem = _TrainingProblem(self._objective, lambda model, _, batch: self.query_loss(model, batch))
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with Point(problem, self.model, self.hyper, None, None, curvature_batch=self.curvature) as point:
                yield point
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _objective(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Loss:
        """J_in of a batch; of all batches where a curvature asks for the whole set at once."""
        if not isinstance(batch, Parts):
            return self.loss(model, batch)
        shares = ((stop - start) / len(batch.rows) for start, stop in batch.spans)
        parts = (share * self.loss(model, part) for share, part in zip(shares, batch, strict=True))
        return sum(parts, Loss(torch.zeros(())))

    def _ways(self, point: Point, way: Way, count: int) -> list[Products]:
        """The ways to try, the cheapest first: by layers for several queries, else by forward mode."""
        if way != "auto":
            return [LayerProducts(point) if way == "layers" else ForwardProducts(point)]
        forward, layers = ForwardProducts(point), _layers(point)
        if layers is None:
            return [forward]
        return [layers, forward] if count > 2 and not layers.plan.rest else [forward, layers]


def _layers(point: Point, level: Level = "inner") -> LayerProducts | None:
    try:
        return LayerProducts(point, level)
    except UnsuitableError:
        return None


def _products(ways: list[Products], batch: Any, vectors: Tree, count: int) -> Tensor:
    """By the first of ``ways`` that works; those that do not are dropped."""
    while True:
        try:
            return ways[0](batch, vectors, count)
        except UnsuitableError:
            if len(ways) == 1:
                raise
            del ways[0]


def _warn_of_reduced(method: Implicit, model: nn.Module) -> None:
    """Say that ``sharing="reduce"`` does not rank examples well where weights are shared over positions."""
    if getattr(method.curvature, "sharing", "") != "reduce" or not isinstance(model, nn.Module):
        return
    if any(isinstance(module, nn.modules.conv._ConvNd) for module in model.modules()):
        warn_once(
            "attribution reduce",
            "sharing='reduce' with convolutions ranked training examples no better than products of gradients in our "
            "measurements (docs/attribution.md); use sharing='expand', the default.",
        )


def _warn(stats: dict[str, Any]) -> None:
    """Say where a solve was not the one asked for."""
    if not stats["status"].ok:
        warnings.warn(f"attribution, {stats['status'].name}: {stats['status'].value}", HyperkronWarning, stacklevel=4)


def _checked(name: str, loss: LossOf) -> Callable[[nn.Module, Any], Loss]:
    if not callable(loss):
        raise HyperkronError(f"{name}={loss!r:.60} is not callable; pass a function (model, batch) -> loss.")
    return lambda model, batch: as_loss(loss(model, batch))
