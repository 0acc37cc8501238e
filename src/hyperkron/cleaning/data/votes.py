"""Several labels per row: the votes of annotators or labelling functions, and the label that most of them give."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from hyperkron.cleaning.data.files import listing, np, several
from hyperkron.cleaning.data.labelled import SILENT, Frame, Raw, Roles, pick
from hyperkron.cleaning.data.values import Array, category, cells, gaps, label_names, ordered
from hyperkron.solution import HyperkronError

FURTHER = "further vote"
"""Why a line of a long table is not a row of its own."""


@dataclass(frozen=True, eq=False)
class Ballot:
    """The votes of some sources on some rows.

    Attributes:
        votes: int64 (N, S), positions in ``answers``, −1 where a source is silent.
        answers: the names of what was said.
        annotators: the names of the sources.
    """

    votes: Array
    answers: tuple[str, ...]
    annotators: tuple[str, ...]

    @classmethod
    def of(cls, columns: Sequence[Sequence[str | None]], annotators: Sequence[str]) -> Ballot:
        """Of the names that each source gives to all rows; None and ``-1`` are silence.

        Example:
            >>> found = Ballot.of([["a", "b", None], ["b", "b", "-1"]], ["first", "second"])
            >>> found.answers, found.votes.tolist()
            (('a', 'b'), [[0, 1], [1, 1], [-1, -1]])
        """
        said = [[None if name == str(SILENT) else name for name in column] for column in columns]
        answers = ordered({name for column in said for name in column if name is not None})
        if not answers:
            raise HyperkronError(
                f"{listing(annotators)}: no annotator gives a label, all cells are empty or -1; fill some in."
            )
        number: dict[str | None, int] = {name: i for i, name in enumerate(answers)} | {None: SILENT}
        votes = np.array([[number[name] for name in column] for column in said], dtype=np.int64).T
        return cls(np.ascontiguousarray(votes), answers, tuple(annotators))

    def given_to(self, raw: Raw) -> Raw:
        """The rows with these votes, whose majority (None where all are silent) labels all rows but trusted ones."""
        names = (*self.answers, None)  # at SILENT, the last place
        labels = [names[k] for k in majority_vote(self.votes, len(self.answers), ties="reliable").tolist()]
        for row in () if raw.trusted is None else np.flatnonzero(raw.trusted):
            labels[row] = raw.labels[row]
        return replace(raw, labels=labels, votes=self.votes, answers=self.answers, annotators=self.annotators)


def majority_vote(votes: Array, classes: int, ties: str = "first") -> Array:
    """The class (N,) with most of the votes (N, S); −1 on rows without any.

    Among equals ``first`` takes the class of lowest number, ``reliable`` the one whose sources agree more often with
    the majority of other rows.

    Example:
        >>> import numpy as np
        >>> majority_vote(np.array([[2, 2, 0], [1, 0, -1], [-1, -1, -1]]), 3).tolist()
        [2, 0, -1]
    """
    silent = (votes == SILENT).all(axis=1)

    def counted(weight: Array) -> Array:
        return np.stack([((votes == k) * weight).sum(axis=1) for k in range(classes)], axis=1)

    count = counted(np.ones(votes.shape[1]))
    if ties == "reliable":
        clear = (count == count.max(axis=1, keepdims=True)).sum(axis=1) == 1
        agrees = ((votes == count.argmax(axis=1)[:, None]) & clear[:, None]).sum(axis=0)
        spoke = ((votes != SILENT) & clear[:, None]).sum(axis=0)
        count = count + counted((agrees + 1) / (spoke + 2)) / (votes.shape[1] + 1)  # less than a vote
    return np.where(silent, SILENT, count.argmax(axis=1))  # the first of equals


def class_name(name: str | None, classes: Sequence[str]) -> str | None:
    """The name of the class of a number; any other text is a name already."""
    return classes[int(name)] if name and name.isdecimal() and int(name) < len(classes) else name


def are_positions(names: Iterable[str | None], classes: Sequence[str]) -> bool:
    """Whether labels are numbers of ``classes`` that only another source lists: all of them are, and none is a name."""
    given = {name for name in names if name not in (None, "-1")}
    return bool(given) and not given & {*classes} and all(class_name(name, classes) != name for name in given)


def given_names(frame: Frame, column: str, where: str) -> list[str | None]:
    """The labels in a column, numbers as the names that the source lists for them."""
    classes = frame.class_names.get(column, ())
    return [class_name(name, classes) for name in label_names(frame.columns[column], where)]


def from_columns(frame: Frame, names: Sequence[str]) -> Ballot:
    """The votes of a table with one column of labels for each annotator."""
    if len(names) < 2:
        raise HyperkronError(
            f"annotators={list(names)!r} names {several(len(names), 'column')}; name one column of labels for each of "
            "at least two annotators, or a single column of labels with label=...."
        )
    where = f"{frame.name}: annotators"
    return Ballot.of([given_names(frame, name, f"{where}={name!r}") for name in names], names)


def gathered(frame: Frame, roles: Roles) -> tuple[Frame, Ballot, Array, Array, list[str]]:
    """The first line of every row where each annotator has a line, votes, positions of those and other lines, notes."""
    if not roles.id:
        raise HyperkronError(
            f"annotator={roles.annotator!r}: {frame.name} has one line per row and annotator, so name the column that "
            "tells which lines belong to one row with id=...."
        )
    who = [category(value) for value in cells(frame.columns[str(roles.annotator)])]
    missing = [i for i, name in enumerate(who) if name is None]
    if missing:
        raise HyperkronError(
            f"annotator={roles.annotator!r} of {frame.name} is empty in {several(len(missing), 'line')}: rows "
            f"{listing(missing)}; fill in who gave these labels."
        )
    keys: list[Hashable] = list(
        zip(*([category(v) for v in cells(frame.columns[name])] for name in roles.id), strict=True)
    )
    place = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    at, annotators = np.array([place[key] for key in keys]), ordered({str(name) for name in who})
    first = np.unique(at, return_index=True)[1]
    _refuse_mixed(frame, roles, at, first)
    said: dict[str | None, list[str | None]] = {name: [None] * len(first) for name in annotators}
    names, again = given_names(frame, str(roles.label), f"{frame.name}: label={roles.label!r}"), 0
    for row, name, label in zip(at.tolist(), who, names, strict=True):
        if label is not None:
            again += said[name][row] is not None
            said[name][row] = label
    notes = [f"{frame.name}: {len(keys)} lines of {several(len(annotators), 'annotator')} are {len(first)} rows."]
    if again:
        notes.append(f"{frame.name}: {several(again, 'line')} repeat a row and an annotator; the last label counts.")
    others = np.setdiff1d(np.arange(len(keys)), first)
    rows = replace(frame, columns=pick(frame.columns, first), messages=())
    return rows, Ballot.of([*said.values()], annotators), first, others, notes


def _refuse_mixed(frame: Frame, roles: Roles, at: Array, first: Array) -> None:
    """Refuse lines of one row that have different inputs."""
    for name in (roles.text, roles.image, *(roles.features or ())):
        if name is None:
            continue
        values, empty = cells(frame.columns[name]), gaps(frame.columns[name])
        mixed = [i for i, k in enumerate(at) if not empty[i] and category(values[i]) != category(values[first[k]])]
        if mixed:
            i = mixed[0]
            ids = ", ".join(f"{column}={cells(frame.columns[column])[i]!r}" for column in roles.id)
            raise HyperkronError(
                f"id={list(roles.id)!r}: lines {int(first[at[i]])} and {i} of {frame.name} have the same id ({ids}) "
                f"but different values of {name!r}; lines of one row must have one input. Name other id columns."
            )
