"""``read`` and ``read_pair``: from the name of a source to rows with labels."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hyperkron.cleaning.data import checks
from hyperkron.cleaning.data.encoding import TableEncoding
from hyperkron.cleaning.data.files import listing, np
from hyperkron.cleaning.data.labelled import Labelled, Raw, Roles
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.roles import frame_rows
from hyperkron.cleaning.data.sources import Source, in_memory, locate, own_trusted, without_columns
from hyperkron.cleaning.data.values import spelt
from hyperkron.cleaning.data.votes import are_positions, class_name
from hyperkron.solution import HyperkronError


def _load(
    source: Source,
    argument: str,
    asked: Roles,
    options: ReadOptions,
    shape: tuple[int, ...] | None = None,
    **more: Any,
) -> Raw:
    """The usable rows of a source."""
    if isinstance(source, (str, os.PathLike)):
        form, place = locate(source, argument, options, shape=shape, **more)
        opened = form.read(place)
    else:
        opened = in_memory(source, argument)
    if argument != "train":  # other rows may lack the columns that identify those
        asked = replace(asked, id=tuple(name for name in asked.id if name in getattr(opened, "columns", ())))
    if isinstance(opened, Raw):
        named = asked.given("text", "image", "features", "trusted_column", "id", "annotator", "annotators")
        if named:
            raise HyperkronError(
                f"{' and '.join(named)}: {opened.source} has no columns; give a table that has them, or leave it out."
            )
        return checks.usable(opened)
    return checks.usable(frame_rows(opened, asked, options, shape))


def _options(options: ReadOptions | None, charset: str | None) -> ReadOptions:
    options = options or ReadOptions()
    return options if charset is None else replace(options, charset=charset)


def _encoding(train: Raw, options: ReadOptions) -> tuple[TableEncoding | None, list[str]]:
    """How the training rows become numbers if they are a table, and what was noticed."""
    if train.kind != "table":
        return None, []
    encoding, notes = TableEncoding.fit(train.columns, options.max_categories)
    return encoding, [f"{train.source}: {note}" for note in notes]


def read(
    source: Source,
    *,
    text: str | None = None,
    label: str | None = None,
    image: str | None = None,
    features: Sequence[str] | None = None,
    part: str | None = None,
    like: Labelled | None = None,
    charset: str | None = None,
    options: ReadOptions | None = None,
    argument: str = "source",
) -> Labelled:
    """The rows of one source.

    Args:
        source: a path, ``folder:part``, ``hf:NAME:SPLIT``, a dictionary of arrays or columns, or a DataFrame.
        text, label, image, features: the columns of a table; those not named are inferred where there is no doubt.
        part: train, valid or test, for sources that have parts.
        like: rows whose class list, encoding and image size are to be used, such as the training rows for a test set.
        charset: of CSV and JSON files, in place of that of ``options``.
        options: how to read.
        argument: what messages call the source.

    Example:
        >>> rows = read({"x": [[0.0, 1.0], [2.0, 3.0]], "y": ["a", "b"]})
        >>> rows.kind, rows.classes, rows.inputs.tolist()
        ('table', ('a', 'b'), [[0.0, 1.0], [2.0, 3.0]])
    """
    options = _options(options, charset)
    asked = Roles(text, label, image, features, id=() if like is None else like.roles.id)
    if like is None:
        raw = _load(source, argument, asked, options, part=part)
        classes = checks.class_list(raw)
        encoding, notes = _encoding(raw, options)
        notes += checks.duplicate_notes(raw, checks.keys(raw, checks.numeric_columns(raw)))
        return checks.labelled(raw, classes, encoding, notes)
    names = () if like.encoding is None else like.encoding.column_names
    if names and not asked.given("text", "image", "features") and not without_columns(source):
        asked = replace(asked, features=names)
    raw = _load(source, argument, asked, options, like.shape, part=part)
    checks.refuse_other_kind(raw, like.kind, like.shape, like.source)
    checks.refuse_other_columns(raw, names, like.source)
    raw = _spelt(_with_names(raw, like.classes if like.listed else (), like.source), like.classes)
    raw = checks.known_only(raw, like.classes)
    return checks.labelled(raw, like.classes, like.encoding, checks.surprise_notes(raw, like.encoding))


def read_pair(
    train: Source,
    trusted: Source | None = None,
    *,
    text: str | None = None,
    label: str | None = None,
    image: str | None = None,
    features: Sequence[str] | None = None,
    trusted_column: str | None = None,
    id: str | Sequence[str] = (),
    annotator: str | None = None,
    annotators: Sequence[str] = (),
    charset: str | None = None,
    options: ReadOptions | None = None,
) -> tuple[Labelled, Labelled]:
    """The training and the trusted rows, with one class list and one encoding, learnt on the training rows.

    Training rows whose input is also in the trusted set are removed. Whatever else is noticed stands in ``messages``.

    Args:
        train: a path, ``folder:part``, ``hf:NAME:SPLIT``, a dictionary of arrays or columns, or a DataFrame.
        trusted: the same for the rows whose labels are right; None if a column flags them, or if ``train`` is a folder
            with a part ``trusted`` or ``valid``.
        text, label, image, features, charset, options: as for :func:`read`.
        trusted_column: the column that flags the trusted rows of ``train``.
        id: columns that identify the training rows: carried along, never learnt from.
        annotator: the column of ``train`` that says who gave the label of a line, where there is one line per row and
            annotator; lines with the same ``id`` are one row.
        annotators: columns of ``train`` with labels, one for each annotator.

    Example:
        >>> table = {"text": ["a b", "c", "d", "e"], "label": [1, 0, 1, 0], "ok": [0, 0, 1, 1]}
        >>> train, trusted = read_pair(table, trusted_column="ok")
        >>> train.inputs, trusted.rows.tolist()
        (['a b', 'c'], [2, 3])
    """
    options = _options(options, charset)
    asked = Roles(text, label, image, features, trusted_column, id, annotator, annotators)
    if trusted is not None and trusted_column is not None:
        raise HyperkronError(
            f"trusted={trusted!r:.100} and trusted_column={trusted_column!r} are both given; give one."
        )
    if trusted is None and trusted_column is None:
        trusted = own_trusted(train)
        if trusted is None:
            raise HyperkronError(
                "trusted=None: name a second source with rows whose labels are right (trusted=...), or the column of "
                "train that flags them (trusted_column=...)."
            )
    ours = _load(train, "train", asked, options, gold=False)
    if trusted is None:
        ours, theirs = _by_flag(ours, str(trusted_column))
    else:
        named = asked.label if asked.annotators else ours.roles.label or asked.label
        single = replace(ours.roles, label=named, annotator=None, annotators=())
        theirs = _load(trusted, "trusted", single, options, ours.shape, gold=True)
        checks.refuse_other_kind(theirs, ours.kind, ours.shape, ours.source)
    return _pair(ours, theirs, options)


def _pair(train: Raw, trusted: Raw, options: ReadOptions) -> tuple[Labelled, Labelled]:
    train, trusted = (
        _with_names(train, trusted.classes, trusted.source),
        _with_names(trusted, train.classes, train.source),
    )
    trusted = _spelt(trusted, list(dict.fromkeys([*train.labels, *train.answers, *train.classes])))
    if len(train.columns) != len(trusted.columns):
        raise HyperkronError(
            f"{train.source} has {len(train.columns)} columns but {trusted.source} has {len(trusted.columns)}; give "
            "both the same columns."
        )
    checks.refuse_other_columns(trusted, train.columns, train.source)
    numeric = checks.numeric_columns(train, trusted)
    ours, theirs = (checks.keys(raw, numeric) for raw in (train, trusted))
    known = set(theirs)
    shared = np.array([key in known for key in ours], dtype=bool)
    train = checks.without_overlap(train, trusted, options.keep_overlap, shared)
    if not options.keep_overlap:
        ours = [key for key in ours if key not in known]
    classes = checks.class_list(train, trusted)
    notes = checks.class_notes(train, trusted, classes)
    encoding, learnt = _encoding(train, options)
    notes += [*checks.label_notes(train), *checks.number_notes(train), *checks.leak_notes(train), *learnt]
    notes += checks.duplicate_notes(train, ours)
    others = checks.surprise_notes(trusted, encoding) + checks.duplicate_notes(trusted, theirs)
    return checks.labelled(train, classes, encoding, notes), checks.labelled(trusted, classes, encoding, others)


def _with_names(raw: Raw, classes: tuple[str, ...], other: str) -> Raw:
    """The rows with names in place of the numbers of classes, where only the ``other`` source has their names."""
    if raw.classes or not are_positions([*raw.labels, *raw.answers], classes):
        return raw
    shown = listing(f"{i} is {name!r}" for i, name in enumerate(classes))
    raw = raw.noting(
        f"{raw.source}: labels are numbers, taken as positions in the class names of {other}: {shown}. If that is "
        "wrong, write the names."
    )

    def named(names: Iterable[str | None]) -> list[Any]:
        return [class_name(name, classes) for name in names]

    gold = None if raw.gold is None else named(raw.gold)
    return replace(raw, labels=named(raw.labels), answers=tuple(named(raw.answers)), gold=gold, classes=classes)


def _spelt(raw: Raw, names: Collection[str | None]) -> Raw:
    """The rows with true and false as another source writes them."""
    labels, classes = ([spelt(name, names) for name in given] for given in (raw.labels, raw.classes))
    return replace(raw, labels=labels, classes=tuple(classes))


def _by_flag(raw: Raw, column: str) -> tuple[Raw, Raw]:
    """The rows that a column does not flag as trusted, and those that it does."""
    assert raw.trusted is not None
    count = int(raw.trusted.sum())
    if count in (0, len(raw)):
        what = "none" if count == 0 else "every one"
        raise HyperkronError(
            f"trusted_column={column!r} flags {what} of the {len(raw)} rows of {raw.source}; flag some."
        )
    chosen = replace(raw.take(np.flatnonzero(raw.trusted)), votes=None, answers=(), annotators=())
    return raw.without(raw.trusted, "trusted"), replace(chosen, source=f"{raw.source}[{column}]", messages=())
