"""After any call, success or exception, everything is exactly what it was.

State is compared before and after every method and cross term; then an exception is thrown at the n-th call of
inner, of outer, inside a layer's forward and inside a backward pass, for every n that occurs, and in the solver,
the factorisation and the cross term.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import trees
from hyperkron.cross import choice, weighting
from hyperkron.hypergradient.steps import Adam
from hyperkron.solvers.base import Solver
from photographs import FUSE, METHODS, Boom, Case, inner, method_names, outer


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    changed = [name for name in before if before[name] != after[name]]
    assert not changed


@pytest.mark.parametrize("hyper_grads", [False, True])
def test_the_photograph_sees_what_it_should(hyper_grads: bool) -> None:
    case = Case()
    changes: list[Callable[[], Any]] = [
        lambda: case.model.first.weight.data.add_(1),
        lambda: case.model.norm.running_mean.add_(1),
        lambda: case.model(case.inner[0]),
        lambda: case.model.still.train(),
        lambda: case.model.frozen.weight.requires_grad_(True),
        lambda: case.model.last.weight.grad.add_(1),
        lambda: case.model.dropout.register_forward_hook(lambda *_: None),
        lambda: case.model.dropout.register_forward_pre_hook(lambda *_: None),
        lambda: case.model.dropout.register_full_backward_hook(lambda *_: None),
        lambda: torch.rand(1),
        random.random,
        lambda: np.random.rand(),
        lambda: case.inner[0].add_(0),
    ]
    for change in changes:
        before = case.photograph(hyper_grads=hyper_grads)
        change()
        assert before != case.photograph(hyper_grads=hyper_grads)


@method_names
def test_success_leaves_everything(name: str) -> None:
    case = Case()
    method = METHODS[name](case.model)
    start = case.hyper.decay.grad.clone()
    before, bits_before = case.photograph(hyper_grads=False), case.photograph()
    result = method.compute(*case.arguments())
    assert_same(bits_before, case.photograph())  # compute leaves even λ's gradient alone
    second = method.backward(*case.arguments())
    assert_same(before, case.photograph(hyper_grads=False))
    assert set(result.grads) == {"weights.weight", "decay", "unused"}
    assert not any(g.requires_grad for g in result.grads.values())
    assert float(trees.norm(result.grads)) > 0
    torch.testing.assert_close(case.hyper.decay.grad, start + second.grads["decay"], rtol=0, atol=0)
    torch.testing.assert_close(case.hyper.weights.weight.grad, second.grads["weights.weight"], rtol=0, atol=0)


def events(name: str) -> Iterator[tuple[int, str, int]]:
    """Every event of the first call, when nothing is cached, and of the second: (calls before it, kind, n)."""
    case = Case()
    method = METHODS[name](case.model)
    for call in range(2):
        FUSE.light("", 0, Boom())
        method.backward(*case.arguments())
        yield from [(call, kind, n) for kind, count in FUSE.seen.items() for n in range(1, count + 1)]


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.long)])
@method_names
def test_an_exception_anywhere_leaves_everything(name: str, every: int) -> None:
    everywhere = list(events(name))
    assert {kind for _, kind, _ in everywhere} == {"inner", "outer", "layer", "backward"}
    first = list(METHODS).index(name) % min(
        every, len(everywhere)
    )  # so that other moments are tried with other methods
    for i, (calls, kind, n) in enumerate(everywhere[first::every]):
        case = Case()
        method = METHODS[name](case.model)
        for _ in range(calls):
            method.backward(*case.arguments())
        before = case.photograph()
        error = KeyboardInterrupt() if i % 3 == 0 else Boom()
        FUSE.light(kind, n, error)
        with pytest.raises(type(error)):
            method.backward(*case.arguments())
        assert_same(before, case.photograph())
    FUSE.light("", 0, Boom())
    assert method.backward(*case.arguments()).status.ok  # and it can go on


@pytest.mark.parametrize("error", [Boom, RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize(
    ("name", "target", "attribute"),
    [
        ("kfac-mc/auto", Solver, "solve_system"),
        ("cg-hessian/auto", Solver, "solve_system"),
        ("pcg/auto", hk.solvers.CG, "_solve"),
        ("neumann/auto", Solver, "solve_system"),
        ("kfac-mc/auto", hk.curvature.KFAC, "_invert"),
        ("ekfac/auto", hk.curvature.EKFAC, "_invert"),
        ("ekfac/auto", torch.linalg, "eigh"),
        ("pcg/auto", hk.curvature.KFAC, "operator"),
        ("cg-ggn/auto", hk.curvature.GGN, "operator"),
        ("kfac-mc/auto", choice.Cross, "term"),
        ("kfac-mc/difference", weighting, "difference"),
        ("kfac-mc/forward", weighting, "forward"),
        ("kfac-mc/reverse", choice, "reverse"),
        ("kfac-mc/auto", trees, "add"),
        ("unrolled", Adam, "step"),
    ],
)
def test_a_failing_piece_leaves_everything(
    name: str, target: Any, attribute: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case()
    method = METHODS[name](case.model)
    before = case.photograph()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("a piece failed")

    with monkeypatch.context() as patch:
        patch.setattr(target, attribute, fail)
        with pytest.raises(error):
            method.backward(*case.arguments())
    assert_same(before, case.photograph())
    assert method.backward(*case.arguments()).status.ok


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("name", ["kfac-mc/auto", "cg-hessian/auto", "identity/forward", "unrolled"])
def test_the_callers_grad_mode_does_not_matter(name: str, context: Callable[[], Any]) -> None:
    plain, inside = Case(), Case()
    METHODS[name](plain.model).backward(*plain.arguments())
    method, before = METHODS[name](inside.model), inside.photograph(hyper_grads=False)
    with context():
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        method.backward(*inside.arguments())
        assert modes == (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    assert_same(before, inside.photograph(hyper_grads=False))
    wanted, found = plain.hyper.weights.weight.grad, inside.hyper.weights.weight.grad
    assert not found.is_inference()
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["kfac-mc/auto", "ekfac/auto", "pcg/auto", "identity/auto", "unrolled"])
def test_the_default_device_does_not_matter(name: str) -> None:
    """As ``torch.set_default_device`` sets it; the device "meta" has no numbers."""
    plain, inside = Case(), Case()
    wanted = METHODS[name](plain.model).compute(*plain.arguments())
    with torch.device("meta"):
        found = METHODS[name](inside.model).compute(*inside.arguments())
    assert found.stats == wanted.stats  # the cross term in the same way, too
    assert all(torch.equal(found.grads[key], x) for key, x in wanted.grads.items())


@pytest.mark.parametrize("name", ["kfac-mc/auto", "cg-ggn/auto", "identity/auto", "unrolled"])
def test_a_model_in_eval_mode_stays_in_it(name: str) -> None:
    case = Case()
    case.model.eval()
    before = case.photograph(hyper_grads=False)
    METHODS[name](case.model).backward(*case.arguments())
    assert_same(before, case.photograph(hyper_grads=False))


def test_objectives_may_switch_modes_themselves() -> None:
    """Each evaluation begins in the caller's modes, whatever the one before left behind."""
    modes: dict[str, list[bool]] = {"inner": [], "outer": []}

    def switching(level: str, function: Any) -> Any:
        def run(model: nn.Module, hyper: nn.Module, batch: Any) -> Any:
            modes[level].append(model.training)
            model.eval()
            model.requires_grad_(level == "inner")
            model.requires_grad_(True)
            return function(model, hyper, batch)

        return run

    case = Case()
    before = case.photograph(hyper_grads=False)
    problem = hk.BilevelProblem(switching("inner", inner), switching("outer", outer))
    hk.cg(2, 1.0).backward(problem, *case.arguments()[1:])
    assert_same(before, case.photograph(hyper_grads=False))
    assert modes["inner"] and modes["outer"]
    assert all(modes["inner"] + modes["outer"])


