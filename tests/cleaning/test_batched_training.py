"""Networks trained side by side: the same as one after the other, and what is not stacked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blobs import Watch, blobs, quicken
from hyperkron.cleaning import CleanConfig, clean
from hyperkron.cleaning.batched_training import GroupLoss, stackable, train_batched
from hyperkron.cleaning.evidence import certain, likelihood
from hyperkron.cleaning.method import trusted_expert
from hyperkron.cleaning.models import linear, mlp, small_cnn
from hyperkron.cleaning.stages import Stages
from hyperkron.cleaning.trainer import Dense, TrainingPlan, TrainingTargets, predict, train
from hyperkron.cleaning.work import Work
from hyperkron.solution import NonFiniteError

Build = Callable[[], nn.Module]
PLAN = TrainingPlan(epochs=2, least=40)
SEEDS = (5, 6, 5, 9)


def inputs(*shape: int, dtype: torch.dtype = torch.float64) -> Dense:
    return Dense(torch.randn(200, *shape, generator=torch.Generator().manual_seed(1), dtype=dtype))


def targets(sizes: tuple[int, ...] = (180, 33, 40, 17), classes: int = 3) -> list[TrainingTargets]:
    """In batches of 22 and 16, the last of 4, 8 or, left out, 1; the last two have weights and labels."""
    random = torch.Generator().manual_seed(2)
    found = []
    for at, size in enumerate(sizes):
        rows = torch.randperm(200, generator=random)[:size]
        evidence = 3 * torch.randn(size, classes, generator=random)
        if at == 0:
            evidence = certain(evidence.argmax(1), classes)
        weight = torch.rand(size, generator=random) if at == len(sizes) - 2 else None
        told = (rows % classes, torch.rand(size, generator=random)) if at == len(sizes) - 1 else None
        found.append(TrainingTargets(rows, evidence, weight, told))
    return found


def sequential(build: Build, targets: list[TrainingTargets], values: Dense) -> list[nn.Module]:
    return [train(build, values, one, PLAN, seed=s, steps=40) for one, s in zip(targets, SEEDS, strict=True)]


def apart(one: list[nn.Module], other: list[nn.Module]) -> float:
    """The largest difference of a parameter."""
    pairs = [
        (p, q) for a, b in zip(one, other, strict=True) for p, q in zip(a.parameters(), b.parameters(), strict=True)
    ]
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


# --- the same networks --------------------------------------------------------------------------------------

STACKED: dict[str, tuple[Build, tuple[int, ...]]] = {
    "perceptron": (lambda: mlp(6, 3, 20).double(), (6,)),
    "images": (lambda: mlp(12, 3, (8, 7)).double(), (3, 2, 2)),
    "linear": (lambda: linear(6, 3).double(), (6,)),
    "bare": (lambda: nn.Linear(6, 3).double(), (6,)),
    "without bias": (lambda: nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 3)).double(), (6,)),
}


@pytest.mark.parametrize("name", STACKED)
def test_side_by_side_is_the_same_as_one_after_the_other(name: str) -> None:
    build, shape = STACKED[name]
    values, all_targets = inputs(*shape), targets()
    assert stackable([build(), build()], values)
    networks = train_batched(build, values, all_targets, PLAN, seeds=SEEDS)
    alone = sequential(build, all_targets, values)
    assert apart(networks, alone) < 1e-10
    assert apart(networks, [build() for _ in networks]) > 1e-2  # they have learnt
    for network, other in zip(networks, alone, strict=True):
        assert not network.training and type(network) is type(other)
        assert torch.allclose(network(values.values), other(values.values), atol=1e-10)


@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_the_longest_training_decides_for_all(drop: float) -> None:
    ticks: list[int] = []
    plan, values = TrainingPlan(epochs=12, least=20), inputs(6, dtype=torch.float32)
    assert [plan.steps(n) for n in (80, 33)] == [60, 25]

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), *([nn.Dropout(drop)] if drop else []), nn.ReLU(), nn.Linear(8, 3))

    both = train_batched(build, values, targets((80, 33)), plan, seeds=(0, 1), tick=ticks.append)
    assert ticks == ([1] * 120 if drop else [2] * 60) and len(both) == 2


def test_batches_of_one_size_need_no_filling_up() -> None:
    build = STACKED["perceptron"][0]
    equal = targets((64, 64, 64, 64))
    values = inputs(6)
    assert apart(train_batched(build, values, equal, PLAN, seeds=SEEDS), sequential(build, equal, values)) < 1e-10


def test_the_slope_is_that_of_the_likelihood() -> None:
    random = torch.Generator().manual_seed(3)
    output = (4 * torch.randn(60, 5, dtype=torch.float64, generator=random)).requires_grad_()
    evidence = 3 * torch.randn(60, 5, dtype=torch.float64, generator=random)
    evidence[:4] = 0.0  # all is possible: nothing to learn
    evidence[4:9] = certain(torch.arange(5), 5).double()
    evidence[9] = torch.tensor([0.0, -2e3, -2e3, -2e3, -2e3])  # beyond what exp can hold
    output.data[9] = torch.tensor([-80.0, 0, 0, 0, 0])
    label, belief = torch.randint(5, (60,), generator=random), torch.rand(60, generator=random, dtype=torch.float64)

    def wanted(believing: bool) -> Tensor:
        loss = likelihood(output, evidence).value
        if believing:
            loss = loss + (belief * F.cross_entropy(output, label, reduction="none")).mean()
        return loss

    seen = evidence - evidence.max(1, keepdim=True).values
    for believing in (False, True):
        told = (label[None, :, None], belief[None, :, None] / 60) if believing else (None, None)
        found = GroupLoss.apply(output[None], seen[None], 1 / 60, *told, [])
        [slope], [expected] = (torch.autograd.grad(loss, output) for loss in (found, wanted(believing)))
        assert torch.allclose(slope, expected, atol=1e-12) and (believing or bool((slope[:4] == 0).all()))
        assert found.item() == pytest.approx(wanted(believing).item(), rel=1e-5)


def test_every_network_keeps_weights_of_its_own() -> None:
    networks = train_batched(lambda: mlp(6, 3), inputs(6, dtype=torch.float32), targets(), PLAN, seeds=SEEDS)
    before = [p.detach().clone() for network in networks[1:] for p in network.parameters()]
    for p in networks[0].parameters():
        assert p.is_contiguous() and p.untyped_storage().nbytes() == p.numel() * p.element_size()
        p.data.zero_()
    assert all(
        torch.equal(p, q) for p, q in zip(before, (p for n in networks[1:] for p in n.parameters()), strict=True)
    )


def test_the_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    train_batched(lambda: mlp(6, 3), inputs(6, dtype=torch.float32), targets(), PLAN, seeds=SEEDS)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_training_that_went_wrong_is_refused() -> None:
    values = Dense(inputs(6, dtype=torch.float32).values.clone())
    rows = torch.arange(20)
    values.values[3] = float("inf")
    two = [TrainingTargets(rows + 40, certain(rows % 3, 3)), TrainingTargets(rows, certain(rows % 3, 3))]
    with pytest.raises(NonFiniteError, match="the training loss became nan after 40 steps"):
        train_batched(lambda: mlp(6, 3), values, two, PLAN, seeds=(0, 1))


# --- what is not stacked ------------------------------------------------------------------------------------


class Own(nn.Module):
    """A network of a kind that is unknown here."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.abs())


