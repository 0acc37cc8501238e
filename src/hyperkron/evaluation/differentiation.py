"""First and second derivatives by autograd; raises an error where torch has none, or computes a wrong one."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from hyperkron import trees
from hyperkron.solution import HyperkronError, warn_once
from hyperkron.trees import HALF_TYPES, Tree
from hyperkron.validation import first_of


class UndifferentiableError(HyperkronError):
    """An operation of the model has no second derivative."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"an operation of the model cannot be differentiated twice ({why}); use KFAC, EKFAC or Identity with a "
            "finite-difference cross term, or an eager implementation."
        )


_NO_SECOND = "not implemented", "not differentiable", "double backward", "undefined Tensor in C++"
"""What torch's errors say where there is no second derivative, as of a layer norm with a bias and no weight."""


def gradient_tree(value: Tensor, variables: Tree, *, retain_graph: bool = False) -> Tree:
    """∂value/∂x for each of ``variables``; zero where ``value`` does not depend on it."""
    found = torch.autograd.grad(value, list(variables.values()), allow_unused=True, retain_graph=retain_graph)
    return trees.filled(variables, found)


def gradients_of(
    outputs: Tensor | list[Tensor],
    inputs: list[Tensor],
    vectors: list[Tensor] | None = None,
    *,
    retain_graph: bool | None = None,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, with an :class:`UndifferentiableError` if there is no second derivative."""
    watched: AbstractContextManager[None] = nullcontext()
    foreign: list[Node] = []
    if create_graph:
        foreign = _checked_nodes([outputs] if isinstance(outputs, Tensor) else outputs)
        watched = _refusing_lost_graphs(foreign) if foreign else watched
    try:
        with watched:
            found = torch.autograd.grad(
                outputs, inputs, vectors, retain_graph=retain_graph, create_graph=create_graph, allow_unused=True
            )
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_SECOND):
            raise UndifferentiableError(str(error).splitlines()[0]) from error
        raise
    behind = graph_nodes([g for g in found if g is not None]) if foreign else ()
    if any(node.name() == "torch::autograd::Error" for node in behind):  # terms would be lost without an error
        raise UndifferentiableError("a function is marked once_differentiable")
    return found


@contextmanager
def _refusing_lost_graphs(nodes: list[Node]) -> Iterator[None]:
    """Refuse a custom function whose backward pass runs outside autograd: terms would be lost without an error.

    Its output gradients are linear in its input gradients. So if the input gradients have a graph, the output
    gradients must have one too.
    """
    lost: list[str] = []

    def watch(name: str, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        graphs = [g.requires_grad for g in made if g is not None]
        if graphs and not any(graphs) and any(g is not None and g.requires_grad for g in given):
            lost.append(name)

    with ExitStack() as hooks:
        for node in nodes:
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                hooks.enter_context(node.register_hook(functools.partial(watch, node.name())))
        yield
    if lost:
        raise UndifferentiableError(f"the backward pass of {lost[0].removesuffix('Backward')} records no graph")


def _checked_nodes(outputs: list[Tensor]) -> list[Node]:
    """The nodes behind ``outputs`` that are not torch's own; refuses two derivatives that torch computes wrongly.

    These are the third derivative of batch norm in training mode, which treats the batch statistics as constants (a
    penalty on gradients needs it), and the second derivative of the fused weight norm, which treats the norm as a
    constant. Models with weight norm are evaluated without the fused kernel (``kernels/selection.py``).
    """
    foreign = []
    for node in graph_nodes(outputs):
        kind = type(node).__name__
        if not kind[-1].isdigit() and kind != "AccumulateGrad":  # torch's own names end in a digit: AddmmBackward0
            foreign.append(node)
        if "BatchNormBackwardBackward" in kind and getattr(node, "_saved_train", True):
            raise UndifferentiableError(
                "the loss holds gradients through batch norm, and torch's third derivative of that is wrong"
            )
        if "WeightNormInterfaceBackward" in kind:
            raise UndifferentiableError(
                "torch's second derivative of torch._weight_norm is wrong; compute v * (g / norm) instead"
            )
    return foreign


def graph_nodes(tensors: Iterable[Tensor], stop: Collection[Node] = ()) -> Iterator[Node]:
    """Every node of the autograd graph behind ``tensors``, once; the search does not enter the nodes in ``stop``."""
    return nodes_behind([get_gradient_edge(x).node for x in tensors if x.requires_grad], stop)


def nodes_behind(nodes: Iterable[Node], stop: Collection[Node] = ()) -> Iterator[Node]:
    """The same behind nodes of the graph, themselves included."""
    waiting, seen = [*nodes], {*stop}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [further for further, _ in node.next_functions if further is not None]


def warn_of_strangers(value: Tensor, *own: Tree) -> None:
    """Warn of parameters that the inner loss depends on, but that are in none of the trees θ and λ."""
    known = {id(x) for tree in own for x in tree.values()}
    leaves = (getattr(node, "variable", None) for node in graph_nodes([value]))
    found = [tuple(x.shape) for x in leaves if isinstance(x, nn.Parameter) and id(x) not in known]
    if found:
        warn_once(
            f"strangers {found}",
            f"the inner loss depends on a parameter of shape {first_of(found)} that belongs "
            "neither to model nor to hyper, so hypergradients take it for a constant. If it is trained with the model, "
            "as that of a criterion, pass one module that holds both; if not, call requires_grad_(False) on it.",
        )


def warn_of_hooks(params: Tree) -> None:
    """Warn of hooks on parameters that may change gradients, and with them every derivative of the losses."""
    if hooked := [name for name, p in params.items() if getattr(p, "_backward_hooks", None)]:
        warn_once(
            f"hooks {hooked}",
            f"model parameters with a hook on their gradient (register_hook): {first_of(hooked)}. Hypergradients use "
            "the gradients that hooks return. A hook that sets entries to zero keeps these fixed; for one that scales "
            "or clips, use register_post_accumulate_grad_hook, which acts in training alone.",
        )


def in_half_precision(value: Tensor) -> bool:
    """Whether any part of the graph of ``value`` is in half precision, as under autocast."""
    return any(made.dtype in HALF_TYPES for node in graph_nodes([value]) for made in node._input_metadata)
