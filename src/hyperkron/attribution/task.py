"""One model with its data: the vectors of the queries, then the scores of the training examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hyperkron import trees
from hyperkron.attribution.checks import (
    check_mean,
    check_processes,
    checked_loss,
    group_norms_checked,
    warn_of_reduced,
    warn_of_status,
)
from hyperkron.attribution.data import COMPARED, ExampleRows, Parts, batch_shares, finite, named_rows, weighed
from hyperkron.attribution.eigenbasis import EigenCoordinates, usable
from hyperkron.attribution.example_losses import telling, without_penalties
from hyperkron.attribution.forward_products import ForwardProducts
from hyperkron.attribution.inner_products import KeptProducts, LayerProducts, Products, first_suitable
from hyperkron.attribution.layer_calls import CHUNK, FEW, LayerCall, UnsuitableError
from hyperkron.attribution.result import Attribution
from hyperkron.attribution.store import Store
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.evaluation.differentiation import gradient_tree
from hyperkron.evaluation.point import Level, Point, independent, trainable
from hyperkron.hyper import as_hyper
from hyperkron.hypergradient import Implicit
from hyperkron.losses import Loss
from hyperkron.problem import BilevelProblem, rows, shares
from hyperkron.solution import HyperkronError, Solution, Status, worst
from hyperkron.training.program import Program
from hyperkron.trees import Tree
from hyperkron.validation import check_whole

Way = Literal["auto", "layers", "forward"]
LossOf = Callable[[nn.Module, Any], Loss | Tensor]
"""J of a batch: a mean over its examples."""

MAX_QUERIES, MAX_NUMBERS = 32, 2**25
"""Queries that are solved for at once: at most this many, with at most this many numbers in their gradients."""
LIKENESS = 0.1
"""By how much the gradient of a query among others may differ from the one it has alone, in half precision."""


class _TrainingProblem(BilevelProblem):
    """J_in and the loss of queries; the training set is measured batch by batch."""

    def parts(self, batch: Any) -> Any:
        return batch if isinstance(batch, Parts) else [batch]

    def words(self, level: str) -> tuple[str, str]:
        return ("loss", "train") if level == "inner" else ("query_loss", "queries")

    @property
    def divided(self) -> bool:
        return True  # among this process alone, which is said in words of attribution


class Task:
    """See the module; the arguments are those of :func:`hyperkron.attribute`."""

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
        self.model, self.params, self.method = model, trainable(model, "model"), method
        warn_of_reduced(method, model)
        check_processes(self.params)
        self.loss, self.query_loss = checked_loss("loss", loss), checked_loss("query_loss", query_loss)
        first = next(iter(self.params.values()))

        def examples(name: str, given: Any) -> ExampleRows:
            return ExampleRows(name, given, first.device, collate)

        self.train, self.queries = Parts(examples("train", train), batch_size, COMPARED), examples("queries", queries)
        measured = self.train.rows if curvature_data is None else examples("curvature_data", curvature_data)
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
        with torch.inference_mode(False):
            self.hyper = as_hyper(torch.zeros(1, device=first.device, dtype=first.dtype))

    def scores(self, aggregate: bool, way: Way, folder: Path | None, progress: bool) -> Attribution:
        count, total = 1 if aggregate else len(self.queries), len(self.train.rows)
        with ExitStack() as stack:
            point = stack.enter_context(self.point())
            store: Store | None = None
            if folder is not None:
                told = Program({**self.given, "aggregate": aggregate, "way": way}, [self.model]).lines()
                store = stack.enter_context(Store(folder, (count, total), told))
            vectors, stats = (None, {}) if store is None else (store.vectors(self.params), store.stats)
            ways = self.ways(point, way, count)
            point.kept = self._keeping(ways[0], count) if store is None else None
            if vectors is None:
                vectors, stats = self._vectors(point, aggregate, progress, ways[0])
                if store is not None:
                    store.keep(vectors, stats, ways[0].coordinates.bases)
            elif store is not None:
                known = EigenCoordinates(plan(self.model, "diagonal").blocks, {})
                known.bases = store.bases(point.device)  # of the blocks that were chosen then
                if isinstance(ways[0], LayerProducts):
                    ways[0].coordinates = known
                else:  # another way than that of the earlier call, as on another device
                    vectors.update(known.to_vectors(vectors))
            if store is None:
                kept = self._kept_pieces(point.kept, ways, vectors)
                scores = weighed((x[1:] for x in self.pieces(ways, vectors, 0, progress)) if kept is None else kept)
            else:
                counted = batch_shares(point, self.train) if store.done < total else []
                share = dict(zip(self.train.spans, counted, strict=False))
                for span, piece, _ in self.pieces(ways, vectors, store.done, progress):
                    point.settle()
                    store.write(span[0], finite(piece.float() * share[span], span[0]))
                scores = store.scores()
        stats = {"way": ways[0].name, **stats, "status": Status[stats["status"]]}
        warn_of_status(stats["status"])
        return Attribution(scores, stats)

    def pieces(
        self, ways: list[Products], vectors: Tree, first: int = 0, progress: bool = False
    ) -> Iterator[tuple[tuple[int, int], Tensor, tuple[float, ...]]]:
        """⟨v_q, ∂_θ c_n⟩ of a batch of examples after the other, from row ``first`` on, c_n being their shares in the
        loss of the batch: with the span of each, and the rows that count in its loss."""
        spans = [span for span in self.train.spans if span[0] >= first]
        for start, stop in tqdm(spans, disable=not progress, unit="batch", desc="scores", dynamic_ncols=True):
            batch = self.train.rows.batch(start, stop)
            yield (start, stop), first_suitable(ways, batch, vectors, stop - start), ways[0].counted

    def _keeping(self, way: Products, count: int) -> KeptProducts | None:
        """Where gradients of the training examples may be kept while A is measured on them.

        Those of Kronecker blocks are: not of a weight that an embedding uses as well, nor beside large vectors.
        """
        if count * sum(p.numel() for p in self.params.values()) > CHUNK:
            return None
        if not way.point.keeps or not isinstance(way, LayerProducts) or self.curvature.rows is not self.train.rows:
            return None
        in_blocks = {name for block in way.plan.blocks.values() for name in block.names}
        if any(in_blocks & set(names.values()) for names in way.plan.diagonal.values()):
            return None
        if any(getattr(one, "layers", ()) for one in (self.method.curvature, self.method.preconditioner)):
            return None  # gradients by layers of the user's own are not compared with autograd's
        return KeptProducts(len(self.curvature))

    def _kept_pieces(
        self, kept: KeptProducts | None, ways: list[Products], vectors: Tree
    ) -> Iterator[tuple[Tensor, tuple[float, ...]]] | None:
        """:meth:`pieces` from gradients that were kept; ``None`` where they are not complete, or the way by layers does
        not suit the model, which the first batch shows."""
        if kept is None or not kept.complete:
            return None
        covered = {name for one in kept.parts[0][1] for name in one.block.names}
        if any(bool(v.any()) for name, v in vectors.items() if name not in covered):
            return None
        sizes = [stop - start for start, stop in self.curvature.spans]
        if any(len(x) != n for n, (_, part) in zip(sizes, kept.parts, strict=True) for one in part for x in one.pair):
            return None
        start, stop = self.train.spans[0]
        first_suitable(ways, self.train.rows.batch(start, stop), vectors, stop - start)
        if not (isinstance(ways[0], LayerProducts) and ways[0].by_blocks):  # a tied embedding has gradients, too
            return None
        return kept.products(vectors, self.params, ways[0].coordinates.bases)

    def self_influence(self, progress: bool) -> Tensor:
        total, numbers = len(self.train.rows), sum(p.numel() for p in self.params.values())
        parts = Parts(self.train.rows, max(1, min(self.train.size, CHUNK // numbers)))
        found: list[Tensor] = []
        counts, statuses = list[tuple[float, ...]](), set()
        with self.point() as point:
            inverse = self.method.inverse(point)
            layers: LayerProducts | None = LayerProducts(point)
            for start, stop in tqdm(parts.spans, disable=not progress, unit="batch", dynamic_ncols=True):
                gradients, layers, counted = self._gradients(point, layers, start, stop)
                with named_rows("train", start, gradients):
                    solution = inverse(gradients)
                statuses.add(solution.status)
                value, wide = trees.widened(solution.value), trees.widened(gradients)
                dots = [(value[name] * g).reshape(len(g), -1).sum(1) for name, g in wide.items()]
                found.append(torch.stack(dots).sum(0))
                counts.append(counted)
        warn_of_status(worst(statuses))
        return torch.cat([x * share**2 * total for x, share in zip(found, shares(counts), strict=True)])

    def _gradients(
        self, point: Point, layers: LayerProducts | None, start: int, stop: int
    ) -> tuple[Tree, LayerProducts | None, tuple[float, ...]]:
        """∂_θ of the shares of single training examples in the loss of these, stacked, and the rows that count in it:
        by layers, or where that fails one by one."""
        if layers is not None:
            try:
                calls = layers.calls(self.train.rows.batch(start, stop), stop - start)
                return layers.gradients_of(calls, stop - start), layers, layers.counted
            except UnsuitableError:
                pass
        batches = [self.train.rows.batch(n, n + 1) for n in range(start, stop)]
        counts = [rows(point.evaluate("inner", batch).terms, 1) for batch in batches]
        each = zip(shares(counts), (self._gradient(point, "inner", batch) for batch in batches), strict=True)
        together = tuple(map(sum, zip(*counts, strict=True)))
        return trees.stacked([trees.scale(g, share) for share, g in each]), None, together

    def _vectors(self, point: Point, aggregate: bool, progress: bool, way: Products) -> tuple[Tree, dict[str, Any]]:
        """A⁻¹ ∂_θ f_q of every query, stacked, and what is to be told of the solves.

        Where ``way`` goes by layers, it may be given the coordinates of some blocks in their eigenbasis instead.
        """
        inverse, bases = self.method.inverse_and_eigenbases(point)
        if isinstance(way, LayerProducts) and not getattr(self.method.curvature, "layers", ()):
            known = usable(bases, way.plan, self.params, point.kept)
            way.coordinates = EigenCoordinates(way.plan.blocks, known)
        coordinates = way.coordinates
        told: list[Solution] = []

        def solved() -> Iterator[Tree]:
            first = 0
            for gradients in self.query_gradients(point, aggregate, progress, coordinates):
                with named_rows("queries", None if aggregate else first, gradients):
                    found, rest = coordinates.split(gradients)
                    solution = inverse(rest)
                first += len(next(iter(gradients.values())))
                told.append(replace(solution, value={}))
                values = [found | solution.value]
                del gradients, found, rest, solution  # what is yielded is held nowhere else
                yield values.pop()

        vectors = trees.joined(solved(), 1 if aggregate else len(self.queries))
        residuals = [x.residual for x in told if x.residual is not None]
        stats: dict[str, Any] = {
            "status": worst(x.status for x in told).name,
            "products": sum(x.products for x in told),
            **({"residual": max(residuals)} if residuals else {}),
        }
        return vectors, stats

    @property
    def _queries_at_once(self) -> int:
        """How many queries are differentiated and solved for at once."""
        return max(1, min(MAX_QUERIES, MAX_NUMBERS // sum(p.numel() for p in self.params.values()), len(self.queries)))

    def query_gradients(
        self, point: Point, aggregate: bool, progress: bool, coordinates: EigenCoordinates | None = None
    ) -> Iterator[Tree]:
        """∂_θ f_q of every query, or of their mean, several stacked at a time; of the blocks that ``coordinates``
        chooses, those of A⁻¹ times it."""
        if aggregate:
            yield trees.stacked([self._aggregated(point)])
            return
        count = len(self.queries)
        batched, calls = self._batched(point)
        if batched is not None and coordinates is not None:
            batched.coordinates = coordinates
            coordinates.choose(batched.positions, count, len(self.train.rows))
        with tqdm(total=count, disable=not progress, unit="query", dynamic_ncols=True) as bar:
            for start in range(0, count, self._queries_at_once):
                stop = min(start + self._queries_at_once, count)
                found = None if batched is None else self._batched_gradients(batched, start, stop, calls)
                calls = None  # those of the first queries were known already
                if found is None:
                    alone = [self._gradient(point, "outer", self.queries.batch(q, q + 1)) for q in range(start, stop)]
                    found = trees.stacked(alone)
                    found = found if coordinates is None else coordinates.of_gradients(found)
                bar.update(stop - start)  # before the yield: the last one may be the end
                yield found

    def _batched_gradients(
        self, batched: LayerProducts, start: int, stop: int, calls: list[LayerCall] | None
    ) -> Tree | None:
        """The gradients of these queries in one pass, if it is not done yet; ``None`` where they are not those of each
        alone."""
        size = stop - start
        try:
            calls = batched.calls(self.queries.batch(start, stop), size) if calls is None else calls
            for call in calls:
                call.g = call.g * size  # the loss is a mean over these queries
            return batched.gradients_of(calls, size)
        except UnsuitableError:
            return None

    def _batched(self, point: Point) -> tuple[LayerProducts, list[LayerCall]] | tuple[None, None]:
        """The way to the gradients of many queries in one pass, and the pass of the first of them; ``None`` where they
        would not be those of each alone.

        They are if the loss is a mean over queries that are all counted alike and in their order, which half of them
        show: their gradients among others are shares of those that they have alone and in reverse.
        """
        count = self._queries_at_once
        layers = LayerProducts(point, "outer", alike=True) if count > 1 else None
        if layers is None or point.evaluate("outer", self.queries.batch(0, 1)).opaque:
            return None, None
        try:
            calls = layers.calls(self.queries.batch(0, count), count)
        except UnsuitableError:
            return None, None
        half = count - count // 2
        loss = point.evaluate("outer", self.queries.chosen(range(half))(slice(None, None, -1)))
        weights = telling(half, loss)
        alone = gradient_tree(without_penalties(loss, weights), self.params)
        found = layers.total(calls, torch.nn.functional.pad(weights.flip(0), (0, count - half)))
        error = trees.norm(trees.add(trees.scale(found, count / half), alone, alpha=-1.0))
        alike = error <= min(1e3 * torch.finfo(point.dtype).eps, LIKENESS) * trees.norm(alone)
        return (layers, calls) if alike else (None, None)

    def _aggregated(self, point: Point) -> Tree:
        """∂_θ of the loss of all queries, batch by batch."""
        parts = Parts(self.queries, self.train.size)
        if len(parts) > 1:
            check_mean("query_loss", point, "outer", parts)
        total = trees.zeros_like(self.params)
        try:
            counted = batch_shares(point, parts, "outer")
        except HyperkronError as error:
            raise HyperkronError(
                f"aggregate=True with queries in {len(parts)} batches: {error} With batch_size={len(self.queries)} "
                "or more they are one."
            ) from error
        for batch, share in zip(parts, counted, strict=True):
            total = trees.add(total, self._gradient(point, "outer", batch), alpha=share)
        return total

    def _gradient(self, point: Point, level: Level, batch: Any) -> Tree:
        """∂_θ of the loss of a batch, without penalties."""
        value = without_penalties(point.evaluate(level, batch))
        if not value.requires_grad:
            raise independent(point.problem.words(level)[0])
        return gradient_tree(value, self.params)

    @contextmanager
    def point(self) -> Iterator[Point]:
        """The model in evaluation mode, with J_in and the loss of queries; each module gets its own mode back."""
        problem = _TrainingProblem(self._objective, lambda model, _, batch: self.query_loss(model, batch))
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with Point(problem, self.model, self.hyper, None, None, curvature_batch=self.curvature) as point:
                self._lay_out(point)
                check_mean("loss", point, "inner", self.train)
                point.keeps = point.device.type == "cpu"  # which has more memory than a GPU, and is slower
                yield point
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _lay_out(self, point: Point) -> None:
        """On a CPU, put the channels of images last in memory for models with convolutions, if these go through.

        Pooling is several times as fast then, and patches need not be transposed. Models that flatten by ``x.view`` are
        the ones that do not go through.
        """
        levels: tuple[tuple[Level, ExampleRows], ...] = (("inner", self.train.rows), ("outer", self.queries))
        if point.device.type != "cpu" or not self._convolves:
            return
        for level, given in levels:
            given.channels_last = True
            try:
                with group_norms_checked(self.model):
                    point.evaluate(level, given.batch(0, COMPARED))
            except RuntimeError:
                given.channels_last = False
        self.curvature.rows.channels_last = self.train.rows.channels_last

    @property
    def _convolves(self) -> bool:
        return any(isinstance(module, nn.Conv2d) for module in self.model.modules())

    def _objective(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Loss:
        """J_in of a batch; of all batches where a curvature asks for the whole set at once."""
        if not isinstance(batch, Parts):
            return self.loss(model, batch)
        parts = [self.loss(model, part) for part in batch]
        counted = shares(
            [rows(part.terms, stop - start) for part, (start, stop) in zip(parts, batch.spans, strict=True)]
        )
        weighted = (share * part for share, part in zip(counted, parts, strict=True))
        return sum(weighted, Loss(torch.zeros(())))

    def ways(self, point: Point, way: Way, count: int) -> list[Products]:
        """The ways to try, the cheapest first: by layers for several queries and on a CPU, else by forward mode."""
        if way != "auto":
            return [LayerProducts(point) if way == "layers" else ForwardProducts(point)]
        forward, layers = ForwardProducts(point), LayerProducts(point)
        on_cpu = point.device.type == "cpu" and self.train.rows.channels_last == self._convolves
        covered = not layers.plan.rest or getattr(self.method.curvature, "fallback", "") == "zero"
        return [layers, forward] if (count > FEW or on_cpu) and covered else [forward, layers]
