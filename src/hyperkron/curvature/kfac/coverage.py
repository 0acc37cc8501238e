"""Which curvature every parameter gets, decided before any number is computed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from hyperkron.curvature.kfac.diagonals import has_diagonal, looks_up
from hyperkron.curvature.kfac.layers import UNCALLED, Layer, LayerOf, kronecker_layer
from hyperkron.evaluation.point import trainable
from hyperkron.solution import HyperkronError, warn_once

Fallback = Literal["diagonal", "identity", "zero"]

LEAST_COVERED = 0.5
"""If a smaller share of the parameters is in Kronecker blocks, a warning says so."""

KRONECKER = "kronecker"
DIAGONAL = "diagonal"
SCALAR = "scaled identity"


@dataclass(frozen=True)
class Row:
    """One parameter in the coverage table."""

    parameter: str
    shape: tuple[int, ...]
    curvature: str
    reason: str

    @cached_property
    def count(self) -> int:
        """How many numbers the parameter holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Coverage:
    """Every trainable parameter with the curvature it gets; ``print`` shows the table.

    Example:
        >>> import torch, hyperkron as hk
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        >>> print(hk.curvature.KFAC().coverage(model))
        parameter  shape   curvature  why
        0.weight   (3, 4)  kronecker  Linear, with bias
        0.bias     (3,)    kronecker  Linear, with weight
        1.weight   (3,)    diagonal   LayerNorm
        1.bias     (3,)    diagonal   LayerNorm
        71.4% of 21 parameters are covered by Kronecker blocks.
    """

    rows: tuple[Row, ...]

    @property
    def covered(self) -> float:
        """The fraction of all trainable numbers that lie in Kronecker blocks."""
        total = sum(row.count for row in self.rows)
        return sum(row.count for row in self.rows if row.curvature == KRONECKER) / max(total, 1)

    @property
    def uncovered(self) -> tuple[Row, ...]:
        """The rows outside Kronecker blocks."""
        return tuple(row for row in self.rows if row.curvature != KRONECKER)

    def warn(self) -> None:
        """Warn once if less than :data:`LEAST_COVERED` is in Kronecker blocks; names the largest rest and a remedy."""
        if self.covered >= LEAST_COVERED:
            return
        largest = sorted(self.uncovered, key=lambda row: -row.count)[:3]
        listed = ", ".join(f"{row.parameter} {row.shape} ({row.reason})" for row in largest)
        warn_once(
            "coverage",
            f"only {self.covered:.1%} of the parameters lie in Kronecker blocks, the others get a fallback; "
            f"the largest of these: {listed}. The hypergradient may be little better than identity's: use "
            "cg(curvature=GGN(...)) or pcg(), or layers that KFAC covers; print(KFAC().coverage(model)) lists all.",
        )

    def __str__(self) -> str:
        table = [("parameter", "shape", "curvature", "why")]
        table += [(row.parameter, str(row.shape), row.curvature, row.reason) for row in self.rows]
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]]) for line in table
        ]
        total = sum(row.count for row in self.rows)
        return "\n".join([*lines, f"{self.covered:.1%} of {total} parameters are covered by Kronecker blocks."])


