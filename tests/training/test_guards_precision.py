"""Clipping of either level; half precision and scaled losses, which are for the steps of θ and reach no result."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from guarding import Poison, memory, network
from resuming import EXAMPLES, digest, inner, outer


@pytest.mark.parametrize("level", ["inner", "outer"])
def test_clipping_is_by_the_norm_of_the_whole_level(level: str) -> None:
    found = []
    for clip in (None, 1e-3):
        model, weights = network().double(), hk.SampleWeights(EXAMPLES).double()
        moved = model if level == "inner" else weights
        before = copy.deepcopy(moved)
        options = {f"{level}_optimizer": hk.algorithms.Updates(torch.optim.SGD(moved.parameters(), lr=1.0), clip=clip)}
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
    updates = hk.algorithms.Updates(
        torch.optim.Adam(model.parameters(), lr=0.02), clip=1.0, autocast=autocast, scaler=scaler
    )
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
    found = hk.algorithms.derivatives.gradients(run.state, "inner", run.batches.inner(), live=True, hyper=False)
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
    updates = hk.algorithms.Updates(torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.bfloat16)
    algorithm = hk.AID(hk.kfac(1e-2, cross="reverse"), inner_steps=2)
    data = Poison(set()), Poison(set(), 2)
    hk.fit(hk.BilevelProblem(inner, outer), model, weights, algorithm, *data, steps=1, inner_optimizer=updates)
    assert seen[:2] == [True, True] and not any(seen[2:]) and len(seen) > 3


def test_half_precision_underflows_without_a_scale_and_not_with_one() -> None:
    """Gradients of 1e-8 vanish in float16 unless the loss is scaled."""

    def gradient(scaler: Any) -> Tensor:
        model, weights = nn.Linear(4, 1, bias=False), hk.SampleWeights(8)
        nn.init.constant_(model.weight, 0.5)
        updates = hk.algorithms.Updates(
            torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.float16, scaler=scaler
        )
        problem = hk.BilevelProblem(lambda m, h, b: 1e-8 * m(b).float().mean(), lambda m, h, b: m(b).mean())
        state = hk.AID(hk.identity()).init(problem, model, weights, inner=updates)
        return hk.algorithms.derivatives.gradients(state, "inner", torch.ones(8, 4), live=True, hyper=False).theta[
            "weight"
        ]

    assert float(gradient(None).abs().sum()) == 0.0
    torch.testing.assert_close(
        gradient(torch.amp.GradScaler("cpu", init_scale=2.0**16)), torch.full((1, 4), 1e-8), rtol=2e-2, atol=0
    )


def test_scalers_are_for_theta() -> None:
    model, weights = network(), hk.SampleWeights(EXAMPLES)
    updates = hk.algorithms.Updates(torch.optim.SGD(weights.parameters(), lr=0.1), scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(hk.HyperkronError, match="inner_optimizer"):
        hk.AID(hk.identity()).init(hk.BilevelProblem(inner, outer), model, weights, outer=updates)
    for bad in ({"autocast": torch.float64}, {"scaler": "yes"}):
        with pytest.raises(hk.HyperkronError, match=next(iter(bad))):
            hk.algorithms.Updates(torch.optim.SGD(weights.parameters(), lr=0.1), **bad)
