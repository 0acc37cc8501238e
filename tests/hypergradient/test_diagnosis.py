"""The diagnosis of a problem: its cosines are those of dense matrices, and its advice follows from them."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import hyperkron as hk
import oracles
import photographs
from hyperkron.curvature import GGN
from hyperkron.hypergradient import diagnosis
from hyperkron.hypergradient.diagnosis import Comparison, Diagnosis
from hyperkron.training import DataParallel

DAMPING = 1e-2


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "TIMED_SECONDS", 0.0)


def row(found: Diagnosis, name: str) -> Comparison:
    [one] = [row for row in found.rows if row.name == name]
    return one


def cosine(a: oracles.Tree, b: oracles.Tree) -> float:
    return float(torch.cosine_similarity(oracles.flat(a), oracles.flat(b), 0))


def small(**more: Any) -> cases.Case:
    return cases.make(cases.mlp(3, 4, 2), (3,), loss="cross_entropy", count=8, hyper=cases.random_weights(8), **more)


def linear(scales: list[float], count: int = 40) -> cases.Case:
    """Least squares with one output and inputs of these scales, so that A = Σ σ_n x_n x_nᵀ / N is ill-conditioned."""
    model = nn.Linear(len(scales), 1, bias=False)
    case = cases.make(model, (len(scales),), count=count, hyper=cases.uniform_weights(count, 1.0))
    for x, _ in (case.inner_batch, case.outer_batch):
        x.mul_(torch.tensor(scales, dtype=x.dtype))
    return case


def test_cosines_and_lengths_are_those_of_dense_matrices() -> None:
    case = small()
    truth = oracles.implicit(case, case.ggn(), damping=DAMPING)
    plain = oracles.implicit(case, torch.eye(len(case.ggn()), dtype=cases.DOUBLE))
    found = hk.diagnose(*case.arguments, damping=DAMPING, dampings=[0.1], methods={"long": hk.pcg(200, DAMPING)})
    assert found.converged and "Gauss–Newton" in found.reference
    assert [row.name for row in found.rows] == ["hk.identity()", "hk.kfac(0.1)", "long"]
    wanted = {
        "hk.identity()": plain,
        "hk.kfac(0.1)": hk.kfac(0.1).compute(*case.arguments).grads,
        "long": truth,
    }
    for name, grads in wanted.items():
        assert row(found, name).cosine == pytest.approx(cosine(grads, truth), abs=1e-4)
        size = float(oracles.flat(grads).norm() / oracles.flat(truth).norm())
        assert row(found, name).length == pytest.approx(size, rel=1e-3)
        assert row(found, name).time > 0 and math.isnan(row(found, name).spread)
    assert row(found, "long").status is hk.Status.CONVERGED and row(found, "hk.identity()").time == 1


def test_the_bar_has_a_step_for_each_reference_and_method(capsys: pytest.CaptureFixture[str]) -> None:
    for progress in (False, True):
        methods = {
            "long": hk.cg(20),
            "fails": hk.Implicit(hk.curvature.KFAC(layers=[lambda module: 0]), hk.solvers.Direct()),
        }
        hk.diagnose(*small().arguments, dampings=[0.1], methods=methods, progress=progress)
        told = capsys.readouterr().err
        assert told.endswith("\n") == ("5/5" in told) == progress  # also after a method that failed
    assert "reference" in told and "hk.kfac(0.1)" in told and "long" in told


def test_the_newton_step_is_that_of_the_dense_matrix() -> None:
    case = small()
    g = oracles.gradient(case.plain_inner(), list(case.params.values())).detach()
    size = len(g)
    step = torch.linalg.solve(case.ggn() + DAMPING * torch.eye(size, dtype=g.dtype), g)
    found = hk.diagnose(*case.arguments, damping=DAMPING, dampings=[], methods={})
    assert found.newton == pytest.approx(float(0.5 * g @ step / case.plain_inner().detach()), rel=1e-4)
    assert found.coverage == 1 and found.damping is None and f"by {100 * found.newton:.2g} %" in str(found)


def test_where_the_curvature_is_a_multiple_of_the_identity_the_identity_is_enough() -> None:
    case = linear([1.0] * 4, count=8)
    case.inner_batch[0].copy_(8**0.5 * torch.eye(8, dtype=cases.DOUBLE)[:, :4])
    assert torch.allclose(case.ggn(), torch.eye(4, dtype=cases.DOUBLE))
    problem = hk.BilevelProblem(case.inner, lambda m, h, b: hk.losses.mse(m(b[0]), b[1]))
    found = hk.diagnose(problem, *case.arguments[1:])
    assert row(found, "hk.identity()").cosine == pytest.approx(1, abs=1e-5)
    assert found.method == "hk.identity()" and "is enough" in found.advice and "is an end" not in found.advice
    assert found.damping == 0.1  # all dampings have the cosine 1.00


def test_a_problem_that_is_solved_exactly_has_no_hypergradient() -> None:
    """Without residuals the weights have no effect, and there is no J_in whose share a step could be."""
    case = linear([1.0, 0.5])
    case.inner_batch[1].copy_(case.model(case.inner_batch[0]).detach())
    problem = hk.BilevelProblem(case.inner, lambda m, h, b: hk.losses.mse(m(b[0]), b[1]))
    found = hk.diagnose(problem, *case.arguments[1:])
    assert found.zeros == 1 and math.isnan(found.newton) and math.isnan(found.rows[0].cosine)
    assert found.converged and found.method is None and found.damping is None and "No advice" in found.advice


def test_the_damping_is_that_of_the_best_dense_cosine() -> None:
    """With one output KFAC divides the damping: (A + π√δ I)(B + √δ/π), π² = tr A / dim A, where B = 1."""
    case = linear([3.0, 1.0, 0.3, 0.1, 0.03])
    problem = hk.BilevelProblem(case.inner, lambda m, h, b: hk.losses.mse(m(b[0]), b[1]))
    eye, pi = torch.eye(5, dtype=cases.DOUBLE), float(case.ggn().trace() / 5) ** 0.5

    def dense(matrix: Tensor) -> Tensor:
        """The hypergradient without the direct term 0.1 λ of a case."""
        return oracles.flat(oracles.implicit(case, matrix)) - 0.1

    truth = dense(case.ggn() + 0.03 * eye)
    wanted = {}
    for x in (1e-1, 1e-2, 1e-3, 1e-4, 1e-5):
        matrix = (case.ggn() + pi * x**0.5 * eye) * (1 + x**0.5 / pi)
        wanted[x] = float(torch.cosine_similarity(dense(matrix), truth, 0))
    found = hk.diagnose(problem, *case.arguments[1:], damping=0.03)
    plain = torch.cosine_similarity(dense(eye), truth, 0)
    assert row(found, "hk.identity()").cosine == pytest.approx(float(plain), abs=1e-4)
    assert (
        plain < diagnosis.USUAL and "Curvature probably pays" in found.advice and f"Take {found.method}" in found.advice
    )
    assert found.damping == max(wanted, key=lambda x: wanted[x]) == 1e-3
    few = hk.diagnose(problem, *case.arguments[1:], damping=0.03, dampings=[1e-1, 1e-2])
    assert few.damping == 0.01 and "0.01 is an end of the dampings tried" in few.advice
    assert "is an end" not in found.advice
    for x, cos in wanted.items():
        assert row(found, f"hk.kfac({x:g})").cosine == pytest.approx(cos, abs=0.02)  # B is drawn
    assert row(found, str(found.method)).cosine >= max(x.cosine for x in found.rows) - diagnosis.MARGIN


def test_of_the_dampings_only_the_best_one_is_recommended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says."""
    monkeypatch.setattr(diagnosis, "_seconds", lambda method, at: float("0.01" not in repr(method)) + 1)
    case = linear([3.0, 1.0, 0.3, 0.1, 0.03])
    problem = hk.BilevelProblem(case.inner, lambda m, h, b: hk.losses.mse(m(b[0]), b[1]))
    found = hk.diagnose(problem, *case.arguments[1:], damping=0.03, dampings=[0.01, 0.001], methods={})
    quick, best = row(found, "hk.kfac(0.01)"), row(found, "hk.kfac(0.001)")
    assert quick.time < best.time and best.cosine > quick.cosine > best.cosine - diagnosis.MARGIN
    assert found.method == "hk.kfac(0.001)"


