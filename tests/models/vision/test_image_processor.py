"""Image preprocessing against transformers."""

import hashlib
import json
from pathlib import Path

import numpy as np
import PIL
import pytest
from PIL import Image
from sampled_images import sample_image

from areal_jax.models.vision.image_processor import ImageProcessor, smart_resize

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
