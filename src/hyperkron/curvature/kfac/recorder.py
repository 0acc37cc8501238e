"""The hooks of one measurement: what passes through a layer becomes its share of A and B at once.

A forward hook turns each layer's input into its contribution to A (a small input of a convolution when the backward
pass is over); an identity function on each layer's output turns the gradient that flows through it into its
contribution to B. No activation and no gradient is kept beyond that and what autograd keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hyperkron.curvature.kfac.coverage import Block, Plan
from hyperkron.curvature.kfac.factors import Factor, added, few_rows, scaled
from hyperkron.curvature.kfac.grams import bordered, masked_gram, narrowed, summed
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
from hyperkron.losses import Loss


@dataclass
class Measured:
    """What one pass over a batch found."""

    a: dict[str, Factor] = field(default_factory=dict)
    """A of every block: the mean of a aᵀ over rows, (groups, d_in [+1], d_in [+1])."""
    b: dict[str, Factor] = field(default_factory=dict)
    """B of every block: the sum of g gᵀ over rows, (groups, d_out, d_out)."""
    diagonal: dict[str, Tensor] = field(default_factory=dict)
    """The diagonal for parameters outside blocks, shaped like them or a single number."""
    wide: tuple[dict[str, Factor], dict[str, Factor]] = field(default_factory=lambda: ({}, {}))
    """A and B of every block over all positions, not normalised, where they were asked for besides reduced ones."""
    corrected: dict[str, Tensor] = field(default_factory=dict)
    """EKFAC's S of every block, in the eigenbasis it was asked for, after scaling by ``scales``: (groups, d_out, d_in
    [+1])."""
    l2: dict[str, Tensor | float] = field(default_factory=dict)
    """2α of the penalties α‖p‖² in the inner loss, by parameter."""
    scales: dict[str, Tensor] = field(default_factory=dict)
    """E of the blocks that these penalties fall on unevenly (see :mod:`~hyperkron.curvature.kfac.penalty`)."""
    reached: tuple[str, ...] = ()
    """The blocks that a gradient reached, whether a basis was given for them or not."""
    rows: dict[str, int | Tensor] = field(default_factory=dict)
    """Over how many rows the mean in A runs, by block."""
    uncalled: list[str] = field(default_factory=list)
    """Parameters of layers that were never called as modules (their weights may be used by a function)."""

    def release(self) -> None:
        """Forget the factors, to free their memory; what else was found stays."""
        self.a, self.b, self.wide = {}, {}, ({}, {})


Basis = dict[str, tuple[Tensor, Tensor]]
"""Eigenvectors (Q_A, Q_B) of every block."""


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
"""Batch norm layers wait for each other, to be treated together, until this many numbers are held for them."""

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Tensor], Tensor]


@dataclass
class _Call:
    """One call of a layer over tokens, whose input waits until it is known which of its rows count."""

    block: Block
    x: Tensor
    rows: int
    masked: bool = False
    reached: Tensor | None = None


class Recorder:
    """The hooks of one measurement and the sums they fill."""

    def __init__(
        self,
        plan: Plan,
        sharing: WeightSharing,
        basis: Basis | None,
        dtype: torch.dtype,
        low_rank: bool,
        diagonal: bool,
        wide: bool,
    ) -> None:
        self.plan, self.sharing, self.basis, self.dtype, self.low_rank = plan, sharing, basis, dtype, low_rank
        self.diagonal, self.wide = diagonal, wide
        self.token = torch.zeros((), requires_grad=True)
        self.batch_size = 1
        self.measured = Measured()
        self.called: set[str] = set()
        self.rows: dict[str, int | Tensor] = {}
        self._reached: dict[str, None] = {}  # in order; with a basis only
        self._held: list[tuple[Block, Tensor, int]] = []
        self._tokens: list[_Call] = []
        self._grams: dict[tuple[int, int, bool, str], tuple[Factor, int]] = {}
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
        while self._tokens:
            call = self._tokens.pop(0)
            if call.reached is not None:
                self._on_tokens(call)
            del call
        sums: dict[int, tuple[Tensor, float]] = {}  # a sum shared by several blocks is divided once
        rescaled: dict[int, Factor] = {}
        for name, total in found.a.items():
            share = 1.0 / self.rows[name]
            if isinstance(share, Tensor):
                rescaled[id(total)] = scaled(total, share)
            elif isinstance(total, Tensor):
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
                self.sum(self.measured.diagonal, names[local], square)

    def _on_block(self, block: Block) -> Hook:
        def hook(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> Tensor:
            given: Tensor = inputs[0] if inputs else next(iter(named.values()))
            self.called.update(block.names)
            if not output.requires_grad:  # under no_grad: the loss does not see this call
                return output
            self.batch_size = max(self.batch_size, given.shape[0] if given.dim() > 1 else 1)
            call = self._for_factors(block, given, output) if self.basis is None else None
            x = None if self.basis is None else given.detach()  # held no longer than needed
            receive: Callable[[Tensor], None] = lambda g: self._on_gradient(block, x, g, call)  # noqa: E731
            tapped: Tensor = _Tap.apply(output, self.token, receive)
            return tapped

        return hook

    def _for_factors(self, block: Block, x: Tensor, output: Tensor) -> _Call | None:
        """A's share of one call now, or, where a convolution's factor is larger than its input, when the backward pass
        is over: then it does not add to the memory of activations. A call over tokens waits for the loss."""
        rows, d = output.numel() // (block.layer.groups * block.layer.d_out), block.layer.d_in
        smaller = x.numel() < block.layer.groups * d * (rows if self.low_rank and few_rows(rows, d) else d)
        if isinstance(block.layer, LinearLayer) and x.dim() > 2:
            self._tokens.append(_Call(block, x, rows))
            return self._tokens[-1]
        if isinstance(block.layer, ConvLayer) and smaller:
            self._held.append((block, x.detach(), rows))
        else:
            self._on_input(block, x, rows)
        return None

    def saw(self, loss: Loss) -> None:
        """The forward pass is over. Where the loss has a row for every token, some of them masked, A counts those that
        a gradient reaches, which is known only after the backward passes."""
        counts = {term.valid.numel() for term in loss.terms if term.valid is not None}
        calls, self._tokens = self._tokens, []
        for call in calls:
            if call.rows in counts:
                call.masked = True
                self._tokens.append(call)
            else:
                self._on_input(call.block, call.x, call.rows)

    def _on_tokens(self, call: _Call) -> None:
        """A's share of a call of which only the rows count that a gradient has reached."""
        assert call.reached is not None
        block, x = call.block, call.x.detach()
        with _plainly(x):
            for sharing, sums in ((self.sharing, self.measured.a), ("expand", self.measured.wide[0])):
                if sums is self.measured.a or self.wide:
                    total, count = masked_gram(block, x, call.reached, sharing, self.dtype, self.low_rank)
                    self.add(sums, block.name, total)
                if sums is self.measured.a:
                    self.rows[block.name] = self.rows.get(block.name, 0) + count

    def _on_input(self, block: Block, x: Tensor, rows: int) -> None:
        total, count = self._input_gram(block, x, rows, self.sharing)
        self.add(self.measured.a, block.name, total)
        self.rows[block.name] = self.rows.get(block.name, 0) + count
        if self.wide:
            self.add(self.measured.wide[0], block.name, self._input_gram(block, x, rows, "expand")[0])

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

    def _input_gram(self, block: Block, x: Tensor, rows: int, sharing: WeightSharing) -> tuple[Factor, int]:
        """Σ a aᵀ over the rows of one call, with a = [x, 1] where the block has a bias; layers that read the same
        tensor (query, key, value) share one."""
        key = (id(x), x._version, block.bias is not None, sharing)
        shareable = isinstance(block.layer, LinearLayer) and block.weight is not None
        if shareable and key in self._grams:
            return self._grams[key]
        with _plainly(x):
            made = self._without_rows(block, x.detach(), rows, sharing)
            if made is None:
                y, scale = x.detach(), None
                if block.layer.homogeneous:
                    y, scale = self._narrowed(y, rows, block.layer.d_in, sharing)
                made = summed(block.layer.inputs(y, sharing), self.dtype, block, self.low_rank, scale)
        if shareable:
            self._grams[key] = made
            self._alive.append(x)
        return made

    def _without_rows(self, block: Block, x: Tensor, rows: int, sharing: WeightSharing) -> tuple[Factor, int] | None:
        """The same for layers that need not form their ``rows`` rows; ``None`` for others, and where rows are kept."""
        layer = block.layer
        few = self.low_rank and few_rows(rows, layer.d_in)
        total = None if few or sharing == "reduce" or block.weight is None else layer.input_gram(x.to(self.dtype))
        if total is None or block.bias is None:
            return None if total is None else (total, rows)
        whole = layer.inputs(x.to(self.dtype).sum(0, keepdim=True), "expand")  # a row is linear in the image
        sums = torch.stack([part.sum(1) for part in whole]).sum(0)
        return bordered(total, layer.ordered(sums), rows), rows

    def _narrowed(self, x: Tensor, rows: int, d: int, sharing: WeightSharing) -> tuple[Tensor, Tensor | None]:
        """``x`` in half precision with its scale, where a matrix will be made of its ``rows`` rows of size ``d``."""
        if sharing == "reduce" or (self.low_rank and few_rows(rows, d)):
            return x, None
        return narrowed(x, rows, d)

    def _on_gradient(self, block: Block, x: Tensor | None, g: Tensor, call: _Call | None) -> None:
        with _plainly(g):
            if call is not None and call.masked:
                reached = (g != 0).any(-1)
                call.reached = reached if call.reached is None else call.reached | reached
            if x is None:
                self.add(self.measured.b, block.name, self._gradient_gram(block, g, self.sharing))
                if self.wide:
                    self.add(self.measured.wide[1], block.name, self._gradient_gram(block, g, "expand"))
                return
            assert self.basis is not None
            self._reached[block.name] = None
            if block.name in self.basis:
                q_a, q_b = self.basis[block.name]
                scale = self.measured.scales.get(block.name)
                q_a = q_a if scale is None else q_a / scale.mT
                self.sum(self.measured.corrected, block.name, corrected(block, x, g, q_a, q_b))

    def _gradient_gram(self, block: Block, g: Tensor, sharing: WeightSharing) -> Factor:
        layer = block.layer
        y, scale = self._narrowed(g, g.numel() // (layer.groups * layer.d_out), layer.d_out, sharing)
        return summed(layer.gradients(y, sharing), self.dtype, None, self.low_rank, scale)[0]

    @staticmethod
    def sum(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
        """Add to the sum of that name, or begin one."""
        sums[name] = sums[name] + value if name in sums else value

    @staticmethod
    def add(sums: dict[str, Factor], name: str, value: Factor) -> None:
        """The same for factors."""
        sums[name] = added(sums[name], value) if name in sums else value