class Broken(hk.hypergradient.Hypergradient):
    """One that always fails."""

    def fresh(self) -> Broken:
        return self

    def compute(self, *at: Any, **more: Any) -> Any:
        raise RuntimeError("no such kernel")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Counted(Broken):
    """The identity, with a count of its calls."""

    calls = 0

    def compute(self, *at: Any, **more: Any) -> Any:
        self.calls += 1
        return hk.identity().compute(*at)


def test_a_method_that_fails_is_a_row_with_its_error() -> None:
    found = hk.diagnose(*small().arguments, dampings=[], methods={"broken": Broken(), "pcg": hk.pcg(20)})
    broken = row(found, "broken")
    assert broken.error == "RuntimeError: no such kernel" and broken.status is None and math.isnan(broken.cosine)
    assert found.converged and row(found, "pcg").cosine > 0.9
    [line] = [line for line in str(found).splitlines() if line.startswith("broken")]
    assert line.split() == ["broken", "–", "–", "–", *broken.error.split()]


def test_an_error_of_the_problem_is_raised() -> None:
    case = small()
    problem = hk.BilevelProblem(lambda m, h, b: case.inner(m, h, b)[0], case.outer)  # type: ignore[index]
    with pytest.raises(TypeError):
        hk.diagnose(problem, *case.arguments[1:])


