"""Which method for this problem: hypergradients beside a reference whose linear system is solved to the end."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from hyperkron import trees
from hyperkron.curvature import GGN, KFAC, Hessian
from hyperkron.curvature.base import moving, opaque
from hyperkron.evaluation.differentiation import gradient_tree
from hyperkron.evaluation.point import Point
from hyperkron.hypergradient.base import Hypergradient
from hyperkron.hypergradient.implicit import Implicit
from hyperkron.hypergradient.named import cg, ekfac, identity, kfac, neumann, pcg
from hyperkron.problem import BilevelProblem
from hyperkron.solution import HyperkronError, Solution, Status, worst
from hyperkron.solvers import CG
from hyperkron.trees import Tree
from hyperkron.validation import check_positive

ENOUGH = 0.8
"""From this cosine of the identity on, curvature added next to nothing in the ten problems of docs/which-method.md."""
USUAL = 0.6
"""Below this cosine of the identity, curvature usually paid in those problems."""
MARGIN = 0.1
"""A method may have a cosine this much below the best one if it is cheaper: a choice, not measured."""
TOLERANCE = 1e-5
"""The relative residual ‖b − (A + δI)v‖ / ‖b‖ that the reference must have."""
ITERATIONS = 500
"""After this many iterations the reference is given up."""
TIMED, TIMED_SECONDS = 3, 0.1
"""At least this many calls are timed, for at least this many seconds; the shortest counts."""


@dataclass(frozen=True)
class Comparison:
    """A method beside the reference; ``nan`` where a figure is not known.

    Attributes:
        name: the call that makes the method, with rounded numbers, or the name that was given.
        cosine: of its hypergradient with the reference; the mean over the pairs of batches.
        spread: the standard deviation of the cosine over the pairs.
        length: the norm of its hypergradient, divided by that of the reference; the mean over the pairs.
        time: of a call, divided by that of the identity.
        status: the worst of its solves; ``None`` if it failed.
        error: why it failed; empty if it did not.
    """

    name: str
    cosine: float = math.nan
    spread: float = math.nan
    length: float = math.nan
    time: float = math.nan
    status: Status | None = None
    error: str = ""

    @property
    def usable(self) -> bool:
        """Whether it can be recommended: its solves went as asked for, and it has a cosine."""
        return self.status is not None and self.status.ok and not math.isnan(self.cosine)


@dataclass(frozen=True)
class Diagnosis:
    """What :func:`diagnose` found; ``print`` shows it as a table with advice.

    Attributes:
        rows: the methods beside the reference.
        reference: how the reference was computed, in words.
        converged: whether it has reached :data:`TOLERANCE` on every pair of batches. If not, nothing is recommended.
        advice: what to take and why, in words.
        method: the name of the recommended method, or ``None``.
        damping: the δ at which KFAC has the highest cosine (of two that agree to two decimals the larger), or ``None``.
        coverage: the share of the parameters in KFAC's Kronecker blocks; ``nan`` where KFAC cannot be used.
        newton: ½ gᵀ(A + δI)⁻¹g / |J_in| with g = ∂_θ J_in and the A and δ of the reference, half the squared Newton
            decrement: by which share of itself J_in would fall in a full step, according to its damped quadratic model.
            It is 0 at a minimum, which the formula assumes; ``nan`` if this solve did not converge. The mean over the
            pairs.
        zeros: the share of λ's entries whose hypergradient is exactly zero; the mean over the pairs.
        agreement: the mean cosine between the references of two pairs, on the entries that are zero in neither; ``nan``
            for one pair, or if they share no such entry.
    """

    rows: tuple[Comparison, ...]
    reference: str
    converged: bool
    advice: str
    method: str | None
    damping: float | None
    coverage: float
    newton: float
    zeros: float
    agreement: float

    def __str__(self) -> str:
        table: list[tuple[str, ...]] = [("method", "cosine", "length", "time", "status")]
        for row in self.rows:
            spread = "" if math.isnan(row.spread) else f" ± {row.spread:.2f}"
            numbers = f"{row.cosine:.2f}{spread}", f"{row.length:.2g}", f"{row.time:.1f}"
            told = textwrap.shorten(row.error, 100) if row.status is None else row.status.name.lower().replace("_", " ")
            table.append((row.name, *("–" if x == "nan" else x for x in numbers), told))
        widths = [max(len(cells[i]) for cells in table) for i in range(4)]
        lines = ["  ".join([*map(str.ljust, cells, widths), cells[4]]) for cells in table]
        facts = [
            f"KFAC's Kronecker blocks cover {self.coverage:.0%} of the parameters.",
            f"A full Newton step would lower J_in by {100 * self.newton:.2g} %; the formula assumes a minimum, 0 %.",
            f"The hypergradient is exactly zero in {self.zeros:.0%} of λ's entries.",
            f"Between pairs of batches the reference has a mean cosine of {self.agreement:.2f}.",
        ]
        facts = [fact for fact in facts if " nan" not in fact]
        return "\n".join([self.reference, "", *lines, "", textwrap.fill(self.advice, 100), "", *facts])


class _Reference(NamedTuple):
    """The reference on one pair of batches: the arguments of ``compute``, what it gave, and the Newton step."""

    at: tuple[Any, ...]
    stats: dict[str, float | int | str]
    grads: Tree
    residual: float
    matrix: str
    newton: float


def diagnose(
    problem: BilevelProblem,
    model: nn.Module,
    hyper: nn.Module,
    inner_batch: Any,
    outer_batch: Any,
    *,
    damping: float = 1e-3,
    dampings: Sequence[float] = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5),
    methods: Mapping[str, Hypergradient] | None = None,
    more: Iterable[tuple[Any, Any]] = (),
    progress: bool = False,
) -> Diagnosis:
    """Does curvature matter at this (λ, θ), which method comes close enough, and with which damping?

    Every method's hypergradient is compared with a reference, for which (A + δI)v = ∂_θ J_out is solved by CG,
    preconditioned by KFAC, to a relative residual of :data:`TOLERANCE`. A is the Gauss–Newton matrix, or the Hessian
    where the inner loss has a plain tensor, or weights or targets that depend on θ. The advice follows these rules:

    1. If the reference did not converge, there is none.
    2. If the identity's cosine is at least :data:`ENOUGH`, the identity is enough.
    3. Else it is the cheapest method whose cosine is at most :data:`MARGIN` below the best one, among those whose
       status is ``ok``. Of KFAC's dampings only the best one counts.

    Train θ before the call, as in your own loop. The call changes nothing: not the model, λ, a ``.grad`` or random
    states. It costs the reference and five calls of every method (more of very short ones), and one more of each for
    every further pair.

    Args:
        problem, model, hyper, inner_batch, outer_batch: as for :meth:`hyperkron.Implicit.compute`.
        damping: δ of the reference, and of the methods that iterate. If θ was trained by SGD, one over the sum of the
            learning rates is a good choice (:func:`hyperkron.attribution.training_damping`).
        dampings: the δ to try for ``hk.kfac``; empty: none.
        methods: compared besides the identity and ``hk.kfac``, by name; one that fails is a row with its error.
            Default: ``hk.ekfac`` with the best δ of ``hk.kfac``, and CG, PCG and Neumann series with ``damping``.
        more: further pairs (inner_batch, outer_batch), such as ``itertools.islice(zip(train, trusted), 3)``.
        progress: show a progress bar, with a step for each reference and each method.

    Example:
        >>> import torch, hyperkron as hk
        >>> model, weights, x = torch.nn.Linear(4, 1), hk.SampleWeights(8), torch.eye(4).repeat(2, 1)
        >>> rows = x, x.sum(1, keepdim=True), torch.arange(8)
        >>> problem = hk.BilevelProblem(
        ...     lambda m, w, b: hk.losses.mse(m(b[0]), b[1], weight=w(b[2])),
        ...     lambda m, w, b: hk.losses.mse(m(b[0]), b[1] + 1),
        ... )
        >>> found = hk.diagnose(problem, model, weights, rows, rows)
        >>> found.converged, found.method
        (True, 'hk.identity()')
    """
    pairs = [(inner_batch, outer_batch), *_checked(damping, dampings, methods, more)]
    with tqdm(total=len(pairs) + 1 + len(dampings), disable=not progress, unit="method", dynamic_ncols=True) as bar:
        references = [_reference((problem, model, hyper, *pair), damping, bar) for pair in pairs]
        compared = partial(_compared, references=references, bar=bar)
        plain = compared("hk.identity()", identity())
        grid = {value: compared(f"hk.kfac({value:.3g})", kfac(value)) for value in dampings}
        usable = [value for value, row in grid.items() if row.usable]
        best = max(usable, key=lambda value: (round(grid[value].cosine, 2), value), default=None)
        given = _defaults(best, damping) if methods is None else methods
        bar.total += len(given)
        others = [compared(name, method) for name, method in given.items()]
    rows = [dataclasses.replace(row, time=row.time / plain.time) for row in (plain, *grid.values(), *others)]

    residual, products = max(x.residual for x in references), max(int(x.stats["products"]) for x in references)
    converged, reached = residual <= TOLERANCE, f"a relative residual of {residual:.1e} after {products} products"
    rivals = [row for row, value in zip(rows, [best, *grid, *(best for _ in others)], strict=True) if value == best]
    method, advice = _advice(rivals, products) if converged else (None, _no_advice(reached))
    if method not in (None, plain.name) and len(grid) > 1 and best in (min(grid), max(grid)):
        advice += f" For KFAC, {best:.3g} is an end of the dampings tried; try some beyond it."
    return Diagnosis(
        rows=tuple(rows),
        reference=f"Reference: CG with the {references[0].matrix} + {damping:.3g}·I, {reached}."
        f"\nPairs of batches: {len(pairs)}.",
        converged=converged,
        advice=advice,
        method=method,
        damping=best if converged else None,
        coverage=float(references[0].stats.get("coverage", math.nan)),
        newton=statistics.mean(x.newton for x in references),
        zeros=float(torch.cat([y.flatten() == 0 for x in references for y in x.grads.values()]).double().mean()),
        agreement=_agreement([x.grads for x in references]) if converged else math.nan,
    )


def _defaults(best: float | None, damping: float) -> dict[str, Hypergradient]:
    found: dict[str, Hypergradient] = {} if best is None else {f"hk.ekfac({best:.3g})": ekfac(best)}
    return found | {
        f"hk.cg(3, {damping:.3g})": cg(3, damping),
        f"hk.cg(10, {damping:.3g})": cg(10, damping),
        f"hk.pcg(3, {damping:.3g})": pcg(3, damping),
        f"hk.neumann(10, {damping:.3g})": neumann(10, damping),
    }


def _checked(damping: Any, dampings: Any, methods: Any, more: Any) -> list[tuple[Any, Any]]:
    """The further pairs; refuses arguments of the wrong kind."""
    check_positive("damping", damping, "1e-3 is a common choice")
    for name, value, kind, remedy in (
        ("dampings", dampings, Sequence, "a list such as [1e-2, 1e-3]"),
        ("methods", {} if methods is None else methods, Mapping, "a dictionary such as {'cg': hk.cg(20)}"),
        ("more", more, Iterable, "pairs of batches, such as zip(train, trusted)"),
    ):
        if not isinstance(value, kind):
            raise HyperkronError(f"{name}={value!r:.80} is of another kind; pass {remedy}.")
    for value in dampings:
        check_positive("dampings", value, "pass those to try for hk.kfac, such as [1e-2, 1e-3]")
    for name, method in (methods or {}).items():
        if not isinstance(method, Hypergradient):
            raise HyperkronError(f"methods has {name!r}: {method!r:.80}, not a hypergradient; pass one as hk.cg(20).")
    pairs = list(more)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise HyperkronError(f"more has {pair!r:.80}; pass pairs (inner_batch, outer_batch).")
    return pairs


def _reference(at: tuple[Any, ...], damping: float, bar: tqdm[Any]) -> _Reference:
    bar.set_description("reference")
    with Point(*at) as point:
        parts = point.problem.parts(point.inner_batch)
        loss = point.inner(parts[0])  # where there are several, only parts tell what the loss is made of
        hessian = opaque(loss, point.params) or moving(loss, point.params)
        method = Implicit(
            Hessian(damping) if hessian else GGN(damping),
            CG(ITERATIONS, TOLERANCE),
            preconditioner=KFAC(damping) if loss.terms else None,
        )
        loss = loss if len(parts) == 1 else point.inner()
        value, g = abs(float(loss.value.detach())), gradient_tree(loss.value, point.params)
        del loss
        step = method.inverse(point)(trees.stacked([g]))
    decrease = 0.5 * float(trees.dot(g, next(trees.unstacked(step.value))))
    newton = decrease / value if value > 0 and _residual(step) <= TOLERANCE else math.nan
    result = method.fresh().compute(*at)
    grads, matrix = trees.map(Tensor.double, result.grads), "Hessian" if hessian else "Gauss–Newton matrix"
    bar.update()
    return _Reference(at, result.stats, grads, _residual(result.solution), matrix, newton)


def _residual(solution: Solution | None) -> float:
    return math.inf if solution is None or solution.residual is None else solution.residual


def _compared(name: str, method: Hypergradient, references: list[_Reference], bar: tqdm[Any]) -> Comparison:
    """The row of a method, its time in seconds; an error becomes a row too."""
    cosines, lengths, statuses = [], [], []
    bar.set_description(name)
    try:
        for reference in references:
            result = method.fresh().compute(*reference.at)
            grads = trees.map(Tensor.double, result.grads)
            cosines.append(_cosine(grads, reference.grads))
            lengths.append(float(trees.norm(grads) / trees.norm(reference.grads)))
            statuses.append(result.status)
        return Comparison(
            name,
            cosine=statistics.mean(cosines),
            spread=math.nan if len(cosines) == 1 or math.isnan(sum(cosines)) else statistics.stdev(cosines),
            length=statistics.mean(lengths),
            time=_seconds(method.fresh(), references[0].at),
            status=worst(statuses),
        )
    except Exception as error:
        return Comparison(name, error=f"{type(error).__name__}: {error}")
    finally:
        bar.update()


def _seconds(method: Hypergradient, at: tuple[Any, ...]) -> float:
    """The shortest time of a call after the first one; short calls are timed more often, unless others take part."""
    times: list[float] = []
    while len(times) <= TIMED or (sum(times) < TIMED_SECONDS and not at[0].divided):
        start = time.perf_counter()
        float(trees.norm(method.compute(*at).grads))  # a GPU has finished when a number is read
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _cosine(a: Tree, b: Tree) -> float:
    """The cosine of two vectors; ``nan`` if one is zero."""
    sizes = float(trees.norm(a)), float(trees.norm(b))
    return float(trees.dot(a, b)) / sizes[0] / sizes[1] if min(sizes) > 0 else math.nan


def _agreement(grads: list[Tree]) -> float:
    """The mean cosine of two of several vectors, on the entries that are zero in neither."""
    pairs = itertools.combinations(grads, 2)
    found = [_cosine(*({n: x * (b[n] != 0) for n, x in a.items()} for a, b in (pair, pair[::-1]))) for pair in pairs]
    return statistics.mean([x for x in found if not math.isnan(x)] or [math.nan])


def _no_advice(reached: str) -> str:
    return (
        f"No advice: the reference did not converge ({reached}; {TOLERANCE:.0e} is needed), so the cosines say little. "
        "Train θ longer, raise damping, or use float32 or float64."
    )


def _advice(rows: list[Comparison], products: int) -> tuple[str | None, str]:
    """The method to take and why, from the row of the identity and those of its rivals."""
    plain, usable = rows[0], [row for row in rows if row.usable]
    if not plain.usable:
        return None, "No advice: the identity failed, or one of the two hypergradients is zero."
    if plain.cosine >= ENOUGH:
        return plain.name, (
            f"{plain.name} is enough: its cosine is {plain.cosine:.2f}. From {ENOUGH} on, curvature added next to "
            "nothing in the problems of docs/which-method.md. Ask again after some steps of λ."
        )
    best = max(usable, key=lambda row: row.cosine)
    near = [row for row in usable if row.cosine >= best.cosine - MARGIN]
    taken = min(near, key=lambda row: (round(row.time, 1), -row.cosine))
    if taken is plain:
        advice = (
            f"No method is much closer than {plain.name}: its cosine is {plain.cosine:.2f}, the best {best.cosine:.2f}."
        )
    else:
        advice = f"Curvature may pay: the identity's cosine, {plain.cosine:.2f}, is between {USUAL} and {ENOUGH}."
        if plain.cosine < USUAL:
            advice = f"Curvature probably pays: the identity's cosine, {plain.cosine:.2f}, is below {USUAL}."
        advice += f" Take {taken.name}: it is the cheapest within {MARGIN} of the best cosine, {best.cosine:.2f}."
    if best.cosine < ENOUGH:
        advice += f" None is close to the reference, which took {products} products: try more iterations or damping."
    return taken.name, advice
