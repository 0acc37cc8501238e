"""Configuration files: options of `hyperkron clean` as YAML or JSON, which can name data and settings but no code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hyperkron.cli.options import CLEAN, Kind, Option
from hyperkron.cli.output import UsageError, nearest

MAX_BYTES = 2**20
"""Bytes of a configuration file."""
_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>s|m|h)?\Z", re.ASCII)
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600}
_ALLOWED = {option.key: option for option in CLEAN if option.config}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


_KINDS: dict[Kind, tuple[Callable[[Any], bool], str]] = {
    "text": (lambda v: isinstance(v, str), "a text (in quotes, if it reads like a number or like yes and no)"),
    "whole": (lambda v: _is_number(v) and isinstance(v, int), "a whole number"),
    "number": (_is_number, "a number"),
    "flag": (lambda v: isinstance(v, bool), "true or false"),
    "texts": (lambda v: _are_texts(v) and bool(v), "a list of texts"),
    "duration": (lambda v: _is_number(v) or isinstance(v, str), "a time such as 90, 90s, 5m or 1h"),
    "names": (lambda v: _are_texts(v) or isinstance(v, str), "a text, or a list of names"),
}
"""For each kind of option, whether a value is one, and what it must be."""


def seconds(text: str | float) -> float:
    """A time in seconds.

    Example:
        >>> seconds("5m"), seconds("90s"), seconds(90), seconds("1.5h")
        (300.0, 90.0, 90.0, 5400.0)
    """
    found = _DURATION.match(str(text).strip().lower())
    value = float(found["number"]) * _SECONDS[found["unit"]] if found else 0.0
    if not value:
        raise UsageError(f"--budget={str(text)[:80]!r} must be a positive time, such as 90, 90s, 5m or 1h.")
    return value


def read_config(path: str | Path) -> dict[str, Any]:
    """The options that a configuration file gives, checked; a key with the value null is as if it were absent.

    The file is YAML, or JSON if its name or its first character says so.
    """
    entries = _parse(_text(Path(path)), Path(path))
    found: dict[str, Any] = {}
    for given, value in entries:
        key = given.replace("-", "_")
        if key == "model":
            raise UsageError(
                f"{path}: a configuration file may not name code (key model); use --model on the command line."
            )
        if key not in _ALLOWED:
            raise UsageError(f"{path}: the key {given[:80]!r} is unknown{nearest(key, _ALLOWED)}")
        if key in found:
            raise UsageError(f"{path}: the key {given!r} appears twice.")
        found[key] = None if value is None else _checked(value, _ALLOWED[key], path)
    return {key: value for key, value in found.items() if value is not None}


def print_config(values: Mapping[str, Any]) -> str:
    """The options as a configuration file: each line is a key and its value in JSON, which is YAML too.

    Example:
        >>> print(print_config({"train": "a.csv", "label": "yes", "seed": 3}).split("label")[1].splitlines()[0])
        : "yes"
    """
    lines = ["# options of `hyperkron clean`; the command line overrides them"]
    for key in _ALLOWED:
        lines.append(f"{key}: {json.dumps(values.get(key))}")
    return "\n".join(lines) + "\n"


def _text(path: Path) -> str:
    try:
        if not path.is_file():
            raise UsageError(f"--config={str(path)!r} is not a file.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UsageError(f"--config={str(path)!r} is larger than {MAX_BYTES} bytes; it is not a configuration.")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--config={str(path)!r} cannot be read ({error.strerror or error}).") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--config={str(path)!r} is not text in UTF-8 ({error.reason}).") from error


def _parse(text: str, path: Path) -> list[tuple[str, Any]]:
    """Keys and values in their order."""
    as_object = text.lstrip().startswith("{")
    try:
        if not as_object and path.suffix.lower() != ".json":
            return _parse_yaml(text, path)
        entries: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=lambda pairs: pairs)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON ({error}).") from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not a configuration ({type(error).__name__}).") from error
    if not as_object:
        raise UsageError(f"{path}: expected a JSON object of options.")
    return entries


def _parse_yaml(text: str, path: Path) -> list[tuple[str, Any]]:
    """The same for YAML. Structure is checked before values are made, so an alias cannot multiply."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            f"--config={str(path)!r}: YAML needs pyyaml, which cannot be imported ({error}): "
            "pip install 'hyperkron[cli]', or write it as JSON."
        ) from error

    def value(node: Any) -> Any:
        flat = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(part, yaml.ScalarNode) for part in flat):
            raise UsageError(f"{path}:{node.start_mark.line + 1}: a value is one word, a number, or a list of words.")
        return yaml.SafeLoader("").construct_object(node, deep=True)

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{path}: expected lines such as `label: target`.")
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in root.value):
            raise UsageError(f"{path}: a key is not text.")
        return [(str(key.value), value(node)) for key, node in root.value]
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML of plain values ({' '.join(str(error).split())[:300]}).") from error


def _checked(value: Any, option: Option, path: str | Path) -> Any:
    """A value of the type that the option wants."""
    fits, wanted = _KINDS[option.kind]
    if not fits(value):
        shown = f"{value!r:.80}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
        raise UsageError(f"{path}: {option.key} is {shown}; it must be {wanted}.")
    if option.kind == "names" and isinstance(value, list):
        return ",".join(value) or "none"
    return str(value) if option.kind == "duration" else value