def test_a_reference_that_does_not_converge_gives_no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    case = small()
    assert hk.diagnose(*case.arguments).method is not None
    monkeypatch.setattr(diagnosis, "ITERATIONS", 1)
    found = hk.diagnose(*case.arguments)
    assert not found.converged and found.method is None and found.damping is None
    assert "did not converge" in found.advice and "after 1 products" in found.reference
    assert math.isnan(found.newton) and "Newton step" not in str(found)


def scalar(model: nn.Module, hyper: Any, batch: Any) -> Tensor:
    x, y = batch
    return 0.5 * (hyper() * (model(x) - y).square().sum(1)).mean()


def focal(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    output = model(batch[0])
    return hk.losses.mse(output, batch[1], weight=hyper() * (1 + output.square().sum(1)))


def test_the_reference_uses_the_hessian_where_the_loss_is_a_plain_tensor() -> None:
    case = linear([1.0, 0.5, 0.2])
    found = hk.diagnose(hk.BilevelProblem(scalar, case.outer), *case.arguments[1:], damping=DAMPING)
    assert found.converged and "Hessian" in found.reference and math.isnan(found.coverage)
    truth = oracles.implicit(case, case.ggn(), damping=DAMPING)  # least squares: both matrices are the same
    plain = oracles.implicit(case, torch.eye(3, dtype=cases.DOUBLE))
    assert row(found, "hk.identity()").cosine == pytest.approx(cosine(plain, truth), abs=1e-4)
    assert "plain scalar" in row(found, "hk.pcg(3, 0.01)").error and found.damping is None


def test_the_reference_uses_the_hessian_where_weights_move() -> None:
    case = linear([1.0, 0.5, 0.2])
    found = hk.diagnose(hk.BilevelProblem(focal, case.outer), *case.arguments[1:], damping=10.0, dampings=[1.0])
    assert "Hessian" in found.reference
    exact = hk.cg(50, 10.0, tolerance=1e-10)
    again = hk.diagnose(
        hk.BilevelProblem(focal, case.outer), *case.arguments[1:], damping=10.0, dampings=[], methods={"cg": exact}
    )
    assert row(again, "cg").cosine == pytest.approx(1, abs=1e-6)


def test_a_method_whose_solve_went_wrong_is_not_recommended() -> None:
    """CG with an indefinite Hessian may be near by chance; what its status says counts."""
    near = Comparison("lucky", cosine=1.0, time=0.5, status=hk.Status.NONPOSITIVE_CURVATURE)
    plain = Comparison("hk.identity()", cosine=0.3, time=1.0, status=hk.Status.DIRECT)
    kfac = Comparison("hk.kfac(0.1)", cosine=0.9, time=1.2, status=hk.Status.DIRECT)
    pcg = Comparison("hk.pcg(3, 0.1)", cosine=0.95, time=2.0, status=hk.Status.BUDGET)
    taken, told = diagnosis._advice([plain, kfac, near, pcg], 20)
    assert taken == "hk.kfac(0.1)" and "0.95" in told
    assert diagnosis._advice([plain, pcg, near], 20)[0] == "hk.pcg(3, 0.1)"


@pytest.mark.parametrize(
    ("first", "best", "taken", "words"),
    [
        (0.80, 1.0, "hk.identity()", "is enough"),
        (0.79, 1.0, "b", "may pay"),
        (0.59, 0.9, "b", "probably pays"),
        (0.59, 0.7, "b", "None is close to the reference, which took 20 products"),
        (0.55, 0.65, "hk.identity()", "No method is much closer"),
    ],
)
def test_the_rules(first: float, best: float, taken: str, words: str) -> None:
    made = ("hk.identity()", first, 1.0), ("b", best, 3.0)
    rows = [Comparison(name, cosine=x, time=seconds, status=hk.Status.DIRECT) for name, x, seconds in made]
    method, advice = diagnosis._advice(rows, 20)
    assert method == taken and words in advice


def test_several_pairs_of_batches() -> None:
    case = small()
    x, y = case.inner_batch
    other = (x.flip(0) + 0.3, y), case.outer_batch
    whole = hk.diagnose(*case.arguments, more=[other], damping=DAMPING, dampings=[], methods={})
    one = hk.diagnose(*case.arguments, damping=DAMPING, dampings=[], methods={})
    two = hk.diagnose(*case.arguments[:3], *other, damping=DAMPING, dampings=[], methods={})
    parts = [found.rows[0].cosine for found in (one, two)]
    assert whole.rows[0].cosine == pytest.approx(sum(parts) / 2) and parts[0] != parts[1]
    assert whole.rows[0].spread == pytest.approx(abs(parts[0] - parts[1]) / 2**0.5)
    assert whole.newton == pytest.approx((one.newton + two.newton) / 2)
    exact = [hk.pcg(200, DAMPING).compute(*case.arguments[:3], *pair).grads for pair in (case.arguments[3:], other)]
    assert whole.agreement == pytest.approx(cosine(*exact), abs=1e-4) and math.isnan(one.agreement)
    assert "± " in str(whole) and "Between pairs" in str(whole) and "Between pairs" not in str(one)


def test_micro_batches_have_the_reference_of_the_whole() -> None:
    torch.manual_seed(0)
    model, weights, x = cases.mlp(3, 4, 2), hk.SampleWeights(8), torch.randn(8, 3, dtype=cases.DOUBLE)
    inner, outer = (x, torch.arange(8) % 2, torch.arange(8)), (x.flip(0), torch.arange(8) // 4)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(b[2])),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    whole, pieces = (
        hk.diagnose(one, model.double(), weights.double(), inner, outer, damping=DAMPING, dampings=[], methods={})
        for one in (problem, hk.training.Accumulated(problem, 3))
    )
    assert "Gauss–Newton" in pieces.reference and pieces.converged and pieces.coverage == 1
    assert pieces.rows[0].cosine == pytest.approx(whole.rows[0].cosine, abs=1e-4)
    assert pieces.newton == pytest.approx(whole.newton, rel=1e-4)


def test_a_pair_without_a_hypergradient_has_no_cosine() -> None:
    case = linear([1.0, 0.5])
    problem = hk.BilevelProblem(case.inner, lambda m, h, b: hk.losses.mse(m(b[0]), b[1]))
    x = case.outer_batch[0]
    solved = case.inner_batch, (x, case.model(x).detach())
    found = hk.diagnose(problem, *case.arguments[1:], more=[solved], dampings=[0.1], methods={})
    for one in found.rows:
        assert not one.error and one.status is not None
        assert math.isnan(one.cosine) and math.isnan(one.spread)
    assert found.converged and found.method is None and "No advice" in found.advice


def test_entries_of_other_batches_do_not_count() -> None:
    """Weights of examples that a batch does not have are exactly zero there."""
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 2), hk.SampleWeights(12)
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(x[b]), y[b], weight=w(b)),
        lambda m, w, b: hk.losses.cross_entropy(m(x[b]), y[b]),
    )
    first, second, apart = torch.arange(6), torch.arange(3, 9), torch.arange(6, 12)
    found = hk.diagnose(problem, model, weights, first, first, more=[(second, first)], dampings=[], methods={})
    assert found.zeros == 0.5
    a, b = (hk.pcg(200).compute(problem, model, weights, rows, first).grads["weight"][3:6] for rows in (first, second))
    assert found.agreement == pytest.approx(float(torch.cosine_similarity(a, b, 0)), abs=1e-3)
    none = hk.diagnose(problem, model, weights, first, first, more=[(apart, first)], dampings=[], methods={})
    assert math.isnan(none.agreement)


