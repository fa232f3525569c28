"""Checks the reading of images: pixel values after conversion from every mode, cropping, and faults named by file."""

import struct
import zlib
from functools import partial
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from vit_scratch.data.images import CHANNELS, ImageError, convert_mode, fit, open_file, read

WHITE = (255, 255, 255)
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def row(mode, *pixels):
    """An image of one row."""
    image = Image.new(mode, (len(pixels), 1))
    for i, pixel in enumerate(pixels):
        image.putpixel((i, 0), pixel)
    return image


def palette(**save):
    """An image of the colours red, green and blue by palette, as a PNG file has it."""
    image = row("P", 0, 1, 2)
    image.putpalette([*RED, *GREEN, *BLUE])
    file = BytesIO()
    image.save(file, "png", **save)
    return Image.open(file)


def pixels(image):
    return [image.getpixel((x, 0)) for x in range(image.width)]


# ITU-R 601 luma with the weights 19595, 38470 and 7471 of 65536: red 76, green 150, blue 29.
CONVERSIONS = {
    "1": (lambda: row("1", 0, 255), [0, 255], [(0, 0, 0), WHITE], [(0, 0, 0, 255), (*WHITE, 255)]),
    "L": (lambda: row("L", 0, 100, 255), [0, 100, 255], [(0,) * 3, (100,) * 3, WHITE], None),
    "LA": (
        lambda: row("LA", (100, 255), (100, 0), (100, 51)),
        [100, 255, 224],  # 0.2 * 100 + 0.8 * 255
        [(100,) * 3, WHITE, (224,) * 3],
        [(100, 100, 100, 255), (100, 100, 100, 0), (100, 100, 100, 51)],
    ),
    "P": (palette, [76, 150, 29], [RED, GREEN, BLUE], [(*RED, 255), (*GREEN, 255), (*BLUE, 255)]),
    "P with one transparent colour": (
        partial(palette, transparency=1),
        [76, 255, 29],
        [RED, WHITE, BLUE],
        [(*RED, 255), (*GREEN, 0), (*BLUE, 255)],
    ),
    "P with a transparency for each colour": (
        partial(palette, transparency=bytes([255, 0, 51])),
        [76, 255, 210],
        [RED, WHITE, (204, 204, 255)],
        [(*RED, 255), (*GREEN, 0), (*BLUE, 51)],
    ),
    "RGB": (lambda: row("RGB", RED, GREEN, BLUE), [76, 150, 29], [RED, GREEN, BLUE], None),
    "RGBA": (
        lambda: row("RGBA", (10, 20, 30, 255), (10, 20, 30, 0), (10, 20, 30, 51)),
        [18, 255, 208],
        [(10, 20, 30), WHITE, (206, 208, 210)],
        [(10, 20, 30, 255), (10, 20, 30, 0), (10, 20, 30, 51)],
    ),
    "CMYK": (
        lambda: row("CMYK", (0, 255, 255, 0), (255, 0, 255, 0), (0, 0, 0, 0), (0, 0, 0, 255), (0, 0, 0, 128)),
        [76, 150, 255, 0, 127],
        [RED, GREEN, WHITE, (0, 0, 0), (127, 127, 127)],
        None,
    ),
    "YCbCr": (  # R = Y + 1.402 (Cr - 128) and so on
        lambda: row("YCbCr", (76, 85, 255), (90, 128, 128)),
        [76, 90],
        [(254, 0, 0), (90, 90, 90)],
        None,
    ),
}


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_each_mode_converts_to_hand_computed_pixels(name, mode):
    make, grey, rgb, rgba = CONVERSIONS[name]
    expected = {"L": grey, "RGB": rgb, "RGBA": rgba or [(*pixel, 255) for pixel in rgb]}[mode]
    converted = convert_mode(make(), mode)
    assert converted.mode == mode
    assert len(converted.getbands()) == CHANNELS[mode]
    assert pixels(converted) == expected


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4"])
def test_sixteen_bits_scale_to_eight(dtype):
    values = [0, 128, 129, 257, 32768, 65278, 65535]
    image = Image.fromarray(np.array([values], dtype=dtype))
    assert image.mode.startswith("I")
    assert pixels(convert_mode(image, "L")) == [0, 0, 1, 1, 128, 254, 255]
    assert pixels(convert_mode(image, "RGB")) == [(v,) * 3 for v in (0, 0, 1, 1, 128, 254, 255)]


