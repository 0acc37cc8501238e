"""Replayed hypergradients are those of the ordinary way; without a GPU a stand-in writes into the same memory.

Here with KFAC, and what is not recorded; ``test_replay_methods.py`` has the other methods.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
import replaying
from hyperkron import solution
from hyperkron.curvature import KroneckerState
from hyperkron.hypergradient import recordings, replay
from hyperkron.kernels.execution import Execution
from replaying import METHOD, PROBLEM, Batch, Rerun, batch, close, inner, made, network, outer, trained
from resnet import resnet18

device = replaying.device


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
    monkeypatch.setattr(Execution, "queued", True)

    def signed(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(b[0]), b[1], weight=weights(b[2]) - 2.0)

    method = made()
    model, weights = network(device), hk.SampleWeights(40).to(device)
    with pytest.raises(hk.HyperkronError, match="counts negatively"):
        method.compute(hk.BilevelProblem(signed, outer), model, weights, batch(0, device), batch(50, device))


@pytest.mark.parametrize("options", [{}, {"refresh_every": 3}], ids=["every step", "every third"])
def test_recorded_steps_draw_the_dropout_masks_of_ordinary_ones(device: str, options: Any) -> None:
    expected = trained(made(**options), device, dropout=0.5)
    before = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    method = made(**options, graph=True)
    close(trained(method, device, dropout=0.5), expected)
    assert torch.equal(torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state(), before)
    assert method._replays._served >= 4


def test_dropout_draws_another_mask_in_every_recorded_step(device: str) -> None:
    method = made(fisher="type-2", graph=True)
    model, weights = network(device, dropout=0.5), hk.SampleWeights(40).to(device)
    found = []
    for seed in (0, 0, 1, 2, 1):  # the first step is an ordinary one
        torch.manual_seed(seed)
        found.append(method.compute(PROBLEM, model, weights, batch(0, device), batch(50, device)).grads["weight"])
    assert method._replays._served >= 3
    assert not torch.allclose(found[2], found[3], rtol=0.1)
    torch.testing.assert_close(found[2], found[4])


def test_random_numbers_of_the_cpu_are_not_recorded_for_a_gpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay would not draw them again."""
    if device == "cpu":
        monkeypatch.setattr("hyperkron.evaluation.point.Point.drew_on_host", property(lambda self: True))

    def shifted(model: nn.Module, weights: nn.Module, b: Batch) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(b[0] + float(torch.rand(()))), b[1], weight=weights(b[2]))

    method = made(graph=True)
    model, weights = network(device), hk.SampleWeights(40).to(device)
    problem = hk.BilevelProblem(shifted, outer)
    with pytest.warns(hk.HyperkronWarning, match="graph=True has no effect, .* random numbers on the CPU"):
        method.compute(problem, model, weights, batch(0, device), batch(50, device))
    for i in range(3):
        method.compute(problem, model, weights, batch(i, device), batch(50, device))
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

    with pytest.warns(hk.HyperkronWarning, match="change in every step"):
        steps()
    assert Rerun.made == recordings.MAX_WASTED


@pytest.mark.parametrize("graph", [True, "passes"])
def test_batches_of_unknown_content_are_said(device: str, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    problem = hk.BilevelProblem(lambda m, w, b: inner(m, w, b[0]), lambda m, w, b: outer(m, w, b[0]))
    model, weights, method = network(device), hk.SampleWeights(40).to(device), made(graph=graph)

    def steps() -> None:
        for i in range(2):
            method.compute(problem, model, weights, (batch(i, device), object()), (batch(50, device), object()))

    with pytest.warns(hk.HyperkronWarning, match="has no effect.*may change unseen"):
        steps()
    assert Rerun.made == 0


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
        ({"curvature": hk.curvature.EKFAC(1e-2), "solver": hk.solvers.CG(3)}, "EKFAC and CG"),
        ({"curvature": hk.curvature.KFAC(1e-2), "solver": hk.solvers.CG(3)}, "KFAC and CG"),
        ({"curvature": hk.curvature.KFAC(1e-2, ema=0.9), "solver": hk.solvers.Direct()}, "ema=0.9"),
        ({"curvature": hk.curvature.KFAC(1e-2, split="exact"), "solver": hk.solvers.Direct()}, "split='exact'"),
    ],
)
def test_what_cannot_be_recorded_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(hk.HyperkronError, match=f"graph=True .*{named}"):
        hk.Implicit(**options, graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("tf32", [False, True])
def test_a_resnet_is_replayed_as_it_is_computed(tf32: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors of many sizes, factorised side by side while the outer gradient is under way.

    In TF32 a recording lays images out channels last and rounds otherwise: it must be as near to float32 as the
    ordinary way is.
    """
    torch.manual_seed(0)
    model, weights = resnet18(classes=10, stem="3x3").cuda(), hk.SampleWeights(64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y, index = torch.randn(64, 3, 32, 32).cuda(), torch.randint(10, (64,)).cuda(), torch.arange(64).cuda()
    exact, plain, recorded = (
        hk.kfac(fisher="empirical", cross="difference", graph=graph) for graph in (False, False, True)
    )

    def solved(method: hk.hypergradient.Hypergradient, coarse: bool) -> hk.HypergradientResult:
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