@method_names
def test_a_graph_made_before_the_call_can_be_used_after_it(name: str) -> None:
    gradients = []
    for call in (False, True):
        case = Case()
        method = METHODS[name](case.model)
        case.hyper.zero_grad()
        loss = inner(case.model, case.hyper, case.inner)
        if call:
            method.compute(*case.arguments())
        case.model.zero_grad()
        loss.backward()
        gradients.append({n: p.grad for n, p in case.model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for key, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["kfac-mc/auto", "ekfac/auto", "pcg/auto", "unrolled"])
def test_the_users_own_hooks_stay_and_run(name: str) -> None:
    case = Case()
    seen: list[Tensor] = []
    case.model.first.register_forward_hook(lambda module, args, output: seen.append(output.square().sum()))
    case.model.last.register_full_backward_hook(lambda module, g_in, g_out: None)
    before = case.photograph(hyper_grads=False)
    METHODS[name](case.model).backward(*case.arguments())
    assert_same(before, case.photograph(hyper_grads=False))
    assert seen


def perturbed(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    """Adversarial examples by ``backward``, which adds to the .grad of θ and λ."""
    x, y = batch
    x = x.clone().requires_grad_()
    hk.losses.cross_entropy(model(x), y, weight=hyper()).backward()
    assert x.grad is not None
    return hk.losses.cross_entropy(model((x + 0.1 * x.grad.sign()).detach()), y, weight=hyper())


@pytest.mark.parametrize("made", [hk.kfac, hk.identity, lambda: hk.unrolled(2)])
def test_an_objective_that_calls_backward_adds_nothing(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperkron.solution._warned", set())
    model, hyper = nn.Linear(3, 2), hk.as_hyper(torch.rand(6))
    batch = torch.randn(6, 3), torch.arange(6) % 2
    problem = hk.BilevelProblem(perturbed, lambda m, h, b: hk.losses.cross_entropy(m(b[0]), b[1]))
    method = made()
    wanted = method.compute(problem, model, hyper, batch, batch)
    assert all(p.grad is None for p in (*model.parameters(), *hyper.parameters()))
    method.fresh().backward(problem, model, hyper, batch, batch)
    torch.testing.assert_close(hyper.value.grad, wanted.grads["value"], rtol=0, atol=0)
    with pytest.warns(hk.HyperkronWarning, match=r"called backward\(\) itself.*shape \(6,\)"):
        method.fresh().backward(problem, model, hyper, batch, batch)  # adds to the .grad that is there
