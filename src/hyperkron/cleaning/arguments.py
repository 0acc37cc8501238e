"""What a user may hand to ``clean``: paths, tables, arrays, torch Datasets."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.config import CleanConfig
from hyperkron.cleaning.data import Labelled, arrays, checks, read, read_pair
from hyperkron.cleaning.data.files import nearest, np, several
from hyperkron.cleaning.data.roles import LABELS
from hyperkron.cleaning.data.sources import without_columns
from hyperkron.solution import HyperkronError


def check_reading(train: Any, reading: Mapping[str, Any]) -> None:
    """Refuse options of :func:`clean` that it does not have, and those that say how to read rows that were read."""
    known = list(inspect.signature(read_pair).parameters)[2:]
    for name, value in reading.items():
        if name in {setting.name for setting in fields(CleanConfig)}:
            raise HyperkronError(f"{name} is a setting; pass config=hyperkron.CleanConfig({name}={value!r:.60}).")
        if name not in known:
            raise HyperkronError(f"clean has no argument {name!r}.{nearest(name, known)}")
        if isinstance(train, Labelled) and value is not None:
            raise HyperkronError(f"{name}={value!r:.60} is for reading, but train was read already; leave it out.")


def read_parts(train: Any, trusted: Any, test: Any, reading: dict[str, Any]) -> list[Labelled]:
    """Training, trusted and, if given, test rows, with one list of classes."""
    given = {name: value for name, value in reading.items() if value is not None}
    if not isinstance(train, Labelled):
        pair = _frame_pair(train)
        if pair is not None and len(votes := _labels(pair[1], "train")) > 1:
            given["annotators"] = [name for name in votes if name != LABELS[0]]
        ours = _source(train, train, "train")
        parts = list(read_pair(ours, None if trusted is None else _source(trusted, train, "trusted"), **given))
    elif not isinstance(trusted, Labelled) or not _fits(trusted, train):
        raise HyperkronError(
            "trusted must be Labelled rows with the classes and the encoding of train, as read_pair() gives them."
        )
    else:
        parts = [train, trusted]
    if test is not None and not isinstance(test, Labelled):
        asked = {name: given[name] for name in given if name not in ("trusted_column", "id", "annotator", "annotators")}
        test = read(_source(test, train, "test"), like=parts[0], argument="test", **asked)
    if test is not None:
        if not _fits(test, parts[0]):
            raise HyperkronError(
                "test must be Labelled rows with the classes and the encoding of train, as read(..., like=train) gives."
            )
        parts.append(replace(test, messages=(*test.messages, *checks.seen_notes(test, *parts))))
    if len(parts[1]) < 2:
        count = several(len(parts[1]), "usable row")
        raise HyperkronError(f"trusted has {count}; at least 2 are needed, better 10 of each class.")
    return parts


def _fits(part: Labelled, train: Labelled) -> bool:
    """Whether labels and inputs of some rows mean the same as those of the training rows."""
    return part.classes == train.classes and part.encoding == train.encoding


def _frame_pair(given: Any) -> tuple[Any, Any] | None:
    """A DataFrame and the labels of its rows, where these are given apart."""
    if isinstance(given, Mapping) and set(given) == {"x", "y"}:
        given = given["x"], given["y"]
    pair = isinstance(given, (tuple, list)) and len(given) == 2 and hasattr(given[0], "columns")
    return (given[0], given[1]) if pair else None


def _labels(y: Any, argument: str) -> dict[str, Any]:
    """Labels as a column ``label``; of several annotators a column each, and an empty ``label``."""
    y = arrays.tensor_array(y)
    if np.ndim(y) != 2:
        return {LABELS[0]: y}
    arrays.refuse_one_hot(np.asarray(y), argument)
    if hasattr(y, "columns"):
        found = {str(name): y[name] for name in y.columns}
    else:
        found = {f"annotator {s}": column for s, column in enumerate(np.asarray(y).T)}
    if len(found) == 1:
        return {LABELS[0]: next(iter(found.values()))}
    if LABELS[0] in found:
        raise HyperkronError(f"{argument}: y has a column {LABELS[0]!r} beside those of other annotators; rename it.")
    if argument != "train":
        raise HyperkronError(
            f"{argument}: y has {len(found)} columns; only training rows may have several labels each."
        )
    return {LABELS[0]: [None] * len(y), **found}  # or a column of x with the name of one would be taken for the label


def _by_place(train: Any) -> bool:
    """Whether the columns of the training rows have no names."""
    if isinstance(train, Labelled):
        return train.roles.label is None
    if isinstance(train, (str, os.PathLike, Mapping)) or hasattr(train, "columns"):
        return without_columns(train) and _frame_pair(train) is None
    return _frame_pair(train) is None and not hasattr(train, "column_names")


def _table(x: Any, y: Any, argument: str) -> dict[str, Any]:
    """The columns of a DataFrame and of the labels of its rows."""
    columns, labels = {str(name): x[name] for name in x.columns}, _labels(y, argument)
    if taken := [name for name in columns if name in labels or name.lower() == LABELS[0]]:
        raise HyperkronError(
            f"{argument}: x has a column {taken[0]!r}, and the labels are given apart from it; drop it, so that "
            "nothing is learnt from it, or rename it."
        )
    return {**columns, **labels}


def _source(given: Any, train: Any, argument: str) -> Any:
    """Arrays, pairs and torch Datasets in the form that the readers take, with columns as those of ``train`` are."""
    if (pair := _frame_pair(given)) is not None:
        return {"x": pair[0], "y": pair[1]} if _by_place(train) else _table(*pair, argument)
    if isinstance(given, (str, os.PathLike, Mapping)) or hasattr(given, "columns") or hasattr(given, "column_names"):
        return given
    if isinstance(given, (tuple, list)) and len(given) == 2:
        x, y = map(arrays.tensor_array, given)
        ours = _frame_pair(train)  # whose names a matrix of the same columns takes
        if ours is not None and np.shape(x)[1:] == (len(ours[0].columns),):
            return {**dict(zip(map(str, ours[0].columns), np.asarray(x).T, strict=True)), **_labels(y, argument)}
        return {"x": x, "y": y}
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        pairs = [given[i] for i in range(len(given))]
        if not pairs or not all(isinstance(pair, (tuple, list)) and len(pair) >= 2 for pair in pairs):
            raise HyperkronError(
                f"cannot read rows from a {type(given).__name__} whose items are not pairs of an input and a label; "
                "give (x, y), a dictionary of columns, or a Dataset of such pairs."
            )
        xs, ys = [p[0] for p in pairs], [p[1] for p in pairs]
        x = xs if isinstance(xs[0], str) else _stacked(xs, argument)
        return {"x": x, "y": [v.tolist() if isinstance(v, Tensor) else v for v in ys]}
    raise HyperkronError(
        f"cannot read rows from a {type(given).__name__}; give a path, a DataFrame, a dictionary of columns, (x, y), "
        "or a torch Dataset of such pairs."
    )


def _stacked(inputs: list[Any], argument: str) -> Any:
    """The inputs of a Dataset as one array."""
    try:
        return arrays.tensor_array(torch.stack([torch.as_tensor(value) for value in inputs]))
    except (RuntimeError, TypeError, ValueError) as error:
        raise HyperkronError(
            f"{argument}: its inputs, the first a {type(inputs[0]).__name__}, make no array ({error}). "
            "Give texts, or arrays of one shape, such as np.asarray(picture.convert('RGB').resize((64, 64)))."
        ) from error


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
