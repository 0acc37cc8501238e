"""The rules for the damping against dense matrices, and the page with what they gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hyperkron as hk
from experiments import records
from experiments.pieces import Lines
from experiments.which_method import compare, damping, damping_page, diagnosed
from experiments.which_method.damping_rules import At, Eigenvalues, Ruled, Trials, by_layer, cosine, solved
from hyperkron.curvature import GGN, KFAC, Point
from hyperkron.trees import Tree

GRID = (1.0, 1e-2, 1e-4)


@pytest.fixture
def at() -> At:
    """A small problem with a penalty, in float64."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double()
    x, y = torch.randn(12, 4, dtype=torch.float64), torch.randint(2, (12,))

    def inner(m: Any, weights: Any, batch: Any) -> hk.losses.Loss:
        return hk.losses.cross_entropy(m(batch[0]), batch[1], weight=weights(batch[2])) + hk.losses.l2(m, 1e-3)

    problem = hk.BilevelProblem(inner, lambda m, _, b: hk.losses.cross_entropy(m(b[0]), b[1]))
    return problem, model, hk.SampleWeights(12).double(), (x, y, torch.arange(12)), (x.roll(1, 0), y)


def flat(tree: Tree) -> torch.Tensor:
    return torch.cat([x.flatten() for x in tree.values()]).detach()


def dense(at: At, curvature: Any) -> torch.Tensor:
    """A + δI, column by column."""
    with Point(*at) as point:
        operator = curvature.operator(point, curvature.init())
        sizes, size = [p.numel() for p in point.params.values()], sum(p.numel() for p in point.params.values())

        def column(unit: torch.Tensor) -> torch.Tensor:
            parts = zip(point.params.items(), unit.split(sizes), strict=True)
            return flat(operator.matvec({name: part.reshape(p.shape) for (name, p), part in parts}))

        return torch.stack([column(unit) for unit in torch.eye(size, dtype=torch.float64)], 1)


def test_the_eigenvalues_are_those_of_the_dense_product(at: At) -> None:
    """Without damping the penalty's 2α is all that is added to every eigenvalue."""
    values = torch.linalg.eigvalsh(dense(at, KFAC(0.0, split="exact")) - 2e-3 * torch.eye(23, dtype=torch.float64))
    found = Eigenvalues(at)
    torch.testing.assert_close(torch.tensor(found.mean).double(), values.mean())
    torch.testing.assert_close(torch.tensor(found.largest).double(), values.max())


def test_a_share_of_each_layer_is_kfac_with_that_damping(at: At) -> None:
    """With one layer a share of the layer's mean is a share of the mean; the split is that of KFAC."""
    problem, model, *rest = at
    alone = (problem, model[0], *rest)
    torch.testing.assert_close(
        by_layer(0.1).compute(*alone).grads, solved(KFAC, 0.1 * Eigenvalues(alone).mean).compute(*alone).grads
    )
    top = Eigenvalues(alone).largest
    torch.testing.assert_close(
        by_layer(0.1, largest=True).compute(*alone).grads, solved(KFAC, 0.1 * top).compute(*alone).grads
    )


@pytest.mark.parametrize("extra", [0.0, 1e-3, 1.0])
def test_rules_with_products_agree_with_dense_matrices(at: At, extra: float) -> None:
    """The lowest quadratic model is the highest cosine with the solution in the norm of the matrix."""
    trials = Trials(at, KFAC, GRID)
    matrix = dense(at, GGN(extra))
    b = flat(trials.b)
    solution = torch.linalg.solve(matrix, b)
    products, residuals, ones = {}, {}, {}
    for d in GRID:
        v = flat(solved(KFAC, d).compute(*at).solution.value)
        torch.testing.assert_close(v, flat(trials.v[d]))
        products[d] = float(v @ matrix @ solution / (v @ matrix @ v).sqrt())
        residuals[d] = float(torch.cosine_similarity(matrix @ v, b, 0))
        ones[d] = float(torch.cosine_similarity(torch.linalg.solve(dense(at, KFAC(d)), matrix @ b), b, 0))
    assert trials.model(extra) == max(GRID, key=products.__getitem__)
    assert trials.residual(extra) == max(GRID, key=residuals.__getitem__)
    assert trials.one_product(extra) == max(GRID, key=ones.__getitem__)


def test_the_reduction_ratio_decides(at: At) -> None:
    problem, model, hyper, inner, _ = at
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trials, good = Trials(at, KFAC, GRID), []
    matrix, start = dense(at, GGN(0.0)), problem.inner(model, hyper, inner).item()
    for d in GRID:
        step = flat(trials.steps[d])
        moved = {n: before[n] + trials.steps[d][n] for n in before}
        end = torch.func.functional_call(model, moved, (inner[0],))
        penalty = 1e-3 * sum(float(p.square().sum()) for p in moved.values())
        after = hk.losses.cross_entropy(end, inner[1], weight=hyper(inner[2])).item() + penalty
        ratio = (after - start) / float(flat(trials.g) @ step + 0.5 * step @ matrix @ step)
        good += [d] if ratio >= 0.5 else []
    assert trials.levenberg() == min(good, default=1.0)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_rule_is_asked_at_every_call(at: At) -> None:
    taken = []

    def rule(given: At, call: int) -> float:
        assert given[0] is at[0]
        taken.append(call)
        return 1e-2

    method = Ruled(rule)
    first, second = (method.compute(*at).grads for _ in range(2))
    assert taken == [1, 2]
    assert cosine(first, solved(KFAC, 1e-2, 1).compute(*at).grads) == pytest.approx(1)
    assert cosine(first, second) < 1 - 1e-6  # other labels


def test_problems_without_their_penalty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "START", 2)
    for case in damping.cases("poisoning"):
        task = damping.task_of(case, 0, None)
        model, hyper, inner, _ = compare.started(task, 0)
        curvatures = [float(penalty.coefficient) for penalty in task.problem.inner(model, hyper, inner).l2]
        assert sum(curvatures) == pytest.approx(0.0 if case.plain else 4e-3)
    assert [str(case) for case in damping.cases("penalty per weight")] == ["penalty per weight"]
    assert [str(case) for case in damping.cases(damping.MLP)] == [damping.MLP]


def test_what_is_recorded_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "START", 2)
    monkeypatch.setattr(diagnosed, "LOOKS", (0,))
    small = {"GRID": (1e-2,), "MEANS": (1.0,), "LARGEST": (0.1,), "STEPS": 2, "SEEDS": (1,)}
    for name, value in (small | {"RULES": {"0.1 · mean": damping.by_mean}}).items():
        monkeypatch.setattr(damping, name, value)
    for _ in range(2):
        damping.main(["--out", str(tmp_path / "rows.jsonl"), "--problems", "domain weights"])
        rows = Lines(tmp_path / "rows.jsonl").rows
        assert [row.get("rule", row.get("curvature")) for row in rows] == ["KFAC", "EKFAC"] * 2 + ["0.1 · mean"]


def test_the_page_has_the_recorded_tables() -> None:
    text = (records.PAGES / "damping.md").read_text("utf-8")
    made = damping_page.tables(Lines(damping.RESULT).rows)
    assert len(made) == 5 and all(table in text for table in made)
