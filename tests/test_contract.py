"""After any call, success or exception, everything is exactly what it was.

State is compared before and after every method and cross term; then an exception is thrown at the n-th call of
inner, of outer, inside a layer's forward and inside a backward pass, for every n that occurs, and in the solver,
the factorisation and the cross term.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import cross, trees
from hyperkron.curvature.base import Curvature
from hyperkron.hypergradient.steps import Adam
from hyperkron.point import Point
from hyperkron.solvers.base import Solver

N, D, C = 6, 3, 3


class Boom(Exception):
    """What a user's code may throw at any moment."""


class Fuse:
    """Counts events by kind, and burns through at the n-th of one kind."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.kind, self.at = "", 0
        self.error: BaseException = Boom()

    def light(self, kind: str, at: int, error: BaseException) -> None:
        self.seen.clear()
        self.kind, self.at, self.error = kind, at, error

    def event(self, kind: str) -> None:
        self.seen[kind] += 1
        if kind == self.kind and self.seen[kind] == self.at:
            raise self.error


FUSE = Fuse()


class Fused(torch.autograd.Function):
    """The identity; its backward pass, and the backward pass of that, count as events."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        FUSE.event("backward")
        return Fused.apply(g)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()


class Net(nn.Module):
    """All that can go wrong: modes mixed, a frozen layer, statistics, random numbers of three kinds, caches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.still = nn.BatchNorm1d(4).eval()
        self.dropout = nn.Dropout(0.3)
        self.layer_norm = nn.LayerNorm(4)
        self.last = nn.Linear(4, C)
        self.average: Tensor | None
        self.cache: Tensor | None
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.tanh(self.first(x)))
        x = self.still(self.frozen(x))
        if self.average is not None:
            x = x * (1 + self.average.mul_(0.9).add_(0.1 * x.detach().mean(0)))  # in place and in the graph
        self.cache = x.detach()
        if "lazy" not in self._buffers:
            self.register_buffer("lazy", torch.ones(1))
        FUSE.event("layer")
        x = Fused.apply(x) * (1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))
        return self.last(self.layer_norm(self.dropout(x)))


class Hyper(nn.Module):
    """λ with noise and statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = hk.SampleWeights(N, "sigmoid")
        self.decay = nn.Parameter(torch.tensor(-3.0))
        self.unused = nn.Parameter(torch.zeros(2))
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, index: Tensor) -> Tensor:
        self.calls += 1
        return self.weights(index)


def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    FUSE.event("inner")
    x, y, index = batch
    return hk.losses.cross_entropy(model(x), y, weight=hyper(index)) + hk.losses.l2(model, hyper.decay.exp())


def outer(model: nn.Module, hyper: nn.Module, batch: Any) -> hk.losses.Loss:
    FUSE.event("outer")
    x, y, _ = batch
    return hk.losses.cross_entropy(model(x), y)


PROBLEM = hk.BilevelProblem(inner, outer)

IMPLICIT: dict[str, Callable[..., hk.Implicit]] = {
    "kfac-mc": lambda **k: hk.kfac(1e-2, **k),
    "kfac-type-2": lambda **k: hk.kfac(1e-2, fisher="type-2", **k),
    "kfac-empirical": lambda **k: hk.kfac(1e-2, fisher="empirical", ema=0.5, **k),
    "kfac-reduce": lambda **k: hk.kfac(1e-2, sharing="reduce", refresh_every=2, **k),
    "kfac-exact": lambda **k: hk.kfac(1e-2, split="exact", **k),
    "ekfac": lambda **k: hk.ekfac(1e-2, **k),
    "cg-hessian": lambda **k: hk.cg(3, 30.0, **k),
    "cg-ggn": lambda **k: hk.cg(3, curvature=hk.GGN(1e-2), warm_start=True, **k),
    "pcg": lambda **k: hk.pcg(3, 1e-2, **k),
    "pcg-hessian": lambda **k: hk.pcg(3, 1e-2, curvature=hk.Hessian(30.0), **k),
    "neumann": lambda **k: hk.neumann(3, 30.0, **k),
    "gradient-descent": lambda **k: hk.gradient_descent(2, 30.0, **k),
    "identity": lambda **k: hk.identity(0.1, **k),
}
METHODS: dict[str, Callable[[Net], hk.Hypergradient]] = {
    **{f"{name}/auto": lambda model, make=make: make() for name, make in IMPLICIT.items()},
    **{
        f"{name}/{mode}": lambda model, name=name, mode=mode: IMPLICIT[name](cross=mode)
        for name in ("kfac-mc", "ekfac", "cg-hessian", "pcg", "identity")
        for mode in ("reverse", "forward", "difference")
    },
    "sama": lambda model: hk.sama(),
    "sama-adamw": lambda model: hk.sama(stepped(model)),
    "unrolled": lambda model: hk.unrolled(3, Adam(1e-2), checkpoint_every=2),
    "truncated": lambda model: hk.truncated(3, 2),
    "one-step": lambda model: hk.one_step(0.1),
}
method_names = pytest.mark.parametrize("name", list(METHODS))


