"""JSON objects read with suspicion: every field is checked for its kind, and a wrong one is named."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import Any, TypeAlias, TypeVar

from hyperkron.solution import HyperkronError
from hyperkron.training.writing import read_plain

FORMAT = 1
"""The format of config.json and result.json."""
REMEDY = "restore the file or run `hyperkron clean` again"
"""What helps against a damaged file."""
T = TypeVar("T")
Label: TypeAlias = str
"""The name of a class, which a file may also have as a number."""
MAX_DEPTH = 50
"""How deep the values of a file may be nested; those of a run are at most five deep."""


class Fields:
    """The fields of one JSON object; a missing one, null or NaN counts as not known.

    ``file`` and ``where``, the place within it, are for the messages.

    Example:
        >>> fields = Fields({"noise": {"rate": 0.4}}, Path("result.json"))
        >>> fields.child("noise").number("rate")
        0.4
        >>> fields.child("weights").numbers("edges")
        []
    """

    def __init__(self, value: Any, file: Path, where: str = "") -> None:
        self.file, self._where = file, where
        if not isinstance(value, dict):
            raise self._wrong("", value, "an object")
        self.raw: dict[str, Any] = value

    def _place(self, name: str) -> str:
        return ".".join(part for part in (self._where, name) if part)

    def _wrong(self, name: str, value: Any, kind: str) -> HyperkronError:
        return HyperkronError(
            f"{self.file}: {self._place(name) or 'its content'}={value!r:.80} is not {kind}; {REMEDY}."
        )

    def _get(self, name: str, kind: type, words: str) -> Any:
        value = self.raw.get(name)
        if value is not None and not isinstance(value, kind):
            raise self._wrong(name, value, words)
        return value

    def text(self, name: str) -> str:
        """A string; empty when not known."""
        return self._get(name, str, "a string") or ""

    def number(self, name: str) -> float | None:
        """A finite number; None when not known."""
        return self._number(name, self.raw.get(name))

    def _number(self, name: str, value: Any) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, value, "a number")
        try:
            return float(value) if math.isfinite(value) else None
        except OverflowError:
            raise self._wrong(name, value, "a number of float64") from None

    def count(self, name: str) -> int | None:
        """A whole number, at least 0; None when not known."""
        value = self.number(name)
        if value is not None and (value < 0 or value != int(value)):
            raise self._wrong(name, value, "a whole number, at least 0")
        return None if value is None else int(self.raw[name])  # not by way of a float, which rounds large ones

    def flag(self, name: str) -> bool:
        """True or false; false when not known."""
        return bool(self._get(name, bool, "true or false"))

    def items(self, name: str) -> list[Any]:
        """A list; empty when not known."""
        return self._get(name, list, "a list") or []

    def numbers(self, name: str) -> list[float | None]:
        """A list of numbers, None for each that is not finite."""
        return [self._number(f"{name}[{i}]", value) for i, value in enumerate(self.items(name))]

    def texts(self, name: str) -> list[str]:
        """A list of strings; other plain values, such as class names that are numbers, become strings."""
        values = self.items(name)
        for i, value in enumerate(values):
            if isinstance(value, dict | list) or value is None:
                raise self._wrong(f"{name}[{i}]", value, "a string")
        return [str(value) for value in values]

    def label(self, name: str) -> str:
        """The name of a class: a string, or a number that stands for one."""
        value = self.raw.get(name)
        if isinstance(value, dict | list):
            raise self._wrong(name, value, "the name of a class")
        return "" if value is None else str(value)

    def into(self, kind: type[T]) -> T:
        """A dataclass whose fields are read under their own names, each as its annotation says."""
        readers: dict[Any, Callable[[str], Any]] = {
            "str": self.text,
            "str | None": lambda name: self.text(name) or None,
            "tuple[str, ...]": lambda name: tuple(self.texts(name)),
            "int": lambda name: self.count(name) or 0,
            "Label": self.label,
            "float | None": self.number,
            "int | None": self.count,
            "bool": self.flag,
            "bool | None": lambda name: None if self.raw.get(name) is None else self.flag(name),
            "list[float | None]": self.numbers,
            "dict[str, Any]": lambda name: self.child(name).raw,
        }
        wanted = dataclasses.fields(kind)  # type: ignore[arg-type]
        return kind(**{field.name: readers[field.type](field.name) for field in wanted})

    def child(self, name: str) -> Fields:
        """An object within the object; empty when not known."""
        value = self.raw.get(name)
        return Fields({} if value is None else value, self.file, self._place(name))

    def children(self, name: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(value, self.file, f"{self._place(name)}[{i}]") for i, value in enumerate(self.items(name))]


def parse(text: str, file: Path, where: str = "") -> Fields:
    """The JSON object that a text holds."""
    try:
        value = json.loads(text)
        if _deep(value):
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    except (ValueError, RecursionError) as error:
        place = f"{file}, {where}," if where else f"{file}"
        raise HyperkronError(f"{place} is not JSON ({str(error)[:100]}): {text[:40]!r}; {REMEDY}.") from error
    return Fields(value, file, where)


def _deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than ``MAX_DEPTH``."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level if isinstance(x, dict | list))
        level = [x for values in inner for x in values]
        if not level:
            return False
    return True


def read_text(file: Path) -> str | None:
    """The text of an ordinary file; None where there is no such file."""
    try:
        return read_plain(file).decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise HyperkronError(f"{file} cannot be read as UTF-8 ({reason}); {REMEDY}.") from error


def read_object(file: Path, missing: str) -> Fields:
    """The JSON object of a file; an error that says what is ``missing`` where there is none."""
    text = read_text(file)
    if text is None:
        raise HyperkronError(missing)
    return parse(text, file)


def resume_command(folder: Path) -> str:
    """What continues the run in a folder, for messages."""
    return f"`hyperkron resume {quote(str(folder))}`"


def read_result(folder: Path) -> Fields:
    """The content of result.json."""
    if not folder.is_dir():
        raise HyperkronError(f"run_folder={str(folder)!r} is not a folder; name one that `hyperkron clean` wrote.")
    file = folder / "result.json"
    why = f"the run has not finished; continue it with {resume_command(folder)}."
    if not (folder / "config.json").exists():
        why = "it holds no run; name a folder that `hyperkron clean` wrote."
    result = read_object(file, f"run_folder={str(folder)!r} has no result.json: {why}")
    found = result.raw.get("format")
    if found != FORMAT or isinstance(found, bool):
        raise HyperkronError(
            f"{file}: format={found!r:.80} is not one that this version reads ({FORMAT}); "
            "use the version of hyperkron that made the run, or run `hyperkron clean` again."
        )
    return result
