"""The coverage table: what it says, and that it says what happens."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.curvature.kfac.kronecker import KroneckerOperator
from hyperkron.evaluation.point import Point

VOCABULARY, D, C = 7, 4, 3
DAMPING = 0.5


class Language(nn.Module):
    """A bit of everything: tied to the embedding, tied to each other, normalised, raw, frozen, grouped, uncalled."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, D)
        self.positions = nn.Parameter(torch.randn(2, D) / 10)
        self.norm = nn.LayerNorm(D)
        self.mix = nn.Conv1d(D, D, 1, groups=2)
        self.up, self.again = nn.Linear(D, D), nn.Linear(D, D)
        self.again.weight, self.again.bias = self.up.weight, self.up.bias
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.shift = nn.Linear(D, D)
        self.shift.weight.requires_grad_(False)
        self.out = nn.Linear(D, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight
        self.functional = nn.Linear(VOCABULARY, C)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x) + self.positions)
        h = self.mix(h.mT).mT
        h = self.again(self.up(h).tanh()).tanh()
        h = self.shift(self.frozen(h))
        return F.linear(self.out(h).mean(1), self.functional.weight, self.functional.bias)


TABLE = """
parameter          shape      curvature        why
positions          (2, 4)     scaled identity  Language
embed.weight       (7, 4)     kronecker        Linear, tied to embed (Embedding)
norm.weight        (4,)       diagonal         LayerNorm
norm.bias          (4,)       diagonal         LayerNorm
mix.weight         (4, 2, 1)  kronecker        Conv1d, with bias
mix.bias           (4,)       kronecker        Conv1d, with weight
up.weight          (4, 4)     kronecker        Linear, with bias, tied over 2 modules
up.bias            (4,)       kronecker        Linear, with weight, tied over 2 modules
shift.bias         (4,)       kronecker        Linear
functional.weight  (3, 7)     kronecker        Linear, with bias
functional.bias    (3,)       kronecker        Linear, with weight
84.6% of 104 parameters are covered by Kronecker blocks.
""".strip()


def make() -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, weights = Language().double(), hk.SampleWeights(5).double()
    x, y = torch.randint(VOCABULARY, (5, 2)), torch.arange(5) % C
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1], weight=w(torch.arange(5))),
        lambda m, w, b: hk.losses.cross_entropy(m(b[0]), b[1]),
    )
    return problem, model, weights, (x, y), (x, y)


def operator(
    curvature: hk.curvature.KFAC | hk.curvature.EKFAC,
) -> tuple[KroneckerOperator, dict[str, Tensor], dict[str, str]]:
    """The curvature at a point, ones shaped like θ, and the notes that go into a result."""
    with Point(*make()) as point:
        made = curvature.operator(point, curvature.init())
        return made, {name: torch.ones_like(p) for name, p in point.params.items()}, point.notes


def test_the_table_is_what_a_person_reads() -> None:
    coverage = hk.curvature.KFAC().coverage(make()[1])
    assert str(coverage) == TABLE
    assert str(hk.curvature.EKFAC().coverage(make()[1])) == TABLE


def test_fractions_count_numbers_not_tensors() -> None:
    coverage = hk.curvature.KFAC().coverage(make()[1])
    assert coverage.covered == pytest.approx(88 / 104)
    assert [row.parameter for row in coverage.uncovered] == ["positions", "norm.weight", "norm.bias"]
    assert [row.count for row in coverage.uncovered] == [8, 4, 4]
    assert hk.curvature.KFAC().coverage(nn.Linear(2, 2)).covered == 1.0
    assert hk.curvature.KFAC().coverage(nn.LayerNorm(2)).covered == 0.0
    assert "0.0% of 4 parameters" in str(hk.curvature.KFAC().coverage(nn.LayerNorm(2)))


def test_every_trainable_parameter_is_listed_once_and_no_other() -> None:
    model = make()[1]
    listed = [row.parameter for row in hk.curvature.KFAC().coverage(model).rows]
    assert listed == [name for name, p in model.named_parameters() if p.requires_grad]


