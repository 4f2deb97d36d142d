"""Images of prompts in the engine: tokens that identify them, positions, and cached embeddings.

In the engine every token of an image has a negative number of its own, by which prefixes with other
images differ, and its embedding is found. Axes: T tokens, N tokens of an image, K features that are
added to layers (the first is the embedding), E width.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from jaxtyping import Float, Int32

from areal_jax.engine.batch import ChunkImages, PrefillChunk
from areal_jax.errors import InvalidRequest
from areal_jax.models.vision.image_processor import ImageGrid, ImagePatches
from areal_jax.models.vision.image_reader import ImageReader, image_key
from areal_jax.models.vision.layout import rope_offset, rope_positions
from areal_jax.records import Request

CACHED_IMAGES = 256
"""Images without a request that are kept with their embeddings."""


class PromptImage:
    """An image of running or recent requests."""

    def __init__(self, file: bytes, grid: ImageGrid, num_tokens: int, first: int):
        """`first`: number of its first token among those of all images."""
        self.file, self.grid, self.num_tokens, self.first = file, grid, num_tokens, first
        self.generation = -1
        """Of the tower that `features` are of."""
        self.features: Float[np.ndarray, "N K E"] | None = None


class PromptWithImages(NamedTuple):
    """A prompt in which the tokens of images are negative numbers."""

    tokens: Int32[np.ndarray, "T"]
    rope_offset: int
    """Added to the place of a sampled token, for its position in RoPE."""
    images: tuple[PromptImage, ...]
    """Kept by the request as long as it runs."""


class PromptImages:
    """The images of one engine.

    `admit` is called in the asyncio thread, and the rest in the engine's.
    """

    def __init__(
        self, reader: ImageReader, encode: Callable[[Any, ImagePatches], Float[np.ndarray, "N K E"]]
    ):
        """
        Args:
            reader: Preprocesses images.
            encode: Computes the embeddings of an image, given parameters.
        """
        self._reader, self._encode = reader, encode
        self._live = WeakValueDictionary[bytes, PromptImage]()
        self._recent = OrderedDict[bytes, PromptImage]()
        self._num_tokens, self._lock = 0, threading.Lock()
        self._generation = 0
        self.num_encoded = 0
        """Images whose embeddings were computed."""

    def admit(self, request: Request) -> PromptWithImages:
        """Return the prompt of a request with its images.

        Raises:
            InvalidRequest: An image cannot be read, or the prompt has not its tokens.
        """
        vision, tokens = self._reader.vision, request.prompt_tokens.copy()
        name = f"request {request.id!r}"
        places = np.flatnonzero(tokens == vision.image_token_id)
        try:
            # A workflow may also ask without the images of its task.
            images = tuple(map(self._image, request.images if len(places) else ()))
        except ValueError as error:
            raise InvalidRequest(f"{name}: {error}") from error
        expected = sum(image.num_tokens for image in images)
        if len(places) < expected or (expected and places[expected - 1] == len(tokens) - 1):
            raise InvalidRequest(
                f"{name}: expected a prompt with {expected} tokens of {len(images)} images, and "
                f"text after them, found {len(places)} image tokens"
            )
        start = 0
        for image in images:
            numbers = -1 - image.first - np.arange(image.num_tokens)
            tokens[places[start : start + image.num_tokens]] = numbers
            start += image.num_tokens
        return PromptWithImages(tokens, rope_offset(self._positions(tokens, images)), images)

    def with_images(self, params: Any, chunks: Sequence[PrefillChunk]) -> list[PrefillChunk]:
        """Return chunks with the positions of their tokens and the embeddings of their images.

        Args:
            params: Parameters, which compute the embeddings that are not cached.
            chunks: Chunks of prompts of `admit`.
        """
        return [chunk._replace(images=self._chunk_images(params, chunk)) for chunk in chunks]

    def invalidate(self) -> None:
        """Discard the embeddings: the vision tower has changed."""
        self._generation += 1

    def _image(self, file: bytes) -> PromptImage:
        key = image_key(file)
        patches, grid = self._reader.patches(file)
        with self._lock:
            if (image := self._live.get(key)) is None:
                num_tokens = len(patches) // self._reader.vision.merged_patches
                if self._num_tokens + num_tokens >= 2**31:
                    self._num_tokens = 0  # the first images ended long ago
                image = PromptImage(file, grid, num_tokens, self._num_tokens)
                self._num_tokens += num_tokens
                self._live[key] = image
            self._recent[key] = image
            self._recent.move_to_end(key)
            if len(self._recent) > CACHED_IMAGES:
                self._recent.popitem(last=False)
        return image

    def _chunk_images(self, params: Any, chunk: PrefillChunk) -> ChunkImages | None:
        whole = np.concatenate([chunk.before, chunk.tokens])
        if not (whole < 0).any():
            return None
        images = list(self._images_of(whole))
        positions = self._positions(whole, images)[chunk.start :]
        start, count = (int((tokens < 0).sum()) for tokens in (chunk.before, chunk.tokens))
        if not count:
            return ChunkImages(positions, None)
        features = np.concatenate([self._features(params, image) for image in images])
        return ChunkImages(positions, features[start : start + count])

    def _images_of(self, tokens: Int32[np.ndarray, "T"]) -> Iterator[PromptImage]:
        """Yield the images of a prompt, or of its first tokens, in order."""
        with self._lock:
            by_first = {image.first: image for image in self._live.values()}
        numbers = -1 - tokens[tokens < 0]
        place = 0
        while place < len(numbers):
            image = by_first[int(numbers[place])]
            yield image
            place += image.num_tokens

    def _positions(
        self, tokens: Int32[np.ndarray, "T"], images: Sequence[PromptImage]
    ) -> Int32[np.ndarray, "T 3"]:
        is_image = tokens < 0
        # The last image of a chunk may continue in the next one.
        missing = sum(image.num_tokens for image in images) - int(is_image.sum())
        is_image = np.append(is_image, np.ones(missing, bool))
        grids = [image.grid for image in images]
        merge = self._reader.vision.spatial_merge_size
        return rope_positions(is_image, grids, merge)[: len(tokens)]

    def _features(self, params: Any, image: PromptImage) -> Float[np.ndarray, "N K E"]:
        if image.features is None or image.generation != self._generation:
            image.features = self._encode(params, self._reader.patches(image.file))
            image.generation = self._generation
            self.num_encoded += 1
        return image.features
