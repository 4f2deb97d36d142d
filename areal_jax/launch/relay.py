"""Weights from trainer hosts to engines: what every host says of a version is brought together, and every engine told of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from areal_jax.launch.connection import PartLost

logger = logging.getLogger(__name__)


@runtime_checkable
class Gives(Protocol):
    """Trainer hosts."""

    @property
    def num_hosts(self) -> int: ...
    @property
    def is_stepping(self) -> bool: ...
    def publish(self, version: int) -> None: ...
    async def contribution(self, host: int, after: int) -> Any: ...
    def metrics(self) -> Mapping[str, tuple[float, float]]: ...


@runtime_checkable
class Takes(Protocol):
    """Engines."""

    def offer(self, version: int, contributions: Any) -> None: ...
    async def arrived(self, version: int, timeout_s: float) -> None: ...


class Relay:
    """The weights themselves do not come by here, only where they are. Use it from the asyncio thread.

    One version is under way at a time, so that all hosts give the same one. The newest of what is published meanwhile follows,
    unless the trainer is at work on the next one by then."""

    def __init__(self, trainers: Gives, engines: Takes, *, offer_timeout_s: float) -> None:
        self._trainers, self._engines, self._offer_timeout_s = trainers, engines, offer_timeout_s
        self._loop = asyncio.get_running_loop()
        # The newest version that all hosts have given, and where: for engines that join.
        self._newest: tuple[int, Any] | None = None
        self._wanted: int | None = None
        """Published while another one was under way."""
        self._is_held = False
        # Owned by this object; carries one version and ends.
        self._carrier: asyncio.Task[None] | None = None
        self.num_skipped = 0

    def publish(self, version: int, params: Any) -> None:
        """Send a version on its way without waiting. Args: params: those of the trainer hosts, which have them."""
        if self._carrier is None:
            self._carry(version)
        else:
            self._wanted = version

    def offer(self) -> None:
        """Tell engines of the newest version; for those that have joined."""
        if self._newest is not None and not self._is_held:
            self._engines.offer(*self._newest)

    def wait_everywhere(self, at_least: int, timeout_s: float) -> None:
        """As `Mailbox.wait_everywhere`; in a worker thread."""
        asyncio.run_coroutine_threadsafe(self._engines.arrived(at_least, timeout_s), self._loop).result()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """As `Mailbox.holding`."""
        if self._is_held:
            raise RuntimeError("weights are held already: one evaluation at a time")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self.offer()

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """As `Mailbox.metrics`, of the first trainer host; and how many versions could not be had."""
        return {**self._trainers.metrics(), "skipped": (float(self.num_skipped), 1.0)}

    async def close(self) -> None:
        """Carry nothing more."""
        if self._carrier is not None:
            self._carrier.cancel()
            await asyncio.gather(self._carrier, return_exceptions=True)

    def _carry(self, version: int) -> None:
        self._wanted = None
        self._trainers.publish(version)
        self._carrier = asyncio.create_task(self._carried(version), name=f"weights of version {version}")
        self._carrier.add_done_callback(self._ended)

    async def _carried(self, version: int) -> None:
        hosts = range(self._trainers.num_hosts)
        try:
            async with asyncio.timeout(self._offer_timeout_s):
                contributions = await asyncio.gather(*(self._of(host, version) for host in hosts))
        except TimeoutError:
            self.num_skipped += 1
            logger.warning("version %d is skipped: not every host gave it within %g s", version, self._offer_timeout_s)
            return
        self._newest = version, contributions
        self.offer()

    async def _of(self, host: int, version: int) -> Any:
        while (found := await self._trainers.contribution(host, version - 1)) is None:
            pass
        return found

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._carrier = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None and not isinstance(error, PartLost):
            logger.error("%s failed", task.get_name(), exc_info=error)
        # Later the hosts have other parameters, which will be published under their own version.
        if self._wanted is not None and not self._trainers.is_stepping:
            self._carry(self._wanted)
