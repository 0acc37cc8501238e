"""How much of table 5's scatter is that of the network which gives the verdict, and not of the added rows?

Every attack is made once, with the step size that was chosen for it; then several networks, which differ in their seed
alone, are trained from scratch on clean and added rows, and as many on the clean rows. The attacks are made again with
the seeds of table 5, and differ from those there (a GPU adds in another order each time). Where all networks are
recorded the verdict of table 5 takes their mean.

    python -m experiments.paper.poisoning_networks --device cuda --workers 6 --limit-minutes 9   # continues a run
    python -m experiments.paper.poisoning_networks --table                                        # the recorded ones

With ``--arm printed`` the attacks have the step sizes that the paper prints, and as many steps:

    python -m experiments.paper.poisoning_networks --arm printed --model LR --networks 1 --device cuda --workers 6
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from experiments import records
from experiments.paper import poisoning
from experiments.paper import poisoning_attacks as attacks
from experiments.paper.poisoning_attacks import Poison
from experiments.paper.poisoning_page import AS_PRINTED, NETWORKS
from experiments.paper.recipe import Result, Scale
from experiments.paper.tuning import Setting
from experiments.pieces import Lines
from experiments.seeds import shown
from experiments.workers import share

METHODS = ("clean", *poisoning.DECISIVE)
EACH = 5
"""Networks trained on the same rows."""
FILES = {"own": NETWORKS, "printed": AS_PRINTED}
"""Where the networks of an arm are recorded: of attacks with their own step sizes, and with the printed ones."""


class Task(NamedTuple):
    """A network: what was added to its rows, the seed of rows and attack, and its number among the networks."""

    method: str
    seed: int
    network: int


def missing(done: set[Task], seeds: Sequence[int], networks: int) -> Iterator[Task]:
    """The networks that can be trained now: the first of an attack makes the rows for the others."""
    for network in range(networks):
        for seed in seeds:
            for method in METHODS:
                task = Task(method, seed, network)
                if task not in done and (network == 0 or task._replace(network=0) in done):
                    yield task


class Runner:
    """Carries out tasks; rows of attacks are kept in a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, self.arm, self.folder = options.model, options.arm, options.rows
        size: Scale = "paper" if self.arm == "printed" else "small"
        self.settings = poisoning.SETTINGS["smoke" if options.toy else size]
        job = SimpleNamespace(settings=self.settings, data=options.data, device=torch.device(options.device))
        self.source = poisoning.Source(job)  # type: ignore[arg-type]  # it needs these three of a job
        self.tuned = {} if options.toy or self.arm == "printed" else chosen(self.model)

    def poison(self, method: str, seed: int) -> Poison | None:
        """The added rows: those of the folder, or those of an attack, which is saved on its way."""
        if method == "clean":
            return None
        printed = self.arm == "printed"
        name = f"{self.model}-{method}-{seed}{'-printed' * printed}"
        split, place = self.source.split(self.model, seed), self.folder / name
        kept = place.with_name(f"{place.name}.safetensors")
        if kept.exists():
            with safe_open(kept, "pt") as file:
                x, facts = file.get_tensor("x"), json.loads(file.metadata()["facts"])
            return Poison((x.to(split.device), split.origin[1]), facts)
        setting = self.tuned.get(method, {"inner": 0.1, "outer": 1e-5, "damping": 1e-3})
        if printed:
            setting = {name: value for name, (value,) in poisoning.PRINTED.items()}
        case, starts = self.source.case(self.model), self.source.starts(self.model)
        made = attacks.bilevel(case, split, starts, method, setting, seed, relative=not printed, folder=place)
        save_file({"x": made.rows[0].contiguous()}, kept, {"facts": json.dumps(made.facts)})
        shutil.rmtree(place, ignore_errors=True)
        return made

    def __call__(self, task: Task) -> dict[str, Any]:
        """Held-out and test accuracy of a network, and of the first what became of λ."""
        case, split = self.source.case(self.model), self.source.split(self.model, task.seed)
        with poisoning.precision(case):
            made = self.poison(task.method, task.seed)
            found = attacks.judged(case, split, made, task.seed + 1000 * task.network, test=True)
        facts = {} if made is None or task.network else made.facts
        return {"model": self.model, **task._asdict(), **facts, **found}


def chosen(model: str) -> dict[str, Setting]:
    """The settings of the recorded attacks."""
    arms = Result.read(records.RESULTS / "paper" / "poisoning-small.json").figures["models"][model]["arms"]["own"]
    return {name: arms[name]["setting"] for name in poisoning.DECISIVE}


def table(rows: list[dict[str, Any]]) -> str:
    """Test accuracy of all networks, and the drop: mean ± half a 95 % interval over networks, by attack."""
    columns = ["added rows", "seed", "networks", "test accuracy in %", "drop in points"]
    lines = []
    tests = {(row["method"], row["seed"], row["network"]): row["test"] for row in rows}
    for method, seed in dict.fromkeys((row["method"], row["seed"]) for row in rows):
        own = {k: test for (name, of, k), test in tests.items() if (name, of) == (method, seed)}
        drops = [tests["clean", seed, k] - test for k, test in own.items() if ("clean", seed, k) in tests]
        drop = "–" if method == "clean" else shown(drops, 2)
        lines.append([method, str(seed), str(len(own)), ", ".join(f"{x:.1f}" for x in own.values()), drop])
    return records.markdown(columns, lines) if rows else ""


def _worker(options: argparse.Namespace) -> Callable[[Task], dict[str, Any]]:
    return Runner(options)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not recorded yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="print the table of the recorded networks")
    parser.add_argument("--model", choices=poisoning.SETTINGS["small"].cases, default="CNN")
    parser.add_argument(
        "--arm", choices=FILES, default="own", help="step sizes of λ: each method's own, or printed ones"
    )
    parser.add_argument("--toy", action="store_true", help="scikit-learn's digits in place of the real data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: those of table 5")
    parser.add_argument("--networks", type=int, default=EACH, help=f"on the same rows; default: {EACH}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path, help="folder of the datasets")
    parser.add_argument("--rows", type=Path, default=Path("runs/poisoning-networks"), help="folder of attacks")
    parser.add_argument("--workers", type=int, default=1, help="networks that share the device; default: 1")
    parser.add_argument("--limit-minutes", type=float, default=1e9, help="no network begins after this time")
    parser.add_argument("--out", type=Path, help="file of the networks; finished ones are kept")
    options = parser.parse_args(arguments)
    lines = Lines(options.out or FILES[options.arm])
    if options.table:
        print(table([row for row in lines.rows if row["model"] == options.model]))
        return
    options.rows.mkdir(parents=True, exist_ok=True)

    def left() -> list[tuple[list[Any], Task]]:
        done = {Task(row["method"], row["seed"], row["network"]) for row in lines.rows if row["model"] == options.model}
        return [([*task], task) for task in missing(done, options.seeds, options.networks)]

    def keep(name: list[Any], row: dict[str, Any], seconds: float, busy: float) -> None:
        lines.append({**row, "seconds": round(seconds, 1), "workers": options.workers})
        print(f"{' '.join(map(str, name))}: {row['test']:.2f} %", flush=True)

    deadline = time.monotonic() + 60 * options.limit_minutes
    share(options.workers, partial(_worker, options), left, keep, late=lambda: time.monotonic() > deadline)


if __name__ == "__main__":
    main()
