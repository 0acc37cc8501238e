"""Guards: steps that fail are undone, repeated in pieces or end the run; weights and inverses are watched."""

from __future__ import annotations

import copy
import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hyperkron as hk
from hyperkron.solution import Status
from hyperkron.training.guards import effective_sample_size, out_of_memory
from resuming import ALGORITHMS, CLASSES, EXAMPLES, FEATURES, digest, inner, outer, start


class Poison(hk.Source):
    """Batches whose draws number ``bad`` hold a NaN (or another value)."""

    def __init__(self, bad: set[int], seed: int = 1, value: float = math.nan) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(EXAMPLES, FEATURES, generator=generator)
        self.y = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        self.bad, self.value, self.drawn = bad, value, 0

    def next(self) -> tuple[Tensor, ...]:
        index = (torch.arange(8) + 5 * self.drawn) % EXAMPLES
        x = self.x[index]
        if self.drawn in self.bad:
            x[3, 1] = self.value
        self.drawn += 1
        return x, self.y[index], index

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn = state["drawn"]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, CLASSES))


def prepare(algorithm: Any, inner_data: Any, outer_data: Any, callbacks: Any, steps: int = 0, **options: Any) -> hk.Run:
    model, weights = options.pop("model", None) or network(), hk.SampleWeights(EXAMPLES)
    weights.to(next(model.parameters()).dtype)
    problem = options.pop("problem", hk.BilevelProblem(inner, outer))
    if "rates" not in options:
        options["inner_optimizer"] = torch.optim.Adam(model.parameters(), lr=0.02)
        options["outer_optimizer"] = torch.optim.SGD(weights.parameters(), lr=0.1, momentum=0.9)
    options.pop("rates", None)
    return hk.fit(
        problem, model, weights, algorithm, inner_data, outer_data, steps=steps, callbacks=callbacks, **options
    )


def memory(run: hk.Run) -> dict[str, Any]:
    """What a skipped step must leave as it was: all but the counter, the data and the random states."""
    return {key: value for key, value in run.state.state_dict().items() if key != "step"}


# --- NaN ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in ALGORITHMS if m != "SABA"])
@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_batch_leaves_no_trace(method: str, level: str, value: float, tmp_path: Path) -> None:
    bad = Poison({0, 1, 2, 3}, value=value)
    data = [bad, Poison(set(), 2)] if level == "inner" else [Poison(set(), 2), bad]
    run = prepare(ALGORITHMS[method](), *data, [hk.SkipFailures(folder=tmp_path)], steps=0)
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
    data = [hk.Examples(z, y, torch.arange(EXAMPLES), batch_size=8) for z in (broken, x)]
    run = prepare(hk.SABA(), *data, [hk.SkipFailures(folder=tmp_path)], steps=4, rates=None)
    before = digest(memory(run), tmp_path)
    broken[:] = math.nan
    run.advance(1)
    assert digest(memory(run), tmp_path) == before and run.history[-1]["status"] == "SKIPPED"
    (path,) = tmp_path.glob("failed-*.json")
    described = json.loads(path.read_text())["steps"][0]["batches"][0]
    first, last = described["examples"]
    assert described["tensors"][2]["values"] == list(range(first, last + 1))


def test_a_nan_gradient_behind_a_finite_loss_is_found_in_the_step_that_made_it(tmp_path: Path) -> None:
    """√ at 0 has an infinite slope: 0·∞ is NaN, while every loss is finite. SOBA moves θ after it has looked."""

    def rooted(model: Any, hyper: Any, batch: Any) -> Any:
        return inner(model, hyper, batch) + 0.0 * (0.0 * model[0].weight).square().sum().sqrt()

    run = prepare(
        hk.SOBA(), Poison(set()), Poison(set(), 2), [hk.SkipFailures(limit=2, folder=tmp_path)], rates=None,
        problem=hk.BilevelProblem(rooted, outer),
    )  # fmt: skip
    parts = ("model", "hyper", "trees")  # the rates decay with the step
    before = digest([memory(run)[part] for part in parts], tmp_path)
    run.advance(1)
    assert run.history[-1]["status"] == "SKIPPED"
    assert "left nan or infinite values in θ 0.weight" in str(run.history[-1]["reason"])
    assert digest([memory(run)[part] for part in parts], tmp_path) == before


