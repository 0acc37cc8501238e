"""Which curvature every parameter gets, decided before any number is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from hyperkron.curvature.kfac.layers import Layer, has_diagonal, kronecker_layer
from hyperkron.point import trainable

Fallback = Literal["diagonal", "identity", "zero"]

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

    @property
    def count(self) -> int:
        """How many numbers the parameter holds."""
        total = 1
        for n in self.shape:
            total *= n
        return total


@dataclass(frozen=True)
class Coverage:
    """Every trainable parameter with the curvature it gets; ``print`` shows the table.

    Example:
        >>> import torch, hyperkron as hk
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
        >>> print(hk.KFAC().coverage(model))
        parameter  shape   curvature  why
        0.weight   (3, 4)  kronecker  Linear, with bias
        0.bias     (3,)    kronecker  Linear, with weight
        1.weight   (3,)    diagonal   LayerNorm
        1.bias     (3,)    diagonal   LayerNorm
        71.4 % of 21 parameters are covered by Kronecker blocks.
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

    def __str__(self) -> str:
        table = [("parameter", "shape", "curvature", "why")]
        table += [(row.parameter, str(row.shape), row.curvature, row.reason) for row in self.rows]
        widths = [max(len(line[i]) for line in table) for i in range(3)]
        lines = [
            "  ".join([*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[3]]) for line in table
        ]
        total = sum(row.count for row in self.rows)
        return "\n".join([*lines, f"{100 * self.covered:.1f} % of {total} parameters are covered by Kronecker blocks."])


@dataclass(frozen=True)
class Block:
    """One Kronecker block: the weight and bias of a layer, taken jointly, by parameter name."""

    name: str
    layer: Layer
    weight: str | None
    bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters in this block."""
        return tuple(name for name in (self.weight, self.bias) if name is not None)

    def join(self, tree: dict[str, Tensor]) -> Tensor:
        """[W | b] of a tree over the parameters, as (groups, d_out, d_in + 1)."""
        layer = self.layer
        parts = [] if self.weight is None else [layer.to_matrix(tree[self.weight])]
        if self.bias is not None:
            parts.append(tree[self.bias].reshape(layer.groups, layer.d_out, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)

    def part(self, matrix: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of :meth:`join`: a block's matrix as named tensors shaped like ``like``."""
        found: dict[str, Tensor] = {}
        if self.weight is not None:
            found[self.weight] = matrix[..., : self.layer.d_in].reshape(like[self.weight].shape)
        if self.bias is not None:
            found[self.bias] = matrix[..., -1].reshape(like[self.bias].shape)
        return found


@dataclass
class Plan:
    """The decision for a whole model: Kronecker blocks, diagonal layers, and the rest."""

    blocks: dict[str, Block] = field(default_factory=dict)
    feeds: list[tuple[nn.Module, str]] = field(default_factory=list)
    """(module, block name): the modules whose calls feed a block; several where a weight is tied."""
    diagonal: list[tuple[nn.Module, dict[str, str]]] = field(default_factory=list)
    """(module, {its own parameter name: name in the model})."""
    rest: list[str] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    fallback: Fallback = "diagonal"

    @property
    def measures_rest(self) -> bool:
        """Whether the rest is measured at all, or has a constant for its curvature."""
        return self.fallback == "diagonal"

    def coverage(self) -> Coverage:
        """The plan as a table, in the model's order."""
        return Coverage(tuple(self.rows.values()))


_UNCALLED = nn.modules.linear.NonDynamicallyQuantizableLinear
"""The linear layer whose weights ``nn.MultiheadAttention`` uses without ever calling it."""


def _form(module: nn.Module) -> tuple[object, ...]:
    """What must agree between modules that share a weight, for their uses to be rows of one block."""
    names = ("in_features", "kernel_size", "stride", "padding", "padding_mode", "dilation", "groups")
    return (type(module), *(getattr(module, name, None) for name in names))


def plan(model: nn.Module, fallback: Fallback) -> Plan:
    """Decide for every trainable parameter of ``model`` which curvature it gets."""
    params = trainable(model, "model")
    name_of = {id(p): name for name, p in params.items()}
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for module_name, module in model.named_modules():
        for local, p in module._parameters.items():
            if p is not None and id(p) in name_of:
                owners.setdefault(id(p), []).append((module_name, module, local))
    made = Plan(rows={name: Row(name, tuple(p.shape), "", "") for name, p in params.items()}, fallback=fallback)
    for name, p in params.items():
        if made.rows[name].curvature:
            continue
        _place(made, name, p, owners.get(id(p), []), owners, name_of, fallback)
    return made


def _place(
    made: Plan,
    name: str,
    p: Tensor,
    uses: list[tuple[str, nn.Module, str]],
    owners: dict[int, list[tuple[str, nn.Module, str]]],
    name_of: dict[int, str],
    fallback: Fallback,
) -> None:
    """Put one parameter, with the bias or weight that belongs to it, into its place in the plan."""
    module_name, module, local = uses[0] if uses else ("", nn.Identity(), "")
    layers = [None if isinstance(m, _UNCALLED) else kronecker_layer(m) for _, m, _ in uses]
    kind = "out_proj of MultiheadAttention" if isinstance(module, _UNCALLED) else type(module).__name__
    if layers and all(layer is not None for layer in layers) and local in ("weight", "bias"):
        other_local = "bias" if local == "weight" else "weight"
        mates = {id(m._parameters.get(other_local)) for _, m, _ in uses}  # a parametrized weight is no parameter
        alike = len({_form(m) for _, m, _ in uses}) == 1
        mate = module._parameters.get(other_local)
        joint = mate is not None and id(mate) in name_of
        same_users = joint and [m for _, m, _ in owners[id(mate)]] == [m for _, m, _ in uses]
        if alike and len(mates) == 1 and (same_users or not joint):
            layer = layers[0]
            assert layer is not None
            weight = name if local == "weight" else (name_of[id(mate)] if joint else None)
            bias = name if local == "bias" else (name_of[id(mate)] if joint else None)
            block = Block(module_name or kind, layer, weight, bias)
            made.blocks[block.name] = block
            made.feeds += [(m, block.name) for _, m, _ in uses]
            tied = f", tied over {len(uses)} modules" if len(uses) > 1 else ""
            for part, other in ((weight, "bias" if bias else None), (bias, "weight" if weight else None)):
                if part is not None:
                    why = f"{kind}{f', with {other}' if other else ''}{tied}"
                    made.rows[part] = Row(part, made.rows[part].shape, KRONECKER, why)
            return
    if len(uses) > 1:
        reason = "tied between " + " and ".join(f"{n or 'model'} ({type(m).__name__})" for n, m, _ in uses)
    else:
        reason = kind if uses else "used outside any module"
    if fallback == "diagonal" and len(uses) == 1 and has_diagonal(module):
        known = [m for m, _ in made.diagonal]
        if module not in known:
            made.diagonal.append((module, {}))
            known.append(module)
        made.diagonal[known.index(module)][1][local] = name
        made.rows[name] = Row(name, tuple(p.shape), DIAGONAL, reason)
        return
    made.rest.append(name)
    made.rows[name] = Row(name, tuple(p.shape), SCALAR if fallback == "diagonal" else fallback, reason)
