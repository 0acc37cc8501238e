"""Readers of datasets: ``read_pair`` for training and trusted rows, ``read`` for one source, ``export_rows`` back."""

from hyperkron.data.encoding import TableEncoding
from hyperkron.data.export import export_rows
from hyperkron.data.idx import MNIST, mnist, read_idx
from hyperkron.data.labelled import Labelled, ReadOptions
from hyperkron.data.provenance import RowHashes, row_hashes
from hyperkron.data.reading import read, read_pair

__all__ = [
    "MNIST",
    "Labelled",
    "ReadOptions",
    "RowHashes",
    "TableEncoding",
    "export_rows",
    "mnist",
    "read",
    "read_idx",
    "read_pair",
    "row_hashes",
]