def test_the_run_ends_after_n_in_a_row_and_names_the_file_with_the_batches(tmp_path: Path) -> None:
    bad = Poison({3, 4, 5, 6, 7, 8, 9})
    guard = hk.SkipFailures(limit=2, folder=tmp_path / "notes")
    run = prepare(hk.AID(hk.kfac(1e-2), inner_steps=1), bad, Poison(set(), 2), [guard])
    run.advance(1)
    after_first = digest(memory(run), tmp_path)
    with pytest.raises(hk.NonFiniteError, match="step 2 in a row that failed") as caught:
        run.advance(10)
    (path,) = (tmp_path / "notes").glob("failed-rank00000-step-*.json")
    assert str(path) in str(caught.value)
    noted = json.loads(path.read_text())["steps"]
    assert [entry["step"] for entry in noted] == [1, 2]
    batches = noted[0]["batches"]
    assert [batch["level"] for batch in batches][:2] == ["inner", "inner"]
    rows = {tuple(t["non_finite_rows"]) for b in batches for t in b["tensors"] if "non_finite_rows" in t}
    assert (3,) in rows
    ids = [t["values"] for b in batches for t in b["tensors"] if t["where"] == "batch[2]"]
    assert [(i + 5 * 3) % EXAMPLES for i in range(8)] in ids
    assert digest(memory(run), tmp_path) == after_first  # put back before the error


def test_a_good_step_in_between_starts_the_count_anew(tmp_path: Path) -> None:
    guard = hk.SkipFailures(limit=2, folder=tmp_path)
    run = prepare(hk.AID(hk.identity(), inner_steps=1), Poison({2, 6, 10}), Poison(set(), 2), [guard], steps=8)
    assert guard.skipped == 3 and guard.streak == 0
    assert run.history.column("status").count("SKIPPED") == 3
    assert len(list(tmp_path.glob("failed-*.json"))) == 3


def test_without_the_guard_a_nan_is_an_error() -> None:
    with pytest.raises(hk.NonFiniteError):
        prepare(hk.AID(hk.kfac(1e-2), inner_steps=1), Poison({2}), Poison(set(), 2), [], steps=4)


def test_schedules_and_rates_advance_with_skipped_steps(tmp_path: Path) -> None:
    """A decaying rate belongs to the step, not to how many of the steps before it succeeded."""
    rates = []
    for bad in (set(), {0, 1}, {4, 5}):  # none, the first of three, the last
        algorithm = hk.AID(hk.identity(), inner_steps=1, inner_rate=hk.Rate(0.1, 0.5))
        model, weights = network(), hk.SampleWeights(EXAMPLES)
        sgd = torch.optim.SGD(weights.parameters(), lr=0.1)
        updates = hk.Updates(sgd, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5))
        problem, data = hk.BilevelProblem(inner, outer), (Poison(bad), Poison(set(), 2))
        callbacks = [hk.SkipFailures(folder=tmp_path)]
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
        prepare(hk.AID(hk.kfac()), Poison(set()), Poison(set()), hk.default_guards(tmp_path), 1, problem=problem)


def test_statuses_can_be_refused(tmp_path: Path) -> None:
    """A hypergradient of a diverged series is not followed where the user says so."""
    diverging = hk.Implicit(hk.GGN(0.1), hk.Neumann(20, step=100.0))
    guard = hk.SkipFailures(folder=tmp_path, statuses={Status.DIVERGED})
    run = prepare(hk.AID(diverging, inner_steps=1), Poison(set()), Poison(set(), 2), [guard], rates=None)
    before = digest(memory(run), tmp_path)
    run.advance(1)
    assert digest(memory(run), tmp_path) == before
    assert "DIVERGED" in str(run.history[-1]["reason"])
    run = prepare(hk.AID(diverging, inner_steps=1), Poison(set()), Poison(set(), 2), [], steps=1, rates=None)
    assert run.history[-1]["status"] == "DIVERGED"  # visible in any case


def test_guarded_runs_without_failures_are_the_same_runs(tmp_path: Path) -> None:
    plain = start("KFAC", steps=4)
    guarded = start("KFAC", [hk.SkipFailures(folder=tmp_path)], steps=4)
    assert digest(memory(plain), tmp_path) == digest(memory(guarded), tmp_path)


def test_skips_and_their_count_survive_a_resume(tmp_path: Path) -> None:
    def make(steps: int) -> hk.Run:
        guards = [hk.SkipFailures(limit=3, folder=tmp_path / "notes")]
        algorithm = hk.AID(hk.kfac(1e-2, ema=0.5), inner_steps=1)
        return prepare(algorithm, Poison({2, 3, 7}), Poison(set(), 2), guards, steps=steps)

    whole = make(8)
    make(3).save(tmp_path / "saved")
    resumed = make(0).resume(tmp_path / "saved").advance(5)
    assert digest(resumed.state_dict(), tmp_path) == digest(whole.state_dict(), tmp_path)
    assert resumed.callbacks[0].skipped == whole.callbacks[0].skipped == 2


