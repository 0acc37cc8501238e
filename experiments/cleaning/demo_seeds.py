"""Does the claim of ``make demo`` hold for other seeds? The same files, spoilt again under 20 seeds.

    python -m experiments.cleaning.demo_seeds --workers 2 --out runs/demo-seeds.jsonl

The claim: the test accuracy lies in the printed interval, the noise rate is within 3 points, and at least 90 % of the
spoilt labels are among the suspects, at least 90 % of which are spoilt. A finished seed is one line of the file.
"""

from __future__ import annotations

import argparse
import runpy
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cleaning.trust import average_precision
from experiments.pieces import Lines
from experiments.workers import share
from hyperkron.cleaning import CleanConfig, clean

write_files = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "demo.py"))["write_files"]
"""The demo is a script of its own, so it is run (not as the main program) and not imported."""

SEEDS = 20


def measure(seed: int) -> dict[str, Any]:
    """One seed: what is printed, and what is true."""
    with tempfile.TemporaryDirectory() as place:
        wrong = write_files(Path(place), seed)
        files = [Path(place) / f"{part}.npz" for part in ("train", "trusted", "test")]
        begin = time.perf_counter()
        result = clean(files[0], files[1], test=files[2], config=CleanConfig(seed=seed), progress=False)
        seconds = time.perf_counter() - begin
    doubt = np.asarray(result.error_probability, dtype=float)
    suspect = doubt > 0.5
    won = next(c for c in result.candidates if c["name"] == result.chosen)
    found = {
        "seed": seed,
        "chosen": result.chosen,
        "test": won["test_accuracy"],
        "low": won["low"],
        "high": won["high"],
        "said": float(doubt.mean()),
        "true": float(wrong.mean()),
        "recall": float(suspect[wrong].mean()),
        "precision": float(wrong[suspect].mean()),
        "average_precision": average_precision(wrong, doubt),
        "best": max(c["test_accuracy"] for c in result.candidates),
        "seconds": seconds,
    }
    return {**found, "holds": holds(found)}


def holds(found: dict[str, Any]) -> bool:
    """Whether the claim is true of a seed."""
    inside = found["low"] <= found["test"] <= found["high"]
    rate = abs(found["said"] - found["true"]) <= 0.03
    return bool(inside and rate and found["recall"] >= 0.9 and found["precision"] >= 0.9)


def _worker() -> Callable[[int], dict[str, Any]]:
    return measure


def main() -> None:
    """Measure what is missing, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit-minutes", type=float, default=float("inf"), help="no seed begins after this time")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines, begin = Lines(options.out), time.monotonic()

    def missing() -> list[tuple[list[Any], int]]:
        done = {row["seed"] for row in lines.rows}
        return [([seed], seed) for seed in range(options.seeds) if seed not in done]

    def keep(key: list[Any], record: dict[str, Any], seconds: float, busy: float) -> None:
        lines.append({**record, "busy": round(busy, 1)})

    late = lambda: time.monotonic() - begin > 60 * options.limit_minutes  # noqa: E731
    share(options.workers, partial(_worker), missing, keep, late=late)
    rows = lines.rows
    print(f"The claim held in {sum(row['holds'] for row in rows)} of {len(rows)} seeds.")
    for row in rows:
        if not row["holds"]:
            print({name: value for name, value in row.items() if name != "busy"})


if __name__ == "__main__":
    main()
