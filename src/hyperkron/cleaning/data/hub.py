"""Datasets of the Hugging Face Hub, by name: ``hf:NAME``, ``hf:NAME:SPLIT``, ``hf:NAME@CONFIGURATION:SPLIT``."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.files import listing, need
from hyperkron.cleaning.data.tables import Frame, arrow_columns
from hyperkron.solution import HyperkronError

PREFIX = "hf:"
_SOURCE = re.compile(r"hf:(?P<name>[\w./-]+?)(@(?P<config>[\w.-]+))?(:(?P<split>.+))?\Z")


def load_hub(source: str) -> Any:
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
    if "unknown split" in told or "split" in told:
        return f"Name a split that it has instead of {split!r}: hf:NAME:SPLIT."
    offline = isinstance(error, OSError) or any(
        word in told for word in ("connect", "offline", "resolve", "timeout", "hub", "reach")
    )
    if offline:
        return (
            "If this machine has no way to huggingface.co, save the dataset as Parquet where it has "
            "(datasets.load_dataset(...).to_parquet('train.parquet')) and read that file; a private dataset needs "
            "`hf auth login`."
        )
    return "Check the name on huggingface.co/datasets."


def read_hub(source: str) -> tuple[Frame, dict[str, tuple[str, ...]]]:
    """The columns of a dataset, and the class names of each column that has them."""
    dataset = load_hub(source)
    names = {
        column: tuple(feature.names)
        for column, feature in dataset.features.items()
        if type(feature).__name__ == "ClassLabel" and feature.names
    }
    columns = arrow_columns(dataset.with_format("arrow")[:])  # pictures as bytes: decoded later, within our limits
    if not columns or not len(dataset):
        raise HyperkronError(f"source={source!r} is empty: it has {listing(columns) or 'no columns'} and no rows.")
    return Frame(source, columns, len(dataset), own_folder(source)), names


def own_folder(source: str) -> Path:
    """Where the files of a dataset lie: its folder, or what the client keeps of it; images elsewhere are not its own.

    Example:
        >>> own_folder("hf:org/photos:test").name
        'datasets--org--photos'
    """
    match = _SOURCE.match(source)
    assert match is not None
    folder = Path(match["name"])
    if folder.is_dir():  # as the client does, before it asks the Hub
        return folder
    cache: str = need("huggingface_hub.constants").HF_HUB_CACHE
    return Path(cache) / f"datasets--{match['name'].replace('/', '--')}"
