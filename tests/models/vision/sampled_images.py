"""Random images, the same in the tests and in the fixtures that transformers made."""

from __future__ import annotations

import numpy as np
from PIL import Image

MODES = ("RGB", "RGBA", "L", "LA", "P", "1", "CMYK")


def sample_image(seed: int, mode: str, height: int, width: int) -> Image.Image:
    """Sample smooth colors with noise, opaque or not."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (1 + height // 8, 1 + width // 8, 4))
    fine = np.repeat(np.repeat(coarse, 8, axis=0), 8, axis=1)[:height, :width]
    noise = rng.integers(-30, 31, fine.shape)
    image = Image.fromarray(np.clip(fine + noise, 0, 255).astype(np.uint8), "RGBA")
    if mode in ("RGBA", "LA"):
        return image.convert(mode)
    image = image.convert("RGB")
    if mode != "P":
        return image.convert(mode)
    image = image.quantize(16)
    image.info["transparency"] = seed % 16
    return image
