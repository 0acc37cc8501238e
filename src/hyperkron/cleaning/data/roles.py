"""Which column of a table is the text, the label, the image, the features or the flag of trusted rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from hyperkron.cleaning.data.files import listing, nearest, np
from hyperkron.cleaning.data.images import SUFFIXES, load_images
from hyperkron.cleaning.data.labelled import Frame, Kind, Raw, Roles
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.values import Array, Values, as_number, cells, flags, gaps, ids_of, is_missing
from hyperkron.cleaning.data.votes import FURTHER, from_columns, gathered, given_names
from hyperkron.solution import HyperkronError

LABELS = ("label", "labels", "target", "class", "category", "y")
"""Names of columns taken for the label, the first that is there, when none is named."""
TEXTS = ("text", "texts", "sentence", "content", "document", "comment", "review", "question", "message", "body")
"""Names of columns taken for the text."""
IMAGES = ("image", "image_path", "img", "picture", "file_name", "filename", "path", "file")
"""Names of columns taken for the image, if they hold images or names of image files."""
TRUSTED = ("trusted", "is_trusted")
_IGNORED = frozenset({"", "id", "ids", "index", "idx", "row", "row_id", "uuid", "unnamed: 0", "weak_labels"})
_LOOK = 200  # rows that are looked at to guess what a column holds


def resolve(frame: Frame, asked: Roles) -> tuple[Roles, list[str]]:
    """Every role of a frame's columns, named or inferred, and what to say about it."""
    several_columns = ("features", "id", "annotators")
    named = {f"{role}[{i}]": name for role in several_columns for i, name in enumerate(getattr(asked, role) or ())}
    voted = bool(asked.annotators) and asked.trusted_column is None
    if voted and asked.label not in frame.columns:  # votes take its place here; other sources may have it
        taken = {*asked.inputs(), *asked.id}
        free = [name for name in frame.columns if name not in taken]
        asked = replace(asked, label=_first_of(frame.name, free, LABELS))
    for argument, name in (vars(asked) | dict.fromkeys(several_columns) | named).items():
        if name is not None:
            _require(frame.name, frame.columns, argument, name)
    doubts = "".join(message.partition(": ")[2] for message in frame.messages if "first line" in message)
    label = asked.label
    if not voted:
        label = label_column(frame.name, list(frame.columns), label, doubts[:1].upper() + doubts[1:])
    if label is not None and label in (*asked.inputs(), *asked.id):
        raise HyperkronError(f"label={label!r} is also named as another column's role; the label cannot be an input.")
    if both := [name for name in asked.id if name in asked.inputs()]:
        raise HyperkronError(f"id={both[0]!r} is also named as an input; ids are carried along and not learnt from.")
    found = replace(asked, label=label)
    told = ""
    if not asked.given("text", "image", "features"):
        found = infer_input(frame, found)
        if (column := found.text or found.image) is not None:
            told = f"column {column!r} is taken as the {'text' if found.text else 'image'}; "
    used = {*found.inputs(), *found.id, *([] if voted else [label])}
    unused = [name for name in frame.columns if name not in used]
    messages = []
    if unused:
        messages.append(f"{frame.name}: {told}columns not used: {listing(map(repr, unused), 12)}.")
    if asked.trusted_column is None and any(name.lower() in TRUSTED for name in unused):
        messages.append(f"{frame.name}: to take the trusted rows from a column, pass trusted_column=....")
    return found, messages


class NoLabelColumn(HyperkronError):
    """There is no column with one label for each row."""


def label_column(source: str, columns: Sequence[str], label: str | None, hint: str = "") -> str:
    """The column of the labels, named or inferred; ``hint`` ends the error where there is none."""
    if label is not None:
        _require(source, columns, "label", label, NoLabelColumn)
        return label
    found = _first_of(source, columns, LABELS)
    if found is None:
        raise NoLabelColumn(
            f"{source} has no column called {', '.join(LABELS[:-1])} or {LABELS[-1]}; name the one that holds the "
            f"labels with label=..., out of these: {_names(columns)}.{' ' + hint if hint else ''}"
        )
    return found


def _require(
    source: str, columns: Collection[str], argument: str, name: str, error: type[HyperkronError] = HyperkronError
) -> None:
    if name not in columns:
        names = list(columns)
        hint = nearest(name, names)
        shared = " Name columns that all sources have with features=[...]." if "features" in argument else ""
        raise error(f"{argument}={name!r} is not a column of {source}.{hint} Columns: {_names(names)}.{shared}")


def _names(columns: Iterable[str]) -> str:
    return listing(map(repr, columns), 30)


def _first_of(source: str, columns: Iterable[str], wanted: tuple[str, ...]) -> str | None:
    by_lower: dict[str, list[str]] = {}
    for name in columns:
        by_lower.setdefault(name.lower(), []).append(name)
    for name in wanted:
        found = by_lower.get(name, [])
        if len(found) > 1:
            raise HyperkronError(f"{source} has columns {listing(map(repr, found))}; say which one is meant.")
        if found:
            return found[0]
    return None


