"""What a source is: its path, its part, and the form of what lies there."""

from __future__ import annotations

import re
from pathlib import Path

from hyperkron.cleaning.data.arrays import is_pickled_cifar
from hyperkron.cleaning.data.files import listing
from hyperkron.solution import HyperkronError

_PART = re.compile(r"(?P<path>.+):(?P<part>[A-Za-z]\w*)\Z")
_FORMS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".tab": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".npz": "npz",
}
_PICKLES = frozenset({".pkl", ".pickle", ".pt", ".pth", ".joblib"})
KNOWN = (
    ".csv, .tsv, .jsonl, .json, .parquet, .npz, a folder of images by class, a folder of idx files, of CIFAR's binary "
    "batches or of WRENCH parts, or hf:NAME"
)


def split_source(source: str) -> tuple[Path, str | None]:
    """The path of a source and the part it names.

    Example:
        >>> split_source("no/such/folder:test")[1]
        'test'
    """
    match = _PART.match(source)
    if match is None or Path(source).exists():
        return Path(source), None
    return Path(match["path"]), match["part"]


def form_of(path: Path) -> str:
    """What a path holds: csv, jsonl, json, parquet, npz, wrench, idx, cifar, sheets or folder."""
    if path.is_dir():
        return _form_of_folder(path)
    suffix = Path(path.name.lower().removesuffix(".gz")).suffix
    if suffix in _FORMS:
        return _FORMS[suffix]
    if suffix == ".npy":
        raise HyperkronError(f"{str(path)!r} is one array without labels; save both with np.savez(path, x=..., y=...).")
    if suffix in _PICKLES:
        raise HyperkronError(
            f"{str(path)!r} may be a pickle, which can run any code when it is read, so it is not. Save the arrays "
            "with np.savez(path, x=..., y=...), or the table as CSV or Parquet."
        )
    raise HyperkronError(f"{str(path)!r} has a suffix that says nothing about its format. Known: {KNOWN}.")


def _form_of_folder(path: Path) -> str:
    def any_file(*patterns: str) -> bool:
        return any(next(path.glob(pattern), None) is not None for pattern in patterns)

    if any_file("*-images-idx3-ubyte*"):
        return "idx"
    if any_file("data_batch_*.bin", "test_batch.bin") or (path / "train.bin").is_file():
        return "cifar"
    if is_pickled_cifar(path):
        raise HyperkronError(
            f"{str(path)!r} is the pickled version of CIFAR; reading a pickle can run any code, so it is not read. "
            "Fetch the binary version (cifar-10-binary.tar.gz or cifar-100-binary.tar.gz), unpack it and name its "
            "folder cifar-10-batches-bin or cifar-100-binary instead."
        )
    if (path / "labels.npz").is_file() and any_file("train_*.webp", "test.webp"):
        return "sheets"
    if any_file("train.json", "train.jsonl", "train.jsonl.gz"):
        return "wrench"
    if any(entry.is_dir() for entry in path.iterdir()):
        return "folder"
    there = listing(sorted(entry.name for entry in path.iterdir())) or "nothing"
    raise HyperkronError(f"{str(path)!r} is a folder in no known form: it holds {there}. Known: {KNOWN}.")
