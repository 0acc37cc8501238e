"""Which solver, damping and Fisher vectors? Tried on other rows, queries and networks than those of the study.

    python -m experiments.attribution.development --setting fashion --data data --device cuda --out development.jsonl

The rules that ``hk.attribute`` and the study use were chosen here, before the study was run with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hyperkron as hk
from experiments.attribution import lds
from experiments.attribution.peers import kronfluence, ours
from experiments.attribution.settings import Setting, cifar_cnn, cnn, digits_mlp, fashion_mlp, mlp, train_many
from experiments.paper import datasets
from experiments.pieces import Lines
from hyperkron.curvature import EKFAC, Point, ShrunkGGN
from hyperkron.curvature.kfac.coverage import Plan
from hyperkron.curvature.kfac.eigen import EigenInverses, damped
from hyperkron.curvature.kfac.measured import Measured
from hyperkron.kernels.split_products import full_precision
from hyperkron.solvers import CG, Direct


def other_digits(data: Path | None) -> Setting:
    """The digits in another order, so that other rows are queries."""
    base = digits_mlp(data)
    x, y = (torch.cat([a, b]) for a, b in zip(base.train, base.queries, strict=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    x, y = x[order], y[order]
    return replace(base, train=(x[:1000], y[:1000]), queries=(x[1000:1100], y[1000:1100]))


def other_digits_cnn(data: Path | None) -> Setting:
    """The same with convolutions."""
    base = other_digits(data)
    train, queries = ((x.reshape(-1, 1, 8, 8), y) for x, y in (base.train, base.queries))
    return replace(base, train=train, queries=queries, network=lambda: cnn(1, (8, 16), 16 * 16))


def other_fashion(data: Path | None) -> Setting:
    """The next 5000 images of Fashion-MNIST, and the next 100 queries."""
    images = datasets.mnist(data, "fashion_mnist")
    train, queries = (
        (x[a:b].reshape(b - a, -1) - 0.3, y[a:b])
        for (x, y), a, b in ((images.train, 5000, 10000), (images.test, 100, 200))
    )
    return replace(fashion_mlp(data), train=train, queries=queries, network=lambda: mlp(784, 128, 64))


def other_cifar(data: Path | None) -> Setting:
    """The next 5000 images of CIFAR-10, and the next 100 queries."""
    images = datasets.cifar10(data)
    train, queries = (
        ((x[a:b] - 0.47) / 0.25, y[a:b]) for (x, y), a, b in ((images.train, 5000, 10000), (images.test, 100, 200))
    )
    return replace(cifar_cnn(data), train=train, queries=queries)


SETTINGS: dict[str, Callable[[Path | None], Setting]] = {
    "digits": other_digits,
    "digits_cnn": other_digits_cnn,
    "fashion": other_fashion,
    "cifar": other_cifar,
}


@dataclass(frozen=True)
class DampedByLayer(EKFAC):
    """EKFAC with δ and a share of each layer's mean eigenvalue, without the L2 penalty, as kronfluence has it."""

    share: float = 0.1

    def _eigen_inverses(
        self, point: Point, plan: Plan, measured: Measured, found: Iterable[tuple[str, Tensor, Tensor, Tensor]]
    ) -> EigenInverses:
        blocks = {}
        for name, a, b, s in found:
            mean = float(s.sum()) / (len(s) * a.shape[-2] * b.shape[-2])  # outside a thin basis S is zero
            blocks[name] = damped(a, b, s, self.damping + self.share * mean)
        return EigenInverses(blocks)


def by_layer(damping: float, share: float) -> Any:
    """Scores with :class:`DampedByLayer`, and otherwise the defaults of ``hk.attribute``."""
    curvature = DampedByLayer(damping, fisher="rademacher", fallback="zero", share=share)
    return ours(hk.Implicit(curvature, Direct()))


def candidates(setting: Setting) -> dict[str, Any]:
    """What is tried, the quick ones first."""
    rule, found = setting.damping, dict[str, Any]()
    for d in (1e-2, 1e-3, 1e-4):
        found[f"EKFAC type-2, δ={d:g}"] = ours(hk.ekfac(d, fisher="type-2"))
    for fisher in hk.losses.DRAWN:
        for seed in range(4):
            found[f"EKFAC {fisher}, δ=0.0001, seed {seed}"] = ours(hk.ekfac(1e-4, fisher=fisher, seed=seed))
    for d in (1e-3, 1e-5):
        found[f"EKFAC rademacher, δ={d:g}"] = ours(hk.ekfac(d, fisher="rademacher"))
    for d in (1e-4, 1e-5):
        found[f"EKFAC by layer, δ={d:g} without the penalty"] = by_layer(d, 0.0)
    for part in (1.0, 0.3, 0.1, 0.03, 0.01):
        found[f"EKFAC by layer, {part:g} of the mean"] = by_layer(1e-8, part)
    found |= {f"kronfluence, damping {d}": kronfluence(d) for d in (None, 1e-3, 1e-5)}
    for times in (1.0, 2.0, 4.0, 8.0):
        d = times * rule
        found[f"PCG-10, δ={times:g}/τ"] = ours(hk.pcg(10, d, preconditioner=EKFAC(d, fisher="type-2")))
    for steps in (3, 10):
        for p in (1e-3, 1e-4):
            made = hk.pcg(steps, 2 * rule, preconditioner=EKFAC(p, fisher="type-2"))
            found[f"PCG-{steps}, δ=2/τ, preconditioner {p:g}"] = ours(made)
    for share in (0.25, 0.5, 0.75):
        for times in (0.25, 1.0):
            d = times * rule
            curvature = ShrunkGGN(d, share, fisher="type-2")
            made = hk.Implicit(curvature, CG(10), preconditioner=EKFAC(d, fisher="type-2"))
            found[f"shrunk {share:g}, δ={times:g}/τ"] = ours(made)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Retrain, score, print and record."""
    parser = lds.retraining_options(__doc__, SETTINGS)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="of the scored networks")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no candidate is begun after this time")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    start, record = time.monotonic(), Lines(options.out)
    setting = SETTINGS[options.setting](options.data).to(torch.device(options.device))
    setting = replace(setting, queries=(setting.queries[0][: options.queries], setting.queries[1][: options.queries]))
    masks = lds.halves(len(setting.train[0]), options.subsets)
    losses = lds.losses_after_retraining(setting, masks, options.repeats, options.together)
    rows = torch.arange(len(setting.train[0]), device=setting.train[0].device)
    networks = [train_many(setting, [rows], [seed])[0] for seed in options.seeds]
    print(f"{setting.name}: networks after {time.monotonic() - start:.0f} s", flush=True)
    tried = [
        (seed, model, *one)
        for one in candidates(setting).items()
        for seed, model in zip(options.seeds, networks, strict=True)
    ]
    for seed, model, name, score in tried:
        late = time.monotonic() > start + options.seconds
        if late or (options.only and not any(text in name for text in options.only)):
            continue
        began = time.perf_counter()
        try:
            with full_precision():
                mean, half = lds.lds(score(model, setting), masks, losses)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error!s:.300}", flush=True)
            continue
        row = {
            "setting": options.setting,
            "method": name,
            "seed": seed,
            "lds": round(mean, 4),
            "interval": round(half, 4),
        }
        record.append(row | {"subsets": options.subsets, "repeats": options.repeats, "queries": options.queries})
        print(f"{name:44} network {seed}: {mean:.3f} ± {half:.3f}   {time.perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
