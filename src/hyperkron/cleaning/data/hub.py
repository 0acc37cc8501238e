"""Datasets of the Hugging Face Hub, by name: ``hf:NAME``, ``hf:NAME:SPLIT``, ``hf:NAME@CONFIGURATION:SPLIT``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.files import need
from hyperkron.cleaning.data.kept import Kept
from hyperkron.cleaning.data.labelled import Frame, Place
from hyperkron.cleaning.data.parquet import arrow_bytes, arrow_columns
from hyperkron.solution import HyperkronError

PREFIX = "hf:"
_SOURCE = re.compile(r"hf:(?P<name>[\w./-]+?)(@(?P<config>[\w.-]+))?(:(?P<split>.+))?\Z")


def _load(source: str) -> Any:
    """The dataset a source names; the split ``train`` when it names none.

    Nothing of the dataset's own code is run: versions of ``datasets`` that could are told not to.
    """
    match = _SOURCE.match(source)
    if match is None:
        raise HyperkronError(f"source={source!r} must be hf:NAME, hf:NAME:SPLIT or hf:NAME@CONFIGURATION:SPLIT.")
    datasets = need("datasets")
    split = match["split"] or "train"
    options = {}
    if "trust_remote_code" in inspect.signature(datasets.load_dataset).parameters:
        options["trust_remote_code"] = False
    try:
        return datasets.load_dataset(match["name"], match["config"], split=split, **options)
    except Exception as error:  # the client raises errors of several libraries
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise HyperkronError(
            f"source={source!r} could not be loaded ({type(error).__name__}: {reason}). {_remedy(error, split)}"
        ) from error


def _remedy(error: Exception, split: str) -> str:
    told = f"{type(error).__name__} {error}".lower()
    if "config name is missing" in told or "builderconfig" in told:
        return "Name a configuration: hf:NAME@CONFIGURATION:SPLIT."
    if "split" in told:
        return f"Name a split that it has instead of {split!r}: hf:NAME:SPLIT."
    signs = ("connect", "offline", "resolve", "timeout", "hub", "reach")
    if isinstance(error, OSError) or any(sign in told for sign in signs):
        return (
            "If this machine has no way to huggingface.co, save the dataset as Parquet where it has "
            "(datasets.load_dataset(...).to_parquet('train.parquet')) and read that file; a private dataset needs "
            "`hf auth login`."
        )
    return "Check the name on huggingface.co/datasets."


def _arrow(dataset: Any) -> Any:
    """The table of a dataset, with pictures as bytes: they are decoded later, within our limits."""
    return dataset.with_format("arrow")[:]


def read_hub(place: Place) -> Frame:
    """The columns of a dataset of the Hub."""
    return dataset_frame(_load(place.source), place.source, _own_folder(place.source))


def dataset_frame(dataset: Any, name: str, folder: Path | None = None) -> Frame:
    """The columns of a ``datasets.Dataset``, and the class names of each column that has them."""
    names = {
        column: tuple(feature.names)
        for column, feature in dataset.features.items()
        if type(feature).__name__ == "ClassLabel" and feature.names
    }
    return Frame(name, arrow_columns(_arrow(dataset)), folder, class_names=names)


def write_hub(place: Place, kept: Kept) -> bytes:
    """The rows as Parquet."""
    kept.require_suffix(place.source, ".parquet")
    dataset = _load(place.source)
    column = kept.label_column(place.path.name, dataset.column_names)
    names = (getattr(dataset.features[column], "names", None) or ()) if column else ()
    return arrow_bytes(_arrow(dataset), kept.numbered(names), column, place.source)


def _own_folder(source: str) -> Path:
    """Where the files of a dataset lie: its folder, or what the client keeps of it."""
    match = _SOURCE.match(source)
    assert match is not None
    folder = Path(match["name"])
    if folder.is_dir():  # as the client does, before it asks the Hub
        return folder
    cache: str = need("huggingface_hub.constants").HF_HUB_CACHE
    return Path(cache) / f"datasets--{match['name'].replace('/', '--')}"
