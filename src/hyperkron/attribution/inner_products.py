r"""Inner products ⟨V_q, ∂_θ c_n⟩ of many examples n with some vectors V_q, in two ways.

- ``layers``: one backward pass over a batch. The gradient of example n in a layer's weight is Σ_s g_ns a_nsᵀ, over the
  positions s at which it is used, so that inputs and output gradients are all it takes: one matrix product scores all
  vectors. Other modules (norms, embeddings) give the gradient of one example at a time by ``torch.func.vmap``.
- ``forward``: one forward-mode pass for each vector; works with every model that has one, and costs nothing but memory
  of one forward pass. It is the cheaper way for a single vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.func import functional_call, vjp, vmap

from hyperkron.curvature.kfac.coverage import Plan, plan
from hyperkron.losses import Loss
from hyperkron.solution import HyperkronError
from hyperkron.trees import Tree

LossOf = Callable[[nn.Module, Any], Loss]
"""J of a batch: a mean over its examples."""

CHUNK = 2**26
"""Numbers held at once as gradients of single examples."""


class MixedExamplesError(HyperkronError):
    """Which rows of a layer belong to an example cannot be seen."""


def stacked(vectors: list[Tree]) -> Tree:
    """Several trees as one with a leading dimension."""
    return {name: torch.stack([v[name] for v in vectors]) for name in vectors[0]}


class LayerProducts:
    """The way by layers; see the module's docstring."""

    name = "layers"

    def __init__(self, loss: LossOf, model: nn.Module, params: Tree) -> None:
        self.loss, self.model, self.params, self.plan = loss, model, params, plan(model, "diagonal")

    @staticmethod
    def missing(model: nn.Module) -> list[str]:
        """The parameters whose gradients are not seen from layers; an empty list if the way works."""
        made: Plan = plan(model, "diagonal")
        batch_norms = [
            name
            for module, names in made.diagonal
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
            for name in names.values()
        ]
        return [*made.rest, *batch_norms]

    def __call__(self, batch: Any, vectors: Tree, count: int) -> Tensor:
        """⟨V_q, ∂_θ c_n⟩ for every vector and each of ``count`` examples: (queries, examples)."""
        return torch.stack([use.scores(x, g, vectors) for use, x, g in self._uses(batch, count)]).sum(0)

    def gradients(self, batch: Any, count: int) -> Iterator[Tree]:
        """The gradient of each example, one tree after the other."""
        uses = self._uses(batch, count)
        for n in range(count):
            tree = {name: torch.zeros_like(p) for name, p in self.params.items()}
            for use, x, g in uses:
                for name, gradient in use.one(x[n : n + 1], g[n : n + 1]).items():
                    tree[name] = tree[name] + gradient
            yield tree

    def _uses(self, batch: Any, count: int) -> list[tuple[_Use, Tensor, Tensor]]:
        """Every call of a layer that the loss depends on, with its input and output gradient."""
        with self._watched() as seen:
            value = self.loss(self.model, batch).value
        outputs = [output for _, _, output in seen]
        gradients = torch.autograd.grad(value, outputs, allow_unused=True) if outputs else ()
        found = [(use, x, g) for (use, x, _), g in zip(seen, gradients, strict=True) if g is not None]
        if not found:
            raise HyperkronError("the loss of the training examples does not depend on the layers of the model.")
        lengths = {len(part) for _, x, g in found for part in (x, g)} - {count}
        if lengths:
            raise MixedExamplesError(
                f"a batch of {count} examples reaches layers as {min(lengths)} rows, so which belong to an example is "
                "open; use way='forward', or layers whose first dimension is the example."
            )
        return found

    @contextmanager
    def _watched(self) -> Iterator[list[tuple[_Use, Tensor, Tensor]]]:
        """Hooks that note the input and output of every call of a layer, while the block runs."""
        seen: list[tuple[_Use, Tensor, Tensor]] = []
        handles = []

        def note(use: _Use) -> Callable[..., None]:
            def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                if output.requires_grad:
                    seen.append((use, args[0].detach(), output))

            return hook

        try:
            for module, name in self.plan.feeds:
                block = self.plan.blocks[name]
                use = _LayerUse(block, self.params)
                handles.append(module.register_forward_hook(note(use)))
            for module, names in self.plan.diagonal:
                handles.append(module.register_forward_hook(note(_ModuleUse(module, names))))
            yield seen
        finally:
            for handle in handles:
                handle.remove()


