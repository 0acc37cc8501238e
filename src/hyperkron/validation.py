"""Checks of arguments and of optional packages: every refusal names what is wrong and what to do instead."""

from __future__ import annotations

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import torch

from hyperkron.solution import HyperkronError


def check_whole(name: str, value: object, least: int = 1, remedy: str = "", bits: int = 64) -> None:
    """Refuse anything but a whole number ≥ ``least``, below 2**bits; a bool is none. ``remedy``: what to pass then."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < 2**bits:
        large = isinstance(value, Integral) and int(value) >= 2**bits
        _refuse(name, value, f"must be a whole number ≥ {least}{f' and below 2**{bits}' * large}", remedy)


def check_positive(name: str, value: object, remedy: str = "", *, finite: bool = True) -> None:
    """Refuse anything but a number > 0; infinity too, unless ``finite=False``."""
    number = _number(value)
    if not number > 0 or (finite and math.isinf(number)):
        _refuse(name, value, "must be a positive number", remedy)


def check_nonnegative(name: str, value: object, remedy: str = "") -> None:
    """Refuse anything but a finite number ≥ 0."""
    if not 0 <= _number(value) < math.inf:
        _refuse(name, value, "must be a finite number ≥ 0", remedy)


def check_interval(
    name: str, value: object, low: float, high: float, *, brackets: str = "[]", remedy: str = ""
) -> None:
    """Refuse anything but a number between ``low`` and ``high``.

    ``brackets`` has a square one for an end that belongs to the interval, a round one for an end that does not.
    """
    number = _number(value)
    inside = low <= number <= high
    if not inside or (brackets[0] == "(" and number == low) or (brackets[1] == ")" and number == high):
        _refuse(name, value, f"must be a number in {brackets[0]}{low:g}, {high:g}{brackets[1]}", remedy)


def check_callable(name: str, value: object, remedy: str) -> None:
    """Refuse what cannot be called. ``remedy`` is what to pass instead."""
    if not callable(value):
        _refuse(name, value, "is not callable", remedy)


def check_folder(name: str, value: object) -> Path:
    """The folder that a path means; what is not a path is refused."""
    if not isinstance(value, (str, PathLike)):
        _refuse(name, value, "is not a path", f"pass that of a folder, such as {name}='runs/first'")
    return Path(value)


def check_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse anything but one of a few words."""
    if not isinstance(value, str) or value not in allowed:
        *most, last = allowed
        _refuse(name, value, "is unknown", f"choose {', '.join(most)} or {last}" if most else f"choose {last}")


def check_device(name: str, value: object) -> torch.device:
    """The CPU or GPU that a name such as ``cuda:1`` means, ``auto`` a GPU if there is one; others are refused."""
    there = torch.cuda.is_available()
    if value == "auto":
        return torch.device("cuda" if there else "cpu")
    try:
        device = torch.device(value)  # type: ignore[call-overload]
        if isinstance(value, str) and str(device) != value:  # torch reads cuda:256 as cuda:0
            raise ValueError
    except (RuntimeError, TypeError, ValueError):
        _refuse(name, str(value), "is unknown", "use auto, cpu or cuda, or a GPU by its number, such as cuda:0")
    if device.type not in ("cpu", "cuda"):
        _refuse(name, str(value), "is not supported", "use auto, cpu or cuda")
    if device.type == "cuda" and not there:
        _refuse(name, str(value), "is not here: torch can use no GPU", "use auto or cpu")
    if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
        which = "one GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        _refuse(name, str(value), f"is not here: torch can use {which}", "use auto or cpu, or a GPU that is here")
    return device


def check_takes(name: str, function: Callable[..., object], *arguments: str) -> None:
    """Refuse a function that cannot be called with these arguments, by position."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # of a decorated function its own
    except (NameError, TypeError, ValueError):  # it has none in C, or annotations that only type checkers import
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        own = getattr(function, "__name__", type(function).__name__)
        raise HyperkronError(
            f"{name}={own}{signature} cannot be called as {name}({', '.join(arguments)}): {error}."
        ) from None


def first_of(names: Sequence[object]) -> str:
    """The first of some names, and how many others there are.

    Example:
        >>> first_of(["weight"]), first_of(["weight", "bias", "scale"])
        ('weight', 'weight (and 2 others)')
    """
    others = len(names) - 1
    return f"{names[0]} (and {others} other{'s' * (others > 1)})" if others else str(names[0])


def need(module: str, extra: str = "data", who: str = "") -> Any:
    """An optional package, imported now; an error that names the extra where it is absent, and ``who`` needs it.

    Example:
        >>> need("no_such_package")
        Traceback (most recent call last):
        ...
        hyperkron.solution.HyperkronError: the package no_such_package is needed here and cannot be imported (...):
        pip install 'hyperkron[data]'
    """
    if (found := sys.modules.get(module)) is not None:
        return found
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise HyperkronError(
            f"the package {module.split('.')[0]} is needed {f'by {who}' if who else 'here'} and cannot be imported "
            f"({error}): pip install 'hyperkron[{extra}]'"
        ) from error


def _number(value: object) -> float:
    """``value`` as a float; nan, which no check accepts, where it is not a number."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def _refuse(name: str, value: object, problem: str, remedy: str) -> NoReturn:
    raise HyperkronError(f"{name}={value!r:.80} {problem}{'; ' if remedy else ''}{remedy}.")
