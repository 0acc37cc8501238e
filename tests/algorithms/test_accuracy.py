"""Where every algorithm of the conformance suite comes to rest, and how far from the optimum that is.

An algorithm that is proven to reach the optimum must reach λ*. One that is biased by construction (a truncated series,
a finite penalty, the identity for H⁻¹, …) must reach its *own* point of rest, which ``fixed_points.py`` has in closed
form, and that point must approach λ* at the proven order when the constant that makes the bias is changed.

No step size is tuned. With µ, L of g(λ, ·), κ = L/µ, and µ_Φ, L_Φ of Φ, all from the matrices of the problem:

    θ and v move at 1/L; a level that is pulled by several terms at 1/(the sum of their L)
    double loop: λ at γ = 1/L_Φ, with T = ⌈κ⌉ inner steps            single loop: λ at γ = 1/(κL_Φ)
    all variables from the same point (SOBA and its kin): γ = 1/(2κL_Φ)
    descent on a penalised gap, θ and λ at once (PBGD, ScaleBiO): both at 1/(L_f + γ(L_g + L_v))
    on batches L is the largest of a batch's share, and SABA's and SRBA's rates are half as large

and every run has 2·ln(10⁶)/(γµ_Φ) steps: twice as many as gradient descent on Φ itself is proven to need for 10⁻⁶
(for a penalty, µ is that of the penalty function).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import hyperkron as hk
from fixed_points import Dense
from hyperkron import trees
from hyperkron.algorithms.base import Algorithm, State
from hyperkron.hypergradient.steps import SGD
from oracles import relative
from quadratic import Quadratic

TOLERANCE = 1e-6
GENERIC = Quadratic(examples=6, noise=0.3)  # no two of its matrices commute
INTERPOLATING = Quadratic(ridge=0.0)  # g* = 0
SUM, BATCH = Quadratic(examples=8, noise=0.2), 3  # batches of 3, 3 and 2 that disagree

D = Dense(GENERIC)
(MU, L), (MU_PHI, L_PHI), L_F = D.inner, D.outer, D.outer_smoothness
KAPPA, ETA = L / MU, 1 / L
T = math.ceil(KAPPA)
DOUBLE: dict[str, Any] = {"inner_rate": ETA, "outer_rate": 1 / L_PHI}
SINGLE: dict[str, Any] = {"inner_rate": ETA, "outer_rate": 1 / (KAPPA * L_PHI)}
JOINT: dict[str, Any] = {"inner_rate": ETA, "outer_rate": 1 / (2 * KAPPA * L_PHI)}


@dataclass(frozen=True)
class Case:
    """An algorithm and where it rests: after its steps ‖λ − ``rest``‖ ≤ ``tolerance``·‖rest‖.

    Args:
        algorithm: with the constants that the point of rest depends on.
        rest: that point, in closed form.
        where: the same in words.
        rate: γ, the rate at which λ effectively follows dΦ/dλ, if not ``outer_rate``.
        curvature: µ of the function that is descended, if not Φ's.
        tolerance: of the relative error.
        problem, batch_size: full batches, if not given.
        setup: makes a random oracle deterministic by putting its expectation in its place.
        frozen: the step whose schedule is kept, for one that never ends.
        variant: whether another case has the same algorithm with other constants.
    """

    algorithm: Algorithm
    rest: Tensor
    where: str
    rate: float | None = None
    curvature: float | None = None
    tolerance: float = TOLERANCE
    problem: Quadratic = GENERIC
    batch_size: int | None = None
    setup: Callable[[State, pytest.MonkeyPatch], None] | None = None
    frozen: int | None = None
    variant: bool = False

    @property
    def steps(self) -> int:
        rate = self.rate or self.algorithm.outer_rate
        assert isinstance(rate, float)
        return math.ceil(2 * math.log(1 / TOLERANCE) / (rate * (self.curvature or Dense(self.problem).outer[0])))

    @property
    def bias(self) -> float:
        """How far from λ* it rests, relative to ‖λ*‖."""
        return relative(self.rest, self.problem.solution())


def exact_kfac() -> hk.Implicit:
    """KFAC without Monte-Carlo noise, damped exactly: here it is the inverse Hessian itself."""
    return hk.Implicit(hk.curvature.KFAC(0.0, fisher="type-2", split="exact"), hk.solvers.Direct())


def in_expectation(terms: int) -> Callable[[State, pytest.MonkeyPatch], None]:
    """HIA's mean over its random term is the series of its K terms (test_hia_is_unbiased_for_the_series)."""

    def setup(state: State, _: pytest.MonkeyPatch) -> None:
        state.hypergradient = hk.algorithms.StochasticNeumann(terms - 1, ETA)

    return setup


