"""One forward and a few backward passes that leave behind the Kronecker factors.

The gradients of the weights are never computed: the backward pass is asked only for a token that every captured output
depends on, and the hooks of :mod:`~hyperkron.curvature.kfac.recorder` collect what passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from hyperkron.curvature.base import l2_curvature, warn_opaque
from hyperkron.curvature.kfac.coverage import Plan
from hyperkron.curvature.kfac.factors import scaled
from hyperkron.curvature.kfac.layers import WeightSharing
from hyperkron.curvature.kfac.recorder import Basis, Measured, Recorder
from hyperkron.evaluation.point import Point
from hyperkron.losses import Fisher, Loss
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError, warn_once

Scales = Callable[[dict[str, Tensor | float]], dict[str, Tensor]]
"""The scales of blocks that penalties fall on unevenly, from 2α by parameter."""


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
    scales: Scales | None = None,
) -> Measured:
    """Run J_in on the curvature batch and collect the factors, or, given a ``basis``, EKFAC's corrected spectrum.

    With ``low_rank`` a factor of fewer rows than dimensions is returned as its rows (see :class:`LowRank`). A batch
    that the problem wants evaluated in parts is measured part by part. Negative weights are refused; where they are not
    ``checked``, because that waits for the device, factors are nan. Parameters outside blocks are left alone where
    ``diagonal`` is false. ``wide`` asks for the factors over all positions as well. ``scales`` makes
    :attr:`Measured.scales` of the penalties' curvature.
    """
    dtype, found, counts = accumulation_dtype(point.dtype), [], []
    parts = point.problem.parts(point.curvature_batch)
    for part in parts:
        recorder = Recorder(plan, sharing, basis, dtype, low_rank, diagonal, wide)
        with recorder.attached():
            loss = point.inner(part)
            recorder.saw(loss)
        recorder.measured.l2 = l2_curvature(loss, point.params)
        recorder.measured.scales = {} if scales is None else scales(recorder.measured.l2)
        found.append(_measure(point, plan, recorder, loss, fisher, samples, generator, checked))
        if len(parts) > 1:  # counting rows waits for the device
            counts.append(rows(loss.terms, recorder.batch_size))
        del loss
    return found[0] if len(found) == 1 else _merged(found, shares(counts))


def _merged(parts: list[Measured], weights: list[float]) -> Measured:
    """The measurement of a batch from those of its parts: sums weighted by rows, as the loss is."""
    whole = Measured(l2=parts[0].l2, scales=parts[0].scales, uncalled=parts[0].uncalled)
    for part, share in zip(parts, weights, strict=True):
        for name, factor in part.a.items():
            total = sum(p.rows.get(name, 0) for p in parts)
            Recorder.add(whole.a, name, scaled(factor, part.rows[name] / total))
        for name, factor in part.b.items():
            Recorder.add(whole.b, name, scaled(factor, share))
        for sums_of, found in zip(whole.wide, part.wide, strict=True):
            for name, factor in found.items():
                Recorder.add(sums_of, name, factor)
        for sums, new in ((whole.diagonal, part.diagonal), (whole.corrected, part.corrected)):
            for name, value in new.items():
                Recorder.sum(sums, name, value * share)
    whole.reached = tuple(dict.fromkeys(name for part in parts for name in part.reached))
    return whole


def _measure(
    point: Point,
    plan: Plan,
    recorder: Recorder,
    loss: Loss,
    fisher: Fisher,
    samples: int,
    generator: torch.Generator,
    checked: bool,
) -> Measured:
    """Backpropagate the vectors of ``loss``; the hooks of ``recorder`` collect what passes."""
    measured = recorder.measured
    layered = [n for block in plan.blocks.values() for n in block.names]
    layered += [n for _, names in plan.diagonal for n in names.values()]
    measured.uncalled = [n for n in layered if n not in recorder.called]
    names = [*plan.rest, *measured.uncalled] if recorder.diagonal and plan.measures_rest else []
    rest = [point.params[name] for name in names]
    squares: dict[str, Tensor] = {}
    for output, vector, last in _probes(loss, recorder, fisher, samples, generator, bool(rest), checked):
        found = torch.autograd.grad(
            output,
            [recorder.token, *rest],
            vector,
            retain_graph=not last,
            allow_unused=True,
            materialize_grads=False,
        )
        recorder.flush()
        for name, gradient in zip(names, found[1:], strict=True):
            if gradient is not None:
                square = gradient.to(recorder.dtype).square().mean()
                squares[name] = squares[name] + square if name in squares else square
    recorder.finish()
    measured.diagonal.update(squares)
    return measured


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Factors are accumulated in float32 at least."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _probes(
    loss: Loss,
    recorder: Recorder,
    fisher: Fisher,
    samples: int,
    generator: torch.Generator,
    signed: bool,
    checked: bool,
) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """(output, vector to backpropagate, whether it is the last) such that Σ vector vectorᵀ is the output Hessian.

    Where parameters outside layers are measured by the square of a whole batch's gradient, examples get random signs,
    which make the mixed terms vanish on average and change no factor; Monte-Carlo vectors are independent already.
    """
    pairs: Iterable[tuple[Tensor, Tensor]]
    if loss.terms:
        if loss.opaque:
            warn_opaque("KFAC")
        pairs = ((t.output, v) for t in loss.terms for v in t.vectors(fisher, samples, generator, checked=checked))
    elif fisher == "empirical":
        warn_once(
            "scalar-empirical",
            "inner returned a plain scalar: empirical factors take it as a mean over the batch with equal weights; "
            "return hyperkron.losses.cross_entropy(..., weight=...) to have example weights counted once.",
        )
        pairs = [(loss.value, loss.value.new_tensor(float(recorder.batch_size) ** 0.5))]
    else:
        raise HyperkronError(
            f"inner returned a plain scalar tensor, for which fisher={fisher!r} is not defined: return "
            "hyperkron.losses.cross_entropy(...), mse(...) or binary_cross_entropy(...), or use fisher='empirical'."
        )
    previous: tuple[Tensor, Tensor] | None = None
    for output, vector in pairs:
        if previous is not None:
            yield (*previous, False)
        if signed and fisher != "mc" and vector.dim() > 0:
            shape = (vector.shape[0], *[1] * (vector.dim() - 1))
            coin = torch.randint(0, 2, shape, generator=generator, device=vector.device)
            vector = vector * (2 * coin - 1).to(vector.dtype)
        previous = (output, vector)
    if previous is not None:
        yield (*previous, True)
