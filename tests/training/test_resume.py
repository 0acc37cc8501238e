"""Runs that are saved, stopped and continued: bit for bit what they would have been; others are refused."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import hyperkron as hk
from hyperkron.training import checkpoint, files
from hyperkron.training.randomness import random_state, seed_all, set_random_state
from quadratic import Quadratic
from resuming import ALGORITHMS, digest, start

ROOT = Path(__file__).resolve().parents[2]
END = 7


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("method", ALGORITHMS)
def test_a_run_stopped_at_any_step_continues_bit_for_bit(method: str, every: int, tmp_path: Path) -> None:
    """θ, λ, optimizers, schedules, curvature, warm starts, data, random states, history: every bit of the state."""
    first = list(ALGORITHMS).index(method) % every  # of one method at odd steps, of the next at even ones
    wanted = digest(start(method, steps=END).state_dict(), tmp_path)
    run = start(method)
    for step in range(1, 6):
        run.advance(1).save(tmp_path)
        if step % every != first:
            continue
        resumed = start(method)
        resumed.algorithm.step(resumed.state, resumed.batches)  # whatever it did before is forgotten
        torch.manual_seed(99), random.seed(99)
        random_before = random_state()
        resumed.resume(tmp_path, step=step)
        assert digest(resumed.state_dict(), tmp_path) == digest(_without_random(run, resumed), tmp_path)
        assert digest(resumed.advance(END - step).state_dict(), tmp_path) == wanted
        set_random_state(checkpoint.newest(tmp_path, step).state["random"])  # the first run goes on as if alone
        assert digest(random_state(), tmp_path) != digest(random_before, tmp_path)
    assert len(checkpoint.candidates(tmp_path)) == 5


def _without_random(run: hk.Run, resumed: hk.Run) -> dict[str, Any]:
    """The first run's state, with the random state the second has restored over it."""
    return {**run.state_dict(), "random": resumed.state_dict()["random"]}


def test_a_chain_of_resumed_runs_is_the_uninterrupted_one(tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        return {"callbacks": [hk.Checkpoint(tmp_path / "run", every=2, keep=1)], "resume": tmp_path / "run"}

    for steps in (3, 4, 4, 7):  # the third has nothing to do
        run = start("KFAC", steps=steps, **options())
    alone = start("KFAC", [hk.Checkpoint(tmp_path / "alone", every=100)], steps=7)
    assert run.state.step == len(run.history) == 7
    assert digest(run.state_dict(), tmp_path) == digest(alone.state_dict(), tmp_path)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 0.9**t),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [1, 2, 2])],
            milestones=[2],
        ),
    ],
    ids=["plateau", "lambda", "one cycle", "sequential"],
)
@pytest.mark.parametrize("tensor", [False, True])
def test_any_schedule_continues(schedule: Any, tensor: bool, tmp_path: Path) -> None:
    """Also one that writes to the memory of a learning rate, which was taken for another setting."""
    problem = Quadratic()

    def prepare(steps: int) -> hk.Run:
        model, hyper = problem.modules()
        lr = torch.tensor(0.1, dtype=torch.float64) if tensor else 0.1
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
        updates = hk.algorithms.Updates(optimizer, schedule(optimizer))
        data = problem.data()
        return hk.fit(
            problem.problem(),
            model,
            hyper,
            hk.algorithms.aid_cg(2, inner_steps=1),
            *data,
            steps=steps,
            inner_optimizer=updates,
        )

    whole = prepare(6)
    prepare(3).save(tmp_path)
    resumed = prepare(0).resume(tmp_path).advance(3)
    assert digest(resumed.state_dict(), tmp_path) == digest(whole.state_dict(), tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adafactor])
def test_optimizers_that_torch_loads_in_ways_of_their_own_continue(kind: Any, tmp_path: Path) -> None:
    """It loads float32 beside parameters in float64 as float64, and gives Adafactor a default that it does not have."""

    def prepare(steps: int) -> hk.Run:
        model, hyper = PROBLEM.modules()
        optimizer = kind(model.parameters(), lr=0.05)
        algorithm = hk.algorithms.aid_cg(3, inner_steps=2)
        data = PROBLEM.data()
        return hk.fit(PROBLEM.problem(), model, hyper, algorithm, *data, steps=steps, inner_optimizer=optimizer)

    whole = prepare(5)
    prepare(2).save(tmp_path)
    again = prepare(0).resume(tmp_path).resume(tmp_path)
    assert digest(again.advance(3).state_dict(), tmp_path) == digest(whole.state_dict(), tmp_path)


