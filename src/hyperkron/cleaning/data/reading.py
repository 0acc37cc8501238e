"""``read`` and ``read_pair``: from the name of a source to rows with labels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from hyperkron.cleaning.data import arrays, checks, images, wrench
from hyperkron.cleaning.data.encoding import TableEncoding
from hyperkron.cleaning.data.files import existing, listing, need
from hyperkron.cleaning.data.hub import PREFIX, read_hub
from hyperkron.cleaning.data.labelled import Labelled, Raw, ReadOptions
from hyperkron.cleaning.data.roles import Roles, frame_rows, resolve, roles
from hyperkron.cleaning.data.sources import form_of, split_source
from hyperkron.cleaning.data.tables import (
    Frame,
    memory_frame,
    objects_frame,
    read_csv,
    read_json,
    read_jsonl,
    read_parquet,
)
from hyperkron.solution import HyperkronError

Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"
"""A path, a path with a part (``folder:test``), ``hf:NAME``, a dictionary of arrays or columns, or a DataFrame."""

_TABLES = {"csv": read_csv, "jsonl": read_jsonl, "parquet": read_parquet}


@dataclass(frozen=True)
class _Want:
    """What is to be read: the argument it came from, for messages, and what it must fit."""

    argument: str
    options: ReadOptions
    gold: bool | None = None
    part: str | None = None
    shape: tuple[int, ...] | None = None


def _open(source: Source, want: _Want) -> Raw | tuple[Frame, dict[str, tuple[str, ...]]]:
    """The rows of a source, or its columns where roles have yet to be given to them."""
    if not isinstance(source, (str, os.PathLike)):
        if not _in_memory(source):
            raise HyperkronError(
                f"{want.argument} is a {type(source).__name__}; it must be a path, a dictionary of arrays or "
                "columns, or a DataFrame."
            )
        if not _is_arrays(source):
            return memory_frame(source, want.argument), {}
        classes = tuple(str(name) for name in source.get("classes", ()))
        return arrays.array_rows(source["x"], source["y"], want.argument, classes)
    text = os.fspath(source)
    if text.startswith(PREFIX):
        return read_hub(text if want.part is None else f"{text}:{want.part}")
    path, part = (Path(text), None) if isinstance(source, Path) else split_source(text)
    if want.part is not None and part is not None:
        raise HyperkronError(f"part={want.part!r} is given, and {want.argument}={text!r} names the part {part!r} too.")
    part = part or want.part
    form = form_of(existing(path, want.argument))
    if form == "json":
        return _open_json(path, part, want)
    if form in ("csv", "jsonl", "parquet"):
        if part is not None:
            raise HyperkronError(f"{want.argument}={text!r} names the part {part!r}, but {path.name} has no parts.")
        return _TABLES[form](path, want.options), {}
    if form == "wrench":
        gold = want.gold if want.gold is not None else part not in (None, "train")
        return wrench.read_wrench(path, part, want.options, gold)
    if form == "folder":
        return images.read_class_folder(path, part, want.options, want.shape)
    simple = {"npz": arrays.read_npz_rows, "idx": arrays.read_idx_rows, "cifar": arrays.read_cifar}
    return simple[form](path, part, want.options) if form in simple else images.read_sheets(path, part, want.options)


def _in_memory(source: Any) -> bool:
    """Whether a source is a dictionary or a DataFrame."""
    return isinstance(source, Mapping) or hasattr(source, "iloc")


def _is_arrays(source: Mapping[str, Any]) -> bool:
    """Whether a dictionary is ``x`` and ``y`` rather than named columns."""
    names = {str(name) for name in source}
    return isinstance(source, Mapping) and {"x", "y"} <= names <= {"x", "y", "classes"}


def _open_json(path: Path, part: str | None, want: _Want) -> tuple[Frame, dict[str, tuple[str, ...]]]:
    content = read_json(path, want.options)
    if isinstance(content, list) and all(isinstance(entry, dict) for entry in content) and part is None:
        return objects_frame(path, content, want.options), {}
    raise HyperkronError(
        f"{want.argument}={str(path)!r} is not a list of JSON objects. For WRENCH, name the folder with train.json "
        f"and label.json ({str(path.parent)!r})."
    )


def _load(source: Source, asked: Roles, want: _Want) -> tuple[Raw, Roles]:
    """The usable rows of a source, and the roles its columns got."""
    opened = _open(source, want)
    if isinstance(opened, Raw):
        given = {"text": asked.text, "image": asked.image, "features": asked.features, "trusted_column": asked.trusted}
        named = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        if named:
            raise HyperkronError(f"{' and '.join(named)}: {opened.name} has no columns; leave it out.")
        return checks.usable(opened), asked
    frame, class_names = opened
    found, notes = resolve(frame, asked)
    raw = frame_rows(frame, found, want.options, want.shape, class_names.get(found.label or "", ()))
    return checks.usable(raw.noting(*notes)), found


def read(
    source: Source,
    *,
    text: str | None = None,
    label: str | None = None,
    image: str | None = None,
    features: Sequence[str] | None = None,
    part: str | None = None,
    like: Labelled | None = None,
    options: ReadOptions | None = None,
) -> Labelled:
    """The rows of one source.

    Args:
        source: a path, ``folder:part``, ``hf:NAME:SPLIT``, a dictionary of arrays or columns, or a DataFrame.
        text, label, image, features: the columns of a table; those not named are inferred where there is no doubt.
        part: train, valid or test, for sources that have parts.
        like: rows whose class list, encoding and image size are to be used, such as the training rows for a test set.
        options: how to read.

    Example:
        >>> rows = read({"x": [[0.0, 1.0], [2.0, 3.0]], "y": ["a", "b"]})
        >>> rows.kind, rows.classes, rows.inputs.tolist()
        ('table', ('a', 'b'), [[0.0, 1.0], [2.0, 3.0]])
    """
    options = options or ReadOptions()
    asked = roles(text, label, image, features)
    if like is not None and like.encoding is not None and features is None and text is None and image is None:
        names = tuple(column.name for column in like.encoding.columns)
        asked = asked if _without_columns(source) else replace(asked, features=names)
    shape = None if like is None or isinstance(like.inputs, list) else tuple(like.inputs.shape[1:])
    raw, _ = _load(
        source, asked, _Want("source", options, None, part, shape if like and like.kind == "image" else None)
    )
    if like is None:
        encoding, notes = _encoding(raw, options)
        return checks.labelled(
            raw,
            checks.class_list(raw),
            encoding,
            [*notes, *checks.duplicate_notes(raw, checks.keys(raw, checks.numeric_columns(raw)))],
        )
    _refuse_other_kind(raw, like.kind, shape, like.source)
    raw = _known_only(raw, like.classes)
    return checks.labelled(raw, like.classes, like.encoding, checks.missing_notes(raw))


def _without_columns(source: Source) -> bool:
    """Whether a source is arrays rather than columns."""
    if not isinstance(source, (str, os.PathLike)):
        return _is_arrays(source)
    path = split_source(os.fspath(source))[0]
    return path.is_dir() or path.suffix.lower() == ".npz"


def _known_only(raw: Raw, classes: tuple[str, ...]) -> Raw:
    np = need("numpy")
    known = np.array([name in classes for name in raw.labels], dtype=bool)
    if known.all():
        return raw
    names = sorted({str(name) for name in raw.labels if name not in classes})
    if not known.any():
        raise HyperkronError(
            f"{raw.name}: all labels are unknown ({listing(map(repr, names))}); known: {listing(classes)}."
        )
    note = f"{raw.name}: rows with labels unknown in training were left out ({listing(map(repr, names))}): rows "
    return raw.take(np.flatnonzero(known)).noting(note + f"{listing(raw.rows[~known].tolist())}.")


def _refuse_other_kind(raw: Raw, kind: str, shape: tuple[int, ...] | None, other: str) -> None:
    np = need("numpy")
    if raw.kind != kind:
        raise HyperkronError(
            f"{raw.name} holds {raw.kind} inputs but {other} holds {kind} inputs; both must be of one kind."
        )
    if raw.kind == "image" and shape is not None:
        assert isinstance(raw.inputs, np.ndarray)
        if tuple(raw.inputs.shape[1:]) != shape:
            raise HyperkronError(
                f"{raw.name} holds images of shape {tuple(raw.inputs.shape[1:])} but {other} of shape {shape}; scale "
                "them to one shape."
            )


def _encoding(train: Raw, options: ReadOptions) -> tuple[TableEncoding | None, list[str]]:
    if not isinstance(train.inputs, Mapping):
        return None, []
    encoding, notes = TableEncoding.fit(train.inputs, options.max_categories)
    return encoding, [*(f"{train.name}: {note}" for note in notes), *checks.missing_notes(train)]


def read_pair(
    train: Source,
    trusted: Source | None = None,
    *,
    text: str | None = None,
    label: str | None = None,
    image: str | None = None,
    features: Sequence[str] | None = None,
    trusted_column: str | None = None,
    options: ReadOptions | None = None,
) -> tuple[Labelled, Labelled]:
    """The training and the trusted rows, with one class list and one encoding, learnt on the training rows.

    Training rows whose input is also in the trusted set are removed. Whatever else is noticed stands in ``messages``.

    Args:
        train: a path, ``folder:part``, ``hf:NAME:SPLIT``, a dictionary of arrays or columns, or a DataFrame.
        trusted: the same for the rows whose labels are right; None if a column flags them, or if ``train`` is a folder
            with a part ``trusted`` or ``valid``.
        text, label, image, features: the columns of a table; those not named are inferred where there is no doubt.
        trusted_column: the column that flags the trusted rows of ``train``.
        options: how to read.

    Example:
        >>> table = {"text": ["a b", "c", "d", "e"], "label": [1, 0, 1, 0], "ok": [0, 0, 1, 1]}
        >>> train, trusted = read_pair(table, trusted_column="ok")
        >>> train.inputs, trusted.rows.tolist()
        (['a b', 'c'], [2, 3])
    """
    options = options or ReadOptions()
    asked = roles(text, label, image, features, trusted_column)
    if trusted is not None and trusted_column is not None:
        raise HyperkronError(
            f"trusted={trusted!r:.100} and trusted_column={trusted_column!r} are both given; give one."
        )
    if trusted is None and trusted_column is None:
        trusted = _own_trusted(train)
    ours, found = _load(train, asked, _Want("train", options, gold=False))
    if trusted is None:
        ours, theirs = _by_flag(ours, str(trusted_column))
    else:
        shape = None if isinstance(ours.inputs, (list, Mapping)) else tuple(ours.inputs.shape[1:])
        theirs, _ = _load(trusted, found, _Want("trusted", options, gold=True, shape=shape))
        _refuse_other_kind(theirs, ours.kind, shape, ours.name)
    return _pair(ours, theirs, options)


def _pair(train: Raw, trusted: Raw, options: ReadOptions) -> tuple[Labelled, Labelled]:
    tables = isinstance(train.inputs, Mapping) and isinstance(trusted.inputs, Mapping)
    if tables and len(train.inputs) != len(trusted.inputs):
        raise HyperkronError(
            f"{train.name} has {len(train.inputs)} columns but {trusted.name} has {len(trusted.inputs)}."
        )
    numeric = checks.numeric_columns(train, trusted)
    of = checks.keys(train, numeric), checks.keys(trusted, numeric)
    train, kept = checks.without_overlap(train, trusted, options.keep_overlap, of)
    classes = checks.class_list(train, trusted)
    notes = checks.class_notes(train, trusted, classes)
    encoding, learnt = _encoding(train, options)
    notes += [*learnt, *checks.duplicate_notes(train, [of[0][i] for i in kept])]
    theirs = [*checks.missing_notes(trusted), *checks.duplicate_notes(trusted, of[1])]
    return checks.labelled(train, classes, encoding, notes), checks.labelled(trusted, classes, encoding, theirs)


def _own_trusted(train: Source) -> str:
    """The part of a folder that holds its trusted rows."""
    if isinstance(train, (str, os.PathLike)) and not os.fspath(train).startswith(PREFIX):
        path, part = split_source(os.fspath(train))
        if part in (None, "train") and existing(path, "train").is_dir():
            form = form_of(path)
            if form == "wrench":
                return f"{path}:valid"
            inner = [name for name in ("trusted", "valid", "val") if (path / name).is_dir()]
            if form == "folder" and inner and (path / "train").is_dir():
                return f"{path}:{inner[0]}"
    raise HyperkronError(
        "trusted=None: name a second source with rows whose labels are right (trusted=..., --trusted), or the column "
        "of train that flags them (trusted_column=..., --trusted-column)."
    )


def _by_flag(raw: Raw, column: str) -> tuple[Raw, Raw]:
    np = need("numpy")
    assert raw.trusted is not None
    count = int(raw.trusted.sum())
    if count in (0, len(raw)):
        what = "none" if count == 0 else "every one"
        raise HyperkronError(f"trusted_column={column!r} flags {what} of the {len(raw)} rows of {raw.name}; flag some.")
    chosen = raw.take(np.flatnonzero(raw.trusted))
    return raw.without(raw.trusted, "trusted"), replace(chosen, name=f"{raw.name}[{column}]", messages=())
