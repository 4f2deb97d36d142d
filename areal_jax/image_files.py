"""Image files: their sources, and their decoding with Pillow."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from PIL import Image, ImageOps, UnidentifiedImageError

ImageFile: TypeAlias = bytes
"""Content of an image file, in any format that Pillow reads."""

MAX_PIXELS = 64 * 2**20
"""Largest image that is decoded; a small file may contain a larger one."""

THUMBNAIL_PIXELS = 256
"""Longer side of an image on a page."""


def read_image(source: object, folder: Path | None = None) -> ImageFile:
    """Return the content of an image file.

    Args:
        source: content, data URI, path, or an object with `bytes` or `path` as in files of Hugging
            Face's datasets.
        folder: folder of relative paths; None: paths are refused.

    Raises:
        ValueError: the source is none of these, or a data URI is invalid.
        OSError: the file cannot be read.
    """
    if isinstance(source, Mapping):
        source = source["bytes"] if source.get("bytes") is not None else source.get("path")
    match source:
        case bytes():
            return source
        case str() if source.startswith("data:"):
            return _from_data_uri(source)
        case str() if folder is not None and "://" not in source:
            return (folder / source).read_bytes()
    shown = repr(source) if len(repr(source)) <= 100 else f"{repr(source)[:100]}..."
    kinds = "bytes or a data URI" if folder is None else "bytes, a data URI or a path"
    raise ValueError(f"expected an image as {kinds}, found {shown}")


def decode_image(file: ImageFile) -> Image.Image:
    """Decode an image, upright as its metadata say.

    Raises:
        ValueError: Pillow does not read the format, the file is truncated, or the image is larger
            than MAX_PIXELS.
    """
    try:
        with warnings.catch_warnings():
            # Pillow's own limit, which is larger.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(file))
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(
                    f"expected an image of at most {MAX_PIXELS} pixels, found {image.width} x "
                    f"{image.height}"
                )
            image.load()
            return ImageOps.exif_transpose(image)
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"expected an image, found {len(file)} bytes: {error}") from error


def thumbnail_uri(file: ImageFile) -> str:
    """Return a small JPEG of an image as a data URI, for pages.

    Raises:
        ValueError: the image cannot be decoded.
    """
    image = decode_image(file).convert("RGB")
    image.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


def _from_data_uri(uri: str) -> ImageFile:
    header, _, content = uri.partition(",")
    if not header.startswith("data:image/") or not header.endswith(";base64"):
        raise ValueError(f"expected a data URI with data:image/...;base64, found {header[:100]}")
    try:
        return base64.b64decode(content, validate=True)
    except binascii.Error as error:
        raise ValueError(f"expected a data URI in base64: {error}") from error