@pytest.mark.parametrize("fallback", ["diagonal", "identity", "zero"])
@pytest.mark.parametrize("curvature", [hk.curvature.KFAC, hk.curvature.EKFAC])
def test_the_table_says_what_happens(curvature: Any, fallback: Literal["diagonal", "identity", "zero"]) -> None:
    """The inverse of ones shows it: nothing, a constant, one number for each tensor, one for each entry, or a block."""
    made, ones, notes = operator(curvature(DAMPING, fallback=fallback))
    solved = made.solve(ones)
    uncalled = {"functional.weight", "functional.bias"}  # a table made before the first call cannot know
    assert set(str(notes["uncalled"]).split(":")[0].split(", ")) == uncalled
    constants = set()  # the damped 1 of the identity
    for row in curvature(DAMPING, fallback=fallback).coverage(make()[1]).rows:
        kinds = {"diagonal": "scaled identity"}
        told = kinds.get(fallback, fallback) if row.parameter in uncalled else row.curvature
        values = solved[row.parameter].unique()
        if told == "zero":
            assert values.tolist() == [0.0]
        elif told == "identity":
            assert len(values) == 1
            constants.add(float(values))
        elif told == "scaled identity":
            assert len(values) == 1
            assert 0 < float(values) < 1 / DAMPING
        elif told == "diagonal":
            assert len(values) > 1
            assert float(values.max()) <= 1 / DAMPING
        else:
            assert told == "kronecker"
            assert len(values) > 1
    assert len(constants) == (fallback == "identity")
    assert all(0.0 < constant < 1.0 for constant in constants)


def test_strict_names_the_first_five_and_counts_the_rest() -> None:
    model = nn.Sequential(*[nn.LayerNorm(D) for _ in range(3)], nn.Linear(D, C))
    problem, _, weights, _, _ = make()
    batch = (torch.randn(5, D), torch.arange(5) % C)
    method = hk.Implicit(hk.curvature.KFAC(strict=True), hk.solvers.Direct())
    with pytest.raises(
        hk.solution.CoverageError, match=r"0\.weight \(LayerNorm\), .*2\.weight \(LayerNorm\) and 1 more;"
    ):
        method.compute(problem, model, weights, batch, batch)
    model[:3].requires_grad_(False)  # the remedy it names
    weights.float()
    assert method.compute(problem, model, weights, batch, batch).status is hk.Status.DIRECT


def test_strict_also_sees_layers_that_are_never_called() -> None:
    """It takes a pass over the data to know."""
    model = make()[1]
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("up", "functional")))
    problem, _, weights, batch, _ = make()
    with pytest.raises(hk.solution.CoverageError, match=r"functional\.weight, functional\.bias .*never called"):
        hk.Implicit(hk.curvature.KFAC(strict=True), hk.solvers.Direct()).compute(problem, model, weights, batch, batch)


def test_freezing_and_unfreezing_between_calls_is_noticed() -> None:
    """A reused inverse (τ = 10) would leave a newly trainable layer out."""
    problem, model, weights, batch, _ = make()
    method = hk.kfac(DAMPING, refresh_every=10)
    model.up.requires_grad_(False)
    method.compute(problem, model, weights, batch, batch)
    model.up.requires_grad_(True)
    result = method.compute(problem, model, weights, batch, batch)
    assert (result.stats["curvature_refreshes"], result.stats["curvature_age"]) == (2, 0)
    assert result.solution is not None
    assert float(result.solution.value["up.weight"].norm()) > 0


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_parameter_without_numbers_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 0))
    with pytest.raises(hk.HyperkronError, match=r"1.weight has shape \(0, 2\).*requires_grad_\(False\)"):
        hk.curvature.KFAC().coverage(model)
    model[1].requires_grad_(False)
    assert hk.curvature.KFAC().coverage(model).covered == 1.0
