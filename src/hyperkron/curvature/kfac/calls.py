"""Which calls of layers an inner loss depends on, and which parameters it uses past them, read from its graph."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from hyperkron.curvature.kfac.taps import Tap
from hyperkron.evaluation.differentiation import nodes_behind
from hyperkron.trees import Tree

CallId = tuple[str, int]
"""A layer, and the number of the call."""


class Calls:
    """The calls of layers in one forward pass.

    Args:
        left_out: calls that are not measured.

    Attributes:
        called: the parameters of layers that were called.
        used: of these, the parameters of calls that are measured.
    """

    def __init__(self, left_out: Collection[CallId] = ()) -> None:
        self.called, self.used = set[str](), set[str]()
        self._left_out, self._numbers = left_out, Counter[str]()
        self._starts: list[Node] = []  # nodes of the graph behind the inputs of calls
        self._ends: dict[CallId, Node] = {}  # those of their outputs

    def registered(self, name: str, parameters: Collection[str], output: Tensor) -> tuple[Tensor, bool]:
        """Register a call of a layer: its output, and whether it is measured, because the loss may depend on it and
        hooks see its gradient."""
        self._numbers[name] += 1
        self.called.update(parameters)
        if not output.requires_grad or torch.func.debug_unwrap(output) is not output:  # in torch.func
            return output, False
        if (name, self._numbers[name]) in self._left_out:
            return self._ended(name, output, None, lambda g: None), False
        self.used.update(parameters)
        return output, True

    def called_again(self, name: str) -> bool:
        """Whether a layer was called several times."""
        return self._numbers[name] > 1

    def tapped(
        self, name: str, x: Tensor, output: Tensor, token: Tensor | None, receive: Callable[[Tensor], None]
    ) -> Tensor:
        """The ``output`` of the registered call on ``x``, with ``receive`` called on its gradient."""
        if x.requires_grad:
            self._starts.append(_node(x))
        return self._ended(name, output, token, receive)

    def _ended(self, name: str, output: Tensor, token: Tensor | None, receive: Callable[[Tensor], None]) -> Tensor:
        found: Tensor = Tap.apply(output, token, receive)
        self._ends[name, self._numbers[name]] = _node(found)
        return found

    def aside(self, outputs: list[Tensor]) -> set[CallId]:
        """The calls that ``outputs`` do not depend on, of layers called several times; to others no gradient comes."""
        times = Counter(name for name, _ in self._ends)
        if max(times.values(), default=0) < 2:
            return set()
        reached = {*nodes_behind(_nodes(outputs))}
        return {call for call, node in self._ends.items() if times[call[0]] > 1 and node not in reached}

    def forget_hidden(self, outputs: list[Tensor], params: Tree) -> None:
        """Layers without a measured call, but on whose parameters ``outputs`` depend, count as not called.

        Inside ``torch.vmap`` the output of a layer does not tell that it has a gradient, and none passes there.
        """
        if hidden := self.called - self.used:
            leaves = _leaves(nodes_behind(_nodes(outputs)))
            self.called -= {name for name in hidden if id(params[name]) in leaves}

    def elsewhere(self, outputs: list[Tensor], params: Tree) -> list[str]:
        """The parameters of measured calls on which ``outputs`` depend past these calls, too."""
        found = _leaves(nodes_behind([*_nodes(outputs), *self._starts], self._ends.values()))
        return [name for name, p in params.items() if name in self.used and id(p) in found]

    def rows_behind(self, output: Tensor) -> int:
        """The most rows in the output of a call from which ``output`` is made without another call.

        These are as many as tokens, or as examples if tokens were pooled before several predictions were made.
        """
        ends = {*self._ends.values()}
        first = _nodes([output])
        between = nodes_behind(first, ends)
        near = ends.intersection([*first, *(n for node in between for n, _ in node.next_functions if n is not None)])
        shapes = [made.shape for node in near for made in node._input_metadata]
        return max((math.prod(shape[:-1]) for shape in shapes), default=output.numel())

    def forget_graph(self) -> None:
        """Forget the nodes of the graph, which refer to the hooks."""
        self._starts.clear()
        self._ends.clear()


def unmasked_examples(masks: list[Tensor], like: Tensor) -> Tensor:
    """Of which examples the masks leave out no row, to broadcast to ``like``, which has a number for every token.

    Where it is not known which rows are whose, it is asked of all examples together.
    """
    found, n = like.new_ones(1), len(like)
    for mask in masks:
        apart = mask.numel() % n == 0 and (mask.dim() == 1 or len(mask) == n)
        found = found & mask.reshape(n if apart else 1, -1).all(1)
    return found.reshape(-1, *[1] * (like.dim() - 1))


def _node(x: Tensor) -> Node:
    return x.grad_fn or get_gradient_edge(x).node  # the latter for leaves alone, because it takes longer


def _nodes(tensors: list[Tensor]) -> list[Node]:
    return [_node(x) for x in tensors if x.requires_grad]


def _leaves(nodes: Iterable[Node]) -> set[int]:
    """The ids of the parameters among nodes."""
    return {id(getattr(node, "variable", None)) for node in nodes}
