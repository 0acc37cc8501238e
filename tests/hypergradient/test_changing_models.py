"""A method that keeps something, used while parameters are frozen, replaced or converted between its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from hyperkron.curvature import GGN

METHODS: dict[str, Callable[[], hk.Implicit]] = {
    "kfac": lambda: hk.kfac(0.1, fisher="type-2", refresh_every=9),
    "kfac, averages": lambda: hk.kfac(0.1, fisher="type-2", ema=0.9),
    "ekfac": lambda: hk.ekfac(0.1, fisher="type-2", refresh_every=9),
    "ekfac, one basis": lambda: hk.ekfac(0.1, fisher="type-2", basis_every=9),
    "warm start": lambda: hk.Implicit(GGN(0.1), hk.solvers.CG(200, tolerance=1e-13), warm_start=True),
}


def frozen(model: nn.Sequential) -> None:
    model[0].bias.requires_grad_(False)


def unfrozen(model: nn.Sequential) -> None:
    model[2].requires_grad_(True)


def larger(model: nn.Sequential) -> None:
    model[2].weight, model[2].bias = (
        nn.Parameter(torch.randn(4, *p.shape[1:], dtype=p.dtype)) for p in model[2].parameters()
    )


def narrower(model: nn.Sequential) -> None:
    model.float()


def wider(model: nn.Sequential) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(4, dtype=torch.float64)))


def inner(model: nn.Module, hyper: Any, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    x = batch[0] * model.scale if hasattr(model, "scale") else batch[0]
    return hk.losses.cross_entropy(model(x), batch[1], weight=hyper().sigmoid())


def outer(model: nn.Module, hyper: Any, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("change", [frozen, unfrozen, larger, narrower, wider])
def test_what_does_not_fit_any_more_is_forgotten(name: str, change: Callable[[nn.Sequential], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[2].requires_grad_(change is not unfrozen)
    hyper, problem = hk.as_hyper(torch.randn(8, dtype=torch.float64)), hk.BilevelProblem(inner, outer)
    batches = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(2)]
    method = METHODS[name]()
    method.compute(problem, model, hyper, *batches)
    change(model)
    if change is narrower:
        hyper, batches = hyper.float(), [(x.float(), y) for x, y in batches]
    for _ in range(2):
        found, wanted = (x.compute(problem, model, hyper, *batches) for x in (method, METHODS[name]()))
        assert oracles.relative(oracles.flat(found.grads), oracles.flat(wanted.grads)) < 1e-4


def scaled(model: nn.Module, hyper: Any, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    return 5.0 * inner(model, hyper, batch)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("made", [lambda: lambda *given: scaled(*given), lambda: functools.partial(scaled)])
def test_what_belongs_to_another_inner_loss_is_forgotten(name: str, made: Any) -> None:
    torch.manual_seed(0)
    model, hyper = nn.Sequential(nn.Linear(4, 3)).double(), hk.as_hyper(torch.randn(8, dtype=torch.float64))
    batches = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(2)]
    method = METHODS[name]()
    method.compute(hk.BilevelProblem(inner, outer), model, hyper, *batches)
    for _ in range(2):
        problem = hk.BilevelProblem(made(), outer)  # the same, defined again every time
        found, wanted = (x.compute(problem, model, hyper, *batches) for x in (method, METHODS[name]()))
        assert oracles.relative(oracles.flat(found.grads), oracles.flat(wanted.grads)) < 1e-10
    if name in ("kfac", "ekfac"):
        assert found.stats["curvature_age"] == 1


def test_inner_losses_that_change_in_every_call_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hyperkron.solution._warned", set())
    model, hyper = nn.Linear(4, 3).double(), hk.as_hyper(torch.randn(8, dtype=torch.float64))
    batch, method = (torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))), METHODS["kfac"]()
    for step in range(10):  # the same function, made again in every step, and one change
        problem = hk.BilevelProblem(scaled if step > 5 else lambda *given: inner(*given), outer)
        method.compute(problem, model, hyper, batch, batch)
    for function in (inner, scaled, inner, scaled):
        method.compute(hk.BilevelProblem(function, outer), model, hyper, batch, batch)
    with pytest.warns(hk.HyperkronWarning, match="every call has another inner loss"):
        method.compute(hk.BilevelProblem(inner, outer), model, hyper, batch, batch)


@pytest.mark.parametrize("name", ["kfac", "kfac, averages", "ekfac"])
def test_states_of_earlier_versions_know_parameters_by_name(name: str) -> None:
    """They kept no shapes; what they hold goes on."""
    torch.manual_seed(0)
    model, hyper = nn.Sequential(nn.Linear(4, 3)).double(), hk.as_hyper(torch.randn(8, dtype=torch.float64))
    batches = [(torch.randn(8, 4, dtype=torch.float64), torch.randint(0, 3, (8,))) for _ in range(2)]
    problem, method, resumed = hk.BilevelProblem(inner, outer), METHODS[name](), METHODS[name]()
    method.compute(problem, model, hyper, *batches)
    state = method.state_dict()
    state["curvature"]["parameters"] = list(dict(model.named_parameters()))
    resumed.load_state_dict(state)
    batches = [(torch.randn(8, 4, dtype=torch.float64), y) for _, y in batches]
    found, wanted = (x.compute(problem, model, hyper, *batches) for x in (resumed, method))
    assert oracles.relative(oracles.flat(found.grads), oracles.flat(wanted.grads)) < 1e-12


class Toggling(nn.Sequential):
    """Counts its calls, and changes an attribute in each."""

    calls = 0
    odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.odd = self.calls + 1, not self.odd
        return super().forward(x)


@pytest.mark.parametrize("cross", ["auto", "reverse"])
def test_an_attribute_that_every_call_changes_is_said(
    cross: Any, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The cross term would be decided in every call, with twice as many evaluations, without a word."""
    monkeypatch.setattr("hyperkron.solution._warned", set())
    torch.manual_seed(0)
    model, hyper, method = Toggling(nn.Linear(3, 2)), hk.as_hyper(torch.zeros(6)), hk.kfac(cross=cross)
    batch = torch.randn(6, 3), torch.arange(6) % 2
    for _ in range(8):
        method.compute(hk.BilevelProblem(inner, outer), model, hyper, batch, batch)
    told = [str(one.message) for one in recwarn if "chosen again in every call" in str(one.message)]
    assert len(told) == (cross == "auto")
