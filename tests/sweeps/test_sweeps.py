"""Sweeps: what is searched, what is counted, and the command."""

from __future__ import annotations

import csv
import errno
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import hyperkron as hk
from hyperkron.cli import main
from hyperkron.sweeps import Range, SweepResult, Trial, parse_space, read_sweep, sweep
from hyperkron.sweeps.queue import TrialQueue

SPACE = {"x": Range(0.0, 1.0)}


def parabola(trial: Trial) -> float:
    return float((trial["x"] - 0.3) ** 2)


# --- what is searched --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["x", "x=", "=1..2", "x y=1..2", "x=a..b", "x=1..2..3", "x=1..b:log"])
def test_a_search_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(hk.HyperkronError, match="search="):
        parse_space([text])


def test_spaces() -> None:
    assert parse_space(["a=-1..2", "b=0.5,none,3"]) == {"a": Range(-1, 2), "b": [0.5, "none", 3]}
    with pytest.raises(hk.HyperkronError, match=r"search='a=3'.* once"):
        parse_space(["a=1..2", "a=3"])
    for low, high, log in ((2, 1, False), (0, 1, True), (0, float("inf"), False), (float("nan"), 1, False)):
        with pytest.raises(hk.HyperkronError, match="low < high"):
            Range(low, high, log)
    with pytest.raises(hk.HyperkronError, match=r"space\['x'\]=\[\] must be a Range"):
        sweep(parabola, {"x": []}, storage="never.db")


# --- one worker --------------------------------------------------------------------------------------------


def test_a_sweep_searches_counts_and_continues(tmp_path: Path) -> None:
    file, seen = str(tmp_path / "{a}" / "s.db"), list[int]()

    def function(trial: Trial) -> float:
        seen.append(trial.number)
        if trial.number == 1:
            raise hk.NonFiniteError("the loss is nan")
        if trial.number == 2:
            return float("nan")
        if trial.number == 3 and seen.count(3) == 1:
            raise KeyboardInterrupt
        return parabola(trial)

    with pytest.raises(KeyboardInterrupt):
        sweep(function, SPACE, trials=6, storage=file)
    assert [t.state for t in read_sweep(file).trials] == ["done", "failed", "failed", "waiting"]
    found = sweep(function, SPACE, trials=6, storage=file)
    assert seen == [0, 1, 2, 3, 3, 4, 5], "the interrupted trial is repeated, the failed ones are not"
    assert [t.state for t in found.trials] == ["done", "failed", "failed", "done", "done", "done"]
    assert [t.attempts for t in found.trials] == [1, 1, 1, 2, 1, 1]
    assert "the loss is nan" in found.trials[1].error and "returned nan" in found.trials[2].error
    best = min(found.ranked, key=lambda t: (t.settings["x"] - 0.3) ** 2)
    assert found.best == best and found.best.value == (best.settings["x"] - 0.3) ** 2
    assert sweep(function, SPACE, trials=6, storage=file) == found and len(seen) == 7, "nothing is left to do"


