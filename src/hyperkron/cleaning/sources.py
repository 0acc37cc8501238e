"""What a user may hand to ``clean``: paths, tables, arrays, torch Datasets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.data import Labelled, arrays, checks, read, read_pair
from hyperkron.cleaning.data.roles import LABELS
from hyperkron.solution import HyperkronError


def read_parts(train: Any, trusted: Any, test: Any, reading: dict[str, Any]) -> list[Labelled]:
    """Training, trusted and, if given, test rows, with one list of classes."""
    given = {name: value for name, value in reading.items() if value is not None}
    named = all(_named_pair(source) for source in (train, trusted, test) if source is not None)
    if not isinstance(train, Labelled):
        parts = list(read_pair(_source(train, named), None if trusted is None else _source(trusted, named), **given))
    elif not isinstance(trusted, Labelled) or not _fits(trusted, train):
        raise HyperkronError(
            "trusted must be Labelled rows with the classes and the encoding of train, as read_pair() gives them."
        )
    else:
        parts = [train, trusted]
    if test is not None and not isinstance(test, Labelled):
        ours = {name: given[name] for name in given if name not in ("trusted_column", "id", "annotator", "annotators")}
        test = read(_source(test, named), like=parts[0], argument="test", **ours)
    if test is not None:
        if not _fits(test, parts[0]):
            raise HyperkronError(
                "test must be Labelled rows with the classes and the encoding of train, as read(..., like=train) gives."
            )
        parts.append(replace(test, messages=(*test.messages, *checks.seen_notes(test, *parts))))
    if len(parts[1]) < 2:
        raise HyperkronError(
            f"trusted has {len(parts[1])} usable rows; at least 2 are needed, better 10 of each class."
        )
    return parts


def _fits(part: Labelled, train: Labelled) -> bool:
    """Whether labels and inputs of some rows mean the same as those of the training rows."""
    return part.classes == train.classes and part.encoding == train.encoding


def _named_pair(given: Any) -> bool:
    """Whether this is a pair of a DataFrame, whose columns keep their names, and labels."""
    if not isinstance(given, (tuple, list)) or len(given) != 2 or not hasattr(given[0], "columns"):
        return False
    return not {str(name).lower() for name in given[0].columns} & set(LABELS)


def _source(given: Any, names: bool = False) -> Any:
    """Arrays, pairs and torch Datasets in the form that the readers take."""
    if isinstance(given, (str, os.PathLike, Mapping)) or hasattr(given, "columns") or hasattr(given, "column_names"):
        return given
    if names:
        return {**{str(name): given[0][name] for name in given[0].columns}, LABELS[0]: given[1]}
    if isinstance(given, (tuple, list)) and len(given) == 2:
        return {"x": _array(given[0]), "y": _array(given[1])}
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        pairs = [given[i] for i in range(len(given))]
        if not pairs or not all(isinstance(pair, (tuple, list)) and len(pair) >= 2 for pair in pairs):
            raise HyperkronError(
                f"cannot read rows from a {type(given).__name__} whose items are not pairs of an input and a label; "
                "give (x, y), a dictionary of columns, or a Dataset of such pairs."
            )
        xs, ys = [p[0] for p in pairs], [p[1] for p in pairs]
        x = arrays.tensor_array(torch.stack([torch.as_tensor(v) for v in xs])) if not isinstance(xs[0], str) else xs
        return {"x": x, "y": [v.item() if isinstance(v, Tensor) else v for v in ys]}
    raise HyperkronError(
        f"cannot read rows from a {type(given).__name__}; give a path, a DataFrame, a dictionary of columns, (x, y), "
        "or a torch Dataset of such pairs."
    )


def _array(values: Any) -> Any:
    return arrays.tensor_array(values) if isinstance(values, Tensor) else values


def plain_sources(train: Any, trusted: Any, test: Any, reading: dict[str, Any]) -> dict[str, Any] | None:
    """The sources if all are paths and plain settings, so that resume can read them again."""
    paths = {"train": train, "trusted": trusted, "test": test}
    plain = (str, int, float, bool, list, tuple, type(None))
    if not all(isinstance(path, (str, os.PathLike, type(None))) for path in paths.values()):
        return None
    if not all(isinstance(value, plain) for value in reading.values()):
        return None
    return {name: None if path is None else absolute(path) for name, path in paths.items()} | {"reading": reading}


def absolute(name: Any) -> str:
    """A path as the record has it, or the name of a dataset of the Hub."""
    text = os.fspath(name)
    return text if text.startswith("hf:") else str(Path(text).absolute())


def model_name(model: Callable[[], nn.Module]) -> str:
    """How a builder of the user's is called in the record."""
    return f"{getattr(model, '__module__', '?')}:{getattr(model, '__qualname__', type(model).__name__)}"
