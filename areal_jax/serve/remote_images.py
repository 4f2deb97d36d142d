"""Fetch the images of a conversation from hosts that the settings allow.

A URL comes from a client, so it could name services that only this machine reaches. Therefore hosts
are allowed by name; a name has to resolve to public addresses, to which the connection then goes;
and a redirect leads to the same host.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from areal_jax.image_files import ImageFile
from areal_jax.serve.bodies import Chat, RemoteImage
from areal_jax.serve.config import RemoteImagesConfig
from areal_jax.serve.validation import APIError

MAX_REDIRECTS = 3


async def fetch_images(chat: Chat, config: RemoteImagesConfig) -> Chat:
    """Return a conversation with the content of its remote images.

    Raises:
        APIError: an image is not allowed, too large or too slow, or its server refuses it.
    """
    if not chat.remote_images:
        return chat
    images = list(chat.generation_params.images)
    deadline_s = asyncio.get_running_loop().time() + config.timeout_s
    connector = aiohttp.TCPConnector(resolver=_PublicResolver(), limit=len(chat.remote_images))
    # The environment's proxies would resolve names themselves.
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        for remote in chat.remote_images:
            try:
                async with asyncio.timeout_at(deadline_s):
                    images[remote.number] = await _fetch(session, remote, config)
            except TimeoutError:
                limit = f"images.timeout_s={config.timeout_s:g}"
                raise _refusal(remote, f"the image did not arrive within {limit} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise _refusal(remote, f"the image cannot be fetched: {error}") from error
    params = replace(chat.generation_params, images=tuple(images))
    return replace(chat, generation_params=params, remote_images=())


async def _fetch(
    session: aiohttp.ClientSession, remote: RemoteImage, config: RemoteImagesConfig
) -> ImageFile:
    url = _allowed(remote, remote.url, config.hosts)
    for _ in range(1 + MAX_REDIRECTS):
        async with session.get(url.geturl(), allow_redirects=False) as response:
            if response.status in (301, 302, 303, 307, 308):
                location = urljoin(url.geturl(), response.headers.get("Location", ""))
                following = _allowed(remote, location, config.hosts)
                if following.netloc != url.netloc:
                    raise _refusal(
                        remote, f"expected no redirect to another host, found one to {location}"
                    )
                url = following
                continue
            if response.status != 200:
                raise _refusal(remote, f"expected status 200, found {response.status}")
            content = bytearray()
            async for piece in response.content.iter_chunked(1 << 16):
                content += piece
                if len(content) > config.max_bytes:
                    limit = f"images.max_bytes={config.max_bytes}"
                    raise _refusal(remote, f"expected an image of at most {limit} bytes")
            return bytes(content)
    raise _refusal(remote, f"expected at most {MAX_REDIRECTS} redirects")


def _allowed(remote: RemoteImage, given: str, hosts: Sequence[str]) -> SplitResult:
    """Return a URL of an allowed host, written anew, so that no other parser reads another host."""
    try:
        url = urlsplit(given)
        host, port = url.hostname or "", url.port
    except ValueError as error:
        raise _refusal(remote, f"expected a URL, found {given!r}: {error}") from error
    name = f"[{host}]" if ":" in host else host
    name = name if port is None else f"{name}:{port}"
    if url.scheme not in ("http", "https") or (host not in hosts and name not in hosts):
        raise _refusal(
            remote,
            "expected a data URI, or a URL with http or https of a host in images.hosts "
            f"({', '.join(hosts) or 'none'}), found {given!r}",
        )
    return SplitResult(url.scheme, name, url.path, url.query, "")


def _refusal(remote: RemoteImage, message: str) -> APIError:
    return APIError(400, f"{remote.path}: {message}", param=remote.path)


def _is_public(text: str) -> bool:
    address = ipaddress.ip_address(text)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_global


class _PublicResolver(AbstractResolver):
    """Resolves names to public addresses; allowed addresses need no resolution."""

    def __init__(self) -> None:
        self._resolver = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        public = [each for each in found if _is_public(each["host"])]
        if not public:
            raise OSError(
                errno.EACCES,
                f"{host} has no public address; to fetch from a private one, put the address "
                "itself into images.hosts",
            )
        return public

    async def close(self) -> None:
        await self._resolver.close()