def test_trials_of_other_code_are_warned_of(tmp_path: Path) -> None:
    """They would be taken for those of the function that is given now."""
    file, around = str(tmp_path / "s.db"), [0.3]

    def first(trial: Trial) -> float:
        return parabola(trial) * around[0]

    def second(trial: Trial) -> float:
        return -parabola(trial) * around[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        sweep(first, SPACE, trials=1, storage=file)
        around[0] = 0.5  # values are not code
        found = sweep(first, SPACE, trials=2, storage=file)
    with pytest.warns(
        hk.HyperkronWarning, match=r"study='sweep' was begun with other code \(function\), and its 2 trials"
    ):
        assert sweep(second, SPACE, trials=2, storage=file) == found


def test_no_tensor_is_read_to_compare_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.ones(3)
    monkeypatch.setattr("hyperkron.training.program._read", lambda lines: pytest.fail("it was read"))
    sweep(lambda trial: float(data.sum()), SPACE, trials=1, storage=str(tmp_path / "s.db"))


class Found:
    def value(self) -> float:
        return 0.5


_found: Found | None = None


def test_a_value_that_an_earlier_trial_left_behind_is_no_other_code(tmp_path: Path) -> None:
    def function(trial: Trial) -> float:
        global _found
        _found = _found or Found()
        return parabola(trial) * _found.value()

    with warnings.catch_warnings():
        warnings.simplefilter("error", hk.HyperkronWarning)
        for trials in (1, 2):
            sweep(function, SPACE, trials=trials, storage=str(tmp_path / "s.db"))


def test_a_seed_may_have_more_bits_than_those_of_numpy(tmp_path: Path) -> None:
    runs = [sweep(parabola, SPACE, trials=1, storage=str(tmp_path / f"{s}.db"), seed=s) for s in (1, 2**32 + 1)]
    assert runs[0].trials[0].settings == runs[1].trials[0].settings


def test_the_same_seed_gives_the_same_trials(tmp_path: Path) -> None:
    runs = [sweep(parabola, SPACE, trials=3, storage=str(tmp_path / f"{i}.db"), seed=i // 2) for i in range(3)]
    first, again, other = ([t.settings for t in run.trials] for run in runs)
    assert first == again != other
    with pytest.raises(hk.HyperkronError, match=r"study='sweep' was begun with others \(x\)"):
        sweep(parabola, {"x": Range(0.0, 2.0)}, trials=3, storage=str(tmp_path / "0.db"))
    with pytest.raises(hk.HyperkronError, match=r"\(direction\)"):
        sweep(parabola, SPACE, trials=3, storage=str(tmp_path / "0.db"), maximize=True)
    with pytest.raises(hk.HyperkronError, match="study='other' is not in the storage, which has sweep"):
        read_sweep(str(tmp_path / "0.db"), "other")


def test_errors_of_the_program_are_raised_and_recorded(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="y is not searched, only x; add it to the space"):
        sweep(lambda trial: trial["y"], SPACE, storage=str(tmp_path / "s.db"))
    (row,) = read_sweep(str(tmp_path / "s.db")).trials
    assert row.state == "failed"
    assert row.error.startswith("KeyError: 'y is not searched")
    with pytest.raises(hk.HyperkronError, match=r"none of 1 has a value \(KeyError"):
        read_sweep(str(tmp_path / "s.db")).best  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"storage": "mysql://me:secret@host/base"}, "storage='mysql'... must be the path of an SQLite file"),
        ({"storage": "sqlite://"}, "must be the path"),
        ({"storage": "."}, "storage='.'... must be the path"),
        ({"storage": "postgresql+nothing://me:secret@nowhere/base"}, r"postgresql\+nothing://me:\*\*\*@nowhere"),
        ({"trials": 0}, "trials=0"),
        ({"heartbeat": 0.5}, "heartbeat=0.5"),
        ({"space": {}}, "space={} has no settings to search"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(hk.HyperkronError, match=message) as caught:
        sweep(parabola, **{"space": SPACE, "storage": "never.db", **arguments})
    assert "secret" not in str(caught.value)


def test_fit_is_pruned(tmp_path: Path) -> None:
    """Trials whose outer loss is worse than the median of the earlier ones end before their last step."""
    problem = hk.BilevelProblem(
        lambda m, h, batch: hk.losses.mse(m(batch), h() * batch), lambda m, h, batch: hk.losses.mse(m(batch), 3 * batch)
    )
    x, steps = torch.ones(2, 1), list[int]()

    def function(trial: Trial) -> float:
        torch.manual_seed(0)
        model, shift = torch.nn.Linear(1, 1, bias=False), hk.as_hyper(torch.zeros(1))
        algorithm = hk.algorithms.aid_cg(1, outer_rate=trial["rate"])
        steps.append(0)
        count = hk.training.Evaluate(lambda run: steps.__setitem__(-1, run.state.step), every=1)
        calls = [count, trial.pruning(every=2)]
        run = hk.fit(problem, model, shift, algorithm, x, x, steps=4, callbacks=calls)
        return float(run.history.column("outer_loss")[-1])

    found = sweep(function, {"rate": Range(1e-3, 0.5, log=True)}, trials=8, storage=str(tmp_path / "s.db"))
    pruned = [t.number for t in found.trials if t.state == "pruned"]
    assert pruned and all(steps[n] < 4 for n in pruned) and all(steps[t.number] == 4 for t in found.ranked)


@pytest.mark.parametrize(
    ("maximize", "figure", "mode", "sign"),
    [
        (False, "outer_loss", None, 1.0),
        (True, "outer_loss", None, -1.0),  # a lower loss is better also where the value is an accuracy
        (True, "accuracy", None, 1.0),
        (False, "accuracy", "max", -1.0),
    ],
)
def test_what_is_better_on_the_way_is_reported_as_the_value_is(
    tmp_path: Path, maximize: bool, figure: str, mode: str | None, sign: float
) -> None:
    queue = TrialQueue(str(tmp_path / "s.db"), "sweep", {"rate": Range(0.0, 1.0)}, maximize)
    trial = Trial(queue, queue.take(1, 0))
    seen = [0.75, None, 0.25]  # nothing is reported of a step that was skipped
    run: Any = SimpleNamespace(row={}, state=SimpleNamespace(step=0))
    prune = trial.pruning(figure, 1, mode)
    for value in seen:
        run.state.step += 1
        run.row = {figure: value}
        prune.function(run)
    (found,) = queue.study.get_trials()
    assert found.intermediate_values == {1: sign * 0.75, 3: sign * 0.25}
    with pytest.raises(KeyError, match="step 3 has no column loss, only "):
        trial.pruning("loss").function(run)


# --- the command line --------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_command_starts_workers(tmp_path: Path) -> None:
    """Three processes share the trials: each is done once."""
    (tmp_path / "mine.py").write_text("def error(trial):\n    return (trial['x'] - 0.3) ** 2\n")
    command = [sys.executable, "-m", "hyperkron", "sweep", "mine:error", "--search", "x=0.0..1.0"]
    done = subprocess.run([*command, "--trials", "9", "--workers", "3"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "9 trials: 9 done" in done.stdout + done.stderr, done.stderr
    assert [trial.state for trial in read_sweep(str(tmp_path / "sweep.db")).trials] == ["done"] * 9


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_search.py").write_text("def train(trial):\n    return trial['x'] + (trial['kind'] == 'b')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    search = ["--search", "x=0..9", "kind=a,b", "--trials", "5"]
    assert main(["sweep", "my_search:train", *search, "--quiet", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["trials"]) == 5 and said["best"]["value"] == min(t["value"] for t in said["trials"])
    assert main(["sweep", "show", "-o", "trials.csv"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["trial", "value", "x", "kind", "seconds"] and table[-1] == "5 trials: 5 done"
    with open("trials.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["value"]) for row in rows] == [t["value"] for t in said["trials"]]
    assert main(["sweep", "show", "-o", "trials.json", "--quiet"]) == 0
    assert json.loads(Path("trials.json").read_text()) == said["trials"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["m:f"], 2, "--search is missing"),
        (["nothing_here:f", "--search", "x=1..2"], 1, "FUNCTION='nothing_here:f': the module"),
        (["json:dumps", "--search", "x=2..1"], 1, "low < high"),
        (["json:dumps", "--search", "x=1..2", "--storage", "mysql://h/b"], 1, "--storage='mysql'... must be the path"),
        (["show", "--storage", "nothing.db"], 1, "--storage='nothing.db' is not the database"),
        (["clean", "--search", "epochs=1..2"], 2, "--config is missing"),
        (["json:dumps", "--search", "x=1..2", "--workers", "0"], 2, "--workers=0"),
    ],
)
def test_mistakes_of_the_command(
    arguments: list[str], code: int, message: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments]) == code
    assert message in capsys.readouterr().err


def test_settings_of_clean_are_searched(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import hyperkron.cleaning as cleaning

    asked = []

    def fake(train: Any, trusted: Any, *, config: Any, progress: bool, **reading: Any) -> Any:
        asked.append((train, trusted, config, reading))
        return type("Result", (), {"candidates": [{"accuracy": config.epochs / 10}]})

    monkeypatch.setattr(cleaning, "clean", fake)
    monkeypatch.chdir(tmp_path)
    Path("c.json").write_text('{"train": "a.csv", "trusted": "b.csv", "label": "y", "seed": 3}')
    assert main(["sweep", "clean", "--config", "c.json", "--search", "epochs=2..4", "--trials", "4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["best"]["value"] == max(t["value"] for t in said["trials"]) == said["best"]["settings"]["epochs"] / 10
    train, trusted, config, reading = asked[0]
    assert (train, trusted, config.seed, config.compare, reading) == ("a.csv", "b.csv", 3, (), {"label": "y"})
    assert main(["sweep", "clean", "--config", "c.json", "--search", "rate=2..4"]) == 2
    assert "--search='rate' is not a setting of clean" in capsys.readouterr().err


def test_a_file_of_trials_that_cannot_be_written_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, before = SweepResult([], False), "trial,value\n0,1.0\n"
    (tmp_path / "trials.csv").write_text(before)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        for name in ("trials.csv", "trials.json"):
            with pytest.raises(hk.HyperkronError, match=f"{name}' cannot be written: the disk is full"):
                found.write(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["trials.csv"]
    assert (tmp_path / "trials.csv").read_text() == before
    with pytest.raises(hk.HyperkronError, match=r"cannot be written .No such file"):
        found.write(tmp_path / "none" / "trials.csv")


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_result_without_trials() -> None:
    assert SweepResult([], False).table().endswith("0 trials: ")
