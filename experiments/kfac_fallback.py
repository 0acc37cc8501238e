"""Which curvature should parameters outside KFAC's blocks get? Diagonal, identity or zero, by measurement.

    python -m experiments.kfac_fallback

Small networks with norm layers, embeddings and raw parameters are trained for some steps on partly wrong labels. The
hypergradient of the example weights with each fallback is compared with that of the dense damped Gauss–Newton matrix:

    cosine and ‖h − h*‖ / ‖h*‖ ,    h* = −∂²_λθ J_in (G + δI)⁻¹ ∂_θ J_out ,

for several dampings δ and seeds. The table goes to experiments/results/kfac_fallback.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from experiments import records
from hyperkron.evaluation.point import Point

SEEDS = range(3)
DAMPINGS = (1e-1, 1e-2, 1e-3)
REGIMES = ((20, 64), (120, 64), (20, 160), (120, 160))
"""(training steps, examples): before and after the data are fitted, below and around the number of parameters."""
FALLBACKS = ("diagonal", "identity", "zero", "diagonal, d + δ")
"""The last is no option of the library: (√d + √δ)² in place of d + δ, as factored damping treats a Kronecker block."""
FISHERS = ("type-2", "mc")
CLASSES, VOCABULARY, LENGTH = 4, 20, 6


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


def data(kind: str, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes of a random teacher, a third of them wrong."""
    if kind == "tokens":
        x = torch.randint(VOCABULARY, (2 * count, LENGTH))
        y = nn.functional.one_hot(x, VOCABULARY).double().sum(1) @ torch.randn(VOCABULARY, CLASSES).double()
    else:
        x = torch.randn(2 * count, *((10,) if kind == "vectors" else (2, 5, 5)), dtype=torch.float64)
        y = x.flatten(1) @ torch.randn(x[0].numel(), CLASSES, dtype=torch.float64)
    wrong = torch.rand(2 * count) < 0.33
    return x, torch.where(wrong, torch.randint(CLASSES, (2 * count,)), y.argmax(1))


def inner(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights())


def outer(model: nn.Module, weights: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def trained(name: str, seed: int, steps: int, count: int) -> tuple[nn.Module, nn.Module, Any, Any]:
    torch.manual_seed(seed)
    build, kind = MODELS[name]
    model, weights = build().double(), hk.as_hyper(torch.full((count,), 0.5, dtype=torch.float64))
    x, y = data(kind, count)
    first, second = (x[:count], y[:count]), (x[count:], y[count:])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    plain = hk.algorithms.InnerOnly()
    hk.fit(PROBLEM, model, weights, plain, first, steps=steps, inner_optimizer=optimizer, seed=None)
    model.zero_grad()
    return model, weights, first, second


def flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tree.values()])


def unflat(vector: Tensor, like: dict[str, Tensor]) -> dict[str, Tensor]:
    parts = vector.split([p.numel() for p in like.values()])
    return {n: part.reshape(p.shape) for (n, p), part in zip(like.items(), parts, strict=True)}


def gradient(value: Tensor, params: dict[str, Tensor]) -> Tensor:
    return flat(dict(zip(params, torch.autograd.grad(value, list(params.values()), retain_graph=True), strict=True)))


def dense(point: Point, target: Tensor) -> tuple[Tensor, Tensor]:
    """The Gauss–Newton matrix Σ σ/N Jᵀ(diag p − ppᵀ)J and ∂²_λθ J_in, rows (p − y)ᵀJ/N, from a dense Jacobian."""
    output = point.inner(differentiable=True).terms[0].output
    count, classes = output.shape
    rows = torch.eye(output.numel(), dtype=output.dtype).reshape(-1, count, classes)
    parts = torch.autograd.grad(output, list(point.params.values()), rows, is_grads_batched=True)
    jacobian = torch.cat([part.reshape(len(rows), -1) for part in parts], 1).reshape(count, classes, -1)
    p = output.detach().softmax(1)[:, :, None]
    bent = p * (jacobian - (p * jacobian).sum(1, keepdim=True)) * (0.5 / count)
    residual = (p - F.one_hot(target, classes)[:, :, None]) / count
    return jacobian.flatten(0, 1).T @ bent.flatten(0, 1), (residual * jacobian).sum(1)


