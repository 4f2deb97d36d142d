"""Read the images of a sequence: patches, their layout, and the positions of its tokens.

numpy only. Axes: T tokens of a sequence.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32

from areal_jax.image_files import ImageFile, decode_image
from areal_jax.models.vision.config import VisionConfig
from areal_jax.models.vision.image_processor import ImagePatches, ImageProcessor
from areal_jax.models.vision.layout import patch_layout, rope_positions
from areal_jax.records import SequenceImages

CACHED_BYTES = 512 * 2**20
"""Patches of the last images that are kept, in bytes."""


class ImageReader:
    """Preprocesses the images of a vision-language policy; the last ones are cached."""

    def __init__(self, processor: ImageProcessor, vision: VisionConfig):
        """Check that processor and tower agree.

        Raises:
            ValueError: they have other patches.
        """
        sizes = (
            (processor.patch_size, vision.patch_size),
            (processor.merge_size, vision.spatial_merge_size),
            (processor.temporal_patch_size, vision.temporal_patch_size),
        )
        if any(own != of_tower for own, of_tower in sizes):
            raise ValueError(
                "expected patch_size, merge_size and temporal_patch_size of the image processor to "
                f"equal those of vision_config, found {', '.join(map(str, sizes))}"
            )
        self.processor, self.vision = processor, vision
        self._cached, self._num_bytes = OrderedDict[bytes, ImagePatches](), 0
        # Rollouts, engine and trainer of one process share a reader.
        self._lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path, vision: VisionConfig) -> ImageReader:
        """Read the image processor of a policy's folder; errors as `ImageProcessor.from_folder`."""
        return cls(ImageProcessor.from_folder(folder), vision)

    def num_tokens(self, file: ImageFile) -> int:
        """Number of tokens of an image in a prompt.

        Raises:
            ValueError: the image cannot be read.
        """
        image = decode_image(file)
        return self.processor.num_tokens(self.processor.grid(image.height, image.width))

    def patches(self, file: ImageFile) -> ImagePatches:
        """Return a preprocessed image.

        Raises:
            ValueError: the image cannot be read.
        """
        key = image_key(file)
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return self._cached[key]
        made = self.processor(decode_image(file))
        with self._lock:
            if key not in self._cached:
                self._cached[key] = made
                self._num_bytes += made.patches.nbytes
            while self._num_bytes > CACHED_BYTES and len(self._cached) > 1:
                self._num_bytes -= self._cached.popitem(last=False)[1].patches.nbytes
        return made

    def read(self, files: Sequence[ImageFile], tokens: Int32[np.ndarray, "T"]) -> SequenceImages:
        """Read the images of a sequence, whose tokens are the first image tokens.

        An image token that the policy samples after them is text.

        Raises:
            ValueError: an image cannot be read, or the sequence has fewer tokens of images.
        """
        images = [self.patches(file) for file in files]
        grids, merge = [image.grid for image in images], self.vision.spatial_merge_size
        is_image = tokens == self.vision.image_token_id
        is_image &= np.cumsum(is_image) <= sum(map(self.processor.num_tokens, grids))
        nothing = np.zeros((0, self.vision.patch_width), np.float32)
        return SequenceImages(
            np.concatenate([nothing, *(image.patches for image in images)]),
            patch_layout(grids, merge),
            is_image,
            rope_positions(is_image, grids, merge),
        )


def image_key(file: ImageFile) -> bytes:
    """Return a digest of the content of an image file."""
    return hashlib.blake2b(file, digest_size=16).digest()
