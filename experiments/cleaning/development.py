"""Tables to develop ``clean`` on: what each learner of the final model is worth, and which one the method picks.

    python -m experiments.cleaning.development --rda rda --out development.jsonl
    python -m experiments.cleaning.development --summary development.jsonl

No set that the trust table keeps unseen is here, and seeds begin at 100, where that table has 0, 1 and 2. The method is
run once on a setting; then a network, a forest and boosted trees are fitted to the same cleaned labels, and test rows
score them. A line holds their accuracies and the evidence by which the method chooses, so that another rule can be
tried without running anything again. A finished setting is one line; a stopped run continues.
"""

from __future__ import annotations

import argparse
import warnings
import zlib
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch

from experiments import records
from experiments.cleaning import trust_data
from experiments.pieces import Lines
from hyperkron.cleaning import OURS, CleanConfig, learners
from hyperkron.cleaning.alternatives import fitted
from hyperkron.cleaning.arguments import read_parts
from hyperkron.cleaning.config import BOOSTED, FOREST, NETWORK
from hyperkron.cleaning.folder import RunFolder
from hyperkron.cleaning.given import Given
from hyperkron.cleaning.method import clean_labels
from hyperkron.cleaning.own import Own
from hyperkron.cleaning.progress import SilentProgress
from hyperkron.cleaning.run import CleaningRun
from hyperkron.cleaning.trainer import predict

SOURCES = {
    source.name: source
    for source in (
        *(trust_data.SOURCES[name] for name in ("vehicle", "vowel", "soybean", "satellite", "spam", "income")),
        trust_data.Source("letter", "table", "mlbench", item="LetterRecognition", label="lettr"),
        trust_data.Source("shuttle", "table", "mlbench", item="Shuttle"),
        trust_data.Source("ionosphere", "table", "mlbench", item="Ionosphere"),
        trust_data.Source("cancer", "table", "mlbench", item="BreastCancer"),
        trust_data.Source("musk", "table", "kernlab", item="musk"),
    )
}
MADE = ("boxes", "steps", "motif", "linear", "blobs")
"""Made-up tables: trees should win the first three, networks the others."""
ROWS, LEAST_PER_CLASS = 1500, 30
Job = tuple[str, str, int, int]