def stepped(model: Net) -> torch.optim.Optimizer:
    """AdamW after a step, with its gradients still there, as SAMA wants it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for p in model.parameters():
        p.grad = torch.randn_like(p) if p.requires_grad else None
    optimizer.step()
    return optimizer


class Case:
    """A model, a λ, two batches, and a photograph of all of it."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model, self.hyper = Net().to(dtype), Hyper().to(dtype)
        self.model.last.weight.grad = torch.randn_like(self.model.last.weight)
        self.hyper.decay.grad = torch.randn_like(self.hyper.decay)
        x, y = torch.randn(2 * N, D, dtype=dtype), torch.arange(2 * N) % C
        self.inner = (x[:N], y[:N], torch.arange(N))
        self.outer = (x[N:], y[N:], torch.arange(N))
        FUSE.light("", 0, Boom())

    def arguments(self) -> tuple[Any, ...]:
        return PROBLEM, self.model, self.hyper, self.inner, self.outer

    def photograph(self, *, hyper_grads: bool = True) -> dict[str, Any]:
        """Everything the contract names, as comparable values; tensors by identity, memory, version and bits."""
        seen: dict[str, Any] = {}
        for label, module in (("model", self.model), ("hyper", self.hyper)):
            for name, part in module.named_modules():
                here = f"{label}.{name}"
                seen[f"{here} training"] = part.training
                seen[f"{here} buffers"] = [(n, bits(b)) for n, b in part._buffers.items()]
                seen[f"{here} unsaved"] = sorted(part._non_persistent_buffers_set)
                seen[f"{here} parameters"] = [(n, bits(p)) for n, p in part._parameters.items()]
                for attribute, value in vars(part).items():
                    if "hooks" in attribute:
                        seen[f"{here} {attribute}"] = list(value.items()) if isinstance(value, dict) else value
            for name, p in module.named_parameters():
                seen[f"{label}.{name} requires_grad"] = p.requires_grad
                seen[f"{label}.{name} is_leaf"] = p.is_leaf
                if label == "model" or hyper_grads:
                    seen[f"{label}.{name} grad"] = bits(p.grad)
        seen["batches"] = [bits(t) for t in (*self.inner, *self.outer)]
        seen["torch random"] = torch.get_rng_state().numpy().tobytes()
        seen["python random"] = random.getstate()
        name, keys, *rest = np.random.get_state()
        seen["numpy random"] = (name, keys.tobytes(), *rest)
        seen["modes"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype())
        seen["kernels"] = (
            torch.backends.mha.get_fastpath_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
        )
        return seen


def bits(x: Tensor | None) -> Any:
    if x is None:
        return None
    return id(x), x.data_ptr(), x._version, x.dtype, x.detach().numpy().tobytes()


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


@method_names
def test_an_exception_anywhere_leaves_everything(name: str) -> None:
    everywhere = list(events(name))
    assert {kind for _, kind, _ in everywhere} == {"inner", "outer", "layer", "backward"}
    for i, (calls, kind, n) in enumerate(everywhere):
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
        ("kfac-mc/auto", Solver, "solve"),
        ("cg-hessian/auto", Solver, "solve"),
        ("pcg/auto", hk.CG, "_solve"),
        ("neumann/auto", Solver, "solve"),
        ("kfac-mc/auto", hk.KFAC, "_invert"),
        ("ekfac/auto", hk.EKFAC, "_invert"),
        ("ekfac/auto", torch.linalg, "eigh"),
        ("pcg/auto", hk.KFAC, "operator"),
        ("cg-ggn/auto", hk.GGN, "operator"),
        ("kfac-mc/auto", cross.Cross, "term"),
        ("kfac-mc/difference", cross, "difference"),
        ("kfac-mc/forward", cross, "forward"),
        ("kfac-mc/reverse", cross, "reverse"),
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


