"""What can be wrong with a dataset, and what is said or done about it; and the making of ``Labelled``."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from decimal import Decimal

from hyperkron.cleaning.data.encoding import TableEncoding
from hyperkron.cleaning.data.files import listing, np, several
from hyperkron.cleaning.data.labelled import Labelled, Raw, ReadRows
from hyperkron.cleaning.data.values import (
    Array,
    Columns,
    as_number,
    category,
    cells,
    exact_numbers,
    gaps,
    is_missing,
    numbers,
    ordered,
)
from hyperkron.solution import HyperkronError

_IDENTIFIES = re.compile(r"(^|[\W_])(id|nr|no|num|number|code|key|phone|account|customer)s?($|[\W_])|(Id|ID|Nr|No)$")
_SEVERAL = re.compile(r"\s*[,;|]\s*")
_LEAST = 20  # rows, below which all values of a column differ by chance
SEEN = "the accuracy on test rows is too high"
"""In the message about test rows that are training or trusted rows, too."""
_CHANCE = -20.0  # logarithm of the probability below which a column does not tell all labels by chance
_VALUES = 10  # for each class: of more values of a column it is not asked whether they tell the label


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


# --- rows that cannot be used ------------------------------------------------------------------------------


def usable(raw: Raw) -> Raw:
    """The rows that have a label and an input, with messages about the others."""
    unlabelled = np.array([name is None for name in raw.labels], dtype=bool)
    if raw.votes is not None:  # silence on a row is no reason to leave it out
        silent, unlabelled = unlabelled, unlabelled & (False if raw.trusted is None else raw.trusted)
        if count := int((silent & ~unlabelled).sum()):
            about = f"{several(count, 'row')} without any vote {'is' if count == 1 else 'are'} unlabelled"
            raw = raw.noting(f"{raw.source}: {about}: never a suspect, but with a suggested label.")
    blank = _blank(raw) & ~unlabelled
    for mask, what in ((unlabelled, "label"), (blank, "text" if raw.kind == "text" else "feature")):
        if count := int(mask.sum()):
            about = f"{several(count, 'row')} without a {what} {_were(count)} left out"
            raw = raw.noting(f"{raw.source}: {about}: rows {listing(raw.rows[mask].tolist())}.")
    if (unlabelled | blank).all():
        raise HyperkronError(f"{raw.source} has no usable row left: {' '.join(raw.messages) or 'it is empty.'}")
    return raw.without(unlabelled, "no label").without(blank[~unlabelled], "no input")


def _blank(raw: Raw) -> Array:
    """Rows without any input."""
    if isinstance(raw.inputs, list):
        return np.array([not text.strip() for text in raw.inputs], dtype=bool)
    if isinstance(raw.inputs, Mapping):
        return np.logical_and.reduce([np.ones(len(raw), dtype=bool), *map(gaps, raw.inputs.values())])
    return np.zeros(len(raw), dtype=bool)


def known_only(raw: Raw, classes: tuple[str, ...]) -> Raw:
    """The rows whose labels are among the classes of the training rows."""
    unknown = np.array([name not in classes for name in raw.labels], dtype=bool)
    if not unknown.any():
        return raw
    names = listing(map(repr, sorted({str(name) for name in raw.labels if name not in classes})))
    if unknown.all():
        raise HyperkronError(f"{raw.source}: all labels are unknown ({names}); known: {listing(classes)}.")
    where = listing(raw.rows[unknown].tolist())
    note = f"{raw.source}: rows with labels unknown in training were left out ({names}): rows {where}."
    return raw.without(unknown, "label unknown in training").noting(note)


def refuse_other_kind(raw: Raw, kind: str, shape: tuple[int, ...] | None, other: str) -> None:
    """Refuse inputs that do not fit those of another source."""
    if raw.kind != kind:
        raise HyperkronError(
            f"{raw.source} holds {raw.kind} inputs but {other} holds {kind} inputs; both must be of one kind."
        )
    if raw.kind == "image" and shape is not None and raw.shape != shape:
        raise HyperkronError(
            f"{raw.source} holds images of shape {raw.shape} but {other} of shape {shape}; scale them to one shape."
        )


def refuse_other_columns(raw: Raw, names: Iterable[str], other: str) -> None:
    """Refuse a table that lacks columns of another one."""
    if absent := [name for name in names if name not in raw.columns]:
        raise HyperkronError(
            f"{raw.source} lacks the columns {listing(map(repr, absent))} of {other}; it has "
            f"{listing(map(repr, raw.columns))}. Give both the same columns, or both as arrays without names."
        )


# --- the same input more than once -------------------------------------------------------------------------


def keys(raw: Raw | Labelled, numeric: frozenset[str] = frozenset()) -> list[Hashable]:
    """Something for every row that is equal where the inputs are; columns that are not ``numeric`` count as text."""
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
    names = set.intersection(*(set(raw.columns) for raw in parts))
    return frozenset(name for name in names if not any(numbers(raw.columns[name])[1] for raw in parts))


def duplicate_notes(raw: Raw, of: Iterable[Hashable]) -> list[str]:
    """What to say about rows with the same input: how many, and how many of those contradict each other."""
    groups: dict[Hashable, list[int]] = {}
    for i, key in enumerate(of):
        groups.setdefault(key, []).append(i)
    repeated = [group for group in groups.values() if len(group) > 1]
    if not repeated:
        return []
    rows = raw.rows.tolist()
    extra = sum(len(group) - 1 for group in repeated)
    same = listing(f"{rows[group[0]]} = {rows[group[1]]}" for group in repeated)
    repeat, stay = ("repeats", "stays") if extra == 1 else ("repeat", "stay")
    notes = [f"{raw.source}: {several(extra, 'row')} {repeat} the input of an earlier one and {stay}: rows {same}."]
    conflicting = [group for group in repeated if len({raw.labels[i] for i in group}) > 1]
    if conflicting:
        first = ({raw.labels[i]: rows[i] for i in reversed(group)} for group in conflicting)
        ranked = (sorted((row, repr(name)) for name, row in labels.items())[:4] for labels in first)
        shown = listing(" / ".join(f"{row} {name}" for row, name in pairs) for pairs in ranked)
        notes.append(
            f"{raw.source}: {several(len(conflicting), 'input')} with conflicting labels, which cannot all be right: "
            f"rows {shown}."
        )
    return notes


def without_overlap(train: Raw, trusted: Raw, keep: bool, shared: Array) -> Raw:
    """The training rows whose input is not in the trusted set; all with ``keep``."""
    count = int(shared.sum())
    if not count:
        return train
    about = f"{train.source}: {several(count, 'training row')} also in the trusted set ({trusted.source})"
    where = listing(train.rows[shared].tolist())
    if keep:
        return train.noting(f"{about}, kept as keep_overlap=True asks: rows {where}.")
    if shared.all():
        raise HyperkronError(
            f"every row of {train.source} is also in the trusted set ({trusted.source}), so nothing is left to clean; "
            "give another trusted set."
        )
    rest = train.without(shared, "also in the trusted set")
    return rest.noting(f"{about} {_were(count)} removed from training: rows {where}.")


def seen_notes(test: Labelled, train: Labelled, trusted: Labelled) -> list[str]:
    """What to say about test rows whose input a model was trained on."""
    asked, notes = keys(test), []
    for part, what in ((train, "training"), (trusted, "trusted")):
        known = set(keys(part))
        seen = [row for row, key in zip(test.rows.tolist(), asked, strict=True) if key in known]
        if seen:
            notes.append(
                f"{test.source}: {several(len(seen), 'row')} with the input of a {what} row: rows {listing(seen)}. If "
                f"they are the same examples, {SEEN}; remove them from one of the two."
            )
    return notes


# --- classes -----------------------------------------------------------------------------------------------


def class_list(*parts: Raw) -> tuple[str, ...]:
    """One list for all: in the order the sources give, else sorted; refused where it makes no sense."""
    found = {name for raw in parts for name in (*raw.labels, *raw.answers) if name is not None}
    given = list(dict.fromkeys(name for raw in parts for name in raw.classes))
    where = parts[0].source
    trained = {*parts[0].labels, *parts[0].answers} - {None}
    if len(trained) < 2:
        of_these = ", in every training row" if len(found) > 1 else ""
        told = " ".join(message for message in parts[0].messages if "label" in message)
        raise HyperkronError(
            f"{where} has a single class, {next(iter(trained or found), None)!r}{of_these}; at least two are needed. "
            f"Check label=... . {told}".rstrip()
        )
    if parts[0].votes is not None and "-1" in found:
        raise HyperkronError(
            f"{where}: -1 stands for silence among the votes, but it is also a label of the other rows; rename that "
            "class."
        )
    rows = sum(len(raw) for raw in parts)
    if len(found) > 20 and 2 * len(found) > rows:
        raise HyperkronError(
            f"{where} has {len(found)} classes in {rows} rows, such as {listing(map(repr, sorted(found)))}; that is "
            "not a column of labels. Name the right one with label=... ."
        )
    return (*given, *ordered(found - set(given)))


def class_notes(train: Raw, trusted: Raw, classes: tuple[str, ...]) -> list[str]:
    """What to say about classes that only one side has, and about names that look alike."""
    ours, theirs = Counter(name for name in train.labels if name is not None), Counter(trusted.labels)
    if not set(ours) & set(theirs):
        shown = " against ".join(listing(repr(name) for name in sorted(map(str, count))) for count in (ours, theirs))
        raise HyperkronError(
            f"{train.source} and {trusted.source} share no label: {shown}. Use the same spelling in both."
        )
    notes = []
    absent = [f"{name!r} ({several(ours[name], 'training row')})" for name in classes if not theirs[name]]
    if absent:
        notes.append(
            f"{trusted.source}: {several(len(absent), 'class')} absent from the trusted set: {listing(absent)}. No "
            "trusted row shows what they look like: only the training labels tell, and no accuracy is known; add a few "
            "of each."
        )
    alike: dict[Hashable, list[str]] = {}
    for name in classes:
        alike.setdefault(_spelling(name), []).append(name)
    only = [name for name in classes if theirs[name] and not ours[name] and name not in train.answers]
    for name in only:
        if same := [other for other in alike[_spelling(name)] if not theirs[other]]:
            raise HyperkronError(
                f"the label {same[0]!r} of {train.source} is written {name!r} in {trusted.source}; use one spelling in "
                "both, or other names if they are two classes."
            )
    unknown = [f"{name!r} ({several(theirs[name], 'trusted row')})" for name in only]
    if unknown:
        notes.append(f"{train.source}: labels unknown in training, only in the trusted set: {listing(unknown)}.")
    for group in (group for group in alike.values() if len(group) > 1):
        notes.append(
            f"{train.source}: the labels {listing(map(repr, group))} differ only in how they are written and are taken "
            "as different classes; use one spelling if they are the same class."
        )
    return notes


def _spelling(name: str) -> Hashable:
    """What is equal for labels that differ only in case, in spaces, or in how a number is written."""
    folded = "".join(unicodedata.normalize("NFKC", name).casefold().split())
    number = as_number(folded) if folded[-1:].isdecimal() else None
    return folded if number is None or math.isinf(number) else Decimal(folded)


# --- what may be meant: said, and nothing is changed ---------------------------------------------------------


def header_note(columns: Columns) -> str:
    """What to say if the names of columns look like a row of data: the file may have no header."""
    given = [name for name in columns if not is_missing(name)]
    like = sum(as_number(name) is not None or _among(name, cells(columns[name])) for name in given)
    if 2 * like < len(columns):
        return ""
    return (
        f"the first line looks like a row, not like the names of columns ({listing(map(repr, columns))}); if so, add a "
        "line that names the columns."
    )


def _among(name: str, values: Sequence[object]) -> bool:
    """Whether a name stands among the cells of its column, more than once."""
    count = sum(isinstance(value, str) and value.strip() == name for value in values)
    return count >= max(2, len(values) // 100)


def number_notes(raw: Raw) -> list[str]:
    """Columns of a table that look like numbers of customers, orders or rows."""
    found = []
    for name, values in raw.columns.items():
        numbers, strange = exact_numbers(values)
        if strange or len(numbers) < _LEAST or not np.isfinite(numbers).all() or (numbers != np.round(numbers)).any():
            continue
        if len(np.unique(numbers)) == len(numbers) and (_IDENTIFIES.search(name) or (np.diff(numbers) == 1).all()):
            found.append(
                f"{raw.source}: column {name!r} looks like a number that identifies rows: all {len(numbers)} values "
                f"differ. If so, pass id=[{name!r}], so that nothing is learnt from it."
            )
    return found


def leak_notes(raw: Raw) -> list[str]:
    """Columns of a table whose value tells the given label of every row, wrong ones included."""
    counts = Counter(name for name in raw.labels if name is not None)
    shares = {name: count / counts.total() for name, count in counts.items()}
    return [
        f"{raw.source}: column {name!r} tells the label of every row, and so repeats wrong ones. If it was made from "
        f"the labels, pass id=[{name!r}], so that nothing is learnt from it."
        for name, values in raw.columns.items()
        if _tells(cells(values), raw.labels, shares)
    ]


def _tells(values: Sequence[object], labels: list[str | None], shares: Mapping[str, float]) -> bool:
    """Whether all rows of a value have one label: by chance so with probability Π_n p(y_n), over all but the first."""
    told, chance = dict[str | None, str](), 0.0
    for value, label in zip(values, labels, strict=True):
        if label is None:
            continue
        known = told.setdefault(category(value), label)
        if known != label or len(told) > _VALUES * len(shares):
            return False
        chance += math.log(shares[label])
    return chance - sum(math.log(shares[label]) for label in told.values()) < _CHANCE


def label_notes(raw: Raw) -> list[str]:
    """Labels that look misspelt, and cells that look like several labels."""
    counts = Counter(name for name in raw.labels if name is not None)
    notes = []
    merged = [name for name in counts if (parts := _SEVERAL.split(name))[1:] and all(part in counts for part in parts)]
    if merged:
        shown = listing(f"{name!r} ({several(counts[name], 'row')})" for name in merged)
        notes.append(
            f"{raw.source}: {shown} look like several labels in one cell; each is taken as a class of its own. A row "
            "can have one label here: split such rows, or keep the main label."
        )
    for name in sorted(name for name, count in counts.items() if count <= 2 and name not in merged and len(name) > 3):
        larger = [other for other in counts if counts[other] >= 5 * counts[name] and not _SEVERAL.search(other)]
        near = difflib.get_close_matches(name, larger, 1, 0.8)
        if near and near[0].lower() != name.lower() and not any(map(str.isdigit, name)):
            notes.append(
                f"{raw.source}: the label {name!r} ({several(counts[name], 'row')}) looks like a misspelling of "
                f"{near[0]!r}; it is taken as a class of its own. Correct it if it is one."
            )
    return notes


# --- the result --------------------------------------------------------------------------------------------


def _value_notes(raw: Raw, encoding: TableEncoding) -> list[str]:
    """What to say about the gaps of a table, and about numbers that float32 cannot hold."""
    notes = []
    gappy = [f"{name!r} ({count})" for name, values in raw.columns.items() if (count := int(gaps(values).sum()))]
    if gappy:
        notes.append(
            f"{raw.source}: missing values in {several(len(gappy), 'column')}: {listing(gappy, 8)}. Numbers get the "
            "training mean, categories no value; where training rows have gaps too, an input of its own says so."
        )
    return notes + [f"{raw.source}: {note}" for note in encoding.extremes(raw.columns)]


def surprise_notes(raw: Raw, encoding: TableEncoding | None) -> list[str]:
    """What a table other than the training rows holds that their encoding has no input for."""
    return [f"{raw.source}: {note}" for note in ([] if encoding is None else encoding.surprises(raw.columns))]


def labelled(raw: Raw, classes: tuple[str, ...], encoding: TableEncoding | None, notes: Iterable[str] = ()) -> Labelled:
    """The rows with labels as numbers and inputs as arrays."""
    number: dict[str | None, int] = {name: k for k, name in enumerate(classes)}

    def numbered(names: list[str | None]) -> Array:
        return np.array([number.get(name, -1) for name in names], dtype=np.int64)

    found = {name: getattr(raw, name) for name in ReadRows.__dataclass_fields__}
    if encoding is not None:
        found |= {"inputs": encoding.matrix(raw.columns), "written": encoding.unknown_names(raw.columns)}
        notes = (*notes, *_value_notes(raw, encoding))
    if raw.votes is not None:
        found["votes"] = numbered([*raw.answers, None])[raw.votes]
    if raw.gold is not None:
        found["gold"] = numbered(raw.gold)
    found |= {"labels": numbered(raw.labels), "classes": classes, "messages": (*raw.messages, *notes)}
    return Labelled(**found, encoding=encoding, listed=bool(raw.classes))
