"""Registry of the live workers of one kind, by number."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from areal_jax.cluster.connection import END_TIMEOUT_S
from areal_jax.errors import WorkerDied


@runtime_checkable
class WorkerHandle(Protocol):
    """Handle of a worker: `cluster.connection.Connection`, or its model under simulated time."""

    @property
    def name(self) -> str: ...
    @property
    def process_id(self) -> int: ...
    @property
    def cpu_s(self) -> float: ...
    def subscribe(
        self, on_report: Callable[[str, Any], None], on_death: Callable[[WorkerDied], None]
    ) -> None: ...
    def call(self, method: str, *arguments: Any) -> asyncio.Future[Any]: ...
    def notify(self, method: str, *arguments: Any) -> None: ...
    def mark_dead(self, why: str, *, report: bool = True) -> None: ...
    async def close(self, timeout_s: float = END_TIMEOUT_S) -> None: ...


class Registry(dict[int, WorkerHandle]):
    """Handles of live workers; use it from the asyncio thread."""

    def __init__(self) -> None:
        super().__init__()
        self.num_deaths = 0
        # Set and replaced at every change that `wait_until` may wait for.
        self._changed = asyncio.Event()

    def join(
        self,
        number: int,
        connection: WorkerHandle,
        *,
        on_report: Callable[[str, Any], None],
        on_removal: Callable[[WorkerDied], None],
        on_death: Callable[[], None],
    ) -> None:
        """Add a worker.

        Args:
            number: Key of the worker.
            connection: Handle of the worker.
            on_report: Callback for its reports.
            on_removal: Callback after its death, once it is removed.
            on_death: Callback after `on_removal`.
        """

        def handle_death(death: WorkerDied) -> None:
            if self.pop(number, None) is not None:
                self.num_deaths += 1
                on_removal(death)
            on_death()

        self[number] = connection
        connection.subscribe(on_report, handle_death)
        self.wake_waiters()

    def wake_waiters(self) -> None:
        """Let all waiters check their condition again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a condition holds.

        Raises:
            TimeoutError: It does not hold within `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            while not condition():
                await self._changed.wait()

    async def close(self) -> None:
        """Close all workers."""
        connections = list(self.values())
        self.clear()
        await asyncio.gather(*(connection.close() for connection in connections))
