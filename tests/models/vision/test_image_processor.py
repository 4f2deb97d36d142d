"""Image preprocessing against transformers, and the sources of images."""

import base64
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image
from sampled_images import sample_image

from areal_jax.models.vision.image_processor import (
    MAX_PIXELS,
    ImageProcessor,
    decode_image,
    read_image,
    smart_resize,
)

FIXTURE = Path(__file__).parent.parent / "parity_vision" / "images.json"


def test_patches_equal_those_of_transformers_bit_for_bit() -> None:
    records = json.loads(FIXTURE.read_text())
    assert len({record["mode"] for record in records}) == 7
    pillow = "13" if int(PIL.__version__.split(".")[0]) >= 13 else "11"
    for record in records:
        image = sample_image(record["seed"], record["mode"], *record["size"])
        patches, grid = ImageProcessor.from_hf(record["settings"], "a test")(image)
        assert [1, *grid] == record["grid"], record
        assert hashlib.sha256(patches.tobytes()).hexdigest() == record["sha256"][pillow]


def test_sizes_keep_to_the_bounds_and_the_ratio() -> None:
    rng = np.random.default_rng(0)
    for height, width in rng.integers(28, 3000, (200, 2)).tolist():
        new = smart_resize(height, width, 28, 28 * 28 * 16, 28 * 28 * 1280)
        assert new[0] % 28 == 0 == new[1] % 28
        assert 28 * 28 * 16 <= new[0] * new[1] <= 28 * 28 * 1280
        # Each side is rounded by less than 28 pixels.
        assert abs(new[0] * width - new[1] * height) <= 28 * (width + height)
    # 42 / 28 = 1.5 and 70 / 28 = 2.5 both round to 2.
    assert smart_resize(42, 70, 28, 1, 10**6) == (56, 56)


def test_an_extreme_ratio_is_refused() -> None:
    with pytest.raises(ValueError, match="200 times the shorter one, found 2010 x 10 pixels"):
        ImageProcessor()(Image.new("RGB", (2010, 10)))


def test_one_token_is_a_square_of_patches() -> None:
    # An image of 2 x 4 patches, each of one gray: tokens are the left and the right square.
    grays = np.arange(8, dtype=np.uint8).reshape(2, 4)
    pixels = np.repeat(np.repeat(grays, 2, axis=0), 2, axis=1)
    processor = ImageProcessor(
        patch_size=2, min_pixels=1, image_mean=(0.0,) * 3, image_std=(1.0,) * 3, rescale_factor=1.0
    )
    patches, grid = processor(Image.fromarray(pixels))
    assert grid == (2, 4)
    assert patches.shape == (8, 3 * 2 * 2 * 2)
    assert patches.max(axis=1).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert processor.num_tokens(grid) == 2


def test_settings_are_read_from_both_files_of_transformers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json or processor_config"):
        ImageProcessor.from_folder(tmp_path)
    size = {"shortest_edge": 1000, "longest_edge": 2000}
    nested = {"image_processor": {"size": size, "patch_size": 16}, "processor_class": "x"}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    read = ImageProcessor.from_folder(tmp_path)
    assert (read.min_pixels, read.max_pixels, read.patch_size) == (1000, 2000, 16)
    older = {"min_pixels": 3000, "size": size, "resample": 3, "do_resize": True}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(older))
    assert ImageProcessor.from_folder(tmp_path).min_pixels == 3000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resample": 2}, "resample=2"),
        ({"do_resize": False}, "do_resize=False"),
        ({"do_center_crop": True}, "do_center_crop=True"),
        ({"sharpen": 1}, "sharpen=1"),
        ({"image_processor_type": "CLIPImageProcessor"}, "CLIPImageProcessor"),
    ],
)
def test_unsupported_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ImageProcessor.from_hf(settings, "a test")


def test_images_are_read_from_every_kind_of_source(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    sample_image(0, "RGB", 20, 30).save(buffer, "PNG")
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
    sample_image(0, "RGB", 200, 300).save(buffer, "PNG")
    for content in (b"image", buffer.getvalue()[:1000]):
        with pytest.raises(ValueError, match=f"expected an image, found {len(content)} bytes"):
            decode_image(content)


def test_the_orientation_of_a_photo_is_applied() -> None:
    image = sample_image(1, "RGB", 20, 30)
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by a quarter turn
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    assert decode_image(buffer.getvalue()).size == (20, 30)
