"""Parts that do the same work, by number: they join, are lost, and are waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from areal_jax.cluster.connection import END_TIMEOUT_S
from areal_jax.errors import WorkerDied


@runtime_checkable
class Channel(Protocol):
    """The way to a worker: `launch.connection.Connection`, or one under simulated time."""

    @property
    def name(self) -> str: ...
    @property
    def process_id(self) -> int: ...
    @property
    def cpu_s(self) -> float: ...
    def listen(
        self, reported: Callable[[str, Any], None], on_loss: Callable[[WorkerDied], None]
    ) -> None: ...
    def ask(self, verb: str, *arguments: Any) -> asyncio.Future[Any]: ...
    def tell(self, verb: str, *arguments: Any) -> None: ...
    def give_up(self, why: str, *, tell: bool = True) -> None: ...
    async def close(self, timeout_s: float = END_TIMEOUT_S) -> None: ...


class Registry(dict[int, Channel]):
    """Those that there are. Use it from the asyncio thread."""

    def __init__(self) -> None:
        super().__init__()
        self.num_deaths = 0
        # Set, and replaced, at every change that someone may wait for.
        self._changed = asyncio.Event()

    def join(
        self,
        number: int,
        connection: Channel,
        *,
        reported: Callable[[str, Any], None],
        left: Callable[[WorkerDied], None],
        on_loss: Callable[[], None],
    ) -> None:
        """There is another one. Args: told: what it tells. left: to be done when it is lost, and
        then on_loss."""

        def lost(loss: WorkerDied) -> None:
            if self.pop(number, None) is not None:
                self.num_deaths += 1
                left(loss)
            on_loss()

        self[number] = connection
        connection.listen(reported, lost)
        self.notify()

    def notify(self) -> None:
        """Let whoever waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Wait until something holds. TimeoutError where it does not in time."""
        async with asyncio.timeout(timeout_s):
            while not holds():
                await self._changed.wait()

    async def close(self) -> None:
        """End all of them."""
        connections = list(self.values())
        self.clear()
        await asyncio.gather(*(connection.close() for connection in connections))
