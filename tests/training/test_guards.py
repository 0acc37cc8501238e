"""Guards: steps that fail are undone or end the run; weights and inverses are watched.

Steps that run out of memory are in ``test_guards_memory.py``.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
from guarding import Poison, memory, network, prepare
from hyperkron import trees
from hyperkron.solution import Status
from hyperkron.training import guards
from hyperkron.training.guards import effective_sample_size
from resuming import ALGORITHMS, CLASSES, EXAMPLES, FEATURES, digest, inner, outer, start

# --- NaN ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in ALGORITHMS if m != "SABA"])
@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_leaves_no_trace(method: str, level: str, value: float, tmp_path: Path) -> None:
    bad = Poison({0, 1, 2, 3}, value=value)
    data = [bad, Poison(set(), 2)] if level == "inner" else [Poison(set(), 2), bad]
    run = prepare(ALGORITHMS[method](), *data, [hk.training.SkipFailures(folder=tmp_path)], steps=0)
    bad.drawn = 4
    run.advance(2)
    before = digest(memory(run), tmp_path)
    bad.drawn = 0
    run.advance(1)
    assert digest(memory(run), tmp_path) == before
    assert run.state.step == 3 and run.history[-1]["status"] == "SKIPPED"
    assert run.history[-1]["outer_loss"] is None and run.history[-1]["skipped"] == 1
    bad.drawn = 4
    run.advance(1)
    assert run.history[-1]["status" if "status" in run.history[0] else "step"] in ("DIRECT", "BUDGET", "CONVERGED", 3)
    assert digest(memory(run), tmp_path) != before


def test_finite_sums_are_undone_too(tmp_path: Path) -> None:
    """SABA writes its tables in place and asks for batches by number."""
    x, y = torch.randn(EXAMPLES, FEATURES), torch.randint(CLASSES, (EXAMPLES,))
    broken = x.clone()
    data = [hk.algorithms.Examples(z, y, torch.arange(EXAMPLES), batch_size=8) for z in (broken, x)]
    run = prepare(hk.algorithms.SABA(), *data, [hk.training.SkipFailures(folder=tmp_path)], steps=4, rates=None)
    before = digest(memory(run), tmp_path)
    broken[:] = math.nan
    run.advance(1)
    assert digest(memory(run), tmp_path) == before and run.history[-1]["status"] == "SKIPPED"
    (path,) = tmp_path.glob("failed-*.json")
    described = json.loads(path.read_text())["batches"][0]
    first, last = described["examples"]
    assert described["tensors"][2]["values"] == list(range(first, last + 1))


def test_a_nan_gradient_behind_a_finite_loss_is_found_in_the_step_that_made_it(tmp_path: Path) -> None:
    """√ at 0 has an infinite slope: 0·∞ is NaN, while every loss is finite. SOBA moves θ after it has looked."""

    def rooted(model: Any, hyper: Any, batch: Any) -> Any:
        return inner(model, hyper, batch) + 0.0 * (0.0 * model[0].weight).square().sum().sqrt()

    run = prepare(
        hk.algorithms.SOBA(), Poison(set()), Poison(set(), 2),
        [hk.training.SkipFailures(limit=2, folder=tmp_path)], rates=None,
        problem=hk.BilevelProblem(rooted, outer),
    )  # fmt: skip
    parts = ("model", "hyper", "trees")  # the rates decay with the step
    before = digest([memory(run)[part] for part in parts], tmp_path)
    run.advance(1)
    assert run.history[-1]["status"] == "SKIPPED"
    assert "left nan or infinite values in θ 0.weight" in str(run.history[-1]["reason"])
    assert digest([memory(run)[part] for part in parts], tmp_path) == before


@pytest.mark.parametrize("spoilt", ["θ value", "λ value", "buffer count"])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_what_a_step_leaves_non_finite_is_found_whatever_its_shape(
    spoilt: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    model, hyper = (hk.as_hyper(torch.full(shape, start)) for start in (0.5, 0.25))
    hyper.register_buffer("count", torch.zeros(shape))
    held = {"θ value": model.value, "λ value": hyper.value, "buffer count": hyper.count}

    def project(x: Any) -> Any:
        if run is not None:  # at the end of the step, when all losses have been evaluated
            held[spoilt].data.fill_(math.nan)
        return x

    run, guard = None, hk.training.SkipFailures(folder=tmp_path)
    problem = hk.BilevelProblem(lambda m, h, _: (m() - h()).square().sum(), lambda m, h, _: (m() - 1).square().sum())
    aid = hk.algorithms.aid_cg(1)
    run = hk.fit(problem, model, hyper, aid, None, None, steps=0, projection=project, callbacks=[guard])
    run.advance(1)
    assert run.history[-1]["status"] == "SKIPPED" and spoilt in str(run.history[-1]["reason"])
    assert all(bool(x.isfinite().all()) for x in held.values())


@pytest.mark.parametrize("persistent", [False, True])
def test_a_mask_of_infinities_is_no_failure(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention masks are often such buffers. Parameters are still looked at together, as without them."""
    looked_at, is_finite = list[set[str]](), trees.is_finite
    monkeypatch.setattr(trees, "is_finite", lambda tree: looked_at.append({*tree}) or is_finite(tree))
    model, hyper = nn.Linear(3, 3), hk.as_hyper(torch.zeros(3))
    model.register_buffer("mask", torch.tensor([0.0, 0.0, -math.inf]), persistent=persistent)
    problem = hk.BilevelProblem(
        lambda m, h, x: ((m(x) + m.mask).softmax(-1) - h()).square().mean(), lambda m, h, x: m(x).square().mean()
    )
    x = torch.ones(2, 3)
    run = hk.fit(problem, model, hyper, hk.algorithms.aid_cg(1), x, x, steps=2, callbacks=hk.training.default_guards())
    assert "SKIPPED" not in run.history.column("status")
    assert all("θ bias" in names and "buffer mask of model" not in names for names in looked_at if "θ weight" in names)
    model.weight.data.fill_(math.nan)
    with pytest.raises(hk.HyperkronError):
        run.advance(5)


