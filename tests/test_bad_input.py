"""Bad input gets an error that names the argument, its value and the remedy: one table of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from hyperkron import solution
from hyperkron.hypergradient.steps import SGD, Adam

N, D, C = 6, 4, 3
NAN, INF = float("nan"), float("inf")


class Given:
    """A good problem; every row of the table spoils one thing."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, C))
        self.hyper: Any = hk.SampleWeights(N)
        self.inner = inner
        self.outer = outer
        self.x, self.y = torch.randn(N, D), torch.arange(N) % C
        self.held: Any = (torch.randn(N, D), torch.arange(N) % C)
        self.curvature_batch: Any = None

    @property
    def problem(self) -> hk.BilevelProblem:
        return hk.BilevelProblem(self.inner, self.outer)

    def run(self, method: hk.Hypergradient | None = None) -> hk.HypergradientResult:
        extra = {} if self.curvature_batch is None else {"curvature_batch": self.curvature_batch}
        method = hk.kfac(1e-2) if method is None else method
        return method.backward(self.problem, self.model, self.hyper, (self.x, self.y), self.held, **extra)


def inner(model: Any, weights: Any, batch: Any) -> Any:
    x, y = batch
    return hk.losses.cross_entropy(model(x), y, weight=weights(torch.arange(len(x))))


def outer(model: Any, weights: Any, batch: Any) -> Any:
    x, y = batch
    return hk.losses.cross_entropy(model(x), y)


def scalar_inner(model: Any, weights: Any, batch: Any) -> Tensor:
    x, y = batch
    return (F.cross_entropy(model(x), y, reduction="none") * weights(torch.arange(len(x)))).mean()


def rows_inner(model: Any, weights: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none") * weights(torch.arange(len(x)))


def unweighted(model: Any, weights: Any, batch: Any) -> Any:
    return outer(model, weights, batch)


def detached_weights(model: Any, weights: Any, batch: Any) -> Any:
    x, y = batch
    return hk.losses.cross_entropy(model(x), y, weight=weights(torch.arange(len(x))).detach())


def detached_model(model: Any, weights: Any, batch: Any) -> Any:
    x, y = batch
    return hk.losses.cross_entropy(model(x).detach(), y, weight=weights(torch.arange(len(x))))


def scalar_detached_model(model: Any, weights: Any, batch: Any) -> Any:
    with torch.no_grad():
        return scalar_inner(model, weights, batch)


def only_hyper(model: Any, weights: Any, batch: Any) -> Any:
    return weights(torch.arange(N)).square().sum()


def nothing(model: Any, weights: Any, batch: Any) -> Any:
    return torch.zeros(())


class Raw(nn.Module):
    """A parameter of its own, outside any layer."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.gain


class Attention(nn.Module):
    """A token of attention in front of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, 2, batch_first=True)
        self.head = nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0])


