"""Pictures as cameras, scanners and drawing programs write them: turned, transparent, of 16 bits, of other types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hyperkron.cleaning.data import InputForm, read

STRIPE = np.repeat(np.array([[255], [40], [40], [40]], dtype=np.uint8), 8, axis=1).repeat(
    4, axis=0
)  # 16 × 8, top white


def _folder(folder: Path, *pictures: Any, suffix: str = ".png", **how: Any) -> Path:
    for i, picture in enumerate(pictures):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        picture.save(folder / "ab"[i % 2] / f"{i}{suffix}", **how)
    return folder


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
@pytest.mark.parametrize("turned", range(1, 9))
def test_pictures_stand_upright(turned: int, suffix: str, tmp_path: Path) -> None:
    """As a camera held another way writes them: the pixels turned, and a note of how."""
    undo = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[turned]  # PIL.Image.Transpose
    pixels = STRIPE - 4 * np.arange(8, dtype=np.uint8)  # darker to the right
    straight = Image.fromarray(pixels)
    note = Image.Exif()
    note[0x0112] = turned
    lying = straight if undo is None else straight.transpose(Image.Transpose(undo))
    packed = {"compression": "tiff_lzw"} if suffix == ".tif" else {}
    folder = _folder(tmp_path, lying, suffix=suffix, exif=note, **packed)
    _folder(folder / "b", straight)
    (folder / "b" / "a").rename(folder / "b" / "whole")
    found = read(folder)
    assert found.inputs.shape[2:] == (16, 8)
    for picture in found.inputs:
        assert np.abs(picture.astype(int) - pixels).max() < 6  # JPEG is near
    assert not any("sizes" in message for message in found.messages)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pictures_are_what_is_seen_on_white(mode: str, tmp_path: Path) -> None:
    """Black letters on nothing have the same colours everywhere: they differ only in their opacity."""
    sheet = Image.merge("LA", [Image.new("L", (8, 16)), Image.fromarray(STRIPE)]).convert(
        "RGBA" if mode == "P" else mode
    )
    pictures = [sheet.quantize(4) if mode == "P" else sheet, sheet.convert("RGBA").rotate(180)]
    found = read(_folder(tmp_path, *pictures)).inputs
    assert np.abs(found[0].astype(int) - (255 - STRIPE)).max() <= 1
    assert np.abs(found[1].astype(int) - (255 - STRIPE[::-1])).max() <= 1


@pytest.mark.parametrize("scale", [1, 1 / 255])
def test_arrays_of_transparent_pictures(scale: float) -> None:
    x = np.zeros((2, 16, 8, 4))
    x[0, ..., 3], x[1, ..., :3], x[1, ..., 3] = STRIPE, 100, 255
    found = read({"x": x.astype(np.uint8) if scale == 1 else x * scale, "y": [0, 1]}).inputs
    assert (found[0] == 255 - STRIPE).all() and (found[1] == 100).all()


def test_dark_pictures_of_16_bits_are_told(tmp_path: Path) -> None:
    """Of 12 bits that a camera has in 16 only 16 grey levels are left."""
    deep = [Image.fromarray(STRIPE[::step].astype(np.uint16) * 16) for step in (1, -1)]
    (said,) = read(_folder(tmp_path / "dark", *deep)).messages
    assert "values up to 4080 of 65535, and become 16 of 256 grey levels; scale them" in said
    bright = [Image.fromarray(STRIPE[::step].astype(np.uint16) * 257) for step in (1, -1)]
    found = read(_folder(tmp_path / "bright", *bright))
    assert found.messages == () and (found.inputs[0, 0] == STRIPE).all()


def test_files_of_other_types_are_told(tmp_path: Path) -> None:
    folder = _folder(tmp_path, Image.fromarray(STRIPE), Image.fromarray(255 - STRIPE))
    (folder / "a" / "c.heic").write_bytes(b"a picture of a telephone")
    (folder / "top.png").write_bytes(b"in no class")
    (folder / "a" / ".hidden").write_bytes(b"")
    (said,) = read(folder).messages
    assert "2 files not read: 'a/c.heic', 'top.png'. Images are files of the types .png, " in said
    assert (
        "1 file not read: 'c.heic'"
        in InputForm("image", read(folder).roles, shape=(1, 4, 4)).read(folder / "a").messages[0]
    )
