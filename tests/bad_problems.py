"""Rows for ``test_bad_input.py``: tensors, batches, θ, λ and objectives that are spoilt."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.hypergradient.steps import SGD
from spoiling import INF, C, D, N, Table, inner, outer, poison, scalar_inner, setting, touching

TABLE = Table()
row = TABLE.row


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
    "model of another dtype than everything else",
    touching(lambda g: g.model.double()),
    "inner_batch[0] is torch.float32",
    "model is torch.float64",
    ".to(torch.float64)",
)
row(
    "no outer batch",
    touching(lambda g: setattr(g, "held", None)),
    "outer failed on a batch that is None",
    "give outer_data",
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
    "the slope of the inner loss along v is nan",
    "model parameter 2.weight reaches",
    "lower the inner learning rate",
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
    "a computed tensor among the parameters",
    touching(lambda g: g.model[0]._parameters.update(bias=g.model[0].bias * 1.0)),
    "model parameter 0.bias was computed from other tensors",
    "put an nn.Parameter there",
)
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
    touching(lambda g: setattr(g, "inner", scalar_inner), lambda: hk.cg(curvature=hk.curvature.GGN())),
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
