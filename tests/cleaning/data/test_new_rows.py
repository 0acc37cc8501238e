"""New rows to predict: folders of images, and things that are not rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas
import pytest

from hyperkron.cleaning.data import InputForm, read
from hyperkron.cleaning.data.labelled import Roles
from hyperkron.solution import HyperkronError

image = pytest.importorskip("PIL.Image")
FORM = InputForm("image", Roles(), shape=(1, 4, 4))


def write(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(np.zeros((4, 4), dtype=np.uint8)).save(file)


@pytest.mark.parametrize("picture", [None, "picture"])
def test_images_of_a_folder_are_known_by_their_files(picture: str | None, tmp_path: Path) -> None:
    write(tmp_path / "b.png", tmp_path / "c.png")
    (tmp_path / "a.png").write_text("broken")
    found = InputForm("image", Roles(image=picture), shape=(1, 4, 4)).read(tmp_path)
    assert found.ids == {"file": ["a.png", "b.png", "c.png"]}
    assert found.rows.tolist() == [1, 2] and found.count == 3
    assert found.messages[0].startswith(f"{tmp_path.name}: 1 image cannot be read, so its row is not used: 'a.png'")


def test_an_image_that_cannot_be_read_among_folders_of_classes(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "b.png", tmp_path / "dog" / "c.png")
    (tmp_path / "cat" / "a.png").write_text("broken")
    found = FORM.read(tmp_path)
    assert found.rows.tolist() == [1, 2] and found.count == 3  # as the rows of the source are numbered
    assert found.ids == {"file": ["", "cat/b.png", "dog/c.png"]}
    assert "1 image cannot be read, so its row is not used" in found.messages[0]


@pytest.mark.parametrize(
    "rows", [None, 3.0, np.array(1.0), [{"a": 1.0, "t": "p"}], np.array([[1.0, "p"]], dtype=object), ["a text"]]
)
def test_what_is_no_table_is_refused_with_what_would_be(rows: object) -> None:
    form = InputForm.of(read({"a": [1.0, 2.0], "t": ["p", "q"], "label": [0, 1]}))
    with pytest.raises(
        HyperkronError, match=r"rows is a .*; give a DataFrame, such as pandas.DataFrame\(rows\), a dict"
    ):
        form.read(rows)


def test_a_text_alone_is_no_path() -> None:
    form = InputForm.of(read({"text": ["a b", "c d"], "label": [0, 1]}))
    with pytest.raises(HyperkronError, match=r"rows='to be' is not a path that exists; give a single text as a list"):
        form.read("to be")
    assert form.read(["to be"]).inputs == ["to be"]


def test_a_part_of_a_folder_whose_name_has_a_space(tmp_path: Path) -> None:
    folder = tmp_path / "my data"
    folder.mkdir()
    (folder / "label.json").write_text('{"0": "no", "1": "yes"}')
    for part in ("train", "test"):
        row = {"label": 0, "weak_labels": [1], "data": {"text": f"of {part}"}}
        (folder / f"{part}.json").write_text(json.dumps({"0": row}))
    form = InputForm.of(read({"text": ["a b", "c d"], "label": [0, 1]}))
    assert form.read(f"{folder}:test").inputs == ["of test"]


def test_columns_called_x_and_y_are_columns() -> None:
    form = InputForm.of(read({"x": [1.0, 2.0, 4.0], "y": [5.0, 6.0, 9.0], "label": ["a", "b", "a"]}))
    for rows in ({"x": [3.0], "y": [7.0]}, {"x": [3.0], "y": [7.0], "label": ["a"]}):
        assert form.read(rows).inputs.tolist() == [[3.0, 7.0]]
    form = InputForm.of(read({"x": [1.0, 2.0, 4.0], "z": [5.0, 6.0, 9.0], "label": ["a", "b", "a"]}))
    assert form.read({"z": [7.0], "x": [3.0]}).inputs.tolist() == [[3.0, 7.0]]
    form = InputForm.of(read({"text": ["a b", "c d"], "x": ["i", "j"], "label": ["a", "b"]}, text="text"))
    assert form.read({"x": ["k"], "text": ["e f"]}).inputs == ["e f"]
    assert form.read({"x": ["e f"]}).inputs == ["e f"]


def test_columns_of_any_names_are_taken_by_their_places_where_training_rows_had_none() -> None:
    form = InputForm.of(read({"x": np.arange(8.0).reshape(4, 2), "y": ["a", "b", "a", "b"]}))
    columns = {"u": [3.0, 4.0], "v": [True, False]}
    for rows in (columns, pandas.DataFrame(columns)):
        assert form.read(rows).inputs.tolist() == [[3.0, 1.0], [4.0, 0.0]]
    with pytest.raises(HyperkronError, match=r"rows is a DataFrame of type .*, not of numbers"):
        form.read(pandas.DataFrame({"u": [3.0], "v": ["p"]}))
    with pytest.raises(HyperkronError, match="rows has a column 'label', but the training rows had no names"):
        form.read({"label": [0, 1], **columns})  # else the label would be the first feature
