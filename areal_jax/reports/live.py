"""Live report: a server on the loopback interface that sends updates, and samples on request."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from aiohttp import web

from areal_jax.reports.report import encode_runs, open_run, render
from areal_jax.reports.run_report import RunReport, State
from areal_jax.reports.sample_index import compact_group

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
UPDATE_S = 2.0
"""Time between two looks at the files, in seconds."""
SHUTDOWN_S = 1.0

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class LiveReport:
    """Serves the page of runs to readers who know the token. For one event loop."""

    def __init__(self, runs: Sequence[RunReport], state_of: Callable[[Path], State]) -> None:
        """
        Args:
            runs: the runs.
            state_of: returns whether the run in a folder goes on.
        """
        self.token = secrets.token_urlsafe(24)
        self._runs, self._state_of = runs, state_of
        # Serializes the threads that read the runs.
        self._lock = asyncio.Lock()
        # Notified after each update of `_update`, which `_number` counts.
        self._updated = asyncio.Condition()
        self._update, self._number, self._is_closed = "", 0, False
        self._signature: object = None

    def app(self) -> web.Application:
        """Return the application: the page, its updates and its samples."""
        app = web.Application(middlewares=[self._require_token])
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/events", self._events),
                web.get("/samples", self._samples),
            ]
        )
        app.on_shutdown.append(self._close)
        return app

    async def watch(self) -> None:
        """Look for what the runs have written, until cancelled."""
        while True:
            await asyncio.sleep(UPDATE_S)
            try:
                async with self._lock:
                    update = await asyncio.to_thread(self._read)
            except (OSError, ValueError, KeyError) as error:
                # The files may be replaced at this moment; the page keeps what it shows.
                logger.warning("report not updated: %s: %s", type(error).__name__, error)
                continue
            if update is not None:
                async with self._updated:
                    self._update, self._number = update, self._number + 1
                    self._updated.notify_all()

    def _states(self) -> list[tuple[RunReport, State]]:
        return [(run, self._state_of(run.folder)) for run in self._runs]

    def _read(self) -> str | None:
        """Read what is new; return the data of the page, or None if nothing has changed."""
        for run in self._runs:
            run.update()
        states = self._states()
        signature = [(run.num_bytes, run.samples.num_bytes, state) for run, state in states]
        if signature == self._signature:
            return None
        self._signature = signature
        return encode_runs(states, live=True)

    def _render(self) -> str:
        for run in self._runs:
            run.update()
        return render(self._states(), live=True)

    @web.middleware
    async def _require_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.query.get("token", "")
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            text = "expected the token of this report; open the address that the command printed\n"
            return web.Response(status=403, text=text, headers=HEADERS)
        return await handler(request)

    async def _page(self, request: web.Request) -> web.Response:
        async with self._lock:
            text = await asyncio.to_thread(self._render)
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        """Send each update as a server-sent event
        (https://html.spec.whatwg.org/multipage/server-sent-events.html).
        """
        stream = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await stream.prepare(request)
        number = 0  # the newest update first: the page may be older
        with suppress(ConnectionResetError):  # the reader has left
            await stream.write(b"retry: 2000\n\n")
            while not self._is_closed:
                number, update = await self._next(number)
                await stream.write(f"data: {update}\n\n".encode() if update else b": end\n\n")
        return stream

    async def _next(self, number: int) -> tuple[int, str]:
        """Wait for an update after the given one; return its number and data, which is empty at
        the end.
        """
        async with self._updated:
            await self._updated.wait_for(lambda: self._is_closed or self._number > number)
            return self._number, "" if self._is_closed else self._update

    async def _samples(self, request: web.Request) -> web.Response:
        """Return the number of groups that match the filters, and one of them: that at `offset`, or
        the one with the id `group` if it matches.
        """
        query = request.query
        try:
            run = self._runs[int(query.get("run", 0))]
            offset = int(query.get("offset", 0))
            first, last, group = (
                int(query[key]) if query.get(key) else None for key in ("first", "last", "group")
            )
        except (ValueError, IndexError):
            text = "expected numbers as run, first, last, group and offset"
            return web.Response(status=400, text=text, headers=HEADERS)
        grade, task = query.get("grade", ""), query.get("task", "")

        def find() -> dict[str, Any]:
            found = run.samples.find(first or 0, last, grade, task)
            kept = None if group is None else run.samples.offset_of(found, group)
            at = offset if kept is None else kept
            places = found[at : at + 1].tolist()
            groups = [compact_group(rows, None) for rows in run.samples.rows(places)]
            return {"found": len(found), "offset": at, "group": groups[0] if groups else None}

        async with self._lock:
            answer = await asyncio.to_thread(find)
        return web.json_response(
            answer, headers=HEADERS, dumps=lambda value: json.dumps(value, ensure_ascii=False)
        )

    async def _close(self, app: web.Application) -> None:
        async with self._updated:
            self._is_closed = True
            self._updated.notify_all()


@asynccontextmanager
async def live_report(
    folders: Sequence[Path], state_of: Callable[[Path], State], port: int = 0
) -> AsyncIterator[str]:
    """Serve the report of runs on the loopback interface until the block ends; the block gets its
    address, which contains the token.

    Args:
        folders: run folders.
        state_of: returns whether the run in a folder goes on.
        port: the port; 0: any free one.

    Raises:
        FileNotFoundError: a folder holds no run.
        OSError: the port is in use.
    """
    runs = [await asyncio.to_thread(open_run, folder) for folder in folders]
    report = LiveReport(runs, state_of)
    runner = web.AppRunner(report.app(), access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        await site.start()
        watching = asyncio.create_task(report.watch(), name="live report")
        try:
            bound = runner.addresses[0][1]
            yield f"http://{HOST}:{bound}/?token={report.token}"
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
    finally:
        await runner.cleanup()