class _Use:
    """A call of a module with parameters: the gradients of single examples from its input and output gradient."""

    def matrices(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        """The gradients of a few examples, with a leading dimension for the example."""
        raise NotImplementedError

    def vectors(self, vectors: Tree) -> dict[str, Tensor]:
        """The vectors in the form of :meth:`matrices`."""
        raise NotImplementedError

    def one(self, x: Tensor, g: Tensor) -> Tree:
        """The gradient of one example, by parameter."""
        raise NotImplementedError

    def scores(self, x: Tensor, g: Tensor, vectors: Tree) -> Tensor:
        """⟨V_q, ∂_θ c_n⟩ over the parameters of this module: (queries, examples)."""
        mine = {name: v.flatten(1) for name, v in self.vectors(vectors).items()}
        width = sum(v.shape[1] for v in mine.values())
        size = max(1, CHUNK // max(width, 1))
        found = []
        for start in range(0, len(x), size):
            gradients = self.matrices(x[start : start + size], g[start : start + size])
            found.append(sum(v @ gradients[name].flatten(1).to(v.dtype).T for name, v in mine.items()))
        return torch.cat(found, dim=1)  # type: ignore[arg-type]  # sums of tensors


class _LayerUse(_Use):
    """A layer that KFAC covers: [W | b] has the gradient Σ_s g_s [a_s | 1]ᵀ."""

    def __init__(self, block: Any, params: Tree) -> None:
        self.block, self.params = block, params

    def matrices(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        layer, found = self.block.layer, []
        for a, b in layer.positions(x, g):
            a = layer.ordered(a)
            weight = b.mT @ a
            parts = [] if self.block.weight is None else [weight]
            if self.block.bias is not None:
                parts.append(b.sum(-2)[..., None])
            found.append(torch.cat(parts, -1) if len(parts) > 1 else parts[0])
        return {"": torch.cat(found)}

    def vectors(self, vectors: Tree) -> dict[str, Tensor]:
        count = len(next(iter(vectors.values())))
        return {"": torch.stack([self.block.join({n: v[q] for n, v in vectors.items()}) for q in range(count)])}

    def one(self, x: Tensor, g: Tensor) -> Tree:
        found: Tree = self.block.part(self.matrices(x, g)[""][0], self.params)
        return found


class _ModuleUse(_Use):
    """Any other module that treats examples apart: the vector-Jacobian product of one example, for many at once."""

    def __init__(self, module: nn.Module, names: dict[str, str]) -> None:
        self.module, self.names = module, names

    def matrices(self, x: Tensor, g: Tensor) -> dict[str, Tensor]:
        own = {local: p.detach() for local, p in self.module.named_parameters() if local in self.names}

        def pulled(one: Tensor, gradient: Tensor) -> dict[str, Tensor]:
            back = vjp(lambda p: functional_call(self.module, p, (one[None],)), own)[1]
            found: dict[str, Tensor] = back(gradient[None])[0]
            return found

        gradients = vmap(pulled)(x, g)
        return {self.names[local]: gradient for local, gradient in gradients.items()}

    def vectors(self, vectors: Tree) -> dict[str, Tensor]:
        return {name: vectors[name] for name in self.names.values()}

    def one(self, x: Tensor, g: Tensor) -> Tree:
        return {name: gradient[0] for name, gradient in self.matrices(x, g).items()}


class ForwardProducts:
    """The way by forward mode; see the module's docstring."""

    name = "forward"

    def __init__(self, loss: LossOf, model: nn.Module, params: Tree) -> None:
        self.loss, self.model, self.params = loss, model, params

    def __call__(self, batch: Any, vectors: Tree, count: int) -> Tensor:
        """⟨V_q, ∂_θ c_n⟩ for every vector and each of ``count`` examples: (queries, examples)."""
        queries = len(next(iter(vectors.values())))
        found = torch.stack([self._along(batch, {name: v[q] for name, v in vectors.items()}) for q in range(queries)])
        if found.shape[1] != count:
            raise MixedExamplesError(
                f"a batch of {count} examples has {found.shape[1]} rows in the loss; give it a target for each example "
                "(tokens as a second dimension)."
            )
        return found

    def _along(self, batch: Any, v: Tree) -> Tensor:
        with torch.no_grad(), dual_level():
            duals = {name: make_dual(p.detach(), v[name].to(p.dtype)) for name, p in self.params.items()}
            loss = functional_call(
                _LossCaller(self.model), {f"model.{n}": p for n, p in duals.items()}, (self.loss, batch)
            )
            if not loss.terms:
                raise HyperkronError(
                    "loss returned a plain tensor, which does not tell the losses of single examples; return "
                    "hyperkron.losses.cross_entropy(...), mse(...) or binary_cross_entropy(...)."
                )
            found = []
            for term in loss.terms:
                tangent = unpack_dual(term.row_losses).tangent
                if tangent is not None:
                    found.append((tangent * term.coefficients).reshape(len(tangent), -1).sum(1))
        if not found:
            raise HyperkronError("the loss of the training examples does not depend on the model's parameters.")
        return torch.stack(found).sum(0)


class _LossCaller(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, loss: LossOf, batch: Any) -> Loss:
        return loss(self.model, batch)
