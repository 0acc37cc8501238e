"""How the columns of a table become the inputs of a model: learnt on the training rows, applied to all others."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias, get_args

from hyperkron.cleaning.data.files import listing, np, several
from hyperkron.cleaning.data.number_forms import (
    PLAIN,
    NumberForm,
    Written,
    day_of,
    detect_form,
    either_way,
    form_note,
    looks_like_number,
    marks_note,
    read_numbers,
)
from hyperkron.cleaning.data.values import LARGEST, Array, Columns, Values, category, extremes, numbers
from hyperkron.solution import HyperkronError

FORMAT = 1
_STRANGE = 0.05  # a column with at most this part of values that are no numbers is one of numbers
_LOST = 2**-10  # of the standard deviation: float32 may move no number further
_WORDS = 5  # also one with this many different words at most, if two thirds are numbers and these differ


@dataclass(frozen=True)
class Number:
    """A column of numbers: z = (x − mean) / scale over the training rows, 0 where x is missing.

    ``flagged`` says that values were missing in training, so that an input of its own says where they are; ``form`` and
    ``unit`` how the numbers are written. ``offset`` is taken off before they become float32: not 0 only where numbers
    are so large beside their differences, such as times in milliseconds, that float32 would lose these, or where whole
    numbers are so large that it does not hold them all, such as 20211007.
    """

    name: str
    mean: float
    scale: float
    flagged: bool
    form: NumberForm = "plain"
    offset: float = 0.0
    unit: str = ""

    @property
    def written(self) -> Written:
        """How the cells are written."""
        return Written(self.form, self.unit)

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.name,)

    def matrix(self, values: Values) -> Array:
        return (read_numbers(values, self.written)[0] - self.offset)[:, None].astype(np.float32)

    def cell(self, inputs: Array) -> float | str | None:
        """The number, or the day, that a row has here; None if it is missing."""
        value = float(str(inputs[0])) + self.offset  # of a float32 the shortest text that says which it is
        if value != value:
            return None
        return day_of(value) if self.form.startswith("date") else value


@dataclass(frozen=True)
class Category:
    """A column of names: one 0/1 input for each of ``values``, one for all others, one for a missing value."""

    name: str
    values: tuple[str, ...]
    other: bool
    flagged: bool
    mean: ClassVar[float] = 0.0
    scale: ClassVar[float] = 1.0
    offset: ClassVar[float] = 0.0

    @property
    def inputs(self) -> tuple[str, ...]:
        extra = ("(other)",) * self.other + ("(missing)",) * self.flagged
        return tuple(f"{self.name}={value}" for value in (*self.values, *extra))

    def matrix(self, values: Values) -> Array:
        place: dict[str | None, int] = {value: i for i, value in enumerate(self.values)}
        other = len(place) if self.other else -1
        missing = len(place) + self.other if self.flagged else -1
        texts = [category(value) for value in values]
        at = np.array([missing if text is None else place.get(text, other) for text in texts], dtype=np.int64)
        return (at[:, None] == np.arange(len(self.inputs))).astype(np.float32)

    def cell(self, inputs: Array) -> str | None:
        """The name that a row has here; None if it is missing, or unknown without an input for others."""
        known = (*self.values, *(("(other)",) * self.other), None)
        return known[int(inputs.argmax()) if inputs.any() else -1]


Column: TypeAlias = "Number | Category"


@dataclass(frozen=True)
class TableEncoding:
    """The columns of a table as numbers.

    ``matrix`` makes one float32 column of every number less its ``offset``, NaN where it is missing, and one 0/1
    column for every value of a category. ``standardise`` then imputes the mean, standardises the numbers, and appends
    a flag for every column of numbers that had gaps in training:

        z_j = (x_j − mean_j) / std_j,  z_j = 0 and flag_j = 1 where x_j is missing

    Attributes:
        columns: in the order of the inputs.

    Example:
        >>> encoding, messages = TableEncoding.fit({"age": ["20", "", "40"], "town": ["Rome", "Oslo", "Rome"]})
        >>> encoding.names
        ('age', 'town=Rome', 'town=Oslo')
        >>> encoding.encode({"age": [50], "town": ["Paris"]}).tolist()
        [[2.0, 0.0, 0.0, 0.0]]
        >>> TableEncoding.from_json(encoding.to_json()) == encoding
        True
    """

    columns: tuple[Column, ...]

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns of the table."""
        return tuple(column.name for column in self.columns)

    @property
    def names(self) -> tuple[str, ...]:
        """What each column of ``matrix`` is."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def offsets(self) -> Array:
        """What is taken off the numbers of each column of ``matrix`` (d,)."""
        return np.array([column.offset for column in self.columns for _ in column.inputs])

    def _parts(self, matrix: Array) -> Iterator[tuple[Column, Array]]:
        """Every column with its inputs in ``matrix`` (d,) or (N, d)."""
        ends = np.cumsum([len(column.inputs) for column in self.columns])
        return zip(self.columns, np.split(matrix, ends[:-1], axis=-1), strict=True)

    def less_offsets(self, matrix: Array, name: str) -> Array:
        """Rows of numbers in the columns of ``matrix``, as they were given, less ``offsets``.

        Refuses rows of ``matrix`` itself, from which they are taken off already.
        """
        for column, inputs in self._parts(matrix):
            if column.offset:
                middle = float(np.median(inputs))
                if abs(middle + column.offset - column.mean) < abs(middle - column.mean):
                    raise HyperkronError(
                        f"{name}: column {column.name!r} holds numbers near {middle:g}, the training rows numbers near "
                        f"{column.mean:g}: these seem to be encoded rows, such as the inputs of read_pair(), from "
                        f"which {column.offset:.17g} is taken off; give the rows as they were before, or add it again."
                    )
        return matrix - self.offsets if self.offsets.any() else matrix

    def cells(self, row: Array) -> dict[str, float | str | None]:
        """What a person would write for a row of ``matrix``, by column: a number, a day, a name, None if missing.

        Example:
            >>> encoding, _ = TableEncoding.fit({"age": ["20", "", "40"], "town": ["Rome", "Oslo", "Rome"]})
            >>> encoding.cells(encoding.matrix({"age": [50], "town": ["Oslo"]})[0])
            {'age': 50.0, 'town': 'Oslo'}
        """
        return {column.name: column.cell(inputs) for column, inputs in self._parts(row)}

    def unknown_names(self, columns: Columns) -> dict[str, list[str | None]]:
        """The cells of every column of names that holds some without an input of their own."""
        named = {c: [category(v) for v in columns[c.name]] for c in self.columns if isinstance(c, Category)}
        return {c.name: names for c, names in named.items() if set(names) - {None, *c.values}}

    @classmethod
    def fit(cls, columns: Columns, max_categories: int = 50) -> tuple[TableEncoding, list[str]]:
        """The encoding of a training table, and what was noticed."""
        kept: list[Column] = []
        told: dict[str, list[str]] = {}  # what is said, and of which columns: many may hold a single value
        for name, values in columns.items():
            found, message = _fit_column(name, values, max_categories)
            kept += [found] if found is not None else []
            told.setdefault(message.removeprefix(f"column {name!r}"), []).append(repr(name))
        messages = [
            f"{'column' if len(names) == 1 else 'each of the columns'} {listing(names, 30)}{text}"
            for text, names in told.items()
            if text
        ]
        if not kept:
            raise HyperkronError(f"no column can be used as a feature: {' '.join(messages) or 'there is none.'}")
        return cls(tuple(kept)), messages

    def surprises(self, columns: Columns) -> list[str]:
        """What cells other than those of the training rows hold that the encoding has no input for."""
        found = []
        for column in self.columns:
            cells = columns[column.name]
            if isinstance(column, Number):
                strange = read_numbers(cells, column.written)[1]
                why = f"taken as missing: {column.written.expected(strange)}"
                found += [note for note in [marks_note(column.name, column.written, cells)] if note]
                if column.form == "date, order unknown" and not strange and (told := either_way(cells, column.written)):
                    found.append(f"column {column.name!r}:{told} No training row tells.")
            else:
                names = () if column.other else map(category, cells)
                strange = [name for name in names if name is not None and name not in column.values]
                why = "which no training row has: the model learns nothing from it"
            if strange:
                shown = listing(dict.fromkeys(repr(str(value)[:40]) for value in strange))
                found.append(f"column {column.name!r} holds {shown}, {why}.")
        return found

    def extremes(self, columns: Columns) -> list[str]:
        """What to say about numbers that float32 cannot hold."""
        found = {c.name: extremes(columns[c.name]) for c in self.columns if isinstance(c, Number)}
        shown = [f"{name!r} ({len(values)}, such as {values[0]:g})" for name, values in found.items() if len(values)]
        return [
            f"extreme values in {several(len(shown), 'column')}, taken as missing: {listing(shown, 8)}. "
            f"Numbers must lie between -{LARGEST:g} and {LARGEST:g}; correct these, or rescale the column."
        ] * bool(shown)

    def matrix(self, columns: Columns) -> Array:
        """The table as float32 (N, d), NaN where a number is missing."""
        if absent := [name for name in self.column_names if name not in columns]:
            raise HyperkronError(f"the table lacks the column {absent[0]!r} that was there in training.")
        return np.concatenate([column.matrix(columns[column.name]) for column in self.columns], axis=1)

    def standardise(self, matrix: Array) -> Array:
        """What a model takes: float32 (N, d + flags), without NaN."""
        if matrix.ndim != 2 or matrix.shape[1] != len(self.names):
            raise HyperkronError(
                f"matrix has shape {tuple(matrix.shape)}, but the encoding has {len(self.names)} columns."
            )
        mean, scale = np.array([(column.mean, column.scale) for column in self.columns for _ in column.inputs]).T
        missing, middle = np.isnan(matrix), mean - self.offsets
        with np.errstate(over="ignore"):  # met below
            scaled = ((np.where(missing, middle, matrix) - middle) / scale).astype(np.float32)
        if not np.isfinite(scaled).all():
            row, j = (int(i) for i in np.argwhere(~np.isfinite(scaled))[0])
            raise HyperkronError(
                f"column {self.names[j]!r} holds {matrix[row, j] + self.offsets[j]:g} in row {row}, which is too "
                f"extreme beside the training rows (mean {mean[j]:g}, standard deviation {scale[j]:g}); correct it or "
                "leave it empty, or rescale the column in all parts."
            )
        gaps = (part for column, part in self._parts(missing) if isinstance(column, Number) and column.flagged)
        return np.concatenate([scaled, *gaps], axis=1).astype(np.float32)

    def encode(self, columns: Columns) -> Array:
        """``standardise(matrix(columns))``."""
        return self.standardise(self.matrix(columns))

    def to_json(self) -> str:
        """The encoding as JSON text."""
        columns = [{"kind": type(column).__name__.lower(), **asdict(column)} for column in self.columns]
        return json.dumps({"format": FORMAT, "columns": columns}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> TableEncoding:
        """The encoding that ``to_json`` wrote."""
        try:
            content = json.loads(text)
            if content["format"] != FORMAT:
                raise ValueError(f"its format is {content['format']!r}, this version reads {FORMAT}")
            return cls(tuple(_column(entry) for entry in content["columns"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise HyperkronError(f"text={text[:60]!r} is not an encoding of a table ({str(error)[:150]}).") from error


def _column(entry: Mapping[str, Any]) -> Column:
    name, flagged = str(entry["name"]), bool(entry["flagged"])
    if entry["kind"] == "number":
        form = entry.get("form", "plain")
        if form not in get_args(NumberForm):
            raise ValueError(f"no form of numbers is called {form!r}")
        offset, unit = float(entry.get("offset", 0.0)), str(entry.get("unit", ""))
        return Number(name, float(entry["mean"]), float(entry["scale"]), flagged, form, offset, unit)
    if entry["kind"] == "category":
        return Category(name, tuple(map(str, entry["values"])), bool(entry["other"]), flagged)
    raise ValueError(f"no kind of column is called {entry['kind']!r}")


def _fit_column(name: str, values: Values, cap: int) -> tuple[Column | None, str]:
    """How one column is encoded, None if it is left out; and what to say about it."""
    found, strange = numbers(values)
    written = detect_form(values, strange)
    if written != PLAIN:
        found, strange = read_numbers(values, written)
    here = found[~np.isnan(found)]
    if len(here) + len(strange) == 0:
        if len(extreme := extremes(values)):
            raise HyperkronError(
                f"column {name!r} holds no number between -{LARGEST:g} and {LARGEST:g}, which is what a model can "
                f"take, but {several(len(extreme), 'value')} such as {extreme[0]:g}; rescale the column (divide it, "
                "or take logarithms), or leave it out."
            )
        return None, f"column {name!r} has no values and is left out."
    if len(strange) > _STRANGE * (len(here) + len(strange)) and not _few_words(here, strange):
        return _fit_category(name, values, cap)
    mean, scale = float(here.mean()), float(here.std())
    flagged = len(here) < len(found)
    if scale <= 1e-12 * max(1.0, abs(mean)):
        if not flagged:
            return None, f"column {name!r} is {here[0]:g} in every training row and is left out."
        scale = 1.0
    messages = [form_note(name, written, values), marks_note(name, written, values)]
    if strange:
        messages.append(
            f"column {name!r} holds numbers but for {several(len(strange), 'value')} taken as missing: "
            f"{listing(dict.fromkeys(repr(str(value)[:40]) for value in strange))}."
        )
    moved = float(np.abs(here.astype(np.float32) - here).max())
    exact = bool((here == np.round(here)).all())  # 20211007 is to be shown as it is
    unit = 2.0 ** math.floor(math.log2(scale))  # taking off multiples of it is exact
    offset = round(mean / unit) * unit if moved > (0.0 if exact else _LOST * scale) else 0.0
    return Number(name, mean, scale, flagged, written.form, offset, written.unit), " ".join(filter(None, messages))


def _few_words(here: Array, strange: list[Any]) -> bool:
    """Whether the cells that are no numbers are a few words, such as "unknown", among many different numbers."""
    words = {str(value).strip().lower() for value in strange}
    return len(words) <= _WORDS and len(here) >= 2 * len(strange) and len(np.unique(here)) > 2 * _WORDS


def _fit_category(name: str, values: Values, cap: int) -> tuple[Category | None, str]:
    texts = [category(value) for value in values]
    counts = Counter(text for text in texts if text is not None)
    flagged = None in texts
    if len(counts) > cap and 2 * len(counts) > counts.total():
        if all(map(looks_like_number, counts)):
            return None, (
                f"column {name!r} is left out: its values, such as {listing(map(repr, counts), 3)}, are numbers or "
                "dates in several units or forms; write all in one to learn from them."
            )
        measured = 2 * sum(any(map(str.isdigit, text)) for text in counts) > len(counts)
        return None, (
            f"column {name!r} is left out: {len(counts)} different values in {counts.total()} rows look like names or "
            f"free text{f' ({next(iter(counts))!r:.40})' if measured else ''}. Pass text={name!r} to learn from it as "
            f"text{'; if they are quantities, write numbers without their units' if measured else ''}."
        )
    if len(counts) == 1 and not flagged:
        return None, f"column {name!r} is {next(iter(counts))!r} in every training row and is left out."
    common = tuple(text for text, _ in counts.most_common(cap))
    if len(counts) <= cap:
        return Category(name, common, other=False, flagged=flagged), ""
    rest = counts.total() - sum(counts[text] for text in common)
    message = (
        f"column {name!r} has {len(counts)} different values; the {cap} most frequent have an input each, the others "
        f"({several(rest, 'row')}) share one. max_categories={cap} sets this."
    )
    return Category(name, common, other=True, flagged=flagged), message
