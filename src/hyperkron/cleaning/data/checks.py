"""What can be wrong with a dataset, and what is said or done about it; and the making of ``Labelled``."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, Any

from hyperkron.cleaning.data.encoding import Number, TableEncoding
from hyperkron.cleaning.data.files import listing, need, several
from hyperkron.cleaning.data.labelled import Labelled, Raw
from hyperkron.cleaning.data.values import LARGEST, category, exact_numbers, extremes, gaps, numbers, ordered
from hyperkron.solution import HyperkronError

if TYPE_CHECKING:
    from hyperkron.cleaning.data.labelled import Array, Columns


# --- rows that cannot be used ------------------------------------------------------------------------------


def usable(raw: Raw) -> Raw:
    """The rows that have a label and an input, with messages about the others."""
    np = need("numpy")
    unlabelled = np.array([name is None for name in raw.labels], dtype=bool)
    blank = _blank(raw)
    for mask, what in ((unlabelled, "label"), (blank & ~unlabelled, "text" if raw.kind == "text" else "feature")):
        if mask.any():
            where = listing(raw.rows[mask].tolist())
            count = int(mask.sum())
            verb = "was" if count == 1 else "were"
            raw = raw.noting(f"{raw.name}: {several(count, 'row')} without a {what} {verb} left out: rows {where}.")
    if (unlabelled | blank).all():
        raise HyperkronError(f"{raw.name} has no usable row left: {' '.join(raw.messages) or 'it is empty.'}")
    return raw.without(unlabelled, "no label").without((blank & ~unlabelled)[~unlabelled], "no input")


def _blank(raw: Raw) -> Array:
    """Rows without any input."""
    np = need("numpy")
    if isinstance(raw.inputs, list):
        return np.array([not text.strip() for text in raw.inputs], dtype=bool)
    if isinstance(raw.inputs, Mapping):
        blank = np.ones(len(raw), dtype=bool)
        for values in raw.inputs.values():
            blank &= gaps(values)
        return blank
    return np.zeros(len(raw), dtype=bool)


# --- the same input more than once -------------------------------------------------------------------------


def keys(raw: Raw, numeric: frozenset[str] = frozenset()) -> list[Hashable]:
    """Something for every row that is equal where the inputs are.

    Args:
        raw: the rows.
        numeric: the columns of a table that are compared as numbers; the others are compared as text.
    """
    np = need("numpy")
    if isinstance(raw.inputs, list):
        return [" ".join(text.split()) for text in raw.inputs]
    if not isinstance(raw.inputs, Mapping):
        return [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in raw.inputs]
    as_numbers = [exact_numbers(values)[0] + 0.0 for name, values in raw.inputs.items() if name in numeric]
    block = np.stack(as_numbers, axis=1) if as_numbers else np.zeros((len(raw), 0))
    block = np.where(np.isnan(block), np.nan, block)  # one NaN of the many there are
    texts = [[category(value) for value in values] for name, values in raw.inputs.items() if name not in numeric]
    return [(row.tobytes(), *rest) for row, *rest in zip(block, *texts, strict=True)]


def numeric_columns(*parts: Raw) -> frozenset[str]:
    """The columns that hold nothing but numbers in every one of the tables."""
    tables = [raw.inputs for raw in parts if isinstance(raw.inputs, Mapping)]
    names = set.intersection(*(set(table) for table in tables)) if tables else set()
    return frozenset(name for name in names if not any(numbers(table[name])[1] for table in tables))


def duplicate_notes(raw: Raw, of: list[Hashable]) -> list[str]:
    """What to say about rows with the same input: how many, and how many of those contradict each other."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(of):
        groups.setdefault(key, []).append(i)
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return []
    rows = raw.rows.tolist()
    extra = sum(len(group) - 1 for group in repeated)
    pairs = listing(f"{rows[group[0]]} = {rows[group[1]]}" for group in repeated)
    verb = "repeats" if extra == 1 else "repeat"
    notes = [f"{raw.name}: {several(extra, 'row')} {verb} the input of an earlier one and stay: rows {pairs}."]
    conflicting = [group for group in repeated if len({raw.labels[i] for i in group}) > 1]
    if conflicting:
        shown = listing(" / ".join(f"{rows[i]} {raw.labels[i]!r}" for i in group[:3]) for group in conflicting)
        notes.append(
            f"{raw.name}: {several(len(conflicting), 'input')} with conflicting labels, which cannot all be right: "
            f"rows {shown}."
        )
    return notes


def without_overlap(
    train: Raw, trusted: Raw, keep: bool, of: tuple[list[Hashable], list[Hashable]]
) -> tuple[Raw, Array]:
    """The training rows whose input is not in the trusted set, and their positions."""
    np = need("numpy")
    seen = set(of[1])
    shared = np.array([key in seen for key in of[0]], dtype=bool)
    if not shared.any():
        return train, np.arange(len(train))
    count = int(shared.sum())
    where = listing(train.rows[shared].tolist())
    about = f"{several(count, 'training row')} also in the trusted set ({trusted.name})"
    if keep:
        return train.noting(f"{train.name}: {about}, kept as keep_overlap=True asks: rows {where}."), np.arange(
            len(train)
        )
    if shared.all():
        raise HyperkronError(
            f"every row of {train.name} is also in the trusted set ({trusted.name}), so nothing is left to clean; give "
            "another trusted set, or pass ReadOptions(keep_overlap=True)."
        )
    kept = np.flatnonzero(~shared)
    verb = "was" if count == 1 else "were"
    rest = train.without(shared, "also in the trusted set")
    return rest.noting(f"{train.name}: {about} {verb} removed from training: rows {where}."), kept


