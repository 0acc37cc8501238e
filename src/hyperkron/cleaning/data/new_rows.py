"""New rows for a model that was trained: the columns of the training rows, without labels."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data import arrays, checks
from hyperkron.cleaning.data.encoding import TableEncoding
from hyperkron.cleaning.data.files import listing, nearest, np, several
from hyperkron.cleaning.data.image_folders import other_files
from hyperkron.cleaning.data.images import SUFFIXES
from hyperkron.cleaning.data.labelled import Frame, Kind, Labelled, Raw, Roles, pick
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.roles import LABELS, column_inputs, infer_input
from hyperkron.cleaning.data.sources import in_memory, locate, split_source
from hyperkron.cleaning.data.values import Array, Columns, cells, gaps, ids_of
from hyperkron.solution import HyperkronError

_FORMS = (
    "give a DataFrame, such as pandas.DataFrame(rows), a dictionary of columns, a matrix of numbers, a list of texts, "
    "pictures, or a path"
)
"""What new rows can be."""


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows without labels.

    Attributes:
        inputs: in the form of ``Labelled.inputs``, of the rows that could be read.
        rows: their positions in the source.
        count: how many rows the source has.
        ids: columns that identify rows, of all rows.
        messages: what was noticed, a sentence each.
        written: as of ``Labelled``, of the rows that could be read.
    """

    inputs: Any
    rows: Array
    count: int
    ids: Columns = field(default_factory=dict)
    messages: tuple[str, ...] = ()
    written: Columns = field(default_factory=dict)


