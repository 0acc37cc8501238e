"""Which curvature should parameters outside KFAC's blocks get? Diagonal, identity or zero, by measurement.

    python benchmarks/fallback.py

Small networks with norm layers, embeddings and raw parameters are trained for some steps on partly wrong labels. The
hypergradient of the example weights with each fallback is compared with that of the dense damped Gauss–Newton matrix:

    cosine and ‖h − h*‖ / ‖h*‖ ,    h* = −∂²_λθ J_in (G + δI)⁻¹ ∂_θ J_out ,

for several dampings δ and seeds. The table goes to benchmarks/results/fallback.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.point import Point

SEEDS = range(5)
DAMPINGS = (1e-1, 1e-2, 1e-3, 1e-4)
FALLBACKS = ("diagonal", "identity", "zero")
FISHERS = ("type-2", "mc")
STEPS, COUNT, CLASSES, VOCABULARY, LENGTH = 150, 64, 4, 20, 6


class Pooled(nn.Module):
    """The mean over everything after the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).mean(2)


class Attend(nn.Module):
    """A transformer block of plain Linear layers: KFAC covers all but its norms, embeddings and scale."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position
        q, k, v = self.qkv(self.before(h)).unsqueeze(1).chunk(3, -1)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return self.head(self.after(h).mean(1))


class Encoder(nn.Module):
    """torch's encoder layer, whose attention weights are raw parameters outside any Linear."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x)).mean(1))


def layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(10, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        nn.Linear(12, 12),
        nn.LayerNorm(12),
        nn.Tanh(),
        nn.Linear(12, CLASSES),
    )


def batch_norm() -> nn.Module:
    blocks = [nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    blocks += [nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU()]
    return nn.Sequential(*blocks, Pooled(), nn.Linear(6, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer norm": (layer_norm, "vectors"),
    "batch norm": (batch_norm, "images"),
    "embedding, layer norm, raw position": (Attend, "tokens"),
    "encoder layer (raw attention weights)": (Encoder, "tokens"),
}


def data(kind: str) -> tuple[Tensor, Tensor]:
    """Inputs and classes of a random teacher, a third of them wrong."""
    if kind == "tokens":
        x = torch.randint(VOCABULARY, (2 * COUNT, LENGTH))
        y = nn.functional.one_hot(x, VOCABULARY).double().sum(1) @ torch.randn(VOCABULARY, CLASSES).double()
    else:
        x = torch.randn(2 * COUNT, *((10,) if kind == "vectors" else (2, 5, 5)), dtype=torch.float64)
        y = x.flatten(1) @ torch.randn(x[0].numel(), CLASSES, dtype=torch.float64)
    wrong = torch.rand(2 * COUNT) < 0.33
    return x, torch.where(wrong, torch.randint(CLASSES, (2 * COUNT,)), y.argmax(1))


def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights())


def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def trained(name: str, seed: int) -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(seed)
    build, kind = MODELS[name]
    model, weights = build().double(), hk.as_hyper(torch.full((COUNT,), 0.5, dtype=torch.float64))
    x, y = data(kind)
    first, second = (x[:COUNT], y[:COUNT]), (x[COUNT:], y[COUNT:])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        optimizer.zero_grad()
        inner(model, weights, first).backward()
        optimizer.step()
    model.zero_grad()
    weights.zero_grad()
    return model, weights, first, second


class Dense(hk.Identity):
    """A dense matrix in the place of A."""

    def __init__(self, matrix: Tensor) -> None:
        object.__setattr__(self, "matrix", matrix)

    def operator(self, point: Point, state: Any) -> Any:
        return _DenseOperator(self.matrix, point.params)  # type: ignore[attr-defined]


class _DenseOperator(hk.curvature.Invertible):
    def __init__(self, matrix: Tensor, like: dict[str, Tensor]) -> None:
        self.matrix, self.like = matrix, like

    def matvec(self, v: dict[str, Tensor]) -> dict[str, Tensor]:
        return unflat(self.matrix @ flat(v), self.like)

    def solve(self, b: dict[str, Tensor]) -> dict[str, Tensor]:
        return unflat(torch.linalg.solve(self.matrix, flat(b)), self.like)


def flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tree.values()])


