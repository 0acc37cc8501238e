"""Where tokens have no loss, A averages over those that a gradient reaches; the others change nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk
import oracles
from cases import DOUBLE, Case, make, random_weights
from hyperkron.curvature.kfac.factors import dense
from hyperkron.evaluation.point import Point

PADDING = -100


class Attend(nn.Module):
    """Attention by hand that never looks at the padding, and a head at every token."""

    def __init__(self, width: int = 4, classes: int = 3) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(width, 3 * width), nn.Linear(width, width), nn.Linear(width, classes)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT
        if self.seen is not None and len(self.seen) == len(x):
            scores = scores.masked_fill(~self.seen[:, None, :], -torch.inf)
        return self.head(x + self.out(scores.softmax(-1) @ v).tanh())


def padded(lengths: list[int]) -> tuple[Case, Tensor]:
    """Sequences of these lengths, and which of their tokens are none of the padding."""
    torch.manual_seed(0)
    case = make(
        Attend(), (max(lengths), 4), loss="cross_entropy", count=len(lengths), hyper=random_weights(len(lengths))
    )
    seen = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    x, y = case.inner_batch
    case.inner_batch = (x, y.masked_fill(~seen, PADDING))
    case.model.seen = seen  # type: ignore[assignment]
    return case, seen


@pytest.mark.parametrize("low_rank", [False, True])
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_padding_is_in_no_factor(sharing: Any, low_rank: bool) -> None:
    """A equals the mean over the tokens that are there, by loops, whatever the padding holds."""
    case, seen = padded([5, 2, 3, 1])
    x, _ = case.inner_batch
    x[~seen] = 7.0
    curvature = hk.curvature.KFAC(0.1, fisher="type-2", sharing=sharing)
    inputs: dict[str, Tensor] = {}
    for name in ("qkv", "out", "head"):
        layer = case.model.get_submodule(name)
        handle = layer.register_forward_hook(lambda m, given, out, name=name: inputs.update({name: given[0].detach()}))
        case.model(x)
        handle.remove()
    with case.point() as point:
        state = curvature.init()
        made = state.plan(point.model, point.params, "diagonal")
        kind = type("Kept", (hk.curvature.KFAC,), {"_low_rank": low_rank})(**vars(curvature))
        measured = kind._measure(point, state, made)
    for name, given in inputs.items():
        rows = torch.cat([given, torch.ones_like(given[..., :1])], -1)
        if sharing == "reduce":
            counted = torch.stack([row[kept].mean(0) for row, kept in zip(rows, seen, strict=True)])
        else:
            counted = rows[seen]
        assert oracles.relative(dense(measured.a[name])[0], counted.T @ counted / len(counted)) < 1e-12


@pytest.mark.parametrize("last", [None, -1], ids=["loss at every token", "loss at all but the last"])
def test_padding_changes_nothing(last: int | None) -> None:
    """The hypergradient is that of the same batch with less padding, where every example has some."""
    case, seen = padded([4, 2, 3])
    if last is not None:
        case.inner_batch[1][:, 2] = PADDING

    def inner(model: nn.Module, hyper: Any, batch: Any) -> Any:
        return hk.losses.cross_entropy(model(batch[0])[:, :last], batch[1][:, :last], weight=hyper())

    problem = hk.BilevelProblem(inner, case.outer)
    case.model.seen = seen if last is None else seen & (torch.arange(4) < 3)  # type: ignore[assignment]
    shorter = hk.kfac(0.1, fisher="type-2").compute(problem, *case.arguments[1:])
    x, y = case.inner_batch
    y = y if last is None else torch.cat([y[:, :last], torch.full((3, 1), PADDING)], 1)
    case.inner_batch = (
        torch.cat([x, torch.full((3, 2, 4), 3.0, dtype=DOUBLE)], 1),
        torch.cat([y, torch.full((3, 2), PADDING)], 1),
    )
    more = torch.zeros(3, 2, dtype=torch.bool)
    case.model.seen = torch.cat([case.model.seen, more], 1)  # type: ignore[assignment, list-item]
    longer = hk.kfac(0.1, fisher="type-2").compute(problem, *case.arguments[1:])
    assert oracles.relative(longer.grads, shorter.grads) < 1e-6


def test_tokens_without_a_label_that_others_attend_to_count() -> None:
    case, seen = padded([5, 2, 3, 1])
    case.model.seen = None  # type: ignore[assignment]
    measured = case.measured()
    rows = {name: int(count) for name, count in measured.rows.items()}
    assert rows == {"qkv": seen.numel(), "out": int(seen.sum()), "head": int(seen.sum())}


def test_parts_of_a_batch_count_their_own_tokens() -> None:
    case, _ = padded([5, 2, 3, 1])
    whole = case.measured()
    x, y = case.inner_batch

    class Parted(hk.BilevelProblem):
        def parts(self, batch: Any) -> list[Any]:
            return [tuple(t[i : i + 2] for t in batch) for i in (0, 2)]

    def inner(model: nn.Module, hyper: Any, batch: Any) -> Any:
        model.seen = batch[1] != PADDING  # type: ignore[assignment]
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    problem = Parted(inner, case.outer)
    with Point(problem, case.model, case.hyper, (x, y), case.outer_batch) as point:
        state = hk.curvature.KFAC().init()
        parted = hk.curvature.KFAC(0.1, fisher="type-2")._measure(
            point, state, state.plan(case.model, point.params, "diagonal")
        )
    for name in whole.a:
        assert oracles.relative(dense(parted.a[name]), dense(whole.a[name])) < 1e-12


class Causal(Attend):
    """Attention to earlier tokens alone, so that no gradient reaches the query of the first one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        later = torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)
        return self.head(x + self.out((q @ k.mT).masked_fill(later, -torch.inf).softmax(-1) @ v).tanh())


