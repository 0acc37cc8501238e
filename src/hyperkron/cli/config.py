"""Configuration files: options of `hyperkron clean` as YAML or JSON, which can name data and settings but no code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from hyperkron.cli.options import CLEAN, Option
from hyperkron.cli.output import UsageError, nearest

MAX_BYTES = 2**20
"""Bytes of a configuration file."""
_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>s|m|h)?\Z", re.ASCII)
_SECONDS = {None: 1, "s": 1, "m": 60, "h": 3600}
_ALLOWED = {option.key: option for option in CLEAN if option.config}
_WANTED = {
    "text": "a text (in quotes, if it reads like a number or like yes and no)",
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "texts": "a list of texts",
    "duration": "a time such as 90, 90s, 5m or 1h",
    "names": "a text, or a list of names",
}


def seconds(text: str | float, name: str = "--budget") -> float:
    """A time in seconds.

    Example:
        >>> seconds("5m"), seconds("90s"), seconds(90), seconds("1.5h")
        (300.0, 90.0, 90.0, 5400.0)
    """
    found = _DURATION.match(str(text).strip().lower())
    value = float(found["number"]) * _SECONDS[found["unit"]] if found else 0.0
    if not value:
        raise UsageError(f"{name}={str(text)[:80]!r} must be a positive time, such as 90, 90s, 5m or 1h.")
    return value


def read_config(path: str | Path) -> dict[str, Any]:
    """The options that a configuration file gives, checked; a key with the value null is as if it were absent.

    Args:
        path: of a YAML file, or of a JSON file if its name or its first character says so.

    Raises:
        UsageError: where it cannot be read, holds an unknown key or a value of the wrong type, or names code.
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
    """Keys and values in their order. Structure is checked before values are made, so an alias cannot multiply."""
    try:
        if path.suffix.lower() == ".json" or text.lstrip().startswith("{"):
            entries = json.loads(text, object_pairs_hook=lambda pairs: pairs)
            if not (isinstance(entries, list) and text.lstrip().startswith("{")):
                raise UsageError(f"{path}: expected a JSON object of options.")
            return entries
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(f"{path}: expected lines such as `label: target`.")
        return [(_key(key, path), _value(value, path)) for key, value in root.value]
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML of plain values ({' '.join(str(error).split())[:300]}).") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON ({error}).") from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not a configuration ({type(error).__name__}).") from error


def _key(node: Any, path: Path) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise UsageError(f"{path}: a key is not text.")
    return str(node.value)


def _value(node: Any, path: Path) -> Any:
    flat = [node] if isinstance(node, yaml.ScalarNode) else node.value if isinstance(node, yaml.SequenceNode) else []
    if not all(isinstance(part, yaml.ScalarNode) for part in flat) or isinstance(node, yaml.MappingNode):
        raise UsageError(f"{path}:{node.start_mark.line + 1}: a value is one word, a number, or a list of words.")
    loader = yaml.SafeLoader("")
    try:
        return loader.construct_object(node, deep=True)
    finally:
        loader.dispose()


def _checked(value: Any, option: Option, path: str | Path) -> Any:
    """A value of the type that the option wants."""
    plain = not isinstance(value, bool)
    fits = {
        "text": isinstance(value, str),
        "whole": plain and isinstance(value, int),
        "number": plain and isinstance(value, (int, float)),
        "flag": isinstance(value, bool),
        "texts": _texts(value),
        "duration": plain and isinstance(value, (str, int, float)),
        "names": isinstance(value, str) or _texts(value, empty=True),
    }
    if not fits[option.kind]:
        shown = f"{value!r:.80}" if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
        raise UsageError(f"{path}: {option.key} is {shown}; it must be {_WANTED[option.kind]}.")
    if option.kind == "duration":
        return str(value)
    if option.kind == "names" and isinstance(value, list):
        return ",".join(value) or "none"
    return value


def _texts(value: Any, empty: bool = False) -> bool:
    return isinstance(value, list) and (empty or bool(value)) and all(isinstance(part, str) for part in value)