@dataclass(frozen=True)
class InputForm:
    """What new rows must look like, so that a model can be asked about them: the same as the training rows.

    ``encoding`` is that of a table, and ``shape`` the (C, H, W) of pictures.
    """

    kind: Kind
    roles: Roles
    encoding: TableEncoding | None = None
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, train: Labelled) -> InputForm:
        """The form of the training rows."""
        return cls(train.kind, train.roles, train.encoding, train.shape)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        encoding = None if self.encoding is None else json.loads(self.encoding.to_json())
        return {"kind": self.kind, "roles": asdict(self.roles), "encoding": encoding, "shape": self.shape}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> InputForm:
        """What ``to_json`` gave."""
        encoding, shape = value["encoding"], value["shape"]
        return cls(
            value["kind"],
            Roles(**value["roles"]),
            None if encoding is None else TableEncoding.from_json(json.dumps(encoding)),
            None if shape is None else tuple(shape),
        )

    def read(self, rows: Any, id: Sequence[str] | str | None = None, options: ReadOptions | None = None) -> NewRows:
        """New rows, given as a path, a DataFrame, a dictionary of columns, an array, or a list of texts.

        Args:
            rows: with the columns of the training rows; further columns, the label too, are ignored.
            id: columns to carry along; None takes those of the training rows that are there.
            options: how to read.
        """
        options = options or ReadOptions()
        opened = self._open(rows, options)
        if isinstance(opened, Raw):
            return self._from_arrays(opened)
        return self._from_columns(opened, id, options)

    def _open(self, rows: Any, options: ReadOptions) -> Frame | Raw:
        if isinstance(rows, (str, os.PathLike)):
            if self.kind == "text" and isinstance(rows, str) and " " in rows and not split_source(rows)[0].exists():
                raise HyperkronError(
                    f"rows={rows!r:.80} is not a path that exists; give a single text as a list, [text]."
                )
            return _open_path(rows, options, self.shape)
        kind, by_name = type(rows).__name__, self.roles.features is not None  # a column may be called x, or y
        if isinstance(rows, Mapping):
            by_name = by_name or bool({self.roles.text, self.roles.image} & set(rows))
        if isinstance(rows, Mapping) and not by_name and set(rows) & {"x", "y"} == {"x"}:
            rows = rows["x"]
        if isinstance(rows, Mapping) or hasattr(rows, "columns") or hasattr(rows, "column_names"):
            named = in_memory(rows, "rows", columns=by_name)
            if not self._positional(named):
                return named
            label = next((name for name in LABELS if name in named.columns), None)
            features = 0 if self.encoding is None else len(self.encoding.column_names)
            if label is not None and len(named.columns) > features:
                raise HyperkronError(
                    f"rows has a column {label!r}, but the training rows had no names, so columns are taken by their "
                    "places; leave out what is no feature."
                )
            rows = np.column_stack(list(named.columns.values()))
        if not hasattr(rows, "__len__") or getattr(rows, "ndim", 1) == 0:
            raise HyperkronError(f"rows is a {kind}; {_FORMS}.")
        if self.kind == "text":
            return Raw("rows", "text", _texts(rows), [None] * len(rows), np.arange(len(rows)))
        found = arrays.as_array(rows, "rows: x")
        if found.dtype.kind not in "fiub":
            raise HyperkronError(f"rows is a {kind} of type {found.dtype}, not of numbers; {_FORMS}.")
        names = () if self.encoding is None else self.encoding.names
        if names and found.shape[1:] == (len(names),):
            encoded = {name: found[:, i] for i, name in enumerate(names)}
            return Raw("rows", "table", encoded, [None] * len(found), np.arange(len(found)))
        return arrays.array_rows(found, np.zeros(len(found), dtype=np.int64), "rows")

    def _positional(self, named: Frame | Raw) -> bool:
        """Whether columns are to be taken by their places: the training rows were an array, which has no names."""
        if self.encoding is None or self.roles.features is not None or not isinstance(named, Frame):
            return False
        return not {*self.encoding.column_names} & set(named.columns)

    def _from_arrays(self, raw: Raw) -> NewRows:
        checks.refuse_other_kind(raw, self.kind, self.shape, "the training rows")
        inputs: Any = raw.inputs
        notes: list[str] = []
        if self.encoding is not None and tuple(raw.columns) == self.encoding.names:
            inputs = self.encoding.less_offsets(np.stack(list(raw.columns.values()), axis=1), raw.source)
        elif self.encoding is not None:
            inputs, notes = self._matrix(raw.columns, raw.source)
        count = len(raw.rows) + sum(map(len, raw.left_out.values()))
        known = {name: dict(zip(raw.rows.tolist(), cells(values), strict=True)) for name, values in raw.ids.items()}
        ids = {name: [values.get(row, "") for row in range(count)] for name, values in known.items()}
        return NewRows(inputs, raw.rows, count, ids, (*raw.messages, *notes))

    def _matrix(self, columns: Columns, name: str) -> tuple[Array, list[str]]:
        """A table as the training rows are encoded, and what to say about its cells."""
        assert self.encoding is not None
        _require_columns(self.encoding.column_names, columns, name)
        notes = [*self.encoding.surprises(columns), *self.encoding.extremes(columns)]
        empty = np.all([gaps(columns[column]) for column in self.encoding.column_names], axis=0).sum()
        if empty:
            notes.append(f"{several(int(empty), 'row')} without a feature; do not rely on their answers.")
        return self.encoding.matrix(columns), [f"{name}: {note}" for note in notes]

    def _from_columns(self, frame: Frame, id: Sequence[str] | str | None, options: ReadOptions) -> NewRows:
        known = [name for name in (*self.roles.id, *frame.ids) if name in frame.columns]
        kept = known if id is None else Roles(id=id).id
        _require_columns(list(kept), frame.columns, frame.name, "named as id")
        rows, written = np.arange(len(frame)), dict[str, list[str | None]]()
        inputs: Any
        if self.encoding is not None:
            inputs, notes = self._matrix(frame.columns, frame.name)
            used = {*self.encoding.column_names, *(self.roles.features or ()), *kept, self.roles.label}
            if extra := [name for name in frame.columns if name not in used]:
                notes.append(f"{frame.name}: columns that the model does not use: {listing(map(repr, extra), 12)}.")
            written = self.encoding.unknown_names(frame.columns)
        else:
            column = self.roles.text or ("image" if frame.ids else self.roles.image)
            if column is None:
                guess = infer_input(frame, Roles())
                column = guess.text or guess.image
            _require_columns([str(column)], frame.columns, frame.name)
            asked = Roles(**{self.kind: str(column)})
            inputs, broken, notes = column_inputs(frame, asked, options, self.shape)
            rows = np.flatnonzero(~broken)
            inputs = pick(inputs, rows)
            if self.kind == "text" and (blank := sum(not text.strip() for text in inputs)):
                notes.append(f"{frame.name}: {several(blank, 'row')} without a text; do not rely on their answers.")
        ids = {name: ids_of(frame.columns[name]) for name in kept}
        return NewRows(inputs, rows, len(frame), ids, (*frame.messages, *notes), written)


def _open_path(source: str | os.PathLike[str], options: ReadOptions, shape: tuple[int, ...] | None) -> Frame | Raw:
    path = Path(source)
    if path.is_dir():
        files = sorted(entry.name for entry in path.iterdir() if entry.name.lower().endswith(SUFFIXES))
        if files:
            notes = other_files(path, {path / file for file in files}, path.name)
            return Frame(path.name, {"image": files, "file": files}, path, tuple(notes), ids=("file",))
    form, place = locate(source, "rows", options, shape=shape, labelled=False)
    return form.read(place)


def _require_columns(needed: Sequence[str], columns: Columns, name: str, why: str = "that the model needs") -> None:
    absent = [column for column in needed if column not in columns]
    if absent:
        what = "column" if len(absent) == 1 else "columns"
        raise HyperkronError(
            f"{name} lacks the {what} {listing(map(repr, absent), 12)} {why}.{nearest(absent[0], columns)} "
            f"Columns: {listing(map(repr, columns), 30)}."
        )


def _texts(values: Any) -> list[str]:
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise HyperkronError(f"rows[{i}] is a {type(text).__name__}, {text!r:.50}; give texts only.")
    return found