# --- classes -----------------------------------------------------------------------------------------------


def class_list(*parts: Raw) -> tuple[str, ...]:
    """One list for all: in the order the sources give, else sorted; refused where it makes no sense."""
    found = {name for raw in parts for name in raw.labels if name is not None}
    given = list(dict.fromkeys(name for raw in parts for name in raw.classes))
    classes = (*given, *ordered([name for name in found if name not in given]))
    where = parts[0].name
    if len(found) < 2:
        raise HyperkronError(
            f"{where} has a single class, {next(iter(found), None)!r}; at least two are needed. Check label=... ."
        )
    rows = sum(len(raw) for raw in parts)
    if len(found) > 20 and 2 * len(found) > rows:
        raise HyperkronError(
            f"{where} has {len(found)} classes in {rows} rows, such as {listing(map(repr, sorted(found)))}; that is "
            "not a column of labels. Name the right one with label=... ."
        )
    return classes


def class_notes(train: Raw, trusted: Raw, classes: tuple[str, ...]) -> list[str]:
    """What to say about classes that only one side has, and about names that look alike."""
    counts = [Counter(raw.labels) for raw in (train, trusted)]
    if not set(counts[0]) & set(counts[1]):
        ours, theirs = (listing(repr(name) for name in sorted(map(str, count))) for count in counts)
        raise HyperkronError(
            f"{train.name} and {trusted.name} share no label: {ours} against {theirs}. Use the same spelling in both."
        )
    notes = []
    absent = [name for name in classes if not counts[1][name]]
    if absent:
        shown = listing(f"{name!r} ({several(counts[0][name], 'training row')})" for name in absent)
        notes.append(
            f"{trusted.name}: {several(len(absent), 'class')} absent from the trusted set: {shown}. No "
            "trusted row shows what they look like; add a few of each."
        )
    unknown = [name for name in classes if counts[1][name] and not counts[0][name]]
    if unknown:
        shown = listing(f"{name!r} ({several(counts[1][name], 'trusted row')})" for name in unknown)
        notes.append(f"{train.name}: labels unknown in training, only in the trusted set: {shown}.")
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault("".join(name.lower().split()), []).append(name)
    for group in (group for group in alike.values() if len(group) > 1):
        notes.append(
            f"{train.name}: the labels {listing(map(repr, group))} differ only in case or spaces and are taken as "
            "different classes; use one spelling if they are the same class."
        )
    return notes


# --- the result --------------------------------------------------------------------------------------------


def missing_notes(raw: Raw) -> list[str]:
    """What to say about the gaps of a table."""
    if not isinstance(raw.inputs, Mapping):
        return []
    counts = {name: int(gaps(values).sum()) for name, values in raw.inputs.items()}
    gappy = [f"{name!r} ({count})" for name, count in counts.items() if count]
    if not gappy:
        return []
    return [
        f"{raw.name}: missing values in {several(len(gappy), 'column')}: {listing(gappy, 8)}. Numbers get the training "
        "mean and a flag, categories an input of their own."
    ]


def _extreme_notes(name: str, columns: Columns, encoding: TableEncoding) -> list[str]:
    """What to say about numbers that float32 cannot hold."""
    found = {c.name: extremes(columns[c.name]) for c in encoding.columns if isinstance(c, Number)}
    shown = [f"{column!r} ({len(values)}, such as {values[0]:g})" for column, values in found.items() if len(values)]
    if not shown:
        return []
    return [
        f"{name}: extreme values in {several(len(shown), 'column')}, taken as missing: {listing(shown, 8)}. Numbers "
        f"must lie between -{LARGEST:g} and {LARGEST:g}; correct these, or rescale the column."
    ]


def labelled(raw: Raw, classes: tuple[str, ...], encoding: TableEncoding | None, notes: list[str]) -> Labelled:
    """The rows with labels as numbers and inputs as arrays."""
    np = need("numpy")
    place: dict[str | None, int] = {name: k for k, name in enumerate(classes)}
    inputs: Any = raw.inputs
    if isinstance(raw.inputs, Mapping):
        assert encoding is not None
        inputs = encoding.matrix(raw.inputs)
        notes = notes + _extreme_notes(raw.name, raw.inputs, encoding)
    gold = None
    if raw.gold is not None:
        gold = np.array([place.get(name, -1) for name in raw.gold], dtype=np.int64)
    return Labelled(
        kind=raw.kind,
        inputs=inputs,
        labels=np.array([place[name] for name in raw.labels], dtype=np.int64),
        classes=classes,
        rows=raw.rows.astype(np.int64),
        messages=(*raw.messages, *notes),
        weak=raw.weak,
        gold=gold,
        encoding=encoding,
        source=raw.name,
        left_out={why: rows.astype(np.int64) for why, rows in raw.left_out.items()},
    )