# Dropout


CURVATURES: dict[str, Curvature] = {
    "hessian": hk.Hessian(0.1),
    "ggn": hk.GGN(0.1),
    "kfac": hk.KFAC(0.1),
    "ekfac": hk.EKFAC(0.1),
}


@pytest.mark.parametrize("name", list(CURVATURES))
def test_one_mask_for_every_product(name: str) -> None:
    case = Case()
    curvature = CURVATURES[name]
    with Point(*case.arguments()) as point:
        operator = curvature.operator(point, curvature.init())
        generator = torch.Generator().manual_seed(1)
        u, v = trees.normal_like(point.params, generator), trees.normal_like(point.params, generator)
        once = operator.matvec(v)
        point.outer()  # other evaluations in between do not matter
        point.inner()
        again = operator.matvec(v)
        torch.testing.assert_close(again, once, rtol=0, atol=0)
        torch.testing.assert_close(trees.dot(u, once), trees.dot(v, operator.matvec(u)), rtol=1e-9, atol=1e-12)
        anew = curvature.operator(point, curvature.init()).matvec(v)
        torch.testing.assert_close(anew, once, rtol=1e-12, atol=1e-12)


def test_the_mask_follows_the_global_random_state() -> None:
    values = []
    for seed in (1, 1, 2):
        case = Case()
        torch.manual_seed(seed)
        values.append(hk.identity().compute(*case.arguments()).grads["weights.weight"])
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
    assert float((values[0] - values[2]).norm()) > 1e-3 * float(values[0].norm())


@pytest.mark.parametrize("mode", ["forward", "difference"])
def test_one_mask_for_all_evaluations_of_a_cross_term(mode: Any) -> None:
    """The central difference agrees with double backward only if its two sides and that one share the mask."""
    cases = Case(), Case()
    for case in cases:  # a detached path is one that a finite difference sees and a derivative does not
        case.model.average = None
    wanted = hk.identity(cross="reverse").compute(*cases[0].arguments()).grads
    found = hk.identity(cross=mode).compute(*cases[1].arguments()).grads
    torch.testing.assert_close(found, wanted, rtol=1e-5 if mode == "difference" else 1e-10, atol=1e-9)


def test_steps_of_an_unrolled_method_draw_their_own_masks_and_draw_them_again() -> None:
    """Recomputed iterates equal kept ones only if the masks are drawn again; T equal masks would repeat."""
    case = Case()
    kept = hk.unrolled(5).compute(*case.arguments()).grads
    recomputed = hk.unrolled(5, checkpoint_every=4).compute(*case.arguments()).grads
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)
    with Point(*case.arguments()) as point:
        draws = (0, 1, 2, 1, 0)
        how: dict[str, Any] = {"differentiable": False, "where": "here"}
        values = [point.substituted("inner", point.params, case.inner, draw=d, **how).item() for d in draws]
        assert values[0] == values[4] == point.inner().item()
        assert values[1] == values[3]
    assert len(set(values)) == 3


# Attention


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "difference"])
def test_attention_with_its_fast_kernels_works_in_every_mode(mode: Any, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.train(training)
    weights = hk.SampleWeights(4).double()
    x, y = torch.randn(4, 5, 8, dtype=torch.float64), torch.randn(4, 5, 8, dtype=torch.float64)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.mse(m(b[0]), b[1], weight=w(torch.arange(4))),
        lambda m, w, b: hk.losses.mse(m(b[0]), b[1]),
    )
    arguments = problem, layer, weights, (x, y), (y, x)
    wanted = hk.identity(cross="reverse").compute(*arguments).grads
    found = hk.identity(cross=mode).compute(*arguments).grads
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    assert torch.backends.mha.get_fastpath_enabled()
    assert hk.cg(2, 30.0, cross=mode).compute(*arguments).status.ok
