"""Unrolling keeps the contract: one mask for each step, nothing changed behind the call, errors that name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from hyperkron.hypergradient.steps import SGD, Adam
from hyperkron.hypergradient.unrolled import Batches, Unrolled, one_step, truncated, unrolled
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError, NonFiniteError
from unrolled_cases import DOUBLE, PROBLEM, Lambda, assert_same, inner, make, naive, outer


class RecordedDropout(nn.Module):
    """Dropout that notes its masks, or replays given ones."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []
        self.replay: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.replay is not None:
            return x * self.replay.pop(0)
        mask = torch.empty_like(x).bernoulli_(0.5) * 2.0
        self.masks.append(mask.detach())
        return x * mask


@pytest.mark.parametrize("every", [1, 3])
def test_dropout_masks_differ_between_steps_and_repeat_on_recomputation(every: int) -> None:
    dropout = RecordedDropout()
    case = make(nn.Linear(3, 8), dropout, nn.Tanh(), nn.Linear(8, 2))
    steps = 6
    torch.manual_seed(5)
    ours = unrolled(steps, Adam(0.05, eps=1e-2), checkpoint_every=every).compute(PROBLEM, *case).grads
    forward, outer_mask = dropout.masks[:steps], dropout.masks[steps]
    distinct = {tuple(mask.flatten().tolist()) for mask in forward}
    assert len(distinct) == steps
    assert {tuple(mask.flatten().tolist()) for mask in dropout.masks} == distinct  # recomputed: no new mask
    dropout.replay = [*forward, outer_mask]
    assert_same(ours, naive(PROBLEM, *case, steps, Adam(0.05, eps=1e-2)))