def _shared() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 3))


def _frozen() -> nn.Module:
    network = mlp(6, 3)
    network[1].bias.requires_grad_(False)
    return network


def _hooked() -> nn.Module:
    network = nn.Sequential(nn.Linear(6, 3))
    network[0].register_forward_hook(lambda module, x, y: 2 * y)
    return network


APART: dict[str, Build] = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)),
    "weight norm": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.ReLU()), nn.Linear(8, 3)),
    "own": Own,
    "shared": _shared,
    "frozen": _frozen,
    "hooked": _hooked,
}


@pytest.mark.parametrize("name", APART)
@pytest.mark.long
def test_other_networks_are_trained_one_after_the_other(name: str) -> None:
    values, ticks = inputs(6, dtype=torch.float32), list[int]()
    assert not stackable([APART[name](), APART[name]()], values)
    networks = train_batched(APART[name], values, targets(), PLAN, seeds=SEEDS, tick=ticks.append)
    assert apart(networks, sequential(APART[name], targets(), values)) == 0
    assert ticks == [1] * (4 * 40)
    asked = torch.arange(90)
    assert len({float(predict(network, values, asked).sum(0)[0]) for network in networks}) == 4


def test_other_inputs_and_networks_of_different_structure_are_not_stacked() -> None:
    class Words:
        def __len__(self) -> int:
            return 90

        def batch(self, rows: Tensor) -> tuple[Tensor, ...]:
            return (rows[:, None].float().expand(-1, 6),)

    two = [mlp(6, 3), mlp(6, 3)]
    assert stackable(two, inputs(6)) and not stackable(two, Words())
    assert not stackable([nn.Linear(6, 3), nn.Linear(6, 3)], inputs(2, 6))  # the rows are matrices
    assert not stackable([mlp(6, 3), mlp(6, 3, 9)], inputs(6))
    assert not stackable([two[0], two[0]], inputs(6))  # one network, built once
    assert not stackable([small_cnn(1, 8, 3)] * 2, inputs(1, 8, 8))


