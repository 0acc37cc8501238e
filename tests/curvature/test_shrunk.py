"""The Gauss–Newton matrix drawn towards EKFAC."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyperkron as hk
import oracles
from cases import Mean, make, mlp, random_weights
from hyperkron import trees
from hyperkron.curvature import EKFAC, GGN, ShrunkGGN
from hyperkron.solution import HyperkronError
from hyperkron.solvers import CG

MODELS = {
    "mlp": lambda: (mlp(3, 4, 3), (3,)),
    "norm": lambda: (nn.Sequential(nn.Conv2d(2, 3, 2), nn.GroupNorm(1, 3), Mean(True), nn.Linear(3, 2)), (2, 3, 3)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_it_is_the_mixture_of_both(name: str, share: float) -> None:
    model, shape = MODELS[name]()
    case = make(model, shape, loss="cross_entropy", hyper=random_weights(5))
    shrunk = ShrunkGGN(1e-2, share, fisher="type-2")
    with case.point() as point:
        ggn, ekfac = GGN(1e-2), EKFAC(1e-2, fisher="type-2")
        exact = oracles.dense(ggn.operator(point, ggn.init()).matvec, case.params)
        kronecker = oracles.dense(ekfac.operator(point, ekfac.init()).definite().matvec, case.params)
        operator = shrunk.operator(point, shrunk.init())
        found = oracles.dense(operator.matvec, case.params)
        wanted = share * exact + (1 - share) * kronecker
        assert oracles.relative(found, wanted) < 1e-12
        many = trees.stacked([case.params, trees.scale(case.params, -2.0)])
        stacked = trees.stacked([operator.matvec(one) for one in trees.unstacked(many)])
        assert oracles.relative(operator.matvec_stacked(many), stacked) < 1e-12
        assert operator.products == len(wanted) + 4
        inverse = ekfac.operator(point, ekfac.init()).definite()
        solved = CG(60, 1e-13).solve(operator, case.params, preconditioner=inverse)
        assert oracles.relative(wanted @ oracles.flat(solved.value), oracles.flat(case.params)) < 1e-9


def test_preconditioned_by_ekfac_it_has_no_small_eigenvalue() -> None:
    case = make(mlp(3, 4, 3), (3,), loss="cross_entropy")
    with case.point() as point:
        ekfac, shrunk = EKFAC(1e-6, fisher="type-2"), ShrunkGGN(1e-6, 0.25, fisher="type-2")
        kronecker = oracles.dense(ekfac.operator(point, ekfac.init()).definite().matvec, case.params)
        mixed = oracles.dense(shrunk.operator(point, shrunk.init()).matvec, case.params)
    values = torch.linalg.eigvals(torch.linalg.solve(kronecker, mixed)).real
    assert float(values.min()) > 0.75 - 1e-9


def test_wrong_options_are_refused() -> None:
    for wrong in ({"share": 1.5}, {"damping": -1.0}, {"fisher": "no"}):
        with pytest.raises(HyperkronError, match=next(iter(wrong))):
            ShrunkGGN(**wrong)  # type: ignore[arg-type]
    assert hk.pcg(3, curvature=ShrunkGGN(1e-2)).curvature == ShrunkGGN(1e-2)
