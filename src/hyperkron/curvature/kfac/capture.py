"""Measures the Kronecker factors by one forward and a few backward passes.

The gradients of the weights are never computed. The backward pass computes only the gradient of a token on which every
captured output depends, and the hooks of :mod:`~hyperkron.curvature.kfac.recorder` collect the gradients on the way.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyperkron.batch_tensors import tensors_of
from hyperkron.collectives import Group
from hyperkron.curvature.base import l2_curvature, warn_moving, warn_opaque
from hyperkron.curvature.kfac.coverage import Plan
from hyperkron.curvature.kfac.factors import add_to, scaled
from hyperkron.curvature.kfac.kept import KeptGradients
from hyperkron.curvature.kfac.measured import Measured, Measurement
from hyperkron.curvature.kfac.penalty import column_scales
from hyperkron.curvature.kfac.recorder import Recorder
from hyperkron.evaluation.point import Point
from hyperkron.losses import DRAWN, BatchPlace, Loss
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError, warn_once


def measure(point: Point, plan: Plan, how: Measurement) -> Measured:
    """Evaluate J_in on the curvature batch and return the factors, or EKFAC's spectrum in a given basis.

    A batch that the problem evaluates in parts is measured part by part.
    """
    like = torch.empty((), device=point.device, dtype=torch.promote_types(point.dtype, torch.float32))
    parts, whole = point.problem.parts(point.curvature_batch), _Merged()
    kept = KeptGradients(len(parts)) if how.keep and len(parts) > 1 else None
    wanted = _wanted(point, len(parts)) if how.basis is None and how.owners is None else None
    for number, part in enumerate(parts):
        keeps = [one is not None and one.fits for one in (wanted, kept)]
        recorder, loss = _forward(point, part, plan, how, like, keeps)
        _check_forward(recorder, loss, point, part, first=how.first and number == 0, in_parts=len(parts) > 1)
        recorder.measured.l2 = l2 = l2_curvature(loss, point.params)
        recorder.measured.scales = {} if how.damping is None else column_scales(plan, l2, how.damping, like)
        recorder.diagonals.examples = _examples(recorder, loss, part) if loss.terms else recorder.batch_size
        group = point.problem.group
        size = recorder.batch_size if loss.terms else int(sum(n for (n,) in group.numbers(recorder.batch_size)))
        vectors = _vectors(loss, size, how, point)
        place = loss.terms[0].place if loss.terms else None  # of these examples in the whole batch
        signed, unbatched = None, False
        if loss.terms and how.fisher not in DRAWN:  # drawn vectors of examples are already independent
            signed = partial(_signed, how.generator, place, recorder.diagonals.examples)
            unbatched = _unbatched(recorder, loss)
        found = recorder.backward(point.params, vectors, signed, unbatched)
        if len(parts) == 1:
            return found if how.owners is None else over_ranks(found, plan, how.owners.group, like)
        counts = rows(loss.terms, recorder.batch_size)  # counting rows waits for the device
        whole.add(found, counts)
        if any(keeps):
            own = _vectors(loss, size, how, point)
            others = wanted.vectors(loss) if wanted is not None and wanted.fits else []
            numbers: dict[tuple[Any, ...], int] = {}
            for one, gradients in zip((kept, wanted), recorder.gradients(own, others), strict=True):
                if one is not None and one.fits:
                    one.add(gradients, counts[0], numbers)
            del own, others, gradients  # vectors may keep the graph alive, and with it the recorder
        del loss, vectors, found, recorder
    found = whole.finish()
    found.kept = kept
    return found


def _forward(
    point: Point, part: Any, plan: Plan, how: Measurement, like: Tensor, keeps: list[bool]
) -> tuple[Recorder, Loss]:
    """A forward pass with hooks, without the calls of layers that the loss does not depend on, such as those of a
    search for adversarial examples; a second pass if these are others than the last time, on any rank."""
    repeated = False
    while True:
        recorder = Recorder(plan, how, like, keeps[0], keeps[1], plan.aside)
        with recorder.attached():
            loss = point.inner(part)
            aside = recorder.layers.aside(_outputs(loss))
            again = aside != plan.aside and not repeated
            if not again:
                recorder.layers.forget_hidden(_outputs(loss), point.params)
                recorder.after_forward(loss, readable=not point.recording)
            if how.owners is not None:
                again = _agreed(recorder, how.owners.group, again)
            if not again:
                return recorder, loss
        plan.aside, repeated = aside, True
        recorder.layers.forget_graph()
        del loss


def _outputs(loss: Loss) -> list[Tensor]:
    """What :func:`_vectors` are backpropagated from."""
    return [term.output for term in loss.terms] or [loss.value]


def _check_forward(recorder: Recorder, loss: Loss, point: Point, batch: Any, first: bool, in_parts: bool) -> None:
    """After a forward pass: warn of, or refuse, what would make the factors wrong."""
    how = recorder.how
    if first:
        _warn_used_elsewhere(recorder, loss, point)
        warn_moving("KFAC", loss, point.params)
    if loss.terms:
        warn_opaque("KFAC", loss, point.params)
    if loss.terms and (how.owners is not None or in_parts):
        _warn_without_batch(recorder.lengths, _examples(recorder, loss, batch))
    elif loss.terms and (how.basis is not None or how.sharing == "reduce"):  # rows of one example are summed
        _warn_without_batch(recorder.sequences, _examples(recorder, loss, batch))
    if how.basis and how.fisher == "type-2" and how.sharing == "expand":
        _warn_rows_mixed(loss, recorder.batch_size)


def _wanted(point: Point, parts: int) -> KeptGradients | None:
    """Where to keep the gradients that the point asks for; ``None`` if it asks for none, or after the first pass."""
    wanted: KeptGradients | None = point.kept
    return wanted if parts > 1 and wanted is not None and wanted.left == parts else None


def _warn_used_elsewhere(recorder: Recorder, loss: Loss, point: Point) -> None:
    """Warn of parameters that are also used outside their layers: the outputs depend on them past the calls of layers.

    ``F.linear(x, layer.weight)`` is such a use, and so is a gradient of the model inside the loss. Parameters of
    modules that are not measured, such as an embedding with ``fallback="zero"``, are left out.
    """
    measured = {id(m) for m in (*dict(recorder.plan.feeds), *recorder.plan.diagonal)}
    others = {id(p) for m in point.model.modules() if id(m) not in measured for p in m._parameters.values()}
    names = [n for n in recorder.layers.elsewhere(_outputs(loss), point.params) if id(point.params[n]) not in others]
    if names:
        point.notes["used elsewhere"] = ", ".join(names)
        warn_once(
            f"kfac-used-elsewhere {names}",
            f"{', '.join(names[:3])} of the model is used outside its layer too, as F.linear(x, layer.weight) and "
            "gradients inside the loss (create_graph=True) do; KFAC does not see that, so its curvature is not that of "
            "this loss. Call a layer that shares the parameter instead, or use cg(curvature=GGN(...)) or pcg().",
        )


def _signed(generator: torch.Generator, place: BatchPlace | None, examples: int, vector: Tensor) -> Tensor:
    """``vector`` with a random sign for each example, whose rows are one after the other."""
    toss = partial(torch.randint, 0, 2, generator=generator, device=vector.device)
    shape = (vector.shape[0], *[1] * (vector.dim() - 1))
    coin = toss(shape) if place is None else place.of(toss, shape)
    each = len(coin) // examples if len(coin) % examples == 0 else 1
    coin = coin[::each].repeat_interleave(each, 0) if each > 1 else coin
    return vector * (2 * coin - 1).to(vector.dtype)


def _unbatched(recorder: Recorder, loss: Loss) -> bool:
    """Whether a layer was called on inputs without a dimension for examples (such as positions), or perhaps without.

    Always False if the rows of the loss are neither examples nor tokens of examples.
    """
    counted = Counter(recorder.lengths.values()).most_common(1)
    if not counted or any(len(term.row_losses) % max(counted[0][0], 1) for term in loss.terms):
        return False
    n = counted[0][0]
    return recorder.plain_lookups or any(
        length == 1 < n or (length % n > 0 and n % length > 0) for length in recorder.lengths.values()
    )


def _examples(recorder: Recorder, loss: Loss, batch: Any) -> int:
    """How many examples a batch has: a row of the loss is one, unless rows of all examples were flattened."""
    rows = len(loss.terms[0].row_losses)
    common = Counter(recorder.lengths.values()).most_common(1)
    if not common or rows % max(common[0][0], 1) or any(x.dim() and len(x) == rows for _, x in tensors_of("", batch)):
        return rows
    return common[0][0]


def _warn_without_batch(lengths: dict[str, int], examples: int) -> None:
    """Warn of layers whose inputs do not have examples as their first dimension, though KFAC assumes that."""
    names = [name for name, length in lengths.items() if length % max(examples, 1)]
    if names:
        warn_once(
            "kfac-without-batch",
            f"{', '.join(names[:3])} of the model is called on inputs whose first dimension is not that of examples "
            "(positions, or batch_first=False?), but KFAC takes what has one index there for one example: its "
            "curvature mixes examples and depends on how the batch is divided; put examples first, and expand "
            "positions to one row for each example.",
        )


def _warn_rows_mixed(loss: Loss, examples: int) -> None:
    """Warn that the spectrum contains products of different rows of an example, unlike the Gauss–Newton matrix."""
    if any(term.row_losses.numel() > examples for term in loss.terms):
        warn_once(
            "ekfac-rows-together",
            "EKFAC with fisher='type-2' and a loss at every token or pixel: their exact vectors go back together, and "
            "the spectrum has products of different tokens, which the Gauss–Newton matrix has not; use "
            "fisher='rademacher' or 'mc'.",
        )


def _agreed(recorder: Recorder, group: Group, again: bool) -> bool:
    """Whether a rank asks for a forward pass ``again``; if not, refuses ranks that have called different layers.

    Their sums would not belong together. If inputs wait on one rank and not on another (it has more tokens, or masks
    none), layers share no sums.
    """
    called = [f"{name}*{recorder.calls.get(name, 1)}" for name in sorted({*recorder.layers.called, *recorder.calls})]
    waiting = [f"{call.block.name}*{call.masked}" for call in recorder.waiting]
    own = [zlib.crc32(",".join(x).encode()) for x in (called, waiting)]
    layers, inputs = zip(*group.numbers(*([-1, -1] if again else own)), strict=True)
    if -1 in layers:
        return True
    assert recorder.deliveries is not None
    recorder.deliveries.shares_sums = len(set(inputs)) == 1
    if len(set(layers)) > 1:
        raise HyperkronError(
            f"the processes have measured different layers, number {group.rank} {', '.join(sorted(recorder.calls))}; "
            "let the inner loss use the same layers on all of them."
        )
    return False


def over_ranks(found: Measured, plan: Plan, group: Group, like: Tensor) -> Measured:
    """The measurement of a batch that is divided among ranks: sums rows and diagonals over ranks in one collective.

    The owners already have the sums of their blocks, and gradients of parameters outside layers are already those of
    the whole batch.
    """
    known = {*plan.rest, *found.uncalled}
    names = [name for name in found.diagonal if name not in known]
    rows = [torch.as_tensor(n, dtype=like.dtype, device=like.device) for n in found.rows.values()]
    *sums, totals = group.sum([*(found.diagonal[n] for n in names), torch.stack(rows) if rows else like.new_zeros(0)])
    found.diagonal.update(zip(names, sums, strict=True))
    found.rows = dict(zip(found.rows, totals, strict=True))
    found.divide_by_rows()
    return found


class _Merged:
    """The measurement of a batch, accumulated from its parts; each part is weighted by its rows, as in the loss."""

    def __init__(self) -> None:
        self.sums = Measured()
        self.counts: list[tuple[float, ...]] = []

    def add(self, part: Measured, counts: tuple[float, ...]) -> None:
        """Add a part; ``counts`` are its rows in every criterion of the loss."""
        whole = self.sums
        if not self.counts:
            whole.l2, whole.scales, whole.uncalled = part.l2, part.scales, part.uncalled
        self.counts.append(counts)
        whole.uncalled = [name for name in whole.uncalled if name in part.uncalled]
        whole.in_half = whole.in_half or part.in_half
        for name, factor in part.a.items():
            add_to(whole.a, name, scaled(factor, part.rows[name]))
            whole.rows[name] = whole.rows.get(name, 0) + part.rows[name]
        for name, factor in part.wide[0].items():
            add_to(whole.wide[0], name, factor)
        summed: Any = ((whole.b, part.b), (whole.wide[1], part.wide[1]), (whole.diagonal, part.diagonal))
        summed += ((whole.corrected, part.corrected),)
        for sums, new in summed:
            for name, value in new.items():
                add_to(sums, name, scaled(value, counts[0]))
        whole.reached = tuple(dict.fromkeys((*whole.reached, *part.reached)))

    def finish(self) -> Measured:
        """Turn sums into means over all rows and return them."""
        whole, total = self.sums, sum(first for first, *_ in self.counts)
        shares(self.counts)  # refuses criteria that run over different shares of the rows
        whole.divide_by_rows()
        summed: Any = (whole.b, whole.diagonal, whole.corrected)
        for sums in summed:
            sums.update({name: scaled(value, 1.0 / total) for name, value in sums.items()})
        return whole


def _vectors(loss: Loss, batch_size: int, how: Measurement, point: Point) -> Iterable[tuple[Tensor, Tensor]]:
    """(output, vector to backpropagate) such that Σ vector vectorᵀ is the output Hessian."""
    if loss.terms:
        drawn = how.fisher, how.samples, how.generator
        return ((t.output, v) for t in loss.terms for v in t.vectors(*drawn, checked=how.checked))
    objective, _ = point.problem.words("inner")
    if how.fisher != "empirical":
        raise HyperkronError(
            f"{objective} returned a plain scalar tensor, for which fisher={how.fisher!r} is not defined: return "
            "hyperkron.losses.cross_entropy(...), mse(...) or binary_cross_entropy(...), or use fisher='empirical'."
        )
    warn_once(
        "scalar-empirical",
        f"{objective} returned a plain scalar: empirical factors take it as a mean over the batch with equal weights; "
        "return hyperkron.losses.cross_entropy(..., weight=...) to have example weights counted once.",
    )
    return [(loss.value, loss.value.new_tensor(float(batch_size) ** 0.5))]
