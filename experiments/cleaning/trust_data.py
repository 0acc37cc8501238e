"""The 20 data sets of the trust table: where each comes from, its split, its noise, and which stay unseen to the end.

    apt-get download r-cran-mlbench r-cran-kernlab && for f in *.deb; do dpkg -x $f rda; done
    python -m experiments.cleaning.trust_data --rda rda --data data      # needs PyPI's rdata; texts are embedded once

Every set is kept as one pool of rows with true labels, in ``$HYPERKRON_TRUST/<name>`` (or ``data/trust/<name>``):
``pool.csv`` for tables and texts (``weak`` holds the majority vote), ``pool.npz`` for images. A seed decides which
rows are test, trusted and noisy, and which labels are wrong.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas

from hyperkron.solution import HyperkronError

Kind = Literal["table", "text", "image"]
PLACE = Path(os.environ.get("HYPERKRON_TRUST", "data/trust"))
NOISES = ("uniform-20", "class-40", "uniform-40")
PER_CLASS = (10, 50)
TEST_ROWS = 2000
POOL_ROWS = 6000
"""Rows kept of larger sets."""


@dataclass(frozen=True)
class Source:
    """A data set.

    Attributes:
        name: of the set.
        kind: of its inputs.
        origin: the R package, ``wrench``, ``tapt``, or a name of images.
        unseen: whether it was kept for the final table.
        rows: most noisy rows.
        item: the R object, or the folder of texts.
        label: the column of the classes.
        width: of the small convolutional network given to ``clean``; None takes its default for the data.
    """

    name: str
    kind: Kind
    origin: str
    unseen: bool = False
    rows: int = 1500
    item: str = ""
    label: str = "Class"
    width: int | None = None


SOURCES = {
    s.name: s
    for s in (
        Source("vehicle", "table", "mlbench", item="Vehicle"),
        Source("vowel", "table", "mlbench", item="Vowel"),
        Source("soybean", "table", "mlbench", item="Soybean"),
        Source("satellite", "table", "mlbench", item="Satellite", label="classes"),
        Source("spam", "table", "kernlab", item="spam", label="type"),
        Source("income", "table", "kernlab", item="income", label="INCOME"),
        Source("dna", "table", "mlbench", unseen=True, item="DNA"),
        Source("pima", "table", "mlbench", unseen=True, item="PimaIndiansDiabetes", label="diabetes"),
        Source("youtube", "text", "wrench", item="youtube"),
        Source("trec", "text", "wrench", item="trec"),
        Source("sms", "text", "wrench", item="sms"),
        Source("citation_intent", "text", "tapt", unseen=True, item="citation_intent"),
        Source("sciie", "text", "tapt", unseen=True, item="sciie"),
        Source("digits", "image", "scikit-learn"),
        Source("mnist", "image", "mnist", rows=1000),
        Source("fashion_mnist", "image", "fashion_mnist", unseen=True, rows=1000),
        Source("cifar10", "image", "cifar10", unseen=True, rows=500, width=8),
        Source("semeval", "text", "wrench", item="semeval"),
        Source("chemprot", "text", "tapt", unseen=True, item="chemprot"),
        Source("hyperpartisan", "text", "tapt", unseen=True, item="hyperpartisan"),
    )
}
DEVELOPMENT = tuple(name for name, s in SOURCES.items() if not s.unseen)
UNSEEN = tuple(name for name, s in SOURCES.items() if s.unseen)
TOUCHED = ("fashion_mnist",)
"""Kept for the end, but other rows of it, as 40 principal components, were among the data of development."""


@dataclass(frozen=True)
class Split:
    """Rows as ``clean`` takes them (a DataFrame, or a pair of images and labels); ``gold`` only scores the result."""

    train: Any
    trusted: Any
    test: Any
    given: np.ndarray
    gold: np.ndarray
    trusted_gold: np.ndarray
    test_gold: np.ndarray


def noise_of(name: str, seed: int) -> str:
    """Weak labels where there are some, else one kind of noise for each seed, a different one first for each set."""
    if SOURCES[name].origin == "wrench":
        return "weak"
    made = [n for n, s in SOURCES.items() if s.origin != "wrench"]
    return NOISES[(made.index(name) + seed) % len(NOISES)]


def corrupt(labels: np.ndarray, classes: int, noise: str, random: np.random.Generator) -> np.ndarray:
    """Uniform: redrawn among all classes. Class-dependent: moved to the next class; of two classes, the first only."""
    kind, percent = noise.split("-")
    hit = random.random(len(labels)) < int(percent) / 100
    if kind == "uniform":
        return np.where(hit, random.integers(classes, size=len(labels)), labels)
    if classes == 2:
        hit &= labels == 0
    return np.where(hit, (labels + 1) % classes, labels)


def parts(
    gold: np.ndarray, weak: np.ndarray | None, per_class: int, rows: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Positions of test, trusted and noisy rows.

    At most a third of the rows are test rows, and at most a third of a class's other rows are trusted. The trusted
    rows of a smaller ``per_class`` are among those of a larger one, and the test rows are the same. Rows without a
    weak label are never noisy rows.
    """
    order = random.permutation(len(gold))
    count = min(TEST_ROWS, len(gold) // 3)
    test, rest = order[:count], order[count:]
    left = Counter(gold[rest].tolist())
    quota = {k: min(per_class, n // 3) for k, n in left.items()}
    seen: Counter[int] = Counter()
    trusted = np.zeros(len(rest), dtype=bool)
    for at, k in enumerate(gold[rest].tolist()):
        seen[k] += 1
        trusted[at] = seen[k] <= quota[k]
    noisy = rest[~trusted]
    if weak is not None:
        noisy = noisy[weak[noisy] >= 0]
    return {"test": test, "trusted": rest[trusted], "noisy": noisy[:rows]}


def split(name: str, seed: int, per_class: int) -> Split:
    """A data set under a seed."""
    source, folder = SOURCES[name], PLACE / name
    random = np.random.default_rng([seed, list(SOURCES).index(name)])
    if source.kind == "image":
        with np.load(_there(folder / "pool.npz"), allow_pickle=False) as file:
            x, gold = file["x"], file["y"].astype(np.int64)
        names, weak = np.unique(gold), None
    else:
        frame = pandas.read_csv(_there(folder / "pool.csv"), keep_default_na=source.kind == "table")
        labels = frame.pop("label").astype(str)
        names, gold = np.unique(labels, return_inverse=True)
        votes = frame.pop("weak") if "weak" in frame else None
        weak = None if votes is None else np.array([_position(names, vote) for vote in votes.astype(str)])
        x = frame
    found = parts(gold, weak, per_class, source.rows, random)
    noisy = found["noisy"]
    noise = noise_of(name, seed)
    given = gold[noisy] if weak is None else weak[noisy]
    if noise != "weak":
        given = corrupt(given, len(names), noise, random)

    def rows(at: np.ndarray, y: np.ndarray) -> Any:
        if isinstance(x, np.ndarray):
            return x[at], y
        return x.iloc[at].reset_index(drop=True).copy().assign(label=names[y])

    test, trusted = found["test"], found["trusted"]
    sides = rows(noisy, given), rows(trusted, gold[trusted]), rows(test, gold[test])
    return Split(*sides, given, gold[noisy], gold[trusted], gold[test])


def _position(names: np.ndarray, vote: str) -> int:
    return int(np.searchsorted(names, vote)) if vote in names else -1


def _there(path: Path) -> Path:
    if not path.exists():
        raise HyperkronError(f"{path} is missing; make it with python -m experiments.cleaning.trust_data.")
    return path


def vectors(names: list[str]) -> dict[str, np.ndarray]:
    """Text → frozen embedding, of these sets."""
    found: dict[str, np.ndarray] = {}
    for name in names:
        texts = pandas.read_csv(_there(PLACE / name / "pool.csv"), keep_default_na=False)["text"]
        with np.load(_there(PLACE / name / "embeddings.npz"), allow_pickle=False) as file:
            found.update(zip(texts, file["x"], strict=True))
    return found


# --- making the pools


def prepare(rda: Path, data: Path, names: list[str]) -> None:
    """Write the pools that are not there yet."""
    for name in names:
        source, folder = SOURCES[name], PLACE / name
        if any(folder.glob("pool.*")):
            continue
        folder.mkdir(parents=True, exist_ok=True)
        if source.kind == "image":
            x, y = _images(source, data)
            np.savez_compressed(folder / "pool.npz", x=x, y=y)
            print(name, x.shape, flush=True)
            continue
        frame = r_table(source, rda) if source.kind == "table" else _texts(source, data)
        if source.kind == "text":
            frame = frame.drop_duplicates("text")
        if len(frame) > POOL_ROWS:
            frame = frame.sample(POOL_ROWS, random_state=0)
        if source.kind == "text":
            from hyperkron.cleaning.models import TextEncoder

            x = TextEncoder(data / "minilm").embed(list(frame["text"])).numpy().astype(np.float16)
            np.savez_compressed(folder / "embeddings.npz", x=x)
        frame.to_csv(folder / "pool.csv", index=False)
        print(name, frame.shape, dict(Counter(frame["label"])), flush=True)


def r_table(source: Source, rda: Path) -> pandas.DataFrame:
    """A data frame of an R package, its classes in the column ``label``."""
    import rdata

    file = next(rda.glob(f"**/{source.origin}/data/{source.item}.rda"))
    frame = rdata.read_rda(file)[source.item]
    frame.columns = [str(c) for c in frame.columns]
    frame = frame.rename(columns={source.label: "label"})
    return frame.dropna(subset=["label"])


def _texts(source: Source, data: Path) -> pandas.DataFrame:
    folder, found = data / source.origin / source.item, []
    for part in ("train", "valid", "dev", "test"):
        path = folder / f"{part}.jsonl.gz"
        if not path.exists():
            continue
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in map(json.loads, file):
                text = line["text"].split(" ", 1)[1] if (source.name, part) == ("trec", "test") else line["text"]
                row = {"text": " ".join(text.split()), "label": line["label"]}
                if "weak_labels" in line:
                    row["weak"] = majority(line["weak_labels"])
                found.append(row)
    return pandas.DataFrame(found)


def majority(votes: list[int]) -> str:
    """The class with most votes (the smallest of several); empty if all abstain (−1)."""
    count = Counter(v for v in votes if v >= 0)
    return str(min(count, key=lambda k: (-count[k], k))) if count else ""


def _images(source: Source, data: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels of 0 to 255 (N, C, H, W) and classes: of large sets the test part, with half as many pixels a side."""
    if source.origin == "scikit-learn":
        from sklearn.datasets import load_digits

        x, y = load_digits(return_X_y=True)
        return np.round(x * 255 / 16).astype(np.uint8).reshape(-1, 1, 8, 8), y
    from experiments.paper.datasets import cifar10, mnist

    found = cifar10(data) if source.origin == "cifar10" else mnist(data, source.origin)
    images, classes = found.test
    x = images.numpy()[:POOL_ROWS] * 255
    x = x if x.ndim == 4 else x.reshape(-1, 1, 28, 28)
    halved = x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2).mean((3, 5))
    return np.round(halved).clip(0, 255).astype(np.uint8), classes.numpy()[:POOL_ROWS]


def main() -> None:
    """Make the pools."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rda", type=Path, default=Path("rda"), help="folder with the unpacked R packages")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with wrench, tapt, minilm and images")
    parser.add_argument("--sets", default=",".join(SOURCES))
    options = parser.parse_args()
    prepare(options.rda, options.data, options.sets.split(","))


if __name__ == "__main__":
    main()
