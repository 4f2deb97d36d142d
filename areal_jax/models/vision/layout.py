"""Layout of images in rows of tokens: positions of M-RoPE, and the inputs of the tower.

numpy only. Axes: T tokens of a sequence, P patches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int32

from areal_jax.models.vision.image_processor import ImageGrid


def rope_positions(
    is_image: Bool[np.ndarray, "T"], grids: Sequence[ImageGrid], merge_size: int
) -> Int32[np.ndarray, "T 3"]:
    """Return time, row and column of every token (M-RoPE, arXiv:2409.12191).

    They are equal in text, and count from the largest position so far. A token of an image has the
    time of its first token, and row and column of its square of patches from there. A later text
    token has its place in the sequence plus `rope_offset`.

    Args:
        is_image: whether each token stands for a square of patches of an image.
        grids: patches of the images, in order.
        merge_size: patches along each side of a square.

    Raises:
        ValueError: the images have more or fewer tokens.
    """
    positions = np.zeros((len(is_image), 3), np.int32)
    image_tokens = np.flatnonzero(is_image)
    sizes = [(grid.height // merge_size, grid.width // merge_size) for grid in grids]
    if len(image_tokens) != (expected := sum(height * width for height, width in sizes)):
        raise ValueError(
            f"expected {expected} tokens for {len(grids)} images, found {len(image_tokens)}"
        )
    start = following = used = 0
    for height, width in sizes:
        first = int(image_tokens[used])
        positions[start:first] = following + np.arange(first - start)[:, None]
        following += first - start
        rows, columns = np.divmod(np.arange(height * width), width)
        square = np.stack([np.zeros_like(rows), rows, columns], axis=1)
        start, used = first + height * width, used + height * width
        positions[first:start] = following + square
        following += max(height, width)
    positions[start:] = following + np.arange(len(is_image) - start)[:, None]
    return positions


def rope_offset(positions: Int32[np.ndarray, "T 3"]) -> int:
    """Return what the position of a token after these exceeds its place in the sequence by."""
    return int(positions.max(initial=-1)) + 1 - len(positions)


def patch_layout(grids: Sequence[ImageGrid], merge_size: int) -> Int32[np.ndarray, "P 5"]:
    """Return `ImageInputs.layout` of images that follow each other in one row."""
    parts = [np.zeros((0, 5), np.int32)]
    for number, grid in enumerate(grids, start=1):
        rows, columns = np.indices(grid)
        squares = (grid.height // merge_size, merge_size, grid.width // merge_size, merge_size)
        part = np.full((grid.height * grid.width, 5), (number, 0, 0, *grid), np.int32)
        part[:, 1] = rows.reshape(squares).transpose(0, 2, 1, 3).ravel()
        part[:, 2] = columns.reshape(squares).transpose(0, 2, 1, 3).ravel()
        parts.append(part)
    return np.concatenate(parts)
