"""Writes docs/algorithms.md from the code: ``python docs/make_algorithms_table.py``."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.algorithms import Algorithm

TARGET = Path(__file__).with_name("algorithms.md")

INTRODUCTION = """\
# Algorithms

<!-- Written by docs/make_algorithms_table.py from the code; do not edit. -->

f is the outer objective, g the inner one, b = ∂_θ f, H = ∂²_θθ g, and X(v) = ∂_λ⟨∂_θ g, v⟩ the cross term. *Calls*
are the evaluations in one step (one update of λ): ∂f and ∂g are gradients, Hv is a Hessian product. *Counted* is
the number of evaluations of g and f in the second step with default arguments (AID: `cg(3)`; several products can
share one evaluation), measured by this script. *Memory* is what is kept in addition to θ, λ and their optimizers.
*Accuracy* is what is proven for a strongly convex inner problem; `tests/algorithms/test_accuracy.py` checks it on
quadratics with a known solution.

Every algorithm runs in `hyperkron.fit`, with any projection of λ and any `torch.optim` optimizer on both levels in
place of its own `inner_rate` and `outer_rate`. If `hypergradient` is an argument, it accepts any curvature and
solver: `AID(kfac())`, `AmIGO(hypergradient=kfac())`, `MRBO(kfac())`, `StocBiO(hypergradient=kfac())`,
`TGDA(ekfac())`. It measures A on the inner batch, or on separate batches: `fit(..., curvature_data=...)`.
"""

REST = """
## Where they converge

Some algorithms converge to the optimum λ*. Others are biased by design: they solve a slightly different problem. On
the quadratic test problems the limit of each algorithm is known in closed form, and each must reach it to a
relative error of 1e-6 (SRBA 1e-4), with step sizes that follow from the problem's constants by one rule. *Bias* is
the distance of the limit from λ*, relative to ‖λ*‖, with the constants of the case. Most of these are chosen to
make the bias visible and are not the defaults. The order in which it shrinks is tested too: 1/penalty for F2SA,
PBGD, ScaleBiO and MEHA, margin and 1/r for BVFSM, ϵ^(1/3) for BOME, (1 − ηµ)^K for a series of K terms and for K
unrolled steps, δ for damping, √δ where KFAC splits it between its factors. The random estimates of TTSA, BSA,
SUSTAIN and PZOBO are replaced by their expectation here.
"""


def algorithms() -> list[type[Algorithm]]:
    """All algorithm classes, in alphabetical order of their names."""
    found = [getattr(hk.algorithms, name) for name in hk.algorithms.__all__]
    classes = [x for x in found if isinstance(x, type) and issubclass(x, Algorithm) and not inspect.isabstract(x)]
    return sorted(classes, key=lambda x: x.facts.name.lower())


def presets() -> list[Any]:
    """The functions that name a configuration."""
    found = [getattr(hk.algorithms, name) for name in hk.algorithms.__all__ if name.startswith("aid_")]
    return sorted(found, key=lambda x: x.__name__)


def arguments(algorithm: type[Algorithm]) -> str:
    """Fields with their defaults, the common ``seed`` left out."""
    shown = []
    for field in dataclasses.fields(algorithm):
        if field.name == "seed":
            continue
        if field.default is not dataclasses.MISSING:
            shown.append(f"`{field.name}={_short(field.default)}`")
        elif field.default_factory is not dataclasses.MISSING:
            shown.append(f"`{field.name}=…`")
        else:
            shown.append(f"`{field.name}`")
    return ", ".join(sorted(shown, key=lambda text: "_rate=" in text))


def _short(value: Any) -> str:
    if isinstance(value, hk.algorithms.Rate):
        return f"Rate({value.scale:.3g}, {value.exponent:.3g})"
    return f"{value:.3g}" if isinstance(value, float) else repr(value)


def counted(algorithm: type[Algorithm]) -> str:
    """Evaluations of g and f in the second step, at default arguments, on a tiny problem."""
    calls = {"g": 0, "f": 0}

    def inner(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
        calls["g"] += 1
        return hk.losses.mse(model(batch[0]), batch[1] * hyper())

    def outer(model: nn.Module, hyper: nn.Module, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
        calls["f"] += 1
        return hk.losses.mse(model(batch[0]), batch[1])

    made = algorithm(hk.cg(3)) if algorithm is hk.AID else algorithm()
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    state = made.init(hk.BilevelProblem(inner, outer), model, hk.as_hyper(torch.ones(1)))
    data = [hk.algorithms.Examples(torch.eye(2).repeat(4, 1), torch.ones(8, 1), batch_size=1) for _ in range(2)]
    batches = hk.algorithms.BatchSources(*data)
    made.step(state, batches)
    calls.update(g=0, f=0)
    made.step(state, batches)
    return f"{calls['g']} g, {calls['f']} f"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def rests() -> list[list[str]]:
    """Every case of the conformance suite: its name, where it rests, and how far from λ* that is."""
    sys.path += [str(TARGET.parent.parent), str(TARGET.parent.parent / "tests")]
    from tests.algorithms.test_accuracy import CASES

    rows = [[name, case.where, "0" if case.where == "λ*" else f"{case.bias:.2g}"] for name, case in CASES.items()]
    return [*rows, ["BSG-1", "∂_λ f = 0, here λ = 0", "1"]]


def page() -> str:
    """The whole page."""
    rows = [
        [
            f"**{c.facts.name}** `{c.__name__}`",
            c.facts.reference,
            c.facts.calls,
            counted(c),
            c.facts.memory,
            c.facts.accuracy,
        ]
        for c in algorithms()
    ]
    when = [[f"`{c.__name__}`", c.facts.use, arguments(c)] for c in algorithms()]
    named = [[f"`{_call(f)}`", _first(f)] for f in presets()]
    parts = [
        INTRODUCTION,
        "## Cost and accuracy\n",
        table(["algorithm", "reference", "calls per step", "counted", "memory", "accuracy"], rows),
        REST,
        table(["case", "converges to", "bias"], rests()),
        "\n## When to use them, and their arguments\n",
        table(["algorithm", "when to use it", "arguments"], when),
        "\n## Named configurations of AID\n",
        table(["function", "what it is"], named),
    ]
    return "\n".join(parts) + "\n"


def _call(function: Any) -> str:
    """The function with its arguments and their defaults, without types."""
    shown = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return f"{function.__name__}{inspect.Signature(shown)}"


def _first(function: Any) -> str:
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    TARGET.write_text(page(), "utf-8")
    print(f"wrote {TARGET}")
