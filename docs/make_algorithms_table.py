"""Writes docs/algorithms.md from the code: ``python docs/make_algorithms_table.py``."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.algorithms import Algorithm

TARGET = Path(__file__).with_name("algorithms.md")

INTRODUCTION = """\
# Algorithms

<!-- Written by docs/make_algorithms_table.py from the code; do not edit. -->

Which algorithm? Start with `AID`; the table ["When to use them"](#when-to-use-them-and-their-arguments) has the others.
To change the algorithm, change one argument:

```python
run = hk.fit(problem, model, weights, hk.AID(hk.kfac(), inner_steps=10), train, validation, steps=1000)
run = hk.fit(problem, model, weights, hk.algorithms.SOBA(), train, validation, steps=1000)
```

Every algorithm runs in `hyperkron.fit`, with any projection of λ and any `torch.optim` optimizer on both levels in
place of its own `inner_rate` and `outer_rate`. If `hypergradient` is an argument, it accepts any curvature and
solver: `AID(kfac())`, `AmIGO(hypergradient=kfac())`, `MRBO(kfac())`, `StocBiO(hypergradient=kfac())`,
`TGDA(ekfac())`. It measures A on the inner batch, or on separate batches: `fit(..., curvature_data=...)`.

Here f is the outer objective, g the inner one, b = ∂_θ f, H = ∂²_θθ g, X(v) = ∂_λ⟨∂_θ g, v⟩ the cross term.

- *Calls* are the evaluations in one step (one update of λ): ∂f and ∂g are gradients, Hv is a Hessian product.
- *Counted* is the number of evaluations of g and f in the second step with default arguments (AID: `cg(3)`),
  measured by this script. Several products can share one evaluation.
- *Memory* is what is kept in addition to θ, λ and their optimizers.
- *Accuracy* is what is proven for a strongly convex inner problem. `tests/algorithms/test_accuracy.py` checks it on
  quadratics with a known solution.
"""

REST = """
## Where they converge

Some algorithms converge to the optimum λ*. Others are biased by design: they solve a slightly different problem. On
the quadratic test problems the limit of each algorithm is known in closed form. A test requires each to reach it to a
relative error of 1e-6 (SRBA 1e-4), with step sizes that follow from the problem's constants by one rule. The random
estimates of TTSA, BSA, SUSTAIN and PZOBO are replaced by their expectation here.

*Bias* is the distance of the limit from λ*, relative to ‖λ*‖, with the constants of the case. Most of these are not
the defaults but make the bias visible. How fast the bias shrinks is tested too:

| algorithm | order of the bias |
| --- | --- |
| F2SA, PBGD, ScaleBiO, MEHA | 1/penalty |
| BVFSM | margin and 1/r |
| BOME | ϵ^(1/3) |
| a series of K terms, K unrolled steps | (1 − ηµ)^K |
| damping | δ; √δ where KFAC splits it between its factors |

The limits:
"""


class Facts(NamedTuple):
    """What the table says about one algorithm, beside what it counts.

    Attributes:
        name: the paper's name for it.
        reference: authors, venue and year.
        calls: oracle calls of one step, in the algorithm's own arguments.
        memory: what is kept beside θ, λ and their optimizers.
        accuracy: what is proven to be reached.
        use: when to choose it.
    """

    name: str
    reference: str
    calls: str
    memory: str
    accuracy: str
    use: str


FACTS = {
    "AID": Facts(
        name="AID",
        reference="Grazzi et al., ICML 2020; Liao et al., AISTATS 2026",
        calls="inner_steps ∂g, one hypergradient (1 ∂f, the solve, 1 X)",
        memory="what the hypergradient keeps (KFAC: the factors)",
        accuracy="the optimum, up to the error of the solve",
        use="the default; with KFAC where the solve must be cheap",
    ),
    "AmIGO": Facts(
        name="AmIGO, AmIGO-KFAC",
        reference="Arbel & Mairal, ICLR 2022",
        calls="inner_steps ∂g, linear_steps Hv, 1 ∂f, 1 X",
        memory="v",
        accuracy="the optimum; with stochastic batches a ball of radius ∝ the rates",
        use="stochastic problems with a trustworthy step size for v; with KFAC, without one",
    ),
    "BOME": Facts(
        name="BOME",
        reference="Liu et al., NeurIPS 2022",
        calls="inner_steps + 2 ∂g, 1 ∂f",
        memory="one more θ, within a step",
        accuracy="the optimum, up to θ̂'s own error (1 − αµ)^T and ϵ^(1/3); q → 0 as t^(−1/4) or faster",
        use="first-order, deterministic or large batches",
    ),
    "BSA": Facts(
        name="BSA",
        reference="Ghadimi & Wang, 2018",
        calls="inner_steps ∂g, 1 ∂f, about terms/2 Hv, 1 X",
        memory="nothing",
        accuracy="the optimum of the series truncated after terms",
        use="for comparison",
    ),
    "BSG1": Facts(
        name="BSG-1",
        reference="Giovannelli, Kent & Vicente, 2021",
        calls="inner_steps + 1 ∂g, 1 ∂f",
        memory="nothing",
        accuracy="exact for a single residual away from the inner minimum; elsewhere it rests where ∂_λ f = 0",
        use="a cheap baseline",
    ),
    "BVFSM": Facts(
        name="BVFSM",
        reference="Liu et al., ICML 2021",
        calls="2·inner_steps + 3 ∂g, inner_steps + 1 ∂f",
        memory="one more θ",
        accuracy="bias ∝ (margin + g_z)/r: small where the inner problem interpolates, else growing as r → 0",
        use="first-order; for comparison",
    ),
    "DARTS": Facts(
        name="DARTS (and MWN)",
        reference="Liu et al., ICLR 2019; Shu et al., NeurIPS 2019",
        calls="2 ∂g, 1 ∂f, 1 X",
        memory="nothing",
        accuracy="the optimum where ξ·H = I; elsewhere biased",
        use="architecture search, meta-learned weighting networks",
    ),
    "F2SA": Facts(
        name="F2SA",
        reference="Kwon et al., ICML 2023",
        calls="2·inner_steps + 2 ∂g, inner_steps + 1 ∂f",
        memory="one more θ with its optimizer",
        accuracy="the optimum as ℓ → ∞; bias O(1/ℓ)",
        use="large models where second derivatives are out of reach",
    ),
    "FSLA": Facts(
        name="FSLA",
        reference="Li, Gu & Huang, AAAI 2022",
        calls="1 ∂g, 1 Hv, 3 ∂f, 2 X",
        memory="v, d_λ and the previous point",
        accuracy="the optimum; stochastic rate T^(−1/2)",
        use="stochastic problems, single-loop",
    ),
    "InnerOnly": Facts(
        name="InnerOnly",
        reference="plain training",
        calls="inner_steps ∂g",
        memory="nothing",
        accuracy="none: λ stays",
        use="baselines, warm starts, and models at a learned λ",
    ),
    "MEHA": Facts(
        name="MEHA",
        reference="Liu et al., ICML 2024",
        calls="4 ∂g, 2 ∂f",
        memory="one more θ",
        accuracy="the optimum as c → ∞; bias O(1/c), c growing as t^(1/4)",
        use="first-order where the inner problem is not convex",
    ),
    "MRBO": Facts(
        name="MRBO, MRBO-KFAC",
        reference="Yang, Ji & Liang, NeurIPS 2021",
        calls="2 ∂g, 2 hypergradients",
        memory="4 vectors: d_θ, d_λ and the previous point",
        accuracy="the optimum, up to the error of h; stochastic rate T^(−2/3)",
        use="noisy hypergradients, single-loop",
    ),
    "PBGD": Facts(
        name="PBGD",
        reference="Shen & Chen, ICML 2023",
        calls="inner_steps + 2 ∂g, 1 ∂f",
        memory="one more θ with its optimizer",
        accuracy="the optimum up to O(1/penalty)",
        use="first-order, one simple joint step",
    ),
    "PZOBO": Facts(
        name="PZOBO",
        reference="Sow, Ji & Liang, NeurIPS 2022",
        calls="(samples + 1)·inner_steps ∂g, 1 ∂f",
        memory="one more θ",
        accuracy="the optimum, up to the variance of the estimate ∝ dim λ/samples",
        use="few hyperparameters, inner problems that cannot be differentiated twice",
    ),
    "SABA": Facts(
        name="SABA",
        reference="Dagréou et al., NeurIPS 2022",
        calls="1 ∂g, 1 Hv, 1 ∂f, 1 X (one inner graph)",
        memory="v and tables of batches × (3·dim θ + 2·dim λ)",
        accuracy="the optimum of the finite sum, linearly, at constant rates",
        use="finite sums with small models",
    ),
    "SAMA": Facts(
        name="SAMA",
        reference="Choe et al., NeurIPS 2023",
        calls="inner_steps ∂g, 1 ∂f, 2 ∂_λ g",
        memory="nothing",
        accuracy="the optimum where H is a multiple of I; elsewhere biased by ‖H⁻¹ − lr·D‖",
        use="very large models where even KFAC's factors do not fit",
    ),
    "ScaleBiO": Facts(
        name="ScaleBiO",
        reference="Pan et al., 2024",
        calls="2 ∂g and ∂_λ g, 1 ∂f",
        memory="one more θ with its optimizer",
        accuracy="the optimum up to O(1/α)",
        use="reweighting data of language models",
    ),
    "SOBA": Facts(
        name="SOBA",
        reference="Dagréou et al., NeurIPS 2022",
        calls="1 ∂g, 1 Hv, 1 ∂f, 1 X (one inner graph)",
        memory="v",
        accuracy="the optimum; stochastic rate T^(−1/2)",
        use="stochastic problems; the simplest single-loop method",
    ),
    "SRBA": Facts(
        name="SRBA",
        reference="Dagréou et al., AISTATS 2024",
        calls="2 × (1 ∂g, 1 Hv, 1 ∂f, 1 X); a full pass every period steps",
        memory="v, 3 directions and the previous point",
        accuracy="the optimum of the finite sum, at constant rates; optimal oracle complexity",
        use="finite sums where SABA's tables do not fit",
    ),
    "StocBiO": Facts(
        name="stocBiO, stocBiO-KFAC",
        reference="Ji, Yang & Liang, ICML 2021",
        calls="inner_steps ∂g, terms Hv, 1 ∂f, 1 X",
        memory="nothing; with KFAC its factors",
        accuracy="the optimum, up to the series' tail (1 − ηµ)^terms and the noise of the batches",
        use="stochastic problems with well-conditioned inner Hessians",
    ),
    "SUSTAIN": Facts(
        name="SUSTAIN",
        reference="Khanduri et al., NeurIPS 2021",
        calls="2 ∂g, 2 ∂f, about terms Hv, 2 X",
        memory="4 vectors: d_θ, d_λ and the previous point",
        accuracy="the optimum of the series truncated after terms, in expectation",
        use="for comparison; MRBO has less variance",
    ),
    "T1T2": Facts(
        name="T1–T2",
        reference="Luketina et al., ICML 2016",
        calls="1 ∂g, 1 ∂f, 1 X",
        memory="nothing",
        accuracy="the optimum where scale·H = I; elsewhere biased",
        use="a first baseline",
    ),
    "TGDA": Facts(
        name="TGDA",
        reference="Lu, Kamath & Yu, TMLR 2022",
        calls="one hypergradient (1 ∂f, the solve, 1 X), inner_steps ∂g",
        memory="what the hypergradient keeps",
        accuracy="the optimum, up to the error of the solve",
        use="attacker–learner games: poisoning, unlearnable examples",
    ),
    "TTSA": Facts(
        name="TTSA",
        reference="Hong et al., SIAM J. Optim. 2023",
        calls="1 ∂g, 1 ∂f, about terms/2 Hv, 1 X",
        memory="nothing",
        accuracy="the optimum of the series truncated after terms; rate T^(−2/5)",
        use="for comparison; slow",
    ),
    "Unroll": Facts(
        name="Unrolled, truncated",
        reference="Maclaurin et al., ICML 2015; Franceschi et al., ICML 2017; Shaban et al., AISTATS 2019",
        calls="about 3·inner_steps ∂g, 1 ∂f, last (or all) step derivatives",
        memory="inner_steps/checkpoint_every copies of θ and the optimizer's state",
        accuracy="the optimum as inner_steps grows; error (1 − ηµ)^K",
        use="few inner steps whose path matters: short horizons, learned optimizers",
    ),
    "VRBO": Facts(
        name="VRBO",
        reference="Yang, Ji & Liang, NeurIPS 2021",
        calls="2·inner_steps × (∂g, hypergradient); a full pass every period steps",
        memory="d_θ, d_λ and the previous point",
        accuracy="the optimum of the finite sum, up to the error of h",
        use="for comparison; expensive steps",
    ),
}


def algorithms() -> list[type[Algorithm]]:
    """All algorithm classes, in alphabetical order of their names."""
    found = [getattr(hk.algorithms, name) for name in hk.algorithms.__all__]
    classes = [x for x in found if isinstance(x, type) and issubclass(x, Algorithm) and not inspect.isabstract(x)]
    return sorted(classes, key=lambda x: FACTS[x.__name__].name.lower())


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
    known = [(c, FACTS[c.__name__]) for c in algorithms()]
    rows = [[f"**{x.name}** `{c.__name__}`", x.reference, x.calls, counted(c), x.memory, x.accuracy] for c, x in known]
    when = [[f"`{c.__name__}`", x.use, arguments(c)] for c, x in known]
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
