"""Checks of arguments: every refusal names the argument, its value and what to pass instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from hyperkron.solution import HyperkronError


def check_whole(name: str, value: object, least: int = 1, remedy: str = "") -> None:
    """Refuse anything but a whole number ≥ ``least``; a bool is none. ``remedy`` is what to pass instead."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        _refuse(name, value, f"must be a whole number ≥ {least}", remedy)


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


def check_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse anything but one of a few words."""
    if not isinstance(value, str) or value not in allowed:
        *most, last = allowed
        _refuse(name, value, "is unknown", f"choose {', '.join(most)} or {last}" if most else f"choose {last}")


def _number(value: object) -> float:
    """``value`` as a float; nan, which no check accepts, where it is not a number."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def _refuse(name: str, value: object, problem: str, remedy: str) -> None:
    raise HyperkronError(f"{name}={value!r:.80} {problem}{'; ' if remedy else ''}{remedy}.")
