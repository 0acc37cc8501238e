"""New rows to predict: folders of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hyperkron.cleaning.data import InputForm
from hyperkron.cleaning.data.labelled import Roles

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


def test_an_image_that_cannot_be_read_among_folders_of_classes(tmp_path: Path) -> None:
    write(tmp_path / "cat" / "b.png", tmp_path / "dog" / "c.png")
    (tmp_path / "cat" / "a.png").write_text("broken")
    found = FORM.read(tmp_path)
    assert found.rows.tolist() == [1, 2] and found.count == 3  # as the rows of the source are numbered
    assert found.ids == {"file": ["", "cat/b.png", "dog/c.png"]}
    assert "1 image cannot be read" in found.messages[0]
