"""Image preprocessing of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, equal to transformers' pixel for pixel.

Axes: P patches of an image, C channels · frames · height · width of a patch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from areal_jax.json_files import read_json

_FILES = ("preprocessor_config.json", "processor_config.json")

_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")

_HARMLESS = {
    # Videos, outputs of transformers, and origin of the file.
    *("processor_class", "feature_extractor_type", "data_format", "input_data_format", "device"),
    *("return_tensors", "disable_grouping", "video_processor_type", "image_seq_length"),
    *("min_frames", "max_frames", "fps", "_processor_class", "default_to_square", "backend"),
}

_ONLY = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"), True),
    **dict.fromkeys(("do_center_crop", "do_pad", "crop_size", "pad_size"), None),
    "resample": Image.Resampling.BICUBIC,
}


class ImageGrid(NamedTuple):
    """Number of patches of an image."""

    height: int
    width: int


class ImagePatches(NamedTuple):
    """A preprocessed image."""

    patches: Float32[np.ndarray, "P C"]
    """In order of the squares of merge_size · merge_size patches that become one token."""
    grid: ImageGrid


@dataclass(frozen=True)
class ImageProcessor:
    """Preprocessing of images; fields as in Hugging Face's preprocessor_config.json."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    """Number of frames of a patch; those of an image are equal."""
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    image_mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255

    @classmethod
    def from_folder(cls, folder: Path) -> ImageProcessor:
        """Read preprocessor_config.json, or processor_config.json of transformers 5.

        Raises:
            FileNotFoundError: the folder has neither.
            ValueError: a setting is not supported.
        """
        for file in (folder / name for name in _FILES):
            if file.is_file():
                config = read_json(file)
                return cls.from_hf(config.get("image_processor", config), str(file))
        raise FileNotFoundError(
            f"expected {' or '.join(_FILES)} in {folder}, which a policy that reads images needs; "
            "set policy.path to a folder with one"
        )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> ImageProcessor:
        """Read the settings of an image processor.

        Args:
            config: content of the file.
            source: name of the file, for errors.

        Raises:
            ValueError: a setting is not supported.
        """
        kind = config.get("image_processor_type", _KINDS[0])
        if kind not in _KINDS:
            raise ValueError(
                f"{source}: expected image_processor_type to be one of {', '.join(_KINDS)}, found "
                f"{kind!r}"
            )
        settings = {name: value for name, value in config.items() if value is not None}
        size = settings.pop("size", {})
        names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
        sizes = {names.get(name, name): value for name, value in size.items() if value is not None}
        # In transformers the keys outside of size have precedence.
        settings = sizes | settings
        known = {*cls.__dataclass_fields__, *_HARMLESS, *_ONLY, "image_processor_type"}
        wrong = [name for name in settings if name not in known] + [
            name for name, value in _ONLY.items() if settings.get(name, value) not in (value, False)
        ]
        wrong += [name for name, value in _ONLY.items() if value and settings.get(name) is False]
        if wrong:
            raise ValueError(
                f"{source}: expected supported settings of an image processor, found "
                f"{', '.join(f'{name}={settings[name]!r}' for name in wrong)}"
            )
        values: dict[str, Any] = {
            name: tuple(map(float, value)) if isinstance(value, list) else value
            for name, value in settings.items()
            if name in cls.__dataclass_fields__
        }
        return cls(**values)

    def __call__(self, image: Image.Image) -> ImagePatches:
        """Convert to RGB, resize, normalize and cut into patches.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        grid = self.grid(image.height, image.width)
        size = grid.width * self.patch_size, grid.height * self.patch_size
        resized = Image.fromarray(_to_rgb(image)).resize(size, Image.Resampling.BICUBIC)
        # Of all 256 values, in the order and with the precision of transformers.
        values = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.array(each, np.float32) for each in (self.image_mean, self.image_std))
        table = ((values[:, None] - mean) / std).T
        pixels = np.stack(
            [row[channel] for row, channel in zip(table, _channels(resized), strict=True)]
        )
        merge, size = self.merge_size, self.patch_size
        squares = pixels.reshape(
            *(3, grid.height // merge, merge, size), *(grid.width // merge, merge, size)
        ).transpose(1, 4, 2, 5, 0, 3, 6)
        frames = np.repeat(squares[:, :, :, :, :, None], self.temporal_patch_size, axis=5)
        return ImagePatches(frames.reshape(grid.height * grid.width, -1), grid)

    def grid(self, height: int, width: int) -> ImageGrid:
        """Number of patches of an image of this size: a multiple of merge_size on each side.

        Raises:
            ValueError: one side is more than 200 times the other.
        """
        factor = self.patch_size * self.merge_size
        height, width = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return ImageGrid(height // self.patch_size, width // self.patch_size)

    def num_tokens(self, grid: ImageGrid) -> int:
        """Number of tokens of an image in a prompt."""
        return grid.height * grid.width // self.merge_size**2


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return the height and width, multiples of `factor`, to which an image is resized.

    The number of pixels is within the bounds, if both sides can be at least `factor`; the ratio of
    the sides is kept as far as possible.

    Raises:
        ValueError: one side is more than 200 times the other.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(
            f"expected an image whose longer side is at most 200 times the shorter one, found "
            f"{width} x {height} pixels"
        )
    # Ties go to the even multiple, as Python rounds.
    rounded = round(height / factor) * factor, round(width / factor) * factor
    if math.prod(rounded) > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if math.prod(rounded) < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        return (
            math.ceil(height * grow / factor) * factor,
            math.ceil(width * grow / factor) * factor,
        )
    return rounded


def _to_rgb(image: Image.Image) -> UInt8[np.ndarray, "h w 3"]:
    """Convert to RGB; transparent pixels are put on white."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(background, image)
    return np.array(image.convert("RGB"))


def _channels(image: Image.Image) -> UInt8[np.ndarray, "3 h w"]:
    return np.moveaxis(np.array(image), -1, 0)
