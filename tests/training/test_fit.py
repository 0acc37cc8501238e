"""fit(): optimizers and schedulers, projections, callbacks, history, seeds and resuming."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hyperkron as hk
from hyperkron.training import Evaluate
from hyperkron.training.callback import Callback
from quadratic import Quadratic

PROBLEM = Quadratic(examples=6, noise=0.2)


def prepare(steps: int = 5, algorithm: Any = None, data: Any = None, **options: Any) -> hk.Run:
    model, hyper = PROBLEM.modules()
    inner, outer = PROBLEM.data() if data is None else data
    return hk.fit(
        PROBLEM.problem(),
        model,
        hyper,
        algorithm or hk.algorithms.aid_cg(3, inner_steps=2),
        inner,
        outer,
        steps=steps,
        **options,
    )


@pytest.mark.parametrize("level", ["model", "hyper"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_that_are_frozen_or_unfrozen_in_a_run_are_named(level: str, frozen: bool) -> None:
    """An unfrozen one was counted by hypergradients as part of θ, but never moved; the run is as it was."""
    model, hyper = PROBLEM.modules()
    module = {"model": model, "hyper": hyper}[level]
    module.other = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=frozen)

    class Switching(Callback):
        def on_step(self, run: Any, report: Any) -> None:
            if report.step == 1:
                module.other.requires_grad_(not frozen)

    run = hk.fit(PROBLEM.problem(), model, hyper, hk.algorithms.aid_cg(3), *PROBLEM.data(), steps=0)
    run.callbacks.append(Switching())
    word = "frozen" if frozen else "unfrozen"
    with pytest.raises(
        hk.HyperkronError, match=rf"{level} parameter other \(and 0 others\) was {word} .*call fit again"
    ):
        run.advance(4)
    assert run.state.step == len(run.history) == 2
    hk.fit(PROBLEM.problem(), model, hyper, hk.algorithms.aid_cg(3), *PROBLEM.data(), steps=1)


# --- projections -------------------------------------------------------------------------------------------

POINTS = st.lists(st.floats(-5, 5), min_size=1, max_size=6).map(lambda x: torch.tensor(x, dtype=torch.float64))


@given(POINTS)
def test_the_simplex_projection_is_the_nearest_point(x: torch.Tensor) -> None:
    """It is feasible, and no feasible vertex lies in the direction of x: ⟨x − p, z − p⟩ ≤ 0 for all z of the set."""
    p = hk.Simplex(2.0)(x)
    assert bool((p >= 0).all())
    assert float(p.sum()) == pytest.approx(2.0)
    for z in 2.0 * torch.eye(len(x), dtype=x.dtype):
        assert float((x - p) @ (z - p)) <= 1e-9


@given(POINTS)
def test_the_ball_projection_is_the_nearest_point(x: torch.Tensor) -> None:
    p = hk.Ball(1.5)(x)
    assert float(p.norm()) <= 1.5 * (1 + 1e-12)
    if float(x.norm()) <= 1.5:
        assert torch.equal(p, x)
    else:
        assert torch.allclose(p, 1.5 * x / x.norm())


@pytest.mark.parametrize("projection", [hk.Box(), hk.Ball(), hk.Simplex()])
def test_a_parameter_without_entries_has_nothing_to_project(projection: Any) -> None:
    assert projection(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("make", [lambda: hk.Box(1, 0), lambda: hk.Ball(0.0), lambda: hk.Simplex(-1.0)])
def test_empty_sets_are_refused(make: Any) -> None:
    with pytest.raises(hk.HyperkronError):
        make()


def test_projection_is_an_option_of_fit() -> None:
    run = prepare(20, projection=hk.Box(-0.1, 0.1))
    assert float(run.state.hyper().detach().abs().max()) == pytest.approx(0.1)


# --- optimizers and schedulers -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam])
def test_any_optimizer_on_both_levels(optimizer: Any) -> None:
    model, hyper = PROBLEM.modules()
    run = hk.fit(
        PROBLEM.problem(),
        model,
        hyper,
        hk.algorithms.aid_cg(3, inner_steps=3),
        *PROBLEM.data(),
        steps=40,
        inner_optimizer=optimizer(model.parameters(), lr=0.1),
        outer_optimizer=optimizer(hyper.parameters(), lr=0.05),
    )
    losses = run.history.column("outer_loss")
    assert min(losses) < 0.7 * losses[0]


def test_schedulers_advance_once_a_step() -> None:
    model, hyper = PROBLEM.modules()
    sgd = torch.optim.SGD(hyper.parameters(), lr=1.0)
    adam = torch.optim.Adam(model.parameters(), lr=1.0)
    hk.fit(
        PROBLEM.problem(),
        model,
        hyper,
        hk.algorithms.aid_cg(3, inner_steps=4),
        *PROBLEM.data(),
        steps=3,
        inner_optimizer=hk.algorithms.Updates(adam, torch.optim.lr_scheduler.ExponentialLR(adam, 0.1)),
        outer_optimizer=hk.algorithms.Updates(sgd, torch.optim.lr_scheduler.StepLR(sgd, 2, 0.5)),
    )
    assert adam.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.5)


def test_own_rates_decay() -> None:
    run = prepare(
        3, hk.algorithms.SOBA(inner_rate=hk.algorithms.Rate(0.4, 0.5), outer_rate=hk.algorithms.Rate(0.1, 1.0))
    )
    assert run.state.inner.lr == pytest.approx(0.2)
    assert run.state.outer.lr == pytest.approx(0.025)


def test_clipping_bounds_a_step() -> None:
    model, hyper = PROBLEM.modules()
    sgd = torch.optim.SGD(hyper.parameters(), lr=1.0)
    updates = hk.algorithms.Updates(sgd, clip=1e-3)
    hk.fit(PROBLEM.problem(), model, hyper, hk.algorithms.aid_cg(3), *PROBLEM.data(), steps=1, outer_optimizer=updates)
    assert float(hyper().detach().norm()) == pytest.approx(1e-3)


# --- data --------------------------------------------------------------------------------------------------


def loaders() -> tuple[Any, Any]:
    inner, outer = PROBLEM.data()
    return (
        DataLoader(TensorDataset(*inner), batch_size=2, shuffle=True),
        DataLoader(TensorDataset(*outer), batch_size=3, shuffle=True, generator=torch.Generator().manual_seed(4)),
    )


def test_a_state_keeps_a_rate_that_is_a_tensor() -> None:
    """Schedulers write to its memory: the state that was taken had the rate of the last step."""
    model, hyper = PROBLEM.modules()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    updates = hk.algorithms.Updates(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    algorithm = hk.algorithms.aid_cg(3)
    run = hk.fit(PROBLEM.problem(), model, hyper, algorithm, *PROBLEM.data(), steps=1, inner_optimizer=updates)
    state = run.state_dict()
    run.advance(2)
    run.load_state_dict(state)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)


def test_a_function_without_further_batches_is_named() -> None:
    inner, outer = PROBLEM.data()
    left = iter([inner, inner])
    with pytest.raises(hk.HyperkronError, match=r"<lambda> has no more batches .*pass the loader itself"):
        prepare(3, hk.algorithms.aid_cg(3, inner_steps=1), (lambda: next(left), outer))


def test_loaders_functions_and_batches_are_data() -> None:
    inner, outer = PROBLEM.data()
    for data in (loaders(), (inner, outer), (lambda: inner, lambda: outer)):
        assert len(prepare(5, data=data).history) == 5


def test_an_exhausted_or_empty_loader_is_named() -> None:
    with pytest.raises(hk.HyperkronError, match="iterated again"):
        prepare(1, data=(DataLoader([], batch_size=1), PROBLEM.data()[1]))
    for data in (iter([1]), numpy.ones((6, 3)), "train.csv"):
        with pytest.raises(hk.HyperkronError, match="inner_data is a"):
            prepare(1, data=(data, None))
    with pytest.raises(hk.HyperkronError, match=r"<lambda> returned a generator.*__iter__ is that function"):
        prepare(1, data=(lambda: (PROBLEM.data()[0] for _ in range(3)), PROBLEM.data()[1]))


# --- seeds and resuming ------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """The quadratic's model with dropout, so that the global random state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2, bias=False, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.drop(x))