def test_dropout_answer_is_decided_by_the_seed() -> None:
    case = make(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 2))

    def under(seed: int, every: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return unrolled(5, checkpoint_every=every).compute(PROBLEM, *case).grads

    one, again, other = under(1, 1), under(1, 2), under(2, 1)
    assert all(torch.equal(one[n], again[n]) for n in one)
    assert not torch.equal(one["logits"], other["logits"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_repeat_and_the_random_state_stays_on_cuda() -> None:
    dropout = RecordedDropout()
    model, hyper, inner_batch, outer_batch = make(nn.Linear(3, 8), dropout, nn.Tanh(), nn.Linear(8, 2))
    moved = [tuple(x.cuda() for x in batch) for batch in (inner_batch, outer_batch)]
    before = torch.cuda.get_rng_state()
    unrolled(4, Adam()).compute(PROBLEM, model.cuda(), hyper.cuda(), *moved)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    distinct = {tuple(mask.flatten().tolist()) for mask in dropout.masks[:4]}
    assert len(distinct) == 4
    assert {tuple(mask.flatten().tolist()) for mask in dropout.masks} == distinct


def test_batch_norm_equals_the_full_graph_and_keeps_its_statistics() -> None:
    case = make(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        case[0](torch.randn(5, 3, dtype=DOUBLE) + 2.0)
    before = copy.deepcopy(case[0].state_dict())
    ours = unrolled(4, SGD(0.1, momentum=0.9)).compute(PROBLEM, *case).grads
    after = case[0].state_dict()
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert_same(ours, naive(PROBLEM, *case, 4, SGD(0.1, momentum=0.9)))


def test_an_outer_loss_that_calls_eval_does_not_change_the_recomputed_steps() -> None:
    def evaluating(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
        return outer(model.eval(), hyper, batch)

    def training(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
        return inner(model.train(), hyper, batch)

    case = make(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    ours = unrolled(4).compute(BilevelProblem(inner, evaluating), *case).grads
    assert case[0].training
    assert_same(ours, unrolled(4).compute(BilevelProblem(training, evaluating), *case).grads, 1e-14)


def fingerprint(model: nn.Module, hyper: nn.Module) -> list[Any]:
    """All that a call must leave as it was, as plain values."""
    marks: list[Any] = [
        random.getstate(),
        torch.get_rng_state().tolist(),
        numpy.random.get_state()[1].tolist(),
    ]
    for module in (model, hyper):
        for n, p in [*module.named_parameters(), *module.named_buffers()]:
            marks.append((n, id(p), p.data_ptr(), p.requires_grad, p.grad is None, p.detach().tolist()))
        for n, m in module.named_modules():
            hooks = [len(getattr(m, kind)) for kind in vars(m) if kind.endswith("_hooks")]
            marks.append((n, m.training, hooks, sorted(m._modules), sorted(m._parameters), sorted(m._buffers)))
    marks.append(torch.is_grad_enabled())
    return marks


class Boom(Exception):
    pass


def messy() -> tuple[nn.Module, Lambda, Any, Any]:
    model, hyper, inner_batch, outer_batch = make(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 2)
    )
    model[1].eval()  # type: ignore[index]
    model[0].bias.requires_grad_(False)  # type: ignore[index]
    return model, hyper, inner_batch, outer_batch


@pytest.mark.parametrize("fail_at", [None, *range(11)])
def test_nothing_is_changed_by_success_or_by_an_exception_at_any_evaluation(fail_at: int | None) -> None:
    model, hyper, inner_batch, outer_batch = messy()
    calls = 0

    def counted(function: Any) -> Any:
        def objective(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
            nonlocal calls
            model.train(calls % 2 == 0)
            random.random(), numpy.random.rand()
            loss: Tensor = function(model, hyper, batch)
            calls += 1
            if fail_at is not None and calls == fail_at + 1:
                raise Boom
            return loss

        return objective

    problem = BilevelProblem(counted(inner), counted(outer))
    method = unrolled(5, Adam(), checkpoint_every=2)
    before = fingerprint(model, hyper)
    if fail_at is None:
        method.compute(problem, model, hyper, inner_batch, outer_batch)
        assert calls == 12  # 4 forward, the last, outer, 4 backward, 2 recomputed
        method.lookahead(problem, model, hyper, inner_batch)
    else:
        with pytest.raises(Boom):
            method.compute(problem, model, hyper, inner_batch, outer_batch)
    assert fingerprint(model, hyper) == before


def test_works_under_no_grad() -> None:
    case = make()
    expected = unrolled(2).compute(PROBLEM, *case).grads
    with torch.no_grad():
        assert_same(unrolled(2).compute(PROBLEM, *case).grads, expected, 1e-15)
        assert not torch.is_grad_enabled()


def test_there_is_no_state() -> None:
    method = unrolled(2)
    assert method.state_dict() == {}
    method.load_state_dict({})
    with pytest.raises(HyperkronError, match=r"entries \['age'\]"):
        method.load_state_dict({"age": 1})


@pytest.mark.parametrize(
    ("construct", "message"),
    [
        (lambda: unrolled(0), "steps=0 must be a whole number ≥ 1"),
        (lambda: unrolled(2.5), "steps=2.5"),  # type: ignore[arg-type]
        (lambda: unrolled(2, checkpoint_every=0), "checkpoint_every=0"),
        (lambda: truncated(5, last=6), "last=6 is not between 1 and steps=5"),
        (lambda: truncated(5, last=0), "last=0"),
        (lambda: one_step(lr=-0.1), "lr=-0.1"),
        (lambda: unrolled(2, torch.optim.SGD(nn.Linear(1, 1).parameters())), "optimizer is a SGD"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_named(construct: Callable[[], Unrolled], message: str) -> None:
    with pytest.raises(HyperkronError, match=message):
        construct()


def test_the_wrong_number_of_batches_is_refused() -> None:
    model, hyper, inner_batch, outer_batch = make()
    batches = Batches([inner_batch] * 3)
    with pytest.raises(HyperkronError, match="inner_batch holds 3 batches but steps=4"):
        unrolled(4).compute(PROBLEM, model, hyper, batches, outer_batch)


@pytest.mark.parametrize(
    ("bad_inner", "bad_outer", "message"),
    [
        (lambda m, h, b: (m(b[0]) - b[1]).square().mean(), outer, "hyper does not influence the inner loss"),
        (lambda m, h, b: m(b[0]).square().mean() + h.decay, outer, "hyper does not influence the inner loss"),
        (lambda m, h, b: h.decay.square(), outer, "inner does not depend on the model's parameters"),
        (lambda m, h, b: m(b[0]).detach().sum(), outer, "inner does not depend on the model's parameters"),
        (inner, lambda m, h, b: h.decay.square(), "outer does not depend on the model's parameters"),
        (inner, lambda m, h, b: m(b[0]).detach().sum(), "outer does not depend on the model's parameters"),
    ],
)
def test_missing_dependence_is_named(bad_inner: Any, bad_outer: Any, message: str) -> None:
    model, hyper, inner_batch, outer_batch = make()
    before = fingerprint(model, hyper)
    with pytest.raises(HyperkronError, match=message):
        unrolled(3).compute(BilevelProblem(bad_inner, bad_outer), model, hyper, inner_batch, outer_batch)
    assert fingerprint(model, hyper) == before


@pytest.mark.parametrize("level", ["inner", "outer"])
@pytest.mark.parametrize("method", [unrolled(3), one_step(0.1)], ids=["unrolled", "one step"])
def test_parameters_that_would_not_follow_the_steps_are_refused(level: str, method: Unrolled) -> None:
    """A list of parameters made before the call has θ⁰ at every step, so that its part would be wrong."""
    model, hyper, inner_batch, outer_batch = make()
    kept = list(model.parameters())
    functions: dict[str, Any] = {"inner": inner, "outer": outer}
    function = functions[level]
    functions[level] = lambda m, h, b: function(m, h, b) + 0.1 * sum(p.square().sum() for p in kept)
    with pytest.raises(HyperkronError, match=rf"{level} uses .*kept from before.*model.parameters\(\)"):
        method.compute(BilevelProblem(**functions), model, hyper, inner_batch, outer_batch)


def test_non_finite_values_are_named_with_their_step() -> None:
    model, hyper, inner_batch, outer_batch = make()
    poisoned = (inner_batch[0].clone().fill_(torch.nan), inner_batch[1])
    batches = Batches([inner_batch, inner_batch, poisoned, inner_batch])
    with pytest.raises(NonFiniteError, match="inner loss at unrolled step 3 of 4"):
        unrolled(4).compute(PROBLEM, model, hyper, batches, outer_batch)
    with pytest.raises(NonFiniteError, match="outer loss after 2 unrolled steps"):
        unrolled(2).compute(PROBLEM, model, hyper, inner_batch, poisoned)
    steep = BilevelProblem(lambda m, h, batch: 1e3 * inner(m, h, batch), outer)
    with pytest.raises(NonFiniteError, match=r"the iterate after unrolled step 1 of 4.*lower"):
        unrolled(4, SGD(1e308)).compute(steep, model, hyper, inner_batch, outer_batch)


def test_a_derivative_that_is_not_finite_is_named() -> None:
    """|x|^1.5 at x = 0 has the derivative 0, so that the steps are finite, but no second derivative."""
    model, hyper, inner_batch, outer_batch = make()

    def kinked(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
        size = parameters_to_vector(model.parameters()).square().sum()
        return inner(model, hyper, batch) + hyper.decay * (size - size.detach()).abs().pow(1.5)

    with pytest.raises(NonFiniteError, match="∂Φ/∂θ after unrolled step 2 of 3"):
        unrolled(3).compute(BilevelProblem(kinked, outer), model, hyper, inner_batch, outer_batch)


def test_a_hypergradient_that_is_not_finite_is_named() -> None:
    model, hyper, inner_batch, outer_batch = make()

    def kinked(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
        return outer(model, hyper, batch) + (hyper.decay - hyper.decay.detach()).abs().sqrt()

    with pytest.raises(NonFiniteError, match="the hypergradient of hyper parameter decay"):
        unrolled(3).compute(BilevelProblem(inner, kinked), model, hyper, inner_batch, outer_batch)