def test_all_random_states_are_restored() -> None:
    numpy = pytest.importorskip("numpy")

    def draws() -> list[float]:
        return [random.gauss(0, 1), float(torch.randn(())), float(numpy.random.standard_normal())]

    seed_all(1)
    draws()  # leaves half of a pair of normal numbers in python's and numpy's states
    saved = random_state()
    wanted = draws() + draws()
    seed_all(2)
    set_random_state(saved)
    assert draws() + draws() == wanted


# --- changes -----------------------------------------------------------------------------------------------

PROBLEM = Quadratic()


def quadratic(steps: int = 0, algorithm: Any = None, callbacks: Any = (), lr: Any = 0.1, **options: Any) -> hk.Run:
    model, hyper = PROBLEM.modules(**options)
    inner, outer = ([x.to(model.weight.dtype) for x in part] for part in PROBLEM.data())
    return hk.fit(
        PROBLEM.problem(),
        model,
        hyper,
        algorithm or hk.algorithms.aid_cg(3, inner_steps=2),
        tuple(inner),
        tuple(outer),
        steps=steps,
        callbacks=callbacks,
        inner_optimizer=torch.optim.SGD(model.parameters(), lr=lr),
    )


def test_a_changed_configuration_is_refused_with_a_list(tmp_path: Path) -> None:
    quadratic(2).save(tmp_path)
    other = quadratic(0, hk.algorithms.aid_cg(4, inner_steps=5), lr=0.2)
    with pytest.raises(hk.training.CheckpointError) as caught:
        other.resume(tmp_path)
    for line in (
        "config algorithm.hypergradient.solver.iterations: 3 in the checkpoint, 4 in this run",
        "config algorithm.inner_steps: 2 in the checkpoint, 5 in this run",
        "config inner.optimizer.lr: 0.1 in the checkpoint, 0.2 in this run",
        "allow_changes=True",
    ):
        assert line in str(caught.value)
    assert other.state.step == 0
    assert other.resume(tmp_path, allow_changes=True).advance(1).state.step == 3


def test_another_tensor_as_learning_rate_is_a_change(tmp_path: Path) -> None:
    quadratic(2, lr=torch.tensor(0.1)).save(tmp_path)
    assert quadratic(0, lr=torch.tensor(0.1)).resume(tmp_path).state.step == 2
    with pytest.raises(hk.training.CheckpointError, match=r"config inner.optimizer.lr: float32 \[\], sha256"):
        quadratic(0, lr=torch.tensor(0.2)).resume(tmp_path)


def test_a_changed_model_is_refused_and_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    quadratic(2).save(tmp_path)
    other = quadratic(1, dtype=torch.float32)
    with pytest.raises(
        hk.training.CheckpointError, match=r"model weight: float64 \[2, 3\] in the checkpoint, float32 \[2, 3\]"
    ):
        other.resume(tmp_path)
    small = quadratic(1, hk.AID(hk.kfac(1e-2)))
    before = digest(small.state_dict(), tmp_path)
    with pytest.raises(hk.training.CheckpointError, match="does not fit into this run"):
        small.resume(tmp_path, allow_changes=True)
    assert digest(small.state_dict(), tmp_path) == before


@pytest.mark.parametrize("other", [hk.algorithms.SOBA(), hk.algorithms.SRBA(), hk.algorithms.F2SA(2)])
def test_another_algorithm_cannot_continue_even_with_changes(tmp_path: Path, other: Any) -> None:
    """It would lack its v, its directions and its second points, or take those of the other one for its own."""
    quadratic(2).save(tmp_path)
    run = quadratic(0, other)
    with pytest.raises(hk.training.CheckpointError, match=f"run of AID, whose memory {type(other).__name__} cannot"):
        run.resume(tmp_path, allow_changes=True)
    assert run.state.step == 0
    first = quadratic(0).resume(tmp_path)  # what the message says
    again = hk.fit(
        PROBLEM.problem(), first.state.model, first.state.hyper, hk.algorithms.SOBA(), *PROBLEM.data(), steps=2
    )
    assert again.state.step == 2


