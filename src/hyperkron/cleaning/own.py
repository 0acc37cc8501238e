"""What users bring of their own: embeddings in place of inputs, probabilities as an expert, an estimator as a rival."""

from __future__ import annotations

import csv
import hashlib
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.cleaning.data import Labelled
from hyperkron.cleaning.data.arrays import tensor_array
from hyperkron.cleaning.data.encoding import TableEncoding
from hyperkron.cleaning.data.files import existing, np
from hyperkron.cleaning.data.labelled import Roles
from hyperkron.cleaning.data.values import spelt
from hyperkron.cleaning.folder import fingerprint
from hyperkron.cleaning.models.trees import as_tensors
from hyperkron.solution import HyperkronError

ROUNDING = 1e-3
"""By how much probabilities of a row may miss the sum of 1."""
KEPT_WEIGHT = 0.5
"""The least weight of a row that an estimator without sample weights learns from."""


@dataclass(frozen=True)
class Own:
    """What a user brought, checked and in the order of the rows that are used.

    Attributes:
        parts: training, trusted and test rows as the models see them: with embeddings, where these were given.
        probabilities: of the training rows, then the trusted ones (rows, C); None where none were given.
        estimator: a classifier with the interface of scikit-learn, not fitted; None where none was given.
        data: a SHA-256 of the rows and of what was brought.
    """

    parts: list[Labelled]
    probabilities: Tensor | None = None
    estimator: Any = None
    data: str = ""

    @classmethod
    def of(
        cls,
        parts: list[Labelled],
        *,
        embeddings: Any = None,
        probabilities: Any = None,
        estimator: Any = None,
    ) -> Own:
        """Check what was brought to ``clean``, and find the rows of the parts in it.

        Its rows are all those of the training source, then of the trusted one if that is another, then of the test
        source. A CSV file of probabilities may begin with a line that names the classes.
        """
        if estimator is not None:
            _check_estimator(estimator)
        one_source = parts[0].roles.trusted_column is not None
        classes, digest, told, seen = parts[0].classes, hashlib.sha256(fingerprint(parts).encode()), None, parts
        if probabilities is not None:
            values = _values("probabilities", probabilities, classes)
            _check_probabilities(values, classes)
            told = torch.from_numpy(np.concatenate(_split("probabilities", values, parts[:2], one_source)))
            digest.update(told.numpy().tobytes())
        if embeddings is not None:
            values = _values("embeddings", embeddings)
            seen = _embedded(parts, _split("embeddings", values, parts, one_source))
            digest.update(fingerprint(seen).encode())
        brought = probabilities is not None or embeddings is not None
        return cls(seen, told, estimator, digest.hexdigest() if brought else fingerprint(parts))


def own_paths(probabilities: Any, embeddings: Any) -> dict[str, str] | None:
    """Absolute paths of what was brought, so that a resumed run can read it again; None where it is in memory."""
    brought = {"probabilities": probabilities, "embeddings": embeddings}
    given = {name: value for name, value in brought.items() if value is not None}
    if not all(isinstance(value, (str, os.PathLike)) for value in given.values()):
        return None
    return {name: str(Path(value).absolute()) for name, value in given.items()}


def _values(name: str, given: Any, classes: tuple[str, ...] = ()) -> Any:
    """A matrix of float32 from an array or a file."""
    if isinstance(given, (str, os.PathLike)):
        path = existing(Path(given), name)
        suffixes = (".npy", ".csv") if classes else (".npy",)
        if path.suffix.lower() not in suffixes:
            raise HyperkronError(f"{name}={str(path)!r} must be a {' or '.join(suffixes)} file; save it as one.")
        given = _read_csv(path, classes) if path.suffix.lower() == ".csv" else _read_npy(name, path)
    values = np.asarray(tensor_array(given))
    if values.ndim != 2 or values.dtype.kind not in "fiub" or not values.shape[1]:
        raise HyperkronError(
            f"{name} has shape {values.shape} and type {values.dtype}; give a matrix of numbers, one row for each row "
            "of the data."
        )
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values).all(1))[0])
        raise HyperkronError(f"{name}[{row}] holds a missing or infinite number; fill it in.")
    return values


def _read_npy(name: str, path: Path) -> Any:
    try:
        return np.load(path)
    except (OSError, ValueError, EOFError) as error:
        raise HyperkronError(
            f"{name}={str(path)!r} is not an array of numbers ({str(error)[:100]}); write it with numpy.save()."
        ) from error