def made(name: str, count: int = 5000) -> pandas.DataFrame:
    """A table with the column ``label``."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    if name == "boxes":  # classes are boxes in 4 of 24 columns
        x = random.uniform(size=(count, 24))
        y = (x[:, :4] > np.array([0.35, 0.6, 0.5, 0.7])).sum(1) % 3
    elif name == "steps":  # sums of steps in 8 of 30 columns with long tails
        x = np.exp(1.5 * random.normal(size=(count, 30)))
        steps = (x[:, :8] > np.exp(0.5 * random.normal(size=8))) @ random.normal(size=(8, 4))
        y = (steps + 0.15 * random.normal(size=(count, 4))).argmax(1)
    elif name == "motif":  # words of two and three letters at fixed places among 40
        letters = random.integers(4, size=(count, 40))
        first, second = random.random(count) < 0.3, random.random(count) < 0.35
        letters[first, 18:20], letters[second, 21:23] = (2, 3), (0, 2)
        one = (letters[:, 18] == 2) & (letters[:, 19] == 3) & (letters[:, 17] != 0)
        two = (letters[:, 21] == 0) & ((letters[:, 22] == 2) | (letters[:, 20] == 1))
        x, y = np.array(list("acgt"))[letters], np.where(one, 0, np.where(two, 1, 2))
    elif name == "linear":  # all columns count a little
        x = random.normal(size=(count, 24))
        y = (x @ random.normal(size=(24, 3))).argmax(1)
    else:  # three clouds a class
        centre, cloud = 1.1 * random.normal(size=(12, 16)), random.integers(12, size=count)
        x, y = centre[cloud] + random.normal(size=(count, 16)), cloud % 4
    frame = pandas.DataFrame(x, columns=[f"column {i}" for i in range(x.shape[1])])
    return frame.assign(label=[f"class {k}" for k in y])


def pool(name: str, rda: Path) -> pandas.DataFrame:
    """A table as it is, without classes of under 30 rows; at most 6,000 rows."""
    if name in MADE:
        return made(name)
    kept = trust_data.PLACE / name / "pool.csv"
    if not kept.exists():
        frame = trust_data.r_table(SOURCES[name], rda).drop(columns="Id", errors="ignore")
        many = len(frame) > trust_data.POOL_ROWS
        frame = frame.sample(trust_data.POOL_ROWS, random_state=0) if many else frame
        kept.parent.mkdir(parents=True, exist_ok=True)
        frame.to_csv(kept, index=False)
    frame = pandas.read_csv(kept).astype({"label": str})
    return frame[frame.groupby("label")["label"].transform("size") >= LEAST_PER_CLASS].reset_index(drop=True)


def split(job: Job, rda: Path) -> list[pandas.DataFrame]:
    """Noisy, trusted and test rows."""
    name, noise, seed, per_class = job
    frame = pool(name, rda)
    names, gold = np.unique(frame.pop("label"), return_inverse=True)
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    at = trust_data.parts(gold, None, per_class, ROWS, random)
    labels = {**{part: gold[rows] for part, rows in at.items()}}
    labels["noisy"] = trust_data.corrupt(labels["noisy"], len(names), noise, random)
    return [
        frame.iloc[at[part]].reset_index(drop=True).assign(label=names[labels[part]])
        for part in ("noisy", "trusted", "test")
    ]


def measure(job: Job, rda: Path) -> dict[str, Any]:
    """Test accuracies of the three learners on one setting, and the evidence for trees against a network."""
    rows = split(job, rda)
    parts = read_parts(rows[0], rows[1], rows[2], {})
    config = CleanConfig(seed=1000 + job[2], compare=())
    folder, given = RunFolder(None, new=True), Given.of(rows[0], parts[0])
    run = CleaningRun(parts, Own.of(parts), config, folder, None, SilentProgress(), None, given)
    with run.working() as work:
        [outcome] = clean_labels([work])
        told = learners.learner_scores(work, outcome)
        bag = learners.row_scores(work, outcome, outcome.experts["cleaned forest"])
        everything = work.every
        q, models = outcome.final.posterior, dict[str, torch.nn.Module]()
        models |= {kind: learners.grow(kind, work, everything, q) for kind in (FOREST, BOOSTED)}
        [models[NETWORK]] = fitted(OURS, [replace(work, tree_model=False)], [outcome], "network")
        [models["rival"]] = fitted("boosted", [work], [outcome], "rival")
        test, labels = run.prepared.test, torch.as_tensor(parts[2].labels)
        assert test is not None
        right = {k: predict(m, test, torch.arange(len(test))).argmax(1) == labels for k, m in models.items()}
    return {
        "job": list(job),
        "test": {kind: float(found.double().mean()) for kind, found in right.items()},
        "evidence": {
            kind: _against(one - told[NETWORK], len(work.noisy))
            for kind, one in ((FOREST, told[FOREST]), (BOOSTED, told[BOOSTED]), ("out of bag", bag))
        },
    }


def _against(difference: torch.Tensor, noisy: int) -> dict[str, list[float]]:
    """Of the log-likelihoods of trees less those of networks: sum and its standard error, noisy and trusted rows."""
    found = {"noisy": difference[:noisy].double(), "trusted": difference[noisy:].double()}
    return {name: [float(d.sum()), float(d.std() * len(d) ** 0.5)] for name, d in found.items()}


def jobs(names: list[str], noises: list[str], seeds: list[int], sizes: list[int]) -> list[Job]:
    """Settings, all tables in turn."""
    return [(name, noise, seed, size) for seed, noise, size, name in product(seeds, noises, sizes, names)]


LEARNERS = (NETWORK, FOREST, BOOSTED)
HEADER = ("table", "settings", *LEARNERS, "rival: boosted", "chosen", "taken")


def chosen(row: dict[str, Any], margin: float = learners.MARGIN) -> str:
    """The learner that the method takes; of sums and standard errors, as ``learners.clearly_best`` of all rows."""
    total = {kind: sum(part[0] for part in row["evidence"][kind].values()) for kind in (FOREST, BOOSTED)}
    error = {kind: np.hypot(*(part[1] for part in row["evidence"][kind].values())) for kind in total}
    return max((k for k in total if total[k] > margin * error[k]), key=lambda k: total[k], default=NETWORK)


def summary(rows: list[dict[str, Any]]) -> str:
    """A line for each table, and what the choice gains over always taking a network."""
    rows = [{**row, "chosen": chosen(row)} for row in rows]
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["job"][0], []).append(row)
    lines = []
    for name, found in [*groups.items(), ("all", rows)]:
        mean = [np.mean([r["test"][kind] for r in found]) for kind in (*LEARNERS, "rival")]
        mean.append(np.mean([r["test"][r["chosen"]] for r in found]))
        taken = ", ".join(str(sum(r["chosen"] == kind for r in found)) for kind in LEARNERS)
        lines.append([name, str(len(found)), *(f"{100 * v:.1f}" for v in mean), taken])
    real = [row for row in rows if row["job"][0] not in MADE]
    told = [_gained("All", rows), *([_gained("Without made-up tables", real)] if real else [])]
    return "\n".join([records.markdown(HEADER, lines), "", *told])


def _gained(name: str, rows: list[dict[str, Any]]) -> str:
    """What switching to trees did to test accuracy."""
    gain = np.array([r["test"][r["chosen"]] - r["test"][NETWORK] for r in rows if r["chosen"] != NETWORK]) * 100
    lost = np.array([max(r["test"][k] for k in LEARNERS) - r["test"][r["chosen"]] for r in rows]) * 100
    if len(gain) < 2:
        return f"{name}: trees in {len(gain)} of {len(rows)}."
    half = 1.96 * gain.std(ddof=1) / len(gain) ** 0.5
    return (
        f"{name}: trees in {len(gain)} of {len(rows)}, {gain.mean():+.1f} ± {half:.1f} points (95 %), better in "
        f"{(gain > 0).sum()}, worse in {(gain < 0).sum()}. Below the best of the three: {lost.mean():.2f} points."
    )


def main() -> None:
    """Measure what is missing, or sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join((*MADE, *SOURCES)), help="names with commas")
    parser.add_argument("--noises", default=",".join(trust_data.NOISES))
    parser.add_argument("--seeds", default="100,101")
    parser.add_argument("--per-class", default=",".join(map(str, trust_data.PER_CLASS)))
    parser.add_argument("--rda", type=Path, default=Path("rda"), help="folder with the unpacked R packages")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--summary", type=Path, help="sum up this file and stop")
    options = parser.parse_args()
    if options.summary is not None:
        print(summary(Lines(options.summary).rows))
        return
    if options.out is None:
        parser.error("--out FILE says where the results go, --summary FILE which to sum up; give one of them.")
    lines = Lines(options.out)
    done = [row["job"] for row in lines.rows]
    numbers = ([int(v) for v in text.split(",")] for text in (options.seeds, options.per_class))
    for job in jobs(options.sets.split(","), options.noises.split(","), *numbers):
        if list(job) not in done:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                row = records.rounded(records.plain(measure(job, options.rda)))
            lines.append(dict(row))
            print(row["job"], chosen(row), row["test"], flush=True)


if __name__ == "__main__":
    main()
