"""Numbers in the text of pages are those of the records."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from experiments import records

ROOT = Path(__file__).resolve().parents[2]
SETS = ("trec", "youtube", "semeval")
SAMA = "SAMA (Betty's way)"
RATES = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)


def recorded(name: str, folder: Path = records.RESULTS / "paper") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


def said(name: str, folder: Path = records.PAGES) -> str:
    return " ".join((folder / name).read_text("utf-8").split())


@pytest.mark.parametrize("method", ["KFAC", "CG", "SAMA"])
def test_step_sizes_with_which_a_method_works(method: str) -> None:
    """By the lowest held-out error with seed 0, at most 5 points above the lowest of all methods."""
    found: dict[tuple[str, str], dict[float, float]] = defaultdict(dict)
    for row in recorded("encoder-length.jsonl"):
        if row["seed"] == 0 and row["method"] in ("KFAC", "CG-3", "SAMA"):
            found[row["dataset"], row["method"].removesuffix("-3")][row["rate"]] = row["best"]["second_error"]
    cells = []
    for name in SETS:
        lowest = min(min(x.values()) for (of, _), x in found.items() if of == name)
        works = [rate for rate in RATES if found[name, method][rate] <= lowest + 0.05]
        assert works == list(RATES[-len(works) :])
        cells.append("all" if len(works) == len(RATES) else f"{works[0]:g} or more")
    label = "SAMA (the printed grid ends at 100)" if method == "SAMA" else method
    assert f"| {label} | {' | '.join(cells)} |" in said("encoder-length.md")


def test_the_linear_model_after_its_lowest_loss() -> None:
    rows = [x for x in recorded("linear-length.jsonl") if x["test"]]
    whole = [x for x in rows if x["method"].startswith(("AID", "AmIGO")) and not {"batch", "ema"} & x["setting"].keys()]
    rise = max(x["curve"]["test_loss"][-1] - x["best"]["test_loss"] for x in whole)
    steps = [x["best"]["step"] for x in whole]
    text = f"lowest after {min(steps)} to {max(steps)} outer steps and then rises by up to {rise:.2f}:"
    assert text in said("linear-length.md")


def test_gpu_seconds_of_a_run_of_the_linear_model() -> None:
    rows = [x for x in recorded("linear-length.jsonl") if x["wanted"] == 1000 and "workers" in x]
    taken = [x["seconds"] / x["workers"] for x in rows]
    assert f"1000 steps takes {min(taken):.1f} to {max(taken):.0f} GPU-seconds" in said("linear-length.md")


def test_which_classes_gain_from_other_losses() -> None:
    found: dict[str, list[list[float]]] = defaultdict(list)
    for row in recorded("long-tail.jsonl"):
        if row["key"][0] == 100 and row["key"][3:4] == [100]:
            found[row["key"][1]].append([100 * x for x in row["value"]["per_class"]])
    means = {name: [statistics.fmean(x) for x in zip(*seeds, strict=True)] for name, seeds in found.items()}
    better = [means[name] for name in ("Logit adjustment", "Deferred re-weighting")]
    gains = [[x - y for x, y in zip(of, means["Base"], strict=True)] for of in better]
    small, large = ([x for of in gains for x in of[part]] for part in (slice(5, None), slice(4)))
    text = f"the five smallest classes gain {min(small):.0f} to {max(small):.0f} points and the four largest lose "
    assert f"{text}{-max(large):.0f} to {-min(large):.0f}." in said("long-tail.md")


def test_how_far_the_poison_of_the_cnn_moved() -> None:
    text, rows = said("poisoning.md"), [x for x in recorded("poisoning-networks.jsonl") if x.get("moved") is not None]
    kfac, cg = ([x for x in rows if x["method"] == name] for name in ("TGDA-KFAC-EMP", "TGDA-CG"))
    ways = [[100 * x["moved"] for x in of] for of in (kfac, cg)]
    span = [f"{min(of):.0f} to {max(of):.0f} %" for of in ways]
    bad = [100 * x["indefinite"] for x in cg]
    assert f"changed by {span[0]} (KFAC) and {span[1]} (CG, which met negative curvature in" in text
    assert min(bad) == 92.5 and max(bad) == 100.0 and "in 92 to 100 % of its steps" in text
    for of in ways:
        assert f"– / not reproduced | – / {statistics.median(of):.0f} % (median) |" in text


def test_how_far_weights_of_texts_move_with_the_printed_step_size() -> None:
    rows = [x for x in recorded("pretraining.jsonl") if x["key"][0] != "price" and x["key"][3] == 1e-5]
    weights = [x["value"]["weights"] for x in rows]
    one = max(max(abs(x["most"] - 1), abs(x["least"] - 1)) for x in weights)
    assert max(x["moved"] for x in weights) < 0.015 and 0.024 < one < 0.025
    assert "move by less than 0.015 on average (one by at most 0.025)" in said("pretraining.md")


def test_memory_and_steps_of_the_performance_page() -> None:
    folder = ROOT / "benchmarks" / "results"
    more = []
    for workload in ("bert", "resnet7", "resnet3"):
        rows = json.loads((folder / f"outer_iteration_h200_{workload}.json").read_text("utf-8"))["rows"]
        gib = {x["method"]: x["peak_gib"] for x in rows}
        names = ("KFAC mc", "KFAC mc, keep_previous=False")
        more.append([f"{gib[name] / gib[SAMA]:.2f}" for name in names])
    default, freed = zip(*more, strict=True)
    text = said("performance.md", ROOT / "docs")
    assert "needs {}, {} and {} times the memory of SAMA".format(*default) in text
    assert "it needs {}, {} and {} times.".format(*freed) in text
    rows = [x for x in recorded("language_models_h200.jsonl", folder) if "0.7B" in x.get("workload", "")]
    steps = [x["inner_ms"] for x in rows if "inner_ms" in x]
    assert f"{round(min(steps), -1):.0f} to {round(max(steps), -1):.0f} ms on 0.7B" in text
