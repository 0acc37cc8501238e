"""Readers of datasets: ``read_pair`` for training and trusted rows, ``read`` for one source, ``export_rows`` back."""

from hyperkron.cleaning.data.arrays import read_idx
from hyperkron.cleaning.data.encoding import TableEncoding
from hyperkron.cleaning.data.export import export_rows
from hyperkron.cleaning.data.labelled import Labelled
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.new_rows import InputForm, NewRows
from hyperkron.cleaning.data.provenance import RowHashes
from hyperkron.cleaning.data.reading import read, read_pair
from hyperkron.cleaning.data.roles import NoLabelColumn
from hyperkron.cleaning.data.sources import row_hashes

__all__ = [
    "InputForm",
    "Labelled",
    "NewRows",
    "NoLabelColumn",
    "ReadOptions",
    "RowHashes",
    "TableEncoding",
    "export_rows",
    "read",
    "read_idx",
    "read_pair",
    "row_hashes",
]
