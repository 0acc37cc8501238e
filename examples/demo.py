"""`make demo`: mislabel 40 % of scikit-learn's digits, clean them with 60 trusted ones, and open the report.

Everything here is what a user would do with files of their own; only the last lines know which labels were spoilt.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score, roc_auc_score

from hyperkron.cli import main as hyperkron


def write_files(folder: Path, seed: int = 0) -> np.ndarray:
    """train.npz (noisy), trusted.npz (6 of each digit) and test.npz; the true labels of the training rows."""
    images, digits = load_digits(return_X_y=True)
    random = np.random.default_rng(seed)
    order = random.permutation(len(images))
    x, y = (images[order].reshape(-1, 1, 8, 8) * 255 / 16).astype(np.uint8), digits[order]
    rank = np.array([np.sum(y[:i] == y[i]) for i in range(len(y))])
    trusted, rest = np.flatnonzero(rank < 6), np.flatnonzero(rank >= 6)
    test, train = rest[:500], rest[500:]
    spoilt = random.random(len(train)) < 0.4
    given = np.where(spoilt, random.integers(0, 10, len(train)), y[train])
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows, labels in (("train", train, given), ("trusted", trusted, y[trusted]), ("test", test, y[test])):
        np.savez(folder / f"{name}.npz", x=x[rows], y=labels)
    return np.asarray(y[train] != given)


def main(folder: Path = Path("runs")) -> int:
    """Write the files, run the command, and say how many of the spoilt labels it found."""
    data, out = folder / "demo-data", folder / "demo"
    wrong = write_files(data)
    train, trusted, test = (str(data / f"{part}.npz") for part in ("train", "trusted", "test"))
    command = ["clean", train, "--trusted", trusted, "--test", test]
    print("$ hyperkron", *command, "--out", out, flush=True)
    if code := hyperkron([*command, "--out", str(out), "--overwrite"]):
        return code
    with (out / "rows.csv").open() as file:
        doubt = np.zeros(len(wrong))
        for row in csv.DictReader(file):
            doubt[int(row["row"])] = float(row["error_probability"])
    flagged = doubt > 0.5
    found = np.sum(flagged & wrong)
    print(
        f"\nOf {wrong.sum()} labels spoilt on purpose, {found} are among the {flagged.sum()} suspects "
        f"(average precision {average_precision_score(wrong, doubt):.1%}, AUROC {roc_auc_score(wrong, doubt):.1%})."
    )
    print(f"Open {out / 'report.html'} in a browser. To use the commands above in this shell: . .venv/bin/activate")
    return 0


if __name__ == "__main__":
    sys.exit(main())
