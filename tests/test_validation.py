"""Checks of arguments: what each accepts and refuses, and that the message names argument, value and remedy."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from hyperkron.solution import HyperkronError
from hyperkron.validation import (
    check_device,
    check_interval,
    check_nonnegative,
    check_one_of,
    check_positive,
    check_takes,
    check_whole,
)

NEITHER = (True, False, None, "1", math.nan, torch.tensor(1.0), [1])


@pytest.mark.parametrize("value", [1, 7, np.int64(3)])
def test_whole_numbers_are_accepted(value: object) -> None:
    check_whole("steps", value)


@pytest.mark.parametrize("value", [*NEITHER, 0, -1, 1.0, 2.5, np.bool_(True), math.inf])
def test_what_is_not_a_whole_number_is_refused(value: object) -> None:
    with pytest.raises(HyperkronError, match=re.escape(f"steps={value!r} must be a whole number ≥ 1; pass 10.")):
        check_whole("steps", value, remedy="pass 10")


def test_the_least_whole_number_is_the_callers() -> None:
    check_whole("seed", 0, 0)
    with pytest.raises(HyperkronError, match=r"seed=-1 must be a whole number ≥ 0\.$"):
        check_whole("seed", -1, 0)


@pytest.mark.parametrize("value", [*NEITHER, 0, 0.0, -0.5, math.inf, -math.inf])
def test_what_is_not_positive_is_refused(value: object) -> None:
    with pytest.raises(HyperkronError, match=re.escape(f"lr={value!r} must be a positive number.")):
        check_positive("lr", value)


def test_positive_and_nonnegative_numbers_are_accepted() -> None:
    check_positive("lr", 1e-300), check_positive("lr", 2), check_positive("lr", np.float32(0.5))
    check_positive("clip", math.inf, finite=False)
    check_nonnegative("damping", 0), check_nonnegative("damping", 1e-3)


@pytest.mark.parametrize("value", [*NEITHER, -1e-9, math.inf])
def test_what_is_negative_is_refused(value: object) -> None:
    with pytest.raises(
        HyperkronError, match=re.escape(f"damping={value!r} must be a finite number ≥ 0; 1e-3 is usual.")
    ):
        check_nonnegative("damping", value, "1e-3 is usual")


@pytest.mark.parametrize(
    ("brackets", "inside", "outside"),
    [("[]", (0, 0.5, 1), (-0.1, 1.1)), ("[)", (0, 0.5), (1, -0.1)), ("()", (0.5,), (0, 1)), ("(]", (1,), (0,))],
)
def test_ends_belong_to_an_interval_by_its_brackets(
    brackets: str, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    for value in inside:
        check_interval("share", value, 0, 1, brackets=brackets)
    for bad in (*outside, *NEITHER):
        wanted = f"share={bad!r} must be a number in {brackets[0]}0, 1{brackets[1]}."
        with pytest.raises(HyperkronError, match=re.escape(wanted)):
            check_interval("share", bad, 0, 1, brackets=brackets)


def test_one_of_a_few_words() -> None:
    check_one_of("mode", "min", ("min", "max"))
    for bad in ("MIN", None, 3, ["min"], ""):
        with pytest.raises(HyperkronError, match=re.escape(f"mode={bad!r} is unknown; choose min, max or none.")):
            check_one_of("mode", bad, ("min", "max", "none"))


def test_a_decorated_function_takes_what_its_decorator_takes() -> None:
    def plain(model: object, batch: object, *, scale: float) -> float:
        return scale

    @functools.wraps(plain)
    def decorated(model: object, hyper: object, batch: object) -> float:
        return plain(model, batch, scale=2.0)

    check_takes("inner", decorated, "model", "hyper", "batch")
    with pytest.raises(HyperkronError, match=r"inner=plain.* cannot be called as inner"):
        check_takes("inner", plain, "model", "hyper", "batch")


@pytest.mark.parametrize("check", [check_whole, check_positive, check_nonnegative])
def test_a_long_value_is_shortened(check: Callable[[str, object], None]) -> None:
    with pytest.raises(HyperkronError) as caught:
        check("steps", "x" * 1000)
    assert len(str(caught.value)) < 150


GPU_NAMES = ("cuda", "cuda:0", "cuda:1", torch.device("cuda", 1))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_devices_are_those_that_torch_can_use(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert check_device("device", "auto").type == ("cuda" if count else "cpu")
    assert check_device("device", "cpu") == check_device("device", torch.device("cpu")) == torch.device("cpu")
    for name in GPU_NAMES[: 2 * count]:
        assert check_device("device", name) == torch.device(name)
    seen = ("no GPU; use auto or cpu", "one GPU, cuda:0; use auto or cpu", "2 GPUs, cuda:0 to cuda:1; use auto or cpu")
    for name in (*GPU_NAMES[2 * count :], "cuda:7"):
        with pytest.raises(HyperkronError, match=f"device='{name}' is not here: torch can use {seen[count]}"):
            check_device("device", name)


@pytest.mark.parametrize("name", ["gpu", "mps", "xpu", "cuda:-1", "cuda:256", "CUDA", "", "meta", None, 1.5])
def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch, name: object) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 300)
    with pytest.raises(HyperkronError, match=f"device='{name}' is (unknown|not supported); use auto, cpu or cuda"):
        check_device("device", name)
