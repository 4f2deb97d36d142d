"""Work that may block, beside an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[[], T], name: str) -> T:
    """Call a function in a daemon thread of its own, for which no end of the process waits.
    Cancelled, it is left behind.

    Not in the loop's own pool, whose few threads train."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        if not done.done():
            set_outcome(outcome)

    def work() -> None:
        try:
            settled = done.set_result, function()
        except Exception as error:  # whoever awaits it gets it
            settled = done.set_exception, error
        try:
            loop.call_soon_threadsafe(settle, *settled)
        except RuntimeError:
            # A loop that has ended has nobody left to tell.
            if not loop.is_closed():
                raise

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