def quadrature(state: State, patch: pytest.MonkeyPatch) -> None:
    """Three directions with mean uuᵀ = I, in place of Gaussian ones of which that is the expectation."""
    directions = math.sqrt(3) * torch.eye(3, dtype=torch.float64)
    drawn = iter(range(10**9))
    patch.setattr(trees, "normal_like", lambda like, generator: {"value": directions[next(drawn) % 3]})


STAR = D.solution()


def optimum(algorithm: Algorithm, **options: Any) -> Case:
    return Case(algorithm, STAR, "λ*", **options)


def series(algorithm: Algorithm, terms: int, **options: Any) -> Case:
    return Case(algorithm, D.implicit(D.series(terms, ETA)), f"H⁻¹ cut after the power {terms}", **options)


def identity(algorithm: Algorithm) -> Case:
    return Case(algorithm, D.implicit(ETA * D.eye), "I/L for H⁻¹")


def penalty(algorithm: Algorithm, multiplier: float, **options: Any) -> Case:
    options = {"curvature": D.penalty_curvature(multiplier), **options}
    return Case(algorithm, D.penalty(multiplier), f"the penalty function at {multiplier:.3g}", **options)


def gap(multiplier: float) -> float:
    """The step size of joint descent on f + γ(g − v)."""
    return 1 / (L_F + multiplier * D.gap_smoothness)


def pbgd(gamma: float, ramp: int = 0, **options: Any) -> Case:
    rate = max(gamma, 1.0) * gap(gamma)  # the step is divided by γ where that is above 1
    return penalty(
        hk.algorithms.PBGD(1, gamma, ramp, inner_rate=rate, outer_rate=rate), gamma, rate=gap(gamma), **options
    )


def f2sa(first: float, growth: hk.algorithms.Rate | float, last: float, **options: Any) -> Case:
    rates = {"inner_rate": 1 / (last * L + L_F), "outer_rate": 1 / L_PHI}
    return penalty(hk.algorithms.F2SA(T, first, growth, ETA, **rates), last, **options)


def meha(c: float, proximal: float, **options: Any) -> Case:
    rates = {"inner_rate": 1 / (L + L_F / c), "outer_rate": c / (KAPPA * L_PHI)}  # λ's step is divided by c
    rest, rate = D.envelope(c, proximal), 1 / (KAPPA * L_PHI)
    algorithm = hk.algorithms.MEHA(proximal, c, 1 / (L + proximal), **rates)
    return Case(algorithm, rest, f"the envelope's penalty at c = {c:.3g}, γ = {proximal:.3g}", rate, **options)


def bome(barrier: Any, **options: Any) -> Case:
    """ϵ = 0.01 for the default 1e-8: µ is 2 and not 279, so that 1/(µL) is not a tiny step."""
    found = D.dynamic(3, ETA, 0.5, 0.01, barrier == "value")
    rates = {"inner_rate": 1 / (float(found[-1]) * L + L_F), "outer_rate": 1 / (KAPPA * L_PHI)}
    algorithm = hk.algorithms.BOME(3, 0.5, barrier, ETA, 0.01, **rates)
    return Case(algorithm, found[12:15], f"∇f + µ∇q = 0 at µ = {float(found[-1]):.2g}", **options)


