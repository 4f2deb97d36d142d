"""A clock that leaps: an asyncio event loop in which waiting takes no time, so that real asyncio
code runs through hours of it.

    run(main())     # like asyncio.run, with loop.time() counting simulated seconds from 0

Whenever nothing is ready, time jumps to the next timer. All that reads the loop's time
(asyncio.sleep, timeout, call_later) follows; what reads another clock, or waits for another thread,
does not belong under it.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NoEventsLeft(RuntimeError):
    """Every task waits, and no timer is set that could wake one."""


class _Leap(selectors.SelectSelector):
    """Where an event loop would sleep until its next timer, time goes there at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.failure: BaseException | None = None

    def select(self, timeout: int | float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if timeout is None:
            raise NoEventsLeft(
                "all tasks wait for each other: no timer is set, and nothing comes from outside"
            )
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time leaps to the next timer."""

    def __init__(self) -> None:
        self._leap = _Leap()
        super().__init__(self._leap)

    def time(self) -> float:
        """Simulated seconds since the loop was made."""
        return self._leap.now_s

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """An error in a callback ends the run, where a real loop would log it and go on."""
        if "handle" in context and isinstance(error := context.get("exception"), BaseException):
            self._leap.failure = error
        else:
            super().call_exception_handler(context)


def run(main: Coroutine[Any, Any, T]) -> T:
    """What `main` returns, run under simulated time. NoEventsLeft where it would wait for ever."""
    # Tens of thousands of tasks live at once: looking through them for cycles as often as usual
    # takes a third of all time.
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*thresholds)