class Functional(nn.Module):
    """A layer whose weight is used without calling the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight, self.layer.bias)


Spoil = Callable[[Given], Any]
TABLE: dict[str, tuple[Spoil, type[Exception], list[str]]] = {}


def row(name: str, spoil: Spoil, *fragments: str, error: type[Exception] = hk.HyperkronError) -> None:
    assert name not in TABLE
    TABLE[name] = (spoil, error, list(fragments))


def setting(method: hk.Hypergradient | None = None, **attributes: Any) -> Spoil:
    """Set attributes of a good problem, then run."""

    def spoil(given: Given) -> Any:
        for name, value in attributes.items():
            setattr(given, name, value)
        return given.run(copy.deepcopy(method))

    return spoil


def touching(touch: Callable[[Given], Any], method: Callable[[], hk.Hypergradient] | None = None) -> Spoil:
    """Change a good problem in place, then run."""

    def spoil(given: Given) -> Any:
        touch(given)
        return given.run(None if method is None else method())

    return spoil


@torch.no_grad()
def poison(x: Tensor, value: float = NAN) -> None:
    x.reshape(-1)[1] = value


# Devices and dtypes

row(
    "hyper on another device",
    touching(lambda g: g.hyper.to("meta")),
    "hyper parameter weight is on meta",
    "0.weight is on cpu",
    ".to('cpu')",
)
row(
    "a layer on another device",
    touching(lambda g: g.model[2].to("meta")),
    "model parameter 2.weight is on meta",
    "0.weight is on cpu",
    ".to('cpu')",
)
row(
    "inner batch on another device",
    touching(lambda g: setattr(g, "x", g.x.to("meta"))),
    "inner_batch[0] is on meta",
    "model is on cpu",
    ".to('cpu')",
)
row(
    "outer batch on another device",
    touching(
        lambda g: (
            setattr(g, "held", {"x": g.x.to("meta"), "y": g.y})
            or setattr(g, "outer", lambda m, w, b: outer(m, w, (b["x"], b["y"])))
        )
    ),
    "outer_batch['x'] is on meta",
    "model is on cpu",
    ".to('cpu')",
)
row(
    "model of two dtypes",
    touching(lambda g: g.model[2].double()),
    "model mixes dtypes",
    "2.weight is torch.float64",
    "model.to(dtype)",
)
row(
    "inner batch of another dtype",
    touching(lambda g: setattr(g, "x", g.x.double())),
    "inner_batch[0] is torch.float64",
    "model is torch.float32",
    ".to(torch.float32)",
)
row(
    "curvature batch of another dtype",
    touching(lambda g: setattr(g, "curvature_batch", (g.x.double(), g.y))),
    "curvature_batch[0] is torch.float64",
    "model is torch.float32",
    ".to(torch.float32)",
)
row(
    "unrolled on a batch of another dtype",
    touching(lambda g: setattr(g, "x", g.x.double()), lambda: hk.one_step(0.1)),
    "inner_batch[0] is torch.float64",
    "model is torch.float32",
    ".to(torch.float32)",
)
row(
    "weight of a complex λ",
    touching(lambda g: setattr(g, "hyper", nn.ParameterList([nn.Parameter(torch.ones(N, dtype=torch.cfloat))]))),
    "hyper parameter 0",
    "complex64",
    "floating point",
)

# Batches

row(
    "empty inner batch",
    touching(lambda g: (setattr(g, "x", g.x[:0]), setattr(g, "y", g.y[:0]))),
    "output has shape (0, 3)",
    "empty batch",
    "skip empty batches",
)
row(
    "empty inner batch, scalar loss",
    touching(lambda g: (setattr(g, "x", g.x[:0]), setattr(g, "y", g.y[:0]), setattr(g, "inner", scalar_inner)), hk.cg),
    "inner loss is nan",
    "inner_batch[0] is empty",
    "remove",
    error=hk.NonFiniteError,
)
row(
    "empty outer batch",
    touching(lambda g: setattr(g, "held", (g.x[:0], g.y[:0]))),
    "output has shape (0, 3)",
    "empty batch",
    "skip empty batches",
)
for where, touch in {
    "inner_batch[0]": lambda g: poison(g.x),
    "outer_batch[0]": lambda g: poison(g.held[0]),
    "model parameter 2.weight": lambda g: poison(g.model[2].weight),
    "hyper parameter weight": lambda g: poison(g.hyper.weight),
    "model buffer 1.running_var": lambda g: (
        setattr(g, "model", nn.Sequential(nn.Linear(D, C), nn.BatchNorm1d(C)).eval()),
        poison(g.model[1].running_var),
    ),
    "curvature_batch[0]": lambda g: (setattr(g, "curvature_batch", (g.x.clone(), g.y)), poison(g.curvature_batch[0])),
}.items():
    for label, method in {
        "kfac": hk.kfac,
        "cg": hk.cg,
        "identity": hk.identity,
        "unrolled": lambda: hk.unrolled(2),
    }.items():
        if where.startswith("curvature") and label in ("identity", "unrolled"):
            continue
        row(
            f"nan in {where}, {label}",
            touching(touch, method),
            "loss",
            "is nan",
            f"{where} holds 1 nan or infinite of",
            "repair",
            error=hk.NonFiniteError,
        )
row(
    "inf in the inner batch",
    touching(lambda g: poison(g.x, INF), lambda: hk.identity()),
    "inner_batch[0] holds 1 nan or infinite of 24",
    "repair",
    error=hk.NonFiniteError,
)
row(
    "an exploding model",
    touching(lambda g: g.model[2].weight.data.mul_(1e38), lambda: hk.identity()),
    "∂θ J_out is infinite",
    "look for overflow in the model",
    error=hk.NonFiniteError,
)
row(
    "unrolled steps that explode",
    touching(lambda g: g.x.mul_(1e3), lambda: hk.unrolled(30, SGD(1e30))),
    "unrolled step",
    "lower the optimizer's lr",
    error=hk.NonFiniteError,
)

# λ, θ and the objectives

for label, method in {
    "kfac": hk.kfac,
    "cg": hk.cg,
    "identity": hk.identity,
    "unrolled": lambda: hk.unrolled(2),
    "forward": lambda: hk.identity(cross="forward"),
    "reverse": lambda: hk.identity(cross="reverse"),
}.items():
    for how, function in {"absent": unweighted, "detached": detached_weights}.items():
        row(
            f"λ {how}, {label}",
            touching(lambda g, f=function: setattr(g, "inner", f), method),
            "hyper does not influence the inner loss",
            "weight",
            "detach()",
        )
    row(
        f"outer without θ, {label}",
        touching(lambda g: setattr(g, "outer", only_hyper), method),
        "outer does not depend on the model's parameters",
        "compute it from the model",
        "detach() or",
    )
    row(
        f"outer of nothing, {label}",
        touching(lambda g: setattr(g, "outer", nothing), method),
        "outer",
        "depend",
        "detach",
    )
    if label not in ("forward", "reverse"):
        for how, function in {"loss": detached_model, "scalar": scalar_detached_model, "nothing": nothing}.items():
            row(
                f"inner without θ ({how}), {label}",
                touching(lambda g, f=function: setattr(g, "inner", f), method),
                "inner does not depend on the model's",
                "parameters",
                "detach() or",
            )
row(
    "inner of λ alone, cg",
    touching(lambda g: setattr(g, "inner", only_hyper), hk.cg),
    "inner does not depend on the model's",
    "parameters",
)
row(
    "inner of λ's own network, kfac",
    touching(
        lambda g: (
            setattr(g, "hyper", nn.Linear(D, C)),
            setattr(g, "inner", lambda m, h, b: hk.losses.cross_entropy(h(b[0]), b[1])),
        )
    ),
    "inner does not depend on the model's",
    "parameters",
)
row(
    "frozen model",
    touching(lambda g: g.model.requires_grad_(False)),
    "model has no trainable parameter (4 parameters, all frozen)",
    "model.requires_grad_(True)",
)
row(
    "frozen hyper",
    touching(lambda g: g.hyper.requires_grad_(False)),
    "hyper has no trainable parameter (1 parameters, all frozen)",
    "hyper.requires_grad_(True)",
)
row("hyper without parameters", setting(hyper=nn.ReLU()), "hyper (ReLU) has no parameters", "nn.Parameter")
row("model without parameters", setting(model=nn.ReLU()), "model (ReLU) has no parameters", "nn.Parameter")
row("hyper a tensor", setting(hyper=torch.ones(N)), "hyper is a Tensor", "as_hyper")
row("model a function", setting(model=F.relu), "model is a ", "not a torch.nn.Module", "pass the network itself")
row("lazy model", setting(model=nn.LazyLinear(C)), "model parameter weight has no shape yet", "call model once")
row(
    "λ shares a parameter with θ",
    touching(lambda g: setattr(g.hyper, "tied", g.model[0].bias)),
    "hyper parameter tied is also a parameter of model",
    "distinct",
    "deepcopy",
)
row(
    "a problem that is none",
    lambda g: hk.kfac().backward(inner, g.model, g.hyper, None, None),
    "problem is a function",
    "BilevelProblem(inner, outer)",
)
row("inner not callable", lambda g: hk.BilevelProblem(3, outer), "inner=3 is not callable", "pass a function")
row("outer not callable", lambda g: hk.BilevelProblem(inner, None), "outer=None is not callable", "pass a function")

# What objectives return

for label, method in {"mc": hk.kfac, "type-2": lambda: hk.kfac(fisher="type-2"), "ekfac": hk.ekfac}.items():
    row(
        f"scalar loss, {label}",
        touching(lambda g: setattr(g, "inner", scalar_inner), method),
        "inner returned a plain scalar tensor",
        "fisher=",
        "losses.cross_entropy",
        "fisher='empirical'",
    )
row(
    "scalar loss, GGN",
    touching(lambda g: setattr(g, "inner", scalar_inner), lambda: hk.cg(curvature=hk.GGN())),
    "inner returned a plain scalar tensor",
    "Gauss–Newton",
    "losses.cross_entropy",
    "Hessian()",
)
row("inner of many numbers", setting(inner=rows_inner), "inner did not return a loss", "shape (6,)", ".mean()")
row("outer of many numbers", setting(outer=rows_inner), "outer did not return a loss", "shape (6,)", ".mean()")
row("inner of None", setting(inner=lambda m, w, b: None), "inner did not return a loss", "NoneType", "scalar tensor")
row(
    "inner of a float",
    setting(hk.one_step(0.1), inner=lambda m, w, b: 1.0),
    "inner did not return a loss",
    "float",
    "scalar tensor",
)
row(
    "inner of an integer tensor",
    setting(hk.cg(), inner=lambda m, w, b: torch.tensor(1)),
    "inner did not return a loss",
    "torch.int64",
    "floating point",
)

# KFAC's own refusals

for fisher in ("mc", "type-2", "empirical"):
    row(
        f"negative weights, {fisher}",
        touching(
            lambda g: (
                setattr(g, "hyper", hk.as_hyper(-torch.ones(N))),
                setattr(g, "inner", lambda m, h, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=h())),
            ),
            lambda fisher=fisher: hk.kfac(fisher=fisher),
        ),
        "weight",
        "-0.16",
        "weights ≥ 0",
    )
STRICT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "norm": (lambda: nn.Sequential(nn.Linear(D, C), nn.LayerNorm(C)), "1.weight (LayerNorm)"),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, C)), "0.weight (Embedding)"),
    "raw parameter": (lambda: Raw(nn.Linear(D, C)), "gain (Raw)"),
    "attention": (Attention, "attention.in_proj_weight (MultiheadAttention)"),
    "functional use": (Functional, "layer.weight"),
}
for label, (make, named) in STRICT.items():
    row(
        f"strict, {label}",
        touching(
            lambda g, make=make, label=label: (
                setattr(g, "model", make()),
                label == "embedding" and (setattr(g, "x", g.y), setattr(g, "held", (g.y, g.y))),
            ),
            lambda: hk.Implicit(hk.KFAC(strict=True), hk.Direct()),
        ),
        "strict=True",
        named,
        "strict=False",
        error=hk.CoverageError,
    )
row(
    "negative l2",
    touching(
        lambda g: setattr(g, "inner", lambda m, w, b: inner(m, w, b) + hk.losses.l2(m, -1.0)),
    ),
    "damping",
    "-1.99",
    "l2",
)
row(
    "infinite l2",
    touching(
        lambda g: (
            setattr(g, "hyper", hk.as_hyper(torch.tensor(1e4))),
            setattr(g, "inner", lambda m, h, b: outer(m, h, b) + hk.losses.l2(m, h().exp())),
        ),
    ),
    "inner loss is infinite",
    "hyper",
    error=hk.NonFiniteError,
)

# Arguments

for value in (-1.0, NAN, INF, "1", None):
    for make in (hk.kfac, hk.ekfac, hk.KFAC, hk.EKFAC, hk.GGN, hk.Hessian):
        row(f"{make.__name__} damping {value!r}", lambda g, m=make, v=value: m(damping=v), f"damping={value!r}", "1e-3")
for value in (1.0, -0.1, NAN, "0.5"):
    row(f"ema {value!r}", lambda g, v=value: hk.kfac(ema=v), f"ema={value!r}", "[0, 1)")
for name in ("refresh_every", "samples"):
    for value in (0, -1, 1.5):
        row(f"{name} {value!r}", lambda g, n=name, v=value: hk.KFAC(**{n: v}), f"{name}={value!r}", "whole number ≥ 1")
for name, value, remedy in (
    ("fisher", "monte-carlo", "mc, type-2, empirical"),
    ("sharing", "flatten", "expand, reduce"),
    ("fallback", "none", "diagonal, identity, zero"),
    ("split", "half", "'pi', 'plain', 'exact'"),
    ("split", None, "'pi', 'plain', 'exact'"),
    ("seed", -1, "whole number"),
    ("seed", "a", "whole number"),
):
    row(f"{name} {value!r}", lambda g, n=name, v=value: hk.KFAC(**{n: v}), f"{name}={value!r}", remedy)
row("cross", lambda g: hk.kfac(cross="backward"), "cross='backward'", "auto, reverse, forward or difference")
for value in (0.0, -1e-3, NAN, INF, "1"):
    row(
        f"radius {value!r}",
        lambda g, v=value: hk.Implicit(hk.Identity(), hk.Direct(), radius=v),
        f"radius={value!r}",
        "positive",
    )
    row(f"alpha {value!r}", lambda g, v=value: hk.sama(alpha=v), f"={value!r}", "positive")
for value in (0.0, -1.0, NAN, INF, "1"):
    row(f"scale {value!r}", lambda g, v=value: hk.identity(v), f"scale={value!r}", "positive")
row("CG iterations", lambda g: hk.cg(0), "iterations is 0", "at least 1")
row("CG tolerance", lambda g: hk.cg(3, tolerance=2.0), "tolerance is 2.0", "1e-6")
row("Neumann terms", lambda g: hk.neumann(-1), "terms is -1", "at least 0")
row("Neumann step", lambda g: hk.neumann(step=-0.1), "step is -0.1", "None")
row("gradient descent iterations", lambda g: hk.gradient_descent(0), "iterations is 0", "at least 1")
row("unrolled steps", lambda g: hk.unrolled(0), "steps=0", ">= 1")
row("truncated last", lambda g: hk.truncated(3, 4), "last=4", "between 1 and steps=3", "None")
row(
    "unrolled torch optimizer",
    lambda g: hk.unrolled(2, torch.optim.SGD(g.model.parameters())),
    "optimizer is a SGD",
    "functional",
)
row("unrolled Adam betas", lambda g: Adam(betas=(0.9, 1.0)), "betas=(0.9, 1.0)", "[0, 1)")
row("one-step lr", lambda g: hk.one_step(-0.1), "lr=-0.1", "> 0")
row("SampleWeights count", lambda g: hk.SampleWeights(0), "count=0", "at least 1")
row("SampleWeights squash", lambda g: hk.SampleWeights(3, "relu"), "squash='relu'", "clip, sigmoid or softmax")
row("SampleWeights init", lambda g: hk.SampleWeights(3, "sigmoid", init=1.0), "init=1.0", "between 0 and 1")
row("SampleWeights init clip", lambda g: hk.SampleWeights(3, init=-0.5), "init=-0.5", "[0, 1]")
row("SampleWeights init softmax", lambda g: hk.SampleWeights(3, "softmax", init=0.5), "init=0.5", "None")
row("as_hyper of integers", lambda g: hk.as_hyper(torch.arange(3)), "as_hyper", "floating point", "int64")
row("as_hyper of a list", lambda g: hk.as_hyper([1.0]), "as_hyper", "[1.0]", "torch.tensor")

# Combinations

row("curvature none", lambda g: hk.Implicit(None, hk.Direct()), "curvature", "None", "KFAC")
row("curvature class", lambda g: hk.Implicit(hk.KFAC, hk.Direct()), "curvature", "KFAC", "KFAC()")
row("solver class", lambda g: hk.Implicit(hk.KFAC(), hk.Direct), "solver", "Direct", "Direct()")
row(
    "preconditioner class",
    lambda g: hk.Implicit(hk.GGN(), hk.CG(), preconditioner=hk.KFAC),
    "preconditioner",
    "KFAC",
    "KFAC()",
)
row(
    "warm start for Direct",
    lambda g: hk.Implicit(hk.KFAC(), hk.Direct(), warm_start=True),
    "warm_start=True",
    "Direct",
    "use GradientDescent or CG",
)
row(
    "preconditioner for Direct",
    lambda g: hk.Implicit(hk.KFAC(), hk.Direct(), preconditioner=hk.KFAC()),
    "preconditioner",
    "Direct",
    "use CG",
)
row(
    "Direct with Hessian",
    touching(lambda g: None, lambda: hk.Implicit(hk.Hessian(), hk.Direct())),
    "solver is Direct",
    "HessianOperator",
    "use CG",
)
row(
    "Hessian as preconditioner",
    touching(lambda g: None, lambda: hk.pcg(preconditioner=hk.Hessian())),
    "preconditioner=Hessian",
    "no inverse",
    "KFAC",
)
row("sama of no optimizer", lambda g: hk.sama("adam"), "optimizer='adam'", "torch.optim.Optimizer", "None")
row(
    "sama of another model",
    lambda g: g.run(hk.sama(torch.optim.AdamW(nn.Linear(2, 2).parameters()))),
    "optimizer",
    "0.weight",
    "3 others",
    "trains this model",
)
row(
    "sama of half the model",
    lambda g: g.run(hk.sama(torch.optim.SGD(g.model[:2].parameters(), lr=0.1))),
    "optimizer",
    "2.weight",
    "freeze",
)
row("state of another curvature", lambda g: hk.cg().load_state_dict(hk.kfac().state_dict()), "keeps no state", "age")
row("state for unrolled", lambda g: hk.unrolled(2).load_state_dict({"calls": 1}), "calls", "another method")


@pytest.mark.parametrize("name", list(TABLE))
def test_bad_input_is_named(name: str) -> None:
    spoil, error, fragments = TABLE[name]
    given = Given()
    with pytest.raises(error) as caught:
        spoil(given)
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{missing} not in: {message}"
    hypers = list(given.hyper.parameters()) if isinstance(given.hyper, nn.Module) else []
    assert all(p.grad is None for p in hypers)


@pytest.mark.parametrize(
    "method",
    [hk.kfac, hk.ekfac, hk.cg, hk.pcg, hk.neumann, hk.gradient_descent, hk.identity, hk.sama, lambda: hk.one_step(0.1)],
)
def test_the_good_problem_is_good(method: Any) -> None:
    assert Given().run(method()).outer_loss > 0


def test_sama_says_when_the_gradients_it_needs_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solution, "_warned", set())
    given = Given()
    optimizer = torch.optim.AdamW(given.model.parameters())
    given.run(hk.sama(optimizer))  # before the first step there is nothing to miss
    given.outer(given.model, None, given.held).backward()
    optimizer.step()
    given.run(hk.sama(optimizer))
    given.model.zero_grad()
    with pytest.warns(hk.HyperkronWarning, match="before zero_grad"):
        given.run(hk.sama(optimizer))