# --- memory ------------------------------------------------------------------------------------------------


class Limited(nn.Module):
    """A network that runs out of memory above a batch size, forward or backward."""

    def __init__(self, limit: int, dtype: torch.dtype = torch.float64, dropout: float = 0.0) -> None:
        super().__init__()
        self.net, self.limit = network().to(dtype), limit
        self.dropout = nn.Dropout(dropout)
        self.largest = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(x)  # a failed attempt has drawn random numbers, too
        if len(x) > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        self.largest = max(self.largest, len(x))
        return self.net(x)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(EXAMPLES, FEATURES, generator=generator, dtype=dtype)
    return x, torch.randint(CLASSES, (EXAMPLES,), generator=generator), torch.arange(EXAMPLES)


OOM_METHODS = {
    "KFAC": lambda: hk.AID(hk.kfac(1e-2, fisher="type-2", cross="reverse"), inner_steps=2),
    "EKFAC": lambda: hk.AID(hk.ekfac(1e-2, fisher="type-2", cross="reverse"), inner_steps=2),
    "CG": lambda: hk.AID(hk.cg(3, curvature=hk.GGN(1e-1), warm_start=True), inner_steps=2),
    "SAMA": lambda: hk.SAMA(2),
    "MRBO": lambda: hk.MRBO(hk.StochasticNeumann(3, 0.1)),
    "SABA": lambda: hk.SABA(),
    "BOME": lambda: hk.BOME(),
    "Unroll": lambda: hk.Unroll(3),
}


def limited(method: str, limit: int, guard: Any, steps: int = 3, data: Any = None, dropout: float = 0.0) -> hk.Run:
    model = Limited(limit, dropout=dropout)
    x, y, index = tensors()
    sources = data or [hk.Examples(x, y, index, batch_size=10, seed=s) for s in (1, 2)]
    return prepare(OOM_METHODS[method](), *sources, guard, steps=steps, model=model, rates=None)


@pytest.mark.parametrize("method", OOM_METHODS)
def test_out_of_memory_gives_the_result_of_enough_memory(method: str, tmp_path: Path) -> None:
    whole = limited(method, 1000, [])
    guard = hk.HalveOnOutOfMemory()
    with pytest.warns(hk.HyperkronWarning, match="out of memory at step 0 with 10 examples.*micro-batches of 5"):
        pieces = limited(method, 3, [guard])
    assert guard.micro_batch == 3 and pieces.state.model.largest == 3
    assert pieces.history[-1]["micro_batch"] == 3
    close = {"rtol": 1e-6, "atol": 1e-9} if method == "CG" else {"rtol": 1e-9, "atol": 1e-11}
    for level in ("params", "hypers"):
        torch.testing.assert_close(getattr(pieces.state, level), getattr(whole.state, level), **close)


@pytest.mark.parametrize("loader", [False, True])
def test_a_repeated_step_is_the_one_that_would_have_been(loader: bool, tmp_path: Path) -> None:
    """Same batches, same random states: bit for bit the run that had the small pieces from the start."""

    def make(limit: int, size: int | None) -> hk.Run:
        torch.manual_seed(0)
        data = [DataLoader(TensorDataset(*tensors()), batch_size=8, shuffle=True) for _ in range(2)] if loader else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return limited("KFAC", limit, [hk.HalveOnOutOfMemory(size)], data=data, dropout=0.3)

    small, halved = make(1000, 3 if not loader else 2), make(3 if not loader else 2, None)
    a, b = small.state_dict(), halved.state_dict()
    assert digest([a[k] for k in ("state", "draw", "random")], tmp_path) == digest(
        [b[k] for k in ("state", "draw", "random")], tmp_path
    )


def test_the_micro_batch_is_kept_in_checkpoints(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = limited("KFAC", 3, [hk.HalveOnOutOfMemory()], steps=4)
        limited("KFAC", 3, [hk.HalveOnOutOfMemory()], steps=2).save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the resumed run knows the size already
        resumed = limited("KFAC", 3, [hk.HalveOnOutOfMemory()], steps=0).resume(tmp_path).advance(2)
    assert digest(resumed.state_dict(), tmp_path) == digest(whole.state_dict(), tmp_path)


def test_one_example_that_does_not_fit_is_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError):
            limited("KFAC", 0, [hk.HalveOnOutOfMemory()])
        with pytest.raises(torch.OutOfMemoryError):
            limited("KFAC", 3, [hk.HalveOnOutOfMemory(least=4)])


