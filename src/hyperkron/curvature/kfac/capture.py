"""One forward and a few backward passes that leave behind the Kronecker factors.

The gradients of the weights are never computed: the backward pass is asked only for a token that every captured output
depends on, and the hooks of :mod:`~hyperkron.curvature.kfac.recorder` collect what passes.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hyperkron.batch_tensors import tensors_of
from hyperkron.collectives import Group
from hyperkron.curvature.base import l2_curvature, warn_moving, warn_opaque
from hyperkron.curvature.kfac.coverage import Plan
from hyperkron.curvature.kfac.factors import add_to, scaled, stored
from hyperkron.curvature.kfac.kept import KeptGradients
from hyperkron.curvature.kfac.layers import WeightSharing
from hyperkron.curvature.kfac.measured import Basis, Measured
from hyperkron.curvature.kfac.owners import Owners
from hyperkron.curvature.kfac.penalty import column_scales
from hyperkron.curvature.kfac.recorder import Recorder
from hyperkron.evaluation.differentiation import graph_nodes
from hyperkron.evaluation.point import Point
from hyperkron.losses import DRAWN, Fisher, Loss
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError, warn_once


def measure(
    point: Point,
    plan: Plan,
    *,
    fisher: Fisher,
    samples: int,
    sharing: WeightSharing,
    generator: torch.Generator,
    basis: Basis | None = None,
    low_rank: bool = False,
    checked: bool = True,
    diagonal: bool = True,
    wide: bool = False,
    damping: float | None = None,
    owners: Owners | None = None,
    unmasked: bool = False,
    keep: bool = False,
    first: bool = False,
) -> Measured:
    """Run J_in on the curvature batch and collect the factors, or, given a ``basis``, EKFAC's corrected spectrum.

    With ``low_rank`` a factor of fewer rows than dimensions is returned as its rows (see :class:`LowRank`). A batch
    that the problem wants evaluated in parts is measured part by part. Negative weights are refused; where they are not
    ``checked``, because that waits for the device, factors are nan. Parameters outside blocks are left alone where
    ``diagonal`` is false. ``wide`` asks for the factors over all positions as well, ``damping`` for
    :attr:`Measured.scales`. Of a batch that is divided among processes each of the ``owners`` gets the factors, or
    spectra, of its blocks. A recording cannot read whether the loss masks tokens: with ``unmasked`` it takes for
    granted that it masks none, and factors are nan where it does. Of a batch in parts ``keep`` asks for
    :attr:`Measured.kept`, of the vectors that B is made of; the first pass also keeps what the point wants.
    The ``first`` measurement warns of parameters that are used outside their layers too, and of weights that depend on
    θ.
    """
    like = torch.empty((), device=point.device, dtype=torch.promote_types(point.dtype, torch.float32))
    parts, whole = point.problem.parts(point.curvature_batch), _Merged()
    kept = KeptGradients(len(parts)) if keep and len(parts) > 1 else None
    wanted = _wanted(point, len(parts)) if basis is None and owners is None else None
    for part in parts:
        keeps = [one is not None and one.fits for one in (wanted, kept)]
        recorder = Recorder(plan, sharing, basis, like, low_rank, diagonal, wide, owners, *keeps)
        with recorder.attached():
            loss = point.inner(part)
            recorder.saw(loss, readable=not point.recording, unmasked=unmasked)
        _forget_hidden_calls(recorder, loss, point)
        if first:
            _warn_used_elsewhere(recorder, loss, point)
            warn_moving("KFAC", loss, point.params)
            first = False
        if owners is not None:
            _check_alike(recorder, owners.group)
        if loss.terms and (owners is not None or len(parts) > 1):
            _warn_without_batch(recorder.lengths, _examples(recorder, loss, part))
        elif loss.terms and (basis is not None or sharing == "reduce"):
            _warn_without_batch(recorder.sequences, _examples(recorder, loss, part))
        if basis is not None and fisher == "type-2" and sharing == "expand":
            _warn_together(loss, recorder.batch_size)
        recorder.measured.l2 = l2 = l2_curvature(loss, point.params)
        recorder.measured.scales = {} if damping is None else column_scales(plan, l2, damping, like)
        size = recorder.batch_size * point.problem.group.size
        vectors = _vectors(loss, size, fisher, samples, generator, checked)
        # drawn vectors of different examples are independent already
        place = loss.terms[0].place if loss.terms else None  # of these examples in the whole batch
        signs = None if fisher in DRAWN else generator
        found = recorder.backward(point.params, vectors, signs, place, _unbatched(recorder, loss))
        if len(parts) == 1:
            return found if owners is None else over_ranks(found, plan, owners.group)
        counts = rows(loss.terms, recorder.batch_size)  # counting rows waits for the device
        whole.add(found, counts)
        if any(keeps):
            own = _vectors(loss, size, fisher, samples, generator, checked)
            others = wanted.vectors(loss) if wanted is not None and wanted.fits else []
            for one, gradients in zip((kept, wanted), recorder.gradients(own, others), strict=True):
                if one is not None and one.fits:
                    one.add(gradients, counts[0])
            del own, others, gradients  # vectors may hold the graph, and with it the recorder
        del loss, vectors, found, recorder
    found = whole.finish()
    found.kept = kept
    return found


def _wanted(point: Point, parts: int) -> KeptGradients | None:
    """Where the point wants gradients kept, before the first of them."""
    wanted: KeptGradients | None = point.kept
    return wanted if parts > 1 and wanted is not None and wanted.left == parts else None


def _edges(loss: Loss) -> Counter[int]:
    """How many edges the graph of the outputs has to each leaf, by its id."""
    edges: Counter[int] = Counter()
    for node in graph_nodes([term.output for term in loss.terms]):
        edges.update(id(getattr(further, "variable", None)) for further, _ in node.next_functions)
    return edges


def _forget_hidden_calls(recorder: Recorder, loss: Loss, point: Point) -> None:
    """Layers whose calls had no gradient, but on whose parameters the outputs depend, count as not called.

    Inside ``torch.vmap`` the output of a layer does not tell that it has a gradient, and none passes there.
    """
    hidden = recorder.called - recorder.uses.keys()
    if hidden:
        edges = _edges(loss)
        recorder.called -= {name for name in hidden if edges[id(point.params[name])]}


def _warn_used_elsewhere(recorder: Recorder, loss: Loss, point: Point) -> None:
    """Say on which parameters outputs depend by more than the calls of their layers: the graph has more edges to them.

    ``F.linear(x, layer.weight)`` makes one. Calls of modules that are not measured, as an embedding's with
    ``fallback="zero"``, are not counted: parameters of these are left out.
    """
    edges = _edges(loss)
    measured = {id(module) for module, _ in (*recorder.plan.feeds, *recorder.plan.diagonal)}
    others = {id(p) for m in point.model.modules() if id(m) not in measured for p in m._parameters.values()}
    used = {name: id(point.params[name]) for name in recorder.uses}
    names = [name for name, p in used.items() if p not in others and edges[p] > recorder.uses[name]]
    if names:
        point.notes["used elsewhere"] = ", ".join(names)
        warn_once(
            f"kfac-used-elsewhere {names}",
            f"{', '.join(names[:3])} of the model is used outside its layer too, as F.linear(x, layer.weight) does; "
            "KFAC does not see that, and its curvature is too small. Call a layer that shares the parameter instead, "
            "or use cg(curvature=GGN(...)) or pcg().",
        )


def _unbatched(recorder: Recorder, loss: Loss) -> bool:
    """Whether a layer was called on inputs that have no dimension for examples, or may have none, as positions do.

    Not asked where a row of the loss is a token and not an example: there signs would tell tokens apart, too.
    """
    counted = Counter(recorder.lengths.values()).most_common(1)
    if not counted or any(len(term.row_losses) != counted[0][0] for term in loss.terms):
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
    """Say which layers have inputs whose first dimension is not that of examples, though KFAC takes it for that."""
    names = [name for name, length in lengths.items() if length % max(examples, 1)]
    if names:
        warn_once(
            "kfac-without-batch",
            f"{', '.join(names[:3])} of the model is called on inputs whose first dimension is not that of examples "
            "(positions, or batch_first=False?), but KFAC takes what has one index there for one example: its "
            "curvature mixes examples and depends on how the batch is divided; put examples first, and expand "
            "positions to one row for each example.",
        )


def _warn_together(loss: Loss, examples: int) -> None:
    """Say that a spectrum is not that of the Gauss–Newton matrix: it has products of different rows of an example."""
    if any(term.row_losses.numel() > examples for term in loss.terms):
        warn_once(
            "ekfac-rows-together",
            "EKFAC with fisher='type-2' and a loss at every token or pixel: their exact vectors go back together, and "
            "the spectrum has products of different tokens, which the Gauss–Newton matrix has not; use "
            "fisher='rademacher' or 'mc'.",
        )


def _check_alike(recorder: Recorder, group: Group) -> None:
    """Refuse that ranks have called different layers: their sums would not belong together.

    Where inputs wait on one rank and not on another, for its part has more tokens or masks none, layers share no sums.
    """
    called = [f"{name}*{recorder.calls.get(name, 1)}" for name in sorted({*recorder.called, *recorder.calls})]
    waiting = [f"{call.block.name}*{call.masked}" for call in recorder.waiting]
    layers, inputs = zip(*group.numbers(*(zlib.crc32(",".join(x).encode()) for x in (called, waiting))), strict=True)
    assert recorder.deliveries is not None
    recorder.deliveries.shares_sums = len(set(inputs)) == 1
    if len(set(layers)) > 1:
        raise HyperkronError(
            f"the processes have measured different layers, number {group.rank} {', '.join(sorted(recorder.calls))}; "
            "let the inner loss use the same layers on all of them."
        )


def over_ranks(found: Measured, plan: Plan, group: Group) -> Measured:
    """The measurement of a batch that is divided among ranks: rows and diagonals are summed in one collective.

    The owners have the sums of their blocks already. Gradients of parameters outside layers, and so their squares, are
    those of the whole batch already.
    """
    known = {*plan.rest, *found.uncalled}
    names = [name for name in found.diagonal if name not in known]
    like = found.diagonal[names[0]] if names else torch.zeros((), dtype=torch.float64, device=group.device)
    rows = [torch.as_tensor(n, dtype=like.dtype, device=like.device) for n in found.rows.values()]
    *sums, totals = group.sum([*(found.diagonal[n] for n in names), torch.stack(rows) if rows else like.new_zeros(0)])
    found.diagonal.update(zip(names, sums, strict=True))
    found.rows = dict(zip(found.rows, totals, strict=True))
    means: dict[int, Any] = {}  # of a sum that several blocks share, one
    for name, total in found.a.items():
        if id(total) not in means:
            means[id(total)] = scaled(total, 1.0 / found.rows[name].to(stored(total)))  # type: ignore[union-attr]
    found.a = {name: means[id(total)] for name, total in found.a.items()}
    return found


class _Merged:
    """The measurement of a batch from those of its parts, added up one by one: weighted by rows, as the loss is."""

    def __init__(self) -> None:
        self.sums = Measured()
        self.rows: dict[str, Any] = {}
        self.counts: list[tuple[float, ...]] = []

    def add(self, part: Measured, counts: tuple[float, ...]) -> None:
        """One more part; ``counts`` are its rows in every criterion of the loss."""
        whole = self.sums
        if not self.counts:
            whole.l2, whole.scales, whole.uncalled = part.l2, part.scales, part.uncalled
        self.counts.append(counts)
        whole.in_half = whole.in_half or part.in_half
        for name, factor in part.a.items():
            add_to(whole.a, name, scaled(factor, part.rows[name]))
            self.rows[name] = self.rows.get(name, 0) + part.rows[name]
        (wide_a, wide_b), (part_a, part_b) = whole.wide, part.wide
        for name, factor in part_a.items():
            add_to(wide_a, name, factor)
        summed: Any = ((whole.b, part.b), (wide_b, part_b), (whole.diagonal, part.diagonal))
        summed += ((whole.corrected, part.corrected),)
        for sums, new in summed:
            for name, value in new.items():
                add_to(sums, name, scaled(value, counts[0]))
        whole.reached = tuple(dict.fromkeys((*whole.reached, *part.reached)))

    def finish(self) -> Measured:
        """Sums become means over all rows."""
        whole, total = self.sums, sum(first for first, *_ in self.counts)
        shares(self.counts)  # refuses criteria that run over different shares of the rows
        whole.a = {name: scaled(factor, 1.0 / self.rows[name]) for name, factor in whole.a.items()}
        summed: Any = (whole.b, whole.diagonal, whole.corrected)
        for sums in summed:
            sums.update({name: scaled(value, 1.0 / total) for name, value in sums.items()})
        return whole


def _vectors(
    loss: Loss, batch_size: int, fisher: Fisher, samples: int, generator: torch.Generator, checked: bool
) -> Iterable[tuple[Tensor, Tensor]]:
    """(output, vector to backpropagate) such that Σ vector vectorᵀ is the output Hessian."""
    if loss.terms:
        if loss.opaque:
            warn_opaque("KFAC")
        return ((t.output, v) for t in loss.terms for v in t.vectors(fisher, samples, generator, checked=checked))
    if fisher != "empirical":
        raise HyperkronError(
            f"inner returned a plain scalar tensor, for which fisher={fisher!r} is not defined: return "
            "hyperkron.losses.cross_entropy(...), mse(...) or binary_cross_entropy(...), or use fisher='empirical'."
        )
    warn_once(
        "scalar-empirical",
        "inner returned a plain scalar: empirical factors take it as a mean over the batch with equal weights; "
        "return hyperkron.losses.cross_entropy(..., weight=...) to have example weights counted once.",
    )
    return [(loss.value, loss.value.new_tensor(float(batch_size) ** 0.5))]
