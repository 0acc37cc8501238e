"""Rows for ``test_bad_input.py``: parts that do not go together."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hyperkron as hk
from spoiling import NAN, Given, Spoil, Table, outer, touching

TABLE = Table()
row = TABLE.row

row("curvature none", lambda g: hk.Implicit(None, hk.solvers.Direct()), "curvature", "None", "KFAC")
row("curvature class", lambda g: hk.Implicit(hk.curvature.KFAC, hk.solvers.Direct()), "curvature", "KFAC", "KFAC()")
row("solver class", lambda g: hk.Implicit(hk.curvature.KFAC(), hk.solvers.Direct), "solver", "Direct", "Direct()")
row(
    "preconditioner class",
    lambda g: hk.Implicit(hk.curvature.GGN(), hk.solvers.CG(), preconditioner=hk.curvature.KFAC),
    "preconditioner",
    "KFAC",
    "KFAC()",
)
row(
    "warm start for Direct",
    lambda g: hk.Implicit(hk.curvature.KFAC(), hk.solvers.Direct(), warm_start=True),
    "warm_start=True",
    "Direct",
    "use GradientDescent or CG",
)
row(
    "preconditioner for Direct",
    lambda g: hk.Implicit(hk.curvature.KFAC(), hk.solvers.Direct(), preconditioner=hk.curvature.KFAC()),
    "preconditioner",
    "Direct",
    "use CG or GradientDescent",
)
row(
    "preconditioner for Neumann",
    lambda g: hk.Implicit(hk.curvature.GGN(), hk.solvers.Neumann(), preconditioner=hk.curvature.KFAC()),
    "solver=Neumann takes no preconditioner",
    "use CG or GradientDescent",
)
row(
    "preconditioner class for gradient descent",
    lambda g: hk.gradient_descent(preconditioner=hk.curvature.KFAC),
    "preconditioner",
    "KFAC",
    "KFAC()",
)
row(
    "graph with preconditioned gradient descent",
    lambda g: hk.gradient_descent(step=0.1, preconditioner=hk.curvature.KFAC(), graph=True),
    "graph=True",
    "preconditioner=KFAC",
    "graph=False",
)
row(
    "Direct with Hessian",
    touching(lambda g: None, lambda: hk.Implicit(hk.curvature.Hessian(), hk.solvers.Direct())),
    "solver is Direct",
    "HessianOperator",
    "use CG",
)
row(
    "Hessian as preconditioner",
    touching(lambda g: None, lambda: hk.pcg(preconditioner=hk.curvature.Hessian())),
    "preconditioner=Hessian",
    "no inverse",
    "KFAC",
)
row(
    "GGN as preconditioner of gradient descent",
    touching(lambda g: None, lambda: hk.gradient_descent(preconditioner=hk.curvature.GGN())),
    "preconditioner=GGN",
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

# What hyperkron.fit is given


def fitted(**changes: Any) -> Spoil:
    """A short run of a good problem, with some of its arguments changed."""

    def spoil(given: Given) -> Any:
        usual = {"problem": given.problem, "model": given.model, "hyper": given.hyper, "steps": 1}
        usual |= {"inner_data": (given.x, given.y), "outer_data": given.held, "algorithm": hk.AID(hk.kfac(1e-2), 1)}
        return hk.fit(**{**usual, **{name: value(given) for name, value in changes.items()}})

    return spoil


def pairs(given: Given) -> TensorDataset:
    return TensorDataset(given.x, given.y)


row("fit of swapped arguments", fitted(problem=lambda g: g.model, model=lambda g: g.problem), "problem is a Sequential")
row(
    "fit of swapped modules",
    fitted(model=lambda g: g.hyper, hyper=lambda g: g.model),
    "index does not fit",
    "give whole numbers",
)
row(
    "fit of a bare hypergradient",
    fitted(algorithm=lambda g: hk.kfac(0.1)),
    "Implicit(KFAC(damping=0.1",
    "hyperkron.AID(",
)
row("fit of no inner batch", fitted(inner_data=lambda g: None), "inner failed on a batch that is None", "inner_data")
row("fit of a dataset", fitted(inner_data=pairs), "inner_data is a TensorDataset", "pass a DataLoader")
row(
    "fit of a loader without batches",
    fitted(inner_data=lambda g: DataLoader(pairs(g), batch_size=7, drop_last=True)),
    "inner_data (DataLoader) gave no batch",
    "drop_last=True",
)
row(
    "fit of a float loss",
    fitted(problem=lambda g: hk.BilevelProblem(lambda m, w, b: 1.0, g.outer)),
    "inner did not return a loss: loss is a float (1.0)",
    "scalar tensor",
)
row(
    "fit of another optimizer",
    fitted(inner_optimizer=lambda g: torch.optim.SGD(g.model[2].parameters(), lr=0.1)),
    "inner_optimizer does not hold 0.weight (and 1 other);",
    "freeze",
)
row(
    "fit of spoilt rows",
    fitted(inner_data=lambda g: (torch.full_like(g.x, NAN), g.y)),
    "inner_batch[0] holds 24 nan",
    "remove or repair them, and restore the parameters",
    error=hk.NonFiniteError,
)
row(
    "fit with a bare callback",
    fitted(callbacks=lambda g: hk.training.Callback()),
    "callbacks is a Callback",
    "callbacks=[",
)
for value in ("a", 1.5, -1):
    row(f"fit with seed {value!r}", fitted(seed=lambda g, v=value: v), f"seed={value!r}", "None sets none")
row("fit with a time as clock", fitted(clock=lambda g: 0.0), "clock=0.0 is not callable", "time.perf_counter")
row("fit resumed from True", fitted(resume=lambda g: True), "resume=True is not a path", "resume='runs/first'")
row("fit with a word as projection", fitted(projection=lambda g: "box"), "projection='box'", "Box(0.0, 1.0)")

# Objectives, batches and indices

row(
    "inner of two arguments",
    lambda g: hk.BilevelProblem(lambda model, batch: None, outer),
    "(model, batch) cannot be called as inner(model, hyper, batch)",
    "too many positional arguments",
)
row(
    "a loader as batch",
    lambda g: hk.kfac().backward(g.problem, g.model, g.hyper, DataLoader(pairs(g), batch_size=1), g.held),
    "inner_batch is a DataLoader",
    "next(iter(loader))",
)
row("weights of no index", lambda g: g.hyper(None), "(it is None)", "give whole numbers from 0")
row(
    "attribute by a loss of three arguments",
    lambda g: hk.attribute(g.inner, g.model, (g.x, g.y), (g.x, g.y)),
    "cannot be called as loss(model, batch)",
)
row(
    "attribute with query_loss 0",
    lambda g: hk.attribute(lambda m, b: outer(m, None, b), g.model, (g.x, g.y), (g.x, g.y), query_loss=0),
    "query_loss=0 is not callable",
)
row(
    "attribute into a number",
    lambda g: hk.attribute(lambda m, b: outer(m, None, b), g.model, (g.x, g.y), (g.x, g.y), out=3),
    "out=3 is not a path",
)
row(
    "attribute of swapped arguments",
    lambda g: hk.attribute(g.model, g.inner, (g.x, g.y), (g.x, g.y)),
    "model is a function, not a torch.nn.Module",
    "pass the network itself",
)
for name, value in (("label_smoothing", None), ("label_smoothing", 1.5), ("ignore_index", None), ("ignore_index", 1.5)):
    row(
        f"{name} {value!r}",
        lambda g, n=name, v=value: hk.losses.cross_entropy(g.model(g.x), g.y, **{n: v}),
        f"{name}={value!r}",
        "must be a",
    )
