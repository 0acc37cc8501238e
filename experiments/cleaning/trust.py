"""Is every number of ``hyperkron clean`` true? One run for each data set, seed and number of trusted rows.

    python -m experiments.cleaning.trust --sets development --seeds 0 --limit-minutes 5 --out before.jsonl
    python -m experiments.cleaning.trust --sets all --seeds 0,1,2 --workers 2 --out trust.jsonl
    python -m experiments.cleaning.trust_summary trust.jsonl

``clean`` gets noisy and trusted rows; the test rows only score the final models of all candidates. The data is made by
``experiments.cleaning.trust_data``. A finished run is one line of the file; a stopped run continues.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch

import hyperkron
from experiments import records
from experiments.cleaning import trust_data
from experiments.cleaning.trust_data import DEVELOPMENT, PER_CLASS, SOURCES, UNSEEN, Source, Split
from experiments.pieces import Lines
from experiments.workers import share
from hyperkron.cleaning import CleanConfig, clean
from hyperkron.cleaning.models import small_cnn

BINS = 10
SURE = 0.99

Job = tuple[str, int, int]


def average_precision(wrong: np.ndarray, score: np.ndarray) -> float:
    """Of the ranking by ``score``, highest first."""
    hit = wrong[np.argsort(-score, kind="stable")].astype(float)
    return float((hit.cumsum() / np.arange(1, len(hit) + 1) * hit).sum() / hit.sum())


def reliability(wrong: np.ndarray, p: np.ndarray) -> dict[str, Any]:
    """How far the probabilities of an error can be believed.

    Returns:
        ``error``: Σ_b n_b/n |mean p − share wrong| over 10 bins of equal mass; ``bins``: rows, Σp and wrong rows of
        each tenth of [0, 1], to be added up over runs; ``sure``: wrong rows among those above 99 %, and their number.
    """
    order = np.argsort(p, kind="stable")
    chunks = [c for c in np.array_split(order, BINS) if len(c)]
    error = sum(abs(float(p[c].sum() - wrong[c].sum())) for c in chunks) / len(p)
    at = np.minimum((p * BINS).astype(int), BINS - 1)
    bins = [[int((at == b).sum()), float(p[at == b].sum()), int(wrong[at == b].sum())] for b in range(BINS)]
    sure = p > SURE
    return {"error": error, "bins": bins, "sure": [int(wrong[sure].sum()), int(sure.sum())]}


def features(split: Split, kind: str, table: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Numbers for scikit-learn of noisy, trusted and test rows: one-hot columns, embeddings, or pixels."""
    sides = [split.train, split.trusted, split.test]
    if kind == "image":
        return [side[0].reshape(len(side[0]), -1) / 255.0 for side in sides]
    if kind == "text":
        return [np.stack([table[t] for t in side["text"]]).astype(np.float32) for side in sides]
    frame = pandas.concat([side.drop(columns="label") for side in sides])
    wide = pandas.get_dummies(frame, dummy_na=False).astype(float)
    wide = wide.fillna(wide.median()).to_numpy()
    ends = np.cumsum([len(side) for side in sides])[:-1]
    return np.split(wide, ends)


def outside(split: Split, kind: str, table: dict[str, np.ndarray], seed: int) -> dict[str, Any]:
    """Cleanlab as its tutorials use it: a random forest (tables) or a logistic regression, cross-validated, pruned."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def model() -> Any:
        if kind == "table":
            return RandomForestClassifier(200, random_state=seed)
        return make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, C=0.1))

    noisy, trusted, test = features(split, kind, table)
    y = np.unique(split.given, return_inverse=True)[1]
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # classes with fewer rows than folds
        p = cross_val_predict(model(), noisy, y, cv=folds, method="predict_proba")
        keep = ~find_label_issues(y, p, n_jobs=1)
        x, labels = np.concatenate([noisy[keep], trusted]), np.concatenate([split.given[keep], split.trusted_gold])
        accuracy = float((model().fit(x, labels).predict(test) == split.test_gold).mean())
    doubt = 1 - get_label_quality_scores(y, p)
    return {"test": accuracy, "average_precision": average_precision(split.given != split.gold, doubt)}


def cached_encoder(table: dict[str, np.ndarray]) -> None:
    """Texts of the pools get their kept vectors from ``clean``'s encoder, instead of being embedded in every run."""
    from hyperkron.cleaning.models import TextEncoder

    def embed(self: TextEncoder, texts: Any, **options: Any) -> torch.Tensor:
        return torch.from_numpy(np.stack([table[" ".join(t.split())] for t in texts])).float()

    TextEncoder.embed = embed  # type: ignore[method-assign]


def commit() -> str:
    """Of the hyperkron that is measured; + where its files differ from it. COMMIT names it where there is no git."""
    where = Path(hyperkron.__file__).parent
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=True).stdout

    return git("rev-parse", "--short", "HEAD").strip() + ("+" if git("status", "--short", ".").strip() else "")


