"""Checks of arguments: every refusal names the argument, its value and what to pass instead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

from hyperkron.solution import HyperkronError


def check_whole(name: str, value: object, least: int = 1, remedy: str = "") -> None:
    """Refuse anything but a whole number of at least ``least``; True and False are not numbers.

    Args:
        name: of the argument.
        value: what was passed.
        least: the smallest that is accepted.
        remedy: what to pass instead, without a full stop.

    Example:
        >>> check_whole("steps", 2.5)
        Traceback (most recent call last):
        hyperkron.solution.HyperkronError: steps=2.5 must be a whole number ≥ 1.
    """
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

    Args:
        name: of the argument.
        value: what was passed.
        low: the lower end.
        high: the upper end.
        brackets: a square one for an end that belongs to the interval, a round one for an end that does not.
        remedy: what to pass instead, without a full stop.

    Example:
        >>> check_interval("ema", 1.0, 0, 1, brackets="[)", remedy="0 uses the newest factors alone")
        Traceback (most recent call last):
        hyperkron.solution.HyperkronError: ema=1.0 must be a number in [0, 1); 0 uses the newest factors alone.
    """
    number = _number(value)
    inside = low <= number <= high
    if not inside or (brackets[0] == "(" and number == low) or (brackets[1] == ")" and number == high):
        _refuse(name, value, f"must be a number in {brackets[0]}{low:g}, {high:g}{brackets[1]}", remedy)


def check_one_of(name: str, value: object, allowed: Sequence[str]) -> None:
    """Refuse anything but one of a few words.

    Example:
        >>> check_one_of("mode", "best", ("min", "max"))
        Traceback (most recent call last):
        hyperkron.solution.HyperkronError: mode='best' is unknown; choose min or max.
    """
    if not isinstance(value, str) or value not in allowed:
        *most, last = allowed
        _refuse(name, value, "is unknown", f"choose {', '.join(most)} or {last}" if most else f"choose {last}")


def _number(value: object) -> float:
    """``value`` as a float; nan, which no check accepts, where it is not a number."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


def _refuse(name: str, value: object, problem: str, remedy: str) -> None:
    raise HyperkronError(f"{name}={value!r:.80} {problem}{'; ' if remedy else ''}{remedy}.")
