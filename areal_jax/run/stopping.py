"""Stop requests: the first Ctrl-C or SIGTERM ends a run after its current step."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from areal_jax.cluster.signals import SIGNALS, save_handlers

T = TypeVar("T")


class StopRequest(asyncio.Event):
    """An event that the first Ctrl-C or SIGTERM sets."""

    number = signal.SIGINT
    """The signal that set the event."""

    async def unless_set(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None where the event is set first.

        Work does not start where the event is already set. A result that is ready is never
        dropped: a batch that was taken is no longer in the buffer.
        """
        if self.is_set():
            work.close()
            return None
        wanted, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait((wanted, stopped), return_when=asyncio.FIRST_COMPLETED)
            return await wanted if wanted.done() else None
        finally:
            wanted.cancel()
            stopped.cancel()
            await asyncio.gather(wanted, stopped, return_exceptions=True)


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """Set an event on the first Ctrl-C or SIGTERM; the second one acts as it would without this.
    Only the main thread receives signals: elsewhere the event is set by others.
    """
    stop, loop = StopRequest(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    restore = save_handlers()

    def remove_handlers() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        restore()

    def request_stop(number: signal.Signals) -> None:
        stop.number = number
        stop.set()
        remove_handlers()

    for number in SIGNALS:
        loop.add_signal_handler(number, request_stop, number)
    try:
        yield stop
    finally:
        remove_handlers()