def bvfsm(problem: Quadratic, weight: float, margin: float, t: int, **options: Any) -> Case:
    dense, r = Dense(problem), 1 / math.log(1.1 * (t + 1))
    rest, p = dense.barrier(r, weight, margin)
    pull, smooth = 2 * weight * r, dense.inner[1]
    rates = {"inner_rate": 1 / (p * smooth + dense.outer_smoothness + pull), "outer_rate": 1 / dense.outer[1]}
    algorithm = hk.algorithms.BVFSM(T, 1 / (smooth + pull), weight, margin, **rates)
    options = {"problem": problem, "curvature": dense.penalty_curvature(p), "frozen": t, **options}
    return Case(algorithm, rest, f"the gap's weight {p:.2g} at r = {r:.2g}", **options)


def finite_sum(kind: Any, slower: int, rest: Tensor, where: str, *first: Any, **options: Any) -> Case:
    dense = Dense(SUM)
    smooth = dense.batch_smoothness(BATCH)
    outer_rate = dense.inner[0] / (slower * smooth * dense.outer[1])
    algorithm = kind(*first, inner_rate=1 / (slower * smooth), outer_rate=outer_rate)
    return Case(algorithm, rest, where, problem=SUM, batch_size=BATCH, **options)


def vrbo() -> Case:
    dense = Dense(SUM)
    step = 1 / dense.batch_smoothness(BATCH)
    rest, method = dense.implicit(dense.series(1, step)), hk.algorithms.StochasticNeumann(1, step)
    return finite_sum(hk.algorithms.VRBO, 1, rest, "H⁻¹ cut after the power 1", method, 2)


