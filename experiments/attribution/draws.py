"""Does it matter that EKFAC's spectrum is made of the drawn vectors that B is made of?

    python -m experiments.attribution.draws --data data --settings digits_cnn cifar_cnn --out draws.jsonl

On a CPU ``hk.attribute`` uses one drawn vector per example for both, but for layers with a single row per example: most
of a backward pass less. Where gradients are not kept, the spectrum has a pass and vectors of its own. Both are scored
here with the same network and seeds: the linear datamodelling score against the retrained networks on record
(``study.py``), and the distance to scores with exact vectors. With kronfluence, where it can be imported.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from experiments.attribution import lds
from experiments.attribution.peers import kronfluence, loss
from experiments.attribution.settings import SETTINGS, Setting, train_many
from experiments.pieces import Lines
from hyperkron.curvature import EKFAC
from hyperkron.curvature.kfac import kept

RECORD = Path(__file__).parents[1] / "results" / "attribution" / "pieces.jsonl"
BATCH = 256
"""Rows at a time, as by default."""


def retrained(name: str) -> Tensor:
    """The losses of queries after retraining on each half, from the record: (subsets, queries)."""
    parts = {row["key"][2]: row["value"]["losses"] for row in Lines(RECORD).rows if row["key"][:2] == ["retrain", name]}
    return torch.tensor([losses for first in sorted(parts) for losses in parts[first]])


def scores(model: nn.Module, setting: Setting, fisher: Any, seed: int = 0) -> Tensor:
    """By the default of ``hk.attribute`` but for ``fisher`` and ``seed``."""
    method = hk.Implicit(EKFAC(1e-4, fisher=fisher, fallback="zero", seed=seed), hk.solvers.Direct())
    return hk.attribute(loss, model, setting.train, setting.queries, method=method, batch_size=BATCH).scores


def with_own_vectors(model: nn.Module, setting: Setting, seed: int) -> Tensor:
    """The same with a pass and drawn vectors of its own for the spectrum, as where gradients are not kept."""
    most, kept.MOST = kept.MOST, 0
    try:
        return scores(model, setting, "rademacher", seed)
    finally:
        kept.MOST = most


def compare(name: str, setting: Setting, seeds: int) -> dict[str, Any]:
    """LDS and distance of both, means over seeds; the interval of the difference is over queries."""
    rows = torch.arange(len(setting.train[0]))
    model = train_many(setting, [rows], [0])[0]
    losses = retrained(name)
    masks = lds.halves(len(rows), len(losses))
    exact = scores(model, setting, "type-2")
    found: dict[str, Any] = {"setting": name, "seeds": seeds, "exact": lds.lds(exact, masks, losses)}
    each: dict[str, Tensor] = {}
    ways = {"shared": lambda seed: scores(model, setting, "rademacher", seed)}
    ways["own"] = lambda seed: with_own_vectors(model, setting, seed)
    for way, score in ways.items():
        made = [score(seed) for seed in range(seeds)]
        distances = torch.tensor([float(1 - F.cosine_similarity(one, exact).mean()) for one in made])
        each[way] = torch.stack([lds.correlations(one, masks, losses) for one in made]).mean(0)
        error = float(distances.std() / seeds**0.5)
        found[way] = {"lds": lds.summary(each[way]), "distance": float(distances.mean()), "error": error}
    found["shared - own"] = lds.summary(each["shared"] - each["own"])
    if find_spec("kronfluence") is not None:
        torch.manual_seed(0)
        peer = lds.correlations(kronfluence(None)(model, setting), masks, losses)
        found["kronfluence"] = lds.summary(peer)
        found["shared - kronfluence"] = lds.summary(each["shared"] - peer)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Compare on each setting, and append a line for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--settings", nargs="*", default=["digits_mlp", "digits_cnn"], choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name in options.settings:
        line = json.dumps(compare(name, SETTINGS[name](options.data), options.seeds))
        print(line, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
