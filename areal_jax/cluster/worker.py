"""A worker process of a run, as a Ray actor. Its role defines the methods that can be called.

Messages consist of numbers, strings, arrays, lists and dicts. No class of this package is pickled,
so that a different release at the other end raises a readable error.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from inspect import isawaitable
from typing import Any, Literal, NamedTuple, TypeAlias

import ray.util

from areal_jax.cluster.environment import clear_simulated_devices, prepare
from areal_jax.parallel.config import PlacementConfig

Emit: TypeAlias = Callable[[str, Any], None]
"""emit(topic, payload): send a report to the controller; from any thread."""

Message: TypeAlias = tuple[int, str, tuple[Any, ...]]
"""Ticket, method and arguments of a call. An empty method name cancels the call of that ticket."""

CPU_S = "cpu_s"
"""Topic of the report with every poll: processor time of the worker, in seconds."""

MAX_EVENTS_PER_POLL = 1024
"""Maximum number of events in one reply."""


class Event(NamedTuple):
    """A reply to a call, or a report of the role."""

    kind: Literal["done", "failed", "reported"]
    ticket: int
    """Ticket of the call; 0 for a report."""
    name: str
    """Topic of a report, or class name of an error."""
    payload: Any


class ClusterWorker:
    """The actor. Its role is an object whose public methods can be called; slow ones are `async`.

    Calls start in the order in which they were sent. Events leave in the order in which they
    occurred, so that reports before a reply arrive before it.
    """

    def __init__(self, name: str, simulated_devices: int | None) -> None:
        """Set the environment of the process.

        Args:
            name: Name of the worker, for logs.
            simulated_devices: Number of simulated CPU devices; None uses those that Ray assigns.
        """
        self._name = name
        clear_simulated_devices()
        prepare(PlacementConfig(simulated_devices=simulated_devices))
        logging.getLogger("ray").addFilter(_is_not_thread_warning)
        logging.getLogger("ray._private.worker").addFilter(_is_not_thread_warning)
        self._role: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Owned by the event loop: `_push` appends, `poll_events` takes.
        self._events: list[Event] = []
        self._has_events = asyncio.Event()
        # Running calls by ticket, or by a negative number if the caller expects no reply.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)

    async def begin(self, role: str, *arguments: Any) -> tuple[int, Any]:
        """Create the role and start it; may take minutes, because programs are compiled.

        Args:
            role: Class of the role, PACKAGE.MODULE:CLASS.
            arguments: Arguments of its constructor after `emit`.

        Returns:
            The process id and the return value of the role's `begin`.
        """
        self._loop = asyncio.get_running_loop()
        module, _, name = role.partition(":")

        def create_role() -> Any:
            return getattr(importlib.import_module(module), name)(self._emit, *arguments)

        self._role = await asyncio.to_thread(create_role)
        return os.getpid(), await self._role.begin()

    def __repr__(self) -> str:
        """Return the prefix that Ray puts before every line that the process prints."""
        return self._name

    async def address(self) -> str:
        """Return an address at which a server of this process can listen, HOST:PORT."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    async def receive(self, messages: Sequence[Message]) -> None:
        """Start calls in order; `poll_events` returns their results."""
        for ticket, method, arguments in messages:
            if method:
                self._start_call(ticket, getattr(self._role, method), arguments)
            elif ticket in self._tasks:
                self._tasks[ticket].cancel()

    async def poll_events(self, timeout_s: float) -> list[tuple[str, int, str, Any]]:
        """Wait for events and return those since the last poll, after a CPU_S report.

        Returns only the CPU_S report if there is no event within `timeout_s`. One caller at a
        time.
        """
        cpu_s = ("reported", 0, CPU_S, time.process_time())
        try:
            async with asyncio.timeout(timeout_s):
                await self._has_events.wait()
        except TimeoutError:
            return [cpu_s]
        events, self._events = (
            self._events[:MAX_EVENTS_PER_POLL],
            self._events[MAX_EVENTS_PER_POLL:],
        )
        if not self._events:
            self._has_events.clear()
        return [cpu_s, *((event.kind, event.ticket, event.name, event.payload) for event in events)]

    async def end(self) -> None:
        """Close the role."""
        if self._role is not None:
            await self._role.end()

    def _start_call(
        self, ticket: int, method: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> None:
        try:
            result = method(*arguments)
        except Exception as error:  # raised again in the caller's process by `Connection._handle`
            self._push_error(ticket, error)
            return
        if isawaitable(result):
            number = ticket or -next(self._numbers)
            task = self._tasks[number] = asyncio.ensure_future(self._reply(ticket, result))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif ticket:
            self._push(Event("done", ticket, "", result))

    async def _reply(self, ticket: int, result: Awaitable[Any]) -> None:
        try:
            answer = await result
            if ticket:
                self._push(Event("done", ticket, "", answer))
        except Exception as error:  # raised again in the caller's process by `Connection._handle`
            self._push_error(ticket, error)

    def _push_error(self, ticket: int, error: Exception) -> None:
        self._push(Event("failed", ticket, type(error).__name__, str(error)))

    def _emit(self, topic: str, payload: Any) -> None:
        assert self._loop is not None, "`begin` creates the role"
        self._loop.call_soon_threadsafe(self._push, Event("reported", 0, topic, payload))

    def _push(self, event: Event) -> None:
        self._events.append(event)
        self._has_events.set()


def _is_not_thread_warning(record: logging.LogRecord) -> bool:
    """Filter Ray's warning of blocking calls in an async actor: only the actor's threads block."""
    return "Using blocking ray.get" not in record.getMessage()
