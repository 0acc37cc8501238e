"""What a sweep searches: ranges of numbers, and lists of choices."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyperkron.solution import HyperkronError
from hyperkron.validation import check_interval


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included; whole numbers if both are ``int``.

    ``log=True`` searches their logarithm, for settings whose order of magnitude matters (damping, learning rates).
    """

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        least, most = 0 if self.log else -float("inf"), float("inf")
        check_interval("low", self.low, least, most, brackets="()", remedy="low < high is needed, both finite")
        check_interval("high", self.high, self.low, most, brackets="()", remedy="low < high is needed, both finite")


Space = Mapping[str, Range | Sequence[Any]]
"""For each setting a :class:`Range`, or a list of choices (texts, numbers, truth values, ``None``)."""


def distributions(space: Space) -> dict[str, Any]:
    """The space as Optuna has it."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    if not space:
        raise HyperkronError(
            f"space={space!r} has no settings to search; name one, as {{'damping': Range(1e-4, 1e-1)}}."
        )
    for name, given in space.items():
        if isinstance(given, Range):
            whole = isinstance(given.low, int) and isinstance(given.high, int)
            kind: Any = IntDistribution if whole else FloatDistribution
            found[name] = kind(given.low, given.high, log=given.log)
        elif isinstance(given, list | tuple) and given and all(isinstance(v, str | int | float | None) for v in given):
            found[name] = CategoricalDistribution(given)
        else:
            raise HyperkronError(f"space[{name!r}]={given!r:.60} must be a Range(low, high) or a list of choices.")
    return found


def parse_space(texts: Iterable[str]) -> dict[str, Range | list[Any]]:
    """A space from texts: ``name=low..high``, ``name=low..high:log`` or ``name=first,second``.

    Example:
        >>> parse_space(["damping=1e-4..0.1:log", "steps=1..20", "method=kfac,cg"])
        {'damping': Range(low=0.0001, high=0.1, log=True), 'steps': Range(low=1, high=20, log=False),
         'method': ['kfac', 'cg']}
    """
    space: dict[str, Range | list[Any]] = {}
    for text in texts:
        name, _, given = text.partition("=")
        ends = [_value(end) for end in given.removesuffix(":log").split("..")]
        ranged = len(ends) == 2 and not any(isinstance(end, str) for end in ends)
        if not name.isidentifier() or name in space or not given or (".." in given and not ranged):
            raise HyperkronError(
                f"search={text!r:.80} must be a setting, once, and its values: damping=1e-4..1e-1:log, steps=1..20 or "
                "method=kfac,cg."
            )
        space[name] = (
            Range(ends[0], ends[1], given.endswith(":log")) if ranged else [_value(v) for v in given.split(",")]
        )
    return space


def _value(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, int | float) else text