def test_another_kind_of_optimizer_cannot_continue_even_with_changes(tmp_path: Path) -> None:
    """It was a KeyError in the next step."""
    quadratic(2).save(tmp_path)
    model, hyper = PROBLEM.modules()
    algorithm, adam = hk.algorithms.aid_cg(3, inner_steps=2), torch.optim.Adam(model.parameters())
    run = hk.fit(PROBLEM.problem(), model, hyper, algorithm, *PROBLEM.data(), steps=0, inner_optimizer=adam)
    with pytest.raises(hk.training.CheckpointError, match="the saved optimizer has no betas"):
        run.resume(tmp_path, allow_changes=True)


def test_a_checkpoint_in_place_of_its_folder_is_refused(tmp_path: Path) -> None:
    """The run began again."""
    path = quadratic(2).save(tmp_path)
    with pytest.raises(hk.training.CheckpointError, match=f"single checkpoint; give the folder .* {tmp_path}"):
        quadratic(0).resume(path)
    with pytest.raises(hk.training.CheckpointError, match="is a file"):
        checkpoint.candidates(path / "manifest.json")


def test_another_world_size_is_refused() -> None:
    assert checkpoint.About(world_size=2).differences(checkpoint.About()) == [
        "world size: 2 in the checkpoint, 1 in this run"
    ]


def test_other_callbacks_are_a_change_that_can_be_allowed(tmp_path: Path) -> None:
    quadratic(2, callbacks=[hk.training.EarlyStopping(patience=9)]).save(tmp_path)
    callbacks = [hk.training.Evaluate(every=1, function=lambda run: None), hk.training.EarlyStopping(patience=9)]
    with pytest.raises(
        hk.training.CheckpointError, match=r"callbacks.0: EarlyStopping in the checkpoint, Evaluate in this run"
    ):
        quadratic(0, callbacks=callbacks).resume(tmp_path)
    run = quadratic(0, callbacks=callbacks).resume(tmp_path, allow_changes=True)
    assert run.callbacks[1].best == min(run.history.column("outer_loss"))


