"""GPU minutes: what is missing for a verdict, and what was spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import paper
from experiments.paper import budget, encoder_length, image_contest, linear_contest, long_runs, page
from experiments.paper.recipe import Result, Verdict
from experiments.paper.visits import refusal
from experiments.pieces import Lines

SHOWN = {name: page.best(of) for name, of in page.results([paper.RESULTS]).items()}


def test_every_row_of_part_one_without_a_verdict_says_what_is_missing() -> None:
    """Tables 3 to 6, part two of the paper, say it on their own pages."""
    longer, part_two = encoder_length.longer(), {"long-tail", "pretraining", "poisoning", "unlearnable"}
    for name, recipe in paper.recipes().items():
        found = longer[name][0] if name in longer else recipe.judge(SHOWN.get(name))
        assert found.verdict is not Verdict.REFUSED or name in {*part_two, "encoder-base"}, name
    assert all(program.judge().verdict is not Verdict.REFUSED for program in paper.programs().values())


def test_no_verdict_of_part_one_rests_on_short_runs() -> None:
    long, seen = encoder_length.longer(), []
    for name, recipe in paper.recipes().items():
        result = SHOWN.get(name)
        if result is not None and name not in long and (found := recipe.weights(result)):
            assert (recipe.judge(result).verdict is Verdict.REFUSED) == bool(refusal(found)), name
            seen.append(name)
    assert "encoder-base" in seen


def test_the_missing_runs_of_mpnet_are_those_of_its_plan() -> None:
    """Only reference lines have been run: all step sizes around MiniLM's winners, two further seeds of each method."""
    grids, rows = (encoder_length.around(Lines(encoder_length.RESULT).rows), Lines(encoder_length.MPNET).rows)
    base = SHOWN["encoder-base"]
    assert len(grids) == 9 and base is not None and {row["method"] for row in rows} == {*encoder_length.REFERENCES}
    runs = sum(map(len, grids.values())) + 2 * len(grids)
    missing = budget.missing(base)
    assert missing is not None and str(missing).startswith("Missing for a verdict: about ")
    assert f"last layer, {runs} runs" in missing.what
    least = float(missing.what.split("the steps of θ alone take ")[1].split(";")[0])
    assert 0 < least < missing.minutes
    assert "encoder-base" not in encoder_length.longer()  # reference lines alone are no comparison


def test_spent_minutes_are_shared_by_processes() -> None:
    shared = Result("x", "small", (1,), {}, command="run x --workers 8", seconds=960.0, hardware={"gpu": "H200"})
    assert budget.spent(shared, "x") == 2.0
    assert budget.spent(Result("x", "small", (1,), {}, seconds=960.0), "x") is None
    files = [Path(image_contest.result_of(batch)) for batch in (500, 2500)]
    rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    spent = paper.programs()["resnet-cifar"].spent
    assert spent is not None and spent() == pytest.approx(sum(x["seconds"] / x["workers"] for x in rows) / 60)


def test_minutes_of_the_encoders_runs_are_those_recorded() -> None:
    rows = [{"seconds": 90.0, "workers": 3}, {}]
    assert budget._shared(rows, 30.0) == 1.0
    recorded = [row for row in Lines(encoder_length.RESULT).rows if "seconds" not in row]
    assert len(recorded) == 136
    assert (budget.spent(None, "encoder") or 0) >= 136 * 22.5 / 60


def test_runs_of_the_linear_model_belong_to_one_study() -> None:
    for name, study in linear_contest.STUDIES.items():
        for line in study(linear_contest.ROWS):
            own = {"setting": {**line.fixed, **line.variants[0]}}
            assert long_runs.study_of(own) == ("figure 5" if line.title.endswith("batch 50000") else name)
