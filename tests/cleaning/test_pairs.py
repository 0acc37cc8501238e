"""Labels that are given apart from a DataFrame: its columns are known by their names, in every part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hyperkron.cleaning.arguments import read_parts
from hyperkron.solution import HyperkronError

pandas = pytest.importorskip("pandas")
Y = np.arange(24) % 2
X = pandas.DataFrame({"a": np.arange(24.0), "b": 100 + np.arange(24.0), "class": 1000 + np.arange(24.0)})
OTHER = X[["class", "b", "a"]].iloc[:6] + 0.5
"""The same columns in another order."""
WANTED = (X.iloc[:6] + 0.5).to_numpy()


def votes(y: Any) -> Any:
    return np.stack([y, y, 1 - y], axis=1)


PAIRS = {
    "labels": (X, Y),
    "labels as a frame of one column": (X, pandas.DataFrame({"given": Y})),
    "labels as a column": (X, Y[:, None]),
    "votes": (X, votes(Y)),
    "votes as a frame": (X, pandas.DataFrame(votes(Y), columns=["ann", "bob", "cyd"])),
    "a dictionary of both": {"x": X, "y": Y},
    "a frame with the labels": X.assign(label=Y),
}
OTHERS = {
    "a pair": (OTHER, Y[:6]),
    "a dictionary": {"x": OTHER, "y": Y[:6]},
    "a frame": OTHER.assign(label=Y[:6]),
    "columns": {**{name: OTHER[name].tolist() for name in OTHER}, "label": Y[:6]},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("train", PAIRS)
def test_columns_are_found_by_their_names(train: str, other: str) -> None:
    parts = read_parts(PAIRS[train], OTHERS[other], OTHERS[other], {})
    np.testing.assert_array_equal(parts[0].inputs, X.to_numpy())
    for part in parts[1:]:
        np.testing.assert_array_equal(part.inputs, WANTED)
        np.testing.assert_array_equal(part.labels, Y[:6])
    np.testing.assert_array_equal(parts[0].labels, Y)
    assert parts[0].roles.features == ("a", "b", "class")
    if "votes" in train:
        np.testing.assert_array_equal(parts[0].votes, votes(Y))


def test_a_matrix_beside_a_frame_has_its_columns() -> None:
    train, trusted, test = read_parts((X, Y), (WANTED, Y[:6]), (WANTED + 7, Y[:6]), {})
    assert train.roles.features == ("a", "b", "class")
    np.testing.assert_array_equal(trusted.inputs, WANTED)
    np.testing.assert_array_equal(test.inputs, WANTED + 7)


@pytest.mark.parametrize(
    ("train", "trusted", "said"),
    [
        ((X.assign(Label=Y), Y), (OTHER, Y[:6]), "train: x has a column 'Label', and the labels are given apart from"),
        ((X, pandas.get_dummies(pandas.Series(Y))), (OTHER, Y[:6]), "train: y has a single 1 in each of its 24 rows"),
        ((X, np.eye(2)[Y]), (OTHER, Y[:6]), "pass y.argmax"),
        ((X, Y), (OTHER, votes(Y[:6])), "trusted: y has 3 columns; only training rows may have several labels each"),
        (
            (X, pandas.DataFrame(votes(Y), columns=["ann", "label", "cyd"])),
            (OTHER, Y[:6]),
            "train: y has a column 'label'",
        ),
        ((X, Y), (OTHER[["a", "b"]], Y[:6]), "'class' is not a column of trusted"),
        ((X.to_numpy(), Y), OTHER.assign(label=Y[:6]), "trusted lacks the columns 'x0', 'x1', 'x2' of train"),
        (X.assign(label=Y), (WANTED, Y[:6]), "trusted has no columns; give a table that has them"),
    ],
)
def test_what_cannot_be_brought_together_is_refused(train: Any, trusted: Any, said: str) -> None:
    with pytest.raises(HyperkronError, match=said):
        read_parts(train, trusted, None, {})
