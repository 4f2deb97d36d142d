"""Sources of images, and their decoding."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from areal_jax.image_files import MAX_PIXELS, decode_image, read_image, thumbnail_uri


def _gray(height: int, width: int) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width), np.uint8)
    return Image.fromarray(pixels)


def test_images_are_read_from_every_kind_of_source(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    _gray(20, 30).save(buffer, "PNG")
    content = buffer.getvalue()
    (tmp_path / "image.png").write_bytes(content)
    uri = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    for source in (content, uri, "image.png", {"bytes": content}, {"path": "image.png"}):
        assert read_image(source, tmp_path) == content
    assert decode_image(content).size == (30, 20)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("data:text/plain;base64,aGk=", "data:image/"),
        ("data:image/png;base64,a", "base64"),
        ("https://example.com/image.png", "found 'https://example"),
        ("image.png", "expected an image as bytes or a data URI"),
        (7, "found 7"),
    ],
)
def test_other_sources_are_refused(source: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_image(source)


def test_invalid_and_huge_images_are_refused() -> None:
    buffer = io.BytesIO()
    Image.new("1", (MAX_PIXELS // 8192 + 1, 8192)).save(buffer, "PNG")
    with pytest.raises(ValueError, match="at most 67108864 pixels, found 8193 x 8192"):
        decode_image(buffer.getvalue())
    buffer = io.BytesIO()
    _gray(200, 300).save(buffer, "PNG")
    for content in (b"image", buffer.getvalue()[:1000]):
        with pytest.raises(ValueError, match=f"expected an image, found {len(content)} bytes"):
            decode_image(content)


def test_the_orientation_of_a_photo_is_applied() -> None:
    image = _gray(20, 30)
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by a quarter turn
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    assert decode_image(buffer.getvalue()).size == (20, 30)


def test_a_thumbnail_keeps_the_ratio_and_is_read_back() -> None:
    buffer = io.BytesIO()
    _gray(200, 1024).save(buffer, "PNG")
    # 1024 / 256 = 4, and 200 / 4 = 50.
    assert decode_image(read_image(thumbnail_uri(buffer.getvalue()))).size == (256, 50)