@dataclass(frozen=True)
class Block:
    """One Kronecker block: the weight and bias of a layer, taken jointly, by parameter name."""

    name: str
    layer: Layer
    weight: str | None
    bias: str | None

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters in this block."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(groups, d_out, d_in [+1]) of the matrix of :meth:`join`: B and A have the last two sizes."""
        d_in = self.layer.d_in if self.weight is not None else 0
        return self.layer.groups, self.layer.d_out, d_in + (self.bias is not None)

    def join(self, tree: dict[str, Tensor]) -> Tensor:
        """[W | b] from a tree of parameters, as (groups, d_out, d_in + 1)."""
        layer = self.layer
        parts = [] if self.weight is None else [layer.to_matrix(tree[self.weight])]
        if self.bias is not None:
            parts.append(tree[self.bias].reshape(layer.groups, layer.d_out, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def part(self, matrix: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`join`: a block's matrix as named tensors shaped like ``like``."""
        found: dict[str, Tensor] = {}
        if self.weight is not None:
            columns = matrix if self.bias is None else matrix[..., : self.layer.d_in]
            found[self.weight] = self.layer.to_weight(columns, like[self.weight].shape)
        if self.bias is not None:
            found[self.bias] = matrix[..., -1].reshape(like[self.bias].shape)
        return found


@dataclass
class Plan:
    """The decision for a whole model: Kronecker blocks, diagonal layers, and the rest."""

    blocks: dict[str, Block] = field(default_factory=dict)
    feeds: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(module, block name): the modules whose calls feed a block; several where a weight is tied."""
    diagonal: dict[nn.Module, dict[str, str]] = field(default_factory=dict)
    """Module → {its own parameter name: name in the model}."""
    rest: list[str] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    fallback: Fallback = "diagonal"
    aside: set[tuple[str, int]] = field(default_factory=set)
    """(layer, number of the call): the calls that the last measured inner loss did not depend on."""

    @property
    def otherwise(self) -> str:
        """The curvature of parameters that have neither a block nor a diagonal."""
        return SCALAR if self.fallback == "diagonal" else self.fallback

    def coverage(self, uncalled: Collection[str] = ()) -> Coverage:
        """The plan as a table, in the model's order; parameters of ``uncalled`` layers get the fallback."""
        reason = "its layer was not called with it"
        changed = {n: replace(self.rows[n], curvature=self.otherwise, reason=reason) for n in uncalled}
        return Coverage(tuple((self.rows | changed).values()))


def _form(module: nn.Module) -> tuple[object, ...]:
    """The settings that must agree between modules that share a weight, so that their calls are rows of one block."""
    names = ("in_features", "kernel_size", "stride", "padding", "padding_mode", "dilation", "groups")
    return (type(module), *(getattr(module, name, None) for name in names))


def plan(model: nn.Module, fallback: Fallback, layers: Sequence[LayerOf] = ()) -> Plan:
    """Decide for every trainable parameter of ``model`` which curvature it gets; ``layers`` are the user's own."""
    planner = _Planner(model, fallback, layers)
    for name in planner.uses:
        known = planner.plan.rows[name].curvature  # set if it belongs to the block of an earlier weight or bias
        if not (known or planner.block(name) or planner.diagonal(name)):
            planner.rest(name)
    return planner.plan


@dataclass(frozen=True)
class _ParameterUse:
    """A module that owns a parameter, and the parameter's name in it."""

    module_name: str
    module: nn.Module
    local: str

    @property
    def kind(self) -> str:
        """The module's type, in words for the table."""
        return "out_proj of MultiheadAttention" if isinstance(self.module, UNCALLED) else type(self.module).__name__


class _Planner:
    """Builds a plan: finds the modules of every parameter, with one method for each kind of curvature."""

    def __init__(self, model: nn.Module, fallback: Fallback, layers: Sequence[LayerOf]) -> None:
        params = trainable(model, "model")
        if empty := next((name for name, p in params.items() if not p.numel()), ""):
            raise HyperkronError(
                f"model parameter {empty} has shape {tuple(params[empty].shape)}, so there is nothing to train in it, "
                "and KFAC has no factors of that size; freeze it with requires_grad_(False)."
            )
        self.layers, self.names = layers, {id(p): name for name, p in params.items()}
        self.uses: dict[str, list[_ParameterUse]] = {name: [] for name in params}
        for module_name, module in model.named_modules():
            for local, p in module._parameters.items():
                if p is not None and id(p) in self.names:
                    self.uses[self.names[id(p)]].append(_ParameterUse(module_name, module, local))
        self.plan = Plan(rows={n: Row(n, tuple(p.shape), "", "") for n, p in params.items()}, fallback=fallback)

    def block(self, name: str) -> bool:
        """Make a Kronecker block of the parameter and its partner (weight and bias); False if that is impossible.

        A parameter tied over several modules gets a block if all of them use it and its partner in the same way. The
        output layer of a language model may share its weight with embeddings, whose use is measured separately. A
        partner that other modules hold as well (the output bias of BERT) is left out.
        """
        looked_up = [use for use in self.uses[name] if looks_up(use.module)]
        uses = [use for use in self.uses[name] if use not in looked_up]
        layers = [kronecker_layer(use.module, self.layers) for use in uses]
        layer = layers[0] if layers else None
        if layer is None or None in layers or uses[0].local not in ("weight", "bias"):
            return False
        other = "bias" if uses[0].local == "weight" else "weight"
        mates = [use.module._parameters.get(other) for use in uses]  # a parametrized weight is not a parameter
        mate = self.names.get(id(mates[0]))
        if len({_form(use.module) for use in uses}) > 1 or len({id(m) for m in mates}) > 1:
            return False
        if mate is not None and [u.module for u in self.uses[mate]] != [u.module for u in uses]:
            mate = None
        weight, bias = (name, mate) if uses[0].local == "weight" else (mate, name)
        block = Block(uses[0].module_name or uses[0].kind, layer, weight, bias)
        self.plan.blocks[block.name] = block
        self.plan.feeds += [(use.module, block.name) for use in uses]
        tied = f", tied over {len(uses)} modules" if len(uses) > 1 else ""
        if looked_up:
            tied += f", tied to {' and '.join(use.module_name for use in looked_up)} (Embedding)"
            if self.plan.fallback == "diagonal":
                self.plan.diagonal |= {use.module: {use.local: name} for use in looked_up}
        for part, with_ in ((weight, "bias"), (bias, "weight")):
            if part is not None:
                joint = f", with {with_}" if len(block.names) == 2 else ""
                self._row(part, KRONECKER, f"{uses[0].kind}{joint}{tied}")
        return True

    def diagonal(self, name: str) -> bool:
        """The exact diagonal of a norm layer or embedding, if that is where the parameter lives, and only there."""
        uses = self.uses[name]
        if self.plan.fallback != "diagonal" or len(uses) != 1 or not has_diagonal(uses[0].module):
            return False
        self.plan.diagonal.setdefault(uses[0].module, {})[uses[0].local] = name
        self._row(name, DIAGONAL, uses[0].kind)
        return True

    def rest(self, name: str) -> None:
        """The declared fallback."""
        uses = self.uses[name]
        reason = uses[0].kind if uses else "used outside any module"
        if len(uses) > 1:
            owners = (f"{use.module_name or 'model'} ({type(use.module).__name__})" for use in uses)
            reason = "tied between " + " and ".join(owners)
        self.plan.rest.append(name)
        self._row(name, self.plan.otherwise, reason)

    def _row(self, name: str, curvature: str, reason: str) -> None:
        self.plan.rows[name] = replace(self.plan.rows[name], curvature=curvature, reason=reason)
