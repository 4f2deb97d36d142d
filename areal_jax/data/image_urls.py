"""Fetch images from hosts that the settings allow.

A URL comes from a client or a data set, so it could name services that only this machine reaches.
Therefore hosts are allowed by name; a name has to resolve to public addresses, to which the
connection then goes; and a redirect leads to the same host.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import SplitResult, urljoin, urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from areal_jax.data.config import RemoteImagesConfig
from areal_jax.image_files import ImageFile

MAX_REDIRECTS = 3


class FetchError(ValueError):
    """An image is not allowed, too large or too slow, or its server refuses it."""

    def __init__(self, message: str, *, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary
        """Whether the server or the network failed, and not the URL."""
        self.number = 0
        """Number of the URL."""


async def fetch_images(urls: Sequence[str], config: RemoteImagesConfig) -> list[ImageFile]:
    """Return the content of images, all within the time of the settings.

    Args:
        urls: URLs with http or https.
        config: allowed hosts, and limits.

    Raises:
        FetchError: the first image that cannot be fetched.
    """
    deadline_s = asyncio.get_running_loop().time() + config.timeout_s
    found = list[ImageFile]()
    connector = aiohttp.TCPConnector(resolver=_PublicResolver())
    # The environment's proxies would resolve names themselves.
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        for number, url in enumerate(urls):
            try:
                async with asyncio.timeout_at(deadline_s):
                    found.append(await _fetch(session, url, config))
            except FetchError as error:
                error.number = number
                raise
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                is_late = isinstance(error, TimeoutError)
                failed = FetchError(
                    f"the image did not arrive within images.timeout_s={config.timeout_s:g} s"
                    if is_late
                    else f"the image cannot be fetched: {error}",
                    is_temporary=True,
                )
                failed.number = number
                raise failed from error
    return found


async def _fetch(
    session: aiohttp.ClientSession, given: str, config: RemoteImagesConfig
) -> ImageFile:
    url = _allowed(given, config.hosts)
    for _ in range(1 + MAX_REDIRECTS):
        async with session.get(url.geturl(), allow_redirects=False) as response:
            if response.status in (301, 302, 303, 307, 308):
                location = urljoin(url.geturl(), response.headers.get("Location", ""))
                following = _allowed(location, config.hosts)
                if following.netloc != url.netloc:
                    raise FetchError(
                        f"expected no redirect to another host, found one to {location}"
                    )
                url = following
                continue
            if response.status != 200:
                raise FetchError(
                    f"expected status 200, found {response.status}",
                    is_temporary=response.status >= 500 or response.status == 429,
                )
            content = bytearray()
            async for piece in response.content.iter_chunked(1 << 16):
                content += piece
                if len(content) > config.max_bytes:
                    raise FetchError(
                        f"expected an image of at most images.max_bytes={config.max_bytes} bytes"
                    )
            return bytes(content)
    raise FetchError(f"expected at most {MAX_REDIRECTS} redirects")


def _allowed(given: str, hosts: Sequence[str]) -> SplitResult:
    """Return a URL of an allowed host, written anew, so that no other parser reads another host."""
    try:
        url = urlsplit(given)
        host, port = url.hostname or "", url.port
    except ValueError as error:
        raise FetchError(f"expected a URL, found {given!r}: {error}") from error
    name = f"[{host}]" if ":" in host else host
    name = name if port is None else f"{name}:{port}"
    if url.scheme not in ("http", "https") or (host not in hosts and name not in hosts):
        raise FetchError(
            "expected a data URI, or a URL with http or https of a host in images.hosts "
            f"({', '.join(hosts) or 'none'}), found {given!r}"
        )
    return SplitResult(url.scheme, name, url.path, url.query, "")


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