def solutions(point: Point, b: dict[str, Tensor], damping: float, fisher: str, seed: int) -> dict[str, Tensor]:
    """v = A⁻¹b with each fallback, and with the diagonal damped as d + δ instead of as the factors are."""
    found = {}
    for fallback in FALLBACKS[:3]:
        curvature = hk.curvature.KFAC(damping, fisher=fisher, fallback=fallback, seed=seed)  # type: ignore[arg-type]
        found[fallback] = flat(curvature.operator(point, curvature.init()).solve(b))
    zero = found["zero"] == 0
    diagonal = ((flat(b) / found["diagonal"]).clamp_min(0).sqrt() - damping**0.5).clamp_min(0).square().nan_to_num()
    found[FALLBACKS[3]] = torch.where(zero, flat(b) / (diagonal + damping), found["diagonal"])
    return found


def measure(name: str, seed: int, steps: int, count: int) -> list[dict[str, Any]]:
    model, weights, first, second = trained(name, seed, steps, count)
    covered = round(hk.curvature.KFAC().coverage(model).covered, 3)
    rows = []
    with Point(PROBLEM, model, weights, first, second) as point:
        params = point.params
        b = gradient(point.outer().value, params)
        ggn, cross = dense(point, first[1])
        for damping in DAMPINGS:
            exact = -cross @ torch.linalg.solve(ggn + damping * torch.eye(len(b), dtype=b.dtype), b)
            for fisher in FISHERS:
                for fallback, v in solutions(point, unflat(b, params), damping, fisher, seed).items():
                    found = -cross @ v
                    rows.append(
                        {
                            "model": name,
                            "covered": covered,
                            "seed": seed,
                            "steps": steps,
                            "examples": count,
                            "damping": damping,
                            "fisher": fisher,
                            "fallback": fallback,
                            "cosine": float(F.cosine_similarity(found, exact, dim=0)),
                            "relative_error": float((found - exact).norm() / exact.norm()),
                        }
                    )
    return rows


def figures(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians and worst cases of each fallback, and its share of settings with the highest cosine."""
    settings: dict[tuple[Any, ...], dict[str, float]] = {}
    for r in rows:
        key = (r["model"], r["seed"], r["steps"], r["examples"], r["damping"], r["fisher"])
        settings.setdefault(key, {})[r["fallback"]] = r["cosine"]
    best = [max(cosines, key=cosines.__getitem__) for cosines in settings.values()]
    found = {}
    for f in FALLBACKS:
        cosines = [r["cosine"] for r in rows if r["fallback"] == f]
        errors = [r["relative_error"] for r in rows if r["fallback"] == f]
        found[f] = {
            "mean_cosine": round(statistics.mean(cosines), 4),
            "median_cosine": round(statistics.median(cosines), 4),
            "worst_cosine": round(min(cosines), 4),
            "median_error": round(statistics.median(errors), 4),
            "worst_error": round(max(errors), 4),
            "share_of_best_cosine": round(best.count(f) / len(best), 3),
        }
    return found


def show(title: str, rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    found = figures(rows)
    line = ("{mean_cosine:.3f} {median_error:6.3f} {share_of_best_cosine:4.0%}".format(**x) for x in found.values())
    print(f"{title:<44} {'    '.join(line)}")
    return found


def main() -> None:
    torch.set_num_threads(1)
    begin = time.perf_counter()
    runs = [(name, seed, *regime) for regime in REGIMES for name in MODELS for seed in SEEDS]
    rows = [row for run in runs for row in measure(*run)]
    print("mean cosine, median relative error, share of settings with the highest cosine:", *FALLBACKS, sep="    ")
    groups = {"all": show("all", rows)}
    for key in ("model", "damping", "fisher", "steps", "examples"):
        for value in dict.fromkeys(r[key] for r in rows):
            groups[f"{key} {value}"] = show(f"{key} {value}", [r for r in rows if r[key] == value])
    report = {
        "command": "python -m experiments.kfac_fallback",
        "seeds": list(SEEDS),
        "versions": {
            "hyperkron": hk.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "settings": {"regimes (steps, examples)": REGIMES, "dampings": DAMPINGS, "threads": 1, "dtype": "float64"},
        "seconds": round(time.perf_counter() - begin, 1),
        "figures": groups,
        "columns": list(rows[0]),
        "runs": [[round(x, 5) if isinstance(x, float) else x for x in r.values()] for r in rows],
    }
    path = records.RESULTS / "kfac_fallback.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report) + "\n")
    print(f"{report['seconds']} s, written to {path.relative_to(records.ROOT)}")


if __name__ == "__main__":
    main()