def unflat(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = vector.split([p.numel() for p in like.values()])
    return {n: part.reshape(p.shape) for (n, p), part in zip(like.items(), parts, strict=True)}


def dense_ggn(arguments: Any) -> Tensor:
    with Point(PROBLEM, *arguments) as point:
        operator = hk.GGN().operator(point, hk.GGN().init())
        size = sum(p.numel() for p in point.params.values())
        columns = [flat(operator.matvec(unflat(e, point.params))) for e in torch.eye(size, dtype=torch.float64)]
    return torch.stack(columns, 1)


def measure(name: str, seed: int) -> list[dict[str, Any]]:
    arguments = trained(name, seed)
    matrix = dense_ggn(arguments)
    eye = torch.eye(len(matrix), dtype=torch.float64)
    rows = []
    for damping in DAMPINGS:
        made = hk.Implicit(Dense(matrix + damping * eye), hk.Direct(), cross="reverse")
        exact = flat(made.compute(PROBLEM, *arguments).grads)
        for fisher in FISHERS:
            for fallback in FALLBACKS:
                curvature = hk.KFAC(damping, fisher=fisher, fallback=fallback, seed=seed)
                found = flat(hk.Implicit(curvature, hk.Direct(), cross="reverse").compute(PROBLEM, *arguments).grads)
                rows.append(
                    {
                        "model": name,
                        "seed": seed,
                        "covered": round(curvature.coverage(arguments[0]).covered, 3),
                        "damping": damping,
                        "fisher": fisher,
                        "fallback": fallback,
                        "cosine": float(F.cosine_similarity(found, exact, dim=0)),
                        "relative_error": float((found - exact).norm() / exact.norm()),
                    }
                )
    return rows


def summary(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    table = []
    wins = dict.fromkeys(FALLBACKS, 0)
    for name in MODELS:
        for fisher in FISHERS:
            for damping in DAMPINGS:
                line: dict[str, Any] = {"model": name, "fisher": fisher, "damping": damping}
                for fallback in FALLBACKS:
                    some = [
                        r
                        for r in rows
                        if (r["model"], r["fisher"], r["damping"], r["fallback"]) == (name, fisher, damping, fallback)
                    ]
                    line["covered"] = some[0]["covered"]
                    line[f"cosine {fallback}"] = round(statistics.median(r["cosine"] for r in some), 4)
                    line[f"error {fallback}"] = round(statistics.median(r["relative_error"] for r in some), 4)
                wins[max(FALLBACKS, key=lambda f, line=line: line[f"cosine {f}"])] += 1
                table.append(line)
    overall = {
        f: {
            "median_cosine": round(statistics.median(r["cosine"] for r in rows if r["fallback"] == f), 4),
            "worst_cosine": round(min(r["cosine"] for r in rows if r["fallback"] == f), 4),
            "median_error": round(statistics.median(r["relative_error"] for r in rows if r["fallback"] == f), 4),
            "worst_error": round(max(r["relative_error"] for r in rows if r["fallback"] == f), 4),
            "settings_of_highest_median_cosine": wins[f],
        }
        for f in FALLBACKS
    }
    return table, overall


def main() -> None:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    rows = [row for name in MODELS for seed in SEEDS for row in measure(name, seed)]
    table, overall = summary(rows)
    for line in table:
        cells = "  ".join(f"{f} {line[f'cosine {f}']:.3f}/{line[f'error {f}']:.3f}" for f in FALLBACKS)
        print(f"{line['model']:<38} {line['fisher']:<7} δ={line['damping']:<7g} cosine/error: {cells}")
    print(json.dumps(overall, indent=1))
    report = {
        "command": "python benchmarks/fallback.py",
        "seeds": list(SEEDS),
        "versions": {
            "hyperkron": hk.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "settings": {"training_steps": STEPS, "examples": COUNT, "threads": 1, "dtype": "float64"},
        "seconds": round(time.perf_counter() - begin, 1),
        "overall": overall,
        "medians_over_seeds": table,
        "runs": rows,
    }
    path = Path(__file__).parent / "results" / "fallback.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{report['seconds']} s, written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
