"""``attribute``: which training examples speak for, and which against, what a model does with a query.

With J_in = 1/N Σ_n w_n c_n and f_q the loss of a query, the hypergradient in the weight of example n is the influence
function (Koh & Liang, 2017), so that leaving the example out raises f_q by about

    score(q, n) = −df_q/dw_n = 1/N ⟨A⁻¹ ∂_θ f_q, ∂_θ c_n⟩
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from tqdm.auto import tqdm

from hyperkron.attribution.data import ExampleRows, Parts
from hyperkron.attribution.inner_products import ForwardProducts, LayerProducts, LossOf, MixedExamplesError, stacked
from hyperkron.attribution.result import Attribution
from hyperkron.attribution.store import Store, digest
from hyperkron.evaluation.point import Point, trainable
from hyperkron.hyper import as_hyper
from hyperkron.hypergradient import Implicit, ekfac
from hyperkron.losses import Loss, as_loss
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError, Solution
from hyperkron.trees import Tree
from hyperkron.validation import check_one_of, check_whole

Way = Literal["auto", "layers", "forward"]


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
    method = ekfac(1e-4) if method is None else method
    if not isinstance(method, Implicit):
        raise HyperkronError(f"method={method!r:.60} does not solve for v; pass hk.ekfac(), hk.kfac() or hk.pcg().")
    check_whole("batch_size", batch_size)
    check_one_of("way", way, ("auto", "layers", "forward"))
    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models:
        raise HyperkronError("model is an empty list; pass a network, or several.")
    found = []
    for i, one in enumerate(models):
        folder = None if out is None else Path(out) / (f"model-{i}" if len(models) > 1 else "")
        task = _Task(loss, one, train, queries, method.fresh(), query_loss or loss, curvature_data, batch_size, collate)
        found.append(task.scores(aggregate, way, folder, progress))
    scores = found[0].scores if len(found) == 1 else torch.stack([f.scores for f in found]).mean(0)
    return Attribution(scores, found[0].stats)


def self_influence(
    loss: LossOf,
    model: nn.Module,
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
    method = ekfac(1e-4) if method is None else method
    task = _Task(loss, model, train, train, method.fresh(), loss, curvature_data, batch_size, collate)
    return task.self_influence(progress)


class _TrainingProblem(BilevelProblem):
    """J_in alone; the training set is measured batch by batch."""

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
        self.model, self.params, self.method = model, trainable(model, "model"), method
        self.loss, self.query_loss = _checked("loss", loss), _checked("query_loss", query_loss)
        device = next(iter(self.params.values())).device
        self.train = Parts(ExampleRows("train", train, device, collate), batch_size)
        self.queries = ExampleRows("queries", queries, device, collate)
        measured = (
            self.train.rows
            if curvature_data is None
            else ExampleRows("curvature_data", curvature_data, device, collate)
        )
        self.curvature = Parts(measured, batch_size)

    def scores(self, aggregate: bool, way: Way, folder: Path | None, progress: bool) -> Attribution:
        count, total = 1 if aggregate else len(self.queries), len(self.train.rows)
        store = None if folder is None else Store(folder, (count, total), self._identity(aggregate))
        stats: dict[str, Any] = {}
        with _evaluation(self.model):
            vectors = None if store is None else store.vectors()
            if vectors is None:
                vectors, stats = self._vectors(aggregate, progress)
                if store is not None:
                    store.keep(vectors)
            vectors = {name: v.to(self.params[name].device) for name, v in vectors.items()}
            products = self._products(way, count)
            pieces: list[Tensor] = []
            first = 0 if store is None else store.done
            spans = [self.train.span(i) for i in range(len(self.train)) if self.train.span(i)[0] >= first]
            bar = tqdm(spans, disable=not progress, unit="batch", desc="scores", dynamic_ncols=True)
            for start, stop in bar:
                batch, size = self.train.rows.batch(start, stop), stop - start
                try:
                    piece = products(batch, vectors, size)
                except MixedExamplesError:
                    if way != "auto" or isinstance(products, ForwardProducts):
                        raise
                    products = ForwardProducts(self.loss, self.model, self.params)
                    piece = products(batch, vectors, size)
                piece = piece * (size / total)
                if store is None:
                    pieces.append(piece)
                else:
                    store.write(start, piece)
        scores = torch.cat(pieces, 1) if store is None else store.scores()
        return Attribution(scores, {"way": products.name, **stats})

    def self_influence(self, progress: bool) -> Tensor:
        found: list[Tensor] = []
        total = len(self.train.rows)
        with _evaluation(self.model), self._inverse() as inverse:
            products = self._products("layers", total)
            assert isinstance(products, LayerProducts)
            for i in tqdm(range(len(self.train)), disable=not progress, unit="batch", dynamic_ncols=True):
                start, stop = self.train.span(i)
                for gradient in products.gradients(self.train.rows.batch(start, stop), stop - start):
                    v = inverse(gradient).value
                    dot = sum(torch.sum(v[name] * g) for name, g in gradient.items())
                    found.append((stop - start) ** 2 / total * dot)  # type: ignore[arg-type]  # a sum of tensors
        return torch.stack(found)

    def _vectors(self, aggregate: bool, progress: bool) -> tuple[Tree, dict[str, Any]]:
        """A⁻¹ ∂_θ f_q of every query, stacked, and what is to be told of the solves."""
        count = len(self.queries)
        found: list[Tree] = []
        solutions: list[Solution] = []
        with self._inverse() as inverse:
            gradients = [self._mean_gradient()] if aggregate else (self._gradient(q, q + 1) for q in range(count))
            bar = tqdm(total=1 if aggregate else count, disable=not progress, unit="query", dynamic_ncols=True)
            for gradient in gradients:
                solutions.append(inverse(gradient))
                found.append(solutions[-1].value)
                bar.update()
            bar.close()
        worst = max((s.residual for s in solutions if s.residual is not None), default=None)
        stats: dict[str, Any] = {"status": solutions[-1].status, "products": sum(s.products for s in solutions)}
        return stacked(found), stats if worst is None else {**stats, "residual": worst}

    @contextmanager
    def _inverse(self) -> Iterator[Callable[[Tree], Solution]]:
        problem = _TrainingProblem(self._objective, self._objective)
        hyper = as_hyper(
            torch.zeros(1, device=self.curvature.rows.device, dtype=next(iter(self.params.values())).dtype)
        )
        with Point(problem, self.model, hyper, None, None, curvature_batch=self.curvature) as point:
            yield self.method.inverse(point)

    def _objective(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Loss:
        """J_in of a batch; of all batches where a curvature asks for the whole set at once."""
        if not isinstance(batch, Parts):
            return self.loss(model, batch)
        spans = map(batch.span, range(len(batch)))
        shares = ((stop - start) / len(batch.rows) for start, stop in spans)
        return sum(
            (share * self.loss(model, part) for share, part in zip(shares, batch, strict=True)), Loss(torch.zeros(()))
        )

    def _gradient(self, start: int, stop: int) -> Tree:
        """∂_θ of the loss of a few queries, without penalties."""
        loss = self.query_loss(self.model, self.queries.batch(start, stop))
        terms = [(term.coefficients * term.row_losses).sum() for term in loss.terms]
        value = loss.value if loss.opaque else torch.stack(terms).sum()
        found = torch.autograd.grad(value, list(self.params.values()), allow_unused=True)
        if all(g is None for g in found):
            raise HyperkronError("the loss of the queries does not depend on the model's parameters.")
        pairs = zip(self.params.items(), found, strict=True)
        return {name: torch.zeros_like(p) if g is None else g for (name, p), g in pairs}

    def _mean_gradient(self) -> Tree:
        """∂_θ of the mean loss of all queries, batch by batch."""
        parts = Parts(self.queries, self.train.size)
        total = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for i in range(len(parts)):
            start, stop = parts.span(i)
            for name, g in self._gradient(start, stop).items():
                total[name] += g * ((stop - start) / len(self.queries))
        return total

    def _products(self, way: Way, count: int) -> LayerProducts | ForwardProducts:
        """The cheaper way that works: by layers for several queries, else by forward mode."""
        missing = LayerProducts.missing(self.model) if way != "forward" else []
        if way == "layers" and missing:
            raise HyperkronError(
                f"way='layers' does not see the gradients of {', '.join(missing[:3])}; use way='forward'."
            )
        layered = way == "layers" or (way == "auto" and count > 2 and not missing)
        return (LayerProducts if layered else ForwardProducts)(self.loss, self.model, self.params)

    def _identity(self, aggregate: bool) -> dict[str, str]:
        ends = [self.train.rows.batch(0, 1), self.train.rows.batch(len(self.train.rows) - 1, len(self.train.rows))]
        method = self.method
        return {
            "model": digest(dict(self.model.state_dict())),
            "train": digest(len(self.train.rows), _flat(ends)),
            "queries": digest(len(self.queries), aggregate, _flat(self.queries.batch(0, len(self.queries)))),
            "method": repr((method.curvature, method.solver, method.preconditioner)),
            "batch_size": str(self.train.size),
        }


def _flat(batch: Any) -> Any:
    return list(batch.items()) if isinstance(batch, dict) else batch


def _checked(name: str, loss: LossOf) -> LossOf:
    if not callable(loss):
        raise HyperkronError(f"{name}={loss!r:.60} is not callable; pass a function (model, batch) -> loss.")

    def call(model: nn.Module, batch: Any) -> Loss:
        return as_loss(loss(model, batch))

    return call


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the while; each module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
