"""One forward and a few backward passes that leave behind the Kronecker factors.

A forward hook turns each layer's input into its contribution to A at once (a small input of a convolution when the
backward pass is over); an identity function on each layer's output turns the gradient that flows through it into its
contribution to B at once. No activation and no gradient is kept beyond that and what autograd keeps, and the gradients
of the weights are never computed: the backward pass is asked only for a token that every captured output depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyperkron.curvature.base import l2_curvature
from hyperkron.curvature.kfac.coverage import Block, Plan
from hyperkron.curvature.kfac.factors import Factor, added, few_rows, scaled
from hyperkron.curvature.kfac.grams import bordered, narrowed, summed
from hyperkron.curvature.kfac.layers import (
    BatchNormSums,
    ConvLayer,
    LinearLayer,
    WeightSharing,
    batch_norm_squares,
    batch_norm_sums,
    squared_gradients,
)
from hyperkron.curvature.kfac.spectrum import corrected
from hyperkron.losses import Fisher, Loss
from hyperkron.point import Point
from hyperkron.problem import rows, shares
from hyperkron.solution import HyperkronError, warn_once


@dataclass
class Measured:
    """What one pass over a batch found."""

    a: dict[str, Factor] = field(default_factory=dict)
    """A of every block: the mean of a aᵀ over rows, (groups, d_in [+1], d_in [+1])."""
    b: dict[str, Factor] = field(default_factory=dict)
    """B of every block: the sum of g gᵀ over rows, (groups, d_out, d_out)."""
    diagonal: dict[str, Tensor] = field(default_factory=dict)
    """The diagonal for parameters outside blocks, shaped like them or a single number."""
    corrected: dict[str, Tensor] = field(default_factory=dict)
    """EKFAC's S of every block, in the eigenbasis it was asked for: (groups, d_out, d_in [+1])."""
    l2: dict[str, Tensor | float] = field(default_factory=dict)
    """2α of the penalties α‖p‖² in the inner loss, by parameter."""
    reached: tuple[str, ...] = ()
    """The blocks that a gradient reached, whether a basis was given for them or not."""
    rows: dict[str, int] = field(default_factory=dict)
    """Over how many rows the mean in A runs, by block."""
    uncalled: list[str] = field(default_factory=list)
    """Parameters of layers that were never called as modules (their weights may be used by a function)."""

    def release(self) -> None:
        """Forget the factors, to free their memory; what else was found stays."""
        self.a, self.b = {}, {}


Basis = dict[str, tuple[Tensor, Tensor]]
"""Eigenvectors (Q_A, Q_B) of every block."""


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
) -> Measured:
    """Run J_in on the curvature batch and collect the factors, or, given a ``basis``, EKFAC's corrected spectrum.

    With ``low_rank`` a factor of fewer rows than dimensions is returned as its rows (see :class:`LowRank`). A batch
    that the problem wants evaluated in parts is measured part by part. Negative weights are refused; where they are not
    ``checked``, because that waits for the device, factors are nan. Parameters outside blocks are left alone where
    ``diagonal`` is false.
    """
    dtype, found, counts = accumulation_dtype(point.dtype), [], []
    parts = point.problem.parts(point.curvature_batch)
    for part in parts:
        recorder = _Recorder(plan, sharing, basis, dtype, low_rank, diagonal)
        with recorder.attached():
            loss = point.inner(part)
        found.append(_measure(point, plan, recorder, loss, fisher, samples, generator, checked))
        if len(parts) > 1:  # counting rows waits for the device
            counts.append(rows(loss.terms, recorder.batch_size))
        del loss
    return found[0] if len(found) == 1 else _merged(found, shares(counts))


def _merged(parts: list[Measured], weights: list[float]) -> Measured:
    """The measurement of a batch from those of its parts: sums weighted by rows, as the loss is."""
    whole = Measured(l2=parts[0].l2, uncalled=parts[0].uncalled)
    for part, share in zip(parts, weights, strict=True):
        for name, factor in part.a.items():
            total = sum(p.rows.get(name, 0) for p in parts)
            _Recorder._add(whole.a, name, scaled(factor, part.rows[name] / total))
        for name, factor in part.b.items():
            _Recorder._add(whole.b, name, scaled(factor, share))
        for sums, new in ((whole.diagonal, part.diagonal), (whole.corrected, part.corrected)):
            for name, value in new.items():
                _Recorder._sum(sums, name, value * share)
    whole.reached = tuple(dict.fromkeys(name for part in parts for name in part.reached))
    return whole