CASES: dict[str, Case] = {
    "AID-CG": optimum(hk.algorithms.aid_cg(3, inner_steps=T, **DOUBLE)),  # three distinct eigenvalues
    "AID-CG, damped": Case(
        hk.algorithms.aid_cg(3, 0.1, inner_steps=T, **DOUBLE),
        D.implicit(torch.linalg.inv(D.H + 0.1 * D.eye)),
        "H + 0.1 I for H",
    ),
    "AID-Neumann": series(hk.algorithms.aid_neumann(3, ETA, inner_steps=T, **DOUBLE), 3),
    "AID-FP": series(hk.algorithms.aid_fp(10, ETA, inner_steps=T, **DOUBLE), 9),
    "AID-KFAC": optimum(hk.AID(exact_kfac(), T, **DOUBLE)),
    "AID-KFAC, default damping": Case(
        hk.AID(hk.kfac(1e-3, fisher="type-2"), T, **DOUBLE), D.implicit(D.factored(1e-3)), "the factors damped apart"
    ),
    "AID-EKFAC": Case(
        hk.AID(hk.ekfac(0.1, fisher="type-2"), T, **DOUBLE),
        D.implicit(torch.linalg.inv(D.H + 0.1 * D.eye)),
        "H + 0.1 I for H",
    ),
    "AID-GGN-CG": optimum(hk.algorithms.aid_ggn_cg(3, 0.0, inner_steps=T, **DOUBLE)),
    "AID-GGN-Neumann": series(hk.algorithms.aid_ggn_neumann(3, ETA, inner_steps=T, **DOUBLE), 3),
    "SAMA": identity(hk.algorithms.SAMA(T, **DOUBLE)),
    "T1-T2": identity(hk.algorithms.T1T2(**SINGLE)),
    "DARTS": identity(hk.algorithms.DARTS(**SINGLE)),
    "Unrolled": series(hk.algorithms.Unroll(5, SGD(ETA), outer_rate=1 / L_PHI), 4),
    "Unrolled, restarted": Case(
        hk.algorithms.Unroll(5, SGD(ETA), restart=True, outer_rate=1 / L_PHI),
        D.restarted(5, ETA),
        "the minimum of f(λ, θ_5(λ))",
    ),
    "Truncated": series(hk.algorithms.Unroll(5, SGD(ETA), last=3, outer_rate=1 / L_PHI), 2),
    "AmIGO": optimum(hk.algorithms.AmIGO(T, T, ETA, **DOUBLE)),
    "AmIGO-GGN": optimum(hk.algorithms.AmIGO(T, T, ETA, hk.curvature.GGN(), **DOUBLE)),
    "AmIGO-KFAC": optimum(hk.algorithms.AmIGO(T, hypergradient=exact_kfac(), **DOUBLE)),
    "AmIGO-CG": optimum(hk.algorithms.AmIGO(T, hypergradient=hk.cg(2, 0.0, warm_start=True), **DOUBLE)),
    "MRBO": series(hk.algorithms.MRBO(hk.algorithms.StochasticNeumann(2, ETA), **SINGLE), 2),
    "MRBO-KFAC": optimum(hk.algorithms.MRBO(exact_kfac(), **SINGLE)),
    "SUSTAIN": series(hk.algorithms.SUSTAIN(terms=3, step_size=ETA, **SINGLE), 2, setup=in_expectation(3)),
    "TTSA": series(hk.algorithms.TTSA(3, ETA, **SINGLE), 2, setup=in_expectation(3)),
    "BSA": series(hk.algorithms.BSA(3, ETA, T, **DOUBLE), 2, setup=in_expectation(3)),
    "stocBiO": series(hk.algorithms.StocBiO(T, 3, ETA, **DOUBLE), 3),
    "stocBiO, misscaled": Case(
        hk.algorithms.StocBiO(T, 3, ETA, True, inner_rate=ETA, outer_rate=ETA / L_PHI),
        D.implicit(D.misscaled(3, ETA)),
        "the published code's sum for H⁻¹",
        variant=True,
    ),
    "TGDA": optimum(hk.algorithms.TGDA(inner_steps=T, **DOUBLE)),
    "SOBA": optimum(hk.algorithms.SOBA(**JOINT)),
    "FSLA": optimum(hk.algorithms.FSLA(**SINGLE)),
    "SABA": finite_sum(hk.algorithms.SABA, 2, SUM.solution(), "λ*"),
    "SRBA": finite_sum(
        hk.algorithms.SRBA, 2, SUM.solution(), "λ*", tolerance=1e-4
    ),  # one step in three has no noise at all
    "VRBO": vrbo(),
    "PZOBO": series(hk.algorithms.PZOBO(T, 3, **DOUBLE), T - 1, setup=quadrature),
    "F2SA": f2sa(4.0, 0.0, 4.0),
    "F2SA, growing ℓ": f2sa(
        1.0, hk.algorithms.Rate(4.0, 3.0), 1.0 + 4.0 * sum(t**-3 for t in range(1, 40)), variant=True
    ),
    "PBGD": pbgd(1.5, 20),
    "PBGD, default penalty": pbgd(0.2, variant=True),
    "MEHA": meha(4.0, 0.01),
    "MEHA, strong envelope": meha(4.0, 0.5, variant=True),
    "ScaleBiO": penalty(
        hk.algorithms.ScaleBiO(0.5, 3.0, 20, 1.5, inner_rate=gap(0.5), outer_rate=gap(0.5)), 1.5, rate=gap(0.5) / 3
    ),
    "BOME": bome("gradient"),
    "BOME, by value": bome("value", variant=True),
    "BVFSM": bvfsm(GENERIC, 0.01, 1e-4, 2),
    "BVFSM, interpolating": bvfsm(INTERPOLATING, 0.0, 0.1, 50, variant=True),
}


SLOW = {"PBGD", "Unrolled", "Truncated", "ScaleBiO", "MRBO", "MRBO-KFAC", "SUSTAIN", "VRBO", "FSLA", "PZOBO", "T1-T2"}
"""These, and variants (with a comma in their name), take seconds each; ``test_equations.py`` has steps of theirs."""
ALIKE = {"AID-FP", "AID-EKFAC", "AmIGO-GGN", "AmIGO-KFAC", "TTSA"}
"""So do these, which other cases differ from in one part only: AID-Neumann, AID-KFAC, AmIGO, AID-KFAC, BSA."""
PARTED = [pytest.param(name, marks=pytest.mark.long) if name in SLOW | ALIKE or "," in name else name for name in CASES]


