"""Losses against autograd's dense Hessians in float64, and against torch where the two coincide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hyperkron.losses import DRAWN, Loss, Term, as_loss, binary_cross_entropy, cross_entropy, l2, mse
from hyperkron.solution import HyperkronError

DOUBLE = torch.float64
N, T, C = 4, 3, 5


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=_seeded(seed), dtype=DOUBLE)


def _rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=_seeded(seed), dtype=DOUBLE)


def _classes(*shape: int) -> Tensor:
    return torch.randint(0, C, shape, generator=_seeded(7))


def _tokens() -> Tensor:
    target = _classes(N, T)
    target[0, 1] = target[2, 0] = -100
    target[3] = -100  # an example without a valid token
    return target


Make = Callable[..., Loss]

# name: (output shape, number of row dimensions, function of (output, weight), shapes a weight may have)
CASES: dict[str, tuple[tuple[int, ...], int, Make, tuple[tuple[int, ...], ...]]] = {
    "ce": ((N, C), 1, lambda f, w: cross_entropy(f, _classes(N), weight=w), ((N,),)),
    "ce-smooth": (
        (N, C),
        1,
        lambda f, w: cross_entropy(f, _classes(N), weight=w, label_smoothing=0.2),
        ((N,),),
    ),
    "ce-mask": (
        (N, C),
        1,
        lambda f, w: cross_entropy(f, torch.tensor([1, 0, 4, 0]), weight=w, ignore_index=0),
        ((N,),),
    ),
    "ce-soft": ((N, C), 1, lambda f, w: cross_entropy(f, _rand(N, C).softmax(-1), weight=w), ((N,),)),
    "ce-soft-mass": (
        (N, C),
        1,
        lambda f, w: cross_entropy(f, 3 * _rand(N, C, seed=3), weight=w, label_smoothing=0.3),
        ((N,),),
    ),
    "ce-token": (
        (N, T, C),
        2,
        lambda f, w: cross_entropy(f, _tokens(), weight=w, label_smoothing=0.1),
        ((N,), (N, T)),
    ),
    "ce-token-soft": (
        (N, T, C),
        2,
        lambda f, w: cross_entropy(f, _rand(N, T, C).softmax(-1), weight=w),
        ((N,), (N, T)),
    ),
    "ce-map": (
        (2, 3, 2, C),
        3,
        lambda f, w: cross_entropy(f, _classes(2, 3, 2), weight=w),
        ((2,), (2, 3, 2)),
    ),
    "mse": ((N, C), 1, lambda f, w: mse(f, _randn(N, C, seed=5), weight=w), ((N,),)),
    "mse-flat": ((N,), 1, lambda f, w: mse(f, _randn(N, seed=5), weight=w), ((N,),)),
    "mse-image": ((N, 2, 3), 1, lambda f, w: mse(f, _randn(N, 2, 3, seed=5), weight=w), ((N,),)),
    "bce": ((N, C), 1, lambda f, w: binary_cross_entropy(f, _rand(N, C, seed=5), weight=w), ((N,),)),
    "bce-flat": ((N,), 1, lambda f, w: binary_cross_entropy(f, _rand(N).round(), weight=w), ((N,),)),
    "bce-image": ((N, 2, 3), 1, lambda f, w: binary_cross_entropy(f, _rand(N, 2, 3), weight=w), ((N,),)),
}
ALL = pytest.mark.parametrize("name", CASES)
WEIGHTED = pytest.mark.parametrize(
    ("name", "weight_shape"), [(name, shape) for name, case in CASES.items() for shape in (None, *case[3])]
)
FISHERS = ("mc", "rademacher", "type-2", "empirical")


def _make(name: str, weight: Tensor | None = None) -> tuple[Tensor, Term, Loss]:
    output = (2 * _randn(*CASES[name][0], seed=1)).requires_grad_()
    loss = CASES[name][2](output, weight)
    return output, loss.terms[0], loss


def _rows(vectors: Any, rows: int) -> Tensor:
    """Vectors stacked and reshaped to (vectors, rows, entries of a row)."""
    stacked = torch.stack(list(vectors))
    flat = stacked.reshape(len(stacked), *stacked.shape[1 : 1 + rows], -1)
    return flat.reshape(len(stacked), -1, flat.shape[-1])


def _gram(vectors: Any, rows: int) -> Tensor:
    """Block-diagonal Σ s sᵀ over rows, dense."""
    s = _rows(vectors, rows)
    return torch.block_diag(*torch.einsum("mrk,mrl->rkl", s, s))


def _dense(product: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Tensor:
    size = int(np.prod(shape))
    columns = [product(e.reshape(shape)).flatten() for e in torch.eye(size, dtype=DOUBLE)]
    return torch.stack(columns, 1)


def _autograd_hessian(name: str, weight: Tensor | None, output: Tensor) -> Tensor:
    function = CASES[name][2]
    hessian = torch.autograd.functional.hessian(lambda f: function(f, weight).value, output.detach())
    return hessian.reshape(output.numel(), output.numel())


@WEIGHTED
def test_hessian_product_and_exact_vectors_equal_autograd(name: str, weight_shape: tuple[int, ...] | None) -> None:
    weight = None if weight_shape is None else _rand(*weight_shape, seed=2)
    output, term, _ = _make(name, weight)
    expected = _autograd_hessian(name, weight, output)
    torch.testing.assert_close(_dense(term.hessian_product, output.shape), expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(_gram(term.vectors("type-2"), CASES[name][1]), expected, rtol=1e-12, atol=1e-14)


@WEIGHTED
def test_empirical_vector_is_the_root_weighted_gradient(name: str, weight_shape: tuple[int, ...] | None) -> None:
    weight = None if weight_shape is None else _rand(*weight_shape, seed=2)
    output, term, loss = _make(name, weight)
    (gradient,) = torch.autograd.grad(loss.value, output)  # coefficient · ∇c
    coefficients = term.coefficients.reshape(term.coefficients.shape + (1,) * (output.ndim - CASES[name][1]))
    (vector,) = term.vectors("empirical")
    torch.testing.assert_close(vector * coefficients.sqrt(), gradient, rtol=1e-12, atol=1e-15)


@ALL
@pytest.mark.parametrize("fisher", FISHERS)
def test_weights_enter_once_not_squared(name: str, fisher: Any) -> None:
    weight = _rand(*CASES[name][3][0], seed=2)
    rows = CASES[name][1]
    once = _gram(_make(name, weight)[1].vectors(fisher, 3, _seeded(0)), rows)
    twice = _gram(_make(name, 2 * weight)[1].vectors(fisher, 3, _seeded(0)), rows)
    torch.testing.assert_close(twice, 2 * once, rtol=1e-13, atol=1e-15)
    first = weight.clone()
    first[0] *= 4
    changed = _gram(_make(name, first)[1].vectors(fisher, 3, _seeded(0)), rows)
    block = len(once) // len(weight)
    torch.testing.assert_close(changed[:block, :block], 4 * once[:block, :block], rtol=0, atol=0)
    torch.testing.assert_close(changed[block:, block:], once[block:, block:], rtol=0, atol=0)
    assert once.abs().sum() > 0


QUICKLY = [
    (fisher, name) for fisher in ("mc", "rademacher") for name in ("ce", "ce-soft-mass", "ce-token", "mse", "bce")
]
SLOWLY = [
    pytest.param("rademacher by default", x, marks=pytest.mark.long) for x in ("ce-soft-mass", "ce-token", "mse", "bce")
]


@pytest.mark.parametrize(("fisher", "name"), [*QUICKLY, ("rademacher by default", "ce"), *SLOWLY])
def test_drawn_vectors_are_unbiased(name: str, fisher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = 4000
    weight = _rand(N, seed=2)
    output = 0.5 * _randn(*CASES[name][0], seed=1)  # every outcome is drawn often enough for its z-score
    term = CASES[name][2](output, weight).terms[0]
    rows = CASES[name][1]
    if fisher == "rademacher by default":  # as of a loss that has no quicker way
        fisher = "rademacher"
        monkeypatch.setattr(type(term), "_signed", Term._signed)
    s = _rows(term.vectors(fisher, samples, _seeded(11)), rows) * samples**0.5
    outer = torch.einsum("mrk,mrl->mrkl", s, s)
    exact = _rows(term.vectors("type-2"), rows)
    expected = torch.einsum("mrk,mrl->rkl", exact, exact)
    z = (outer.mean(0) - expected) / (outer.std(0) / samples**0.5 + 1e-12)
    assert z.abs().max() < 5
    assert z.square().mean() < 1.6


@pytest.mark.parametrize("name", ["ce", "mse", "bce"])
def test_monte_carlo_error_falls_as_one_over_root_m(name: str) -> None:
    _, term, _ = _make(name, _rand(N, seed=2))
    exact = _gram(term.vectors("type-2"), 1)
    generator = _seeded(3)
    counts, errors = [2, 8, 32, 128], []
    for samples in counts:
        squared = [(_gram(term.vectors("mc", samples, generator), 1) - exact).square().sum() for _ in range(60)]
        errors.append(torch.stack(squared).mean().sqrt().item())
    slope = np.polyfit(np.log(counts), np.log(errors), 1)[0]
    assert -0.57 < slope < -0.43


def test_random_signs_have_less_noise_than_labels_where_a_class_is_likely() -> None:
    term = cross_entropy(6 * torch.eye(C, dtype=DOUBLE), torch.arange(C)).terms[0]
    exact = _gram(term.vectors("type-2"), 1)

    def error(fisher: Any) -> float:
        found = [_gram(term.vectors(fisher, 1, _seeded(seed)), 1) - exact for seed in range(200)]
        return float(torch.stack(found).square().mean())

    assert error("rademacher") < 0.1 * error("mc")


def test_classes_are_drawn_with_their_probabilities() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0, -torch.inf]], dtype=DOUBLE)
    term = cross_entropy(logits, torch.tensor([0])).terms[0]
    p, samples = logits.softmax(-1)[0], 20000
    drawn = (_rows(term.vectors("mc", samples, _seeded(5)), 1)[:, 0] * samples**0.5).argmin(-1)
    frequency = torch.bincount(drawn, minlength=C).to(DOUBLE) / samples
    assert frequency[1] == frequency[4] == 0
    assert ((frequency - p).abs() <= 4 * (p * (1 - p) / samples).sqrt()).all()
    assert all(v.isfinite().all() for v in term.vectors("type-2"))


@ALL
def test_number_shape_and_randomness_of_vectors(name: str) -> None:
    output, term, _ = _make(name)
    entries = output[(0,) * CASES[name][1]].numel()
    before = torch.get_rng_state()
    for fisher, count in (("mc", 3), ("rademacher", 3), ("type-2", entries), ("empirical", 1)):
        first = list(term.vectors(fisher, 3, _seeded(1)))  # type: ignore[arg-type]
        again = list(term.vectors(fisher, 3, _seeded(1)))  # type: ignore[arg-type]
        assert len(first) == count
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert all(v.shape == output.shape and v.dtype == DOUBLE and not v.requires_grad for v in first)
    assert torch.equal(before, torch.get_rng_state())
    list(term.vectors("mc"))
    assert not torch.equal(before, torch.get_rng_state())


TORCH_VALUES: dict[str, tuple[Callable[[], Loss], Callable[[], Tensor]]] = {
    "ce": (
        lambda: cross_entropy(_randn(N, C), _classes(N)),
        lambda: F.cross_entropy(_randn(N, C), _classes(N)),
    ),
    "token, mask, smoothing": (
        lambda: cross_entropy(_randn(N, T, C), _tokens(), label_smoothing=0.1),
        lambda: F.cross_entropy(_randn(N, T, C).movedim(-1, 1), _tokens(), label_smoothing=0.1),
    ),
    "padding class 0": (
        lambda: cross_entropy(_randn(N, C), torch.tensor([1, 0, 4, 0]), ignore_index=0),
        lambda: F.cross_entropy(_randn(N, C), torch.tensor([1, 0, 4, 0]), ignore_index=0),
    ),
    "soft, smoothing, mass": (
        lambda: cross_entropy(_randn(N, C), _rand(N, C), label_smoothing=0.1),
        lambda: F.cross_entropy(_randn(N, C), _rand(N, C), label_smoothing=0.1),
    ),
    "int32 classes": (
        lambda: cross_entropy(_randn(N, C), _classes(N).int()),
        lambda: F.cross_entropy(_randn(N, C), _classes(N)),
    ),
    "weights": (
        lambda: cross_entropy(_randn(N, C), _classes(N), weight=_rand(N)),
        lambda: (_rand(N) * F.cross_entropy(_randn(N, C), _classes(N), reduction="none")).sum() / N,
    ),
    "bce": (
        lambda: binary_cross_entropy(_randn(N), _rand(N)),
        lambda: F.binary_cross_entropy_with_logits(_randn(N), _rand(N)),
    ),
    "multi-label": (
        lambda: binary_cross_entropy(_randn(N, C), _rand(N, C)),
        lambda: C * F.binary_cross_entropy_with_logits(_randn(N, C), _rand(N, C)),
    ),
    "extreme logits": (
        lambda: binary_cross_entropy(500 * _randn(N), _rand(N)),
        lambda: F.binary_cross_entropy_with_logits(500 * _randn(N), _rand(N)),
    ),
    "mse": (
        lambda: mse(_randn(N, C), _rand(N, C)),
        lambda: 0.5 * C * F.mse_loss(_randn(N, C), _rand(N, C)),
    ),
}


@pytest.mark.parametrize("name", TORCH_VALUES)
def test_value_equals_torch(name: str) -> None:
    ours, theirs = TORCH_VALUES[name]
    torch.testing.assert_close(ours().value, theirs(), rtol=1e-13, atol=1e-15)


@WEIGHTED
def test_value_is_the_coefficients_times_row_losses(name: str, weight_shape: tuple[int, ...] | None) -> None:
    _, term, loss = _make(name, None if weight_shape is None else _rand(*weight_shape, seed=2))
    torch.testing.assert_close(loss.value, (term.coefficients * term.row_losses).sum(), rtol=1e-13, atol=0)
    assert term.row_losses.shape == term.coefficients.shape == CASES[name][0][: CASES[name][1]]


def test_per_example_is_unweighted_and_over_valid_rows() -> None:
    output = _randn(N, T, C).requires_grad_()
    target = _tokens()
    per_example = cross_entropy(output, target, weight=_rand(N)).per_example
    rows = F.cross_entropy(output.movedim(-1, 1), target, reduction="none")
    expected = torch.stack([rows[0, [0, 2]].mean(), rows[1].mean(), rows[2, 1:].mean(), torch.zeros((), dtype=DOUBLE)])
    torch.testing.assert_close(per_example, expected, rtol=1e-13, atol=0)
    assert per_example.requires_grad


def test_derivatives_of_value_to_second_order() -> None:
    w = _rand(2, seed=2).requires_grad_()
    f, q = _randn(2, 3).requires_grad_(), _rand(2, 3).mul(0.8).add(0.1).requires_grad_()
    fs = _randn(2, 2, 3).requires_grad_()
    tokens = torch.tensor([[0, -100], [2, 1]])
    functions: list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = [
        (lambda f, q, w: cross_entropy(f, q, weight=w, label_smoothing=0.1).value, (f, q, w)),
        (lambda f, w: cross_entropy(f, tokens, weight=w, label_smoothing=0.1).value, (fs, w)),
        (lambda f, q, w: mse(f, q, weight=w).value, (f, q, w)),
        (lambda f, q, w: binary_cross_entropy(f, q, weight=w).value, (f, q, w)),
        (lambda f, w: l2([f], w[0]).value + l2(f, w[:, None]).value, (f, w)),
        (lambda f, w: (w[0] * cross_entropy(f, torch.tensor([0, 2]), weight=w)).value, (f, w)),
    ]
    for function, inputs in functions:
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(function, inputs)


@ALL
def test_negative_weights_have_products_but_no_vectors(name: str) -> None:
    weight = _rand(*CASES[name][3][0], seed=2)
    weight[0] = -0.5
    output, term, _ = _make(name, weight)
    expected = _autograd_hessian(name, weight, output)
    torch.testing.assert_close(_dense(term.hessian_product, output.shape), expected, rtol=1e-12, atol=1e-14)
    for fisher in FISHERS:
        with pytest.raises(HyperkronError, match=r"weight.*-.*weights ≥ 0"):
            term.vectors(fisher)  # type: ignore[arg-type]


def test_arithmetic_keeps_value_and_curvature_together() -> None:
    factor = torch.tensor(1.5, dtype=DOUBLE, requires_grad=True)

    def function(f: Tensor) -> Loss:
        a, b, c = cross_entropy(f, _classes(N)), mse(f, _rand(N, C)), binary_cross_entropy(f, _rand(N, C))
        return sum([2 * a, b / 4, a * factor]) - np.float32(0.5) * c + 3.0 + l2(f, 0.1) * 2  # type: ignore

    output = _randn(N, C).requires_grad_()
    loss = function(output)
    assert len(loss.terms) == 4 and not loss.opaque
    hessian = torch.autograd.functional.hessian(lambda f: function(f).value, output.detach())

    def product(v: Tensor) -> Tensor:
        penalties = [2 * entry.coefficient * v for entry in loss.l2]
        return torch.stack(penalties + [term.hessian_product(v) for term in loss.terms]).sum(0)

    size = output.numel()
    torch.testing.assert_close(_dense(product, output.shape), hessian.reshape(size, size), rtol=1e-12, atol=1e-14)
    loss.backward()
    assert output.grad is not None and factor.grad is not None
    torch.testing.assert_close(factor.grad, F.cross_entropy(output, _classes(N)).detach())


def test_plain_tensors_make_a_loss_opaque() -> None:
    output = _randn(N, C).requires_grad_()
    loss, plain = mse(output, _rand(N, C)), output.abs().sum()
    for total in (
        loss + plain,
        plain + loss,
        sum([loss], start=plain),
        loss - plain,
        as_loss(plain) + loss,
    ):
        assert isinstance(total, Loss) and total.opaque and len(total.terms) == 1
    assert 0 + loss is loss and as_loss(loss) is loss and not loss.opaque
    torch.testing.assert_close((plain - loss).value, plain - loss.value)
    assert float(loss) == loss.item() == loss.detach().item()
    assert not loss.detach().requires_grad
    with pytest.raises(TypeError):
        loss * loss  # type: ignore[operator]


def test_half_precision_is_computed_in_single() -> None:
    output = _randn(N, C).to(torch.bfloat16).requires_grad_()
    weight = _rand(N).float()
    losses = (
        (
            cross_entropy(output, _classes(N), weight=weight),
            cross_entropy(output.float(), _classes(N), weight=weight),
        ),
        (mse(output, output.detach() * 2), mse(output.float(), output.detach().float() * 2)),
        (
            binary_cross_entropy(output, _rand(N, C).to(torch.bfloat16)),
            binary_cross_entropy(output.float(), _rand(N, C).to(torch.bfloat16)),
        ),
    )
    for half, single in losses:
        assert half.value.dtype == torch.float32 and torch.equal(half.value, single.value)
        assert half.terms[0].output is output
        for fisher in FISHERS:
            for v, w in zip(
                half.terms[0].vectors(fisher, 2, _seeded(0)),  # type: ignore[arg-type]
                single.terms[0].vectors(fisher, 2, _seeded(0)),  # type: ignore[arg-type]
                strict=True,
            ):
                assert v.dtype == torch.bfloat16 and torch.equal(v, w.to(torch.bfloat16))
        assert half.terms[0].hessian_product(output).dtype == torch.bfloat16
        torch.autograd.grad(output, output, next(half.terms[0].vectors()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("fisher", FISHERS)
def test_a_gpu_agrees_with_the_cpu(fisher: Any) -> None:
    targets = ((cross_entropy, _tokens()), (mse, _rand(N, T, C)), (binary_cross_entropy, _rand(N, T, C)))
    for function, target in targets:
        here, there = function(_randn(N, T, C), target), function(_randn(N, T, C).cuda(), target.cuda())
        v = _randn(N, T, C, seed=9)
        torch.testing.assert_close(there.value.cpu(), here.value)
        product = there.terms[0].hessian_product(v.cuda())
        torch.testing.assert_close(product.cpu(), here.terms[0].hessian_product(v))
        vectors = list(there.terms[0].vectors(fisher, 2, torch.Generator("cuda")))
        assert all(s.isfinite().all() and s.shape == v.shape for s in vectors)
        if fisher not in DRAWN:
            for s, t in zip(vectors, here.terms[0].vectors(fisher), strict=True):
                torch.testing.assert_close(s.cpu(), t)