@pytest.mark.parametrize("spoilt", [None, "momentum", "model", "hyper"])
def test_a_mask_of_one_part_excuses_nothing_else(spoilt: str | None) -> None:
    """A buffer of the same name in the other part is another buffer, and so is the ``momentum_buffer`` of SGD."""
    model, hyper = hk.as_hyper(torch.full((2,), 0.5)), hk.as_hyper(torch.full((2,), 0.25))
    parts = {"model": model, "hyper": hyper}
    for name, part in parts.items():
        part.register_buffer("mask", torch.full((2,), 1.0 if spoilt == name else -math.inf))
    optimizer = torch.optim.SGD(hyper.parameters(), lr=0.1, momentum=0.9)

    def project(x: Any) -> Any:
        if run is not None and spoilt == "momentum":
            optimizer.state[hyper.value]["momentum_buffer"].fill_(math.nan)
        elif run is not None and spoilt is not None:
            parts[spoilt].mask.fill_(math.nan)
        return x

    run, guards = None, hk.training.default_guards()
    problem = hk.BilevelProblem(lambda m, h, _: (m() - h()).square().sum(), lambda m, h, _: (m() - 1).square().sum())
    own: dict[str, Any] = {"outer_optimizer": optimizer, "projection": project, "callbacks": guards}
    run = hk.fit(problem, model, hyper, hk.algorithms.aid_cg(1), None, None, steps=0, **own)
    run.advance(1)
    assert (run.history[-1].get("status") == "SKIPPED") == (spoilt is not None)
    assert spoilt is None or spoilt in str(run.history[-1]["reason"])


