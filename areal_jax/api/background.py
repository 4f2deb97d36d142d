"""Work in a thread of its own, where the caller's thread has a running event loop, as notebooks
have.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

SIGNAL_CHECK_S = 0.2
"""Longest time until the main thread notices a signal."""


def call_beside_loop(work: Callable[[], T], request_stop: Callable[[], object], name: str) -> T:
    """Call a function that runs an event loop: in this thread, or in its own where this thread has
    a running loop.

    Args:
        request_stop: asks the function to end early; called where KeyboardInterrupt comes while it
            runs in its own thread. A second KeyboardInterrupt abandons it.
        name: of the thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()
    thread, done = in_own_thread(work, name)
    try:
        try:
            _wait(done)
        except KeyboardInterrupt:
            request_stop()
            _wait(done)
        return done.result()
    finally:
        if done.done():
            thread.join()


async def call_beside(work: Callable[[], T], request_stop: Callable[[], object], name: str) -> T:
    """Await a function that runs an event loop, in its own thread.

    Args:
        request_stop: asks the function to end early; called on cancellation, which then waits for
            the end of the function.
    """
    thread, done = in_own_thread(work, name)
    waiting = asyncio.wrap_future(done)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        request_stop()
        await asyncio.wait([waiting])
        waiting.exception()
        raise
    finally:
        if done.done():
            thread.join()


def _wait(done: Future[T]) -> None:
    # A signal that another thread receives does not end a wait without timeout.
    while not wait([done], SIGNAL_CHECK_S).done:
        pass


def in_own_thread(work: Callable[[], T], name: str) -> tuple[threading.Thread, Future[T]]:
    """Call a function in its own daemon thread; the thread, and its outcome."""
    done = Future[T]()

    def run() -> None:
        try:
            found = work()
        except BaseException as error:  # handed on to the waiting thread
            done.set_exception(error)
        else:
            done.set_result(found)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread, done