def measured_parts(
    model: nn.Module, weights: Tensor, size: int | None, y: Tensor, x: Tensor, flat: bool = False
) -> Any:
    """What KFAC measures of a loss at all tokens but the last, perhaps ``flat``, in pieces of this size."""

    def inner(model: nn.Module, hyper: Any, batch: Any) -> Any:
        logits, labels, weight = model(batch[0])[:, :-1], batch[1][:, 1:], batch[2]
        if flat:
            logits, labels, weight = logits.flatten(0, 1), labels.flatten(), weight.repeat_interleave(labels.shape[1])
        return hk.losses.cross_entropy(logits, labels, weight=weight)

    problem = hk.training.Accumulated(hk.BilevelProblem(inner, inner), size)
    with Point(problem, model, nn.Linear(1, 1), (x, y, weights), (x, y, weights)) as point:
        state = hk.curvature.KFAC().init()
        curvature = hk.curvature.KFAC(0.1, fisher="type-2")
        return curvature._measure(point, state, state.plan(model, point.params, "diagonal"))


def same_factors(found: Any, wanted: Any) -> None:
    assert {*found.a} == {*wanted.a} == {"qkv", "out", "head"}
    for name in wanted.a:
        for one, other in ((found.a, wanted.a), (found.b, wanted.b)):
            assert oracles.relative(dense(one[name]), dense(other[name])) < 1e-12


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.0, 1.0, 0.0]], ids=["weighted alike", "some of weight zero"])
def test_a_does_not_depend_on_how_a_batch_is_divided(weights: list[float]) -> None:
    """Whether tokens of an example count does not depend on padding in other examples, nor on the labels' shape."""
    torch.manual_seed(0)
    model, x, y = Causal().double(), torch.randn(3, 5, 4, dtype=DOUBLE), torch.randint(3, (3, 5))
    y[0, 3:] = PADDING
    given = torch.tensor(weights, dtype=DOUBLE)
    whole = measured_parts(model, given, None, y, x)
    same_factors(measured_parts(model, given, 1, y, x), whole)
    same_factors(measured_parts(model, given, None, y, x, flat=True), whole)


def test_without_masks_all_tokens_count_and_layers_with_one_input_share_a() -> None:
    torch.manual_seed(0)
    model, x, y = Attend().double(), torch.randn(3, 5, 4, dtype=DOUBLE), torch.randint(3, (3, 5))
    model.gate = nn.Linear(4, 4).double()  # type: ignore[assignment]
    model.register_forward_hook(lambda model, given, out: out + model.gate(given[0]).sum(-1, keepdim=True).tanh())
    found = measured_parts(model, torch.ones(3, dtype=DOUBLE), None, y, x)
    assert {name: int(count) for name, count in found.rows.items()} == dict.fromkeys(("qkv", "out", "head", "gate"), 15)
    assert found.a["gate"] is found.a["qkv"]


@pytest.mark.parametrize("predictions", [3, 5])
def test_masked_labels_of_pooled_tokens_mask_no_tokens(predictions: int) -> None:
    """Several predictions are made from the first of five tokens; A counts the others, too, as without masks."""
    torch.manual_seed(0)
    model, x = Attend(classes=predictions * 2).double(), torch.randn(4, 5, 4, dtype=DOUBLE)
    model.head.register_forward_pre_hook(lambda head, given: given[0][:, 0])
    y = torch.randint(2, (4, predictions))
    y[0, 0] = PADDING

    def inner(model: nn.Module, hyper: Any, batch: Any) -> Any:
        return hk.losses.cross_entropy(model(x).unflatten(-1, (-1, 2)), y)

    with Point(hk.BilevelProblem(inner, inner), model, nn.Linear(1, 1), None, None) as point:
        state = hk.curvature.KFAC().init()
        found = hk.curvature.KFAC(0.1)._measure(point, state, state.plan(model, point.params, "diagonal"))
    assert {name: int(count) for name, count in found.rows.items()} == {"qkv": 20, "out": 20, "head": 4}


def test_rows_of_a_pass_without_gradients_are_not_in_a() -> None:
    """A loss may look at the model under no_grad, as a Meta-Weight-Net does; KFAC measures what is differentiated."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3)).double()
    x, y, other = torch.randn(5, 3).double(), torch.arange(5) % 3, 10 * torch.randn(7, 3).double()

    def loss(look: bool) -> hk.BilevelProblem:
        def inner(m: torch.nn.Module, h: torch.nn.Module, b: object) -> hk.losses.Loss:
            if look:
                with torch.no_grad():
                    m(other)
            return hk.losses.cross_entropy(m(x), y, weight=h(torch.arange(5)))

        return hk.BilevelProblem(inner, lambda m, h, b: hk.losses.cross_entropy(m(x.flip(0)), y))

    weights = hk.SampleWeights(5).double()
    for build in (hk.kfac, hk.ekfac):
        plain, looked = (
            build(0.1, fisher="type-2").compute(loss(look), model, weights, None, None).solution
            for look in (False, True)
        )
        assert plain is not None and looked is not None
        for name, v in plain.value.items():
            torch.testing.assert_close(looked.value[name], v, rtol=1e-12, atol=0)
