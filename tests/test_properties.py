"""What must hold for any network, batch and weights: hypothesis draws them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, Mean, Weights, make
from hyperkron import trees
from hyperkron.curvature.kfac.factors import dense as as_matrix

ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.SiLU, nn.Identity]


@dataclass
class Recipe:
    """A small network with data, small enough for dense matrices."""

    kind: str
    widths: list[int]
    activation: type[nn.Module]
    bias: bool
    count: int
    loss: str
    weights: list[float]
    seed: int
    norm: bool

    def build(self) -> Case:
        torch.manual_seed(self.seed)
        layers: list[nn.Module] = []
        for i, (a, b) in enumerate(itertools.pairwise(self.widths)):
            last = i == len(self.widths) - 2
            if self.kind == "conv" and not last:
                layers += [nn.Conv1d(a, b, 2, padding=1, bias=self.bias), self.activation()]
            else:
                layers += [Mean(True)] if self.kind == "conv" and last else []
                layers += [nn.Linear(a, b, bias=self.bias)] + ([] if last else [self.activation()])
            if self.norm and not last:
                layers.append(nn.GroupNorm(1, b) if self.kind == "conv" else nn.LayerNorm(b))
        if self.kind == "pooled tokens":
            layers.append(Mean())
        shape = {"mlp": (), "tokens": (2,), "pooled tokens": (3,)}.get(self.kind)
        shape = (self.widths[0], 3) if shape is None else (*shape, self.widths[0])
        hyper = Weights(torch.tensor(self.weights, dtype=DOUBLE))
        return make(nn.Sequential(*layers), shape, loss=self.loss, count=self.count, hyper=hyper, seed=self.seed)


@st.composite
def recipes(draw: st.DrawFn, norm: bool = True) -> Recipe:
    count = draw(st.integers(1, 4))
    weight = st.one_of(st.just(0.0), st.floats(0.05, 2.0))
    return Recipe(
        kind=draw(st.sampled_from(["mlp", "conv", "tokens", "pooled tokens"])),
        widths=draw(st.lists(st.integers(1, 4), min_size=2, max_size=4)),
        activation=draw(st.sampled_from(ACTIVATIONS)),
        bias=draw(st.booleans()),
        count=count,
        loss=draw(st.sampled_from(["mse", "cross_entropy", "binary"])),
        weights=draw(st.lists(weight, min_size=count, max_size=count)),
        seed=draw(st.integers(0, 2**16)),
        norm=norm and draw(st.booleans()),
    )


fishers = st.sampled_from(["type-2", "mc", "empirical"])
sharings = st.sampled_from(["expand", "reduce"])
curvatures = st.one_of(
    st.builds(
        hk.curvature.KFAC,
        st.just(0.1),
        fisher=fishers,
        sharing=sharings,
        split=st.sampled_from(["pi", "plain", "exact"]),
    ),
    st.builds(hk.curvature.EKFAC, st.just(0.1), fisher=fishers, sharing=sharings),
)


def close(found: Tensor, wanted: Tensor, tolerance: float = 1e-9) -> bool:
    return float((found - wanted).norm()) <= tolerance * (1.0 + float(wanted.norm()))


@given(recipes(), curvatures)
def test_kronecker_operators_are_symmetric_positive_definite_and_inverted(
    recipe: Recipe, curvature: hk.curvature.KFAC | hk.curvature.EKFAC
) -> None:
    case = recipe.build()
    with case.point() as point:
        operator = curvature.operator(point, curvature.init())
        matrix = oracles.dense(operator.matvec, case.params)
        inverse = oracles.dense(operator.solve, case.params)
    eye = torch.eye(len(matrix), dtype=DOUBLE)
    assert close(matrix, matrix.T)
    assert close(matrix @ inverse, eye)
    lowest = float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0])
    assert lowest >= 0.1 * (1 - 1e-9)  # at least the damping, also where it is split over the factors


@given(recipes())
def test_products_are_symmetric_and_the_ggn_is_positive(recipe: Recipe) -> None:
    case = recipe.build()
    with case.point() as point:
        hessian = oracles.dense(
            hk.curvature.Hessian(0.1).operator(point, hk.curvature.Hessian().init()).matvec, case.params
        )
        ggn = oracles.dense(hk.curvature.GGN(0.1).operator(point, hk.curvature.GGN().init()).matvec, case.params)
    eye = torch.eye(len(ggn), dtype=DOUBLE)
    assert close(hessian, hessian.T)
    assert close(ggn, ggn.T)
    assert float(torch.linalg.eigvalsh((ggn + ggn.T) / 2)[0]) >= 0.1 - 1e-9 * (1 + float(ggn.norm()))
    assert close(ggn, case.ggn() + 0.1 * eye)
    assert close(hessian, case.hessian() + 0.1 * eye)


@given(recipes(), fishers, sharings, st.integers(1, 3))
def test_factors_equal_the_loops(recipe: Recipe, fisher: str, sharing: str, samples: int) -> None:
    case = recipe.build()
    found = case.measured(fisher, sharing, samples, seed=5)
    wanted = case.slow_factors(fisher, sharing, samples, seed=5)
    assert set(found.a) == set(wanted)
    for name, (a, b) in wanted.items():
        assert close(as_matrix(found.a[name]), a, 1e-12)
        assert close(as_matrix(found.b[name]), b, 1e-12)


@given(recipes(), curvatures, st.floats(-3.0, 3.0))
def test_solutions_are_linear_in_the_right_hand_side(
    recipe: Recipe, curvature: hk.curvature.KFAC | hk.curvature.EKFAC, factor: float
) -> None:
    case = recipe.build()
    generator = torch.Generator().manual_seed(recipe.seed)
    b, c = (trees.normal_like(case.params, generator) for _ in range(2))
    with case.point() as point:
        operator = curvature.operator(point, curvature.init())
        whole = operator.solve(trees.add(c, b, alpha=factor))
        parts = trees.add(operator.solve(c), operator.solve(b), alpha=factor)
    assert close(oracles.flat(whole), oracles.flat(parts))


@given(recipes(), st.randoms(use_true_random=False))
def test_hypergradients_follow_a_permutation_of_the_batch(recipe: Recipe, random: object) -> None:
    order = list(range(recipe.count))
    random.shuffle(order)  # type: ignore[attr-defined]
    case = recipe.build()
    x, y = case.inner_batch
    for curvature, solver in (
        (hk.curvature.KFAC(0.1, fisher="type-2"), hk.solvers.Direct()),
        (hk.curvature.EKFAC(0.1, fisher="type-2"), hk.solvers.Direct()),
        (hk.curvature.GGN(0.1), hk.solvers.CG(50, 1e-10)),
    ):
        made = lambda c=curvature, s=solver: hk.Implicit(c, s, cross="reverse")  # noqa: E731
        wanted = made().compute(*case.arguments).grads["weight"]
        assert bool(torch.isfinite(wanted).all())
        permuted = Case(
            case.model,
            Weights(case.hyper.weight[order]),  # type: ignore[index]
            (x[order], y[order]),
            case.outer_batch,
            case.loss,
        )
        found = made().compute(*permuted.arguments).grads["weight"]
        assert close(found, wanted[order], 1e-6)


@given(recipes(norm=False))
def test_the_kfac_hypergradient_is_the_formula_with_its_own_matrix(recipe: Recipe) -> None:
    case = recipe.build()
    curvature = hk.curvature.KFAC(0.1, fisher="type-2")
    with case.point() as point:
        matrix = oracles.dense(curvature.operator(point, curvature.init()).matvec, case.params)
    result = hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse").compute(*case.arguments)
    wanted = oracles.implicit(case, matrix)
    assert result.status.ok
    assert close(oracles.flat(result.grads), oracles.flat(wanted))
