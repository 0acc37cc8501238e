"""Rows for ``test_bad_input.py``: what KFAC refuses, and arguments out of range."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.hypergradient.steps import SGD, Adam
from spoiling import INF, NAN, C, D, N, Table, inner, outer, touching

TABLE = Table()
row = TABLE.row


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


# KFAC's own refusals

for fisher in ("mc", "rademacher", "type-2", "empirical"):
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
            lambda: hk.Implicit(hk.curvature.KFAC(strict=True), hk.solvers.Direct()),
        ),
        "strict=True",
        named,
        "strict=False",
        error=hk.solution.CoverageError,
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
    for make in (hk.kfac, hk.ekfac, hk.curvature.KFAC, hk.curvature.EKFAC, hk.curvature.GGN, hk.curvature.Hessian):
        row(f"{make.__name__} damping {value!r}", lambda g, m=make, v=value: m(damping=v), f"damping={value!r}", "1e-3")
for value in (1.0, -0.1, NAN, "0.5"):
    row(f"ema {value!r}", lambda g, v=value: hk.kfac(ema=v), f"ema={value!r}", "[0, 1)")
for name in ("refresh_every", "samples"):
    for value in (0, -1, 1.5):
        row(
            f"{name} {value!r}",
            lambda g, n=name, v=value: hk.curvature.KFAC(**{n: v}),
            f"{name}={value!r}",
            "whole number ≥ 1",
        )
for name, value, remedy in (
    ("fisher", "monte-carlo", "mc, rademacher, type-2 or empirical"),
    ("sharing", "flatten", "expand or reduce"),
    ("fallback", "none", "diagonal, identity or zero"),
    ("split", "half", "'pi', 'plain', 'exact'"),
    ("split", None, "'pi', 'plain', 'exact'"),
    ("seed", -1, "whole number"),
    ("seed", "a", "whole number"),
):
    row(f"{name} {value!r}", lambda g, n=name, v=value: hk.curvature.KFAC(**{n: v}), f"{name}={value!r}", remedy)
row("cross", lambda g: hk.kfac(cross="backward"), "cross='backward'", "auto, reverse, forward or difference")
for value in (0.0, -1e-3, NAN, INF, "1"):
    row(
        f"radius {value!r}",
        lambda g, v=value: hk.Implicit(hk.curvature.Identity(), hk.solvers.Direct(), radius=v),
        f"radius={value!r}",
        "positive",
    )
    row(f"alpha {value!r}", lambda g, v=value: hk.sama(alpha=v), f"alpha={value!r}", "positive")
for value in (0.0, -1.0, NAN, INF, "1"):
    row(f"scale {value!r}", lambda g, v=value: hk.identity(v), f"scale={value!r}", "positive")
row("CG iterations", lambda g: hk.cg(0), "iterations=0", "whole number ≥ 1")
row("CG tolerance", lambda g: hk.cg(3, tolerance=2.0), "tolerance=2.0", "1e-6")
row("Neumann terms", lambda g: hk.neumann(-1), "terms=-1", "whole number ≥ 0")
row("Neumann step", lambda g: hk.neumann(step=-0.1), "step=-0.1", "None")
row("gradient descent iterations", lambda g: hk.gradient_descent(0), "iterations=0", "whole number ≥ 1")
row("unrolled steps", lambda g: hk.unrolled(0), "steps=0", "≥ 1")
row("truncated last", lambda g: hk.truncated(3, 4), "last=4", "between 1 and steps=3", "None")
row(
    "unrolled torch optimizer",
    lambda g: hk.unrolled(2, torch.optim.SGD(g.model.parameters())),
    "optimizer is a SGD",
    "functional",
)
row("unrolled Adam betas", lambda g: Adam(betas=(0.9, 1.0)), "betas=(0.9, 1.0)", "[0, 1)")
row("one-step lr", lambda g: hk.one_step(-0.1), "lr=-0.1", "positive")
row("SampleWeights count", lambda g: hk.SampleWeights(0), "count=0", "≥ 1", "training examples")
row("SampleWeights squash", lambda g: hk.SampleWeights(3, "relu"), "squash='relu'", "clip, sigmoid or softmax")
row("SampleWeights init", lambda g: hk.SampleWeights(3, "sigmoid", init=1.0), "init=1.0", "between 0 and 1")
row("SampleWeights init clip", lambda g: hk.SampleWeights(3, init=-0.5), "init=-0.5", "[0, 1]")
row("SampleWeights init softmax", lambda g: hk.SampleWeights(3, "softmax", init=0.5), "init=0.5", "None")
row("as_hyper of integers", lambda g: hk.as_hyper(torch.arange(3)), "as_hyper", "floating point", "int64")
row("as_hyper of a list", lambda g: hk.as_hyper([1.0]), "as_hyper", "[1.0]", "torch.tensor")

for value in ([], 0, "KFAC"):
    for make in (hk.cg, hk.pcg, hk.neumann, hk.gradient_descent):
        row(
            f"{make.__name__} curvature {value!r}",
            lambda g, m=make, v=value: m(curvature=v),
            f"curvature={value!r} is not a curvature",
        )
row("pcg preconditioner", lambda g: hk.pcg(preconditioner=0), "preconditioner=0 is not a curvature")
row("SampleWeights group", lambda g: hk.SampleWeights(3, group=2), "group=2", "DataParallel(problem).group")
row("DomainWeights init", lambda g: hk.DomainWeights(2, {"a": 1}), "init={'a': 1} is not a tensor")
row("WeightDecay model", lambda g: hk.WeightDecay("net"), "model='net' is not a torch.nn.Module", "the network itself")
row("labels of nothing", lambda g: hk.LabelCorrection(None, 2), "labels=None is not a tensor")
row("no classes", lambda g: hk.LabelCorrection(g.y, None), "classes=None", "whole number ≥ 2")
row("confidence", lambda g: hk.LabelCorrection(g.y, 3, "high"), "confidence='high'", "more than 1/classes")
row("box low", lambda g: hk.Box("0", 1), "low='0'", "-inf is no bound")
row("box high", lambda g: hk.Box(0.0, None), "high=None", "low ≤ high")
row("box of no point", lambda g: hk.Box(1.0, 0.0), "high=0.0", "low ≤ high")
for value in (None, 3, ["runs"]):
    for make in (hk.Checkpoint, hk.training.TensorBoard):
        row(
            f"{make.__name__} in {value!r}", lambda g, m=make, v=value: m(v), f"folder={value!r} is not a path", "runs/"
        )
row("files of failures", lambda g: hk.training.SkipFailures(folder=3), "folder=3 is not a path")
row("statuses", lambda g: hk.training.SkipFailures(statuses=hk.Status.DIVERGED), "statuses=", "Status.DIVERGED")
row("alternatives in words", lambda g: hk.CleanConfig(compare="noisy"), "compare='noisy' is not a tuple", "('noisy',)")
row("alternatives of none", lambda g: hk.CleanConfig(compare=None), "compare=None is not a tuple of names")
for name in ("seed", "layers"):
    row(f"clean with {name} None", lambda g, n=name: hk.CleanConfig(**{n: None}), f"{name}=None", "whole number ≥ 0")

for make in (hk.training.Accumulated, hk.training.DataParallel):
    row(f"{make.__name__} of a function", lambda g, m=make: m(inner), "problem is a function", "BilevelProblem(inner")
row("processes by a word", lambda g: hk.training.DataParallel(g.problem, group="x"), "group='x'", "new_group")
for value in (None, [3]):
    row(
        f"advance {value}", lambda g, v=value: hk.training.advance_all(v), f"runs={value} is not a list of runs", "fit("
    )
row("perceptron", lambda g: hk.cleaning.models.mlp(3, 2, hidden=None), "hidden[0]=None must be a whole number ≥ 1")
row(
    "inner loop of a tensor",
    lambda g: hk.training.InnerLoop(g.problem, g.model, g.x, torch.optim.SGD(g.model.parameters(), 0.1)),
    "hyper is a Tensor, not a torch.nn.Module",
)
for value in ((torch.ones(3), torch.ones(3)), {"x": torch.ones(3)}, None, torch.ones(())):
    row(
        f"examples in a {type(value).__name__}",
        lambda g, v=value: hk.algorithms.Examples(v, batch_size=2),
        f"tensors are {type(value).__name__}; pass",
        "Examples(x, y",
    )
row(
    "order of examples", lambda g: hk.algorithms.Examples(g.x, batch_size=2, seed=None), "seed=None", "whole number ≥ 0"
)
row("one beta", lambda g: Adam(betas=0.9), "betas=0.9", "two numbers in [0, 1)")
row("dampening of nothing", lambda g: SGD(0.1, dampening=None), "dampening=None", "finite number ≥ 0")
row(
    "inner loop by a word",
    lambda g: hk.training.InnerLoop(g.problem, g.model, g.hyper, "sgd"),
    "optimizer='sgd' is not a torch",
)
for label, options, words in (
    ("zero", {"damping": 0.0}, ("damping=0.0", "1e-3 is a common choice")),
    ("a number as list", {"dampings": 0.1}, ("dampings=0.1", "a list such as")),
    ("a negative one", {"dampings": [0.1, -1.0]}, ("dampings=-1.0", "to try for hk.kfac")),
    ("methods in a list", {"methods": [hk.cg()]}, ("methods=[Implicit", "a dictionary such as")),
    ("a word as method", {"methods": {"mine": "cg"}}, ("methods has 'mine': 'cg'", "hk.cg(20)")),
    ("one more batch", {"more": [torch.zeros(2)]}, ("more has tensor", "pairs (inner_batch, outer_batch)")),
    ("more is a number", {"more": 3}, ("more=3", "zip(train, trusted)")),
):
    row(
        f"diagnose, {label}",
        lambda g, o=options: hk.diagnose(g.problem, g.model, g.hyper, (g.x, g.y), g.held, **o),
        *words,
    )
row("range from a text", lambda g: hk.sweeps.Range("0", 1), "low='0'", "low < high is needed")
row("range to nothing", lambda g: hk.sweeps.Range(0, None), "high=None", "low < high is needed")
row("sweep of no function", lambda g: hk.sweeps.sweep(3, {}), "function=3 is not callable", "takes a trial")
row("sweep with a text as seed", lambda g: hk.sweeps.sweep(len, {}, seed="1"), "seed='1'", "whole number ≥ 0")
for label, make in (
    ("kfac", lambda g, seed: hk.kfac(seed=seed)),
    ("Examples", lambda g, seed: hk.algorithms.Examples(g.x, batch_size=2, seed=seed)),
    ("an algorithm", lambda g, seed: hk.AID(hk.kfac(), seed=seed)),
):
    row(
        f"seed of {label} beyond 64 bits",
        lambda g, m=make: m(g, 2**64),
        "seed=18446744073709551616 must be a whole number ≥ 0 and below 2**64.",
    )
row("seed of clean", lambda g: hk.CleanConfig(seed=2**63), "seed=9223372036854775808", "≥ 0 and below 2**63.")
