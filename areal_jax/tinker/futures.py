"""Requests whose results clients retrieve later. Their ids are those of their numbered operations.

A request is in the journal before its id is returned, and its result before it can be retrieved: a
client that asks again, also after the server was killed, gets the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from areal_jax.errors import InvalidRequest
from areal_jax.tinker.journal import Journal, RequestRow
from areal_jax.tinker.tenants import Tenants


class Futures:
    """Pending requests, in the journal. Used by the event loop only."""

    def __init__(self, journal: Journal, tenants: Tenants) -> None:
        self._journal, self._tenants = journal, tenants
        self._finished: dict[str, asyncio.Event] = {}

    def submit(
        self,
        owner: str,
        seq: int,
        kind: str,
        body: bytes,
        *,
        num_tokens: int = 0,
        least: int = 0,
        is_awaited: bool = False,
    ) -> tuple[RequestRow, bool]:
        """Add a request, or find it again.

        Args:
            owner: model or sampler.
            seq: number of the operation.
            kind: what is asked for.
            body: body of the request.
            num_tokens: tokens that it is counted as, for the quota of its tenant.
            least: number that a new request must have at least.
            is_awaited: whether others wait for it, so that it is not refused because of them.

        Returns:
            The request, and whether it is new.

        Raises:
            InvalidRequest: another request has this number, or had it.
            QueueFull: it is beyond the quota of its tenant.
        """
        request, digest = f"{owner}:{seq}", hashlib.blake2b(body, digest_size=16).hexdigest()
        found = self._journal.request(request)
        if found is not None:
            if (found.kind, found.digest) != (kind, digest):
                raise InvalidRequest(
                    f"seq_id={seq} of {owner}: expected the {found.kind} that has this number, "
                    f"found another {kind}"
                )
            return found, False
        if seq < least:
            raise InvalidRequest(f"seq_id={seq} of {owner}: expected at least {least}")
        self._tenants.admit(request, num_tokens, is_awaited=is_awaited)
        row = RequestRow(request, owner, seq, kind, body, digest)
        self._journal.add_request(row)
        self.watch(request, num_tokens)
        return row, True

    def watch(self, request: str, num_tokens: int) -> None:
        """Let clients wait for a pending request."""
        self._finished[request] = asyncio.Event()
        self._tenants.begin(request, num_tokens)

    def finish(self, request: str, status: str, result: bytes) -> None:
        """Store the result of a request."""
        self._journal.finish_request(request, status, result)
        self._tenants.end(request)
        if (event := self._finished.pop(request, None)) is not None:
            event.set()

    async def wait(self, request: str, hold_s: float) -> RequestRow | None:
        """Return a request, after its result has come or the time is over; None if there is
        none.
        """
        if (event := self._finished.get(request)) is not None:
            try:
                async with asyncio.timeout(hold_s):
                    await event.wait()
            except TimeoutError:
                pass
        return self._journal.request(request)


def json_result(**fields: Any) -> tuple[str, bytes]:
    """Return the status and the result of a request that is answered with JSON."""
    return "json", json.dumps(fields).encode()


def error_result(message: str, category: str, status: str = "error") -> tuple[str, bytes]:
    """Return the status and the result of a request that failed.

    Args:
        message: for the client.
        category: `user` or `server`: whose fault it is.
        status: `error` or `dropped`.
    """
    fields: Mapping[str, str] = {"error": message, "category": category}
    return status, json.dumps(fields).encode()