def test_the_run_ends_after_n_in_a_row_and_names_the_file_with_the_batches(tmp_path: Path) -> None:
    bad = Poison({3, 4, 5, 6, 7, 8, 9})
    guard = hk.training.SkipFailures(limit=2, folder=tmp_path / "notes")
    run = prepare(hk.AID(hk.kfac(1e-2), inner_steps=1), bad, Poison(set(), 2), [guard])
    run.advance(1)
    after_first = digest(memory(run), tmp_path)
    with pytest.raises(hk.NonFiniteError, match="step 2 in a row that failed") as caught:
        run.advance(10)
    paths = sorted((tmp_path / "notes").iterdir())
    assert [path.name for path in paths] == [f"failed-rank00000-step-0000000{step}.json" for step in (1, 2)]
    assert str(paths[-1]) in str(caught.value) and guard.path == paths[-1]
    noted = [json.loads(path.read_text()) for path in paths]
    assert [entry["step"] for entry in noted] == [1, 2]
    batches = noted[0]["batches"]
    assert [batch["level"] for batch in batches][:2] == ["inner", "inner"]
    rows = {tuple(t["non_finite_rows"]) for b in batches for t in b["tensors"] if "non_finite_rows" in t}
    assert (3,) in rows
    ids = [t["values"] for b in batches for t in b["tensors"] if t["where"] == "batch[2]"]
    assert [(i + 5 * 3) % EXAMPLES for i in range(8)] in ids
    assert digest(memory(run), tmp_path) == after_first  # put back before the error


def test_a_good_step_in_between_starts_the_count_anew(tmp_path: Path) -> None:
    guard = hk.training.SkipFailures(limit=2, folder=tmp_path)
    run = prepare(hk.AID(hk.identity(), inner_steps=1), Poison({2, 6, 10}), Poison(set(), 2), [guard], steps=8)
    assert guard.skipped == 3 and guard.streak == 0
    assert run.history.column("status").count("SKIPPED") == 3
    assert len(list(tmp_path.glob("failed-*.json"))) == 3


def test_every_skipped_step_has_its_own_file_named_after_it(tmp_path: Path) -> None:
    """Five in a row, from step 0, then a good one and another bad one: six files, each of the step it names."""
    bad = Poison({*range(10), 12})
    guard = hk.training.SkipFailures(limit=6, folder=tmp_path)
    run = prepare(hk.AID(hk.identity(), inner_steps=1), bad, Poison(set(), 2), [guard], steps=8)
    skipped = [row["step"] for row in run.history if row.get("status") == "SKIPPED"]
    files = {int(path.stem[-8:]): json.loads(path.read_text()) for path in tmp_path.glob("failed-*.json")}
    assert sorted(files) == skipped == [0, 1, 2, 3, 4, 6]
    assert all(content["step"] == step for step, content in files.items())
    for step, content in files.items():  # two draws of J_in a step
        (drawn,) = (t["values"] for t in content["batches"][0]["tensors"] if t["where"] == "batch[2]")
        assert drawn == [(i + 5 * 2 * step) % EXAMPLES for i in range(8)]


