"""Processes for untrusted code: a fork server that has loaded what they need, and its forks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from areal_jax.errors import ConfigError
from areal_jax.rewards.processes import ending, has_ended, kill_tree, lower_priority

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Longest time to start Python and to load what forks need: a second, and more on a busy machine.
"""

START_ATTEMPTS = 3

REQUESTS_PER_PROCESS = 1000
"""Number of requests after which a process is replaced, so that leaks stay small."""

GRACE_S = 0.5
"""Time in which a process that closed its connection may end by itself, so that its exit status is
known."""

KILL_TIMEOUT_S = 10.0

MAX_LINE_BYTES = 16 << 20
"""Longest message of a process."""


class CannotStart(RuntimeError):
    """No process could be started: a fault of the machine, not of what it was to do."""


class ForkServer:
    """The process from which others are forked.

    It loads once what they need, so that a fork takes milliseconds. It answers one request at a
    time. It starts at its first use, and again after it died.
    """

    def __init__(self, module: str, settings: Mapping[str, Any], what: str) -> None:
        """
        Args:
            module: module of the process, run with this process's id and the settings as JSON.
            settings: what it loads.
            what: name of a forked process, for messages.
        """
        self._module, self._settings, self.what = module, json.dumps(settings), what
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lines: asyncio.StreamReader | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._asking = asyncio.Lock()
        self._closed = False
        self.num_forks = 0

    async def fork(self) -> tuple[int, socket.socket]:
        """Fork a process.

        Returns:
            Its process id, and the socket that connects to it.

        Raises:
            CannotStart: START_ATTEMPTS attempts failed.
            ConfigError: What the settings name cannot be loaded.
        """
        failure = ""
        for attempt in range(START_ATTEMPTS):
            try:
                with ExitStack() as undo:
                    ours, theirs = socket.socketpair()
                    undo.callback(ours.close)
                    with theirs:
                        pid = (await self._ask({"do": "fork"}, theirs))["pid"]
                    undo.pop_all()
                self.num_forks += 1
                return pid, ours
            except (OSError, TimeoutError, EOFError) as error:
                failure = f"{type(error).__name__}: {error} ({await self.kill(GRACE_S)})"
                logger.warning(
                    "attempt %d of %d to start the process of %s failed: %s",
                    attempt + 1,
                    START_ATTEMPTS,
                    self.what,
                    failure,
                )
        raise CannotStart(
            f"no process of {self.what} could be started in {START_ATTEMPTS} attempts: {failure}"
        )

    async def prepare(self) -> str:
        """Load more for all later forks.

        Returns:
            The reason of a failure; empty after success.
        """
        try:
            return (await self._ask({"do": "prepare"})).get("error", "")
        except (OSError, TimeoutError, EOFError) as error:
            return f"loading: {type(error).__name__}: {error} ({await self.kill(GRACE_S)})"

    async def reap(self, pid: int) -> int | None:
        """Return the exit code of a forked process; None while it runs."""
        return (await self._ask({"do": "reap", "pid": pid}))["returncode"]

    async def _ask(
        self, request: dict[str, Any], file: socket.socket | None = None
    ) -> dict[str, Any]:
        # A cancelled request still reads its reply, so that the next request does not get it.
        return await asyncio.shield(
            asyncio.ensure_future(self._exchange(request, file and file.dup()))
        )

    async def _exchange(
        self, request: dict[str, Any], file: socket.socket | None
    ) -> dict[str, Any]:
        try:
            async with self._asking:
                if self._process is None:
                    await self._spawn()
                assert self._control is not None
                socket.send_fds(
                    self._control,
                    [json.dumps(request).encode() + b"\n"],
                    [file.fileno()] if file else [],
                )
                return await self._reply()
        finally:
            if file is not None:
                file.close()

    async def _spawn(self) -> None:
        if self._closed:
            raise RuntimeError(f"the fork server of {self.what} is closed")
        ours, theirs = socket.socketpair()
        package_folder = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                (
                    sys.executable,
                    "-m",
                    self._module,
                    str(os.getpid()),
                    self._settings,
                ),
                stdin=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            self._lines, self._requests = await asyncio.open_connection(sock=ours)
            self._control = ours
            undo.pop_all()
        reply = await self._reply()
        if "error" in reply:
            await self.kill()
            raise ConfigError(reply["error"])

    async def _reply(self) -> dict[str, Any]:
        assert self._lines is not None
        return await read_line(self._lines, START_TIMEOUT_S)

    async def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process and its descendants, unless it ends by itself within `grace_s`.

        Returns:
            A description of how it ended.
        """
        process, requests = self._process, self._requests
        self._process = self._lines = self._requests = self._control = None
        if requests is not None:
            requests.close()
        if process is None:
            return "it never ran"
        found = psutil.Process(process.pid)
        try:
            await _until(lambda: has_ended(found), grace_s)
        finally:
            kill_tree(found)
        if not await _until(lambda: process.poll() is not None, KILL_TIMEOUT_S):
            logger.error(
                "process %d has not ended %g s after it was killed", process.pid, KILL_TIMEOUT_S
            )
            return "it does not end"
        return ending(process.returncode)

    async def close(self) -> None:
        """Kill the process; it does not start again."""
        self._closed = True
        await self.kill()


class ForkedProcess:
    """One process for requests. It is forked at its first use, and again after it was killed."""

    def __init__(self, server: ForkServer) -> None:
        self._server = server
        self._process: psutil.Process | None = None
        # One socket pair per process, for one request at a time. The connection ends when either
        # side closes it, which a dying process does.
        self._lines: asyncio.StreamReader | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._number = 0

    async def start(self) -> None:
        """Fork the process, unless it runs. Raises as `ForkServer.fork`."""
        if self._process is None:
            pid, ours = await self._server.fork()
            # Distinguishes this process from a later one with the same id.
            self._process, self._number = psutil.Process(pid), 0
            self._lines, self._requests = await asyncio.open_connection(
                sock=ours, limit=MAX_LINE_BYTES
            )

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Return the reply to one request. After an error the process must be killed.

        Raises:
            TimeoutError: There is no reply within `timeout_s`.
            EOFError: The process died.
        """
        assert self._requests is not None and self._lines is not None
        self._number += 1
        async with asyncio.timeout(timeout_s):
            self._requests.write(json.dumps({"number": self._number, **request}).encode() + b"\n")
            with suppress(ConnectionError):
                # If the process died, reading its reply fails.
                await self._requests.drain()
            reply = await read_line(self._lines, timeout_s)
        if reply["number"] != self._number:
            raise EOFError(
                f"the process answered request {reply['number']} instead of {self._number}"
            )
        return reply

    @property
    def is_running(self) -> bool:
        """Whether there is a process."""
        return self._process is not None

    @property
    def is_worn(self) -> bool:
        """Whether it has had REQUESTS_PER_PROCESS requests, and is to be replaced."""
        return self._number >= REQUESTS_PER_PROCESS

    def lower_priority(self) -> None:
        """Lower the priority of the process until its end."""
        if self._process is not None:
            lower_priority(self._process)

    async def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process and its descendants, unless it ends by itself within `grace_s`.

        Returns:
            A description of how it ended.
        """
        process, requests = self._process, self._requests
        self._process = self._lines = self._requests = None
        if requests is not None:
            requests.close()
        if process is None:
            return "it never ran"
        try:
            await _until(lambda: has_ended(process), grace_s)
        finally:
            kill_tree(process)
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while (code := await self._server.reap(process.pid)) is None:
                    await asyncio.sleep(0.005)
        except (OSError, TimeoutError, EOFError, RuntimeError) as error:
            logger.warning(
                "process %d of %s was killed; its exit status is unknown: %s",
                process.pid,
                self._server.what,
                error,
            )
            return "with an unknown status"
        return ending(code)


async def read_line(lines: asyncio.StreamReader, timeout_s: float) -> dict[str, Any]:
    """Read the next line as JSON.

    Raises:
        TimeoutError: There is none within `timeout_s`.
        EOFError: The connection ended.
    """
    try:
        async with asyncio.timeout(timeout_s):
            line = await lines.readline()
    except ConnectionError as error:
        raise EOFError(f"the process closed its connection ({error})") from error
    if not line:
        raise EOFError("the process ended")
    return json.loads(line)


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until the condition holds, and return whether it does."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while not (holds := condition()) and clock() < deadline_s:
        await asyncio.sleep(0.005)
    return holds
