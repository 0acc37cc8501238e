"""Replayed hypergradients are those of the ordinary way; without a GPU a stand-in writes into the same memory."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hyperkron as hk
from hyperkron import graphs, solution
from hyperkron.curvature import KroneckerState
from hyperkron.curvature.kfac import eigen, kronecker
from hyperkron.hypergradient import replay
from hyperkron.point import Point

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))
Batch = tuple[Tensor, Tensor, Tensor]


class Rerun:
    """In place of a CUDA graph: the function is called again, and its results are written over the first ones."""

    made = 0

    def __init__(self, function: Callable[[], Any], *, generators: Any = (), pool: Any = None) -> None:
        type(self).made += 1
        self.function, self.pool = function, None
        self.point = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))[
            "point"
        ].cell_contents
        self.state = METHOD[0].state.curvature
        before = self._generator()
        self.outputs = function()
        self.kept = self._inverses()
        self._generator(before)

    def _inverses(self) -> Any:
        if not isinstance(self.state, KroneckerState) or self.state.inverses is None:
            return {}
        return self.state.inverses.state_dict(), self.state.diagonal

    def _generator(self, back: Tensor | None = None) -> Tensor | None:
        generator = getattr(self.state, "generator", None)
        if generator is not None and back is not None:
            generator.set_state(back)
        return None if generator is None else generator.get_state()

    def replay(self) -> Any:
        saved, cross = copy.copy(self.state), copy.copy(METHOD[0].state.cross)
        self.point.doors, self.point.unread = [], []
        with self.point:
            new = self.function()
        fresh = self._inverses()
        vars(self.state).update(vars(saved))
        vars(METHOD[0].state.cross).update(vars(cross))
        _written(self.outputs, new)
        _written(self.kept, fresh)
        return self.outputs


def _written(old: Any, new: Any) -> None:
    def tensors(x: Any) -> list[Tensor]:
        if isinstance(x, replay.Answer):
            x = (x.value, x.grads, x.solution.value)
        if isinstance(x, tuple):
            return [t for part in x for t in tensors(part)]
        return [t for t in pytree.tree_flatten(x)[0] if isinstance(t, Tensor)]

    with torch.no_grad():
        for mine, its in zip(tensors(old), tensors(new), strict=True):
            mine.copy_(its)


METHOD: list[hk.Implicit] = []


@pytest.fixture(params=["cpu", GPU])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    solution._warned.clear()
    Rerun.made = 0
    if request.param == "cpu":
        monkeypatch.setattr(graphs, "available", lambda device: True)
        monkeypatch.setattr(replay, "Recording", Rerun)
    else:
        real = replay.Recording

        def counted(*args: Any, **options: Any) -> Any:
            Rerun.made += 1
            return real(*args, **options)

        monkeypatch.setattr(replay, "Recording", counted)
    yield request.param
    METHOD.clear()


def network(device: str, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 3)]
    return nn.Sequential(*parts).to(device)


def batch(i: int, device: str, size: int = 8) -> Batch:
    draw = torch.Generator().manual_seed(i)
    x, y = torch.randn(size, 1, 6, 6, generator=draw), torch.randint(3, (size,), generator=draw)
    return x.to(device), y.to(device), (torch.arange(size) + i).to(device)


def inner(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(b[0]), b[1], weight=weights(b[2]))


def outer(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(b[0]), b[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def made(**options: Any) -> hk.Implicit:
    method = hk.kfac(1e-2, **options)
    METHOD[:] = [method]
    return method


def trained(method: hk.Implicit, device: str, steps: int = 8, size: Callable[[int], int] = lambda i: 8) -> list[Any]:
    """Hypergradients while θ moves, and the state of the model after each."""
    model, weights = network(device), hk.SampleWeights(40).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for i in range(steps):
        optimizer.zero_grad()
        inner(model, weights, batch(i, device)).backward()
        optimizer.step()
        before = {name: x.clone() for name, x in model.state_dict().items()}
        result = method.compute(PROBLEM, model, weights, batch(i, device, size(i)), batch(50 + i, device))
        for name, x in model.state_dict().items():
            assert torch.equal(x, before[name]), name
        found.append(result)
    return found


TOLERANCE = {"cpu": {"rtol": 0.0, "atol": 0.0}, "cuda": {"rtol": 1e-3, "atol": 1e-4}}
"""On a CPU the same code runs in the same order; in a CUDA graph factors are factorised by smaller leaves."""


def close(found: list[Any], expected: list[Any]) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert mine.outer_loss == pytest.approx(its.outer_loss, rel=1e-4)
        assert mine.status is its.status
        assert mine.stats.keys() == its.stats.keys()
        close = TOLERANCE[next(iter(its.grads.values())).device.type]
        torch.testing.assert_close(mine.grads, its.grads, **close)
        torch.testing.assert_close(mine.solution.value, its.solution.value, **close)


@pytest.mark.parametrize("options", [{}, {"refresh_every": 3}, {"fisher": "empirical"}, {"sharing": "reduce"}])
def test_answers_are_those_of_the_ordinary_way(device: str, options: dict[str, Any]) -> None:
    expected = trained(made(**options), device)
    method = made(**options, graph=True)
    found = trained(method, device)
    close(found, expected)
    assert Rerun.made == (2 if "refresh_every" in options else 1)
    assert [r.stats["curvature_age"] for r in found] == [r.stats["curvature_age"] for r in expected]
    assert [r.stats["curvature_refreshes"] for r in found] == [r.stats["curvature_refreshes"] for r in expected]
    assert method.state.calls == len(found)


def test_results_keep_their_values_when_the_next_step_is_replayed(device: str) -> None:
    method = made(graph=True)
    found = trained(method, device)
    assert len({round(float(next(iter(r.grads.values())).norm()), 9) for r in found}) == len(found)


def test_draws_go_on_as_without_a_recording(device: str) -> None:
    plain, recorded = made(), made(graph=True)
    METHOD[:] = [plain]
    trained(plain, device)
    METHOD[:] = [recorded]
    trained(recorded, device)
    states = [m.state.curvature for m in (plain, recorded)]
    assert all(isinstance(s, KroneckerState) for s in states)
    assert torch.equal(states[0].generator.get_state(), states[1].generator.get_state())  # type: ignore[attr-defined]


def test_a_smaller_batch_takes_the_ordinary_way(device: str) -> None:
    def size(i: int) -> int:
        return 5 if i == 4 else 8

    expected = trained(made(), device, size=size)
    close(trained(made(graph=True), device, size=size), expected)
    assert Rerun.made == 1


def test_batches_of_another_shape_are_recorded_anew(device: str) -> None:
    def size(i: int) -> int:
        return 8 if i < 4 else 6

    expected = trained(made(), device, steps=12, size=size)
    close(trained(made(graph=True), device, steps=12, size=size), expected)
    assert Rerun.made == 2


def test_what_is_not_finite_is_found_and_named(device: str) -> None:
    method = made(graph=True)
    model, weights = network(device), hk.SampleWeights(40).to(device)
    for i in range(3):
        method.compute(PROBLEM, model, weights, batch(i, device), batch(50, device))
    bad = batch(3, device)
    bad[0][0] = float("nan")
    with pytest.raises(hk.NonFiniteError, match=r"inner_batch\[0\] holds 36 nan"):
        method.compute(PROBLEM, model, weights, bad, batch(50, device))
    result = method.compute(PROBLEM, model, weights, batch(4, device), batch(50, device))
    assert result.status is hk.Status.DIRECT
    assert all(x.isfinite().all() for x in result.grads.values())


def test_negative_weights_are_refused_by_name(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kronecker, "_queues", lambda point: True)

    def signed(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(b[0]), b[1], weight=weights(b[2]) - 2.0)

    method = made()
    model, weights = network(device), hk.SampleWeights(40).to(device)
    with pytest.raises(hk.HyperkronError, match="counts negatively"):
        method.compute(hk.BilevelProblem(signed, outer), model, weights, batch(0, device), batch(50, device))


def test_a_model_with_dropout_is_not_recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        monkeypatch.setattr("hyperkron.point.Point.drew", property(lambda self: True))
    method = made(graph=True)
    model, weights = network(device, dropout=0.5), hk.SampleWeights(40).to(device)
    with pytest.warns(hk.HyperkronWarning, match="graph=True has no effect, .* draw random numbers"):
        method.compute(PROBLEM, model, weights, batch(0, device), batch(50, device))
    for i in range(3):
        method.compute(PROBLEM, model, weights, batch(i, device), batch(50, device))
    assert Rerun.made == 0


def test_under_autocast_that_keeps_casts_nothing_is_recorded(device: str) -> None:
    method = made(graph=True)
    model, weights = network(device), hk.SampleWeights(40).to(device)
    with torch.autocast(device, torch.bfloat16):
        with pytest.warns(hk.HyperkronWarning, match="cache_enabled=False"):
            method.compute(PROBLEM, model, weights, batch(0, device), batch(50, device))
        for i in range(3):
            method.compute(PROBLEM, model, weights, batch(i, device), batch(50, device))
    assert Rerun.made == 0


def test_objectives_that_cannot_be_recorded_go_the_ordinary_way(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        loss = inner(model, weights, b)
        float(loss.value.detach())  # waits for the device
        return loss

    if device == "cpu":

        def refuse(*args: Any, **options: Any) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(replay, "Recording", refuse)
    problem = hk.BilevelProblem(waits, outer)
    model, weights = network(device), hk.SampleWeights(40).to(device)
    expected = [made().compute(problem, model, weights, batch(0, device), batch(50, device)) for _ in range(1)]
    method = made(graph=True)
    with pytest.warns(hk.HyperkronWarning, match="graph=True has no effect"):
        found = [method.compute(problem, model, weights, batch(0, device), batch(50, device)) for _ in range(2)]
    close(found[:1], expected)
    assert method.state.curvature.refreshes == 2  # type: ignore[attr-defined]
    solution._warned.clear()
    with warnings.catch_warnings():  # it is not tried again
        warnings.simplefilter("error")
        method.compute(problem, model, weights, batch(0, device), batch(50, device))


def test_objectives_defined_anew_in_every_step_are_given_up(device: str) -> None:
    method = made(graph=True)
    model, weights = network(device), hk.SampleWeights(40).to(device)

    def steps() -> None:
        for i in range(8):
            problem = hk.BilevelProblem(lambda m, w, b: inner(m, w, b), outer)
            method.compute(problem, model, weights, batch(i, device), batch(50, device))

    with pytest.warns(hk.HyperkronWarning, match="others in every step"):
        steps()
    assert Rerun.made == replay.WASTED


def test_a_loaded_state_is_continued(device: str) -> None:
    model, weights = network(device), hk.SampleWeights(40).to(device)

    def steps(method: hk.Implicit, numbers: range) -> list[Any]:
        METHOD[:] = [method]
        return [method.compute(PROBLEM, model, weights, batch(i, device), batch(50, device)) for i in numbers]

    plain, first, second = made(refresh_every=3), made(refresh_every=3, graph=True), made(refresh_every=3, graph=True)
    expected = steps(plain, range(12))
    found = steps(first, range(5))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    steps(first, range(20, 23))  # writes over the memory of its own inverses only
    close(found + steps(second, range(5, 12)), expected)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"curvature": hk.EKFAC(1e-2), "solver": hk.CG(3)}, "EKFAC and CG"),
        ({"curvature": hk.KFAC(1e-2), "solver": hk.CG(3)}, "KFAC and CG"),
        ({"curvature": hk.KFAC(1e-2, ema=0.9), "solver": hk.Direct()}, "ema=0.9"),
        ({"curvature": hk.KFAC(1e-2, split="exact"), "solver": hk.Direct()}, "split='exact'"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(hk.HyperkronError, match=f"graph=True .*{named}"):
        hk.Implicit(**options, graph=True)


def test_the_identity_can_be_recorded(device: str) -> None:
    expected = trained(hk.identity(cross="difference"), device)
    method = hk.identity(cross="difference", graph=True)
    METHOD[:] = [method]
    close(trained(method, device), expected)
    assert Rerun.made == 1


@pytest.mark.parametrize(
    ("options", "recordings"),
    [
        ({}, 0),  # every step makes a basis
        ({"basis_every": 4}, 1),
        ({"refresh_every": 3}, 1),
        ({"refresh_every": 3, "basis_every": 2}, 2),
        ({"basis_every": 4, "ema": 0.3}, 1),
        ({"basis_every": 4, "keep_previous": False}, 1),
    ],
)
def test_steps_of_ekfac_without_a_new_basis_are_recorded(device: str, options: dict[str, Any], recordings: int) -> None:
    expected = trained(hk.ekfac(1e-2, **options), device, 14)
    method = hk.ekfac(1e-2, **options, graph=True)
    METHOD[:] = [method]
    found = trained(method, device, 14)
    close(found, expected)
    assert Rerun.made == recordings
    for stat in ("curvature_age", "curvature_refreshes", "curvature_strategy"):
        assert [r.stats[stat] for r in found] == [r.stats[stat] for r in expected]


def test_a_spectrum_that_is_not_finite_is_found_after_a_replay(device: str) -> None:
    model, weights, method = network(device), hk.SampleWeights(80).to(device), hk.ekfac(basis_every=9, graph=True)
    METHOD[:] = [method]

    def step(i: int, scale: float = 1.0) -> hk.HypergradientResult:
        x, y, index = batch(i, device)
        other = (x * scale, y, index)
        return method.compute(PROBLEM, model, weights, (x, y, index), batch(50, device), curvature_batch=other)

    for i in range(4):
        step(i)
    assert Rerun.made == 1
    with pytest.raises(hk.NonFiniteError):  # no previous one: it was written over
        step(4, float("inf"))
    assert torch.isfinite(step(5).grads["weight"]).all()


def test_while_recording_a_spectrum_is_checked_without_being_read() -> None:
    eye, good = torch.eye(2)[None], torch.ones(1, 2, 2)
    spectra = {"good": good, "infinite": good * torch.inf, "zero": good - torch.eye(2), "nan": good * torch.nan}
    blocks = {name: eigen.EigenBlock(eye, eye, spectrum) for name, spectrum in spectra.items()}
    with Point(PROBLEM, network("cpu"), hk.SampleWeights(8), None, None, recording=True) as point:
        eigen.checked(point, eigen.EigenInverses(blocks))
    assert [flags.tolist() for flags in point.unread] == [[False, True, True, True]]


@pytest.mark.parametrize("adam", [False, True])
def test_sama_is_recorded_where_no_moments_are_read(device: str, adam: bool) -> None:
    def run(graph: bool) -> list[Any]:
        model, weights = network(device), hk.SampleWeights(40).to(device)
        optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=0.1)
        method, found = hk.sama(optimizer, graph=graph), []
        METHOD[:] = [method]
        for i in range(6):
            optimizer.zero_grad()
            inner(model, weights, batch(i, device)).backward()
            optimizer.step()
            found.append(method.compute(PROBLEM, model, weights, batch(i, device), batch(50 + i, device)))
            if i == 3:
                optimizer.param_groups[0]["lr"] = 0.03  # recorded as a constant, so this needs another recording
        return found

    expected = run(False)
    close(run(True), expected)
    assert Rerun.made == (0 if adam else 2)


SOLVED: dict[str, Callable[..., hk.Implicit]] = {
    "cg": functools.partial(hk.cg, 2, 1.0),
    "cg, warm": functools.partial(hk.cg, 2, 1.0, warm_start=True),
    "cg, GGN": functools.partial(hk.cg, 3, curvature=hk.GGN(0.1), cross="difference"),
    "neumann": functools.partial(hk.neumann, 5, 1.0, step=0.05),
    "neumann, GGN": functools.partial(hk.neumann, 5, step=0.05, curvature=hk.GGN(0.1), cross="reverse"),
    "gradient descent": functools.partial(hk.gradient_descent, 5, 1.0, step=0.05),
}
"""Solvers that do all their iterations in :func:`trained`."""


@pytest.mark.parametrize("name", SOLVED)
def test_iterative_solvers_are_replayed(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    expected = trained(SOLVED[name](), device)
    method = SOLVED[name](graph=True)
    METHOD[:] = [method]
    found = trained(method, device)
    close(found, expected)
    residuals = [[r.solution.residual for r in results] for results in (found, expected)]
    assert residuals[0] == pytest.approx(residuals[1], rel=0.0 if device == "cpu" else 1e-3)
    assert len(set(residuals[0])) == len(found)
    assert (Rerun.made, method._replays._served) == (1, len(found) - 1)
    assert method.state.cross.calls == len(found)


def test_a_solve_that_ends_early_is_replayed(device: str) -> None:
    """One batch has a curvature so large that the series grows."""

    def steps(method: hk.Implicit) -> list[Any]:
        METHOD[:] = [method]
        model, weights = network(device)[3:], hk.SampleWeights(40).to(device)
        model[2] = nn.Linear(36, 3, device=device)
        batches = [batch(i, device) for i in range(5)]
        batches[3][0].mul_(30.0)
        return [method.compute(PROBLEM, model, weights, b, batch(50, device)) for b in batches]

    expected = steps(hk.neumann(5, step=0.05))
    method = hk.neumann(5, step=0.05, graph=True)
    found = steps(method)
    close(found, expected)
    assert [r.status for r in found] == [hk.Status.BUDGET] * 3 + [hk.Status.DIVERGED, hk.Status.BUDGET]
    assert [r.stats["iterations"] for r in found] == [r.stats["iterations"] for r in expected]
    assert found[3].solution.products == 5 > expected[3].solution.products
    assert (Rerun.made, method._replays._served) == (1, 4)


@pytest.mark.parametrize("name", ["cg", "cg, warm", "neumann"])
def test_solves_may_all_end_early(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    early = {"neumann": functools.partial(hk.neumann, 5, step=1e3), "cg": functools.partial(hk.cg, 8, 0.0)}
    early["cg, warm"] = functools.partial(early["cg"], warm_start=True)
    expected, method = trained(early[name](), device), early[name](graph=True)
    METHOD[:] = [method]
    found = trained(method, device)
    close(found, expected)
    assert all(not r.status.ok for r in found)
    for stat in ("iterations", "residual"):
        mine, its = [[r.stats.get(stat, -1.0) for r in results] for results in (found, expected)]
        assert mine == pytest.approx(its, rel=0.0 if device == "cpu" else 1e-3)
    assert (Rerun.made, method._replays._served) == (1, len(found) - 1)


def test_replays_that_all_have_to_be_done_again_are_given_up(device: str) -> None:
    """A right-hand side so small that float32 cannot square it is scaled, which only the ordinary way does."""

    def faint(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        return outer(model, weights, b) * 1e-9

    method, problem = hk.cg(2, 1.0, graph=True), hk.BilevelProblem(inner, faint)
    METHOD[:] = [method]
    model, weights = network(device), hk.SampleWeights(40).to(device)
    with pytest.warns(hk.HyperkronWarning, match="graph=True has no effect, .* most replays had to be done again"):
        found = [method.compute(problem, model, weights, batch(i, device), batch(50, device)) for i in range(5)]
    assert all(r.status.ok for r in found)
    assert method._replays._refused == replay.REFUSED


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("tf32", [False, True])
def test_a_resnet_is_replayed_as_it_is_computed(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of many sizes, factorised side by side while the outer gradient is under way.

    In TF32 a recording lays images out channels last and rounds otherwise: it must be as near to float32 as the
    ordinary way is.
    """
    torch.manual_seed(0)
    model, weights = hk.models.resnet18(classes=10, stem="3x3").cuda(), hk.SampleWeights(64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y, index = torch.randn(64, 3, 32, 32).cuda(), torch.randint(10, (64,)).cuda(), torch.arange(64).cuda()
    exact, plain, recorded = (
        hk.kfac(fisher="empirical", cross="difference", graph=graph) for graph in (False, False, True)
    )

    def solved(method: hk.Hypergradient, coarse: bool) -> hk.HypergradientResult:
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", coarse)
        return method.compute(PROBLEM, model, weights, (x, y, index), (x, y, index))

    for _ in range(4):
        optimizer.zero_grad()
        inner(model, weights, (x, y, index)).backward()
        optimizer.step()
        truth, expected, found = solved(exact, False), solved(plain, tf32), solved(recorded, tf32)
        size = hk.trees.norm(truth.solution.value)
        usual, error = (
            hk.trees.norm(hk.trees.add(r.solution.value, truth.solution.value, alpha=-1.0)) / size
            for r in (expected, found)
        )
        assert error <= 1e-3 + 1.5 * usual, (error, usual)
        if not tf32:
            torch.testing.assert_close(found.grads, expected.grads, rtol=1e-2, atol=1e-4)
