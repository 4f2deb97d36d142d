"""Requests to a model's server, repeated while the server is busy or restarts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the server's API key."""

RETRIES_S = (0.5, 2.0, 8.0)
"""Waits before retries of a busy or restarting server; the last one is repeated."""

MAX_CONNECTIONS = 64
"""Largest number of requests at the same time."""


class Refused(Exception):
    """No retry can satisfy the request."""


class ModelClient:
    """Sends requests to a server; it connects with the first one."""

    def __init__(self, url: str) -> None:
        """
        Args:
            url: URL that the paths of requests are appended to.
        """
        self.url = url.rstrip("/")
        self.last_failure = "it did not answer"
        """Why the last request that failed will be repeated, for messages."""
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(MAX_CONNECTIONS)

    async def call(self, path: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the reply to a request; retry until the caller's deadline.

        Args:
            path: path below the URL.
            body: body of a POST; None: a GET.

        Raises:
            Refused: the server refuses the request.
        """
        if self._session is None:
            key = os.environ.get(KEY_VARIABLE)
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._session = aiohttp.ClientSession(headers=headers)
        method, attempt = "GET" if body is None else "POST", 0
        while True:
            try:
                async with (
                    self._places,
                    self._session.request(method, f"{self.url}/{path}", json=body) as got,
                ):
                    text = await got.text()
                    if got.status < 300:
                        return json.loads(text)
                    if got.status < 500 and got.status not in (408, 409, 429):
                        raise Refused(f"{got.status} {text[:200]}")
                    self.last_failure = f"{got.status} {text[:200]}"
            except (aiohttp.ClientError, OSError, ValueError) as error:
                self.last_failure = f"{type(error).__name__}: {error}"
            await asyncio.sleep(RETRIES_S[min(attempt, len(RETRIES_S) - 1)])
            attempt += 1

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