@pytest.mark.parametrize("ending", ["png", "tif", "pgm"])
def test_sixteen_bit_files_scale_to_eight(tmp_path, ending):
    path = tmp_path / f"grey.{ending}"
    if ending == "pgm":
        path.write_bytes(b"P5 3 1 65535\n" + np.array([0, 257, 65535], ">u2").tobytes())
    else:
        Image.fromarray(np.array([[0, 257, 65535]], np.uint16)).save(path)
    assert pixels(read(str(path), partial(open_file, path), "L")) == [0, 1, 255]


@pytest.mark.parametrize("values", [[0, 65536], [-1, 5]])
def test_values_beyond_sixteen_bits_are_refused_with_their_range(values):
    image = Image.fromarray(np.array([values], np.int32))
    with pytest.raises(ValueError, match=f"reach from {min(values)} to {max(values)}.*8 or 16 bits"):
        convert_mode(image, "L")


def test_floating_point_is_refused():
    with pytest.raises(ValueError, match="floating point"):
        convert_mode(Image.fromarray(np.array([[0.5]], np.float32)), "L")


@pytest.mark.parametrize(("mode", "colours", "key"), [("L", (7, 9), 7), ("RGB", ((7, 8, 9), (1, 2, 3)), (7, 8, 9))])
def test_the_transparent_colour_of_a_png_becomes_white(mode, colours, key):
    file = BytesIO()
    row(mode, *colours).save(file, "png", transparency=key)
    converted = pixels(convert_mode(Image.open(file), "RGB"))
    kept = colours[1] if mode == "RGB" else (colours[1],) * 3
    assert converted == [WHITE, kept]


def test_the_transparent_grey_of_a_sixteen_bit_png_becomes_white():
    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 3, 1, 16, 0, 0, 0, 0)
    scanline = b"\0" + np.array([0, 1000, 65535], ">u2").tobytes()
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"tRNS", struct.pack(">H", 1000))
    png += chunk(b"IDAT", zlib.compress(scanline)) + chunk(b"IEND", b"")
    assert pixels(convert_mode(Image.open(BytesIO(png)), "L")) == [0, 255, 255]


UPRIGHT = {  # by the value of the EXIF orientation, for the stored blocks [[0, 50, 100], [150, 200, 250]]
    1: [[0, 50, 100], [150, 200, 250]],
    2: [[100, 50, 0], [250, 200, 150]],
    3: [[250, 200, 150], [100, 50, 0]],
    4: [[150, 200, 250], [0, 50, 100]],
    5: [[0, 150], [50, 200], [100, 250]],
    6: [[150, 0], [200, 50], [250, 100]],
    7: [[250, 100], [200, 50], [150, 0]],
    8: [[100, 250], [50, 200], [0, 150]],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_exif_orientation_is_applied(tmp_path, orientation):
    blocks = np.kron(np.array(UPRIGHT[1], np.uint8), np.ones((8, 8), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(blocks).save(tmp_path / "turned.jpg", quality=100, exif=exif)
    image = read("turned.jpg", partial(open_file, tmp_path / "turned.jpg"), "L")
    expected = np.array(UPRIGHT[orientation])
    assert image.size == (8 * expected.shape[1], 8 * expected.shape[0])
    np.testing.assert_allclose(np.asarray(image).astype(int), np.kron(expected, np.ones((8, 8))), atol=1)


def test_an_image_of_the_right_size_is_left_alone():
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    assert fit(image, (3, 4), "bicubic") is image


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("shape", "size", "expected"),
    [
        ((2, 4), (2, 2), np.s_[:, 1:3]),
        ((6, 2), (2, 2), np.s_[2:4, :]),
        ((3, 9), (3, 5), np.s_[:, 2:7]),
    ],
)
def test_fit_cuts_off_equally_on_both_sides(shape, size, expected, interpolation):
    values = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    fitted = fit(Image.fromarray(values), size, interpolation)
    np.testing.assert_array_equal(np.asarray(fitted), values[expected])


def test_fit_enlarges_nearest_pixels_by_hand():
    fitted = fit(Image.fromarray(np.array([[1, 2], [3, 4]], np.uint8)), (4, 4), "nearest")
    assert np.asarray(fitted).tolist() == [[1, 1, 2, 2], [1, 1, 2, 2], [3, 3, 4, 4], [3, 3, 4, 4]]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("nearest", Image.Resampling.NEAREST),
        ("bilinear", Image.Resampling.BILINEAR),
        ("bicubic", Image.Resampling.BICUBIC),
    ],
)
@pytest.mark.parametrize(
    ("shape", "size", "box"),
    [  # box: left, upper, right, lower
        ((8, 16), (4, 4), (4, 0, 12, 8)),
        ((20, 10), (5, 5), (0, 5, 10, 15)),
        ((6, 8), (12, 16), (0, 0, 8, 6)),
        ((12, 10), (6, 4), (1, 0, 9, 12)),
    ],
)
def test_fit_equals_pillows_crop_and_resize(name, method, shape, size, box):
    values = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
    image = Image.fromarray(values)
    expected = image.resize((size[1], size[0]), method, box=box)
    np.testing.assert_array_equal(np.asarray(fit(image, size, name)), np.asarray(expected))