def test_files_of_skipped_steps_are_bounded_and_share_a_folder(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(guards, "MAX_DUMPS", 3)
    guard = hk.training.SkipFailures(limit=9)
    prepare(hk.AID(hk.identity(), inner_steps=1), Poison(set(range(12))), Poison(set(), 2), [guard], steps=5)
    assert guard.skipped == 5 and guard.path is None
    assert sum("further ones get none" in str(w.message) for w in recwarn) == 1
    assert guard._dumps is not None and len(list(guard._dumps.iterdir())) == 3
    shutil.rmtree(guard._dumps)


def test_without_the_guard_a_nan_is_an_error() -> None:
    with pytest.raises(hk.NonFiniteError):
        prepare(hk.AID(hk.kfac(1e-2), inner_steps=1), Poison({2}), Poison(set(), 2), [], steps=4)


def test_schedules_and_rates_advance_with_skipped_steps(tmp_path: Path) -> None:
    """A decaying rate belongs to the step, not to how many of the steps before it succeeded."""
    rates = []
    for bad in (set(), {0, 1}, {4, 5}):  # none, the first of three, the last
        algorithm = hk.AID(hk.identity(), inner_steps=1, inner_rate=hk.algorithms.Rate(0.1, 0.5))
        model, weights = network(), hk.SampleWeights(EXAMPLES)
        sgd = torch.optim.SGD(weights.parameters(), lr=0.1)
        updates = hk.algorithms.Updates(sgd, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5))
        problem, data = hk.BilevelProblem(inner, outer), (Poison(bad), Poison(set(), 2))
        callbacks = [hk.training.SkipFailures(folder=tmp_path)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: the schedule moves before the first step of the optimizer
            run = hk.fit(
                problem, model, weights, algorithm, *data, steps=3, outer_optimizer=updates, callbacks=callbacks
            )
        assert bool(bad) == ("SKIPPED" in run.history.column("status"))
        rates.append((run.state.inner.lr, run.state.outer.lr))
    assert rates[0] == rates[1] == rates[2] == (0.05, 0.0125)


def test_other_errors_pass(tmp_path: Path) -> None:
    def broken(model: Any, hyper: Any, batch: Any) -> Any:
        raise KeyError("mine")

    problem = hk.BilevelProblem(broken, outer)
    with pytest.raises(KeyError, match="mine"):
        prepare(
            hk.AID(hk.kfac()), Poison(set()), Poison(set()), hk.training.default_guards(tmp_path), 1, problem=problem
        )


def test_statuses_can_be_refused(tmp_path: Path) -> None:
    """A hypergradient of a diverged series is not followed where the user says so."""
    diverging = hk.Implicit(hk.curvature.GGN(0.1), hk.solvers.Neumann(20, step=100.0))
    guard = hk.training.SkipFailures(folder=tmp_path, statuses={Status.DIVERGED})
    run = prepare(hk.AID(diverging, inner_steps=1), Poison(set()), Poison(set(), 2), [guard], rates=None)
    before = digest(memory(run), tmp_path)
    run.advance(1)
    assert digest(memory(run), tmp_path) == before
    assert "DIVERGED" in str(run.history[-1]["reason"])
    run = prepare(hk.AID(diverging, inner_steps=1), Poison(set()), Poison(set(), 2), [], steps=1, rates=None)
    assert run.history[-1]["status"] == "DIVERGED"  # visible in any case


def test_guarded_runs_without_failures_are_the_same_runs(tmp_path: Path) -> None:
    plain = start("KFAC", steps=4)
    guarded = start("KFAC", [hk.training.SkipFailures(folder=tmp_path)], steps=4)
    assert digest(memory(plain), tmp_path) == digest(memory(guarded), tmp_path)


def test_skips_and_their_count_survive_a_resume(tmp_path: Path) -> None:
    def make(steps: int) -> hk.Run:
        guards = [hk.training.SkipFailures(limit=3, folder=tmp_path / "notes")]
        algorithm = hk.AID(hk.kfac(1e-2, ema=0.5), inner_steps=1)
        return prepare(algorithm, Poison({2, 3, 7}), Poison(set(), 2), guards, steps=steps)

    whole = make(8)
    make(3).save(tmp_path / "saved")
    resumed = make(0).resume(tmp_path / "saved").advance(5)
    assert digest(resumed.state_dict(), tmp_path) == digest(whole.state_dict(), tmp_path)
    assert resumed.callbacks[0].skipped == whole.callbacks[0].skipped == 2


# --- weights and inverses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "effective"), [([1, 1, 1, 1], 4.0), ([0, 0, 0, 0], 0.0), ([1, 0, 0, 0], 1.0), ([1e-13] * 4, 0.0)]
)
def test_effective_sample_size(weights: list[float], effective: float) -> None:
    assert effective_sample_size(torch.tensor(weights)) == effective