@pytest.mark.parametrize("name", PARTED)
def test_comes_to_rest_where_it_should(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    model, hyper = case.problem.modules()
    state = case.algorithm.init(case.problem.problem(), model, hyper)
    if case.setup is not None:
        case.setup(state, monkeypatch)
    batches = case.problem.batches(case.batch_size)
    for _ in range(case.steps):
        state.step = state.step if case.frozen is None else case.frozen
        case.algorithm.step(state, batches)
    error = relative(hyper().detach(), case.rest)
    assert error <= case.tolerance, f"relative error {error:.2e} to {case.where}, {case.bias:.2g} from λ*"


# --- what has no point of rest of its own


def test_bsg1_follows_its_map_and_rests_where_only_the_direct_term_is_left() -> None:
    """At an inner minimum ∂_θ g = 0, so its one point of rest is ∂_λ f = 0: here λ = 0, whatever λ* is."""
    model, hyper = GENERIC.modules()
    torch.nn.init.ones_(next(hyper.parameters()))
    algorithm = hk.algorithms.BSG1(3, 0.5, **DOUBLE)
    state, batches = algorithm.init(GENERIC.problem(), model, hyper), GENERIC.batches()
    point = torch.cat([torch.zeros(6), torch.ones(3)]).double()
    for step in range(300):
        algorithm.step(state, batches)
        point = D.rank_one(point[:6], point[6:], 3, (ETA, 1 / L_PHI), 0.5)
        if step < 30:
            assert relative(torch.cat([model.weight.reshape(-1), hyper()]).detach(), point) < 1e-10
    assert float(hyper().detach().norm()) < TOLERANCE * float(STAR.norm())


def test_bsg1_reaches_the_optimum_of_a_single_residual() -> None:
    """g = ½(θ − 2λ)², f = ½(θ − 3)²: exact while ∂_θ g ≫ √ϵ, so λ = 3/2 up to a multiple of √ϵ."""
    problem = hk.BilevelProblem(
        lambda m, h, _: 0.5 * (m() - 2 * h()).square().sum(), lambda m, h, _: 0.5 * (m() - 3).square().sum()
    )
    model, hyper = (hk.as_hyper(torch.tensor(x, dtype=torch.float64)) for x in (0.5, 0.0))
    algorithm = hk.algorithms.BSG1(1, epsilon=1e-14, inner_rate=0.5, outer_rate=0.1)
    state = algorithm.init(problem, model, hyper)
    for _ in range(150):
        algorithm.step(state, hk.algorithms.BatchSources(None, None))
    assert abs(float(hyper().detach()) - 1.5) < 1e-5


@pytest.mark.parametrize("barrier", ["gradient", "value"])
def test_bome_with_its_default_constants_rests_where_it_should(barrier: Any) -> None:
    """µ ≈ 200 to 300 there, so that it takes many thousands of steps to get there; but it must not leave."""
    found = D.dynamic(10, 0.1, 0.5, 1e-8, barrier == "value")
    model, hyper = GENERIC.modules()
    with torch.no_grad():
        model.weight.copy_(found[:6].reshape(2, 3))
        next(hyper.parameters()).copy_(found[12:15])
    algorithm = hk.algorithms.BOME(barrier=barrier)
    report = algorithm.step(algorithm.init(GENERIC.problem(), model, hyper), GENERIC.batches())
    assert report.stats["multiplier"] == pytest.approx(float(found[-1]), rel=1e-6)
    assert relative(hyper().detach(), found[12:15]) < 1e-7
    assert relative(model.weight.detach().reshape(-1), found[:6]) < 1e-7


# --- the bias shrinks as it is proven to

TAIL = 1 - ETA * MU
ORDERS: dict[str, tuple[Callable[[float], Tensor], float, float, float]] = {
    # the point of rest as a function of a constant, two values of it, and the ratio of the two biases
    "F2SA, PBGD, ScaleBiO: 1/penalty": (D.penalty, 100.0, 200.0, 2.0),
    "MEHA: 1/c": (lambda c: D.envelope(c, 0.01), 100.0, 200.0, 2.0),
    "MEHA, strong envelope: 1/c": (lambda c: D.envelope(c, 0.5), 100.0, 200.0, 2.0),
    "BVFSM: margin": (lambda m: Dense(INTERPOLATING).barrier(0.25, 0.0, m)[0], 2e-3, 1e-3, 2.0),
    "BVFSM: 1/r": (lambda r: Dense(INTERPOLATING).barrier(r, 0.0, 1e-3)[0], 0.25, 0.5, 2.0),
    "BOME: ϵ^(1/3)": (lambda e: D.dynamic(100, ETA, 0.5, e, False)[12:15], 1e-6, 1.25e-7, 2.0),
    "damping": (lambda d: D.implicit(torch.linalg.inv(D.H + d * D.eye)), 2e-3, 1e-3, 2.0),
    "series: (1 − ηµ)^K": (lambda k: D.implicit(D.series(int(k), ETA)), 20, 24, TAIL**-4),
    "restarted: (1 − ηµ)^T": (lambda k: D.restarted(int(k), ETA), 20, 24, TAIL**-4),
}


@pytest.mark.parametrize("name", ORDERS)
def test_the_bias_has_its_proven_order(name: str) -> None:
    rest, first, second, ratio = ORDERS[name]
    solution = (INTERPOLATING if name.startswith("BVFSM") else GENERIC).solution()
    biases = [relative(rest(constant), solution) for constant in (first, second)]
    assert biases[1] > 1e-9
    assert biases[0] / biases[1] == pytest.approx(ratio, rel=0.05)


def test_the_barriers_bias_grows_where_the_inner_problem_leaves_a_residual() -> None:
    """BVFSM's r → 0 takes the weight of the gap, r/(margin + g_z), with it."""
    biases = [relative(D.barrier(1 / math.log(1.1 * (t + 1)), 0.01, 1e-4)[0], STAR) for t in (2, 50, 1000)]
    assert biases == sorted(biases)
    assert biases[-1] > 0.25


def test_split_damping_costs_its_square_root() -> None:
    """KFAC's π-split adds √δ to both factors; without a ridge, a quarter of δ is half the bias."""
    plain = Quadratic(examples=6, noise=0.3, ridge=0.0)
    biases = [relative(Dense(plain).implicit(Dense(plain).factored(d)), plain.solution()) for d in (4e-6, 1e-6)]
    assert biases[0] / biases[1] == pytest.approx(2.0, rel=0.05)


def test_the_identity_is_exact_where_the_hessian_is_a_multiple_of_it() -> None:
    round_ = Quadratic(isotropic=True)
    dense = Dense(round_)
    assert relative(dense.implicit(dense.eye / dense.inner[1]), round_.solution()) < 1e-12
    assert CASES["T1-T2"].bias > 0.1


def test_every_algorithm_has_a_case() -> None:
    named = {getattr(hk.algorithms, name) for name in hk.algorithms.__all__}
    classes = {x for x in named if isinstance(x, type) and issubclass(x, Algorithm) and x is not Algorithm}
    without = {hk.algorithms.BSG1, hk.algorithms.InnerOnly}  # tested above; λ stays
    assert classes == {type(case.algorithm) for case in CASES.values()} | without
    assert all(case.tolerance <= 1e-4 for case in CASES.values())
    assert all(case.bias < 1e-12 for case in CASES.values() if case.where == "λ*")
    assert all(case.bias > 1e-3 for case in CASES.values() if case.where != "λ*")
