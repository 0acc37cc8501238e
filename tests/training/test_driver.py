"""The driver: time budgets, evaluation, plain training, runs side by side, and failures that are recorded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.algorithms import AID, InnerOnly, Updates
from hyperkron.training import EarlyStopping, Evaluate, advance_all


class Ticking:
    """A clock that advances by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def inner(model: nn.Module, hyper: Any, batch: Tensor) -> hk.losses.Loss:
    return hk.losses.mse(model(batch), hyper() * batch)


def outer(model: nn.Module, hyper: Any, batch: Tensor) -> hk.losses.Loss:
    return hk.losses.mse(model(batch), 3 * batch)


def start(steps: int | None = None, rate: float = 0.1, drop: float = 0.0, **options: Any) -> hk.Run:
    """A scalar problem, with dropout where the global random state is to matter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(drop), nn.Linear(1, 1, bias=False))
    algorithm = AID(hk.identity(), inner_steps=2, inner_rate=rate, outer_rate=0.1)
    x = torch.ones(8, 1)
    shift = hk.as_hyper(torch.zeros(1))
    return hk.fit(hk.BilevelProblem(inner, outer), model, shift, algorithm, x, x, steps=steps, **options)


def theta(run: hk.Run) -> Tensor:
    return torch.cat([p.detach().flatten() for p in run.state.params.values()])


# --- time --------------------------------------------------------------------------------------------------


def test_a_run_ends_by_steps_or_seconds_whichever_comes_first() -> None:
    assert start(seconds=5, clock=Ticking()).state.step == 5
    assert start(3, seconds=5, clock=Ticking()).state.step == 3
    assert start(9, seconds=5, clock=Ticking()).state.step == 5
    run = start(2, clock=Ticking())
    assert run.seconds == 2.0 and run.advance(seconds=4).state.step == 6


def test_evaluation_is_not_on_the_clock() -> None:
    clock = Ticking()
    run = start(seconds=5, clock=clock, callbacks=[Evaluate(lambda run: {"now": clock()}, every=1)])
    assert run.state.step == 5 and run.seconds == 5.0 and clock.now == 15.0


def test_the_time_spent_is_saved_and_counts_after_a_resume(tmp_path: Path) -> None:
    start(3, clock=Ticking()).save(tmp_path)
    resumed = start(seconds=5, clock=Ticking(), resume=tmp_path)
    assert resumed.state.step == 5 and resumed.seconds == 5.0
    resumed.save(tmp_path)
    assert start(seconds=5, clock=Ticking(), resume=tmp_path).state.step == 5


def test_a_run_without_an_end_is_refused() -> None:
    with pytest.raises(hk.HyperkronError, match="neither steps nor seconds"):
        start()
    with pytest.raises(hk.HyperkronError, match="seconds=-1"):
        start(seconds=-1)


# --- evaluation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "steps"),
    [
        ({"every": 3}, [3, 6, 9]),
        ({"at": (1, 7)}, [1, 7]),
        ({"times": 4}, [3, 5, 8, 10]),
        ({"start": True, "at": (10,)}, [0, 10]),
    ],
)
def test_when_it_evaluates(when: dict[str, Any], steps: list[int]) -> None:
    evaluate = Evaluate(lambda run: {"seen": run.state.step}, **when)
    run = start(10, callbacks=[evaluate])
    assert [row["step"] for row in evaluate.rows] == [row["seen"] for row in evaluate.rows] == steps
    column = run.history.column("seen")
    assert [x for x in column if x is not None] == [x for x in steps if x > 0]


def test_a_run_that_is_advanced_again_is_evaluated_at_equal_distances_again() -> None:
    evaluate = Evaluate(lambda run: {"seen": 1}, times=5)
    run = start(10, callbacks=[evaluate])
    run.advance(10)
    assert [row["step"] for row in evaluate.rows] == [2, 4, 6, 8, 10, 12, 16, 20]


def test_equal_distances_are_by_time_where_time_ends_the_run() -> None:
    evaluate = Evaluate(lambda run: {"seen": 1}, times=3)
    start(seconds=9, clock=Ticking(), callbacks=[evaluate])
    assert [row["seconds"] for row in evaluate.rows] == [3.0, 6.0, 9.0]


def test_a_run_that_is_stopped_is_evaluated_at_its_end() -> None:
    evaluate = Evaluate(lambda run: {"seen": 1}, times=2)
    start(10, callbacks=[evaluate, Evaluate(lambda run: run.stop("enough"), at=(3,))])
    assert [row["step"] for row in evaluate.rows] == [3]


def test_evaluations_survive_a_resume(tmp_path: Path) -> None:
    def make(steps: int, **options: Any) -> tuple[Evaluate, hk.Run]:
        evaluate = Evaluate(lambda run: {"theta": float(theta(run))}, every=2, start=True)
        return evaluate, start(steps, callbacks=[evaluate], **options)

    whole, _ = make(6)
    make(4)[1].save(tmp_path)
    resumed, _ = make(6, resume=tmp_path)
    assert [row["theta"] for row in resumed.rows] == [row["theta"] for row in whole.rows]
    assert [row["step"] for row in resumed.rows] == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (3.0, "returned a float; return a dictionary"),
        ({"outer_loss": 1.0}, "returned 'outer_loss', which this row already has"),
        ({"step": 7}, "returned 'step'"),
        ({"seconds": 7}, "returned 'seconds'"),
        ({"each": torch.ones(2)}, "returned each=tensor"),
        ({"each": [1.0, 2.0]}, r"returned each=\[1.0, 2.0\]"),
    ],
)
def test_what_the_history_cannot_hold_is_refused(found: Any, says: str) -> None:
    with pytest.raises(hk.HyperkronError, match=says):
        start(1, callbacks=[Evaluate(lambda run: found, every=1)])


def test_numbers_of_torch_and_numpy_are_recorded_as_numbers(tmp_path: Path) -> None:
    numbers = {"torch": torch.tensor(1.5), "numpy": numpy.float32(2.5), "count": torch.tensor(3)}
    evaluate, stop = Evaluate(lambda run: numbers, every=1), EarlyStopping("torch", patience=2)
    run = start(9, callbacks=[evaluate, stop, hk.Checkpoint(tmp_path, every=1)])
    assert [type(run.history[-1][name]) for name in numbers] == [float, float, int]
    assert [run.history[-1][name] for name in numbers] == [1.5, 2.5, 3]
    assert run.state.step == 3


def test_an_evaluation_in_evaluation_mode_does_not_change_the_training() -> None:
    runs = [start(4, drop=0.5, callbacks=[Evaluate(f, every=1)]) for f in (lambda run: None, forget)]
    assert torch.equal(theta(runs[0]), theta(runs[1]))
    assert runs[1].state.model.training


def forget(run: hk.Run) -> None:
    run.state.model.eval()


def train_another(run: hk.Run) -> None:
    problem = hk.BilevelProblem(lambda m, h, x: hk.losses.mse(m(x), x))
    hk.fit(problem, nn.Linear(1, 1), None, InnerOnly(), torch.ones(1, 1), steps=1)  # seeds everything with 0


def test_an_evaluation_that_draws_or_seeds_does_not_change_the_training() -> None:
    functions = (lambda run: None, lambda run: {"draw": float(torch.rand(()))}, train_another)
    runs = [start(4, drop=0.5, callbacks=[Evaluate(f, every=1)]) for f in functions]
    assert all(torch.equal(theta(runs[0]), theta(run)) for run in runs[1:])


def test_a_run_that_stopped_early_stays_stopped_when_it_is_resumed(tmp_path: Path) -> None:
    def make() -> hk.Run:
        stop = EarlyStopping(patience=2, margin=1e9)
        return start(9, callbacks=[stop, hk.Checkpoint(tmp_path, every=1)], resume=tmp_path)

    first, again = make(), make()
    assert first.state.step == again.state.step == 3
    assert first.stopped == again.stopped is not None
    assert torch.equal(theta(first), theta(again))
    assert again.advance(1).state.step == 4  # it continues if it is asked to


def test_an_evaluation_without_a_time_is_refused() -> None:
    with pytest.raises(hk.HyperkronError, match="when to evaluate"):
        Evaluate(lambda run: None)


# --- plain training ----------------------------------------------------------------------------------------


def plain_loss(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


def task(seed: int = 0) -> tuple[nn.Module, Callable[[], tuple[Tensor, Tensor]]]:
    torch.manual_seed(seed)
    x, y = torch.randn(40, 5), torch.randint(3, (40,))
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 3))
    return model, lambda: (lambda i: (x[i], y[i]))(torch.randint(40, (8,)))


def test_plain_training_is_the_loop_by_hand() -> None:
    model, batch = task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=13)
    for _ in range(12):
        optimizer.zero_grad()
        loss = plain_loss(model, model, batch())
        loss.backward()
        optimizer.step()
        schedule.step()
    expected = {name: x.clone() for name, x in model.state_dict().items()}

    model, batch = task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    updates = Updates(
        optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=13), schedule="update"
    )
    problem = hk.BilevelProblem(plain_loss)
    run = hk.fit(problem, model, None, InnerOnly(3), batch, steps=4, inner_optimizer=updates, seed=None)
    assert all(torch.equal(x, expected[name]) for name, x in model.state_dict().items())
    assert run.history.column("inner_loss")[-1] == pytest.approx(float(loss.value.detach()))
    assert run.history.column("outer_loss") == [None] * 4


def test_plain_training_resumes(tmp_path: Path) -> None:
    def make(steps: int, **options: Any) -> hk.Run:
        model, batch = task()
        algorithm = InnerOnly(inner_rate=hk.algorithms.Rate(0.1, 0.5))
        return hk.fit(hk.BilevelProblem(plain_loss), model, None, algorithm, batch, steps=steps, **options)

    whole = make(5)
    make(3).save(tmp_path)
    assert torch.equal(theta(make(5, resume=tmp_path)), theta(whole))


def test_losses_are_read_as_often_as_asked_for() -> None:
    model, batch = task()
    run = hk.fit(hk.BilevelProblem(plain_loss), model, None, InnerOnly(report_every=3), batch, steps=6)
    assert [x is None for x in run.history.column("inner_loss")] == [True, True, False, True, True, False]


def test_an_outer_objective_that_is_missing_is_named() -> None:
    model, batch = task()
    problem = hk.BilevelProblem(plain_loss)
    with pytest.raises(hk.HyperkronError, match="outer was not given"):
        hk.fit(problem, model, hk.as_hyper(torch.zeros(1)), AID(hk.identity(), 1), batch, batch, steps=1)
    with pytest.raises(hk.HyperkronError, match="hyper"):
        hk.fit(hk.BilevelProblem(plain_loss, plain_loss), model, None, AID(hk.identity(), 1), batch, batch, steps=1)


def test_a_wrong_schedule_is_named() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(hk.HyperkronError, match="schedule="):
        Updates(optimizer, schedule="epoch")  # type: ignore[arg-type]
    with pytest.raises(hk.HyperkronError, match="ReduceLROnPlateau"):
        Updates(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), schedule="update")


# --- failures ----------------------------------------------------------------------------------------------


def test_a_run_that_diverges_is_a_recorded_failure(tmp_path: Path) -> None:
    callbacks = [hk.Checkpoint(tmp_path, every=10**6)]
    run = start(200, rate=1e3, record_failure=True, callbacks=callbacks)
    assert isinstance(run.failure, hk.HyperkronError) and run.stopped == str(run.failure)
    assert 0 < run.state.step < 200 and run.history[-1]["failure"] == str(run.failure)[:300]
    assert run.failure.__traceback__ is None
    step = run.state.step
    assert run.advance(5).state.step == step
    assert not list(tmp_path.glob("step-*")), "a broken state is not saved"
    with pytest.raises(hk.HyperkronError):
        start(200, rate=1e3)


def test_a_failed_factorisation_is_a_recorded_failure() -> None:
    def fail(run: hk.Run) -> None:
        raise torch.linalg.LinAlgError("singular")

    def broken(model: nn.Module, hyper: Any, batch: Tensor) -> Any:
        raise torch.linalg.LinAlgError("singular")

    problem = hk.BilevelProblem(broken)
    run = hk.fit(problem, nn.Linear(1, 1), None, InnerOnly(), torch.ones(1, 1), steps=2, record_failure=True)
    assert run.stopped == "singular"
    with pytest.raises(torch.linalg.LinAlgError):  # of an evaluation, not of a step
        start(2, record_failure=True, callbacks=[Evaluate(fail, every=1)])


# --- several runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 3])
def test_runs_side_by_side_get_what_each_gets_alone(block: int) -> None:
    alone = [theta(start(7, rate, drop=0.3, seed=seed)) for seed, rate in ((1, 0.1), (2, 0.05))]
    runs = [start(0, rate, drop=0.3, seed=seed) for seed, rate in ((1, 0.1), (2, 0.05))]
    before = torch.get_rng_state()
    advance_all(runs, 4, block=block)
    advance_all(runs, 3, block=block)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(theta(run), value) for run, value in zip(runs, alone, strict=True))


def test_they_take_turns_and_one_that_fails_leaves_the_others() -> None:
    order: list[int] = []
    runs = [
        start(0, rate, record_failure=True, callbacks=[Evaluate(lambda run, i=i: order.append(i), every=1)])
        for i, rate in enumerate((0.1, 1e25, 0.1))
    ]
    advance_all(runs, 4, block=2)
    assert [run.failure is None for run in runs] == [True, False, True]
    assert [run.state.step for run in (runs[0], runs[2])] == [4, 4] and order[:2] == [0, 0] and order[-2:] == [2, 2]


def test_each_has_its_own_time() -> None:
    runs = [start(0, clock=Ticking()), start(0, clock=Ticking())]
    advance_all(runs, seconds=3)
    assert [run.state.step for run in runs] == [3, 3] and math.isclose(runs[0].progress, 1.0)


def test_a_kill_signal_saves_all_of_them(tmp_path: Path) -> None:
    import signal

    def interrupt(run: hk.Run) -> None:
        signal.raise_signal(signal.SIGTERM)

    saves = [hk.Checkpoint(tmp_path / name) for name in "ab"]
    runs = [start(0, callbacks=[saves[0]]), start(0, callbacks=[Evaluate(interrupt, at=(2,)), saves[1]])]
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(hk.training.Interrupted):
        advance_all(runs, 9)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert [[path.name for path in (tmp_path / name).glob("step-*")] for name in "ab"] == [["step-00000002"]] * 2
