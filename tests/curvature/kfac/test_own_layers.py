"""Layers for modules of one's own, given to ``KFAC(layers=[…])``; ``test_extending.py`` has their mathematics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import cases
import hyperkron as hk
import oracles
from extensions import DELTA, Quadratics, QuadraticsLayer, quadratics
from hyperkron.curvature.kfac import grams
from hyperkron.curvature.kfac.capture import measure
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.factors import dense
from hyperkron.curvature.kfac.layers import cast_floating
from hyperkron.curvature.kfac.measured import Measurement


@pytest.mark.parametrize("module", [Quadratics, nn.Linear])
def test_rows_that_are_not_linear_in_the_input_are_made_of_it_unscaled(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In TF32 an input is scaled into half precision before its rows are made, where these scale with it."""
    monkeypatch.setattr(grams, "narrowed", lambda x, rows, d: (x / 4, x.new_tensor(4.0)))
    torch.manual_seed(0)
    case = cases.make(module(3, 2), (3,), count=30)
    method = hk.Implicit(
        hk.curvature.KFAC(DELTA, fisher="type-2", split="exact", layers=[quadratics]),
        hk.solvers.Direct(),
        cross="reverse",
    )
    wanted = oracles.implicit(case, case.ggn(), damping=DELTA)
    assert oracles.relative(method.compute(*case.arguments).grads, wanted) < 1e-10


def test_a_layer_is_found_beside_the_others_and_only_where_it_was_given() -> None:
    model = nn.Sequential(Quadratics(3, 2), nn.Linear(2, 2))
    rows = hk.curvature.KFAC(layers=[quadratics]).coverage(model).rows
    assert {row.curvature for row in rows} == {"kronecker"}
    assert [row.reason for row in rows[::2]] == ["Quadratics, with bias", "Linear, with bias"]
    assert hk.curvature.KFAC().coverage(model).covered < 0.5
    method, case = hk.Implicit(hk.curvature.KFAC(strict=True), hk.solvers.Direct()), cases.make(model, (3,))
    with pytest.raises(hk.solution.CoverageError, match="Quadratics"):
        method.compute(*case.arguments)


@pytest.mark.parametrize("layers", [quadratics, "Quadratics", [QuadraticsLayer(3, 2)]])
def test_layers_that_are_no_functions_are_refused(layers: Any) -> None:
    with pytest.raises(hk.HyperkronError, match=r"layers=.* list of functions"):
        hk.curvature.KFAC(layers=layers)


def test_a_function_that_returns_no_layer_is_refused() -> None:
    with pytest.raises(hk.HyperkronError, match=r"returned True for a Linear; return a hyperkron\.curvature\.Layer"):
        hk.curvature.EKFAC(layers=[lambda module: True]).coverage(nn.Linear(2, 2))  # type: ignore[list-item,return-value]


class Named(nn.Module):
    """Calls its layer by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Quadratics(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x=x)


def test_a_module_may_be_called_by_keyword() -> None:
    torch.manual_seed(0)
    case = cases.make(Named(), (3,))
    curvature = hk.curvature.KFAC(DELTA, fisher="type-2", split="exact", strict=True, layers=[quadratics])
    result = hk.Implicit(curvature, hk.solvers.Direct(), cross="reverse").compute(*case.arguments)
    assert oracles.relative(result.grads, oracles.implicit(case, case.ggn(), damping=DELTA)) < 1e-10


@dataclass(frozen=True)
class TokenQuadraticsLayer(QuadraticsLayer):
    """The rows are [x, x²] at every token."""

    tokens: ClassVar[bool] = True

    def inputs(self, x: Tensor, sharing: str) -> Iterator[Tensor]:
        for rows in super().inputs(x, sharing):
            yield rows.flatten(1, -2)

    def gradients(self, g: Tensor, sharing: str) -> Iterator[Tensor]:
        yield g.reshape(1, -1, g.shape[-1])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_tokens_without_a_loss_are_left_out_of_a_layer_of_ones_own(sharing: Any) -> None:
    """A is the mean over the tokens that count, whatever the others hold."""
    torch.manual_seed(0)
    case = cases.make(Quadratics(3, 2), (4, 3), loss="cross_entropy", count=5)
    (x, y), seen = case.inner_batch, torch.rand(5, 4) < 0.6
    seen[:, 0] = True
    x[~seen] = 7.0
    case.inner_batch = (x, y.masked_fill(~seen, -100))
    layer = TokenQuadraticsLayer(6, 2)
    with case.point() as point:
        made = plan(case.model, "diagonal", [lambda module: layer])
        generator = torch.Generator().manual_seed(0)
        found = measure(point, made, Measurement("type-2", 1, sharing, generator))
    rows = torch.cat((x, x * x, torch.ones_like(x[..., :1])), -1)
    means = [row[kept].mean(0) for row, kept in zip(rows, seen, strict=True)]
    counted = torch.stack(means) if sharing == "reduce" else rows[seen]
    assert oracles.relative(dense(found.a["Quadratics"])[0], counted.T @ counted / len(counted)) < 1e-12


class Lookup(nn.Module):
    """z = W one_hot(i), whose input is whole numbers."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, count, generator=torch.Generator().manual_seed(0)))

    def forward(self, rows: Tensor) -> Tensor:
        return self.weight.T[rows]


class LookupLayer(hk.curvature.Layer):
    """The same for KFAC."""

    def __init__(self, module: Lookup) -> None:
        self.groups, (self.d_out, self.d_in) = 1, module.weight.shape

    def inputs(self, x: Tensor, sharing: str) -> Iterator[Tensor]:
        yield nn.functional.one_hot(x.reshape(-1), self.d_in).float()[None]

    def gradients(self, g: Tensor, sharing: str) -> Iterator[Tensor]:
        yield g.reshape(1, -1, self.d_out)

    def positions(self, x: Tensor, g: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        yield nn.functional.one_hot(x, self.d_in).float()[:, None], g[:, None]


def test_a_layer_may_look_up_whole_numbers() -> None:
    """The gradients of its examples are those of a linear layer on the one-hot rows."""
    module = Lookup(7, 2)
    x, g = torch.randint(0, 7, (3, 5)), torch.randn(3, 5, 2, dtype=torch.float64)
    (found,) = LookupLayer(module).gradients_of_examples(cast_floating(x, g.dtype), g, 3)
    wanted = torch.einsum("nso,nsi->noi", g, nn.functional.one_hot(x, 7).double())
    torch.testing.assert_close(found[0][:, 0], wanted)
    torch.testing.assert_close(found[1][:, 0], g.sum(1))
    model, given = nn.Sequential(module, Pooled(), nn.Linear(2, 3)), [as_lookup]
    batch = x, torch.tensor([0, 1, 2]), torch.arange(3)
    problem = hk.BilevelProblem(
        lambda model, weights, b: hk.losses.cross_entropy(model(b[0]), b[1], weight=weights(b[2])),
        lambda model, weights, b: hk.losses.cross_entropy(model(b[0]), b[1]),
    )
    method = hk.Implicit(hk.curvature.EKFAC(0.1, layers=given), hk.solvers.Direct())
    assert method.compute(problem, model, hk.SampleWeights(3), batch, batch).grads["weight"].isfinite().all()


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def as_lookup(module: nn.Module) -> LookupLayer | None:
    return LookupLayer(module) if isinstance(module, Lookup) else None
