"""What every reader shares: numpy when it is needed, the wording of lists, and paths that exist and stay inside."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError
from hyperkron.validation import need


class _Lazy:
    """An optional package that is imported when something of it is first used."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(need(self._module), name)


np: Any = _Lazy("numpy")


def listing(items: Iterable[object], limit: int = 5) -> str:
    """The first few of many things, and how many more there are.

    Example:
        >>> listing([3, 9, 12], limit=2)
        '3, 9 and 1 more'
    """
    found = list(items)
    text = ", ".join(str(item) for item in found[:limit])
    return f"{text} and {len(found) - limit} more" if len(found) > limit else text


def several(count: int, thing: str) -> str:
    """A count with its noun: ``1 row``, ``2 rows``, ``2 classes``."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}{'es' if thing.endswith('s') else 's'}"


def nearest(name: str, names: Iterable[str]) -> str:
    """A sentence that suggests the name most like ``name``, or nothing.

    Example:
        >>> nearest("lable", ["text", "label"])
        " Did you mean 'label'?"
    """
    by_lower = {other.lower(): other for other in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def existing(path: Path, argument: str) -> Path:
    """The path, if there is something; an error that names a neighbour of like name otherwise."""
    try:
        if path.exists():
            return path
        parent = path.parent
        neighbours = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
    except (OSError, ValueError) as error:  # not permitted; a name too long, or with a zero byte in it
        raise HyperkronError(f"{argument}={str(path)[:200]!r} cannot be opened ({error}).") from error
    where = "" if parent.is_dir() else f" Its folder {str(parent)!r} does not exist either."
    hint = nearest(path.name, neighbours) or where or " Check the path."
    raise HyperkronError(f"{argument}={str(path)!r} does not exist.{hint}")


def inside(folder: Path, name: str, argument: str) -> Path:
    """The file ``name`` names, relative to ``folder``; an error when it lies elsewhere, by ``..``, root or link."""
    try:
        root = folder.resolve()
        found = (root / name).resolve()
    except (OSError, ValueError, RuntimeError) as error:
        raise HyperkronError(f"{argument}: {name[:200]!r} is not a path ({error}).") from error
    if not found.is_relative_to(root):
        raise HyperkronError(
            f"{argument}: {name[:200]!r} leads out of the folder {str(folder)!r}; only files inside it are read. "
            "Move the files there and write paths relative to it."
        )
    return found