def test_another_torch_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {**checkpoint._versions(), "torch": "1.0.0"}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_versions", lambda: other)
        quadratic(1).save(tmp_path)
    with pytest.warns(hk.HyperkronWarning, match=rf"with torch 1\.0\.0 and is read with torch {torch.__version__[:4]}"):
        quadratic(0).resume(tmp_path)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Another run goes on, saves a newer one and deletes the one that is being read."""
    run = quadratic(1, callbacks=[hk.Checkpoint(tmp_path, keep=1)])
    read = files.read_json

    def overtaken(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(files, "read_json", read)
        run.advance(1)
        return read(*args, **options)

    monkeypatch.setattr(files, "read_json", overtaken)
    assert checkpoint.newest(tmp_path).step == 2
    assert [str(w.message) for w in recwarn] == []


# --- the callback ------------------------------------------------------------------------------------------


def saved_steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoint.candidates(folder)]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    scores = iter([3.0, 1.0, float("nan"), 2.0, 1.5, 9.0, 1.0, 4.0, 5.0])
    callback = hk.Checkpoint(tmp_path, every=1, keep=2, best="score")
    run = quadratic(
        7, callbacks=[hk.training.Evaluate(every=1, function=lambda run: {"score": next(scores)}), callback]
    )
    assert (callback.best_step, callback.best_value) == (2, 1.0)
    assert saved_steps(tmp_path) == [7, 6, 2]
    run.advance(2)
    assert saved_steps(tmp_path) == [9, 8, 2]


def test_a_best_that_is_never_seen_is_said(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    quadratic(2, callbacks=[hk.Checkpoint(tmp_path / "known", best="outer_loss")])
    assert [str(w.message) for w in recwarn] == []
    with pytest.warns(hk.HyperkronWarning, match="best='accurcy' at the steps it saved"):
        quadratic(2, callbacks=[hk.Checkpoint(tmp_path / "typing-error", best="accurcy")])


def test_it_saves_on_time_and_at_the_end(tmp_path: Path) -> None:
    run = quadratic(7, callbacks=[hk.Checkpoint(tmp_path, every=3, keep=9)])
    assert saved_steps(tmp_path) == [7, 6, 3]
    assert checkpoint.newest(tmp_path).state["history"] == run.history.state_dict()


def test_a_run_that_forgets_to_resume_does_not_touch_the_checkpoints(tmp_path: Path) -> None:
    quadratic(4, callbacks=[hk.Checkpoint(tmp_path)])
    with pytest.raises(hk.training.CheckpointError, match="resume=folder"):
        quadratic(1, callbacks=[hk.Checkpoint(tmp_path)])
    assert saved_steps(tmp_path) == [4]


def test_a_full_disk_is_a_warning_on_the_way_and_an_error_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    callback = hk.Checkpoint(tmp_path, every=1, keep=9, best="outer_loss")
    run = quadratic(2, callbacks=[callback])
    best = callback.state_dict()
    monkeypatch.setattr(files, "write_tensors", full)
    with (
        pytest.warns(hk.HyperkronWarning, match="No space left on device"),
        pytest.raises(hk.training.CheckpointError, match="step 4 could not be saved"),
    ):
        run.advance(2)
    assert saved_steps(tmp_path) == [2, 1]
    assert callback.state_dict() == best
    monkeypatch.undo()
    run.advance(1)
    assert saved_steps(tmp_path) == [5, 2, 1]


@pytest.mark.parametrize("bad", [{"every": 0}, {"keep": 0}, {"keep": True}, {"mode": "best"}])
def test_bad_arguments_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(hk.HyperkronError, match=next(iter(bad))):
        hk.Checkpoint("folder", **bad)


# --- signals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_at_the_next_boundary(tmp_path: Path, number: signal.Signals, code: int) -> None:
    def raising(run: hk.Run) -> None:
        if len(run.history) == 3:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    callbacks = [hk.training.Evaluate(every=1, function=raising), hk.Checkpoint(tmp_path, every=100)]
    with pytest.raises(hk.training.Interrupted) as caught:
        quadratic(50, callbacks=callbacks)
    assert caught.value.code == code and caught.value.signal is number
    assert signal.getsignal(number) is before
    assert saved_steps(tmp_path) == [4]
    resumed = quadratic(
        0, callbacks=[hk.training.Evaluate(every=1, function=lambda run: None), hk.Checkpoint(tmp_path, every=100)]
    )
    assert len(resumed.resume(tmp_path).advance(2).history) == 6


def test_a_second_interrupt_is_not_waited_for(tmp_path: Path) -> None:
    def impatient(run: hk.Run) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # repeated requests to stop are one
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        quadratic(5, callbacks=[hk.training.Evaluate(every=1, function=impatient), hk.Checkpoint(tmp_path)])


def test_without_checkpoints_an_interrupt_is_what_it_always_was() -> None:
    with pytest.raises(KeyboardInterrupt):
        quadratic(5, callbacks=[hk.training.Evaluate(every=1, function=lambda run: signal.raise_signal(signal.SIGINT))])


def test_another_thread_can_run_too(tmp_path: Path) -> None:
    worker = threading.Thread(target=lambda: quadratic(2, callbacks=[hk.Checkpoint(tmp_path)]))
    worker.start()
    worker.join()
    assert saved_steps(tmp_path) == [2]


# --- faults ------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks, signals and /proc")
def test_a_few_of_every_fault_are_survived() -> None:
    """The benchmark in small: exit code 0 says that every row survived all its tries."""
    counts = ["--kills", "2", "--mutations", "24", "--signals", "2", "--steps", "1", "--full", "1", "--races", "2"]
    command = [
        sys.executable,
        "benchmarks/faults.py",
        *counts,
        "--methods",
        "KFAC",
        "SABA",
        "--no-cases",
        "--no-record",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL within each of 1 steps") == 2


def test_a_manifest_says_what_it_belongs_to(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as in benchmarks/faults.py
        path = start("KFAC", steps=1).save(tmp_path)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 1 and manifest["world_size"] == 1 and manifest["step"] == 1
    assert manifest["model"]["layers.1.running_mean"] == "float32 [6]"
    assert manifest["hyper"] == {"weight": "float32 [20]"}
    assert manifest["config"]["algorithm.hypergradient.curvature.ema"] == "0.5"
    assert manifest["config"]["inner.scheduler.gamma"] == "0.5"
    assert manifest["versions"]["torch"] == torch.__version__
    assert str(tmp_path) not in json.dumps(manifest)
