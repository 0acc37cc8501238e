"""The framework of the paper's recipes: cells, time limits, results and the page."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import paper, records
from experiments.paper import page, places
from experiments.paper.__main__ import main
from experiments.paper.printed import printed
from experiments.paper.recipe import Job, Judgement, Recipe, Result, Table, Verdict
from experiments.paper.visits import Visits
from experiments.pieces import Cells, OutOfTime
from hyperkron.solution import HyperkronError


@dataclass(frozen=True)
class Settings:
    factor: int = 2


class Counted:
    """A recipe whose cells count how often they are computed, and can be slow or fail."""

    def __init__(self, **changes: Any) -> None:
        self.done: list[int] = []
        self.fail_at: int | None = None
        self.seconds = 0.0
        self.recipe = replace(
            Recipe(
                name="counted",
                title="Counting | twice",
                place="Table 1",
                experiment=1,
                settings={"smoke": Settings(), "small": Settings(3)},
                work=self.work,
                verdict=self.verdict,
                tables=lambda result: [
                    Table("Sums", ["what", "ours"], [["sum", str(result and result.figures["sum"])]])
                ],
            ),
            **changes,
        )

    def work(self, job: Job) -> dict[str, Any]:
        return {"sum": sum(job.cell([seed], lambda s=seed: self.one(job, s))["value"] for seed in job.seeds)}

    def one(self, job: Job, seed: int) -> dict[str, Any]:
        if seed == self.fail_at:
            raise KeyboardInterrupt
        time.sleep(self.seconds)
        self.done.append(seed)
        return {"value": job.settings.factor * seed, "nothing": math.inf}

    def verdict(self, result: Result) -> Judgement:
        """Always reproduced."""
        return Judgement(Verdict.REPRODUCED, "It adds up.")


# --- cells and runs ----------------------------------------------------------------------------------------


def test_a_run_writes_what_is_needed_to_make_it_again(tmp_path: Path) -> None:
    result = Counted().recipe.run("small", 2, "cpu", tmp_path, command="python -m x")
    written = json.loads((tmp_path / "counted-small.json").read_text("utf-8"))
    assert written["figures"] == {"sum": 9} and written["seeds"] == [1, 2] and written["command"] == "python -m x"
    assert written["settings"] == {"factor": 3} and written["versions"]["torch"] == torch.__version__
    assert {"cpu", "threads", "cores"} <= set(written["hardware"]) and written["complete"] is True
    again = Result.read(tmp_path / "counted-small.json")
    assert again.figures == result.figures and again.seeds == (1, 2)


def test_an_interrupted_run_continues_with_the_missing_cells(tmp_path: Path) -> None:
    counted = Counted()
    counted.fail_at = 3
    with pytest.raises(KeyboardInterrupt):
        counted.recipe.run("smoke", 4, "cpu", tmp_path)
    assert counted.done == [1, 2] and not (tmp_path / "counted-smoke.json").exists()
    with (tmp_path / "counted-smoke.cells.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"key": [3], "settings": "')  # a crash in the middle of a line
    counted.fail_at = None
    assert counted.recipe.run("smoke", 4, "cpu", tmp_path).figures == {"sum": 20}
    assert counted.done == [1, 2, 3, 4]
    assert counted.recipe.run("smoke", 4, "cpu", tmp_path).figures == {"sum": 20}
    assert counted.done == [1, 2, 3, 4]


def test_cells_of_other_settings_are_not_used(tmp_path: Path) -> None:
    counted = Counted()
    counted.recipe.run("smoke", 1, "cpu", tmp_path)
    other = Counted(settings={"smoke": Settings(5)})
    assert other.recipe.run("smoke", 1, "cpu", tmp_path).figures == {"sum": 5}
    assert other.done == [1]


def test_a_value_is_the_same_fresh_and_from_the_cache(tmp_path: Path) -> None:
    cells = Cells(tmp_path / "x.jsonl", {})
    fresh = cells.put(["a", {"b": 0.1}], {"x": (1, math.nan)}, 0.5)
    assert fresh == {"x": [1, None]} == Cells(tmp_path / "x.jsonl", {}).get(["a", {"b": 0.1}])
    assert Cells(tmp_path / "x.jsonl", {}).seconds() == 0.5


def test_processor_time_is_recorded_beside_the_clock(tmp_path: Path) -> None:
    counted = Counted()
    counted.seconds = 0.05  # asleep
    result = counted.recipe.run("smoke", 2, "cpu", tmp_path)
    assert result.busy is not None and 0 <= result.busy < result.seconds and result.seconds >= 0.1
    cells = Cells(tmp_path / "x.jsonl", {})
    cells.put(["a"], {}, 2.0, 1.5)
    assert (cells.seconds(), cells.busy()) == (2.0, 1.5)
    cells.put(["b"], {}, 2.0)  # by an earlier version
    assert (cells.seconds(), cells.busy()) == (4.0, None)
    one, two = ({"cpu": "C", "threads": threads} for threads in (1, 2))
    made = [
        page.section(counted.recipe, Result("counted", "small", (1,), {"sum": 1}, {}, "", 9.0, 7.0, True, of), tmp_path)
        for of in (one, two, one | {"gpu": "G"})
    ]
    assert ["9 s, 7 s of them computing;" in section.made for section in made] == [True, False, False]


def test_the_time_limit_keeps_complete_seeds(tmp_path: Path) -> None:
    counted = Counted()
    counted.seconds = 0.05
    result = counted.recipe.run("smoke", 50, "cpu", tmp_path, limit_minutes=0.3 / 60)
    assert not result.complete and 1 <= len(result.seeds) < 50
    assert result.figures["sum"] == 2 * sum(result.seeds)
    assert json.loads((tmp_path / "counted-smoke.json").read_text("utf-8"))["complete"] is False


def test_the_time_limit_raises_where_no_seed_is_complete(tmp_path: Path) -> None:
    with pytest.raises(OutOfTime, match="run the same command again"):
        Counted().recipe.run("smoke", 2, "cpu", tmp_path, limit_minutes=-1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": "paper"}, "scale='paper' is not among smoke, small"),
        ({"scale": "smoke", "seeds": 0}, "seeds=0 must be a whole number"),
        ({"scale": "small"}, "device='cpu' is too slow"),
    ],
)
def test_a_run_that_cannot_be_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(HyperkronError, match=message):
        Counted(gpu=("small",)).recipe.run(folder=tmp_path, **arguments)


def test_results_hold_plain_values_only() -> None:
    assert records.plain({"a": torch.ones(2), "b": (1, math.inf)}) == {"a": [1.0, 1.0], "b": [1, None]}
    with pytest.raises(TypeError, match="a result cannot hold"):
        records.plain({"a": object()})


def test_readable_json_is_json() -> None:
    value = {"a": list(range(100)), "b": {"c": "x" * 200, "d": []}, "e": {}}
    assert json.loads(records.dumps(value)) == value


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}", "utf-8")
    with pytest.raises(HyperkronError, match=r"x\.json' is no result"):
        Result.read(tmp_path / "x.json")


# --- the page ----------------------------------------------------------------------------------------------


def test_printed_numbers_ship_with_the_package() -> None:
    assert printed("table_amortization_resnet18")["rows"][0] == [1, 1.24, 1.21, 0.69, 1.83]
    assert printed("table_bert_hypercleaning")["1_layer"]["KFAC"][0] == [77.62, 1.28, 772.8, 3.4]
    with pytest.raises(HyperkronError, match="table='x' is unknown"):
        printed("x")


def test_a_smoke_run_is_not_judged_and_does_not_sound_like_a_failure() -> None:
    recipe = Counted().recipe
    assert recipe.judge(None).verdict is Verdict.NOT_RUN
    smoke = recipe.judge(Result("counted", "smoke", (1,), {}))
    assert smoke.verdict is Verdict.UNJUDGED and smoke.because.startswith("Everything ran")
    assert recipe.judge(Result("counted", "small", (1,), {})).verdict is Verdict.REPRODUCED


def test_weights_that_were_never_updated_leave_no_verdict(tmp_path: Path) -> None:
    few, many = Visits("AID-KFAC", 1000, 100, 1_000_000), Visits("AID-KFAC", 998, 100, 1000)  # two steps only measure
    assert few.never == pytest.approx(0.9999**1000) and many.mean == 99.8
    result = Result("counted", "small", (1,), {"sum": 1})
    judged = {x: replace(Counted().recipe, weights=lambda result, x=x: [many, x]).judge(result) for x in (few, many)}
    assert judged[many].verdict is Verdict.REPRODUCED
    assert judged[few].verdict is Verdict.REFUSED
    assert judged[few].because.startswith("In 1 of 2 runs more than 20% of the weights were never updated; in AID-KFAC")
    assert judged[few].because.endswith("What was measured: It adds up.")
    section = page.section(replace(Counted().recipe, weights=lambda result: [few]), result, tmp_path)
    assert section.tables[-1].rows == [["AID-KFAC", "1000", "100", "1000000", "0.1", "90%"]]


@pytest.mark.parametrize("verdict", [Verdict.REPRODUCED, Verdict.FAILED])
def test_runs_shorter_than_the_paper_s_leave_no_verdict(verdict: Verdict) -> None:
    """Whatever they found: one rule for all recipes that learn weights."""
    whole, short = Visits("AID-KFAC", 998, 100, 100), Visits("AID-CG-3", 997, 100, 100)
    recipe = replace(Counted().recipe, verdict=lambda result: Judgement(verdict, "So it is."))
    result = Result("counted", "small", (1,), {"sum": 1})
    assert replace(recipe, weights=lambda result: [whole]).judge(result).verdict is verdict
    found = replace(recipe, weights=lambda result: [whole, short]).judge(result)
    assert found.verdict is Verdict.REFUSED
    assert found.because.startswith("Too short: λ was updated 997 to 998 times") and "So it is." in found.because


def test_a_result_that_was_cut_short_counts_as_trend_at_most() -> None:
    for given, expected in ((Verdict.REPRODUCED, Verdict.TREND), (Verdict.FAILED, Verdict.FAILED)):
        recipe = replace(Counted().recipe, verdict=lambda result, v=given: Judgement(v, "So it is."))
        whole = Result("counted", "small", (1,), {"sum": 3})
        assert recipe.judge(whole) == Judgement(given, "So it is.")
        assert recipe.judge(replace(whole, complete=False)).verdict is expected


def test_the_page_shows_the_verdict_and_the_record_rule_table_and_origin(tmp_path: Path) -> None:
    recipe = Counted().recipe
    result = Result(
        "counted", "small", (1, 2), {"sum": 7}, command="python -m y", hardware={"gpu": "G"}, complete=False
    )
    section = page.section(recipe, result, tmp_path)
    text, record = page.markdown([section]), page.record(section)
    for told in (text, record):
        assert "**Reproduced in trend.** It adds up. The run was cut short" in told
    for words in ("*Rule:* Always reproduced.", "`python -m y`; G", "cut short", "| sum | 7 |"):
        assert words in record
    assert "(paper/counted.md)" in text and "Counting \\| twice" in text.splitlines()[6]  # in the overview's table


def test_runs_of_the_papers_length_decide(tmp_path: Path) -> None:
    recipe, result = Counted().recipe, Result("counted", "small", (1, 2), {"sum": 7})
    longer = Judgement(Verdict.FAILED, "It does not add up."), "counted-length.md"
    section = page.section(recipe, result, tmp_path, longer)
    text, record = page.markdown([section]), page.record(section)
    assert "**Not reproduced.** It does not add up." in text and "(counted-length.md)" in text
    assert "(../counted-length.md)" in record and "Reproduced" not in record.splitlines()[2]
    assert "The shorter runs below: reproduced. It adds up." in record and "| sum | 7 |" in record


def test_a_program_has_the_verdict_of_its_runs_and_no_record() -> None:
    section = page.of_program(paper.programs()["batch-resnet"])
    text = page.markdown([section])
    assert "## Figure 3; Figure 7: Batch sizes, ResNet-18" in text and "(resnet-length.md)" in text
    assert f"**{section.judgement.verdict.value.capitalize()}.**" in text and not section.anchor


def test_the_largest_scale_is_shown() -> None:
    of = {scale: Result("x", scale, (1,), {}) for scale in ("smoke", "small")}  # type: ignore[arg-type]
    assert page.best(of) is of["small"] and page.best({}) is None


def test_the_page_of_no_results_names_every_table_and_figure(tmp_path: Path) -> None:
    written = paper.report(tmp_path / "none", tmp_path / "out")
    text = written[0].read_text("utf-8")
    assert written[0].name == "paper.md"
    assert {path.stem for path in written[1:]} == set(paper.recipes())
    text += "".join(path.read_text("utf-8") for path in written[1:])
    every = [*paper.recipes().values(), *paper.programs().values()]
    assert {name for one in every for name in one.place.split("; ")} == set(places.PLACES)
    for place in places.PLACES:
        assert place in text
    for number in ("7.62e-03", "88.4", "85.04 ± 0.23", "5.4", "42.33"):  # tables 1 and 3 to 6
        assert number in text
    first = [line for line in text.split("##")[0].splitlines() if "| reproduced in trend |" in line]
    places_of = [line.split("|")[1].strip() for line in first]
    assert places_of == ["Figure 1, top", "Figure 2", "Figure 3; Figure 7"]  # by runs of the paper's length


def test_results_of_unknown_recipes_are_refused(tmp_path: Path) -> None:
    Result("stranger", "small", (1,), {}).write(tmp_path)
    with pytest.raises(HyperkronError, match="unknown recipes: stranger"):
        paper.report(tmp_path, tmp_path / "out")


# --- the commands ------------------------------------------------------------------------------------------


def test_list_names_every_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines if line and not line.startswith("These")]
    assert names == [*paper.recipes(), *paper.programs()]


def test_a_program_is_tried_out_at_smoke_scale_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "resnet-cifar", "--scale", "small"]) == 1
    assert "resnet-cifar has a program of its own: python -m experiments.paper.resnet_length" in capsys.readouterr().err


def test_a_mistake_is_said_and_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "nothing", "--folder", str(tmp_path)]) == 1
    assert "name='nothing' is no recipe" in capsys.readouterr().err


def test_run_all_takes_what_the_device_is_meant_for_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_cpu, on_gpu = Counted(), Counted(name="other", gpu=("small",))
    monkeypatch.setattr(paper, "recipes", lambda: {"counted": on_cpu.recipe, "other": on_gpu.recipe})
    arguments = ["run", "all", "--scale", "small", "--seeds", "2", "--folder", str(tmp_path)]
    assert main([*arguments, "--limit-minutes", "-1"]) == 3 and on_cpu.done == []
    assert "no time left" in capsys.readouterr().err
    assert main(arguments) == 0
    assert on_cpu.done == [1, 2] and on_gpu.done == []
    (tmp_path / "counted-small.cells.jsonl").unlink()
    assert main(arguments) == 0 and on_cpu.done == [1, 2]  # the result is complete
    assert main(["run", "all", "--seeds", "1", "--folder", str(tmp_path)]) == 0  # at smoke scale neither needs a GPU
    assert on_gpu.done == [1]


def test_run_all_gives_several_processes_to_recipes_that_can_share_their_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others measure times, for which they need the device to themselves."""
    seen: list[tuple[str, int]] = []
    alone, shared = Counted(), Counted(name="shared", fill=lambda job, recipe, workers: seen.append(("fill", workers)))
    monkeypatch.setattr(paper, "recipes", lambda: {"counted": alone.recipe, "shared": shared.recipe})
    assert main(["run", "all", "--workers", "3", "--folder", str(tmp_path)]) == 0
    assert seen == [("fill", 3)] and alone.done == shared.done == [1]
