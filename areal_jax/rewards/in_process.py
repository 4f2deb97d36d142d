"""Reward functions without import path, called in threads of this process."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from areal_jax.python_objects import PythonObject
from areal_jax.records import Task
from areal_jax.rewards.adapters import adapt
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.functions import graded, traceback_of
from areal_jax.threads import run_in_thread

ASYNC_PER_WORKER = 8
"""Concurrent calls of an async function, for each of rewards.num_workers."""


class InProcessGrader:
    """Calls a lambda, a closure or a function of a notebook, which no other process can import.

    The function sees and changes the caller's variables, as in other trainers. The price: a thread
    cannot be killed. A call that exceeds rewards.timeout_s is graded `timeout` and abandoned, and
    its thread ends when the function returns; what an async function awaits is cancelled. A
    function that computes for long, or that may crash, belongs into a file.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Adapt the function.

        Raises:
            TypeError: it has a signature of no known framework.
        """
        assert isinstance(config.function, PythonObject)
        function = config.function.object
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._form = None if config.form is None else re.compile(config.form, re.DOTALL)
        is_async = inspect.iscoroutinefunction(function)
        self._places = asyncio.Semaphore(config.num_workers * (ASYNC_PER_WORKER if is_async else 1))
        self._waiting = threading.local()
        self._function = adapt(function, self._finish)

    async def grade(self, task: Task, answer: str) -> dict[str, Any]:
        """Grade an answer; the result as of a reward worker."""
        if self._form is not None and not self._form.fullmatch(answer):
            return {"kind": "no_answer", "detail": "not in rewards.form", "failed": False}
        timeout_s, awaited = self._config.timeout_s, list[Future[Any]]()
        async with self._places:
            try:
                async with asyncio.timeout(timeout_s):
                    return await run_in_thread(partial(self._call, task, answer, awaited), "reward")
            except TimeoutError:
                for each in awaited:
                    each.cancel()
                return {
                    "kind": "timeout",
                    "detail": f"no grade within rewards.timeout_s={timeout_s:g} s",
                }

    def close(self) -> None:
        """End the thread of async functions."""
        if self._loop is not None and self._thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None

    def _call(self, task: Task, answer: str, awaited: list[Future[Any]]) -> dict[str, Any]:
        self._waiting.futures = awaited
        try:
            found = graded(self._function(task, answer), self._config.scale)
        except (Exception, SystemExit) as error:  # the user's code; counted as a failure
            return {
                # As in reward workers: an OSError is the machine's fault.
                "kind": "infrastructure" if isinstance(error, OSError) else "crashed",
                "detail": f"{type(error).__name__}: {error}",
                "trace": traceback_of(error),
            }
        return {**found._asdict(), "detail": "", "failed": False}

    def _finish(self, found: object) -> object:
        """Await what an async function returns, in one loop for all calls: connections that the
        function keeps open belong to it.
        """
        if not inspect.isawaitable(found):
            return found

        async def awaiting() -> object:
            return await found

        future = asyncio.run_coroutine_threadsafe(awaiting(), self._running_loop())
        self._waiting.futures.append(future)
        return future.result()

    _starting = threading.Lock()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                # Owned by this object; ends with `close`.
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="async rewards", daemon=True
                )
                self._thread.start()
            return self._loop


async def _cancel_others() -> None:
    """Cancel all other tasks of the running loop, and wait for their ends."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
