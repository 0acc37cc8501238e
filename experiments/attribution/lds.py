"""The linear datamodelling score: do the scores of a subset's examples foretell the queries' losses after retraining?

    python -m experiments.attribution.lds --setting digits_mlp [--subsets 80 --repeats 4 --methods small|all]

Half of the training rows are drawn at random, several times; on each half several networks are trained. The score of a
method is the rank correlation, over the halves, between Σ_{n in the half} score(q, n) and minus the mean loss of query
q, averaged over queries (Park et al., 2023); the interval is over queries.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.attribution.peers import methods
from experiments.attribution.settings import SETTINGS, Setting, train_many


def halves(count: int, subsets: int) -> Tensor:
    """Which rows each half has, (subsets, rows)."""
    random = torch.Generator().manual_seed(1)
    found = torch.zeros(subsets, count, dtype=torch.bool)
    for mask in found:
        mask[torch.randperm(count, generator=random)[: count // 2]] = True
    return found


def losses_after_retraining(setting: Setting, masks: Tensor, repeats: int, together: int) -> Tensor:
    """The mean loss of each query over networks retrained on each half: (subsets, queries)."""
    device = setting.train[0].device
    jobs = [(i, repeat) for i in range(len(masks)) for repeat in range(repeats)]
    total = torch.zeros(len(masks), len(setting.queries[0]), device=device)
    for start in range(0, len(jobs), together):
        part = jobs[start : start + together]
        rows = [masks[i].nonzero()[:, 0].to(device) for i, _ in part]
        networks = train_many(setting, rows, [1000 + 97 * i + repeat for i, repeat in part])
        with torch.no_grad():
            for (i, _), network in zip(part, networks, strict=True):
                total[i] += F.cross_entropy(network(setting.queries[0]), setting.queries[1], reduction="none") / repeats
    return total


def ranks(x: Tensor) -> Tensor:
    """The rank of each entry in its column."""
    return x.argsort(0).argsort(0).double()


def correlations(scores: Tensor, masks: Tensor, losses: Tensor) -> Tensor:
    """The rank correlation of each query."""
    told = (scores.double().cpu() @ masks.double().T).T
    a, b = ranks(told), ranks(-losses.cpu())
    a, b = (x - x.mean(0) for x in (a, b))
    return (a * b).sum(0) / (a.norm(dim=0) * b.norm(dim=0)).clamp(min=1e-12)


def summary(each: Tensor) -> tuple[float, float]:
    """The mean over queries, and half of its 95 % interval."""
    return float(each.mean()), float(1.96 * each.std() / len(each) ** 0.5)


def lds(scores: Tensor, masks: Tensor, losses: Tensor) -> tuple[float, float]:
    """The mean rank correlation over queries, and half of its 95 % interval."""
    return summary(correlations(scores, masks, losses))


def retraining_options(description: str | None, settings: Iterable[str]) -> argparse.ArgumentParser:
    """The options of a program that retrains networks of a setting and scores it by several methods."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=list(settings), required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--subsets", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--together", type=int, default=80, help="networks trained at once")
    parser.add_argument("--only", nargs="*", default=[], help="methods whose name contains one of these")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Retrain, score by every method, print and record."""
    parser = retraining_options(__doc__, SETTINGS)
    parser.add_argument("--methods", choices=("small", "all"), default="small")
    parser.add_argument("--out", type=Path, help="append a JSON line for each method")
    options = parser.parse_args(arguments)
    setting = SETTINGS[options.setting](options.data).to(torch.device(options.device))
    masks = halves(len(setting.train[0]), options.subsets)
    began = time.perf_counter()
    losses = losses_after_retraining(setting, masks, options.repeats, options.together)
    everything = torch.arange(len(setting.train[0]), device=setting.train[0].device)
    (model,) = train_many(setting, [everything], [0])
    with torch.no_grad():
        right = (model(setting.queries[0]).argmax(1) == setting.queries[1]).float().mean()
    print(
        f"{setting.name}: {len(masks) * options.repeats} networks in {time.perf_counter() - began:.0f} s; "
        f"accuracy on the queries {100 * right:.0f} %",
        flush=True,
    )
    for name, score in methods(options.methods).items():
        if options.only and not any(text in name for text in options.only):
            continue
        _sync(options.device)
        began = time.perf_counter()
        try:
            scores = score(model, setting)
            _sync(options.device)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {error!s:.200}", flush=True)
            continue
        seconds = time.perf_counter() - began
        mean, half = lds(scores, masks, losses)
        print(f"{name:32} {mean:.3f} ± {half:.3f}   {seconds:.2f} s", flush=True)
        if options.out:
            row = {
                "setting": options.setting,
                "method": name,
                "lds": mean,
                "interval": half,
                "seconds": seconds,
                "subsets": options.subsets,
                "repeats": options.repeats,
                "device": options.device,
            }
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def _sync(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