def test_batch_norm_has_no_exact_pieces() -> None:
    model = Limited(4)
    model.net = nn.Sequential(model.net, nn.BatchNorm1d(CLASSES).double())
    data = [hk.Examples(*tensors(), batch_size=10) for _ in range(2)]
    with pytest.raises(hk.HyperkronError, match=r"BatchNorm.*GroupNorm"):
        prepare(hk.AID(hk.kfac(1e-2)), *data, [hk.HalveOnOutOfMemory()], 1, model=model, rates=None)


def test_what_counts_as_out_of_memory() -> None:
    assert out_of_memory(torch.OutOfMemoryError("x"))
    assert out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"))
    assert not out_of_memory(RuntimeError("size mismatch"))


# --- clipping and mixed precision --------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["inner", "outer"])
def test_clipping_is_by_the_norm_of_the_whole_level(level: str) -> None:
    found = []
    for clip in (None, 1e-3):
        model, weights = network().double(), hk.SampleWeights(EXAMPLES).double()
        moved = model if level == "inner" else weights
        before = copy.deepcopy(moved)
        options = {f"{level}_optimizer": hk.Updates(torch.optim.SGD(moved.parameters(), lr=1.0), clip=clip)}
        x, y, index = Poison(set()).next()
        data = x.double(), y, index
        algorithm = hk.AID(hk.identity(), inner_steps=1, inner_rate=0.0)
        hk.fit(hk.BilevelProblem(inner, outer), model, weights, algorithm, data, data, steps=1, **options)
        pairs = zip(before.parameters(), moved.parameters(), strict=True)
        found.append(torch.cat([(x - y).flatten() for x, y in pairs]).detach())
    assert float(found[0].norm()) > 1e-3
    torch.testing.assert_close(found[1], found[0] * (1e-3 / found[0].norm()), rtol=1e-6, atol=1e-12)


def amp_run(
    steps: int, scale: float = 1024.0, factor: float = 1.0, autocast: Any = None, callbacks: Any = ()
) -> hk.Run:
    model, weights = network(), hk.SampleWeights(EXAMPLES)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
    updates = hk.Updates(torch.optim.Adam(model.parameters(), lr=0.02), clip=1.0, autocast=autocast, scaler=scaler)
    problem = hk.BilevelProblem(lambda m, h, b: inner(m, h, b) * factor, outer)
    algorithm = hk.AID(hk.kfac(1e-2, cross="reverse"), inner_steps=2)
    data = Poison(set()), Poison(set(), 2)
    return hk.fit(problem, model, weights, algorithm, *data, steps=steps, inner_optimizer=updates, callbacks=callbacks)


def test_the_scale_reaches_no_result(tmp_path: Path) -> None:
    """Scales are powers of two: θ, λ and the hypergradient's memory are the same bits whatever the scale."""
    runs = [amp_run(5, scale) for scale in (1.0, 2.0**16)]
    parts = [{k: v for k, v in memory(run).items() if k != "inner"} for run in runs]
    assert digest(parts[0], tmp_path) == digest(parts[1], tmp_path)
    assert runs[0].history.column("direction") == runs[1].history.column("direction")
    assert runs[0].state.inner.scaler.get_scale() == 8.0  # ten inner steps at a growth interval of three


def test_an_overflow_leaves_one_step_of_theta_out_and_lowers_the_scale() -> None:
    run = amp_run(0, scale=2.0**127, factor=100.0)
    before = run.state.inner.values()
    found = hk.algorithms.oracles.gradients(run.state, "inner", run.draw.inner(), live=True, hyper=False)
    run.state.inner.step(found.theta)
    torch.testing.assert_close(run.state.inner.values(), before, rtol=0, atol=0)
    assert run.state.inner.scaler.get_scale() == 2.0**126


def test_a_scaler_is_resumed(tmp_path: Path) -> None:
    whole = amp_run(6)
    amp_run(3).save(tmp_path)
    resumed = amp_run(0).resume(tmp_path).advance(3)
    assert digest(resumed.state_dict(), tmp_path) == digest(whole.state_dict(), tmp_path)
    assert resumed.state.inner.scaler.get_scale() == whole.state.inner.scaler.get_scale() > 1024


def test_autocast_is_for_the_steps_of_theta_only() -> None:
    """Inner steps see half precision, hypergradients full precision."""
    seen: list[bool] = []
    model, weights = network(), hk.SampleWeights(EXAMPLES)
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    updates = hk.Updates(torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.bfloat16)
    algorithm = hk.AID(hk.kfac(1e-2, cross="reverse"), inner_steps=2)
    data = Poison(set()), Poison(set(), 2)
    hk.fit(hk.BilevelProblem(inner, outer), model, weights, algorithm, *data, steps=1, inner_optimizer=updates)
    assert seen[:2] == [True, True] and not any(seen[2:]) and len(seen) > 3