def infer_input(frame: Frame, found: Roles) -> Roles:
    """Text, image or features, whichever the columns leave no doubt about."""
    taken = {found.label, found.trusted_column, *found.id, found.annotator, *found.annotators}
    free = [name for name in frame.columns if name not in taken and name.lower() not in _IGNORED | set(TRUSTED)]
    image = _first_of(frame.name, free, IMAGES)
    if image is not None and _holds_images(frame.columns[image]):
        return replace(found, image=image)
    free = [name for name in free if not gaps(frame.columns[name]).all()] or free
    texts = [name for name in free if _holds_prose(frame.columns[name])]
    named = _first_of(frame.name, free, TEXTS)
    if named is not None and any(as_number(value) is None for value in _sample(frame.columns[named])):
        return replace(found, text=named)
    if len(texts) == 1:
        return replace(found, text=texts[0])
    if len(texts) > 1:
        raise HyperkronError(
            f"{frame.name} has several columns of text ({listing(map(repr, texts))}); name one with text=..., or the "
            f"columns of a table with features=[...]. Columns: {_names(frame.columns)}."
        )
    if not free:
        raise HyperkronError(f"{frame.name} has no column beside the label {found.label!r} to learn from.")
    return replace(found, features=tuple(free))


def _sample(values: Values) -> list[Any]:
    return [value for value in values[:: max(1, len(values) // _LOOK)] if not is_missing(value)]


def _holds_prose(values: Values) -> bool:
    """Mostly different values of several words, which numbers, durations, dates and telephone numbers are not."""
    if not isinstance(values, list) or not any(isinstance(value, str) and value.count(" ") > 1 for value in values):
        return False
    seen = [value for value in _sample(values) if isinstance(value, str)]
    several_words = [value for value in seen if _is_prose(value.split())]
    return bool(seen) and 2 * len(several_words) > len(seen) and 2 * len(set(seen)) > len(seen)


def _is_prose(parts: list[str]) -> bool:
    words = sum(any(map(str.isalpha, part)) and not any(map(str.isdigit, part)) for part in parts)
    return words >= 3 and 2 * words > len(parts)


def _holds_images(values: Values) -> bool:
    return all(
        (isinstance(value, str) and value.lower().endswith(SUFFIXES))
        or isinstance(value, bytes)
        or (isinstance(value, dict) and "bytes" in value)
        for value in _sample(values)
    )


def column_inputs(
    frame: Frame, roles: Roles, options: ReadOptions, shape: tuple[int, ...] | None
) -> tuple[Any, Array, list[str]]:
    """The inputs that the columns of these roles hold, which rows have a broken picture, and messages."""
    broken = np.zeros(len(frame), dtype=bool)
    if roles.text is not None:
        return _text_cells(frame, roles.text), broken, []
    if roles.features is not None:
        for name in roles.features:
            _refuse_vectors(frame, name)
        return {name: frame.columns[name] for name in roles.features}, broken, []
    where = frame.name + ("" if frame.ids else f": image={roles.image!r}")  # a folder of images has no columns
    return load_images(cells(frame.columns[str(roles.image)]), frame.folder, where, options, shape)


def _refuse_vectors(frame: Frame, column: str) -> None:
    """Refuse a column of lists of numbers, each of which would be taken for a name."""
    values = frame.columns[column]
    first: Any = next((value for value in values if not is_missing(value)), None) if isinstance(values, list) else None
    first = first.tolist() if hasattr(first, "tolist") else first
    while isinstance(first, (list, tuple)) and len(first):
        first = first[0]
        if as_number(first) is not None and not isinstance(first, str):
            raise HyperkronError(
                f"column {column!r} of {frame.name} holds lists of numbers, which are no table; give them as one "
                "array, {'x': array, 'y': labels} or an .npz, or as embeddings=."
            )


def frame_rows(frame: Frame, asked: Roles, options: ReadOptions, shape: tuple[int, ...] | None) -> Raw:
    """The rows of a frame; pictures come to ``shape`` if it is given."""
    found, notes = resolve(frame, asked)
    label, flagged, rows = str(found.label), found.trusted_column, np.arange(len(frame))
    left_out: dict[str, Array] = {}
    trusted = None if flagged is None else flags(frame.columns[flagged], flagged)
    ballot = None if not found.annotators else from_columns(frame, found.annotators)
    if found.annotator is not None:
        frame, ballot, rows, others, more = gathered(frame, found)
        left_out, notes, trusted = {FURTHER: others}, [*notes, *more], None if trusted is None else trusted[rows]
    classes = next((frame.class_names[name] for name in (label, *found.annotators) if name in frame.class_names), ())
    labels: list[str | None] = [None] * len(frame)
    if found.label is not None:
        labels = given_names(frame, label, f"{frame.name}: label={label!r}")
        texts = {value for value in set(cells(frame.columns[label])) if isinstance(value, str) and value.strip()}
        if absent := sorted(map(repr, filter(is_missing, texts))):
            told = f"label={label!r} holds {listing(absent)}, taken as no label; rename it if it is a class."
            notes = [*notes, f"{frame.name}: {told}"]
    if classes:  # -1 is how Hugging Face writes a label that is not known
        labels = [None if name == "-1" else name for name in labels]
    kind: Kind = "text" if found.text is not None else "image" if found.features is None else "table"
    inputs, broken, seen = column_inputs(frame, found, options, shape)
    messages = (*frame.messages, *seen, *notes)
    ids = {name: ids_of(frame.columns[name]) for name in found.id}
    raw = Raw(
        frame.name,
        kind,
        inputs,
        labels,
        rows,
        messages,
        trusted=trusted,
        classes=classes,
        left_out=left_out,
        ids=ids,
        roles=found,
    )
    raw = raw if ballot is None else ballot.given_to(raw)
    return raw.without(broken, "unreadable image")


def _text_cells(frame: Frame, column: str) -> list[str]:
    """The texts of a column, empty where missing."""
    values = frame.columns[column]
    nested = next((value for value in values if isinstance(value, (list, dict, bytes))), None)
    if nested is not None:
        raise HyperkronError(f"text={column!r} of {frame.name} holds {type(nested).__name__}s, not texts.")
    return ["" if value is None or value != value else str(value) for value in values]
