"""Simulated clock: an asyncio event loop in which waiting takes no time.

    run(main())     # like asyncio.run, with loop.time() counting simulated seconds from 0

Whenever nothing is ready, time advances to the next timer. Everything that reads the loop's time
(asyncio.sleep, timeout, call_later) follows; code that reads another clock or waits for a thread
cannot run under it.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class NoEventsLeft(RuntimeError):
    """Every task waits and no timer is set: the simulation cannot continue."""


class _AdvancingSelector(selectors.SelectSelector):
    """Advances the simulated time instead of sleeping until the next timer."""

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
                "all tasks wait for each other: no timer is set, and there are no external events"
            )
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time advances to the next timer."""

    def __init__(self) -> None:
        self._advancing = _AdvancingSelector()
        super().__init__(self._advancing)

    def time(self) -> float:
        """Return the simulated seconds since the loop was created."""
        return self._advancing.now_s

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """End the simulation with the error of a callback, which a real loop only logs."""
        if "handle" in context and isinstance(error := context.get("exception"), BaseException):
            self._advancing.failure = error
        else:
            super().call_exception_handler(context)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` under simulated time and return its result.

    Raises:
        NoEventsLeft: it would wait forever.
    """
    # With tens of thousands of tasks, garbage collection at the usual rate takes a third of the
    # time.
    thresholds = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*thresholds)