def test_a_collapse_is_said_once_and_can_end_the_run() -> None:
    def make(**options: Any) -> hk.Run:
        algorithm = hk.AID(hk.identity(), inner_steps=1)
        return prepare(
            algorithm, Poison(set()), Poison(set(), 2), [hk.training.WatchWeights(0.2, **options)], rates=None
        )

    run = make()
    run.advance(2)
    assert run.history[-1]["effective_sample_size"] > 15 and "guard" not in run.history[-1]
    with torch.no_grad():
        run.state.hyper.weight.fill_(-5.0)  # clipped: all weights are zero
    with pytest.warns(hk.HyperkronWarning, match=r"collapsed at step 2.* 0 of 20") as caught:
        run.advance(3)
    assert len(caught) == 1 and run.history.column("guard") == [None, None, *["COLLAPSED"] * 3]
    run = make(stop=True)
    with torch.no_grad():
        run.state.hyper.weight.fill_(-5.0)
        run.state.hyper.weight[3] = 1.0
    with pytest.warns(hk.HyperkronWarning, match="1 of 20"):
        run.advance(5)
    assert run.state.step == 1 and "collapsed" in str(run.stopped)


def test_other_hyperparameters_have_no_weights_to_collapse() -> None:
    run = prepare(
        hk.AID(hk.identity(), inner_steps=1), Poison(set()), Poison(set(), 2), [hk.training.WatchWeights()], rates=None
    )
    run.state.hyper = hk.as_hyper(torch.zeros(3))
    assert run.callbacks[0].on_step(run, hk.algorithms.StepReport(0, 0.0, None, 0.0)) is None


def report(step: int, age: int = 0, status: Status = Status.DIRECT) -> hk.algorithms.StepReport:
    return hk.algorithms.StepReport(step, 0.0, None, 0.0, status, {"curvature_age": age})


class Stopped:
    reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = reason


def test_old_inverses_are_said_once_and_end_the_run_where_they_stay() -> None:
    guard, run = hk.training.WatchInverses(age=4, limit=3), Stopped()
    assert all(guard.on_step(run, report(i, age=i)) is None for i in range(5))
    with pytest.warns(hk.HyperkronWarning, match="stale: its age is 5"):
        assert guard.on_step(run, report(5, age=5)) == {"guard": "STALE"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        assert run.reason is None and guard.on_step(run, report(6, age=6)) is not None
        assert guard.on_step(run, report(7, age=0)) is None  # refreshed
        other = hk.training.WatchInverses(age=4, limit=3)
        other.load_state_dict(copy.deepcopy(guard.state_dict()))
        for i in range(3):
            assert run.reason is None
            other.on_step(run, report(8 + i, age=5))
    assert "stale" in str(run.reason)


def test_repeatedly_kept_inverses_are_stale() -> None:
    guard, run = hk.training.WatchInverses(kept=3, window=10), Stopped()
    kept = [0, 5, 11, 13]  # three within ten steps from 13 on, until 5 has left the window
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(20):
            found.append(guard.on_step(run, report(i, status=Status.KEPT_PREVIOUS if i in kept else Status.DIRECT)))
    stale = [i for i, x in enumerate(found) if x]
    assert stale == [13, 14]


@pytest.mark.parametrize(
    "make",
    [
        lambda: hk.training.SkipFailures(limit=0),
        lambda: hk.training.SkipFailures(statuses={"DIVERGED"}),
        lambda: hk.training.HalveOnOutOfMemory(micro_batch=0),
        lambda: hk.training.WatchWeights(fraction=2.0),
        lambda: hk.training.WatchInverses(kept=True),
    ],
)
def test_bad_arguments_are_named(make: Any) -> None:
    with pytest.raises(hk.HyperkronError, match=r"=.*must"):
        make()