def _measure(
    point: Point,
    plan: Plan,
    recorder: _Recorder,
    loss: Loss,
    fisher: Fisher,
    samples: int,
    generator: torch.Generator,
    checked: bool,
) -> Measured:
    """Backpropagate the vectors of ``loss``; the hooks of ``recorder`` collect what passes."""
    measured = recorder.measured
    measured.l2 = l2_curvature(loss, point.params)
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
    recorder: _Recorder,
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
            warn_once(
                "opaque",
                "the inner loss contains a plain tensor whose curvature KFAC cannot see (harmless if it depends on "
                "λ only); write an L2 penalty as hyperkron.losses.l2(...) to have its curvature counted.",
            )
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
            f"inner returned a plain scalar tensor, from which fisher={fisher!r} cannot be had: return "
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


def _plainly(x: Tensor) -> AbstractContextManager[object]:
    """Without graph, and without the autocast a model may run under: factors are summed in their own precision."""
    kind = x.device.type
    return _without_autocast(kind) if torch.is_autocast_enabled(kind) else torch.no_grad()  # asking is cheaper


@contextmanager
def _without_autocast(kind: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


class _Tap(torch.autograd.Function):
    """The identity on a layer's output; hands the gradient that passes through to ``receive``.

    What it returns shares the output's memory without being a view of it, so that a model may go on in place, as
    ``ReLU(inplace=True)`` does; none of the layers concerned needs its output in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, receive: Callable[[Tensor], None]) -> Tensor:
        ctx.receive = receive
        return torch.ops.aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.receive(gradient)
        return gradient, None, None


WAITING = 2**19
"""Batch norm layers wait for each other, to be treated together, until so many numbers are held for them."""

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], Tensor]


class _Recorder:
    """The hooks of one measurement and the sums they fill."""

    def __init__(
        self,
        plan: Plan,
        sharing: WeightSharing,
        basis: Basis | None,
        dtype: torch.dtype,
        low_rank: bool,
        diagonal: bool,
    ) -> None:
        self.plan, self.sharing, self.basis, self.dtype, self.low_rank = plan, sharing, basis, dtype, low_rank
        self.diagonal = diagonal
        self.token = torch.zeros((), requires_grad=True)
        self.batch_size = 1
        self.measured = Measured()
        self.called: set[str] = set()
        self.rows: dict[str, int] = {}
        self._reached: dict[str, None] = {}  # in order; with a basis only
        self._held: list[tuple[Block, Tensor, int]] = []
        self._grams: dict[tuple[int, int, bool], tuple[Factor, int]] = {}
        self._alive: list[Tensor] = []
        self._normed: list[tuple[dict[str, str], BatchNormSums]] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks on every covered module, removed also when an exception passes through."""
        handles: list[RemovableHandle] = []
        try:
            for module, name in self.plan.feeds:
                hook = self._on_block(self.plan.blocks[name])
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            for module, names in self.plan.diagonal:
                handles.append(module.register_forward_hook(self._on_diagonal(names), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._grams.clear()
            self._alive.clear()

    def finish(self) -> None:
        """Sums of a aᵀ become means; blocks that no gradient reached are left out."""
        found = self.measured
        while self._held:
            block, x, rows = self._held.pop(0)
            if block.name in found.b:
                self._on_input(block, x, rows)
            del x
        sums: dict[int, tuple[Tensor, float]] = {}  # a sum shared by several blocks is divided once
        rescaled: dict[int, Factor] = {}
        for name, total in found.a.items():
            share = 1.0 / self.rows[name]
            if isinstance(total, Tensor):
                sums[id(total)] = (total, share)
            elif id(total) not in rescaled:
                rescaled[id(total)] = scaled(total, share)
        if sums:
            torch._foreach_mul_([x for x, _ in sums.values()], [share for _, share in sums.values()])
        reached = [name for name in self.plan.blocks if name in found.a and name in found.b]
        found.a = {name: rescaled.get(id(found.a[name]), found.a[name]) for name in reached}
        found.reached, found.rows = tuple(found.a) if self.basis is None else tuple(self._reached), self.rows

    def flush(self) -> None:
        """The diagonals of the batch norm layers that a backward pass went through since the last time."""
        passed, self._normed = self._normed, []
        if not passed:
            return
        with _plainly(passed[0][1].along):
            for (names, _), squares in zip(passed, batch_norm_squares([s for _, s in passed]), strict=True):
                self._diagonals(names, dict(zip(("weight", "bias"), squares, strict=True)))

    def _diagonals(self, names: dict[str, str], squares: dict[str, Tensor]) -> None:
        for local, square in squares.items():
            if local in names:
                self._sum(self.measured.diagonal, names[local], square)

    def _on_block(self, block: Block) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
            given: Tensor = inputs[0] if inputs else named["input"]
            self.called.update(block.names)
            self.batch_size = max(self.batch_size, given.shape[0] if given.dim() > 1 else 1)
            if self.basis is None:
                self._for_factors(block, given, output)
            x = None if self.basis is None else given.detach()  # held no longer than needed
            receive: Callable[[Tensor], None] = lambda g: self._on_gradient(block, x, g)  # noqa: E731
            tapped: Tensor = _Tap.apply(output, self.token, receive) if output.requires_grad else output
            return tapped

        return hook

    def _for_factors(self, block: Block, x: Tensor, output: Tensor) -> None:
        """A's share of one call now, or, where a convolution's factor is larger than its input, when the backward pass
        is over: then it does not add to the memory of activations."""
        rows, d = output.numel() // (block.layer.groups * block.layer.d_out), block.layer.d_in
        smaller = x.numel() < block.layer.groups * d * (rows if self.low_rank and few_rows(rows, d) else d)
        if isinstance(block.layer, ConvLayer) and output.requires_grad and smaller:
            self._held.append((block, x.detach(), rows))
        else:
            self._on_input(block, x, rows)

    def _on_input(self, block: Block, x: Tensor, rows: int) -> None:
        total, rows = self._input_gram(block, x, rows)
        self._add(self.measured.a, block.name, total)
        self.rows[block.name] = self.rows.get(block.name, 0) + rows

    def _on_diagonal(self, names: dict[str, str]) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
            self.called.update(names.values())
            if not self.diagonal or not output.requires_grad:
                return output
            x = (inputs[0] if inputs else named["input"]).detach()

            def receive(g: Tensor) -> None:
                with _plainly(g):
                    cast = x if not x.dtype.is_floating_point else x.to(self.dtype)
                    if isinstance(module, nn.modules.batchnorm._BatchNorm):
                        self._normed.append((names, batch_norm_sums(module, cast, g.to(self.dtype))))
                        if sum(sums.along.numel() for _, sums in self._normed) > WAITING:
                            self.flush()
                    else:
                        self._diagonals(names, squared_gradients(module, cast, g.to(self.dtype)))

            tapped: Tensor = _Tap.apply(output, self.token, receive)
            return tapped

        return hook

    def _input_gram(self, block: Block, x: Tensor, rows: int) -> tuple[Factor, int]:
        """Σ a aᵀ over the rows of one call, with a = [x, 1] where the block has a bias; layers that read the same
        tensor (query, key, value) share one."""
        key = (id(x), x._version, block.bias is not None)
        shareable = isinstance(block.layer, LinearLayer) and block.weight is not None
        if shareable and key in self._grams:
            return self._grams[key]
        with _plainly(x):
            made = self._without_rows(block, x.detach(), rows)
            if made is None:
                y, scale = self._narrowed(x.detach(), rows, block.layer.d_in)
                made = summed(block.layer.inputs(y, self.sharing), self.dtype, block, self.low_rank, scale)
        if shareable:
            self._grams[key] = made
            self._alive.append(x)
        return made

    def _without_rows(self, block: Block, x: Tensor, rows: int) -> tuple[Factor, int] | None:
        """The same for layers that need not form their ``rows`` rows; ``None`` for others, and where rows are kept."""
        layer = block.layer
        few = self.low_rank and few_rows(rows, layer.d_in)
        total = None if few or self.sharing == "reduce" or block.weight is None else layer.input_gram(x.to(self.dtype))
        if total is None or block.bias is None:
            return None if total is None else (total, rows)
        whole = layer.inputs(x.to(self.dtype).sum(0, keepdim=True), "expand")  # a row is linear in the image
        sums = torch.stack([part.sum(1) for part in whole]).sum(0)
        return bordered(total, layer.ordered(sums), rows), rows

    def _narrowed(self, x: Tensor, rows: int, d: int) -> tuple[Tensor, Tensor | None]:
        """``x`` in half precision with its scale, where a matrix will be made of its ``rows`` rows of size ``d``."""
        if self.sharing == "reduce" or (self.low_rank and few_rows(rows, d)):
            return x, None
        return narrowed(x, rows, d)

    def _on_gradient(self, block: Block, x: Tensor | None, g: Tensor) -> None:
        with _plainly(g):
            if x is None:
                layer = block.layer
                y, scale = self._narrowed(g, g.numel() // (layer.groups * layer.d_out), layer.d_out)
                total, _ = summed(layer.gradients(y, self.sharing), self.dtype, None, self.low_rank, scale)
                self._add(self.measured.b, block.name, total)
                return
            assert self.basis is not None
            self._reached[block.name] = None
            if block.name in self.basis:
                self._sum(self.measured.corrected, block.name, corrected(block, x, g, *self.basis[block.name]))

    @staticmethod
    def _sum(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value if name in sums else value

    @staticmethod
    def _add(sums: dict[str, Factor], name: str, value: Factor) -> None:
        sums[name] = added(sums[name], value) if name in sums else value
