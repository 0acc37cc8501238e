"""Cells outside the product: batches of another kind, λ and J_out at the edge, and cases in which KFAC is exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hyperkron as hk
from hyperkron import solution

from .cells import CRASHED, REFUSED, RIGHT, SEED, SILENT, WARNED, Pair, Record, problem
from .methods import DAMPING, METHODS
from .truth import flat, relative

SPECIAL = "special"
Outcome = tuple[float, float, bool]
"""An error, its tolerance, and whether the status admits that something is wrong."""
CASES: dict[str, Callable[[], Outcome]] = {}


def case(function: Callable[..., Outcome]) -> Callable[..., Outcome]:
    """Name a case by its docstring."""
    CASES[(function.__doc__ or "").strip().rstrip(".")] = function
    return function


def run(name: str) -> Record:
    """The record of one case; any warning of the library is taken for a word about what is wrong."""
    record = Record(SPECIAL, name, "", CRASHED)
    solution._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            error, tolerance, admitted = CASES[name]()
        except hk.HyperkronError as refusal:
            record.outcome, record.words = REFUSED, str(refusal)
            return record
        except Exception as failure:
            record.words = f"{type(failure).__name__}: {failure}"
            return record
    told = [str(w.message) for w in caught if issubclass(w.category, hk.HyperkronWarning)]
    record.errors, record.words = {"error": error}, "; ".join(told)
    if error <= tolerance:
        record.outcome = RIGHT
    else:
        record.failed = ["error"]
        record.outcome = WARNED if told or admitted else SILENT
    return record


def _judged(pair: Pair, result: hk.HypergradientResult, wanted: Tensor) -> Outcome:
    grads = flat([g.detach() for g in result.grads.values()], pair.truth.hypers)
    return relative(grads, wanted), 1e-6, not result.status.ok


def _implicit(pair: Pair, result: hk.HypergradientResult) -> Outcome:
    assert result.solution is not None
    v = flat(list(result.solution.value.values()), pair.truth.params)
    return _judged(pair, result, pair.truth.direct - pair.truth.cross(v))


def _inference(method: str) -> Outcome:
    pair = Pair("mlp", "weights clip")
    with torch.inference_mode():
        pair.inner, pair.outer = (tuple(x.clone() for x in batch) for batch in (pair.inner, pair.outer))
    how = METHODS[method]
    result = pair._compute(how, pair.model, pair.hyper, pair.inner, pair.outer)
    if result.solution is None:
        assert how.equals is not None
        return _judged(pair, result, how.equals(pair.truth))
    return _implicit(pair, result)


@case
def _() -> Outcome:
    """Batches made in inference mode, KFAC."""
    return _inference("kfac, auto")


@case
def _() -> Outcome:
    """Batches made in inference mode, CG."""
    return _inference("cg hessian, auto")


@case
def _() -> Outcome:
    """Batches made in inference mode, unrolled."""
    return _inference("unrolled")


@case
def _() -> Outcome:
    """SampleWeights all above 1, whose clipped gradient is zero."""
    pair = Pair("mlp", "weights clip")
    with torch.no_grad():
        pair.hyper.weight.fill_(1.5)  # type: ignore[union-attr, operator]
    result = pair._compute(METHODS["kfac, auto"], pair.model, pair.hyper, pair.inner, pair.outer)
    size = float(result.grads["weight"].norm())
    return (0.0 if size > 0 else 1.0), 0.5, not result.status.ok


@case
def _() -> Outcome:
    """An outer loss that does not depend on θ at all."""
    pair = Pair("mlp", "weights clip")
    silent = hk.BilevelProblem(pair.problem.inner, lambda m, h, b: 0.05 * h.weight.square().sum())
    result = hk.kfac(DAMPING).compute(silent, pair.model, pair.hyper, pair.inner, pair.outer)
    return _judged(pair, result, 0.1 * pair.truth.hypers[0].detach())


@case
def _() -> Outcome:
    """λ that no loss sees."""
    pair = Pair("mlp", "weights clip")
    blind = hk.BilevelProblem(lambda m, h, b: hk.losses.cross_entropy(m(b[0]), b[1]), pair.problem.outer)
    result = hk.kfac(DAMPING).compute(blind, pair.model, pair.hyper, pair.inner, pair.outer)
    return 1.0, 0.0, not result.status.ok


@case
def _() -> Outcome:
    """One example and one layer, where KFAC is the Gauss–Newton matrix."""
    pair = Pair("linear", "weights clip")
    one = tuple(x[:1] for x in pair.inner)
    pair.truth = type(pair.truth)(pair.kind, pair.twin, pair.truth.hyper, one, pair.truth.batches["outer"], SEED)
    result = hk.kfac(DAMPING, fisher="type-2", split="exact").compute(
        pair.problem, pair.model, pair.hyper, one, pair.outer
    )
    assert result.solution is not None
    v = flat(list(result.solution.value.values()), pair.truth.params)
    left = pair.truth.ggn(v) + DAMPING * v - pair.truth.b
    return float(left.norm() / pair.truth.b.norm()), 1e-8, not result.status.ok


@case
def _() -> Outcome:
    """Five hundred Monte-Carlo vectors come close to the exact ones."""
    pair = Pair("mlp", "weights clip")
    sampled = hk.Implicit(hk.curvature.KFAC(DAMPING, samples=500), hk.solvers.Direct())
    exact = hk.kfac(DAMPING, fisher="type-2")
    arguments = pair.problem, pair.model, pair.hyper, pair.inner, pair.outer
    found, wanted = (flat(list(m.compute(*arguments).grads.values()), pair.truth.hypers) for m in (sampled, exact))
    return relative(found, wanted), 0.06, False


def _other_batch(method: hk.hypergradient.Hypergradient, matrix: str) -> Outcome:
    pair = Pair("mlp", "weights clip")
    other = tuple(x.flip(0)[:5].contiguous() for x in pair.inner)
    truth = type(pair.truth)(pair.kind, pair.twin, pair.truth.hyper, other, pair.truth.batches["outer"], SEED)
    result: Any = method.compute(  # type: ignore[call-arg]
        pair.problem, pair.model, pair.hyper, pair.inner, pair.outer, curvature_batch=other
    )
    v = flat(list(result.solution.value.values()), truth.params)
    left = getattr(truth, matrix)(v) + 2.0 * v - truth.b
    return max(_implicit(pair, result)[0], float(left.norm() / truth.b.norm())), 1e-6, not result.status.ok


@case
def _() -> Outcome:
    """Curvature on a batch of its own, Hessian."""
    return _other_batch(hk.cg(100, 2.0, tolerance=1e-9), "hessian")


@case
def _() -> Outcome:
    """Curvature on a batch of its own, Gauss–Newton."""
    return _other_batch(hk.cg(100, curvature=hk.curvature.GGN(2.0), tolerance=1e-9), "ggn")


def _in_pieces(method: str) -> Outcome:
    pair = Pair("mlp", "weights clip")
    pair.problem = hk.training.Accumulated(problem(pair.kind), micro_batch=3)
    return _implicit(pair, pair._compute(METHODS[method], pair.model, pair.hyper, pair.inner, pair.outer))


for _name in ("identity, auto", "kfac, auto", "ekfac", "cg hessian, auto", "cg ggn, auto", "pcg", "sama"):
    CASES[f"Micro-batches, {_name}"] = lambda name=_name: _in_pieces(name)  # type: ignore[misc]
