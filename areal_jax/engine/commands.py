"""Commands from the asyncio thread to the engine thread, and replies in the other direction."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class CommandReply(Generic[T]):
    """A future of the asyncio thread, made there, that the engine thread resolves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self._loop.create_future()

    def set_result(self, result: T) -> None:
        """Resolve the future, unless it is done."""
        self.call(lambda: self.future.set_result(result))

    def set_exception(self, error: Exception) -> None:
        """Fail the future, unless it is done."""
        self.call(lambda: self.future.set_exception(error))

    def call(self, act: Callable[[], Any]) -> None:
        """Call `act` in the asyncio thread, unless the future is done by then."""
        try:
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else act())
        except RuntimeError:
            # Nobody waits for the future of a closed event loop.
            if not self._loop.is_closed():
                raise


class _Command(NamedTuple):
    act: Callable[[], None]
    reply: CommandReply[Any] | None
    """Fails if the engine thread ends before it has executed the command."""


class CommandQueue:
    """Commands, put by any thread and executed by the engine thread between two dispatches."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._current: _Command | None = None
        # Guards `_stopped` and puts, so that no command is left in a stopped queue.
        self._lock = threading.Lock()
        self._stopped: Exception | None = None

    @property
    def is_empty(self) -> bool:
        """Whether no command waits."""
        return self._queue.empty()

    def put(self, act: Callable[[], None], reply: CommandReply[Any] | None = None) -> None:
        """Add a command; its reply fails if the queue is stopped before the command is executed."""
        with self._lock:
            if self._stopped is None:
                self._queue.put(_Command(act, reply))
            elif reply is not None:
                reply.set_exception(self._stopped)

    def drain(self, timeout_s: float = 0.0) -> None:
        """Execute all queued commands, after waiting up to `timeout_s` for the first one."""
        while True:
            try:
                self._current = (
                    self._queue.get(timeout=timeout_s) if timeout_s else self._queue.get_nowait()
                )
            except queue.Empty:
                return
            self._current.act()
            self._current, timeout_s = None, 0.0

    def stop(self, reason: Exception) -> Exception:
        """Fail all commands that are not executed, and all that follow.

        Returns:
            The reason of the first call.
        """
        with self._lock:
            self._stopped = self._stopped or reason
            commands = [] if self._current is None else [self._current]
            while not self._queue.empty():
                commands.append(self._queue.get_nowait())
        for command in commands:
            if command.reply is not None:
                command.reply.set_exception(self._stopped)
        return self._stopped
