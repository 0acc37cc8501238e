"""The source again with only the rows to keep: the very text of each where the format has one."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from hyperkron.cleaning.data.kept import Formulas, Kept
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.sources import locate
from hyperkron.cleaning.data.values import Array
from hyperkron.solution import HyperkronError
from hyperkron.training.writing import put
from hyperkron.validation import check_one_of


def export_rows(
    source: str | os.PathLike[str],
    keep: Sequence[int] | Array,
    out: str | os.PathLike[str],
    labels: Sequence[str | None] | None = None,
    *,
    label: str | None = None,
    classes: Sequence[str] = (),
    overwrite: bool = False,
    formulas: Formulas = "keep",
    options: ReadOptions | None = None,
) -> Path:
    """Write the kept rows of a source, in the order of the source and in its format, and return the path.

    CSV and JSON lines keep the text of every row that gets no other label, byte for byte; Parquet keeps types and
    metadata. A folder of images becomes a CSV list of files or an ``.npz``; idx, CIFAR and sheets become an ``.npz``;
    a dataset of the Hub becomes Parquet. The file appears whole or not at all.

    Args:
        source: as it was given to ``read`` or ``read_pair``.
        keep: positions of rows, as in ``Labelled.rows``.
        out: the file to write.
        labels: class names for the rows of ``keep``, None where a row keeps its own; None to keep all.
        label: the column of the labels; inferred as by ``read`` when None.
        classes: of the rows as read, for a source of numbers whose names stand in another one (see ``read_pair``).
        overwrite: replace ``out`` if it is there.
        formulas: what becomes of CSV cells that a spreadsheet would run, such as ``=1+1``: ``keep`` them with a
            warning, ``escape`` them by an apostrophe, or ``refuse`` to write. Other formats have no such cells.
        options: how to read the source.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.csv").write_text("text,label\\n007,x\\n1.50,y\\n")
        >>> export_rows(folder / "a.csv", [1], folder / "b.csv", ["x"]).read_text()
        'text,label\\n1.50,x\\n'
    """
    out = Path(out)
    check_one_of("formulas", formulas, get_args(Formulas))
    kept = Kept.of(keep, labels, out, label, formulas, classes)
    form, place = locate(source, "source", options or ReadOptions())
    if out.is_dir():
        raise HyperkronError(f"out={str(out)!r} is a folder; name a file.")
    if out.exists() and out.resolve() == place.path.resolve():
        raise HyperkronError(f"out={str(out)!r} is the source itself; choose another name.")
    if out.exists() and not overwrite:
        raise HyperkronError(f"out={str(out)!r} exists already; choose another name, or pass overwrite=True.")
    if not out.name.lower().endswith(form.suffixes):
        told = f"rows of {place.path.name} are written as {' or '.join(form.suffixes)}; name it so."
        raise HyperkronError(f"out={str(out)!r}: {told}")
    content = form.write(place, kept)
    content = gzip.compress(content, mtime=0) if out.name.lower().endswith(".gz") else content
    put(out, content, parents=True)
    return out
