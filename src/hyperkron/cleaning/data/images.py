"""Pictures of one shape, decoded from files or from bytes."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hyperkron.cleaning.data.files import inside, listing, np, several
from hyperkron.cleaning.data.limits import ReadOptions
from hyperkron.cleaning.data.values import Array, is_missing
from hyperkron.solution import HyperkronError
from hyperkron.validation import need

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Of image files."""
_DECODERS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # none that starts another program is among them
_GREY = frozenset({"1", "L", "LA", "I;16", "I;16B"})
_SEE_THROUGH = frozenset({"LA", "La", "PA", "RGBA", "RGBa"})
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # of EXIF's orientations the PIL.Image.Transpose that undoes each
_FAINT = 2**14  # pictures of 16 bits that stay below it have fewer than 64 of the 256 grey levels
_SIDE = 64  # pictures of different sizes are scaled to at most this


def open_image(value: Any, folder: Path | None, where: str, max_pixels: int) -> Any:
    """A picture whose header is read and whose pixels are not; any error but ours means that it cannot be used."""
    image = need("PIL.Image")
    if isinstance(value, dict):  # how Hugging Face stores a picture
        value = value.get("bytes") or value.get("path")
    if is_missing(value):
        raise OSError("no image is named")
    if isinstance(value, bytes):
        source: Any = io.BytesIO(value)
    elif isinstance(value, str):
        source = Path(value) if folder is None else inside(folder, value, where)
        if not source.is_file():  # a pipe or a device is none, and would never end
            raise OSError("there is no such file")
    else:
        raise OSError(f"it is a {type(value).__name__}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", image.DecompressionBombWarning)  # the limit below is the one that counts
        try:
            opened = image.open(source, formats=_DECODERS)
            width, height = opened.size
            size = f"{width} × {height} pixels" if width * height > max_pixels else ""
        except image.DecompressionBombError as error:
            size = str(error)
    if size:
        name = repr(value[:200]) if isinstance(value, str) else "an embedded image"
        raise HyperkronError(
            f"{where}: {name} is too large to be decoded safely ({size}; max_pixels={max_pixels}). Remove it, or pass "
            "ReadOptions(max_pixels=...) if you trust it."
        )
    return opened


def _turn(opened: Any) -> int | None:
    """How a picture is to be turned to stand upright, as cameras note it; TIFF is turned by its decoder."""
    try:
        return None if opened.format == "TIFF" else _TURNS.get(opened.getexif().get(0x0112, 1))
    except Exception:  # a damaged note says nothing of the pixels
        return None


def _pixels(opened: Any, shape: tuple[int, ...]) -> Array:
    """The picture as uint8 (C, H, W), upright, and on white where it is transparent."""
    image = need("PIL.Image")
    turn = _turn(opened)
    if opened.mode.startswith("I;16"):
        opened = image.fromarray((np.asarray(opened) >> 8).astype(np.uint8))
    elif opened.mode in ("I", "F"):
        raise OSError("its pixels have 32 bits")
    if opened.mode in _SEE_THROUGH or "transparency" in opened.info:
        opened = opened.convert("RGBA")
        opened = image.alpha_composite(image.new("RGBA", opened.size, "white"), opened)
    picture = opened.convert("L" if shape[0] == 1 else "RGB")
    picture = picture if turn is None else picture.transpose(turn)
    if picture.size != (shape[2], shape[1]):
        picture = picture.resize((shape[2], shape[1]), image.Resampling.BILINEAR)
    found = np.asarray(picture, dtype=np.uint8)
    return found[None] if shape[0] == 1 else found.transpose(2, 0, 1)


def load_images(
    values: Sequence[Any],
    folder: Path | None,
    where: str,
    options: ReadOptions,
    shape: tuple[int, ...] | None = None,
) -> tuple[Array, Array, list[str]]:
    """Pictures of one shape, uint8 (N, C, H, W); which of them could not be read; and messages.

    ``values`` are bytes, or paths relative to ``folder``, which none may leave; without a folder they are the caller's
    own and may lead anywhere. ``shape`` is (C, H, W), None to choose it by what is there.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    modes: set[str] = set()
    deep: list[int] = []
    broken: dict[int, str] = {}

    def each(use: Callable[[int, Any], None]) -> None:
        for i, value in enumerate(values):
            try:
                if i not in broken:
                    with open_image(value, folder, where, options.max_pixels) as opened:
                        use(i, opened)
            except HyperkronError:
                raise
            except Exception as error:  # decoders of hostile bytes raise nearly anything
                broken[i] = str(error)[:80]
        if len(broken) == len(values):
            raise HyperkronError(f"{where}: none of the {len(values)} images can be read: {_reasons(values, broken)}.")

    def look(i: int, opened: Any) -> None:
        sizes[opened.size[::-1] if (_turn(opened) or 0) in (2, 4, 5, 6) else opened.size] += 1
        modes.add(opened.mode)

    each(look)
    notes: list[str] = []
    if shape is None:
        shape, notes = _choose_shape(sizes, modes <= _GREY, where, options)
    if len(values) * int(np.prod(shape)) > options.max_bytes:
        raise HyperkronError(
            f"{where}: {len(values)} images of shape {shape} need more than max_bytes={options.max_bytes}; pass a "
            "smaller ReadOptions(image_size=...), or a larger max_bytes."
        )
    pictures = np.zeros((len(values), *shape), dtype=np.uint8)

    def decode(i: int, opened: Any) -> None:
        pictures[i] = _pixels(opened, shape)
        deep.extend([int(np.max(opened))] if opened.mode.startswith("I;16") else [])

    each(decode)
    if broken:
        which = "its row is" if len(broken) == 1 else "their rows are"
        notes.append(
            f"{where}: {several(len(broken), 'image')} cannot be read, so {which} not used: {_reasons(values, broken)}."
        )
    if deep and max(deep) < _FAINT:
        notes.append(
            f"{where}: the images of 16 bits hold values up to {max(deep)} of 65535, and become {max(deep) // 256 + 1} "
            "of 256 grey levels; scale them to 0 to 65535."
        )
    return pictures, np.isin(np.arange(len(values)), list(broken)), notes


def _reasons(values: Sequence[Any], broken: dict[int, str]) -> str:
    def name(i: int) -> str:
        return repr(values[i][:80]) if isinstance(values[i], str) else f"row {i}"

    return listing(f"{name(i)} ({reason})" for i, reason in sorted(broken.items()))


def _choose_shape(
    sizes: Counter[tuple[int, int]], grey: bool, where: str, options: ReadOptions
) -> tuple[tuple[int, ...], list[str]]:
    channels = 1 if grey else 3
    if options.image_size is not None:
        return (channels, options.image_size, options.image_size), []
    if len(sizes) == 1:
        ((width, height),) = sizes
        return (channels, height, width), []
    shorter = sorted(min(size) for size in sizes.elements())
    side = min(_SIDE, shorter[len(shorter) // 2])
    shown = listing(f"{width}×{height}" for (width, height), _ in sizes.most_common())
    note = f"{where}: images of {len(sizes)} sizes ({shown}) are scaled to {side}×{side}; image_size sets another side."
    return (channels, side, side), [note]
