"""The log in JSON lines, and the adapters, against packages made up for the purpose."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import hyperkron as hk
from hyperkron.training import history
from hyperkron.training.history import History, JSONLog, line, read_log
from quadratic import Quadratic

PROBLEM = Quadratic()
LOG = "log-rank00000.jsonl"


def start(callbacks: Any, steps: int = 0, resume: Any = None) -> hk.Run:
    model, hyper = PROBLEM.modules()
    inner, outer = PROBLEM.data()
    algorithm = hk.algorithms.aid_cg(3, inner_steps=2)
    return hk.fit(
        PROBLEM.problem(), model, hyper, algorithm, inner, outer, steps=steps, callbacks=callbacks, resume=resume
    )


def rows(count: int) -> History:
    history = History()
    for i in range(count):
        history.append({"step": i, "outer_loss": i / 7, "status": "DIRECT"})
    return history


# --- JSON lines --------------------------------------------------------------------------------------------


def test_a_run_with_a_folder_has_a_log(tmp_path: Path) -> None:
    run = start([hk.Checkpoint(tmp_path, every=2)], 5)
    assert read_log(tmp_path / LOG) == run.history.to_rows()
    run.advance(2)
    assert [row["step"] for row in read_log(tmp_path / LOG)] == list(range(7))


def test_every_line_is_on_its_way_to_the_disk_after_its_step(tmp_path: Path) -> None:
    """What another process sees, without any buffer of this one; nothing stays open."""
    seen: list[int] = []

    class Look(hk.training.Callback):
        def on_boundary(self, run: hk.Run) -> None:
            seen.append(len(read_log(tmp_path / LOG)))

    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    start([hk.Checkpoint(tmp_path), Look()], 3)
    assert seen == [1, 2, 3]
    assert before == (len(os.listdir("/proc/self/fd")) if before else 0)


def test_a_run_without_a_folder_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start([], 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("torn", [b"", b'{"st', b'{"step": 5, "outer_loss": 1.0', b"\x00\xff\n", b"not json\n"])
def test_a_resumed_run_repeats_no_step_and_lacks_none(torn: bytes, tmp_path: Path) -> None:
    """Killed at step 5 (in the middle of a line, perhaps) with a checkpoint of step 2."""
    whole = start([hk.Checkpoint(tmp_path / "whole", every=2)], 6)
    start([hk.Checkpoint(tmp_path / "run", every=2)], 2)
    log = tmp_path / "run" / LOG
    with log.open("ab") as file:
        for i in (2, 3, 4):
            file.write(line(whole.history[i]))
        file.write(torn)
    start([hk.Checkpoint(tmp_path / "run", every=2)], 6, tmp_path / "run")
    assert log.read_bytes() == (tmp_path / "whole" / LOG).read_bytes()
    assert [row["step"] for row in read_log(log)] == list(range(6))


def test_lost_lines_are_written_again(tmp_path: Path) -> None:
    start([hk.Checkpoint(tmp_path, every=1)], 4)
    log = tmp_path / LOG
    whole = log.read_bytes()
    for damage in (b"", whole[:50], whole.replace(b'"step": 1', b'"step": 9'), b"\n" + whole):
        log.write_bytes(damage)
        start([hk.Checkpoint(tmp_path, every=1)], 0).resume(tmp_path).advance(0)
        assert log.read_bytes() == whole


def test_lines_are_strict_json(tmp_path: Path) -> None:
    history = History()
    history.append({"step": 0, "a": float("nan"), "b": float("inf"), "c": "ü\n", "d": None, "e": 2**70})
    JSONLog(tmp_path).begin(history)
    text = (tmp_path / LOG).read_text("ascii")

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert json.loads(text, parse_constant=refuse) == {
        "step": 0, "a": None, "b": None, "c": "ü\n", "d": None, "e": 2**70,
    }  # fmt: skip


def test_a_full_disk_is_a_warning_and_the_lines_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, real = JSONLog(tmp_path), history.open_ordinary
    log.begin(rows(1))

    def full(path: Path, *options: Any, **more: Any) -> int:
        descriptor = real(path, *options, **more)
        os.write(descriptor, b"")  # nothing
        os.lseek(descriptor, 0, os.SEEK_END)
        os.write(descriptor, b'{"half')
        os.close(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(history, "open_ordinary", full)
    with pytest.warns(hk.HyperkronWarning, match="No space left"):
        log.write(rows(2))
    monkeypatch.undo()
    log.write(rows(3))
    assert [row["step"] for row in read_log(tmp_path / LOG)] == [0, 1, 2]


def test_a_link_in_place_of_the_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("precious")
    (tmp_path / LOG).symlink_to(tmp_path / "other")
    with pytest.warns(hk.HyperkronWarning, match="could not be written"):
        JSONLog(tmp_path).begin(rows(2))
    assert (tmp_path / "other").read_text() == "precious"


# --- the history -------------------------------------------------------------------------------------------


def test_histories_keep_types_and_absences() -> None:
    history = History()
    given: list[dict[str, Any]] = [
        {"step": 0, "x": 1.5, "n": 3},
        {"step": 1, "x": 2, "late": "a"},
        {"step": 2, "n": None, "x": 0.25},
        {"step": 3, "n": 2**80, "late": "a", "flag": True},
    ]
    for row in given:
        history.append(row)
    assert history.to_rows() == given
    assert [type(row.get("x")) for row in history.to_rows()] == [float, int, float, type(None)]
    assert history.column("late") == [None, "a", None, "a"] and history[-1]["flag"] is True
    other = History()
    other.load_state_dict(history.state_dict())
    assert other.to_rows() == given and other.state_dict() == history.state_dict()
    with pytest.raises(IndexError):
        history[4]


def test_a_history_is_small() -> None:
    """Ten thousand rows of ten figures in less than the 10 MB they would take as dictionaries."""
    import tracemalloc

    history = History()
    tracemalloc.start()
    for i in range(2000):
        history.append({f"figure {k}": i + 0.1 * k for k in range(10)} | {"step": i, "status": "DIRECT"})
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size < 2000 * 300


# --- adapters ----------------------------------------------------------------------------------------------


class Fake(types.ModuleType):
    """Remembers every call of every function."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.info = types.SimpleNamespace(run_id="run-7")
        self.id, self.name = "id-7", "name-7"

    def __getattr__(self, function: str) -> Any:
        if function.startswith("__"):
            raise AttributeError(function)

        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((function, args, options))
            return self

        return call

    def of(self, function: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, options) for name, args, options in self.calls if name == function]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str) -> Fake:
        module = Fake(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def test_wandb(fake: Any, tmp_path: Path) -> None:
    wandb = fake("wandb")
    run = start([hk.training.WandB("project", "name", every=2, tags=["a"]), hk.Checkpoint(tmp_path)], 3)
    ((_, options),) = wandb.of("init")
    assert options["project"] == "project" and options["name"] == "name" and options["tags"] == ["a"]
    assert options["config"]["algorithm.inner_steps"] == "2" and "resume" not in options
    logged = wandb.of("log")
    assert [options["step"] for _, options in logged] == [0, 2]
    assert logged[0][0][0]["outer_loss"] == run.history[0]["outer_loss"] and "step" not in logged[0][0][0]
    assert len(wandb.of("finish")) == 1
    start([hk.training.WandB("project", "name", every=2, tags=["a"]), hk.Checkpoint(tmp_path)], 5, tmp_path)
    assert wandb.of("init")[-1][1]["id"] == "id-7" and wandb.of("init")[-1][1]["resume"] == "allow"


def test_mlflow(fake: Any, tmp_path: Path) -> None:
    mlflow = fake("mlflow")
    run = start([hk.training.MLflow("experiment"), hk.Checkpoint(tmp_path)], 2)
    assert mlflow.of("set_experiment")[0][0] == ("experiment",)
    (params,) = mlflow.of("log_params")
    assert params[0][0]["algorithm.inner_steps"] == "2"
    metrics = mlflow.of("log_metrics")
    assert [options["step"] for _, options in metrics] == [0, 1]
    assert metrics[1][0][0]["outer_loss"] == run.history[1]["outer_loss"]
    assert all(isinstance(x, float) for x in metrics[0][0][0].values())
    assert len(mlflow.of("end_run")) == 1
    start([hk.training.MLflow("experiment"), hk.Checkpoint(tmp_path)], 3, tmp_path)
    assert mlflow.of("start_run")[-1][1] == {"run_id": "run-7"} and len(mlflow.of("log_params")) == 1


def test_trackio(fake: Any, tmp_path: Path) -> None:
    trackio = fake("trackio")
    start([hk.training.Trackio("project"), hk.Checkpoint(tmp_path)], 2)
    assert trackio.of("init")[0][1]["project"] == "project"
    assert [options["step"] for _, options in trackio.of("log")] == [0, 1] and len(trackio.of("finish")) == 1
    start([hk.training.Trackio("project"), hk.Checkpoint(tmp_path)], 3, tmp_path)
    assert trackio.of("init")[-1][1]["name"] == "name-7" and trackio.of("init")[-1][1]["resume"] == "allow"


def test_trackers_close_after_an_error_too(fake: Any) -> None:
    wandb = fake("wandb")

    def failing(run: hk.Run) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        start([hk.training.WandB("project"), hk.training.Evaluate(every=1, function=failing)], 3)
    assert len(wandb.of("finish")) == 1


def test_what_is_not_finite_is_left_out(fake: Any) -> None:
    wandb = fake("wandb")
    start(
        [
            hk.training.Evaluate(every=1, function=lambda run: {"bad": float("nan"), "text": "x"}),
            hk.training.WandB("project"),
        ],
        1,
    )
    assert "bad" not in wandb.of("log")[0][0][0] and wandb.of("log")[0][0][0]["text"] == "x"


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "board"
    start([hk.training.TensorBoard(folder), hk.Checkpoint(tmp_path / "run", every=2)], 2)
    # killed at step 4: the steps after the checkpoint are done again
    start([hk.training.TensorBoard(folder), hk.Checkpoint(tmp_path / "elsewhere")], 0).resume(tmp_path / "run").advance(
        2
    )
    run = start([hk.training.TensorBoard(folder), hk.Checkpoint(tmp_path / "run")], 5, tmp_path / "run")
    found = EventAccumulator(str(folder))
    found.Reload()
    events = found.Scalars("outer_loss")
    assert [event.step for event in events] == list(range(5))
    torch.testing.assert_close(
        torch.tensor([event.value for event in events]), torch.tensor(run.history.column("outer_loss")).float()
    )


@pytest.mark.parametrize(
    ("tracker", "module", "extra"),
    [
        (lambda: hk.training.WandB("p"), "wandb", "wandb"),
        (lambda: hk.training.MLflow("p"), "mlflow", "mlflow"),
        (lambda: hk.training.Trackio("p"), "trackio", "trackio"),
        (lambda: hk.training.TensorBoard("p"), "torch.utils.tensorboard", "track"),
        (lambda: hk.training.RichProgress(), "rich.progress", "cli"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tracker: Any, module: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(hk.HyperkronError, match=rf"pip install 'hyperkron\[{extra}\]'"):
        start([tracker()], 1)
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text("utf-8")
    assert f"\n{extra} = [" in text


def test_rich_progress(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    start([hk.training.RichProgress()], 3)
    assert "3/3" in capsys.readouterr().out


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_bad_arguments_are_named(every: Any) -> None:
    with pytest.raises(hk.HyperkronError, match="every"):
        hk.training.TensorBoard("folder", every=every)
