"""What the readers return: rows with labels, one class list, and what was noticed on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from hyperkron.cleaning.data.files import MAX_BYTES, MAX_CELLS, MAX_COLUMNS, MAX_FIELD, need
from hyperkron.solution import HyperkronError
from hyperkron.validation import check_one_of, check_whole

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from hyperkron.cleaning.data.encoding import TableEncoding

    Array: TypeAlias = npt.NDArray[Any]

Kind: TypeAlias = Literal["text", "table", "image"]


@dataclass(frozen=True)
class ReadOptions:
    """How to read, apart from which columns.

    Attributes:
        charset: of CSV and JSON files.
        image_size: the side that pictures are scaled to; None keeps them where all have one size.
        max_categories: values of a categorical column that get an input of their own; the rest share one.
        max_bytes: of a file once decompressed, and of all pictures together.
        max_pixels: of one picture.
        max_columns: of a table.
        max_cells: of a table, rows times columns.
        max_field: characters or bytes of one field of a table.
        abstain: rows without any vote of a weak labelling go to the first class, or are left out.
        keep_overlap: keep training rows whose input is also in the trusted set.
    """

    charset: str = "utf-8"
    image_size: int | None = None
    max_categories: int = 50
    max_bytes: int = MAX_BYTES
    max_pixels: int = 2**26
    max_columns: int = MAX_COLUMNS
    max_cells: int = MAX_CELLS
    max_field: int = MAX_FIELD
    abstain: Literal["first", "drop"] = "first"
    keep_overlap: bool = False

    def __post_init__(self) -> None:
        limits = ("max_bytes", "max_pixels", "max_columns", "max_cells", "max_field")
        for name in ("image_size", "max_categories", *limits):
            value = getattr(self, name)
            if value is not None:
                check_whole(name, value)
        check_one_of("abstain", self.abstain, ("first", "drop"))


@dataclass(frozen=True, eq=False)
class Labelled:
    """Rows with labels, ready for a model.

    Attributes:
        kind: of the inputs.
        inputs: a list of texts; or float32 (N, d), NaN where a value is missing; or uint8 (N, C, H, W).
        labels: int64 (N,), positions in ``classes``. For a weak labelling, the majority vote.
        classes: the names, the same for the training and the trusted rows.
        rows: int64 (N,), the position of each row in its source, from 0, not counting a header.
        messages: what the reader noticed, a sentence each.
        weak: votes of labelling functions (N, F), −1 where one abstains; None where there are none.
        gold: int64 (N,), true labels known for evaluation only; None where there are none.
        encoding: how a table became numbers; None for texts and images.
        source: what was read.
        left_out: for each reason, the positions in the source of the rows that are not here.

    Example:
        >>> from hyperkron.cleaning.data import read_pair
        >>> train, trusted = read_pair({"x": ["good", "bad", "fine"], "y": ["+", "-", "+"]},
        ...                            {"x": ["great", "poor"], "y": ["+", "-"]})
        >>> train.classes, train.labels.tolist(), trusted.labels.tolist()
        (('+', '-'), [0, 1, 0], [0, 1])
    """

    kind: Kind
    inputs: list[str] | Array
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]
    rows: npt.NDArray[np.int64]
    messages: tuple[str, ...] = ()
    weak: npt.NDArray[np.int64] | None = None
    gold: npt.NDArray[np.int64] | None = None
    encoding: TableEncoding | None = None
    source: str = ""
    left_out: Mapping[str, npt.NDArray[np.int64]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def counts(self) -> list[int]:
        """How many rows each class has."""
        count: list[int] = need("numpy").bincount(self.labels, minlength=len(self.classes)).tolist()
        return count

    def take(self, positions: Sequence[int] | Array) -> Labelled:
        """Some of the rows, by their positions here, in that order."""
        picked = need("numpy").asarray(positions, dtype="int64")
        return replace(
            self,
            inputs=[self.inputs[i] for i in picked] if isinstance(self.inputs, list) else self.inputs[picked],
            labels=self.labels[picked],
            rows=self.rows[picked],
            weak=None if self.weak is None else self.weak[picked],
            gold=None if self.gold is None else self.gold[picked],
        )

    def standardised(self) -> Array:
        """The inputs of a table as a model takes them: imputed, standardised, with flags of what was missing."""
        if self.encoding is None or isinstance(self.inputs, list):
            raise HyperkronError(f"standardised() is for tables; these are {self.kind} inputs.")
        return self.encoding.standardise(self.inputs)


Columns: TypeAlias = "Mapping[str, list[Any] | Array]"


@dataclass(frozen=True, eq=False)
class Raw:
    """One source as read, before labels became numbers: what the checks of ``checks.py`` work on.

    Attributes:
        name: what messages call the source.
        inputs: texts, pictures, or the columns of a table.
        labels: names; None where there is none.
        trusted: which rows a column flags as trusted.
        classes: names in the order of the source, where it has one.
        left_out: for each reason, the positions in the source of the rows that are not here.
    """

    name: str
    kind: Kind
    inputs: list[str] | Array | Columns
    labels: list[str | None]
    rows: npt.NDArray[np.int64]
    messages: tuple[str, ...] = ()
    trusted: npt.NDArray[np.bool_] | None = None
    weak: npt.NDArray[np.int64] | None = None
    gold: list[str | None] | None = None
    classes: tuple[str, ...] = field(default=())
    left_out: Mapping[str, Array] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, positions: Array) -> Raw:
        """Some of the rows, by their positions here."""
        at = positions.tolist()
        inputs: list[str] | Array | Columns
        if isinstance(self.inputs, list):
            inputs = [self.inputs[i] for i in at]
        elif isinstance(self.inputs, Mapping):
            inputs = {
                name: type(values)(values[i] for i in at) if isinstance(values, list) else values[positions]
                for name, values in self.inputs.items()
            }
        else:
            inputs = self.inputs[positions]
        return replace(
            self,
            inputs=inputs,
            labels=[self.labels[i] for i in at],
            rows=self.rows[positions],
            trusted=None if self.trusted is None else self.trusted[positions],
            weak=None if self.weak is None else self.weak[positions],
            gold=None if self.gold is None else [self.gold[i] for i in at],
        )

    def without(self, mask: Array, why: str) -> Raw:
        """The rows outside a mask; those in it are remembered with the reason."""
        np = need("numpy")
        if not mask.any():
            return self
        gone = np.concatenate([self.left_out.get(why, np.zeros(0, np.int64)), self.rows[mask]])
        return replace(self.take(np.flatnonzero(~mask)), left_out={**self.left_out, why: gone})

    def noting(self, *messages: str) -> Raw:
        """The same with more messages."""
        return replace(self, messages=(*self.messages, *messages))