def _read_csv(path: Path, classes: tuple[str, ...]) -> Any:
    """The numbers of a CSV file; a first line that names the classes says which column is which."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [line for line in csv.reader(file) if line]
        order, named = None, [spelt(name, classes) for name in (lines or [[]])[0]]
        if sorted(named) == sorted(classes):
            order, lines = [named.index(name) for name in classes], lines[1:]
        values = np.asarray([[float(cell) for cell in line] for line in lines], dtype=np.float32)
    except (OSError, ValueError, csv.Error) as error:
        raise HyperkronError(
            f"probabilities={str(path)!r} is not a table of numbers ({str(error)[:100]}); write one line for each row, "
            f"with the columns {', '.join(classes[:10])}."
        ) from error
    return values if order is None or values.ndim != 2 else values[:, order]


def _check_probabilities(values: Any, classes: tuple[str, ...]) -> None:
    if values.shape[1] != len(classes):
        raise HyperkronError(
            f"probabilities has {values.shape[1]} columns, but there are {len(classes)} classes; give one column for "
            f"each, in this order: {', '.join(classes[:20])}."
        )
    wrong = np.flatnonzero((values < 0).any(1) | (abs(values.sum(1) - 1) > ROUNDING))
    if len(wrong):
        raise HyperkronError(
            f"probabilities[{int(wrong[0])}]={values[wrong[0]].round(3).tolist()!s:.80} are not probabilities; in each "
            "row they must be at least 0 and sum to 1."
        )


def _split(name: str, values: Any, parts: Sequence[Labelled], one_source: bool) -> list[Any]:
    """For each part the entries of its rows; with ``one_source`` the trusted ones are among those of training."""
    sizes = [len(part) + sum(len(rows) for rows in part.left_out.values()) for part in parts]
    sizes[1] = 0 if one_source else sizes[1]
    if len(values) != sum(sizes):
        what = ["training", "trusted", "test"]
        told = " + ".join(f"{size} {label}" for size, label in zip(sizes, what, strict=False) if size)
        raise HyperkronError(
            f"{name} has {len(values)} rows, but the data has {told}; give one for each row of the sources, in that "
            "order, rows that cannot be used included."
        )
    begins = [0, 0 if one_source else sizes[0], sizes[0] + sizes[1]]
    return [values[begin + part.rows] for begin, part in zip(begins, parts, strict=False)]


def _embedded(parts: list[Labelled], vectors: list[Any]) -> list[Labelled]:
    """The parts as tables of vectors."""
    columns = [{f"x{i}": column for i, column in enumerate(block.T)} for block in vectors]
    encoding, _ = TableEncoding.fit(columns[0])
    return [
        replace(part, kind="table", inputs=encoding.matrix(block), encoding=encoding, roles=Roles())
        for part, block in zip(parts, columns, strict=True)
    ]


# --- estimators -------------------------------------------------------------------------------------------------


def _check_estimator(estimator: Any) -> None:
    missing = [name for name in ("fit", "predict", "get_params") if not callable(getattr(estimator, name, None))]
    if isinstance(estimator, type) or missing:
        what = f"the class {estimator.__name__}" if isinstance(estimator, type) else f"a {type(estimator).__name__}"
        raise HyperkronError(
            f"estimator={what} is not a classifier of scikit-learn's kind; give an object with fit, predict and "
            "get_params, such as RandomForestClassifier()."
        )


class EstimatorModel(nn.Module):
    """A fitted estimator as a model: ``forward`` gives the logarithms of its probabilities."""

    def __init__(self, estimator: Any, classes: int) -> None:
        super().__init__()
        self.estimator, self.classes = estimator, classes

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C)."""
        rows, known = x.flatten(1).float().cpu().numpy(), np.asarray(self.estimator.classes_).astype(int)
        found = np.zeros((len(rows), self.classes))
        if hasattr(self.estimator, "predict_proba"):
            found[:, known] = self.estimator.predict_proba(rows)
        else:
            found[np.arange(len(rows)), np.asarray(self.estimator.predict(rows)).astype(int)] = 1
        return torch.from_numpy(found).clamp(min=1e-8).log().to(x)


def fit_estimator(estimator: Any, x: Tensor, labels: Tensor, weight: Tensor, classes: int) -> nn.Module:
    """A fresh copy of the estimator fitted to rows, as a model; trees of scikit-learn become tensors.

    Where its ``fit`` takes no ``sample_weight``, it learns from the rows that weigh at least KEPT_WEIGHT.
    """
    from sklearn.base import clone

    weighted = "sample_weight" in inspect.signature(estimator.fit).parameters
    kept = torch.ones_like(weight, dtype=torch.bool) if weighted else weight >= KEPT_WEIGHT
    rows, told = x[kept].flatten(1).float().cpu().numpy(), labels[kept].cpu().numpy()
    more = {"sample_weight": weight[kept].double().cpu().numpy()} if weighted else {}
    try:
        fitted = clone(estimator).fit(rows, told, **more)
    except (ValueError, TypeError) as error:
        raise HyperkronError(
            f"estimator={type(estimator).__name__} cannot be fitted to {len(rows)} rows of {rows.shape[1]} numbers: "
            f"{' '.join(str(error).split())[:200]}"
        ) from error
    found = as_tensors(fitted, classes)
    return EstimatorModel(fitted, classes) if found is None else found.to(x.device)
