"""The run folder of ``clean``: what it holds, and going on after an interruption, damage, or a change of the data."""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from blobs import Blobs, Watch, blobs, quicken, write_csv
from hyperkron import solution
from hyperkron.cleaning import OURS, CleanConfig, CleanResult, budget, clean, load, resume
from hyperkron.cleaning.api import assist
from hyperkron.cleaning.data import read_pair
from hyperkron.cleaning.folder import fingerprint, has_whole_result
from hyperkron.cleaning.report import write_report
from hyperkron.cleaning.stages import RULES, Stages
from hyperkron.solution import HyperkronError, HyperkronWarning
from hyperkron.training import Interrupted
from hyperkron.training.locks import FolderLock

CONFIG = CleanConfig(epochs=1, compare=("noisy", "sama"))
VARYING = ("created", "seconds", "peak_memory_mb")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


class Files:
    """The data as files, a whole run of them, and fresh folders."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, blobs(rows=120)
        self.train = write_csv(folder / "train.csv", self.data.train)
        self.trusted = write_csv(folder / "trusted.csv", self.data.trusted)
        self.test = write_csv(folder / "test.csv", self.data.test)
        self.watch = Watch()
        self.result = self.clean("whole", progress=self.watch)
        self.whole = folder / "whole"

    def clean(self, name: str, config: CleanConfig = CONFIG, progress: Watch | None = None) -> CleanResult:
        out = self.folder / name
        return clean(self.train, self.trusted, test=self.test, out=out, config=config, progress=progress, command="me")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        return Files(tmp_path_factory.mktemp("files"))


def contents(folder: Path) -> dict[str, Any]:
    """What must not depend on interruptions."""
    result = json.loads((folder / "result.json").read_text())
    found: dict[str, Any] = {key: value for key, value in result.items() if key not in VARYING}
    found["candidates"] = [candidate | {"seconds": None} for candidate in found["candidates"]]
    return found | {n: (folder / n).read_bytes() for n in ("rows.csv", "suspects.jsonl", "model.safetensors")}


def test_the_folder_is_as_agreed(files: Files) -> None:
    result = json.loads((files.whole / "result.json").read_text())
    assert (
        result["format"] == 1 and result["command"] == "me" and result == json.loads(json.dumps(files.result.summary))
    )
    kinds = {"hyperkron": str, "created": str, "versions": dict, "hardware": str, "peak_memory_mb": float}
    kinds |= {"chosen": str, "verdict": str, "evidence": dict, "config": dict}
    for name, kind in kinds.items():
        assert isinstance(result[name], kind), name
    assert {"total", "cleaning", "plain", "comparison"} <= set(result["seconds"])
    about = {"kind": "table", "train_rows": 120, "trusted_rows": 24, "classes": ["A", "B", "C"]}
    assert about.items() <= result["data"].items() and result["data"]["trusted_per_class"] == [8, 8, 8]
    assert sum(result["data"]["train_per_class"]) == 120 and result["data"]["messages"] == []
    wanted = {"name", "description", "accuracy", "low", "high", "rows", "chosen", "test_accuracy"}
    assert [c["name"] for c in result["candidates"]] == [OURS, "noisy", "sama"]
    assert all(wanted <= set(c) and isinstance(c["test_accuracy"], float) for c in result["candidates"])
    edges, counts = result["weights"]["edges"], result["weights"]["counts"]
    assert len(edges) == len(counts) + 1 and sum(counts) == 120
    assert result["config"]["compare"] == ["noisy", "sama"] and result["config"]["epochs_used"] == 1


def test_rows_and_suspects_are_those_of_the_result(files: Files) -> None:
    found, given = files.result, files.data.noisy.tolist()
    with (files.whole / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["row", "given", "suggested", "error_probability", "weight", "suspect"]
    assert [int(r["row"]) for r in rows] == list(range(120)) and [r["given"] for r in rows] == ["ABC"[y] for y in given]
    assert [r["suggested"] for r in rows] == ["ABC"[k] for k in found.suggested.tolist()]
    numbers = torch.tensor([[float(r["error_probability"]), float(r["weight"])] for r in rows])
    assert torch.allclose(numbers, torch.stack([found.error_probability, found.weights], 1), atol=1e-6)
    flagged = {int(r["row"]) for r in rows if r["suspect"] == "true"}
    assert flagged == set(found.suspects.tolist()) and len(flagged) == found.summary["suspects"]["count"] > 10
    suspects = [json.loads(line) for line in (files.whole / "suspects.jsonl").read_text().splitlines()]
    assert [s["row"] for s in suspects] == found.suspects.tolist()
    for s in suspects:
        assert s["text"] is None and s["image"] is None and set(s["features"]) == {"across", "up"}
        assert s["features"]["up"] == pytest.approx(float(files.data.x[s["row"], 1]), abs=1e-5)
        assert len(s["weights"]) == 6 and s["weights"][0] == 1 and s["given"] == "ABC"[given[s["row"]]]
        assert s["weights"][-1] == pytest.approx(1 - s["error_probability"], abs=1e-4)


def test_the_model_and_the_report_are_there(files: Files) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    kept = safetensors.load_file(files.whole / "model.safetensors")
    state = files.result.model.state_dict()
    assert set(kept) == set(state) and all(torch.equal(kept[name], state[name]) for name in state)
    page = write_report(files.whole).read_text()
    assert "marked as suspects" in page and "hyperkron" in page and "sama" in page
    events = [json.loads(line)["event"] for line in (files.whole / "log.jsonl").read_text().splitlines()]
    assert "part" in events


def test_progress_announces_about_what_comes(files: Files) -> None:
    assert len(files.watch.totals) == 1 and files.watch.stops == 1
    assert 0.6 < files.watch.steps / files.watch.totals[0] <= 1.0


def test_interruptions_leave_no_trace(files: Files) -> None:
    """Stopped in the first stage, the second, two later ones, and among the alternatives."""
    out, finished = files.folder / "stopped", []
    stops = [(7, signal.SIGINT), (20, signal.SIGTERM), (85, signal.SIGINT), (100, signal.SIGINT), (250, signal.SIGTERM)]
    for turn, (after, number) in enumerate(stops):
        before = signal.getsignal(number)
        watch = Watch(after, number)
        with pytest.raises(Interrupted) as stopped:
            resume(out, progress=watch) if turn else files.clean("stopped", progress=watch)
        assert stopped.value.code == 128 + number and signal.getsignal(number) is before
        assert not has_whole_result(out) and watch.stops == 1
        finished.append(len(list((out / "stages").glob("*.json"))))
    assert finished[:2] == [0, 1] and finished == sorted(finished) and finished[4] >= 5
    again = resume(out, progress=(last := Watch()))
    assert 0 < last.steps < files.watch.steps - 250  # finished stages were not computed again
    assert last.steps <= last.totals[0] < 1.2 * last.steps + 200 < files.watch.totals[0]  # nor announced
    assert contents(out) == contents(files.whole)
    assert torch.equal(again.error_probability, files.result.error_probability)


def test_two_writers_do_not_share_a_folder(files: Files) -> None:
    """The second is told who the first is, and touches nothing."""
    before = contents(files.whole)
    with FolderLock(files.whole), pytest.raises(HyperkronError, match=r"is being written by process \d+"):
        resume(files.whole)
    assert contents(files.whole) == before
    assert resume(files.whole).suspects.tolist() == files.result.suspects.tolist()


def test_a_finished_run_is_read_again_but_never_overwritten(files: Files) -> None:
    before = {c["name"]: c["seconds"] for c in json.loads((files.whole / "result.json").read_text())["candidates"]}
    again = resume(files.whole, progress=(watch := Watch()))
    assert all(c["seconds"] >= before[c["name"]] - 0.02 for c in again.candidates)  # the log keeps what was spent
    assert watch.steps == 0 and torch.equal(again.weights, files.result.weights)
    with pytest.raises(HyperkronError, match="holds a finished run; replace it with overwrite=True"):
        files.clean("whole")


@pytest.mark.parametrize("damage", ["cut", "flip", "record", "seconds", "gone"])
def test_a_damaged_stage_is_computed_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []

    def compute() -> dict[str, torch.Tensor]:
        computed.append(1)
        return {"x": torch.arange(3.0)}

    Stages(tmp_path, "these data")("one", compute)
    path = tmp_path / "one.safetensors"
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "record":
        path.with_suffix(".json").write_text("{")
    elif damage == "seconds":
        about = json.loads(path.with_suffix(".json").read_text())
        path.with_suffix(".json").write_text(json.dumps(about | {"seconds": "long"}))
    else:
        path.unlink()
    monkeypatch.setattr(solution, "_warned", set())
    with pytest.warns(HyperkronWarning, match="stage one is damaged .*; it is computed again"):
        Stages(tmp_path, "these data")("one", compute)
    assert Stages(tmp_path, "these data")("one", compute)["x"].tolist() == [0, 1, 2] and len(computed) == 2


def test_a_run_computes_a_damaged_stage_again(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = contents(files.whole)
    (files.whole / "stages" / "judged-noisy.safetensors").unlink()
    monkeypatch.setattr(solution, "_warned", set())
    with pytest.warns(HyperkronWarning, match="stage judged-noisy is damaged .*; it is computed again"):
        resume(files.whole, progress=(watch := Watch()))
    assert watch.steps > 0 and contents(files.whole) == wanted


def test_other_data_is_refused(files: Files, tmp_path: Path) -> None:
    train, out = tmp_path / "train.csv", tmp_path / "out"
    train.write_bytes(files.train.read_bytes())
    with pytest.raises(Interrupted):
        clean(train, files.trusted, out=out, config=CONFIG, progress=Watch(3))
    lines = train.read_text().splitlines()
    for changed in ([*lines[:-1]], [lines[0], lines[1][:-1] + "BA"[lines[1][-1] == "B"], *lines[2:]]):
        train.write_text("\n".join(changed) + "\n")
        wanted = rf"the data in .*train\.csv', .*{files.trusted.name}' is not what the run in .* began with; restore"
        with pytest.raises(HyperkronError, match=wanted):
            resume(out)


def test_the_fingerprint_sees_inputs_labels_and_classes() -> None:
    base = {"x": ["one", "two", "three"], "y": ["a", "b", "a"]}
    trusted = {"x": ["four", "five"], "y": ["a", "b"]}
    seen = {fingerprint(list(read_pair(base, trusted)))}
    for change in ({"x": ["one", "tw", "othree"]}, {"y": ["a", "b", "b"]}, {"y": ["c", "b", "c"]}):
        other = trusted if "c" not in change.get("y", []) else {"x": trusted["x"], "y": ["c", "b"]}
        seen.add(fingerprint(list(read_pair(base | change, other))))
    assert len(seen) == 4


def test_what_cannot_be_resumed_says_why(files: Files, tmp_path: Path) -> None:
    with pytest.raises(HyperkronError, match=r"holds no run: there is no config\.json"):
        resume(tmp_path)
    data: Blobs = files.data
    with pytest.raises(Interrupted):
        clean(data.train, data.trusted, out=tmp_path / "memory", config=CONFIG, progress=Watch(2))
    with pytest.raises(HyperkronError, match=r"^the run in '.*memory' was made from data in memory"):
        resume(tmp_path / "memory")
    own: dict[str, Any] = {"model": lambda: nn.Linear(2, 3), "config": CONFIG, "progress": Watch(2)}
    with pytest.raises(Interrupted):
        clean(files.train, files.trusted, out=tmp_path / "own", **own)
    with pytest.raises(HyperkronError, match=r"used your own model .*; pass it again as model="):
        resume(tmp_path / "own")
    for text in ("{", '{"format": 99}', "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(HyperkronError, match="restore the file or run `hyperkron clean` again"):
            resume(tmp_path)


def test_a_budget_is_decided_once(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "seconds_per_step", lambda work: 1.0)
    monkeypatch.setattr(budget, "seconds_of", lambda fits, measured: 0.0)
    config = CleanConfig(epochs=3, compare=("noisy",), budget=20.0)
    with pytest.raises(Interrupted):
        clean(files.train, files.trusted, out=tmp_path / "run", config=config, progress=Watch(3))
    monkeypatch.setattr(budget, "seconds_per_step", lambda work: 1e-9)  # a faster machine now
    found = resume(tmp_path / "run")
    assert found.summary["config"]["epochs_used"] == 1.0 and [c["name"] for c in found.candidates] == [OURS]
    said = found.summary["data"]["messages"][0]
    assert said.startswith("Training is shortened to 1.0 epochs") and "Wrong labels may be missed" in said


def changed(files: Files, out: Path, **settings: Any) -> Path:
    """A copy of the whole run with other entries in config.json; None removes one."""
    shutil.copytree(files.whole, out, dirs_exist_ok=True)
    kept = json.loads((out / "config.json").read_text()) | settings
    gone = [name for name, value in settings.items() if value is None]
    (out / "config.json").write_text(json.dumps({name: x for name, x in kept.items() if name not in gone}))
    return out


def test_a_run_that_other_rules_began_is_not_continued(files: Files, tmp_path: Path) -> None:
    kept = json.loads((files.whole / "config.json").read_text())
    assert kept["rules"] == RULES
    for began, told in ((RULES - 1, f"with rules {RULES - 1}"), (None, "with rules that were not recorded")):
        out = changed(files, tmp_path / "run", rules=began)
        for go_on in (partial(resume, out), partial(assist, out, 2)):
            with pytest.raises(HyperkronError, match=told) as error:
                go_on()
            wanted = f"begun by hyperkron {kept['environment']['hyperkron']} .*, has rules {RULES}: .*begin a new run"
            assert re.search(wanted, str(error.value))
        assert len(load(out).weights) == len(files.result.weights)


def test_a_setting_that_this_version_does_not_have_is_named(files: Files, tmp_path: Path) -> None:
    settings = json.loads((files.whole / "config.json").read_text())["config"]
    out = changed(files, tmp_path / "run", config={**settings, "colour": "red"})
    with pytest.raises(
        HyperkronError, match=r"begun with other settings than this version has \(colour\); begin a new run"
    ):
        resume(out)


def test_stages_of_other_rules_are_refused_though_config_json_was_changed(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hyperkron.cleaning.recorded.RULES", RULES + 1)
    with pytest.raises(HyperkronError, match="was computed with other data, settings"):
        resume(changed(files, tmp_path / "run", rules=RULES + 1))


def test_other_code_of_this_library_is_said(files: Files, tmp_path: Path) -> None:
    kept = json.loads((files.whole / "config.json").read_text())
    assert re.fullmatch("[0-9a-f]{12}", kept["environment"]["code of hyperkron"])
    others = kept["environment"] | {"code of hyperkron": "0123456789ab"}
    found = resume(changed(files, tmp_path / "run", environment=others))
    [told] = [m for m in found.summary["data"]["messages"] if "The run began with" in m]
    assert "code of hyperkron 0123456789ab (now " in told


def test_the_time_of_a_plain_training_is_left_out_where_it_is_not_known(files: Files, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")  # trees are tried, so the noisy expert tells
    out = changed(files, tmp_path / "run")
    assert files.result.summary["seconds"]["plain"] > 0
    about = json.loads((out / "stages" / "noisy-expert.json").read_text())
    (out / "stages" / "noisy-expert.json").write_text(json.dumps(about | {"seconds": 0.0}))
    seconds = resume(out).summary["seconds"]
    assert "plain" not in seconds and seconds["cleaning"] > 0
    assert "× one plain training" not in write_report(out).read_text()
