"""The cross term if λ weights examples, from one forward and one backward pass in any precision.

If the parameters of a layer z = f(a; p) move along v, its output changes by the tangent f'(a; v). This is f(a; v) if
the layer is linear in p. With c_n the loss of example n and g the gradient of Σ_n c_n at the layer's output,

    c'_n = ⟨∂_θ c_n, v⟩ = Σ_layers ⟨g_n, f'(a_n; v)⟩ ,      X(v) = ∂_λ Σ_n w_n(λ) c'_n ,

because no example contributes to the loss of another. θ is not moved and nothing is subtracted, so in bfloat16 the
result is as precise as a gradient. The gradients of the weights are not computed; products with v replace them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from hyperkron.batch_tensors import tensors_of
from hyperkron.cross.weighting import Found, Read, weighted_sum
from hyperkron.curvature.kfac.taps import Tap, no_grad_no_autocast, parameters_of
from hyperkron.evaluation.point import Point
from hyperkron.kernels.selection import WithoutAutocast
from hyperkron.losses import Loss, Term
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree

Tangent = Callable[[Tensor, Tensor], Tensor]
"""(input, output gradient g) of a call → entries that add up to ⟨g, f'(a; v)⟩, grouped by example."""

_NORMS, _MAPS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm), (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LINEAR_FORWARDS = {kind.forward for kind in (*_NORMS, *_MAPS, *_TRANSPOSED)}
"""Forward methods of layers that are linear in their parameters, besides Linear and Embedding."""
_LINEAR: WeakSet[nn.Module] = WeakSet()
"""Layers of other kinds that were found to be linear."""
PROBES = (1.0, -1024.0)
"""A layer counts as linear if f(a; c v) = c f'(a; v) for these c, which differ in size and sign."""
MAX_MIXING, MIXING_DRAWS = 0.05, 4
"""The largest relative error of c' where examples contribute to each other's losses; draws of signs to estimate it."""
WIDE_RATIO = 2
"""If a layer has at least this many times as many outputs as inputs, g is multiplied by v instead of the input."""


class NoAdjointError(HyperkronError):
    """A parameter does not belong to a single layer, or the contributions of examples cannot be separated."""

    def __init__(self, why: str) -> None:
        super().__init__(f"the gradients at the layers do not give the cross term: {why}; use cross='auto'.")


def adjoint(point: Point, v: Tree, form: str) -> Found:
    """X(v), and c' by example; ``form`` is the structure of the loss (:func:`hyperkron.cross.weighting.structure`)."""
    taps = _LayerHooks(point, v, consume=point.consumes_vectors and "p" not in form)  # penalties need v itself
    with taps.attached():
        loss = point.inner()
        read = Read.of(form, point, loss, point.params)
        weights, losses = _by_example(_term(loss, form))
        changes = taps.backward(losses)
    return weighted_sum(point, v, [weights], [changes.to(weights.dtype)], read.decays)


def mixes_examples(point: Point, v: Tree, form: str, changes: Tensor) -> bool:
    """Whether examples contribute to each other's losses, as through the mean of a batch, so that c' is wrong.

    The sum of all contributions is right even then. So for random signs r it is compared with Σ_n r_n c'_n.
    """
    taps, generator, gaps = _LayerHooks(point, v), torch.Generator().manual_seed(0), []
    with taps.attached():
        losses = example_losses(point.inner(), form)
        for _ in range(MIXING_DRAWS):
            signs = torch.randint(2, losses.shape, generator=generator, device="cpu").to(losses) * 2 - 1
            found = taps.backward(losses * signs, retain_graph=True)
            gaps.append((found - signs * changes).sum())
    return not float(torch.stack(gaps).norm()) <= MAX_MIXING * MIXING_DRAWS**0.5 * float(changes.norm())


def example_losses(loss: Loss, form: str) -> Tensor:
    """The c_n whose changes :func:`adjoint` computes, attached to the graph."""
    return _by_example(_term(loss, form))[1]


def _term(loss: Loss, form: str) -> Term:
    weighted = [term for term, letter in zip(loss.terms, form, strict=False) if letter == "w"]
    if len(weighted) != 1:
        raise NoAdjointError(f"λ weights {len(weighted)} criteria")
    return weighted[0]


def _by_example(term: Term) -> tuple[Tensor, Tensor]:
    """w_n, one number per example, and c_n: its row losses times the weights that do not depend on λ."""
    live = [x for x in term.factors if isinstance(x, Tensor) and x.requires_grad]
    rest: list[Any] = [x for x in term.factors if not any(x is y for y in live)]
    for x in live:
        if any(size > 1 and step for size, step in zip(x.shape[1:], x.stride()[1:], strict=True)):
            raise NoAdjointError("λ weights the rows of an example differently")
    weights = functools.reduce(operator.mul, [x.flatten(1)[:, 0] if x.dim() > 1 else x for x in live])
    rows = functools.reduce(operator.mul, rest, term.row_losses)
    return weights, rows.flatten(1).sum(1) if rows.dim() > 1 else rows


class _LayerHooks:
    """Hooks on all layers that hold parameters of θ; they compute c', the changes of the losses along v.

    With ``consume`` the tree v is emptied, and each layer's part is rounded in the forward pass to save memory.
    """

    def __init__(self, point: Point, v: Tree, consume: bool = False) -> None:
        self.device, self.readable, self.consume = point.device, not point.recording, consume
        self.layers = _layers(point, v)
        self.own = {module: parameters_of(module) for module in self.layers}
        if consume:
            v.clear()
        sizes = (len(x) for _, x in tensors_of("", point.inner_batch) if x.dim() > 0)
        self.examples = next(sizes, 1)
        self.token = torch.zeros((), device=point.device, requires_grad=True)
        self.count, self.dtype = 0, torch.float32
        self.changes: list[Tensor] = []

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Attach the hooks, also for the backward pass, in which activation checkpoints call layers again."""
        with ExitStack() as hooks:
            for module, v in self.layers.items():
                if _is_linear(module):
                    hooks.enter_context(module.register_forward_pre_hook(self._narrow))
                hooks.enter_context(module.register_forward_hook(partial(self._on_layer, v), with_kwargs=True))
            yield

    def __deepcopy__(self, memory: dict[int, Any]) -> _LayerHooks:
        """Itself: a layer that the loss copies has the hooks of the original."""
        return self

    def backward(self, losses: Tensor, retain_graph: bool = False) -> Tensor:
        """c' of the examples with these ``losses``."""
        self.count, self.dtype, self.changes = len(losses), losses.dtype, [losses.new_zeros(len(losses)).detach()]
        torch.autograd.grad(losses.sum(), [self.token], retain_graph=retain_graph, allow_unused=True)
        return torch.stack(self.changes).sum(0)

    def _autocast(self) -> torch.dtype | None:
        """The dtype of the active autocast, or ``None``."""
        kind = self.device.type
        on = torch.is_autocast_enabled(kind) and not WithoutAutocast.entered
        return torch.get_autocast_dtype(kind) if on else None

    def _narrow(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Cast the input as autocast would, so that one copy of it is kept and not two."""
        dtype = self._autocast()
        return (given[0].to(dtype), *given[1:]) if dtype and given and given[0].dtype == torch.float32 else None

    def _on_layer(
        self, v: dict[str, Tensor], module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any
    ) -> Any:
        inputs = (*given, *named.values())
        if not isinstance(output, Tensor) or len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise NoAdjointError(f"{type(module).__name__} has more than one input or output")
        if not output.requires_grad or module not in self.own:  # under no_grad, or a copy: without θ
            return output
        if parameters_of(module) != self.own[module]:  # by functional_call, or frozen by the loss
            if any(p is not None and not p.is_leaf for p in module._parameters.values()):
                raise NoAdjointError(f"{type(module).__name__} is called with functions of its parameters")
            kept = {*parameters_of(module)} & {*self.own[module]}
            v = {local: x for local, x in v.items() if (id(module._parameters[local]), True) in kept}
            if not v:
                return output
        if output.dim() > 1 and len(output) == 1:  # shared by all examples, such as positions: expand it
            output = output.expand(self.examples, *output.shape[1:])
        if _is_linear(module):
            if self.consume and "weight" in v:
                if v["weight"].dtype.itemsize < output.dtype.itemsize:
                    raise NoAdjointError(f"{type(module).__name__} is called in two precisions")
                v["weight"] = v["weight"].to(output.dtype)
            tangent: Tangent = partial(_linear, v.get("weight"), v.get("bias"))
        elif isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward:
            tangent = partial(_embedding, v["weight"], module.padding_idx)
        else:
            tangent = partial(_any_layer, module, v, self._autocast(), self.readable)
        return Tap.apply(output, self.token, partial(self._receive, tangent), inputs[0])

    def _receive(self, tangent: Tangent, g: Tensor, x: Tensor) -> None:
        if not self.count:  # a gradient that the inner loss computes itself
            if torch.is_grad_enabled():
                raise NoAdjointError("the inner loss holds gradients of the model (create_graph=True)")
            return
        with no_grad_no_autocast(g):
            found = tangent(x, g)
            if found.shape[0] % self.count:
                raise NoAdjointError("a layer is called on inputs without a dimension for examples")
            self.changes.append(found.reshape(self.count, -1).sum(1, dtype=self.dtype))


def _layers(point: Point, v: Tree) -> dict[nn.Module, dict[str, Tensor]]:
    """The modules that hold θ, each with its part of v by local parameter name."""
    names = {id(p): name for name, p in point.params.items()}
    found: dict[nn.Module, dict[str, Tensor]] = {}
    for module in point.model.modules():
        own = {local: names[id(p)] for local, p in module._parameters.items() if id(p) in names}
        if not own:
            continue
        mixing = isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
        capped = isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq)
        computed = {"weight", "bias"} & vars(module).keys()  # by a hook, from other parameters: torch.nn.utils.prune
        if mixing or capped or computed or any(True for _ in module.children()):
            raise NoAdjointError(f"{next(iter(own.values()))} belongs to a {type(module).__name__}")
        found[module] = {local: v[name] for local, name in own.items()}
    missing = names.keys() - {id(p) for module in found for p in module._parameters.values()}
    if missing or any(is_sharded(p) for p in point.params.values()):
        name = names[next(iter(missing))] if missing else "θ"
        raise NoAdjointError(f"{name} is not a parameter of a layer in one piece")
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _linear(weight: Tensor | None, bias: Tensor | None, x: Tensor, g: Tensor) -> Tensor:
    """⟨g, V a + v⟩ in the dtype of g."""
    if weight is None:
        assert bias is not None
        return torch.mv(g.flatten(0, -2), bias.to(g.dtype)).reshape(g.shape[:-1])
    weight, x = weight.to(g.dtype), x.to(g.dtype)
    if weight.shape[0] >= WIDE_RATIO * weight.shape[1]:
        products = (g @ weight) * x
        return products if bias is None else torch.cat([products, g * bias.to(g.dtype)], -1)
    return g * F.linear(x, weight, None if bias is None else bias.to(g.dtype))


def _embedding(weight: Tensor, padding: int | None, index: Tensor, g: Tensor) -> Tensor:
    """⟨g, rows of v that were looked up⟩; the row of the padding has no gradient."""
    products = g * F.embedding(index, weight)
    return products if padding is None else products.masked_fill((index == padding)[..., None], 0.0)


def _any_layer(
    module: nn.Module, v: dict[str, Tensor], autocast: torch.dtype | None, readable: bool, x: Tensor, g: Tensor
) -> Tensor:
    """⟨g, f'(a; v)⟩ of a layer of another kind: by f(a; v) if it is known to be linear, else by forward mode.

    Forward mode takes many times as long as the layer itself, so its first use checks whether the layer is linear.
    """
    with torch.autocast(x.device.type, autocast) if autocast else nullcontext():
        if type(module).forward in LINEAR_FORWARDS or module in _LINEAR:
            tangent: Tensor | None = _along(module, x, v)
        else:
            tangent = _by_forward_mode(module, x, v)
            if readable and tangent is not None and all(_scales(module, x, v, tangent, c) for c in PROBES):
                _LINEAR.add(module)
    return g.new_zeros(g.shape[:1]) if tangent is None else g * tangent.to(g.dtype)


def _along(module: nn.Module, x: Tensor, v: dict[str, Tensor], times: float = 1.0) -> Tensor:
    """f(a; c v), with zeros for parameters that are not part of θ."""
    found: Tensor = _at(
        module, x, {n: times * v[n] if n in v else 0 * p for n, p in module._parameters.items() if p is not None}
    )
    return found


def _scales(module: nn.Module, x: Tensor, v: dict[str, Tensor], tangent: Tensor, times: float) -> bool:
    """Whether f(a; c v) is c times the tangent, up to the rounding of its dtype."""
    tolerance, wanted = 4 * torch.finfo(tangent.dtype).eps, times * tangent
    found = _along(module, x, v, times)
    return torch.allclose(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def _by_forward_mode(module: nn.Module, x: Tensor, v: dict[str, Tensor]) -> Tensor | None:
    with dual_level():
        given = {n: p.detach() for n, p in module._parameters.items() if p is not None}
        duals = {n: make_dual(p, v[n].to(p.dtype)) if n in v else p for n, p in given.items()}
        return unpack_dual(_at(module, x, duals)).tangent


def _at(module: nn.Module, x: Tensor, values: dict[str, Tensor]) -> Any:
    """The layer's output with ``values`` as its parameters."""
    parameters: dict[str, Any] = module._parameters
    own = dict(parameters)
    try:
        parameters.update(values)
        return module.forward(x)
    finally:
        parameters.update(own)