def test_nothing_changes_and_given_methods_stay_as_they_are() -> None:
    case = photographs.Case()
    method = hk.cg(3, curvature=GGN(1e-2), warm_start=True)
    method.compute(*case.arguments())
    state = method.state_dict()
    before = case.photograph()
    found = hk.diagnose(*case.arguments(), damping=1e-2, dampings=[0.1], methods={"cg": method})
    assert case.photograph() == before
    assert row(found, "cg").status is hk.Status.BUDGET and state["calls"] == method.state_dict()["calls"] == 1
    assert all(torch.equal(x, method.state_dict()["start"][name]) for name, x in state["start"].items())
    hk.diagnose(*case.arguments(), damping=1e-2)
    assert case.photograph() == before


def test_processes_that_share_a_problem_make_the_same_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of their own must not decide, or one would wait for the others for ever."""
    ticks = itertools.count()
    monkeypatch.setattr(diagnosis, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(diagnosis, "TIMED_SECONDS", 10.0)
    case = small()
    calls = []
    for problem in (case.problem, DataParallel(case.problem)):
        counted = Counted()
        found = hk.diagnose(problem, *case.arguments[1:], dampings=[], methods={"counted": counted})
        assert row(found, "counted").cosine == row(found, "hk.identity()").cosine
        calls.append(counted.calls)
    assert calls == [1 + 10, 1 + 1 + diagnosis.TIMED]


@pytest.mark.parametrize("n", [1, 9, 30])
@pytest.mark.parametrize("kind", ["inner", "backward"])
def test_an_interrupt_leaves_everything(kind: str, n: int) -> None:
    case = photographs.Case()
    before = case.photograph()
    photographs.FUSE.light(kind, n, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        hk.diagnose(*case.arguments(), damping=1e-2, dampings=[0.1], methods={})
    assert case.photograph() == before
