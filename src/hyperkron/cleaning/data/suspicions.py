"""What looks like a mistake in a dataset but may be meant: said, and nothing is changed."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from hyperkron.cleaning.data.files import listing, np, several
from hyperkron.cleaning.data.labelled import Raw
from hyperkron.cleaning.data.values import Columns, as_number, cells, exact_numbers, is_missing

_IDENTIFIES = re.compile(r"(^|[\W_])(id|nr|no|num|number|code|key|phone|account|customer)s?($|[\W_])|(Id|ID|Nr|No)$")
_SEVERAL = re.compile(r"\s*[,;|]\s*")
_LEAST = 20  # rows, below which all values of a column differ by chance


def header_note(columns: Columns) -> str:
    """What to say if the names of columns look like a row of data: the file may have no header."""
    like = [name for name in columns if name and not is_missing(name) and as_number(name) is not None]
    rest = (name for name in columns if name not in like and not is_missing(name))
    like += [name for name in rest if _among(name, cells(columns[name]))]
    if 2 * len(like) < len(columns):
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
    for name, values in raw.inputs.items() if isinstance(raw.inputs, Mapping) else ():
        numbers, strange = exact_numbers(values)
        if strange or len(numbers) < _LEAST or not np.isfinite(numbers).all() or (numbers != np.round(numbers)).any():
            continue
        if len(np.unique(numbers)) == len(numbers) and (_IDENTIFIES.search(name) or (np.diff(numbers) == 1).all()):
            found.append(
                f"{raw.name}: column {name!r} looks like a number that identifies rows: all {len(numbers)} values "
                f"differ. If so, pass id=[{name!r}], so that nothing is learnt from it."
            )
    return found


def label_notes(raw: Raw) -> list[str]:
    """Labels that look misspelt, and cells that look like several labels."""
    counts = Counter(name for name in raw.labels if name is not None)
    notes = []
    merged = [name for name in counts if (parts := _SEVERAL.split(name))[1:] and all(part in counts for part in parts)]
    if merged:
        shown = listing(f"{name!r} ({several(counts[name], 'row')})" for name in merged)
        notes.append(
            f"{raw.name}: {shown} look like several labels in one cell; each is taken as a class of its own. A row can "
            "have one label here: split such rows, or keep the main label."
        )
    for name in sorted(name for name, count in counts.items() if count <= 2 and name not in merged and len(name) > 3):
        larger = [other for other in counts if counts[other] >= 5 * counts[name] and not _SEVERAL.search(other)]
        near = difflib.get_close_matches(name, larger, 1, 0.8)
        if near and near[0].lower() != name.lower() and not any(map(str.isdigit, name)):
            notes.append(
                f"{raw.name}: the label {name!r} ({several(counts[name], 'row')}) looks like a misspelling of "
                f"{near[0]!r}; it is taken as a class of its own. Correct it if it is one."
            )
    return notes
