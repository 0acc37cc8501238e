"""What passes from one reader to the next: places, columns, rows as read, and rows ready for a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from hyperkron.cleaning.data.encoding import TableEncoding
from hyperkron.cleaning.data.files import np
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.values import Array, Columns
from hyperkron.solution import HyperkronError

Kind: TypeAlias = Literal["text", "table", "image"]
SILENT = -1
"""In place of a class, where a source does not vote."""
R = TypeVar("R", bound="ReadRows")


@dataclass(frozen=True)
class Roles:
    """The columns a person named; ``roles.resolve`` fills in the rest. ``id`` are carried along and not learnt from.

    ``annotators`` are columns of labels, one for each annotator; ``annotator`` is the column that names who gave the
    label of a line, where lines with the same ``id`` are one row.
    """

    text: str | None = None
    label: str | None = None
    image: str | None = None
    features: Sequence[str] | None = None
    trusted_column: str | None = None
    id: Sequence[str] = ()
    annotator: str | None = None
    annotators: Sequence[str] = ()

    def __post_init__(self) -> None:
        kinds = self.given("text", "image", "features")
        if len(kinds) > 1:
            raise HyperkronError(f"{' and '.join(kinds)} contradict each other; name one of text, image and features.")
        if isinstance(self.features, str):
            raise HyperkronError(f"features={self.features!r} must be a list of names, such as [{self.features!r}].")
        if self.features is not None and not self.features:
            raise HyperkronError("features=[] names no column; leave it out to use all.")
        for name in ("id", "annotators"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, (str, int)) else tuple(value or ()))
        for name, value in vars(self).items():  # columns are known by their names as text, also those of numbers
            if value is not None:
                several = name in ("features", "id", "annotators")
                object.__setattr__(self, name, tuple(map(str, value)) if several else str(value))
        if self.annotator is not None and self.annotators:
            raise HyperkronError(
                f"annotator={self.annotator!r} and annotators={list(self.annotators)!r} contradict each other; name "
                "the column that says who gave a label, or one column of labels for each annotator."
            )

    def given(self, *names: str) -> list[str]:
        """Those of some roles that are named, as arguments."""
        return [f"{name}={value!r}" for name in names if (value := getattr(self, name)) not in (None, ())]

    def inputs(self) -> tuple[str | None, ...]:
        """The columns other than the label and ids, None for some that are not named."""
        return (self.text, self.image, self.trusted_column, *(self.features or ()), self.annotator, *self.annotators)


@dataclass(frozen=True)
class Place:
    """A source on the disk or on the Hub, the argument that named it, and how to read it.

    ``gold`` says whether true labels are wanted where there are weak ones too (None goes by the part), ``shape`` is the
    (C, H, W) that pictures must come to, ``labelled`` whether there must be labels.
    """

    argument: str
    source: str
    path: Path
    part: str | None
    options: ReadOptions
    gold: bool | None = None
    shape: tuple[int, ...] | None = None
    labelled: bool = True

    @property
    def name(self) -> str:
        """What messages call the source."""
        return f"{self.path.name}:{self.part}" if self.part else self.path.name


@dataclass(frozen=True, eq=False)
class Frame:
    """Named columns of one length, whose roles are not known yet.

    Paths of images are relative to ``folder``; ``class_names`` has the names of classes that a column has numbers of;
    ``ids`` are columns that identify rows without being asked to.
    """

    name: str
    columns: Columns
    folder: Path | None = None
    messages: tuple[str, ...] = ()
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self):
            remedy = " Check that it was written to its end." if self.folder else ""
            raise HyperkronError(f"{self.name} is empty: it has no rows.{remedy}")

    def __len__(self) -> int:
        return max((len(values) for values in self.columns.values()), default=0)


def pick(values: Any, at: Array) -> Any:
    """The entries of a list, an array or every column of a table at some positions; None of None."""
    if isinstance(values, Mapping):
        return {name: pick(column, at) for name, column in values.items()}
    if isinstance(values, list):
        return type(values)(values[i] for i in at.tolist())
    return None if values is None else values[at]


@dataclass(frozen=True, eq=False)
class ReadRows:
    """What :class:`Raw` and :class:`Labelled` rows share; the attributes are those of :class:`Labelled`."""

    source: str
    kind: Kind
    inputs: Any
    labels: Any
    rows: Array
    messages: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    votes: Array | None = None
    annotators: tuple[str, ...] = ()
    gold: Any = None
    left_out: Mapping[str, Array] = field(default_factory=dict)
    ids: Columns = field(default_factory=dict)
    roles: Roles = Roles()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """(C, H, W) of pictures; None of anything else."""
        return tuple(self.inputs.shape[1:]) if self.kind == "image" else None

    def take(self: R, positions: Sequence[int] | Array) -> R:
        """Some of the rows, by their positions here, in that order."""
        at = np.asarray(positions, dtype="int64")
        per_row = {"inputs", "labels", "rows", "trusted", "votes", "gold", "ids", "written"} & vars(self).keys()
        found: R = replace(self, **{name: pick(getattr(self, name), at) for name in per_row})
        return found


@dataclass(frozen=True, eq=False)
class Raw(ReadRows):
    """One source as read, before labels became numbers: what the checks of ``checks.py`` work on.

    ``labels`` and ``gold`` are names, ``inputs`` of a table are its columns, and ``classes`` are the names that the
    source lists, if it does. ``trusted`` says which rows a column flags, and ``votes`` are positions in ``answers``.
    """

    trusted: Array | None = None
    answers: tuple[str, ...] = ()

    @property
    def columns(self) -> Columns:
        """The inputs of a table; none of anything else."""
        return self.inputs if isinstance(self.inputs, Mapping) else {}

    def without(self, mask: Array, why: str) -> Raw:
        """The rows outside a mask; those in it are remembered with the reason."""
        if not mask.any():
            return self
        gone = np.concatenate([self.left_out.get(why, np.zeros(0, np.int64)), self.rows[mask]])
        return replace(self.take(np.flatnonzero(~mask)), left_out={**self.left_out, why: gone})

    def noting(self, *messages: str) -> Raw:
        """The same with more messages."""
        return replace(self, messages=(*self.messages, *messages))


@dataclass(frozen=True, eq=False)
class Labelled(ReadRows):
    """Rows with labels, ready for a model.

    Attributes:
        kind: of the inputs.
        inputs: a list of texts; or float32 (N, d), NaN where a value is missing; or uint8 (N, C, H, W).
        labels: int64 (N,), positions in ``classes``. Of several votes the majority, −1 where there is none.
        classes: the names, the same for the training and the trusted rows.
        rows: int64 (N,), the position of each row in its source, from 0, not counting a header.
        messages: what the reader noticed, a sentence each.
        votes: of annotators or labelling functions (N, S), −1 where one is silent; None where labels are single.
        annotators: their names.
        gold: int64 (N,), true labels known for evaluation only; None where there are none.
        encoding: how a table became numbers; None for texts and images.
        source: what was read.
        left_out: for each reason, the positions in the source of the rows that are not here.
        ids: columns that identify rows, by name: carried along, never learnt from.
        roles: which column of the source is the text, the label and so on.
        written: columns of names as they are written, where some have no input of their own.
        listed: whether a source lists the names of the classes, so that numbers in another one are positions there.

    Example:
        >>> from hyperkron.cleaning.data import read_pair
        >>> train, trusted = read_pair({"x": ["good", "bad", "fine"], "y": ["+", "-", "+"]},
        ...                            {"x": ["great", "poor"], "y": ["+", "-"]})
        >>> train.classes, train.labels.tolist(), trusted.labels.tolist()
        (('+', '-'), [0, 1, 0], [0, 1])
    """

    inputs: list[str] | Array
    labels: Array
    encoding: TableEncoding | None = None
    written: Columns = field(default_factory=dict)
    listed: bool = False

    def counts(self) -> list[int]:
        """How many rows have each class as their label."""
        count: list[int] = np.bincount(self.labels[self.labels >= 0], minlength=len(self.classes)).tolist()
        return count

    def standardised(self) -> Array:
        """The inputs of a table as a model takes them: imputed, standardised, with flags of what was missing."""
        if self.encoding is None or isinstance(self.inputs, list):
            raise HyperkronError(f"standardised() is for tables; these are {self.kind} inputs.")
        return self.encoding.standardise(self.inputs)
