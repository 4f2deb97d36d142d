"""Blocking work beside an event loop, and tasks that nothing awaits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def log_failure(task: asyncio.Task[Any]) -> None:
    """Log how a task failed: the callback of a task that nothing awaits before its owner closes."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed: %s", task.get_name(), error, exc_info=error)


async def run_in_thread(function: Callable[[], T], name: str) -> T:
    """Call a function in its own daemon thread and await its result.

    The end of the process does not wait for the thread. Cancellation abandons it. The event loop's
    own pool is not used: its few threads train.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            outcome = done.set_result, function()
        except Exception as error:  # handed on to the awaiting task
            outcome = done.set_exception, error
        try:
            loop.call_soon_threadsafe(settle, *outcome)
        except RuntimeError:
            # A closed loop has no task that awaits the result.
            if not loop.is_closed():
                raise

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
