"""The inner loop takes the optimizer's own steps, whatever way it runs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def setting(device: str) -> tuple[hk.BilevelProblem, nn.Module, nn.Module, list[tuple[Tensor, Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).to(device)
    weights = hk.SampleWeights(24).to(device)
    batches = [
        (
            torch.randn(8, 1, 6, 6).to(device),
            torch.randint(3, (8,)).to(device),
            torch.arange(8 * i, 8 * i + 8).to(device),
        )
        for i in range(3)
    ]
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    return problem, model, weights, batches


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graph", [False, True])
def test_steps_are_those_of_the_optimizer(device: str, graph: bool) -> None:
    problem, model, weights, batches = setting(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for batch in batches * 2:
        optimizer.zero_grad()
        loss = problem.inner(model, weights, batch)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    expected = {name: x.clone() for name, x in model.state_dict().items()}

    problem, model, weights, batches = setting(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loop = hk.training.InnerLoop(problem, model, weights, optimizer, graph=graph)
    found = []
    for batch in batches * 2:
        found.append(float(loop.step(batch)))
        schedule.step()
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-6)
    for name, x in model.state_dict().items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-5)
    assert all(p.grad is None for p in weights.parameters())


def test_parameters_may_be_frozen_and_unfrozen_between_steps() -> None:
    """As in a loop of torch; one that was frozen at first was never moved, and freezing one was an error of torch."""
    ends = []
    for by_loop in (False, True):
        problem, model, weights, batches = setting("cpu")
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loop = hk.training.InnerLoop(problem, model, weights, optimizer)
        for number, batch in enumerate(batches):
            model[0].requires_grad_(number == 1)
            optimizer.zero_grad()
            if by_loop:
                loop.step(batch)
            else:
                problem.inner(model, weights, batch).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*ends)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_on_an_objective_that_keeps_what_lambda_makes_are_the_same(device: str) -> None:
    found, calls = {}, []
    for kept in (False, True):
        problem, model, weights, batches = setting(device)
        loop = hk.training.InnerLoop(problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.1))
        made = weights(torch.arange(24, device=device)).detach()

        def inner(m: nn.Module, _: nn.Module, b: tuple[Tensor, ...], made: Tensor = made) -> hk.losses.Loss:
            calls.append(1)
            return hk.losses.cross_entropy(m(b[0]), b[1], weight=made[b[2]])

        loop.step(batches[0])
        if kept:
            loop.replace_objective(inner)
            assert loop.problem is problem and not loop.recorded
        found[kept] = torch.tensor([float(loop.step(batch)) for batch in batches * 2])
    assert calls
    torch.testing.assert_close(found[True], found[False], rtol=1e-5, atol=1e-6)
    count = len(calls)
    loop.replace_problem(problem)  # a new problem has its own J_in
    loop.step(batches[0])
    assert len(calls) == count


@pytest.mark.parametrize("device", DEVICES)
def test_the_step_of_an_optimizer_at_rest_is_replayed_with_the_pass(device: str) -> None:
    found = {}
    for graph in (False, True):
        problem, model, weights, batches = setting(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3)
        loop = hk.training.InnerLoop(problem, model, weights, optimizer, graph=graph)
        found[graph] = torch.tensor([float(loop.step(batch)) for batch in batches * 4])
        assert loop.step_recorded == (graph and device == "cuda")
        x, y, index = batches[0]
        loop.step((x[:5], y[:5], index[:5]))  # another shape: pass and step take the ordinary way
        found[graph] = torch.cat([found[graph], torch.tensor([float(loop.step(batch)) for batch in batches])])
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_steps_draw_the_dropout_masks_of_ordinary_ones(device: str) -> None:
    found = {}
    for graph in (False, True):
        problem, model, weights, batches = setting(device)
        model = nn.Sequential(nn.Dropout(0.5), *model, nn.Dropout(0.2))
        loop = hk.training.InnerLoop(problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.05), graph=graph)
        torch.manual_seed(1)
        found[graph] = torch.tensor([float(loop.step(batches[0])) for _ in range(6)])
        assert loop.recorded == (graph and device == "cuda")
    torch.testing.assert_close(found[True], found[False], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_autocast_keeps_the_parameters_and_comes_close(device: str) -> None:
    found = {}
    for dtype in (None, torch.bfloat16):
        problem, model, weights, batches = setting(device)
        loop = hk.training.InnerLoop(
            problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.05), graph=True, autocast=dtype
        )
        found[dtype] = torch.tensor([float(loop.step(batch)) for batch in batches * 3])
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not torch.equal(found[None], found[torch.bfloat16])
    torch.testing.assert_close(found[torch.bfloat16], found[None], rtol=3e-2, atol=3e-2)


def test_a_batch_of_another_shape_takes_the_ordinary_way() -> None:
    problem, model, weights, batches = setting("cpu")
    loop = hk.training.InnerLoop(problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.05))
    x, y, index = batches[0]
    assert torch.isfinite(loop.step((x[:5], y[:5], index[:5])))


def test_a_wrong_autocast_is_named() -> None:
    problem, model, weights, _ = setting("cpu")
    with pytest.raises(hk.HyperkronError, match=r"autocast=torch.float64 must be"):
        hk.training.InnerLoop(
            problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.1), autocast=torch.float64
        )


@pytest.mark.parametrize("device", DEVICES)
def test_fit_replays_the_inner_steps_and_comes_to_the_same_point(device: str) -> None:
    found: dict[bool, dict[str, Tensor]] = {}
    for graph in (False, True):
        problem, model, weights, batches = setting(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        run = hk.fit(
            problem,
            model,
            weights,
            hk.AID(hk.identity(), inner_steps=3),
            list_source(batches),
            batches[0],
            steps=3,
            inner_optimizer=hk.algorithms.Updates(optimizer, schedule, clip=1.0, schedule="update"),
            graph=graph,
        )
        assert run.state.loop.recorded == (graph and device == "cuda")
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**2)
        found[graph] = {name: x.clone() for name, x in (*model.state_dict().items(), *weights.state_dict().items())}
    for name, x in found[True].items():
        torch.testing.assert_close(x, found[False][name], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_recorded_with_a_graph_is_refused_by_name() -> None:
    problem, model, weights, _ = setting("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = hk.algorithms.Updates(optimizer, autocast=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(hk.HyperkronError, match="graph=True records no loss scaling"):
        hk.training.InnerLoop(problem, model, weights, updates, graph=True)


def list_source(batches: list[tuple[Tensor, Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
    """The batches in turn, without end."""
    return itertools.cycle(batches).__next__


def test_batches_that_are_never_replayed_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch with an object of unknown content is like no other; steps would be eager without a word."""
    monkeypatch.setattr("hyperkron.algorithms.inner_loop.available", lambda device: True)
    monkeypatch.setattr("hyperkron.solution._warned", set())
    problem, model, weights, batches = setting("cpu")
    loop = hk.training.InnerLoop(problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.warns(hk.HyperkronWarning, match="may change unseen.*they run eagerly"):
        assert loop.step((*batches[0], object())).isfinite()


def test_a_model_that_is_switched_is_not_replayed_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording is in training mode here, whatever the model is in when it is replayed, as a CUDA graph would be."""
    problem, model, weights, batches = setting("cpu")
    expected, replays = copy.deepcopy(model), list[bool]()

    def recording(function: Callable[[], Tensor]) -> Any:
        function()
        kept = [p.grad for p in model.parameters()]

        def replay() -> Tensor:
            replays.append(model.training)
            mode = model.training
            model.train()
            found = function()
            model.train(mode)
            for old, p in zip(kept, model.parameters(), strict=True):
                assert old is not None and p.grad is not None
                old.copy_(p.grad)
            return found

        return SimpleNamespace(replay=replay, pool=None)

    side = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr("hyperkron.algorithms.inner_loop.available", lambda device: True)
    monkeypatch.setattr("hyperkron.algorithms.inner_loop.Recording", recording)
    monkeypatch.setattr("hyperkron.algorithms.inner_loop.UNCHANGED_STEPS", 1000)  # the optimizer's are not recorded
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: None)
    loop = hk.training.InnerLoop(problem, model, weights, torch.optim.SGD(model.parameters(), lr=0.1))
    own = hk.training.InnerLoop(problem, expected, weights, torch.optim.SGD(expected.parameters(), lr=0.1), graph=False)
    for batch, training in zip(batches * 2, (True, True, False, False, True, True), strict=True):
        for each in (model, expected):
            each.train(training)
        torch.testing.assert_close(loop.step(batch), own.step(batch))
    assert replays == [True] * 4
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
