"""Images that requests name by their URL, fetched from a server on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import chz
import pytest
from aiohttp import ClientSession, web
from scripted_engine import KEY, TOKENIZER, Scripted

from areal_jax.data.config import RemoteImagesConfig
from areal_jax.records import Sampling
from areal_jax.serve.app import App, listening
from areal_jax.serve.bodies import read_chat
from areal_jax.serve.config import LimitsConfig
from areal_jax.serve.engine_backend import EngineBackend
from areal_jax.serve.remote_images import fetch_images
from areal_jax.serve.validation import APIError

HERE = "127.0.0.1"
ALLOWED = RemoteImagesConfig(hosts=(HERE,), max_bytes=100, timeout_s=5.0)


def asked(*urls: str) -> dict[str, Any]:
    data = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": [data, *parts]}]}


class Images:
    """Routes of a server with images; counts its requests."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.http = web.Application()
        self.http.router.add_get("/{name}", self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        self.num_requests += 1
        name, to = request.match_info["name"], request.query.get("to", "")
        if name == "redirect":
            raise web.HTTPFound(to)
        if name == "slow":
            await asyncio.sleep(30)
        if name == "missing":
            raise web.HTTPNotFound
        return web.Response(body=b"x" * (101 if name == "large" else 100))


def fetched(make: Callable[[int], str], config: RemoteImagesConfig = ALLOWED) -> tuple[bytes, ...]:
    """Fetch from a server whose port `make` turns into a URL."""

    async def main() -> tuple[bytes, ...]:
        images = Images()
        runner = web.AppRunner(images.http, shutdown_timeout=0.1)
        await runner.setup()
        await (site := web.TCPSite(runner, HERE, 0)).start()
        try:
            port = int(site.name.rpartition(":")[2])
            chat = await fetch_images(read_chat(asked(make(port))), config)
        finally:
            await runner.cleanup()
        assert not chat.remote_images and images.num_requests
        return chat.generation_params.images

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_images_of_allowed_hosts_are_fetched():
    assert fetched(lambda port: f"http://{HERE}:{port}/a") == (b"hi", b"x" * 100)
    assert fetched(lambda port: f"http://{HERE}:{port}/redirect?to=/a") == (b"hi", b"x" * 100)

    def with_port(port: int) -> str:
        return f"http://{HERE}:{port}/redirect?to=http://{HERE}:{port}/a"

    assert fetched(with_port)[1] == b"x" * 100


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("/large", r"messages\[0\]\.content\[1\]\.image_url\.url: .* images\.max_bytes=100 bytes"),
        ("/missing", "expected status 200, found 404"),
        ("/redirect?to=/redirect?to=/a", "at most 3 redirects"),
        (
            "/redirect?to=http://localhost/a",
            r"in images\.hosts \(127\.0\.0\.1\), found 'http://loc",
        ),
        ("/redirect?to=file:///etc/passwd", "with http or https"),
        ("/redirect?to=http://127.0.0.1:1/a", "no redirect to another host"),
        ("/slow", r"did not arrive within images\.timeout_s=0\.2 s"),
    ],
)
def test_large_slow_and_redirected_images_are_refused(url: str, words: str):
    url = url.replace(
        "to=/redirect?to=/a",
        "to=/redirect%3Fto%3D/redirect%253Fto%253D/redirect"
        "%25253Fto%25253D/redirect%2525253Fto%2525253D/a",
    )
    config = chz.replace(ALLOWED, timeout_s=0.2) if url == "/slow" else ALLOWED
    with pytest.raises(APIError, match=words) as refused:
        fetched(lambda port: f"http://{HERE}:{port}{url}", config)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "url",
    [
        f"http://{HERE}/a",
        "https://allowed.example.evil.example/a",
        f"http://allowed.example@{HERE}/a",
        f"http://allowed.example\\@{HERE}/a",
        "http://allowed.example:99999/a",
        "http:///a",
        "http://[::1]/a",
    ],
)
def test_other_hosts_are_never_asked(url: str):
    config = RemoteImagesConfig(hosts=("allowed.example",))
    for allowed in (config, RemoteImagesConfig()):
        with pytest.raises(APIError, match=r"images\.hosts|expected a URL, found"):
            asyncio.run(fetch_images(read_chat(asked(url)), allowed))


def test_names_with_private_addresses_are_refused():
    # localhost is allowed by name, and has no public address.
    config = RemoteImagesConfig(hosts=("localhost",))
    with pytest.raises(APIError, match="localhost has no public address"):
        asyncio.run(fetch_images(read_chat(asked("http://localhost/a")), config))


def test_the_server_fetches_nothing_unless_allowed():
    async def main() -> str:
        backend = EngineBackend(
            Scripted(), "m", TOKENIZER, Sampling(8, stop_token_ids=TOKENIZER.stop_token_ids), 0, KEY
        )
        async with (
            listening(App(backend, LimitsConfig()), HERE, 0, 0.1) as port,
            ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as session,
            session.post(
                f"http://{HERE}:{port}/v1/chat/completions", json=asked(f"http://{HERE}/a")
            ) as response,
        ):
            assert response.status == 400
            return (await response.json())["error"]["message"]

    assert "images.hosts (none), found" in asyncio.run(asyncio.wait_for(main(), 30))