def network(source: Source, split: Split) -> Callable[[], torch.nn.Module] | None:
    """The network of a set that does not take the default one."""
    if source.width is None:
        return None
    shape = split.train[0].shape[1:]
    return partial(small_cnn, shape[0], shape[1], int(split.gold.max()) + 1, source.width)


def measure(job: Job, table: dict[str, np.ndarray], encoder: str | None, alone: bool = False) -> dict[str, Any]:
    """One run; ``alone`` without alternatives, for what is known of the labels only."""
    name, seed, per_class = job
    source, split = SOURCES[name], trust_data.split(name, seed, per_class)
    begin = time.perf_counter()
    config = CleanConfig(seed=1000 + seed, encoder=encoder if source.kind == "text" else None)
    config = replace(config, compare=()) if alone else config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = clean(
            split.train, split.trusted, test=split.test, model=network(source, split), config=config, progress=False
        )
    seconds = time.perf_counter() - begin
    p = np.asarray(result.error_probability, dtype=float)
    used = np.isfinite(p)
    wrong = (split.given != split.gold)[used]
    keys = ("name", "accuracy", "low", "high", "rows", "test_accuracy", "seconds", "different", "learner")
    noise = {key: value for key, value in result.summary["noise"].items() if key != "matrix"}
    return {
        "dataset": name,
        "kind": source.kind,
        "unseen": source.unseen,
        "noise": trust_data.noise_of(name, seed),
        "seed": seed,
        "per_class": per_class,
        "commit": commit(),
        "rows": int(used.sum()),
        "trusted": len(split.trusted_gold),
        "test_rows": len(split.test_gold),
        "classes": len(result.classes),
        "wrong": float(wrong.mean()),
        "estimated": noise,
        "chosen": result.chosen,
        "learner": result.summary["learner"],
        "verdict": result.verdict,
        "candidates": [{key: c.get(key) for key in keys} for c in result.candidates],
        "average_precision": average_precision(wrong, p[used]),
        "reliability": reliability(wrong, p[used]),
        "outside": None if alone else outside(split, source.kind, table, seed),
        "seconds": {"clean": seconds, **result.summary["seconds"]},
    }


def _worker(texts: list[str], encoder: str | None, alone: bool) -> Callable[[Job], dict[str, Any]]:
    table = trust_data.vectors(texts)
    cached_encoder(table)

    def carry_out(job: Job) -> dict[str, Any]:
        try:
            found = measure(job, table, encoder, alone)
        except Exception as error:  # a finding too; the other runs go on
            text = f"{type(error).__name__}: {error}"
            found = {"dataset": job[0], "seed": job[1], "per_class": job[2], "commit": commit(), "failure": text}
        return dict(records.rounded(records.plain(found)))

    return carry_out


def jobs(sets: str, seeds: list[int], sizes: list[int]) -> list[Job]:
    """Seed by seed, unseen texts first, then unseen sets, then texts, so that a stop leaves what is asked most."""
    everything = sorted((*UNSEEN, *DEVELOPMENT), key=lambda n: (not SOURCES[n].unseen, SOURCES[n].kind != "text"))
    groups = {"all": tuple(everything), "development": DEVELOPMENT, "unseen": UNSEEN}
    names = groups.get(sets) or tuple(sets.split(","))
    return [(name, seed, size) for seed in seeds for name in names for size in sizes]


def main() -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="development", help="development, unseen, all, or names with commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--per-class", default=",".join(map(str, PER_CLASS)))
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), help="no run begins after this time")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--encoder", default="data/minilm", help="for the texts")
    parser.add_argument("--alone", action="store_true", help="without alternatives: the labels only")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wanted = jobs(options.sets, *([int(v) for v in text.split(",")] for text in (options.seeds, options.per_class)))
    lines, begin = Lines(options.out), time.monotonic()

    def missing() -> list[tuple[list[Any], Job]]:
        done = {(r["dataset"], r["seed"], r["per_class"]) for r in lines.rows}
        return [(list(job), job) for job in wanted if job not in done]

    def keep(key: list[Any], record: dict[str, Any], seconds: float, busy: float) -> None:
        lines.append({**record, "busy": round(busy, 1)})
        if "failure" in record:
            print(key, record["failure"], flush=True)
            return
        won = next(c for c in record["candidates"] if c["name"] == record["chosen"])
        print(
            f"{time.monotonic() - begin:6.0f} s {seconds:5.0f} s {key} {record['noise']}: {record['chosen']} "
            f"{won['low']:.3f}-{won['high']:.3f}, test {won['test_accuracy']:.3f}, "
            f"outside {(record['outside'] or {}).get('test')}",
            flush=True,
        )

    texts = [name for name in dict.fromkeys(job[0] for job in wanted) if SOURCES[name].kind == "text"]
    late = lambda: time.monotonic() - begin > 60 * options.limit_minutes  # noqa: E731
    share(options.workers, partial(_worker, texts, options.encoder, options.alone), missing, keep, late=late)


if __name__ == "__main__":
    main()