def dropping(steps: int, seed: int = 0) -> hk.Run:
    _, hyper = PROBLEM.modules()
    callbacks = [hk.training.EarlyStopping(patience=100)]
    algorithm = hk.algorithms.aid_kfac(0.1, refresh_every=2, inner_steps=2)
    return hk.fit(
        PROBLEM.problem(), Dropping(), hyper, algorithm, *loaders(), steps=steps, callbacks=callbacks, seed=seed
    )


def test_a_seed_fixes_the_run() -> None:
    first, second, other = dropping(6), dropping(6), dropping(6, seed=1)
    assert first.history.to_rows() == second.history.to_rows()
    assert first.history.column("outer_loss") != other.history.column("outer_loss")


def test_a_run_resumes_bit_for_bit() -> None:
    """With shuffled loaders in the middle of an epoch, dropout, Monte-Carlo KFAC and callbacks."""
    whole = dropping(9)
    half = dropping(4)
    saved = half.state_dict()
    torch.manual_seed(99)
    resumed = dropping(0)
    resumed.load_state_dict(saved)
    resumed.advance(5)
    assert resumed.history.to_rows() == whole.history.to_rows()
    assert torch.equal(resumed.state.hyper(), whole.state.hyper())
    assert resumed.callbacks[0].state_dict() == whole.callbacks[0].state_dict()


def test_a_run_with_other_callbacks_is_refused() -> None:
    with pytest.raises(hk.HyperkronError, match="callbacks"):
        prepare(0).load_state_dict(dropping(1).state_dict())


# --- callbacks and history ---------------------------------------------------------------------------------


