"""A model under bfloat16 autocast: factors are summed in float32 and the hypergradient keeps its direction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
from hyperkron import solution, trees
from hyperkron.algorithms.derivatives import gradients
from hyperkron.curvature.kfac.capture import measure
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.measured import Measurement
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient import autocast as coarseness
from hyperkron.hypergradient import implicit
from hyperkron.hypergradient.steps import SGD
from hyperkron.kernels.selection import WithoutAutocast


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    convolutional = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Conv2d(6, 6, 3), nn.GELU(), nn.Flatten(), nn.Linear(96, 4)
    )
    tokens = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16), nn.Flatten(), nn.Linear(80, 4)
    )
    return {"convolutions": (convolutional, torch.randn(32, 1, 8, 8)), "tokens": (tokens, torch.randn(32, 5, 8))}


def problem(autocast: bool) -> hk.BilevelProblem:
    def loss(model: nn.Module, batch: Any, **weight: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return hk.losses.cross_entropy(model(batch[0]), batch[1], **weight)

    return hk.BilevelProblem(lambda m, w, b: loss(m, b, weight=w(b[2])), lambda m, w, b: loss(m, b), autocast=True)


@pytest.mark.parametrize("name", ["convolutions", "tokens"])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_factors_are_summed_in_float32(name: str, sharing: Any) -> None:
    model, x = models()[name]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    found = {}
    for autocast in (False, True):
        with Point(problem(autocast), model, weights, batch, batch) as point:
            how = Measurement("type-2", 1, sharing, torch.Generator())
            found[autocast] = measure(point, plan(model, "diagonal"), how)
    for side in ("a", "b"):
        for block, exact in getattr(found[False], side).items():
            rounded = getattr(found[True], side)[block]
            assert rounded.dtype == torch.float32
            assert (rounded - exact).norm() < 2e-2 * exact.norm()  # bfloat16 keeps 8 bits of an activation
    for name_, exact in found[False].diagonal.items():
        assert found[True].diagonal[name_].dtype == torch.float32
        assert (found[True].diagonal[name_] - exact).norm() < 3e-2 * exact.norm()


@pytest.mark.parametrize("name", ["convolutions", "tokens"])
@pytest.mark.parametrize("build", [hk.kfac, hk.ekfac, lambda: hk.pcg(8, 1e-2)], ids=["kfac", "ekfac", "pcg"])
def test_the_hypergradient_keeps_its_direction(name: str, build: Any) -> None:
    model, x = models()[name]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        problem(False).inner(model, weights, batch).backward()
        optimizer.step()
    exact, rounded = (build().compute(problem(a), model, weights, batch, batch).grads for a in (False, True))
    cosine = trees.dot(exact, rounded) / (trees.norm(exact) * trees.norm(rounded))
    assert cosine >= 0.99


@pytest.mark.parametrize(
    "build",
    [lambda: hk.kfac(cross="reverse"), lambda: hk.ekfac(cross="reverse"), lambda: hk.cg(3)],
    ids=["kfac", "ekfac", "cg"],
)
def test_a_whole_call_under_autocast_is_one_with_autocast_in_the_objectives(build: Any) -> None:
    """Factorisations, solves and products of vectors keep their precision."""
    model, x = models()["tokens"]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    inside = build().compute(problem(True), model, weights, batch, batch)
    with torch.autocast("cpu", torch.bfloat16):
        around = build().compute(problem(True), model, weights, batch, batch)
        plain = build().compute(problem(False), model, weights, batch, batch)
        assert torch.is_autocast_enabled("cpu")
    assert all(torch.equal(inside.grads[name], around.grads[name]) for name in inside.grads)
    assert not torch.is_autocast_enabled("cpu")
    unlike = build().compute(problem(False), model, weights, batch, batch)
    for name in plain.grads:  # what disables it inside an objective is left as it is
        torch.testing.assert_close(plain.grads[name], unlike.grads[name], rtol=0, atol=0)


METHODS = [
    hk.kfac,
    hk.ekfac,
    hk.identity,
    lambda: hk.cg(3),
    lambda: hk.kfac(cross="forward"),
    lambda: hk.unrolled(2, SGD(0.1)),
]


@pytest.mark.parametrize("build", METHODS, ids=["kfac", "ekfac", "identity", "cg", "forward", "unrolled"])
@pytest.mark.parametrize("name", ["convolutions", "tokens"])
def test_a_problem_can_do_without_autocast(build: Any, name: str) -> None:
    """Bit for bit what a model without autocast gives, wherever autocast is enabled."""
    model, x = models()[name]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    rounding, exact = problem(True), problem(False)
    plain = hk.BilevelProblem(rounding.inner, rounding.outer, autocast=False)
    wanted = build().compute(exact, model, weights, batch, batch).grads
    inside = build().compute(plain, model, weights, batch, batch).grads
    with torch.autocast("cpu", torch.bfloat16):
        around = build().compute(plain, model, weights, batch, batch).grads
        assert torch.is_autocast_enabled("cpu")
    rounded = build().compute(rounding, model, weights, batch, batch).grads
    for key in wanted:
        assert torch.equal(inside[key], wanted[key]) and torch.equal(around[key], wanted[key])
        assert not torch.equal(rounded[key], wanted[key])
    assert WithoutAutocast.entered == 0


def test_micro_batches_do_without_autocast_too() -> None:
    model, x = models()["tokens"]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    rounding = problem(True)
    pieces = [
        hk.training.Accumulated(whole, micro_batch=8)
        for whole in (problem(False), hk.BilevelProblem(rounding.inner, rounding.outer, autocast=False))
    ]
    wanted, found = (hk.cg(3).compute(p, model, weights, batch, batch).grads for p in pieces)
    for key in wanted:
        assert torch.equal(found[key], wanted[key])


def test_autocast_is_let_be_after_an_error_without_it() -> None:
    def failing(model: nn.Module, weights: nn.Module, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(batch[0][:, :1])

    model, x = models()["tokens"]
    batch = (x, torch.arange(32) % 4, torch.arange(32))
    broken = hk.BilevelProblem(failing, failing, autocast=False)
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16):
        hk.identity().compute(broken, model, hk.SampleWeights(32), batch, batch)
    assert WithoutAutocast.entered == 0 and not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("hyper", [False, True])
def test_algorithms_of_gradients_do_without_autocast_but_for_steps_of_theta(hyper: bool, live: bool) -> None:
    """And of its second points, which are not live; with ``hyper`` a gradient moves λ."""
    model, x = models()["tokens"]
    batch, found = (x, torch.arange(32) % 4, torch.arange(32)), {}
    rounding = problem(True)
    plain = hk.BilevelProblem(rounding.inner, rounding.outer, autocast=False)
    for name, given in {"plain": plain, "float32": problem(False), "bfloat16": rounding}.items():
        state = hk.algorithms.BOME().init(given, model, hk.SampleWeights(32))
        found[name] = gradients(state, "inner", batch, live=live, hyper=hyper).theta
    same = "float32" if hyper else "bfloat16"
    assert all(torch.equal(found["plain"][name], found[same][name]) for name in found["plain"])
    assert not all(torch.equal(found["float32"][name], found["bfloat16"][name]) for name in found["plain"])


# --- whether autocast is good enough -------------------------------------------------------------------------------


def looking(autocast: bool = True) -> hk.BilevelProblem:
    """A problem that leaves it to the library."""
    given = problem(autocast)
    return hk.BilevelProblem(given.inner, given.outer)


def settled(model: nn.Module, batch: Any, steps: int) -> None:
    """After many steps on J_out little is left of its gradient, and of that bfloat16 sees little."""
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = hk.losses.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss.value.detach()

    optimizer.step(closure)


@pytest.mark.parametrize("build", METHODS[:5], ids=["kfac", "ekfac", "identity", "cg", "forward"])
@pytest.mark.parametrize("around", [False, True])
def test_where_autocast_is_too_coarse_hypergradients_do_without(build: Any, around: bool) -> None:
    solution._warned.clear()
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
    weights, batch = hk.SampleWeights(32), (torch.randn(32, 5), torch.randint(4, (32,)), torch.arange(32))
    settled(model, batch, 60)
    method, given = build(), looking()
    if around:
        given = hk.BilevelProblem(
            lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
            lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
        )
    with torch.autocast("cpu", torch.bfloat16, enabled=around):
        with pytest.warns(hk.HyperkronWarning, match="∂θ J_out .*cosine 0.*autocast=True. keeps it"):
            found = method.compute(given, model, weights, batch, batch)
        again = method.compute(given, model, weights, batch, batch)
    assert found.stats["autocast"] == again.stats["autocast"] == "too coarse"
    expected = build().compute(problem(False), model, weights, batch, batch)
    assert torch.equal(found.grads["weight"], expected.grads["weight"])


def test_a_problem_that_says_so_is_believed_whatever_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = models()["tokens"]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    monkeypatch.setattr(coarseness, "MIN_COSINE", 2.0)
    method = hk.identity(cross="reverse")
    assert method.compute(looking(), model, weights, batch, batch).stats["autocast"] == "too coarse"
    kept = method.compute(problem(True), model, weights, batch, batch)
    assert "autocast" not in kept.stats
    expected = hk.identity(cross="reverse").compute(problem(True), model, weights, batch, batch)
    assert torch.equal(kept.grads["weight"], expected.grads["weight"])


def test_where_float16_overflows_hypergradients_do_without_autocast() -> None:
    solution._warned.clear()
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    weights, batch = hk.SampleWeights(4), (torch.full((4, 2), 3e4), torch.ones(4, 1), torch.arange(4))

    def loss(output: torch.Tensor, target: torch.Tensor, **weight: Any) -> hk.losses.Loss:
        return hk.losses.mse(output / 1e4, target, **weight)

    def inner(m: nn.Module, w: nn.Module, b: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.float16):
            output = 10.0 * m(b[0])
        return loss(output, b[1], weight=w(b[2]))

    def outer(m: nn.Module, w: nn.Module, b: Any) -> hk.losses.Loss:
        with torch.autocast("cpu", torch.float16):
            output = 10.0 * m(b[0])
        return loss(output, b[1])

    with pytest.warns(hk.HyperkronWarning, match="cosine 0.000"):
        found = hk.identity().compute(hk.BilevelProblem(inner, outer), model, weights, batch, batch)
    never = hk.BilevelProblem(inner, outer, autocast=False)
    expected = hk.identity().compute(never, model, weights, batch, batch)
    assert torch.equal(found.grads["weight"], expected.grads["weight"])
    with pytest.raises(hk.NonFiniteError):
        hk.identity().compute(hk.BilevelProblem(inner, outer, autocast=True), model, weights, batch, batch)


def test_where_autocast_is_good_it_stays() -> None:
    model, x = models()["tokens"]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    found = hk.kfac().compute(looking(), model, weights, batch, batch)
    assert "autocast" not in found.stats
    kept, without = (hk.kfac().compute(problem(a), model, weights, batch, batch).grads["weight"] for a in (True, False))
    assert torch.equal(found.grads["weight"], kept) and not torch.equal(kept, without)


def test_the_size_of_a_loss_does_not_make_autocast_too_coarse() -> None:
    model, x = models()["tokens"]
    weights, batch = hk.SampleWeights(32), (x, torch.arange(32) % 4, torch.arange(32))
    usual = looking()
    small = hk.BilevelProblem(usual.inner, lambda m, w, b: 1e-25 * usual.outer(m, w, b))
    assert "autocast" not in hk.identity().compute(small, model, weights, batch, batch).stats


def test_what_was_found_is_remembered_by_a_resumed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = models()["tokens"]
    batch = x, torch.arange(32) % 4, torch.arange(32)
    arguments = looking(), model, hk.SampleWeights(32), batch, batch
    monkeypatch.setattr(coarseness, "MIN_COSINE", 2.0)
    method, resumed = hk.identity(), hk.identity()
    method.compute(*arguments)
    monkeypatch.setattr(coarseness, "MIN_COSINE", 0.0)
    resumed.load_state_dict(method.state_dict())
    for known in (method, resumed):
        assert known.compute(*arguments).stats["autocast"] == "too coarse"
    assert "autocast" not in hk.identity().compute(*arguments).stats


@pytest.mark.parametrize("compiled", [False, True])
def test_looking_costs_one_evaluation_of_each_objective_now_and_then(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = models()["tokens"]
    batch = x, torch.arange(32) % 4, torch.arange(32)
    given = torch.compile(model, backend="eager") if compiled else model
    arguments = looking(False), given, hk.SampleWeights(32), batch, batch
    monkeypatch.setattr(implicit, "RECHECK", 3)
    calls: list[int] = []
    method, counts = hk.Implicit(hk.curvature.Identity(), hk.solvers.Direct(), cross="reverse"), []
    model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(4):
        method.compute(*arguments)
        counts.append(len(calls))
        calls.clear()
    assert counts == [4, 2, 2, 4]


def test_autocast_is_yes_no_or_none() -> None:
    with pytest.raises(hk.HyperkronError, match="autocast='bfloat16' must be True, False, or None"):
        hk.BilevelProblem(problem(True).inner, problem(True).outer, autocast="bfloat16")  # type: ignore[arg-type]
