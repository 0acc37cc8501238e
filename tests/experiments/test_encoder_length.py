"""Encoder hypercleaning at the paper's length: the runs, the file that they continue, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import records
from experiments.paper import encoder_length, text_cleaning
from experiments.paper.encoder_cleaning import Source
from experiments.paper.text_cleaning import TextCase
from experiments.paper.texts import MADE_UP
from experiments.pieces import Lines


def recorded(method: str, rate: float, error: float, loss: float = 1.0) -> dict[str, Any]:
    best = {"second_error": error, "second_loss": loss}
    return {"dataset": "a", "method": method, "rate": rate, "seed": 0, "failed": False, "best": best}


def test_every_run_is_there_once() -> None:
    found = list(encoder_length.tasks(("a", "b"), 1, []))
    assert len(found) == len(set(found)) == 2 * (3 + 3 * 7)
    assert found[0] == ("a", "Baseline", 0.0, 0)


def test_other_seeds_repeat_the_winners_of_both_arms() -> None:
    rows = [recorded("SAMA", 1.0, 0.5), recorded("SAMA", 100.0, 0.3), recorded("SAMA", 1000.0, 0.2)]
    rows += [recorded("KFAC", 1.0, 0.2, loss=0.9), recorded("KFAC", 0.1, 0.2, loss=0.8), recorded("KFAC", 1e4, 0.3)]
    found = [task for task in encoder_length.tasks(("a",), 2, rows) if task[3] == 1]
    assert found == [
        ("a", "SAMA", 100.0, 1),
        ("a", "SAMA", 1000.0, 1),
        ("a", "KFAC", 0.1, 1),
        ("a", "Baseline", 0.0, 1),
    ]


def test_the_smaller_plan_tries_the_neighbours_of_the_printed_winner() -> None:
    rows = [recorded("SAMA", 10.0, 0.4), recorded("SAMA", 100.0, 0.3), recorded("SAMA", 1000.0, 0.2)]
    rows += [recorded("KFAC", 1.0, 0.2), recorded("CG-3", 0.01, 0.2)]
    grids = encoder_length.around(rows)
    assert grids == {("a", "SAMA"): (10.0, 100.0), ("a", "KFAC"): (0.1, 1.0, 10.0), ("a", "CG-3"): (0.01, 0.1)}
    tried = [task for task in encoder_length.tasks(("a",), 1, [], grids) if task[1] in encoder_length.METHODS]
    assert len(tried) == 7 and {(name, rate) for _, name, rate, _ in tried} == {
        (name, rate) for (_, name), rates in grids.items() for rate in rates
    }


def runs(errors: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    """Three seeds of every method on every dataset, each with one step size and a test error that hardly scatters."""
    found = []
    for dataset, of in errors.items():
        for name, error in of.items():
            for seed in range(3):
                best = {"second_error": error, "second_loss": 1.0, "test_error": error + 1e-3 * seed * (name == "KFAC")}
                rest = {"rate": 1.0, "seed": seed, "failed": False}
                found.append({"dataset": dataset, "method": name, "best": best, **rest})
    return found


def test_the_verdict_follows_its_rule() -> None:
    good, bad = {"KFAC": 0.2, "SAMA": 0.3, "CG-3": 0.3}, {"KFAC": 0.2, "SAMA": 0.2, "CG-3": 0.3}
    behind = {"KFAC": 0.2, "SAMA": 0.3, "CG-3": 0.1}

    def verdict(*of: dict[str, float]) -> str:
        return encoder_length.judgement(runs(dict(zip("abc", of, strict=True)))).verdict.value

    assert verdict(good, good, good) == "reproduced"
    assert verdict(good, good, bad) == verdict(good, behind, good) == "reproduced in trend"
    assert verdict(good, bad, bad) == "not reproduced"
    few = [row for row in runs({"a": good}) if row["seed"] < 2]
    alone = [row for row in runs({"a": good}) if row["seed"] < 1 or row["method"] != "CG-3"]
    assert encoder_length.judgement(alone).verdict.value == "no verdict"
    assert encoder_length.judgement(few).verdict.value == encoder_length.judgement([]).verdict.value == "no verdict"
    every = encoder_length.judgement(runs(dict.fromkeys("abc", good))).because
    assert "1000 outer steps, 3 seeds. KFAC" in every and "a +9.9 ± 0.2 with the printed grid" in every
    two = encoder_length.judgement(runs(dict.fromkeys("ab", good)))
    assert (two.verdict.value, two.because) == ("no verdict", "So far a, b of 3 datasets.")


def test_a_run_of_each_method() -> None:
    """θ and λ move, and a larger step size moves λ further."""
    pytest.importorskip("transformers")
    case = TextCase(batch=16, inner_steps=2, steps=4, looks=2, tokens=16)
    source = Source(MADE_UP, None, torch.device("cpu"), case.tokens)
    plain = encoder_length.run(source, (MADE_UP, "Baseline", 0.0, 0), case)
    assert plain["auc"] is None and plain["mean_weight"] == 1.0
    for name in encoder_length.METHODS:
        near, far = (encoder_length.run(source, (MADE_UP, name, rate, 0), case) for rate in (1e-6, 1e6))
        assert not near["failed"] and near["zero"] == near["one"] == 0.0
        assert far["zero"] + far["one"] > 0.5
        assert json.loads(json.dumps(far))["steps"] == 4


def test_more_tuned_layers_have_the_smaller_plan_and_a_file_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    case = TextCase(batch=16, inner_steps=1, steps=1, looks=1, tokens=16)
    source, task = Source(MADE_UP, None, torch.device("cpu"), case.tokens), (MADE_UP, "KFAC", 100.0, 0)
    made, tuned = source.model, list[int]()
    monkeypatch.setattr(source, "model", lambda *of: tuned.append(made(*of).layers) or made(*of))
    found = [encoder_length.run(source, task, case, layers=layers) for layers in (1, 2)]
    assert [row["layers"] for row in found] == tuned == [1, 2]
    seen = list[tuple[set[Any], int]]()
    monkeypatch.setattr(
        encoder_length, "tasks", lambda names, seeds, rows, grids: seen.append((set(grids or ()), seeds)) or iter(())
    )
    for arguments in ([], ["--layers", "7"]):
        encoder_length.main(arguments)
    rows = Lines(encoder_length.RESULT).rows
    assert seen[0] == (set(), encoder_length.SEEDS)
    assert seen[-1] == (set(encoder_length.around(rows)), encoder_length.FEWEST)
    assert encoder_length.result_of("minilm", 7).name == "encoder-length-7-layers.jsonl"


def test_a_run_that_was_killed_goes_on_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its fourth step, it continues from the third with the same batches, momentum and schedule."""
    pytest.importorskip("transformers")
    case = TextCase(batch=16, inner_steps=2, steps=5, looks=5, tokens=16)
    source, task = Source(MADE_UP, None, torch.device("cpu"), case.tokens), (MADE_UP, "SAMA", 100.0, 0)
    monkeypatch.setattr(encoder_length, "SAVED_EVERY", 3)
    whole = encoder_length.run(source, task, case)
    measure, begun = text_cleaning.loss_and_error, list[int]()

    def kill(model: Any, part: Any) -> Any:
        begun.append(0)
        if len(begun) > 6:  # two parts at each of three steps
            raise KeyboardInterrupt
        return measure(model, part)

    with monkeypatch.context() as patch:
        patch.setattr(text_cleaning, "loss_and_error", kill)
        with pytest.raises(KeyboardInterrupt):
            encoder_length.run(source, task, case, tmp_path)
    assert [x.name for x in tmp_path.glob("*/step-*")] == ["step-00000003"]
    again = encoder_length.run(source, task, case, tmp_path)
    assert json.dumps(again) == json.dumps(whole) and not any(tmp_path.iterdir())


