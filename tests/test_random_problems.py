"""What must hold for every problem: dense truths, and equal answers to questions that are the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hyperkron as hk
import oracles
from hyperkron import trees
from hyperkron.cross import Cross, CrossState
from hyperkron.curvature import GGN, KFAC, Hessian
from hyperkron.evaluation.point import Point
from random_problems import RandomProblem

SHORT = (0, 6, 14)  # a network of each kind
SEEDS = [*SHORT, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(200) if seed not in SHORT)]
DAMPING = 0.05
METHODS = {
    # the split by π is not continuous where B vanishes, as that of attention keys may up to rounding
    "kfac": lambda damping: hk.kfac(damping, fisher="type-2", split="exact", cross="reverse"),
    "ekfac": lambda damping: hk.ekfac(damping, fisher="type-2", cross="reverse"),
    "kfac, empirical, reduce, exact": lambda damping: hk.kfac(
        damping, fisher="empirical", sharing="reduce", split="exact", cross="reverse"
    ),
    "ggn": lambda damping: hk.cg(200, curvature=GGN(damping), tolerance=1e-12, cross="reverse"),
}
pytestmark = pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")


def value(p: RandomProblem) -> Tensor:
    return p.inner(p.model, p.hyper, p.inner_batch).value


@pytest.mark.parametrize("seed", SEEDS)
def test_products_are_those_of_the_dense_matrices(seed: int) -> None:
    p = RandomProblem(seed)
    params = list(p.params.values())
    eye = DAMPING * torch.eye(sum(x.numel() for x in params), dtype=torch.float64)
    loss = p.inner(p.model, p.hyper, p.inner_batch)
    (term,) = loss.terms
    j = oracles.jacobian(term.output, params)
    leaf = term.output.detach().requires_grad_()
    again = p.criterion(leaf, _labels(p), _weights(p)).value
    bent = oracles.jacobian(oracles.gradient(again, [leaf], graph=True), [leaf])
    penalty = {id(x.parameter): 2 * x.coefficient for x in loss.l2}
    decay = torch.cat([torch.zeros_like(x).add(penalty.get(id(x), 0.0)).reshape(-1) for x in params]).detach()
    truths = {Hessian: oracles.hessian(lambda: value(p), params), GGN: j.T @ bent @ j + decay.diag()}
    for kind, truth in truths.items():
        curvature = kind(DAMPING)
        with Point(*p.arguments) as point:
            found = oracles.dense(curvature.operator(point, curvature.init()).matvec, p.params)
        assert oracles.relative(found, truth + eye) < 1e-9


def _labels(p: RandomProblem) -> Tensor:
    learnt = getattr(p.hyper, "labels", None)
    if learnt is None:
        return p.inner_batch[1]
    return learnt.detach().softmax(-1) if p.loss == "cross_entropy" else learnt.detach().sigmoid()


def _weights(p: RandomProblem) -> Tensor | None:
    return p.hyper.weights.detach().sigmoid() if hasattr(p.hyper, "weights") else None


@pytest.mark.parametrize("seed", SEEDS)
def test_cross_terms_are_those_of_the_dense_matrix(seed: int) -> None:
    p = RandomProblem(seed)
    v = trees.normal_like(p.params, torch.Generator().manual_seed(seed))
    hypers = oracles.trainable(p.hyper)
    mixed = oracles.hessian(lambda: value(p), list(p.params.values()), list(hypers.values())).T
    for mode, tolerance in (("auto", 1e-6), ("reverse", 1e-10), ("forward", 1e-8), ("difference", 1e-5)):
        state = CrossState()
        for _ in range(2):  # the decision, and what was decided for
            with Point(*p.arguments) as point:
                found = Cross(mode).term(point, dict(v), None, state)  # type: ignore[arg-type]
            error = (oracles.flat(found) - mixed @ oracles.flat(v)).norm()
            assert float(error) <= tolerance * float(mixed.norm() * oracles.flat(v).norm())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_same_problem_in_other_words_has_the_same_hypergradient(seed: int, name: str) -> None:
    p, method = RandomProblem(seed), METHODS[name]
    problem, model, hyper, inner, outer = p.arguments
    wanted = oracles.flat(method(DAMPING).compute(*p.arguments).grads)
    louder = hk.BilevelProblem(lambda *given: 3.0 * p.inner(*given), p.outer)
    scaled = method(3 * DAMPING).compute(louder, model, hyper, inner, outer)
    others = [scaled]
    if p.by_layers or name == "ggn":
        order = torch.randperm(p.count)
        permuted, doubled = tuple(x[order] for x in inner), tuple(torch.cat([x, x]) for x in inner)
        others += [method(DAMPING).compute(problem, model, hyper, batch, outer) for batch in (permuted, doubled)]
        pieces = hk.training.Accumulated(problem, p.count - 1)
        others.append(method(DAMPING).compute(pieces, model, hyper, inner, outer))
    for result in others:
        assert float((oracles.flat(result.grads) - wanted).norm()) <= 1e-6 * (float(wanted.norm()) + 1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_scores_are_products_of_gradients_whatever_the_way(seed: int) -> None:
    p = RandomProblem(seed)
    if not p.by_layers:
        pytest.skip("its curvature is drawn at random, or depends on how the batch is cut")
    x, y, _ = p.inner_batch
    loss = lambda model, batch: p.criterion(model(batch[0]), batch[1])  # noqa: E731
    arguments = loss, p.model, (x, y), p.outer_batch[:2]
    curvature = KFAC(DAMPING, fisher="type-2")
    method = hk.Implicit(curvature, hk.solvers.Direct())
    found = hk.attribute(*arguments, method=method, batch_size=1).scores

    def gradient(a: Tensor, b: Tensor) -> Tensor:
        return oracles.gradient(loss(p.model, (a[None], b[None])).value, list(p.params.values())).detach()

    examples = torch.stack([gradient(a, b) for a, b in zip(x, y, strict=True)])
    queries = torch.stack([gradient(a, b) for a, b in zip(*p.outer_batch[:2], strict=True)])
    whole = hk.BilevelProblem(lambda model, _, batch: loss(model, batch), p.outer)
    with Point(whole, p.model, hk.as_hyper(torch.zeros(1)), (x, y), p.outer_batch) as point:
        inverse = oracles.dense(curvature.operator(point, curvature.init()).solve, p.params)
    wanted = queries @ inverse @ examples.T / p.count
    assert float((found - wanted).norm()) <= 1e-6 * float((queries @ inverse).norm() * examples.norm())
