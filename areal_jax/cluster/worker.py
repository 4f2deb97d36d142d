"""A process of a run that Ray started: it is asked, works, and tells. What it is, its role says.

Everything that crosses is made of numbers, texts, arrays, lists and dicts: no object of ours is
pickled, so that another release at the other end is an error with a name.
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
"""emit(topic, what): tell whoever listens; from any thread."""

Message: TypeAlias = tuple[int, str, tuple[Any, ...]]
"""Ticket, verb and arguments of a question. Without a verb: what was asked by that ticket is not
wanted any more."""

CPU_S = "cpu_s"
"""What a part tells with every answer to its listener: the processor time that it has used."""

MAX_CONCURRENT_COMMANDS = 1024
"""Events in one answer."""


class Event(NamedTuple):
    """What a part says. An answer bears the ticket of its question."""

    kind: Literal["done", "failed", "reported"]
    ticket: int
    """0 of what was not asked for."""
    name: str
    """Of what it tells, or of the class of the error."""
    what: Any


class Worker:
    """The actor. Its role is an object whose public methods are the verbs; one that takes long is
    `async`.

    Questions are begun in the order in which they were asked, and answers leave in the order in
    which they were found, so that whatever was true before an answer was told before it."""

    def __init__(self, name: str, simulated_devices: int | None) -> None:
        """Args: simulated_devices: on CPUs; None where Ray has given it an accelerator, or none."""
        self._name = name
        clear_simulated_devices()
        prepare(PlacementConfig(simulated_devices=simulated_devices))
        logging.getLogger("ray").addFilter(_not_of_threads)
        logging.getLogger("ray._private.worker").addFilter(_not_of_threads)
        self._role: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Owned by the event loop: put by `_say`, taken by `hear`.
        self._events: list[Event] = []
        self._something = asyncio.Event()
        # What is being answered, by ticket, or by a negative number where no answer is wanted.
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._numbers = itertools.count(1)

    async def begin(self, role: str, *arguments: Any) -> tuple[int, Any]:
        """Become what `role`, PACKAGE.MODULE:CLASS, is: the process's number, and what the role's
        `begin` returns.

        May take long: programs are compiled."""
        self._loop = asyncio.get_running_loop()
        where, _, name = role.partition(":")

        def made() -> Any:
            return getattr(importlib.import_module(where), name)(self._emit, *arguments)

        self._role = await asyncio.to_thread(made)
        return os.getpid(), await self._role.begin()

    def __repr__(self) -> str:
        """What Ray puts before every line that the process prints."""
        return self._name

    async def address(self) -> str:
        """Where a server of this process can listen, HOST:PORT."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    async def tell(self, messages: Sequence[Message]) -> None:
        """Questions, in order; what is answered comes by `hear`."""
        for ticket, verb, arguments in messages:
            if verb:
                self._ask(ticket, getattr(self._role, verb), arguments)
            elif ticket in self._tasks:
                self._tasks[ticket].cancel()

    async def hear(self, timeout_s: float) -> list[tuple[str, int, str, Any]]:
        """What was said since the last time, waited for, with CPU_S; that alone where nothing is
        said within timeout_s. One listener."""
        cpu_s = ("reported", 0, CPU_S, time.process_time())
        try:
            async with asyncio.timeout(timeout_s):
                await self._something.wait()
        except TimeoutError:
            return [cpu_s]
        events, self._events = (
            self._events[:MAX_CONCURRENT_COMMANDS],
            self._events[MAX_CONCURRENT_COMMANDS:],
        )
        if not self._events:
            self._something.clear()
        return [cpu_s, *((event.kind, event.ticket, event.name, event.what) for event in events)]

    async def end(self) -> None:
        """Close the role."""
        if self._role is not None:
            await self._role.end()

    def _ask(self, ticket: int, verb: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            found = verb(*arguments)
        except Exception as error:
            self._failed(ticket, error)
            return
        if isawaitable(found):
            number = ticket or -next(self._numbers)
            task = self._tasks[number] = asyncio.ensure_future(self._answered(ticket, found))
            task.add_done_callback(lambda _: self._tasks.pop(number))
        elif ticket:
            self._say(Event("done", ticket, "", found))

    async def _answered(self, ticket: int, found: Awaitable[Any]) -> None:
        try:
            answer = await found
            if ticket:
                self._say(Event("done", ticket, "", answer))
        except Exception as error:
            self._failed(ticket, error)

    def _failed(self, ticket: int, error: Exception) -> None:
        self._say(Event("failed", ticket, type(error).__name__, str(error)))

    def _emit(self, topic: str, what: Any) -> None:
        assert self._loop is not None, "a role is made by `begin`"
        self._loop.call_soon_threadsafe(self._say, Event("reported", 0, topic, what))

    def _say(self, event: Event) -> None:
        self._events.append(event)
        self._something.set()


def _not_of_threads(record: logging.LogRecord) -> bool:
    """Ray warns of waiting in an asynchronous actor, also where threads of its own wait."""
    return "Using blocking ray.get" not in record.getMessage()