def test_the_page_has_the_recorded_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    encoder_length.main(["--table"])
    text = (records.PAGES / "encoder-length.md").read_text("utf-8")
    assert capsys.readouterr().out.strip() in text
    encoder_length.main(["--table", "--out", str(tmp_path / "none.jsonl")])
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.long
def test_the_figure_shows_every_dataset(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = encoder_length.figure(Lines(encoder_length.RESULT).rows, tmp_path / "x.svg").read_text("utf-8")
    assert all(f"{name} (grey: the printed grid)" in text for name in ("trec", "youtube", "semeval"))


def test_what_the_page_says_of_trec() -> None:
    """KFAC works at every step size, SAMA only from 1000 on."""
    rows = [row for row in Lines(encoder_length.RESULT).rows if row["dataset"] == "trec"]
    end = {(row["method"], row["rate"]): 1 - row["last"]["test_error"] for row in rows if row["seed"] == 0}
    assert min(end["KFAC", rate] for rate in encoder_length.RATES) > 0.71
    assert max(end["SAMA", rate] for rate in (0.01, 0.1, 1.0)) < 0.58 < 0.77 < end["SAMA", 1000.0]
    assert all(row["visits"] > 10 for row in rows)


def test_what_the_page_says_of_weights_at_their_bounds() -> None:
    """Seed 0 of all datasets: the shares of weights that end at 0 or 1."""
    rows = [row for row in Lines(encoder_length.RESULT).rows if row["seed"] == 0]

    def share(name: str, low: float, high: float) -> tuple[int, int]:
        found = [x["zero"] + x["one"] for x in rows if x["method"] == name and low <= x["rate"] <= high]
        return round(100 * min(found)), round(100 * max(found))

    assert share("KFAC", 0.01, 1e4) == (68, 100)
    assert (share("SAMA", 0.01, 1), share("SAMA", 10, 100), share("SAMA", 1e3, 1e4)) == ((0, 6), (12, 52), (57, 87))
