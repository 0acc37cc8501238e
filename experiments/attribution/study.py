"""The whole comparison of attributions in pieces: retraining, scores, removal and speed, on one device.

    python -m experiments.attribution.study --data data/lds --device cuda --processes 6 --minutes 5 --out pieces.jsonl

Every finished piece is a line of the file, and a repeated call continues.

- ``retrain``: losses of the queries after training on random halves (``lds.py``).
- ``score``: the linear datamodelling score of a method, once all halves of its setting are there.
- ``paired``: that of two methods with the same few queries, where many would take too long.
- ``removal``: the 1 % most helpful rows of a query are left out and networks are trained again: by how much does its
  loss rise? Rows by a method, or at random.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.attribution import lds, speed
from experiments.attribution.peers import LAYERS, methods
from experiments.attribution.settings import SETTINGS, Setting, train_many
from experiments.pieces import Cells
from experiments.workers import share
from hyperkron.kernels.split_products import full_precision

SUBSETS, REPEATS, GROUP = 80, 4, 20
"""Halves, networks for each, and halves in a piece."""
QUERIES, SHARE, RANDOM = 20, 0.01, "random"
"""Of the removal test: queries, the share of rows that is removed, and the name of the choice by chance."""
REMOVERS = (
    "identity (gradient products)",
    "EKFAC, δ=0.0001",
    "PCG-10, δ by the rule",
    "kronfluence, damping None",
    RANDOM,
)
LARGE = ("trec_minilm", "cifar_cnn")
"""Settings in which 50 iterations of CG are compared with a few queries only."""
SOLVED, FEW = ("PCG-10, δ by the rule", "CG-50, δ by the rule"), 20
"""The methods that are compared there, and with how many queries."""
SLOW = ("CG-50, δ by the rule", "PCG-10, δ=0.0001")
"""Methods that are left out there."""
RIVALS = ("EKFAC, δ=0.0001", "kronfluence, damping None")
"""Methods of which the score of each query is on record everywhere, for the interval of their difference."""
LONG = {"CG-50": 90.0, "CG-10": 40.0, "PCG-10": 45.0, "agreement": 30.0}
"""Seconds that a piece may take, by a part of its name; others take 20."""
SPEED = 110.0
"""Seconds for the comparison of speed."""


def losses_of(networks: list[nn.Module], queries: tuple[Tensor, Tensor]) -> Tensor:
    """(networks, queries)."""
    with torch.no_grad():
        return torch.stack([F.cross_entropy(n(queries[0]), queries[1], reduction="none") for n in networks])


def _with_queries(setting: Setting, count: int | None) -> Setting:
    return replace(setting, queries=(setting.queries[0][:count], setting.queries[1][:count]))


class Worker:
    """Carries out pieces; keeps the data and the network of the last setting."""

    def __init__(self, data: Path | None, device: str, settings: dict[str, Any] | None = None) -> None:
        self.data, self.device, self.settings = data, torch.device(device), settings or SETTINGS
        self.name = ""
        self.model: nn.Module | None = None

    def __call__(self, task: tuple[list[Any], Any]) -> dict[str, Any]:
        """The value of a piece, or why it failed."""
        try:
            return self._carry_out(*task)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error!s:.200}"}

    def _carry_out(self, key: list[Any], given: Any) -> dict[str, Any]:
        kind, name, what = key
        if name != self.name:
            self.setting: Setting = self.settings[name](self.data).to(self.device)
            self.name, self.model = name, None
        if kind == "retrain":
            torch.set_float32_matmul_precision("high")
            masks = given["masks"]
            found = lds.losses_after_retraining(self.setting, masks, given["repeats"], len(masks) * given["repeats"])
            return {"losses": [[round(x, 6) for x in row] for row in found.tolist()]}
        with full_precision():
            if kind == "removal":
                return self._removal(what, given)
            if kind == "paired":
                return {method: self._score(method, given, FEW) for method in what.split(" | ")}
            return self._score(what, given)

    def _score(self, method: str, given: dict[str, Any], count: int | None = None) -> dict[str, Any]:
        """The linear datamodelling score of a method with the first ``count`` queries, and that of each query."""
        began = time.perf_counter()
        scores = methods("all")[method](self._scored(), _with_queries(self.setting, count)).cpu()
        seconds = time.perf_counter() - began
        each = lds.correlations(scores, given["masks"], given["losses"][:, :count])
        mean, half = lds.summary(each)
        return {"lds": mean, "interval": half, "seconds": seconds, "each": [round(x, 5) for x in each.tolist()]}

    def _scored(self) -> nn.Module:
        """The network whose predictions are explained."""
        if self.model is None:
            rows = torch.arange(len(self.setting.train[0]), device=self.device)
            self.model = train_many(self.setting, [rows], [0])[0]
        return self.model

    def _removal(self, what: str, given: dict[str, Any]) -> dict[str, Any]:
        setting, count, repeats = self.setting, given["queries"], given["repeats"]
        total = len(setting.train[0])
        drop = max(1, round(SHARE * total))
        if what == RANDOM:
            scores = torch.rand(count, total, generator=torch.Generator().manual_seed(0))
        else:
            scores = methods("all")[what](self._scored(), _with_queries(setting, count)).cpu()
        everything = torch.arange(total)
        subsets = [everything]
        for row in scores:
            keep = torch.ones(total, dtype=torch.bool)
            keep[row.topk(drop).indices] = False
            subsets.append(everything[keep])
        jobs = [subset.to(self.device) for subset in subsets for _ in range(repeats)]
        seeds = [5000 + repeat for _ in subsets for repeat in range(repeats)]
        queries = setting.queries[0][:count], setting.queries[1][:count]
        found = losses_of(train_many(setting, jobs, seeds), queries).reshape(len(subsets), repeats, count).mean(1)
        return {"rise": (found[1:].diagonal() - found[0]).tolist(), "before": found[0].tolist()}


class Study:
    """Which pieces there are, and which can be carried out now."""

    def __init__(self, cells: Cells, names: list[str], subsets: int, repeats: int, only: list[str]) -> None:
        self.cells, self.names, self.subsets, self.repeats, self.only = cells, names, subsets, repeats, only
        self.failed: set[tuple[Any, ...]] = set()

    def masks(self, name: str) -> Tensor:
        """The halves of a setting."""
        return lds.halves(ROWS[name], self.subsets)

    def ready(self, left: float = float("inf")) -> Iterator[tuple[list[Any], Any]]:
        """The pieces that are missing, can be carried out now, and fit into the seconds that are left."""
        seen = set(self.failed)
        for key, given in self._all():
            needed = next((s for part, s in LONG.items() if part in str(key[2])), 20.0)
            if not self._done(key) and needed < left and tuple(key) not in seen:
                seen.add(tuple(key))
                yield key, (key, given)

    def _done(self, key: list[Any]) -> bool:
        found = self.cells.get(key)
        return found is not None and (key[0] != "score" or key[2] not in RIVALS or "each" in found)

    def _all(self) -> Iterator[tuple[list[Any], Any]]:
        for name in self.names:
            for first in range(0, self.subsets, GROUP):
                masks = self.masks(name)[first : first + GROUP]
                yield ["retrain", name, first], {"masks": masks, "repeats": self.repeats}
        wanted = [m for m in methods("all") if not self.only or any(text in m for text in self.only)]
        known = {n: {"masks": self.masks(n), "losses": x} for n in self.names if (x := self.losses(n)) is not None}
        large = [name for name in LARGE if name in known]
        for name in large:
            yield from ((["score", name, method], known[name]) for method in RIVALS if method in wanted)
            if set(SOLVED) <= set(wanted):
                yield ["paired", name, " | ".join(SOLVED)], known[name]
        for name in [*large, *(name for name in known if name not in LARGE)]:
            for method in wanted:
                if (name not in LARGE or method not in SLOW) and (name == "trec_minilm" or LAYERS not in method):
                    yield ["score", name, method], known[name]
        for method in REMOVERS:
            for name in ("digits_mlp", "fashion_mlp", "trec_minilm"):
                if name in self.names and (method in wanted or method == RANDOM):
                    yield ["removal", name, method], {"queries": QUERIES, "repeats": self.repeats}

    def losses(self, name: str) -> Tensor | None:
        """Of all halves; ``None`` while some are missing."""
        parts = [self.cells.get(["retrain", name, first]) for first in range(0, self.subsets, GROUP)]
        return None if None in parts else torch.tensor([row for part in parts if part for row in part["losses"]])


ROWS = {"digits_mlp": 1200, "digits_cnn": 1200, "fashion_mlp": 5000, "cifar_cnn": 5000, "trec_minilm": 2000}
"""Training rows of each setting."""


def main(arguments: list[str] | None = None) -> None:
    """Measure the speed on the idle machine, then carry out what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--only", nargs="*", default=[], help="methods whose name contains one of these")
    parser.add_argument("--subsets", type=int, default=SUBSETS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    cells = Cells(options.out, {"subsets": options.subsets, "repeats": options.repeats, "version": 2})
    study = Study(cells, options.settings, options.subsets, options.repeats, options.only)
    end = time.monotonic() + 60 * options.minutes

    def keep(key: list[Any], value: Any, seconds: float, busy: float) -> None:
        if "error" in value:
            study.failed.add(tuple(key))  # not tried again in this run, and not recorded
        else:
            cells.put(key, value, seconds, busy)
        told = {k: v for k, v in value.items() if k != "losses"}
        print(f"{seconds:6.1f} s  {' '.join(map(str, key))}  {json.dumps(told)[:200]}", flush=True)

    if not options.no_speed:
        speed.measure(cells, options.data, options.device, min(end, time.monotonic() + SPEED), keep)
    share(
        options.processes,
        functools.partial(Worker, options.data, options.device),
        lambda: study.ready(end - time.monotonic()),
        keep,
        late=lambda: time.monotonic() > end,
        near=lambda task: task[0][1],
    )


if __name__ == "__main__":
    main()
