"""Arithmetic on trees, and the results, statuses and warnings built on them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hyperkron import trees
from hyperkron.solution import (
    CoverageError,
    FactorizationError,
    HypergradientResult,
    HyperkronError,
    HyperkronWarning,
    NonFiniteError,
    Solution,
    Status,
    warn_once,
    worst,
)
from hyperkron.trees import Tree
from storages import Storages


def tree(seed: int, dtype: torch.dtype = torch.float64) -> Tree:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"weight": (3, 2), "scale": (), "none": (0,), "bias": (4,)}
    return {name: torch.randn(s, generator=generator, dtype=dtype) for name, s in shapes.items()}


def flat(a: Tree) -> Tensor:
    return torch.cat([a[name].reshape(-1) for name in sorted(a)])


def turned(a: Tree) -> Tree:
    """The same tree with its names in another order."""
    return dict(reversed(a.items()))


@pytest.mark.parametrize("alpha", [1.0, -0.3, torch.tensor(2.5, dtype=torch.float64)])
def test_add_is_a_plus_alpha_b_by_name(alpha: float | Tensor) -> None:
    a, b = tree(0), tree(1)
    result = trees.add(a, turned(b), alpha=alpha)
    assert list(result) == list(a)
    torch.testing.assert_close(flat(result), flat(a) + alpha * flat(b), rtol=1e-15, atol=0.0)


def test_functions_leave_their_arguments_alone() -> None:
    a, b = tree(0), tree(1)
    trees.add(a, b, alpha=2.0)
    trees.scale(a, 3.0)
    trees.map(torch.neg, a)
    trees.zeros_like(a)
    assert torch.equal(flat(a), flat(tree(0)))
    assert torch.equal(flat(b), flat(tree(1)))


@pytest.mark.parametrize("c", [-2.0, torch.tensor(0.5, dtype=torch.float64)])
def test_scale(c: float | Tensor) -> None:
    assert torch.equal(flat(trees.scale(tree(0), c)), c * flat(tree(0)))


def test_dot_and_norm_match_the_flat_vectors() -> None:
    a, b = tree(0), tree(1)
    assert trees.dot(a, turned(b)).shape == trees.norm(a).shape == ()
    torch.testing.assert_close(trees.dot(a, turned(b)), flat(a) @ flat(b), rtol=1e-14, atol=0.0)
    torch.testing.assert_close(trees.norm(a), flat(a).norm(), rtol=1e-14, atol=0.0)


def test_the_product_of_a_tree_with_itself_is_that_of_norms_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    a = {"x": torch.randn(3, 4, dtype=torch.float64), "y": torch.randn((), dtype=torch.float64)}
    expected = trees.dot(a, dict(a))
    monkeypatch.setattr(trees, "_normed_together", lambda tensors: True)  # as on a GPU
    monkeypatch.setattr(trees, "_dot", None)
    torch.testing.assert_close(trees.dot(a, a), expected)


def test_dot_takes_strided_tensors() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    assert trees.dot({"w": x.T}, {"w": x.T.contiguous()}).item() == 55.0


def test_dot_of_half_precision_sums_in_float32() -> None:
    ones = {"w": torch.ones(70_000, dtype=torch.float16)}
    assert trees.dot(ones, ones).item() == 70_000.0  # float16 ends at 65504
    assert trees.norm(ones).item() == pytest.approx(math.sqrt(70_000), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-36, 1e-21, 1e21, 1e37])
def test_norm_where_squares_are_out_of_range(dtype: torch.dtype, size: float) -> None:
    x = {"w": torch.full((4,), size, dtype=dtype), "b": torch.zeros(2)}
    assert trees.norm(x).item() == pytest.approx(2 * size, rel=1e-2)
    assert trees.norm({"w": torch.tensor([1e30, math.inf])}).item() == math.inf
    assert math.isnan(trees.norm({"w": torch.tensor([1e30, math.nan])}).item())


@pytest.mark.parametrize("size", [1e-36, 1e-21, 1.0, 1e21, 1e37])
def test_norms_made_together_where_squares_are_out_of_range(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(trees, "_normed_together", lambda tensors: True)  # as on a GPU
    x = {"w": torch.full((4,), size), "b": torch.zeros(2)}
    assert trees.norm(x).item() == pytest.approx(2 * size, rel=1e-6) and trees.norm(x).dtype == torch.float32
    assert trees.norm(x | {"c": torch.zeros(2, dtype=torch.float64)}).dtype == torch.float64


def test_norm_in_float32_is_accurate_for_a_million_numbers() -> None:
    x = torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    exact = x.double().norm().item()
    assert trees.norm({"w": x}).item() == pytest.approx(exact, rel=1e-5)


def test_mixed_dtypes_keep_their_own() -> None:
    a = {"w": torch.ones(2), "b": torch.ones(2, dtype=torch.float64)}
    total = trees.add(a, a)
    assert total["w"].dtype == torch.float32 and total["b"].dtype == torch.float64
    assert trees.dot(a, a).item() == 4.0
    assert trees.is_finite(a)


def test_half_precision_stays_half_under_a_float32_factor() -> None:
    a = {"w": torch.ones(2, dtype=torch.bfloat16), "scale": torch.ones((), dtype=torch.bfloat16)}
    for result in (trees.scale(a, torch.tensor(2.0)), trees.add(a, a, alpha=torch.tensor(1.0))):
        assert all(x.dtype == torch.bfloat16 and x.max() == 2.0 for x in result.values())


def test_arithmetic_is_differentiable() -> None:
    x = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    a = {"w": x}
    trees.dot(trees.add(a, a, alpha=2.0), trees.scale(a, 3.0)).backward()  # 9 xᵀx
    assert x.grad is not None
    assert torch.equal(x.grad, 18.0 * x.detach())


def test_empty_trees() -> None:
    assert trees.add({}, {}) == trees.scale({}, 2.0) == trees.zeros_like({}) == {}
    assert trees.dot({}, {}).item() == trees.norm({}).item() == trees.largest({}).item() == 0.0
    assert trees.is_finite({})


@pytest.mark.parametrize("function", [trees.add, trees.dot])
def test_different_names_are_refused_by_name(function: object) -> None:
    a, b = {"w": torch.ones(1), "b": torch.ones(1)}, {"w": torch.ones(1), "c": torch.ones(1)}
    with pytest.raises(ValueError, match=r"only in the first \['b'\], only in the second \['c'\]"):
        function(a, b)  # type: ignore[operator]


def test_joined_holds_one_part_at_a_time() -> None:
    size, width = 4, 1000

    def parts() -> Iterator[Tree]:
        return ({"w": torch.full((n, width), float(n))} for n in (size, size, size - 1))

    with Storages() as count:
        found = trees.joined(parts(), 3 * size - 1)
    assert count.peak == 4 * width * (3 * size - 1 + size)
    assert torch.equal(found["w"], torch.cat([part["w"] for part in parts()]))


def test_a_single_part_is_not_copied() -> None:
    part = tree(0)
    assert trees.joined(iter([{"w": part["bias"]}]), 4)["w"] is part["bias"]


@pytest.mark.parametrize("function", [trees.add, trees.dot])
def test_different_shapes_are_refused_not_broadcast(function: object) -> None:
    with pytest.raises(ValueError, match=r"'w' have shapes \(2, 1\) and \(2,\)"):
        function({"w": torch.ones(2, 1)}, {"w": torch.ones(2)})  # type: ignore[operator]


def test_stacked_and_unstacked_are_inverse() -> None:
    parts = [tree(seed) for seed in range(3)]
    together = trees.stacked([parts[0], *map(turned, parts[1:])])
    assert {name: x.shape[0] for name, x in together.items()} == dict.fromkeys(parts[0], 3)
    for part, found in zip(parts, trees.unstacked(together), strict=True):
        assert found.keys() == part.keys()
        assert all(torch.equal(found[name], x) for name, x in part.items())


def test_zeros_like_and_map() -> None:
    a = tree(0, torch.float32)
    zeros = trees.zeros_like(a)
    assert {k: (x.shape, x.dtype) for k, x in zeros.items()} == {k: (x.shape, x.dtype) for k, x in a.items()}
    assert flat(zeros).count_nonzero() == 0
    assert torch.equal(flat(trees.map(torch.square, a)), flat(a).square())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["weight", "scale", "bias"])
def test_is_finite_finds_one_bad_entry_anywhere(bad: float, name: str) -> None:
    a = tree(0)
    assert trees.is_finite(a)
    a[name].reshape(-1)[-1] = bad
    assert not trees.is_finite(a)


def test_is_finite_and_largest_do_not_overflow() -> None:
    a = {"w": torch.tensor([3e38, -2e38])}
    assert trees.is_finite(a)
    assert trees.largest(a).item() == pytest.approx(3e38)


def test_normal_like_follows_its_generator_and_no_other() -> None:
    a, before = tree(0, torch.float32), torch.random.get_rng_state()
    first = trees.normal_like(a, torch.Generator().manual_seed(3))
    again = trees.normal_like(a, torch.Generator().manual_seed(3))
    other = trees.normal_like(a, torch.Generator().manual_seed(4))
    assert torch.equal(flat(first), flat(again)) and not torch.equal(flat(first), flat(other))
    assert first["weight"].dtype == torch.float32 and first["weight"].shape == (3, 2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_normal_like_is_standard_normal() -> None:
    x = trees.normal_like({"w": torch.zeros(100_000)}, torch.Generator().manual_seed(0))["w"]
    assert abs(x.mean().item()) < 0.02 and abs(x.std().item() - 1.0) < 0.02


@pytest.mark.parametrize("status", Status)
def test_a_status_reads_as_a_sentence_and_names_a_remedy(status: Status) -> None:
    assert status.value[0].isupper() and status.value.endswith(".") and "  " not in status.value
    has_remedy = any(word in status.value for word in ("raise the damping", "lower the step", "check the batch"))
    assert has_remedy == (not status.ok)


def test_which_statuses_are_ok() -> None:
    assert {status for status in Status if status.ok} == {Status.DIRECT, Status.CONVERGED, Status.BUDGET}


def test_the_worst_status_is_one_that_is_not_ok_if_there_is_any() -> None:
    for bad in (status for status in Status if not status.ok):
        assert worst([Status.BUDGET, bad, Status.DIRECT]) is bad
    assert worst(Status) is Status.NON_FINITE


def test_results_are_frozen() -> None:
    solution = Solution({}, Status.DIRECT)
    result = HypergradientResult({}, Status.DIRECT, 1.0, solution, {"products": 3})
    assert (solution.iterations, solution.products, solution.residual) == (0, 0, None)
    for record, field in ((solution, "status"), (result, "grads")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field, None)


def test_every_error_is_a_hyperkron_error_and_a_value_error() -> None:
    for error in (NonFiniteError, CoverageError, FactorizationError):
        assert issubclass(error, HyperkronError)
    assert issubclass(HyperkronError, ValueError) and issubclass(HyperkronWarning, UserWarning)


def test_warn_once_warns_once_for_each_key_and_points_here() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_once("test-trees-a", "first")
        warn_once("test-trees-a", "first again")
        warn_once("test-trees-b", "second")
    assert [str(w.message) for w in caught] == ["first", "second"]
    assert all(w.category is HyperkronWarning and w.filename == __file__ for w in caught)


def test_warn_once_as_an_error_is_raised_every_time() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(HyperkronWarning, match="bad"):
                warn_once("test-trees-c", "bad")
