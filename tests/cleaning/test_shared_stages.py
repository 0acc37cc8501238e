"""Several processes on one run: each stage is computed once, and the run is that of one process."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from blobs import blobs, quicken, write_csv
from hyperkron import cleaning
from hyperkron.cleaning import api, stages
from hyperkron.cleaning.run import Sharing
from hyperkron.cleaning.stages import Stages, in_turn
from hyperkron.training import CheckpointError, Interrupted
from hyperkron.training.locks import FolderLock


def shared_stages(folder: Path) -> Stages:
    return Stages(folder, "", torch.device("cpu"), lambda: None)


def test_a_stage_is_computed_by_the_first_and_awaited_by_the_second(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(stages, "SECONDS_BETWEEN_LOOKS", 0.01)
    computed: list[str] = []
    begun, may_end = threading.Event(), threading.Event()

    def slow() -> dict[str, Tensor]:
        begun.set()
        computed.append("first")
        assert may_end.wait(60)
        return {"x": torch.ones(2)}

    first = threading.Thread(target=lambda: shared_stages(tmp_path)("one", slow))
    first.start()
    assert begun.wait(60)
    second, found = shared_stages(tmp_path), list[Any]()
    assert second.taken("one") and not second.taken("two")
    assert list(in_turn(second, ["one", "two", "three"], "")) == ["two", "three", "one"]
    waiting = threading.Thread(target=lambda: found.append(second("one", lambda: computed.append("second") or {})))
    waiting.start()
    may_end.set()
    first.join(60)
    waiting.join(60)
    assert computed == ["first"] and found[0]["x"].tolist() == [1, 1] and not second.taken("one")


def test_a_claim_ends_with_an_error(tmp_path: Path) -> None:
    def fails() -> dict[str, Tensor]:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        shared_stages(tmp_path)("one", fails)
    other = shared_stages(tmp_path)
    assert not other.taken("one") and other("one", lambda: {"x": torch.zeros(1)})["x"].tolist() == [0]
    assert list(in_turn(Stages(None), ["b", "a"], "")) == ["b", "a"]  # one process keeps the order


def test_a_claim_that_cannot_be_made_is_an_error_and_not_a_wait(tmp_path: Path, monkeypatch: Any) -> None:
    def waits(seconds: float) -> None:
        raise AssertionError("it waits for another process")

    monkeypatch.setattr("hyperkron.cleaning.stages.time.sleep", waits)
    (tmp_path / "claims").write_text("")
    shared = shared_stages(tmp_path)
    with pytest.raises(CheckpointError, match="could not be locked"):
        shared("one", lambda: {"x": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="could not be locked"):
        shared.taken("one")


def test_a_run_with_help_is_the_run_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process does its part when it is told of the folder, and the first one then finds it."""
    quicken(monkeypatch)
    monkeypatch.setattr("hyperkron.cleaning.models.trees.installed", lambda: False)
    monkeypatch.setattr("hyperkron.cleaning.work.JUDGING_FOLDS", 2)
    data = blobs(rows=60)
    paths = [write_csv(tmp_path / f"{name}.csv", getattr(data, name)) for name in ("train", "trusted", "test")]
    config = cleaning.CleanConfig(epochs=1, compare=("noisy",))
    helped: list[str] = []

    def announce(folder: Path) -> None:
        api.assist(folder, 2)
        helped.extend(path.stem for path in (folder / "stages").glob("*.json"))

    def cleaned(name: str, **more: Any) -> cleaning.CleanResult:
        train, trusted, test = paths
        return cleaning.clean(train, trusted, test=test, out=tmp_path / name, config=config, progress=False, **more)

    alone, both = cleaned("one"), cleaned("two", sharing=Sharing(2, announce))
    assert {"judged-hyperkron", "judged-noisy", "network-noisy"} <= set(helped)
    assert "network-hyperkron" not in helped
    for file in ("rows.csv", "suspects.jsonl", "model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    told = [[{k: v for k, v in c.items() if k != "seconds"} for c in result.candidates] for result in (alone, both)]
    assert told[0] == told[1] and both.verdict == alone.verdict
    assert all(c["seconds"] > 0 for c in both.candidates)  # of whoever computed it


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_a_wait(number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)
    monkeypatch.setattr("hyperkron.cleaning.models.trees.installed", lambda: False)
    monkeypatch.setattr("hyperkron.cleaning.work.JUDGING_FOLDS", 2)
    data, waited = blobs(rows=60), list[float]()
    paths = [write_csv(tmp_path / f"{name}.csv", getattr(data, name)) for name in ("train", "trusted")]

    def signalled(seconds: float) -> None:
        assert not waited, "it still waits"
        waited.append(seconds)
        signal.raise_signal(number)

    def announce(folder: Path) -> None:
        with FolderLock(folder / "stages" / "claims" / "judged-noisy"), monkeypatch.context() as patch:
            patch.setattr("hyperkron.cleaning.stages.time.sleep", signalled)
            api.assist(folder, 2)

    config = cleaning.CleanConfig(epochs=1, compare=("noisy",))
    with pytest.raises(Interrupted) as found:
        cleaning.clean(*paths, out=tmp_path / "run", config=config, progress=False, sharing=Sharing(2, announce))
    assert found.value.signal == number and len(waited) == 1
