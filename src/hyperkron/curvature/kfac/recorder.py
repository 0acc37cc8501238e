"""The hooks of one measurement, which turn inputs and gradients of layers into the factors A and B.

A forward hook turns each layer's input into its contribution to A. An identity function on each layer's output turns
the gradient that flows through it into its contribution to B. No other activations are kept. If the batch is divided
among processes, contributions are sent to the owner of the layer as soon as they are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hyperkron import trees
from hyperkron.curvature.kfac.calls import CallId, Calls, unmasked_examples
from hyperkron.curvature.kfac.coverage import Block, Plan
from hyperkron.curvature.kfac.diagonals import Diagonals
from hyperkron.curvature.kfac.factors import Factor, add_to, stored
from hyperkron.curvature.kfac.grams import WIDE_OUTPUT, InputGrams, corrected, masked_gram, pooled, summed
from hyperkron.curvature.kfac.kept import LayerGradients
from hyperkron.curvature.kfac.layers import WeightSharing
from hyperkron.curvature.kfac.measured import Measured, Measurement
from hyperkron.curvature.kfac.owners import Deliveries
from hyperkron.curvature.kfac.taps import check_unchanged, no_grad_no_autocast, parameters_of, with_last
from hyperkron.losses import Loss
from hyperkron.sharding import any_sharded
from hyperkron.trees import HALF_TYPES, Tree


@dataclass(eq=False)
class _Call:
    """One call of a layer."""

    block: Block
    x: Tensor | None  # the input, until its rows have been summed
    rows: int
    masked: bool = False  # whether only rows that a gradient has ``reached`` count
    reached: Tensor | None = None
    version: int | None = None  # of x, to detect changes in place, where its values count
    input: Tensor | None = None  # x, if gradients of examples are kept
    single: bool = False  # whether each example has a single row


class Recorder:
    """The hooks of one measurement and the sums they fill."""

    def __init__(
        self,
        plan: Plan,
        how: Measurement,
        like: Tensor,
        keeps: bool = False,
        keeps_own: bool = False,
        left_out: Collection[CallId] = (),
    ) -> None:
        """With ``keeps`` inputs are kept until the graph is freed, for :meth:`gradients`; with ``keeps_own`` gradients
        for EKFAC's spectrum are kept too. Calls that are ``left_out`` are not measured."""
        self.keeps, self.keeps_own = keeps or keeps_own, keeps_own
        # the purpose of the current backward pass; gradients that the inner loss computes itself are not measured
        self._for: Literal["the model", "factors", "spectrum", "others"] = "the model"
        self._passed: dict[_Call, list[tuple[bool, Tensor]]] = {}  # gradients to keep, and whether for others
        self._kept: tuple[list[LayerGradients], list[LayerGradients]] = ([], [])  # for the spectrum, for others
        self.plan, self.how, self.basis, self.owners = plan, how, how.basis, how.owners
        self.like, self.dtype = like, like.dtype  # dtype and device of the factors
        layers = [*(m for m, _ in plan.feeds), *plan.diagonal]
        sharded = any_sharded([p for module in layers for p in module._parameters.values() if p is not None])
        self.copies = sharded or how.owners is not None  # in the place of θ, where processes share it or the batch
        self.tokens = [
            torch.zeros((), requires_grad=True, device="cpu") for _ in range(2)
        ]  # the second for calls with single rows
        self.batch_size = 1
        self.lengths: dict[str, int] = {}  # first dimension of each layer's input
        self.sequences: dict[str, int] = {}  # the same, for inputs with several rows for each index there
        self.plain_lookups = False  # whether an embedding got one-dimensional indices, of examples or positions
        self.layers = Calls(left_out)
        self._own: dict[nn.Module, list[tuple[int, bool]]] = {}
        self.measured = found = Measured()
        self._factors: list[tuple[dict[str, Factor], dict[str, Factor], WeightSharing]]
        self._factors = [(found.a, found.b, how.sharing)]
        if how.wide:
            self._factors.append((*found.wide, "expand"))
        self.diagonals = Diagonals(found.diagonal, self.dtype)
        self.waiting: list[_Call] = []
        self.inputs = InputGrams(self.dtype, how.low_rank, one_at_a_time=how.owners is not None)
        self._masks: list[tuple[int, Tensor]] = []  # of losses over tokens: of how many, and which count
        self._assumed_unmasked: Tensor | None = None  # whether it masks none, if that was assumed without reading it
        self.calls: dict[str, int] = {}  # by block
        self._last = False  # whether this backward pass is the last one
        self.deliveries = None if how.owners is None else Deliveries(how.owners)
        self._bases: dict[str, tuple[Tensor, Tensor]] = {}  # received from other processes

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Inside the block, every covered module has its hook; hooks are removed also after an error."""
        hooks = [(module, partial(self._on_block, self.plan.blocks[name])) for module, name in self.plan.feeds]
        hooks += [(module, partial(self._on_diagonal, names)) for module, names in self.plan.diagonal.items()]
        self._own = {module: parameters_of(module) for module, _ in hooks}
        with ExitStack() as stack:
            stack.callback(self.inputs.forget)
            for module, hook in hooks:
                stack.callback(module.register_forward_hook(hook, with_kwargs=True, prepend=True).remove)
            yield

    def _on_block(self, block: Block, module: nn.Module, given: tuple[Any, ...], named: Any, output: Tensor) -> Tensor:
        if self._without_theta(module, output):
            return output
        output, measured = self.layers.registered(block.name, block.names, output)
        if not measured:
            return output
        x: Tensor = given[0] if given else next(iter(named.values()))
        dims, length = x.dim(), x.shape[0] if x.dim() else 1
        self.batch_size = max(self.batch_size, length if dims > 1 else 1)
        self.lengths[block.name] = length
        if block.layer.tokens and dims > 2 and length > 1:
            self.sequences[block.name] = length
        self.calls[block.name] = self.calls.get(block.name, 0) + 1
        call = self._begin_call(block, x, output)
        call.input = x.detach() if self.keeps else None
        call.single = call.rows == block.layer.examples(x)
        token = self.tokens[call.single]
        return self.layers.tapped(block.name, x, output, token, partial(self._on_gradient, call))

    def _without_theta(self, module: nn.Module, output: Tensor) -> bool:
        """Whether the gradient at the output is not that of θ: the call has no rows, as that of an expert without
        tokens, or a parameter is frozen, ``functional_call`` has put another tensor in its place, or the layer is a
        copy made inside the loss."""
        if not output.numel() and self.owners is None:  # other processes may have rows
            return True
        own, now = self._own.get(module), [p for p in module._parameters.values() if p is not None]
        if own is not None and self.copies:  # made from θ, so that they are no leaves
            return any(trained and p.is_leaf for (_, trained), p in zip(own, now, strict=False))
        return own != parameters_of(module)

    def __deepcopy__(self, memory: dict[int, Any]) -> Recorder:
        """Itself: a layer that the loss copies has the hooks of the original."""
        return self

    def _on_diagonal(
        self, names: dict[str, str], module: nn.Module, given: tuple[Any, ...], named: Any, output: Tensor
    ) -> Tensor:
        if self._without_theta(module, output):
            return output
        name = next(iter(names.values()))
        output, measured = self.layers.registered(name, names.values(), output)
        if not measured:
            return output
        given_x: Tensor = given[0] if given else named["input"]
        if not self.how.diagonal:
            return self.layers.tapped(name, given_x, output, None, lambda g: None)
        x, version = given_x.detach(), given_x._version
        self.lengths[name] = len(x) if x.dim() else 1
        self.plain_lookups = self.plain_lookups or not (x.is_floating_point() or x.dim() > 1)

        def receive(g: Tensor) -> None:
            if self._for == "factors":
                check_unchanged(name, x, version)
                with no_grad_no_autocast(g):
                    self.diagonals.add(module, names, x, g, again=self.layers.called_again(name))

        return self.layers.tapped(name, given_x, output, self.tokens[False], receive)

    def _begin_call(self, block: Block, x: Tensor, output: Tensor) -> _Call:
        """Register a call. Its input is summed now, or later to save memory while activations are alive.

        - If A is larger than the input and autograd keeps the input anyway, it is summed after the backward pass.
        - A call over tokens waits for the loss, which tells whether tokens are masked.
        - If A is sent to another process and is larger than the input, the call waits for its gradient.
        """
        layer = block.layer
        rows, d = output.numel() // (layer.groups * layer.d_out), layer.d_in
        version = None if block.weight is None else x._version
        if self.basis is not None:
            return _Call(block, x.detach(), rows, version=version)
        smaller = x.numel() < layer.groups * d * (rows if self.inputs.few(rows, d) else d)
        call = _Call(block, x, rows, masked=layer.tokens and x.dim() > 2, version=version)
        if call.masked or (smaller and self.owners is not None):
            self.waiting.append(call)
        elif layer.keeps_input and smaller:
            call.x = x.detach()
            self.waiting.append(call)
        else:
            self._on_input(call)
        return call

    def after_forward(self, loss: Loss, readable: bool = True) -> None:
        """Called after the forward pass: decide which rows of layers over tokens count in A.

        If the loss has rows for tokens (or for some, as ``logits[:, :-1]``) and masks some of an example, A counts the
        tokens of this example that a gradient reaches, which is known only after the backward passes. If no token is
        masked, layers with the same input share a sum. To find out waits for the GPU. If it is not ``readable`` (in a
        recording), :attr:`Measurement.unmasked` is assumed, and factors are nan if the assumption is wrong.
        """
        calls, self.waiting = self.waiting, []
        over = {call: len(call.x) for call in calls if call.masked and call.x is not None}
        fewest = min(over.values(), default=math.inf)
        terms = [(t.valid, t.output) for t in loss.terms if t.valid is not None and t.valid.numel() > fewest]
        self._masks = [(min(mask.numel(), self.layers.rows_behind(output)), mask) for mask, output in terms]
        concerned = {call for call, examples in over.items() if any(rows > examples for rows, _ in self._masks)}
        if concerned:
            unmasked = torch.stack([mask.all() for _, mask in self._masks]).all()
            self.measured.unmasked = bool(unmasked) if readable else self.how.unmasked
            self._assumed_unmasked = None if readable or not self.how.unmasked else unmasked
            if self.measured.unmasked:
                for call in concerned:  # they still wait: autograd keeps their inputs, and A is larger
                    call.masked = False
        for call in calls:
            if call.masked and call not in concerned:
                call.masked = False
                layer, x = call.block.layer, call.x
                if self.owners is not None and x is not None and x.numel() < layer.groups * layer.d_in**2:
                    self.waiting.append(call)
                else:
                    self._on_input(call)
            else:
                self.waiting.append(call)

    def backward(
        self,
        params: Tree,
        vectors: Iterable[tuple[Tensor, Tensor]],
        signed: Callable[[Tensor], Tensor] | None,
        unbatched: bool = False,
    ) -> Measured:
        """Backpropagate pairs (output, vector) and return the factors that the hooks have collected.

        Parameters outside layers, and ``unbatched`` layers, are measured by the square of the whole batch's gradient.
        For these, ``signed`` gives the examples random signs, so that mixed terms vanish on average. Signs do not
        change the factors, unless batch norm mixes examples.
        """
        plan, found, self._for = self.plan, self.measured, "factors"
        self.layers.forget_graph()
        layered = [n for block in plan.blocks.values() for n in block.names]
        layered += [n for names in plan.diagonal.values() for n in names.values()]
        found.uncalled = [n for n in layered if n not in self.layers.called]
        names = [*plan.rest, *found.uncalled] if self.how.diagonal and plan.fallback == "diagonal" else []
        inputs = [*self.tokens, *(params[name] for name in names)]
        for output, vector, last in with_last(vectors):
            if signed is not None and (names or unbatched):
                vector = signed(vector)
            self._last = last
            gradients = torch.autograd.grad(
                output, inputs, vector, retain_graph=self.keeps or not last, allow_unused=True
            )
            with no_grad_no_autocast(vector):
                self.diagonals.flush()
            if not last:  # to save memory, only those of the last vector wait for :meth:`gradients`
                self._keep(*self._passed)
            for name, gradient in zip(names, gradients[2:], strict=True):
                if gradient is not None:
                    wide = {name: gradient.to(self.dtype)}  # perhaps sharded
                    add_to(found.diagonal, name, trees.dot(wide, wide) / gradient.numel())
        self._finish()
        return found

    def gradients(
        self, own: Iterable[tuple[Tensor, Tensor]], others: Iterable[tuple[Tensor, Tensor]]
    ) -> tuple[list[LayerGradients], list[LayerGradients]]:
        """After :meth:`backward`: gradients of single examples for EKFAC's spectrum, if kept, and those of ``others``.

        The spectrum of a layer with many rows per example uses the vectors of B. A layer with a single row per example
        has fewer rows, which its eigenbasis would fit too closely, so its spectrum uses its ``own`` vectors. Their
        backward pass ends at the first such layer, mostly near the output. The graph is freed.
        """
        self._for = "spectrum"
        for output, vector in own if self.keeps_own else ():
            torch.autograd.grad(output, self.tokens[True], vector, retain_graph=True, allow_unused=True)
        self._for = "others"
        for output, vector, last in with_last(others):
            torch.autograd.grad(output, self.tokens, vector, retain_graph=not last, allow_unused=True)
        self._keep(*self._passed)
        return self._kept

    def _keep(self, *calls: _Call) -> None:
        """Compute gradients of single examples from the output gradients of these calls."""
        for call in calls:
            passed = self._passed.pop(call)
            assert call.input is not None
            check_unchanged(call.block.name, call.input, call.version)
            with no_grad_no_autocast(call.input):
                made = LayerGradients.of(call.block, call.input, [g for _, g in passed], self.dtype)
            for (for_others, _), one in zip(passed, made, strict=True):
                self._kept[for_others].append(one)

    def _finish(self) -> None:
        """Turn sums of a aᵀ into means, and leave out blocks that no gradient reached."""
        found = self.measured
        if self._assumed_unmasked is not None and found.b:
            stored(next(iter(found.b.values()))).mul_(torch.where(self._assumed_unmasked, 1.0, torch.nan))
        by_input: dict[int, list[_Call]] = {}
        for call in self.waiting:
            by_input.setdefault(id(call.x), []).append(call)
        self.waiting.clear()
        while by_input:
            calls = by_input.pop(next(iter(by_input)))
            while calls:
                call = calls.pop(0)
                if call.reached is not None if call.masked else call.block.name in found.b:
                    self._on_input(call)
                del call
            self.inputs.forget()
        found.reached = tuple(name for name in self.plan.blocks if name in found.reached)
        if self.deliveries is not None:
            self._finish_sums(self.deliveries)
            return
        found.divide_by_rows()
        if self.basis is None:
            found.reached = tuple(name for name in self.plan.blocks if name in found.a and name in found.b)
            found.a = {name: found.a[name] for name in found.reached}

    def _finish_sums(self, deliveries: Deliveries) -> None:
        """Send the remaining blocks to their owners; sums of a aᵀ become means when the rows of all ranks are known."""
        found, sent = self.measured, deliveries.sent
        sums: Any = found.b if self.basis is None else found.corrected
        for name in self.plan.blocks:
            if name in sums and name not in sent and (self.basis is not None or name in found.a):
                self._send(name)
        deliveries.finish()
        if self.basis is None:
            found.reached = tuple(name for name in self.plan.blocks if name in sent)
            found.rows = {name: found.rows[name] for name in found.reached}  # in the same order on all ranks
            for side in (found.a, found.b, *found.wide):
                for name in side.keys() - sent:  # the loss does not depend on them
                    del side[name]
        self._bases.clear()

    def _send(self, name: str) -> None:
        """Send this rank's sums of a block to its owner."""
        assert self.deliveries is not None
        self._bases.pop(name, None)
        if self.basis is not None:
            self.deliveries.send_spectrum(name, self.measured.corrected)
        else:
            self.deliveries.send_factors(name, [(a, b) for a, b, _ in self._factors])

    def _complete(self, name: str) -> bool:
        """Whether B or S of a block is known to be complete, so that it can be sent to its owner."""
        return self.owners is not None and self._last and self.calls[name] == 1

    def _basis_of(self, name: str) -> tuple[Tensor, Tensor]:
        """The eigenvectors of a block, from its owner; they are kept until the end of the last backward pass."""
        assert self.basis is not None
        pair = self.basis[name]
        if self.owners is None:
            assert pair is not None
            return pair
        if name not in self._bases:
            self._bases[name] = self.owners.shared(name, pair, self.like)
        return self._bases[name]

    def _on_input(self, call: _Call) -> None:
        """Add the input of a call to A."""
        block, x, call.x = call.block, call.x, None
        assert x is not None
        check_unchanged(block.name, x, call.version)
        with no_grad_no_autocast(x):
            for sums, _, sharing in self._factors:
                count: int | Tensor
                if call.masked:
                    assert call.reached is not None
                    masks = [mask for rows, mask in self._masks if rows > len(x)]
                    counted = call.reached | unmasked_examples(masks, call.reached)
                    total, count = masked_gram(block, x.detach(), counted, sharing, self.dtype, self.how.low_rank)
                else:
                    total, count = self.inputs.gram(block, x, call.rows, sharing)
                add_to(sums, block.name, total)
                if sums is self.measured.a:
                    self.measured.rows[block.name] = self.measured.rows.get(block.name, 0) + count

    def _on_gradient(self, call: _Call, g: Tensor) -> None:
        """Add the output gradient of a call to B or to EKFAC's S."""
        block, found, layer = call.block, self.measured, call.block.layer
        if self._for == "the model":
            return
        if self._for == "others" or (self.keeps_own and call.single == (self._for == "spectrum")):
            self._passed.setdefault(call, []).append((self._for == "others", g))
        if self._for == "others":
            self._keep(call)  # now, to free the memory of g
        if self._for != "factors":
            return
        found.in_half = found.in_half or g.dtype in HALF_TYPES
        with no_grad_no_autocast(g):
            if call.masked:
                reached = (g != 0).any(-1)
                call.reached = reached if call.reached is None else call.reached | reached
            if self.basis is None:
                wide = self.how.low_rank and layer.tokens and layer.d_out >= WIDE_OUTPUT
                for _, sums, sharing in self._factors:
                    y = pooled(g) if wide and sharing == "expand" else g
                    y, scale = self.inputs.narrowed(y, y.numel() // (layer.groups * layer.d_out), layer.d_out, sharing)
                    gram = summed(layer.gradients(y, sharing), self.dtype, None, self.how.low_rank, scale)[0]
                    add_to(sums, block.name, gram)
                if self._complete(block.name):
                    if call.x is not None:
                        self.waiting.remove(call)
                        self._on_input(call)
                    self._send(block.name)
                return
            if block.name not in found.reached:
                found.reached = (*found.reached, block.name)
            if block.name in self.basis:
                assert call.x is not None
                check_unchanged(block.name, call.x, call.version)
                q_a, q_b = self._basis_of(block.name)
                scale = found.scales.get(block.name)
                q_a = q_a if scale is None else q_a / scale.mT
                add_to(found.corrected, block.name, corrected(block, call.x, g, q_a, q_b))
                if self._complete(block.name):
                    self._send(block.name)