def damaged(kind):
    file = BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3)).astype(np.uint8)
    if kind.startswith("truncated"):
        Image.fromarray(noise).save(file, kind.split()[1])
    data = file.getvalue()
    return {
        "empty file": b"",
        "text": b"this is no picture\n" * 20,
        "JPEG signature alone": b"\xff\xd8\xff\xe0",
        "PNG signature alone": b"\x89PNG\r\n\x1a\n",
    }.get(kind, data[: len(data) * 6 // 10])


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
@pytest.mark.parametrize(
    "kind",
    [
        "truncated jpeg",
        "truncated png",
        "truncated webp",
        "truncated tiff",
        "truncated bmp",
        "truncated ppm",
        "empty file",
        "text",
        "JPEG signature alone",
        "PNG signature alone",
    ],
)
def test_a_damaged_file_is_an_image_error_that_names_it(tmp_path, kind, mode):
    path = tmp_path / "cat 7.jpg"
    path.write_bytes(damaged(kind))
    with pytest.raises(ImageError, match=r"cat 7\.jpg: .+") as caught:
        read(str(path), partial(open_file, path), mode)
    assert str(path) in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.parametrize("ending", ["png", "webp"])
@pytest.mark.parametrize("length", [1, 4, 7, 8, 12, 20])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_cut_off_exif_block_is_no_other_kind_of_error(tmp_path, ending, length):
    block = b"II*\0\x08\0\0\0" + b"\x01\0" + b"\x12\x01\x03\0\x01\0\0\0\x06\0\0\0" + b"\0\0\0\0"
    path = tmp_path / f"cut.{ending}"
    Image.new("RGB", (3, 2), RED).save(path, exif=b"Exif\0\0" + block[:length])
    try:
        outcome = str(sorted(read(str(path), partial(open_file, path), "RGB").size))
    except ImageError as error:
        outcome = str(error)
    assert outcome == "[2, 3]" or outcome.startswith(f"{path}: ")


@pytest.mark.parametrize(
    ("name", "opener"),
    [
        ("missing.png", partial(open_file, "missing.png")),
        ("image 5", partial(Image.fromarray, np.zeros((2, 2), np.float32))),
        ("image 6", partial(Image.fromarray, np.full((1, 1), 70000, np.int32))),
    ],
)
def test_missing_and_unknown_pixels_are_image_errors(name, opener):
    with pytest.raises(ImageError, match=f"^{name}: "):
        read(name, opener, "L")


def test_an_image_beyond_pillows_limit_is_an_image_error(tmp_path, monkeypatch):
    Image.new("L", (8, 8)).save(tmp_path / "huge.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ImageError, match=r"huge\.png: .*64 pixels"):
        read("huge.png", partial(open_file, tmp_path / "huge.png"), "L")


def test_a_file_is_closed_after_reading(tmp_path):
    Image.new("L", (2, 1), 9).save(tmp_path / "small.png")
    image = open_file(tmp_path / "small.png")
    assert image.fp is None or image.fp.closed
    assert pixels(image) == [9, 9]