def test_half_precision_underflows_without_a_scale_and_not_with_one() -> None:
    """Gradients of 1e-8 vanish in float16 unless the loss is scaled."""

    def gradient(scaler: Any) -> Tensor:
        model, weights = nn.Linear(4, 1, bias=False), hk.SampleWeights(8)
        nn.init.constant_(model.weight, 0.5)
        updates = hk.Updates(torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.float16, scaler=scaler)
        problem = hk.BilevelProblem(lambda m, h, b: 1e-8 * m(b).float().mean(), lambda m, h, b: m(b).mean())
        state = hk.AID(hk.identity()).init(problem, model, weights, inner=updates)
        return hk.algorithms.oracles.gradients(state, "inner", torch.ones(8, 4), live=True).theta["weight"]

    assert float(gradient(None).abs().sum()) == 0.0
    torch.testing.assert_close(
        gradient(torch.amp.GradScaler("cpu", init_scale=2.0**16)), torch.full((1, 4), 1e-8), rtol=2e-2, atol=0
    )


def test_scalers_are_for_theta() -> None:
    model, weights = network(), hk.SampleWeights(EXAMPLES)
    updates = hk.Updates(torch.optim.SGD(weights.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(hk.HyperkronError, match="inner_optimizer"):
        hk.AID(hk.identity()).init(hk.BilevelProblem(inner, outer), model, weights, outer=updates)
    for bad in ({"autocast": torch.float64}, {"scaler": "yes"}):
        with pytest.raises(hk.HyperkronError, match=next(iter(bad))):
            hk.Updates(torch.optim.SGD(weights.parameters(), lr=0.1), **bad)


# --- weights and inverses ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "effective"), [([1, 1, 1, 1], 4.0), ([0, 0, 0, 0], 0.0), ([1, 0, 0, 0], 1.0), ([1e-13] * 4, 0.0)]
)
def test_effective_sample_size(weights: list[float], effective: float) -> None:
    assert effective_sample_size(torch.tensor(weights)) == effective


def test_a_collapse_is_said_once_and_can_end_the_run() -> None:
    def make(**options: Any) -> hk.Run:
        algorithm = hk.AID(hk.identity(), inner_steps=1)
        return prepare(algorithm, Poison(set()), Poison(set(), 2), [hk.WatchWeights(0.2, **options)], rates=None)

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
        hk.AID(hk.identity(), inner_steps=1), Poison(set()), Poison(set(), 2), [hk.WatchWeights()], rates=None
    )
    run.state.hyper = hk.as_hyper(torch.zeros(3))
    assert run.callbacks[0].on_step(run, hk.StepReport(0, 0.0, None, 0.0)) is None


def report(step: int, age: int = 0, status: Status = Status.DIRECT) -> hk.StepReport:
    return hk.StepReport(step, 0.0, None, 0.0, status, {"curvature_age": age})


class Stopped:
    reason: str | None = None

    def stop(self, reason: str) -> None:
        self.reason = reason


def test_old_inverses_are_said_once_and_end_the_run_where_they_stay() -> None:
    guard, run = hk.WatchInverses(age=4, limit=3), Stopped()
    assert all(guard.on_step(run, report(i, age=i)) is None for i in range(5))
    with pytest.warns(hk.HyperkronWarning, match="stale: its age is 5"):
        assert guard.on_step(run, report(5, age=5)) == {"guard": "STALE"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it was said
        assert run.reason is None and guard.on_step(run, report(6, age=6)) is not None
        assert guard.on_step(run, report(7, age=0)) is None  # refreshed
        other = hk.WatchInverses(age=4, limit=3)
        other.load_state_dict(copy.deepcopy(guard.state_dict()))
        for i in range(3):
            assert run.reason is None
            other.on_step(run, report(8 + i, age=5))
    assert "stale" in str(run.reason)


def test_repeatedly_kept_inverses_are_stale() -> None:
    guard, run = hk.WatchInverses(kept=3, window=10), Stopped()
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
        lambda: hk.SkipFailures(limit=0),
        lambda: hk.SkipFailures(statuses={"DIVERGED"}),
        lambda: hk.HalveOnOutOfMemory(micro_batch=0),
        lambda: hk.WatchWeights(fraction=2.0),
        lambda: hk.WatchInverses(kept=True),
    ],
)
def test_bad_arguments_are_named(make: Any) -> None:
    with pytest.raises(hk.HyperkronError, match=r"=.*must"):
        make()
