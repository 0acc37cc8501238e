"""One mask of dropout for all evaluations of a call, and attention with its fast kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
from hyperkron import trees
from hyperkron.curvature.base import Curvature
from hyperkron.evaluation.point import Point
from photographs import Case

# Dropout


CURVATURES: dict[str, Curvature] = {
    "hessian": hk.curvature.Hessian(0.1),
    "ggn": hk.curvature.GGN(0.1),
    "kfac": hk.curvature.KFAC(0.1),
    "ekfac": hk.curvature.EKFAC(0.1),
}


@pytest.mark.parametrize("name", list(CURVATURES))
def test_one_mask_for_every_product(name: str) -> None:
    case = Case()
    curvature = CURVATURES[name]
    with Point(*case.arguments()) as point:
        operator = curvature.operator(point, curvature.init())
        generator = torch.Generator().manual_seed(1)
        u, v = trees.normal_like(point.params, generator), trees.normal_like(point.params, generator)
        once = operator.matvec(v)
        point.outer()  # other evaluations in between do not matter
        point.inner()
        again = operator.matvec(v)
        torch.testing.assert_close(again, once, rtol=0, atol=0)
        torch.testing.assert_close(trees.dot(u, once), trees.dot(v, operator.matvec(u)), rtol=1e-9, atol=1e-12)
        anew = curvature.operator(point, curvature.init()).matvec(v)
        torch.testing.assert_close(anew, once, rtol=1e-12, atol=1e-12)


def test_the_mask_follows_the_global_random_state() -> None:
    values = []
    for seed in (1, 1, 2):
        case = Case()
        torch.manual_seed(seed)
        values.append(hk.identity().compute(*case.arguments()).grads["weights.weight"])
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
    assert float((values[0] - values[2]).norm()) > 1e-3 * float(values[0].norm())


@pytest.mark.parametrize("mode", ["forward", "difference"])
def test_one_mask_for_all_evaluations_of_a_cross_term(mode: Any) -> None:
    """The central difference agrees with double backward only if its two sides and that one share the mask."""
    cases = Case(), Case()
    for case in cases:  # a detached path is one that a finite difference sees and a derivative does not
        case.model.average = None
    wanted = hk.identity(cross="reverse").compute(*cases[0].arguments()).grads
    found = hk.identity(cross=mode).compute(*cases[1].arguments()).grads
    torch.testing.assert_close(found, wanted, rtol=1e-5 if mode == "difference" else 1e-10, atol=1e-9)


def test_steps_of_an_unrolled_method_draw_their_own_masks_and_draw_them_again() -> None:
    """Recomputed iterates equal kept ones only if the masks are drawn again; T equal masks would repeat."""
    case = Case()
    kept = hk.unrolled(5).compute(*case.arguments()).grads
    recomputed = hk.unrolled(5, checkpoint_every=4).compute(*case.arguments()).grads
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)
    with Point(*case.arguments()) as point:
        streams = (0, 1, 2, 1, 0)
        how: dict[str, Any] = {"differentiable": False, "where": "here"}
        values = [point.evaluate("inner", case.inner, point.params, stream=d, **how).item() for d in streams]
        assert values[0] == values[4] == point.inner().item()
        assert values[1] == values[3]
    assert len(set(values)) == 3


# Attention


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["auto", "reverse", "forward", "difference"])
def test_attention_with_its_fast_kernels_works_in_every_mode(mode: Any, training: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.train(training)
    weights = hk.SampleWeights(4).double()
    x, y = torch.randn(4, 5, 8, dtype=torch.float64), torch.randn(4, 5, 8, dtype=torch.float64)
    problem = hk.BilevelProblem(
        lambda m, w, b: hk.losses.mse(m(b[0]), b[1], weight=w(torch.arange(4))),
        lambda m, w, b: hk.losses.mse(m(b[0]), b[1]),
    )
    arguments = problem, layer, weights, (x, y), (y, x)
    wanted = hk.identity(cross="reverse").compute(*arguments).grads
    found = hk.identity(cross=mode).compute(*arguments).grads
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    assert torch.backends.mha.get_fastpath_enabled()
    assert hk.cg(2, 30.0, cross=mode).compute(*arguments).status.ok
