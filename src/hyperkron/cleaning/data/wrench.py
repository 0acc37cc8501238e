"""WRENCH: texts with the votes of labelling functions.

A folder holds ``label.json`` ({"0": name, ...}) and the parts ``train``, ``valid`` and ``test``, each either as
WRENCH writes it (``train.json``: {id: {"label": 0, "weak_labels": [...], "data": {"text": ...}}}) or as JSON lines
(``train.jsonl`` or ``train.jsonl.gz``: {"id", "text", "label", "weak_labels"} a line).

Reference: Zhang et al., "WRENCH: A comprehensive benchmark for weak supervision" (2021).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.files import listing, np, several
from hyperkron.cleaning.data.json_files import lines_of, read_json, read_json_lines
from hyperkron.cleaning.data.kept import Kept
from hyperkron.cleaning.data.labelled import SILENT, Place, Raw
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.values import Array
from hyperkron.cleaning.data.votes import Ballot, majority_vote
from hyperkron.solution import HyperkronError

SUFFIXES = (".json", ".jsonl", ".jsonl.gz")
_TREC = frozenset({"DESC", "ENTY", "HUM", "ABBR", "LOC", "NUM"})
_FINE_LABELS = (
    "abb exp animal body color cremat currency dismed event food instru lang letter other plant product religion sport "
    "substance symbol techmeth termeq veh word def desc manner reason gr ind title city country mount state code count "
    "date dist money ord period perc speed temp weight volsize"
)
_TREC_FINE = frozenset(_FINE_LABELS.split())


def _part_file(folder: Path, part: str | None) -> Path:
    """The file of a part; an error that lists the parts there are."""
    part = part or "train"
    for suffix in SUFFIXES:
        if (folder / f"{part}{suffix}").is_file():
            return folder / f"{part}{suffix}"
    found = {name.name.split(".")[0] for suffix in SUFFIXES for name in folder.glob(f"*{suffix}")}
    there = listing(sorted(found - {"label", "labeled_ids"})) or "none"
    raise HyperkronError(f"part={part!r} is not in {str(folder)!r}; there is {there}.")


def _entries(path: Path, options: ReadOptions) -> list[dict[str, Any]]:
    """Every row with ``text``, ``label`` and ``weak_labels``, from either form."""
    if path.name.endswith(".json"):
        content = read_json(path, options)
        if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
            raise HyperkronError(
                f"{str(path)!r} is not a WRENCH file: it must be {{id: {{label, weak_labels, data}}}}."
            )
        parts = ((entry, entry.get("data")) for entry in content.values())
        entries = [{**entry, **data} if isinstance(data, dict) else entry for entry, data in parts]
    else:
        entries = [entry for entry, _ in read_json_lines(path, options)]
    for i, entry in enumerate(entries):
        if not isinstance(entry.get("text"), str) or not isinstance(entry.get("weak_labels"), list):
            raise HyperkronError(f"{str(path)!r}: row {i} lacks a text or a list of weak_labels.")
    if not entries:
        raise HyperkronError(f"{str(path)!r} is empty: it has no rows.")
    return entries


def _class_names(folder: Path, options: ReadOptions) -> tuple[str, ...]:
    """The classes of ``label.json``, in the order of their numbers."""
    path = folder / "label.json"
    if not path.is_file():
        raise HyperkronError(f'{str(folder)!r} has no label.json; write {{"0": "first class", "1": ...}} there.')
    content = read_json(path, options)
    if not isinstance(content, dict) or sorted(content) != sorted(str(i) for i in range(len(content))):
        raise HyperkronError(f'{str(path)!r} must be {{"0": "first class", "1": "second class", ...}}.')
    return tuple(str(content[str(i)]) for i in range(len(content)))


def read_wrench(place: Place) -> Raw:
    """One part of a WRENCH folder, train by default.

    ``labels`` are the true ones or, without ``place.gold``, the majority vote, with all votes beside it; by default the
    vote for the training part only.
    """
    path, classes = _part_file(place.path, place.part), _class_names(place.path, place.options)
    gold = place.part not in (None, "train") if place.gold is None else place.gold
    entries = _entries(path, place.options)
    votes = _votes([entry["weak_labels"] for entry in entries], len(classes), path)
    true = [_gold(entry.get("label"), classes, path) for entry in entries]
    name = f"{place.path.name}:{place.part or 'train'}"
    texts, notes = _without_fine_labels([_marked(entry) for entry in entries], classes, name)
    marked = sum(text != entry["text"] for text, entry in zip(texts, entries, strict=True)) if not notes else 0
    if marked:
        notes += (f"{name}: the two entities of {several(marked, 'text')} are marked as [[ first ]] and << second >>.",)
    raw = Raw(name, "text", texts, true, np.arange(len(texts)), notes, gold=true, classes=classes)
    return raw if gold else _voted(raw, votes, place.options.abstain)


def _voted(raw: Raw, votes: Array, abstain: str) -> Raw:
    """The rows with the votes in place of their true labels."""
    silent = (votes == SILENT).all(axis=1)
    if silent.any() and abstain != "unlabelled":
        fate = f"go to the first class, {raw.classes[0]!r}" if abstain == "first" else "are left out"
        raw = raw.noting(f"{raw.source}: {several(int(silent.sum()), 'row')} without any vote {fate}.")
    if abstain == "first":
        return replace(raw, labels=[raw.classes[max(k, 0)] for k in majority_vote(votes, len(raw.classes))])
    ballot = Ballot(votes, raw.classes, tuple(f"function {s}" for s in range(votes.shape[1])))
    voted = ballot.given_to(raw)
    return voted.without(silent, "no vote") if abstain == "drop" else voted


def write_wrench(place: Place, kept: Kept) -> bytes:
    """The entries, or the very text of every line whose label stays."""
    path, options = _part_file(place.path, place.part), place.options
    kept = kept.numbered(_class_names(place.path, options))
    if path.suffix == ".json":
        entries = list(read_json(path, options).items())
        rows = kept.within(len(entries), path.name)
        found = {entries[row][0]: kept.relabelled(row, entries[row][1], "label") for row in rows}
        return json.dumps(found, ensure_ascii=False, indent=1).encode(options.charset)
    return lines_of(read_json_lines(path, options), kept, "label", path.name).encode(options.charset)


def _marked(entry: dict[str, Any]) -> str:
    """The text; where the label is about two entities in it, with these marked as [[ first ]] and << second >>.

    One sentence has several pairs of entities, each with a label of its own: unmarked, they could not be told apart.
    """
    text: str = entry["text"]
    marks = []
    for number, (left, right) in (("1", ("[[ ", " ]]")), ("2", ("<< ", " >>"))):
        span = entry.get(f"span{number}")
        if not isinstance(span, list) or len(span) != 2 or not all(type(place) is int for place in span):
            return text
        if not 0 <= span[0] < span[1] <= len(text):
            return text
        marks.append((span[0], span[1], left, right))
    if max(marks[0][0], marks[1][0]) < min(marks[0][1], marks[1][1]):  # one within the other
        return text
    for start, end, left, right in sorted(marks, reverse=True):
        text = f"{text[:start]}{left}{text[start:end]}{right}{text[end:]}"
    return text


def _votes(lists: list[list[Any]], classes: int, path: Path) -> Array:
    widths = {len(votes) for votes in lists}
    if len(widths) != 1 or 0 in widths:
        raise HyperkronError(
            f"{str(path)!r}: rows have {listing(sorted(widths))} weak_labels; all must have the same number."
        )
    if not all(type(vote) is int and SILENT <= vote < classes for votes in lists for vote in votes):
        raise HyperkronError(f"{str(path)!r}: weak_labels must be from -1 (abstains) to {classes - 1}.")
    return np.array(lists, dtype=np.int64)


def _gold(label: Any, classes: tuple[str, ...], path: Path) -> str | None:
    if label is None or label == SILENT:
        return None
    if type(label) is not int or not 0 <= label < len(classes):
        raise HyperkronError(f"{str(path)!r}: label={label!r} is not a class of label.json (0 to {len(classes) - 1}).")
    return classes[label]


def _without_fine_labels(texts: list[str], classes: tuple[str, ...], name: str) -> tuple[list[str], tuple[str, ...]]:
    """TREC's test texts start with their fine label, which would give the answer away."""
    leading = sum(text.split(" ", 1)[0] in _TREC_FINE for text in texts)
    if set(classes) != _TREC or 10 * leading < 9 * len(texts):
        return texts, ()
    words = (text.split(" ", 1) for text in texts)
    dropped = [first[1] if first[0] in _TREC_FINE and len(first) > 1 else " ".join(first) for first in words]
    about = f"the first word of {several(leading, 'text')}, TREC's fine label, gives the class away and is dropped"
    return dropped, (f"{name}: {about}.",)
