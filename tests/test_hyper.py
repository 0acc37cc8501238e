"""The λ modules: what they compute, and that a hypergradient reaches every one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hyperkron as hk

X, Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
INDEX, DOMAIN = torch.arange(8), torch.arange(8) // 4


def weighted_by_loss(model: nn.Module, net: nn.Module, batch: Any) -> hk.losses.Loss:
    plain = hk.losses.cross_entropy(model(X), Y)
    return hk.losses.cross_entropy(model(X), Y, weight=net(plain.per_example))


USES: dict[str, tuple[Any, Any]] = {
    "SampleWeights": (
        lambda model: hk.SampleWeights(8),
        lambda m, h, _: hk.losses.cross_entropy(m(X), Y, weight=h(INDEX)),
    ),
    "MetaWeightNet": (lambda model: hk.MetaWeightNet(5), weighted_by_loss),
    "MetaWeightNet, normalised": (lambda model: hk.MetaWeightNet(5, normalise=True), weighted_by_loss),
    "DomainWeights": (
        lambda model: hk.DomainWeights(2),
        lambda m, h, _: hk.losses.cross_entropy(m(X), Y, weight=h(DOMAIN)),
    ),
    "WeightDecay": (
        lambda model: hk.WeightDecay(model),
        lambda m, h, _: hk.losses.cross_entropy(m(X), Y) + h(m),
    ),
    "WeightDecay, entries": (
        lambda model: hk.WeightDecay(model, each="entry"),
        lambda m, h, _: hk.losses.cross_entropy(m(X), Y) + h(m),
    ),
    "LabelCorrection": (
        lambda model: hk.LabelCorrection(Y, 2),
        lambda m, h, _: hk.losses.cross_entropy(m(X), h(INDEX)),
    ),
    "Augmentation": (lambda model: hk.Augmentation(), lambda m, h, _: hk.losses.cross_entropy(m(h(X)), Y)),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("method", [lambda: hk.cg(5, 0.1), lambda: hk.kfac(0.1)], ids=["cg", "kfac"])
def test_a_hypergradient_reaches_it(name: str, method: Any) -> None:
    make, inner = USES[name]
    model = nn.Linear(3, 2)
    hyper = make(model)
    problem = hk.BilevelProblem(inner, lambda m, h, _: hk.losses.cross_entropy(m(X), 1 - Y))
    result = method().compute(problem, model, hyper, None, None)
    assert all(bool(g.isfinite().all()) for g in result.grads.values())
    assert float(sum(g.abs().sum() for g in result.grads.values())) > 0


def test_meta_weights() -> None:
    losses = torch.tensor([0.1, 5.0, 1.0], requires_grad=True)
    net = hk.MetaWeightNet(7, scale=2.0)
    weights = net(losses)
    assert bool(((weights > 0) & (weights < 2)).all())
    weights.sum().backward()
    assert losses.grad is None  # θ does not learn through its own weight
    assert hk.MetaWeightNet(normalise=True)(losses).mean().item() == pytest.approx(1.0)
    assert hk.MetaWeightNet(features=2)(torch.zeros(4, 2)).shape == (4,)
    assert hk.MetaWeightNet()(torch.zeros(0)).shape == (0,)


def test_domain_weights() -> None:
    given = torch.tensor([0.5, 0.3, 0.2])
    mixture = hk.DomainWeights(3, given)
    assert torch.allclose(mixture.proportions(), given)
    assert torch.allclose(mixture(torch.tensor([2, 0])), 3 * given[[2, 0]])


@pytest.mark.parametrize("each", ["tensor", "entry"])
def test_weight_decay(each: Any) -> None:
    model = nn.Linear(3, 2).double()
    decay = hk.WeightDecay(model, 0.01, each)
    wanted = 0.01 * sum(p.square().sum() for p in model.parameters())
    assert torch.allclose(decay(model).value, wanted)
    assert [tuple(p.shape) for p in decay.parameters()] == ([(2, 3), (2,)] if each == "entry" else [(), ()])
    assert all(p.dtype == torch.float64 for p in decay.parameters())
    with pytest.raises(hk.HyperkronError, match="made for 2"):
        decay(nn.Linear(3, 2, bias=False))


def test_label_correction() -> None:
    labels = hk.LabelCorrection(torch.tensor([0, 2, 1]), 3, confidence=0.7)
    assert torch.allclose(labels(torch.tensor([1])), torch.tensor([[0.15, 0.15, 0.7]]))
    assert labels.labels().tolist() == [0, 2, 1]


def test_augmentation_is_random_and_vanishes_with_its_strength() -> None:
    x: Tensor = torch.randn(4, 1, 5, 5)
    strong = hk.Augmentation(0.5)
    assert not torch.equal(strong(x), strong(x))
    assert torch.allclose(hk.Augmentation(1e-8)(x), x, atol=1e-6)


def test_contrast_leaves_examples_of_one_number_as_they_are() -> None:
    """Each is its own mean, whatever the others of the batch are."""
    augmentation = hk.Augmentation(0.5)
    with torch.no_grad():
        augmentation.log[1:] = -50.0
    x = torch.tensor([1.0, 5.0, 9.0])
    torch.testing.assert_close(augmentation(x).detach(), x)
    torch.testing.assert_close(augmentation(x[:, None]).detach(), x[:, None])


@pytest.mark.parametrize(
    "make",
    [
        lambda: hk.MetaWeightNet(0),
        lambda: hk.MetaWeightNet(scale=0.0),
        lambda: hk.DomainWeights(0),
        lambda: hk.DomainWeights(2, torch.tensor([1.0, -1.0])),
        lambda: hk.WeightDecay(nn.Linear(1, 1), init=0.0),
        lambda: hk.WeightDecay(nn.Linear(1, 1), each="layer"),  # type: ignore[arg-type]
        lambda: hk.LabelCorrection(torch.zeros(3), 2),
        lambda: hk.LabelCorrection(torch.zeros(3, dtype=torch.int64), 2, confidence=0.4),
        lambda: hk.LabelCorrection(torch.tensor([0, 2]), 2),
        lambda: hk.LabelCorrection(torch.tensor([0, -100]), 2),
        lambda: hk.DomainWeights(2, torch.tensor([1.0, torch.inf])),
        lambda: hk.Augmentation(0.0),
        lambda: hk.Augmentation()(torch.zeros(2, 1, 3, 3, dtype=torch.uint8)),
        lambda: hk.MetaWeightNet(5)(torch.zeros(4, 2)),
        lambda: hk.MetaWeightNet(5)(torch.tensor(1.0)),
    ],
)
def test_bad_arguments_are_refused(make: Any) -> None:
    with pytest.raises(hk.HyperkronError):
        make()


INDEXED: dict[str, Any] = {
    "clip": lambda: hk.SampleWeights(4),
    "sigmoid": lambda: hk.SampleWeights(4, "sigmoid"),
    "softmax": lambda: hk.SampleWeights(4, "softmax"),
    "domains": lambda: hk.DomainWeights(4),
    "labels": lambda: hk.LabelCorrection(torch.arange(4), 4),
}


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32]
)
@pytest.mark.parametrize("name", INDEXED)
def test_an_index_may_hold_whole_numbers_of_any_kind(name: str, dtype: torch.dtype) -> None:
    """Also bytes, and as many of them as there are rows, which torch takes for a mask."""
    hyper = INDEXED[name]()
    (raw,) = hyper.parameters()
    with torch.no_grad():
        raw.add_(torch.linspace(0, 0.4, raw.numel()).reshape(raw.shape))
    index = torch.tensor([3, 1, 2, 1])
    assert torch.equal(hyper(index.to(dtype)), torch.stack([hyper(i) for i in index]))


@pytest.mark.parametrize("name", INDEXED)
@pytest.mark.parametrize(
    "index", [torch.tensor([0, 4]), torch.tensor([0.0, 1.0]), None], ids=["outside", "floats", "None"]
)
def test_an_index_that_does_not_fit_is_named(name: str, index: Tensor | None) -> None:
    with pytest.raises(hk.HyperkronError, match=r"index does not fit 4 rows .* from 0 to 3"):
        INDEXED[name]()(index)


def test_the_first_weight_may_be_a_whole_number() -> None:
    assert hk.SampleWeights(3, init=1)(torch.arange(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [1.5, -0.5, 1e8, 1.0, 0.0])
@pytest.mark.parametrize("method", [lambda: hk.cg(5, 0.1), lambda: hk.kfac(0.1), hk.sama], ids=["cg", "kfac", "sama"])
def test_clipped_weights_outside_their_range_have_the_gradient_of_the_bound(value: float, method: Any) -> None:
    """σ = clip(λ) with dσ/dλ = 1: the gradient by σ itself, so that λ can come back."""
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 2), hk.SampleWeights(8)
    bound = hk.as_hyper(torch.full((8,), min(max(value, 0.0), 1.0)))
    with torch.no_grad():
        weights.weight.fill_(value)
    assert torch.equal(weights(INDEX), bound())
    found, wanted = (
        method().compute(
            hk.BilevelProblem(
                lambda m, h, _, of=of: hk.losses.cross_entropy(m(X), Y, weight=of(h)) + hk.losses.l2(m, 0.1),
                lambda m, h, _: hk.losses.cross_entropy(m(X), 1 - Y),
            ),
            model,
            hyper,
            None,
            None,
        )
        for hyper, of in ((weights, lambda h: h(INDEX)), (bound, lambda h: h()))
    )
    assert torch.equal(found.grads["weight"], wanted.grads["value"])
    assert bool((found.grads["weight"] != 0).any())


def test_clipped_weights_come_back_from_above_one() -> None:
    """Twice as large as any weight can be, they would stay there for ever."""
    torch.manual_seed(0)
    model, weights = nn.Linear(3, 2), hk.SampleWeights(8)
    with torch.no_grad():
        weights.weight.fill_(2.0)
    noisy = torch.where(INDEX < 3, 1 - Y, Y)
    problem = hk.BilevelProblem(
        lambda m, w, _: hk.losses.cross_entropy(m(X), noisy, weight=w(INDEX)) + hk.losses.l2(m, 0.01),
        lambda m, w, _: hk.losses.cross_entropy(m(X), Y),
    )
    hk.fit(
        problem,
        model,
        weights,
        hk.algorithms.aid_cg(5, inner_steps=5, inner_rate=0.5, outer_rate=10.0),
        None,
        None,
        steps=10,
    )
    learned = weights(INDEX).detach()
    assert float(learned[:3].mean()) < 0.5 < float(learned[3:].mean())
