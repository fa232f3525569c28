"""Reads one image of any mode and shape as the mode and size a model takes.

Shapes: C channels.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageOps

Mode = Literal["L", "RGB", "RGBA"]

CHANNELS: dict[Mode, int] = {"L": 1, "RGB": 3, "RGBA": 4}
"""Channels of the modes a model can take: grey, colour, colour with transparency."""

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def convert_mode(image: Image.Image, mode: Mode) -> Image.Image:
    """Turn an image upright (EXIF) and convert it to `mode`: "L", "RGB" or "RGBA".

    16-bit grey is scaled to 8 bits (Pillow's own conversion would cut it off). Where the model takes no transparency,
    transparent parts are laid over white, as a viewer shows them.

    Raises:
        ValueError: pixels whose range is unknown: floating point, or 32-bit values beyond 16 bits.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode == "F":
        raise ValueError("its pixels are floating point, so that black and white are unknown; save it with 8 bits")
    if image.mode.startswith("I"):
        pixels = np.asarray(image).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError(f"its pixels reach from {pixels.min()} to {pixels.max()}; save it with 8 or 16 bits")
        transparent = image.info.get("transparency")  # of one grey level, in 16 bits
        image = Image.fromarray(np.round(pixels / 257).astype(np.uint8))
        if transparent is not None:
            image.putalpha(Image.fromarray(np.where(pixels == transparent, 0, 255).astype(np.uint8)))
    if "transparency" in image.info or image.mode in ("LA", "PA", "RGBa"):
        image = image.convert("RGBA")
    if image.mode == "RGBA" and mode != "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(mode)


def fit(image: Image.Image, size: tuple[int, int], interpolation: str) -> Image.Image:
    """Resize an image so that it covers `size` (height, width), and cut off what stands over, equally on both sides."""
    if image.size == (size[1], size[0]):
        return image
    return ImageOps.fit(image, (size[1], size[0]), method=INTERPOLATIONS[interpolation])


class ImageError(ValueError):
    """An image that can't be read; the message names it and says why."""


def read(name: str, opener: Callable[[], Image.Image], mode: Mode) -> Image.Image:
    """Open and convert an image, with one kind of error for all that can be wrong with it.

    Args:
        name: what the message calls the image.
        opener: returns the image.
        mode: as `convert_mode`.

    Raises:
        ImageError: it is truncated, no image, too large, unreadable or of a mode that `convert_mode` refuses.
    """
    try:
        return convert_mode(opener(), mode)
    # Pillow raises SyntaxError, ValueError or EOFError for some broken files, struct.error for a cut-off EXIF block.
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError) as error:
        raise ImageError(f"{name}: {error}") from error


def open_file(path: str | Path) -> Image.Image:
    """Open and decode an image file, and close it."""
    with Image.open(path) as image:
        image.load()
        return image
