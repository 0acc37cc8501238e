"""Do the differences between methods hold for other networks? Several scored networks for each setting.

    python -m experiments.attribution.networks --data data

Networks with other seeds are trained on all rows and scored by each method. The losses of retrained networks are on
record (``study.py``), so only the scored networks are trained. Each group of methods with each network is a line of the
record, and a repeated call continues. Intervals are over networks (Student's t, 95 %); those over queries, of the mean
over networks, are in brackets.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments import records
from experiments.attribution import explicit, lds
from experiments.attribution.draws import retrained
from experiments.attribution.peers import AGREEING, DEFAULT, agreeing, kronfluence_with, methods
from experiments.attribution.settings import SETTINGS, Setting, train_many
from experiments.pieces import Cells
from experiments.seeds import interval
from hyperkron.kernels.split_products import full_precision

RESULT = Path(__file__).parents[1] / "results" / "attribution" / "networks.jsonl"
SEEDS = (1, 2, 3, 4, 5)
"""Of the scored networks; those of earlier tables have 0."""
KRONFLUENCE = {f"kronfluence, damping {d}": d for d in (None, 1e-3, 1e-5)}
SHRUNK = {k: f"PCG-{k}, shrunk, δ by the rule" for k in (3, 10)}
BY_ROWS = ("digits_cnn", "cifar_cnn")
"""Settings in which PCG has the rows of G in memory: products by passes through convolutions are slow on a CPU."""
Scorer = Callable[[nn.Module, Setting, str], dict[str, Tensor]]
"""The scores by the names of methods, of a network in a setting and the name of that."""
VERSION = {"version": 1}
"""Of the pieces on record."""


def by_methods(*names: str) -> Scorer:
    """The scores of these methods of ``peers.py``."""
    return lambda model, setting, _: {name: methods("all")[name](model, setting) for name in names}


def by_kronfluence(model: nn.Module, setting: Setting, _: str) -> dict[str, Tensor]:
    """The scores of kronfluence with each damping."""
    found = kronfluence_with(list(KRONFLUENCE.values()))(model, setting)
    return {name: found[damping] for name, damping in KRONFLUENCE.items()}


def by_pcg(steps: int, model: nn.Module, setting: Setting, name: str) -> dict[str, Tensor]:
    """The scores of PCG with the shrunk matrix."""
    known = explicit.solvers(model, setting) if name in BY_ROWS else methods("all")
    return {SHRUNK[steps]: known[SHRUNK[steps]](model, setting)}


def by_agreement(model: nn.Module, setting: Setting, name: str) -> dict[str, Tensor]:
    """The scores of EKFAC with the damping that agrees most with PCG-10."""
    known = explicit.solvers(model, setting) if name in BY_ROWS else methods("all")
    return {AGREEING: agreeing(known["PCG-10, δ by the rule"])(model, setting)}


GROUPS: dict[str, Scorer] = {
    "EKFAC": by_methods(DEFAULT),
    "kronfluence": by_kronfluence,
    "gradients": by_methods("identity (gradient products)", "gradient cosine"),
    "TRAK": by_methods("TRAK, one network"),
    "PCG-3": functools.partial(by_pcg, 3),
    "PCG-10": functools.partial(by_pcg, 10),
    "agreement": by_agreement,
}
"""Methods that are scored together."""


def scored(cells: Cells, name: str, setting: Setting, seed: int, groups: list[str]) -> None:
    """Train one network, unless all is on record, and write down the correlation of each query by each method."""
    model, losses = None, retrained(name)
    rows = torch.arange(len(setting.train[0]))
    masks = lds.halves(len(rows), len(losses))
    for group in groups:
        if cells.get([name, seed, group]) is not None:
            continue
        model = train_many(setting, [rows], [seed])[0] if model is None else model
        began = time.perf_counter()
        torch.manual_seed(seed)
        with full_precision():
            found = GROUPS[group](model, setting, name)
        seconds = time.perf_counter() - began
        each = {method: lds.correlations(scores, masks, losses) for method, scores in found.items()}
        rounded = {method: [round(x, 4) for x in values.tolist()] for method, values in each.items()}
        cells.put([name, seed, group], rounded, seconds)
        told = ", ".join(f"{method} {float(values.mean()):.3f}" for method, values in each.items())
        print(f"{name}, network {seed}: {told} ({seconds:.0f} s)", flush=True)


def correlations(cells: Cells, name: str) -> dict[str, dict[int, Tensor]]:
    """By method and seed of the network: the rank correlation of each query."""
    found: dict[str, dict[int, Tensor]] = {}
    for row in cells.found.values():
        setting, seed, _ = row["key"]
        if setting == name:
            for method, each in row["value"].items():
                found.setdefault(method, {})[seed] = torch.tensor(each)
    return found


def told(networks: list[Tensor], sign: str = "") -> str:
    """The mean, half of its interval over networks, and that over queries of the mean over networks."""
    mean, half = interval([float(each.mean()) for each in networks])
    return f"{mean:{sign}.3f} ± {half:.3f} ({lds.summary(torch.stack(networks).mean(0))[1]:.3f})"


def difference(found: dict[str, dict[int, Tensor]], method: str, base: str) -> str:
    """The mean difference of the networks that both have scored."""
    both = sorted(found.get(method, {}).keys() & found.get(base, {}).keys())
    return told([found[method][seed] - found[base][seed] for seed in both], "+") if len(both) > 1 else ""


def table(cells: Cells) -> str:
    """LDS of each method in each setting, and the differences to kronfluence."""
    by_name = {name: found for name in SETTINGS if (found := correlations(cells, name))}
    known = dict.fromkeys(method for found in by_name.values() for method in found)
    lines = [f"| method | {' | '.join(by_name)} |", "| --- " * (1 + len(by_name)) + "|"]
    for method in known:
        texts = [told(list(found[method].values())) if method in found else "" for found in by_name.values()]
        lines.append(f"| {method} | {' | '.join(texts)} |")
    for base in KRONFLUENCE:
        for method in (DEFAULT, AGREEING, SHRUNK[3]):
            texts = [difference(found, method, base) for found in by_name.values()]
            lines.append(f"| {method} − {base} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Score what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--settings", nargs="*", default=list(SETTINGS)[:4], choices=list(SETTINGS))
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), choices=list(GROUPS))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    cells = Cells(options.out, VERSION)
    missing = [
        (name, seed)
        for name in options.settings
        for seed in options.seeds
        if any(cells.get([name, seed, group]) is None for group in options.groups)
    ]
    if missing:
        about = {"command": records.command(), "hardware": records.hardware("cpu"), "versions": records.versions()}
        cells.lines.append(about)
    for name, seed in missing:
        scored(cells, name, SETTINGS[name](options.data), seed, options.groups)
    print(table(cells))


if __name__ == "__main__":
    main()