# --- the budget, the plans --------------------------------------------------------------------


def test_what_is_saved_in_steps_is_made_up_for_by_the_rate() -> None:
    nothing: Any = None
    work = Work(*[nothing] * 7, TrainingPlan(), *[nothing] * 3)
    for rows, steps, rate in ((600, 120, 4e-3), (2560, 150, 3.2e-3), (5000, 293, 2e-3)):
        plan = work.quick(rows)
        assert plan.steps(rows) == steps and plan.rate == pytest.approx(rate, rel=1e-6)
        assert plan.fine_rate / plan.rate == pytest.approx(TrainingPlan().fine_rate / TrainingPlan().rate)
        assert plan.steps(rows) * plan.rate == pytest.approx(work.short.steps(rows) * work.short.rate)


@pytest.mark.parametrize(("rows", "trusted", "many"), [(121, 23, False), (130, 2, True)])
def test_the_announced_steps_are_made(rows: int, trusted: int, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch, least=8)
    monkeypatch.setattr("hyperkron.cleaning.models.trees.installed", lambda: False)  # they take no steps
    monkeypatch.setattr("hyperkron.cleaning.work.MANY_ROWS", 0 if many else 1e9)
    data, watch = blobs(rows=rows, trusted=trusted), Watch()
    config = CleanConfig(epochs=3, compare=("noisy", "small-loss"))
    found = clean(data.train, data.trusted, config=config, progress=watch)
    assert found.chosen == "hyperkron" and watch.steps == watch.totals[-1]
    assert {"judging noisy", "judging small-loss", "training hyperkron"} <= set(watch.stages)
    assert not any(stage.startswith(("judge-", "network-")) for stage in watch.stages)


def test_with_many_rows_the_network_of_all_trusted_rows_is_trained_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, TrainingPlan]] = []

    def fit(
        self: Work, targets: list[TrainingTargets], plan: TrainingPlan, name: str, *, seeds: list[int]
    ) -> list[nn.Module]:
        made.append((len(targets), plan))
        return [self.build() for _ in targets]

    monkeypatch.setattr(Work, "fit", fit)
    for many, expected in ((1e9, [(1, "brief"), (2, "brief")]), (0, [(1, "short"), (2, "brief")])):
        made.clear()
        monkeypatch.setattr("hyperkron.cleaning.work.MANY_ROWS", many)
        rows, given = torch.arange(72), torch.arange(72) % 3
        build = partial(linear, 6, 3)
        values = Dense(torch.zeros(72, 6))
        stages, config = Stages(None), CleanConfig()
        work = Work(
            values, given, rows[:60], rows[60:], 3, rows % 2, build, TrainingPlan(), config, stages, lambda *_: None
        )
        trusted_expert([work])
        assert made == [(count, getattr(work, plan)) for count, plan in expected]
