"""Low-rank adapters without peft (Hu et al., "LoRA", ICLR 2022): W x + (α/r) B A x, with W frozen."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn


class LoRALinear(nn.Module):
    """A frozen linear layer with an adapter of the given rank, in float32 where the layer is in half precision."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        place = {"device": base.weight.device, "dtype": torch.promote_types(base.weight.dtype, torch.float32)}
        self.down = nn.Linear(base.in_features, rank, bias=False, **place)
        self.up = nn.Linear(rank, base.out_features, bias=False, **place)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output plus the adapter's."""
        y = x if torch.is_autocast_enabled(x.device.type) else x.to(self.down.weight.dtype)
        return self.base(x) + (self.scale * self.up(self.down(y))).to(x.dtype)


def add_adapters(model: nn.Module, rank: int, alpha: float, skip: Collection[str] = ("lm_head",)) -> nn.Module:
    """Freeze ``model`` and give its linear layers adapters, in place, except those of the names in ``skip``."""
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and name not in skip and not isinstance(parent, LoRALinear):
                setattr(parent, name, LoRALinear(layer, rank, alpha))
    return model
