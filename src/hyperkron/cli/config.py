"""Configuration files: options of `hyperkron clean` as YAML or JSON, which can name data and settings but no code."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperkron.cli.options import CLEAN, Option
from hyperkron.cli.output import UsageError, nearest

MAX_BYTES = 2**20
"""Bytes of a configuration file."""
_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "seq", "null", "bool", "int", "float", "timestamp", "value")}
"""What YAML finds in texts without tags; other tags are refused."""
_ALLOWED = {option.key: option for option in CLEAN if option.config}


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
    """Keys and values in their order: each a text as it stands there, a list, or None."""
    as_object = text.lstrip().startswith("{")
    try:
        if not as_object and path.suffix.lower() != ".json":
            return _parse_yaml(text, path)
        as_texts: dict[str, Any] = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), str)
        entries: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=lambda pairs: pairs, **as_texts)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON ({error}).") from error
    except (RecursionError, ValueError) as error:
        raise UsageError(f"{path} is not a configuration ({type(error).__name__}).") from error
    if not as_object:
        raise UsageError(f"{path}: expected a JSON object of options.")
    return [(key, str(value).lower() if isinstance(value, bool) else value) for key, value in entries]


def _parse_yaml(text: str, path: Path) -> list[tuple[str, Any]]:
    """The same for YAML. Only its structure is read and no value is made, so an alias cannot multiply."""
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError(
            f"--config={str(path)!r}: YAML needs pyyaml, which cannot be imported ({error}): "
            "pip install 'hyperkron[cli]', or write it as JSON."
        ) from error

    def value(node: Any) -> Any:
        parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if (
            not all(isinstance(part, yaml.ScalarNode) for part in parts)
            or not {part.tag for part in (node, *parts)} <= _TAGS
        ):
            raise UsageError(f"{path}:{node.start_mark.line + 1}: a value is one word, a number, or a list of words.")
        if parts is node.value:
            return [part.value for part in parts]
        return None if node.tag.endswith(":null") else node.value

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
    """What the option makes of a text, or of several."""
    parts = value if isinstance(value, list) else [value]
    plain = all(isinstance(part, str) for part in parts)
    if plain and option.kind == "names":
        parts = [",".join(parts) or "none"]
    if not plain or not parts or (len(parts) > 1 and option.kind != "texts"):
        wanted = "a text, or a list of at least one text" if option.kind == "texts" else "one value"
        raise UsageError(f"{path}: {option.key} must be {wanted}.")
    try:
        found = [option.read(part) for part in parts]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{path}: {error}") from error
    return found if option.kind == "texts" else found[0]
