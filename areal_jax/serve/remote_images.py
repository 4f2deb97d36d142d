"""The images of a conversation that clients name by their URL."""

from __future__ import annotations

from dataclasses import replace

from areal_jax.data import image_urls
from areal_jax.data.config import RemoteImagesConfig
from areal_jax.data.image_urls import FetchError
from areal_jax.serve.bodies import Chat
from areal_jax.serve.validation import APIError


async def fetch_images(chat: Chat, config: RemoteImagesConfig) -> Chat:
    """Return a conversation with the content of its remote images.

    Raises:
        APIError: an image is not allowed, too large or too slow, or its server refuses it.
    """
    if not chat.remote_images:
        return chat
    images = list(chat.generation_params.images)
    try:
        found = await image_urls.fetch_images([each.url for each in chat.remote_images], config)
    except FetchError as error:
        path = chat.remote_images[error.number].path
        raise APIError(400, f"{path}: {error}", param=path) from error
    for remote, content in zip(chat.remote_images, found, strict=True):
        images[remote.number] = content
    params = replace(chat.generation_params, images=tuple(images))
    return replace(chat, generation_params=params, remote_images=())