def test_callbacks_are_called_and_add_to_the_history() -> None:
    calls: list[str] = []

    class Spy(Callback):
        def on_start(self, run: hk.Run) -> None:
            calls.append("start")

        def on_step(self, run: hk.Run, report: Any) -> dict[str, Any]:
            calls.append(f"step {report.step}")
            return {"mean": float(run.state.hyper().detach().mean())}

        def on_end(self, run: hk.Run) -> None:
            calls.append("end")

    run = prepare(3, callbacks=[Spy(), hk.training.Evaluate(every=2, function=lambda run: {"second": 1.0})])
    assert calls == ["start", "step 0", "step 1", "step 2", "end"]
    assert run.history.column("second") == [None, 1.0, None]
    assert run.history[-1]["mean"] == float(run.state.hyper().detach().mean())


def test_a_step_is_in_the_history_also_where_a_callback_is_interrupted() -> None:
    def function(run: hk.Run) -> None:
        if run.state.step == 2:
            raise KeyboardInterrupt

    first = Evaluate(lambda run: {"seen": run.state.step}, every=1)
    run = prepare(0, callbacks=[first, Evaluate(function, every=1)])
    with pytest.raises(KeyboardInterrupt):
        run.advance(4)
    run.advance(2)
    assert run.history.column("step") == [0, 1, 2, 3]
    assert run.history.column("seen") == [1, 2, 3, 4]


def test_early_stopping_stops() -> None:
    run = prepare(50, callbacks=[hk.training.EarlyStopping("outer_loss", patience=3, margin=1e9)])
    assert len(run.history) == 4  # the first reading is the best for ever
    assert run.stopped is not None
    assert "outer_loss" in run.stopped
    assert prepare(5, callbacks=[hk.training.EarlyStopping("step", 2, "max")]).stopped is None


def test_early_stopping_says_that_it_never_saw_its_figure() -> None:
    with pytest.warns(hk.HyperkronWarning, match="no number in the column 'accuracy'"):
        prepare(2, callbacks=[hk.training.EarlyStopping("accuracy")])


def test_history_is_plain_and_writable(tmp_path: Path) -> None:
    history = prepare(4).history
    text = history.to_json(tmp_path / "history.json")
    assert json.loads((tmp_path / "history.json").read_text()) == json.loads(text) == history.to_rows()
    assert history.best("outer_loss")["outer_loss"] == min(history.column("outer_loss"))
    assert history["outer_loss"] == history.column("outer_loss") and history[-1] == history.to_rows()[-1]
    with pytest.raises(hk.HyperkronError, match="mode='least' is unknown; choose min or max"):
        history.best("outer_loss", mode="least")
    with pytest.raises(hk.HyperkronError, match="name='status' has no number in any row"):
        history.best("status")
    history.append({"step": 4, "accuracy": float("nan")})
    history.append({"step": 5, "accuracy": 0.5})
    assert history.best("accuracy")["step"] == history.best("accuracy", mode="max")["step"] == 5
    with pytest.raises(hk.HyperkronError, match="precision"):
        history.column("precision")


def test_plot_draws_on_given_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib it says so; with it (here a stand-in) it draws the two losses."""
    import sys
    import types

    history = prepare(3).history
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(hk.HyperkronError, match="matplotlib"):
        history.plot()
    drawn: list[str] = []
    axes = types.SimpleNamespace(
        plot=lambda x, y, label: drawn.append(f"{label} {len(x)}"), set_xlabel=lambda _: None, legend=lambda: None
    )
    pyplot = types.ModuleType("matplotlib.pyplot")
    package = types.ModuleType("matplotlib")
    package.pyplot = pyplot  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", package)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", pyplot)
    assert history.plot(ax=axes) is axes
    assert drawn == ["inner_loss 3", "outer_loss 3"]


def test_progress_shows_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    prepare(3, progress=True)
    shown = capsys.readouterr().err
    assert "3/3" in shown
    assert "step" in shown


def test_bad_arguments_are_named() -> None:
    with pytest.raises(hk.HyperkronError, match="wrap a hypergradient"):
        prepare(1, hk.cg(3))
    with pytest.raises(hk.HyperkronError, match="steps=-1"):
        prepare(-1)
    with pytest.raises(hk.HyperkronError, match=r"AID'> is a class, .* hyperkron.AID\(hypergradient"):
        prepare(1, hk.AID)
    with pytest.raises(hk.HyperkronError, match=r"Checkpoint.* pass an instance, Checkpoint\(…\)"):
        prepare(1, callbacks=[hk.Checkpoint])
    with pytest.raises(hk.HyperkronError, match=r"projection=Box is a class; pass an instance, Box\(…\)"):
        prepare(1, projection=hk.Box)


def test_callbacks_may_be_a_generator() -> None:
    class Mine(hk.training.Callback):
        on_cpu = True  # no method, so nothing that is never called

    mine = Mine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare(1, callbacks=(one for one in [mine])).callbacks.count(mine) == 1


def test_a_callback_with_a_misspelt_method_is_warned_of() -> None:
    class Mine(hk.training.Callback):
        def on_step_end(self, run: Any) -> None:
            raise AssertionError

    with pytest.warns(hk.HyperkronWarning, match=r"Mine.on_step_end is never called: .* on_step,"):
        prepare(1, callbacks=[Mine()])
