"""Which rows belong in A where some tokens have no loss: all, those with a label, or those a gradient reaches?

For small sequence models in float64 the Gauss–Newton block of every Linear layer is computed densely, G, and so are
KFAC's factors (``expand``, one backward pass for every entry of the output). A averages a aᵀ over the rows of one of
the three rules, B is the same for all. Printed are the medians, over layers and seeds, of ‖B ⊗ A − G‖/‖G‖ and of the
error of (B ⊗ A + δI)⁻¹b against (G + δI)⁻¹b.

    python benchmarks/ignored_tokens.py
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

RULES = ("all", "labelled", "reached")
EXAMPLES, TOKENS, CLASSES, WIDTH, DAMPING = 6, 6, 3, 4, 1e-2


class Mixer(nn.Module):
    """One block of a transformer by hand, so that every weight is a Linear layer's; without attention an MLP."""

    def __init__(self, attention: bool, causal: bool) -> None:
        super().__init__()
        self.attention, self.causal = attention, causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        if self.attention:
            q, k, v = self.qkv(x).chunk(3, -1)
            scores = q @ k.mT / WIDTH**0.5
            allowed = seen[:, None, :].expand(scores.shape)
            if self.causal:
                allowed = allowed & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
            x = x + self.out(scores.masked_fill(~allowed, -1e9).softmax(-1) @ v)
        x = x + self.down(self.up(x).tanh())
        return self.head(x)


def tokens(kind: str) -> tuple[Tensor, Tensor]:
    """(which tokens have a loss, which may be attended to)."""
    everything = torch.ones(EXAMPLES, TOKENS, dtype=torch.bool)
    if kind == "random labels":
        labelled = torch.rand(EXAMPLES, TOKENS) < 0.5
        labelled[:, -1] = True
        return labelled, everything
    if kind == "prompts":
        lengths = torch.randint(1, TOKENS, (EXAMPLES, 1))
        return torch.arange(TOKENS) >= lengths, everything
    if kind == "examples of weight 0":
        return (torch.arange(EXAMPLES) % 2 == 0)[:, None].expand(EXAMPLES, TOKENS), everything
    lengths = torch.randint(2, TOKENS, (EXAMPLES, 1))
    return torch.arange(TOKENS) < lengths, torch.arange(TOKENS) < lengths


def measured(kind: str, attention: bool, causal: bool, seed: int) -> dict[str, list[tuple[float, float]]]:
    """(error of the block, error of v) of every layer, by rule."""
    torch.manual_seed(seed)
    model = Mixer(attention, causal).double()
    x = torch.randn(EXAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    labelled, seen = tokens(kind)
    if kind == "padding":  # what a padding token looks like: all alike
        x = torch.where(seen[..., None], x, torch.full_like(x, 0.7))
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            inputs[name], outputs[name] = given[0].detach(), output

        return keep

    handles = [m.register_forward_hook(hook(name)) for name, m in layers.items()]
    logits = model(x, seen)
    for handle in handles:
        handle.remove()
    names = list(outputs)
    rows = {name: _with_one(inputs[name]) for name in names}
    blocks = {name: torch.zeros(()).double() for name in names}
    b = {name: torch.zeros(()).double() for name in names}
    reached = {name: torch.zeros_like(labelled) for name in names}
    p = logits.detach().softmax(-1)
    scale = 1 / labelled.sum()
    for n, t in labelled.nonzero().tolist():
        for c in range(CLASSES):
            vector = torch.zeros_like(logits)
            vector[n, t] = (scale * p[n, t, c]).sqrt() * (torch.eye(CLASSES).double()[c] - p[n, t])
            found = torch.autograd.grad(logits, [outputs[m] for m in names], vector, retain_graph=True)
            for name, g in zip(names, found, strict=True):
                gradient = torch.einsum("nti,ntj->ij", g, rows[name]).flatten()
                blocks[name] = blocks[name] + torch.outer(gradient, gradient)
                b[name] = b[name] + torch.einsum("nti,ntj->ij", g, g)
                reached[name] |= (g != 0).any(-1)
    result: dict[str, list[tuple[float, float]]] = {rule: [] for rule in RULES}
    for name in names:
        everything = torch.ones_like(labelled)
        for rule, mask in zip(RULES, (everything, labelled, reached[name]), strict=True):
            a = rows[name][mask]
            kron = torch.kron(b[name], a.T @ a / len(a))
            size = torch.eye(len(kron)).double()
            right = torch.randn(len(kron), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            v, wanted = (torch.linalg.solve(m + DAMPING * size, right) for m in (kron, blocks[name]))
            result[rule].append((_error(kron, blocks[name]), _error(v, wanted)))
    return result


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    seeds = parser.parse_args().seeds
    print(f"{'tokens':22} {'model':18}" + "".join(f"{rule:>18}" for rule in RULES) + "   (error of block, of v)")
    for kind in ("padding", "prompts", "random labels", "examples of weight 0"):
        for model, flags in {"MLP": (False, False), "attention": (True, False), "causal": (True, True)}.items():
            found = [measured(kind, *flags, seed) for seed in range(seeds)]
            cells = []
            for rule in RULES:
                pairs = [pair for one in found for pair in one[rule]]
                block, v = (statistics.median(column) for column in zip(*pairs, strict=True))
                cells.append(f"{block:10.3f} {v:7.3f}")
            print(f"{kind:22} {model:18}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
