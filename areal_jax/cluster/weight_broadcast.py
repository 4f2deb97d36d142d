"""Weight broadcast: collect shard locations of all trainer hosts, announce them to engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from areal_jax.errors import WorkerDied

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""Pause before a failed publication is repeated, in seconds."""


@runtime_checkable
class TrainerGroup(Protocol):
    """Trainer hosts, as the weight broadcast uses them."""

    @property
    def num_hosts(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def is_stepping(self) -> bool: ...
    def publish(self, version: int, *, again: bool = False) -> None: ...
    async def contribution(self, host: int, after: int) -> Any: ...
    def metrics(self) -> Mapping[str, tuple[float, float]]: ...
    def mark_dead(self, why: str) -> None: ...


@runtime_checkable
class EngineGroup(Protocol):
    """Engines, as the weight broadcast uses them."""

    def update_weights(self, version: int, contributions: Any) -> None: ...
    def on_update_failure(self, callback: Callable[[int], None]) -> None: ...
    def withdraw_weights(self) -> None: ...
    async def wait_for_version(self, version: int, timeout_s: float) -> None: ...


class WeightBroadcast:
    """Weight channel between trainer hosts and engines; use it from the asyncio thread.

    It carries shard locations, not weights. One version is in flight at a time, so that all hosts
    publish the same one. The newest version published meanwhile follows, unless the trainer is in
    its next step by then. A version that hosts failed to publish or engines failed to pull is
    published again as long as the trainer has it.
    """

    def __init__(
        self, trainers: TrainerGroup, engines: EngineGroup, *, collect_timeout_s: float
    ) -> None:
        self._trainers, self._engines, self._collect_timeout_s = (
            trainers,
            engines,
            collect_timeout_s,
        )
        self._loop = asyncio.get_running_loop()
        self._newest: tuple[int, Any] | None = None
        """Newest version that all hosts have published, and its shard locations."""
        self._next_version: int | None = None
        """Version published while another one was in flight."""
        self._is_paused = False
        # Owned by this object; collects one version and ends.
        self._collector: asyncio.Task[None] | None = None
        self._closed = False
        self.num_skipped = 0
        engines.on_update_failure(self._handle_update_failure)

    def progress(self) -> Hashable:
        """Return the newest version that all hosts have published."""
        return None if self._newest is None else self._newest[0]

    def describe_wait(self) -> str:
        """Describe the announced version, the one in flight, and whether it is paused."""
        announced = "no version is" if self._newest is None else f"version {self._newest[0]} is"
        paused = ", paused for an evaluation" if self._is_paused else ""
        return f"{announced} announced to engines{paused}" + (
            f", {self._collector.get_name()} in flight" if self._collector else ""
        )

    def replace_stalled(self, why: str) -> str | None:
        """Kill the trainer hosts if a version is in flight.

        Returns:
            Their name; None if no version is in flight.
        """
        if self._collector is None:
            return None
        self._trainers.mark_dead(why)
        return "trainer hosts"

    def publish(self, version: int, params: Any) -> None:
        """Start `update_weights` of all engines, by a broadcast, without waiting.

        Args:
            version: Version of the weights.
            params: Unused: the trainer hosts have the parameters.
        """
        if self._collector is None:
            self._start(version)
        else:
            self._next_version = version

    def wait_all_engines(self, at_least: int, timeout_s: float) -> None:
        """Block until every engine has a version of at least `at_least`; call it from a thread."""
        asyncio.run_coroutine_threadsafe(
            self._engines.wait_for_version(at_least, timeout_s), self._loop
        ).result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Announce nothing while inside; the newest version follows.

        Engines that join meanwhile receive the version that was announced before.

        Raises:
            RuntimeError: The broadcast is paused already.
        """
        if self._is_paused:
            raise RuntimeError("the weight broadcast is paused already: one evaluation at a time")
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._announce()

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """Return the first trainer host's metrics and the number of skipped versions."""
        return {**self._trainers.metrics(), "skipped": (float(self.num_skipped), 1.0)}

    async def withdraw(self) -> None:
        """Announce nothing until the next call of `publish`: the trainer hosts end."""
        self._engines.withdraw_weights()
        self._newest = self._next_version = None
        await self._stop_collecting()

    async def close(self) -> None:
        """Stop broadcasting."""
        self._closed = True
        await self._stop_collecting()

    async def _stop_collecting(self) -> None:
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)

    def _announce(self) -> None:
        if self._newest is not None and not self._is_paused:
            self._engines.update_weights(*self._newest)

    def _start(self, version: int, *, again: bool = False) -> None:
        self._next_version = None
        self._trainers.publish(version, again=again)
        self._collector = asyncio.create_task(
            self._collect(version), name=f"weights of version {version}"
        )
        self._collector.add_done_callback(self._handle_end)

    async def _collect(self, version: int) -> None:
        hosts = range(self._trainers.num_hosts)
        try:
            async with asyncio.timeout(self._collect_timeout_s):
                contributions = await asyncio.gather(
                    *(self._collect_from(host, version) for host in hosts)
                )
        except TimeoutError:
            self.num_skipped += 1
            logger.warning(
                "weight update skipped: version=%d, not every host published it within %g s",
                version,
                self._collect_timeout_s,
            )
            return
        is_announced = self._newest is not None and self._newest[0] == version
        self._newest = version, contributions
        if is_announced:
            # Published again, also while paused: engines that failed to pull it need it.
            self._engines.update_weights(version, contributions)
        else:
            self._announce()

    async def _collect_from(self, host: int, version: int) -> Any:
        """Poll a host until it has published a version; return its shard locations."""
        while True:
            found = await self._trainers.contribution(host, version - 1)
            if found is not None and not isinstance(found, str):
                return found
            if self._can_repeat(version):
                # If it did not fit into the store, all hosts put it again: the copy is one program
                # on all of them.
                self._trainers.publish(version, again=found is not None)
                if found is not None:
                    await asyncio.sleep(RETRY_S)
            elif found is not None:
                raise _NotPublished(f"host {host}: {found}")

    def _can_repeat(self, version: int) -> bool:
        """Return whether the hosts still have the parameters of a version."""
        return self._trainers.version == version and not self._trainers.is_stepping

    def _handle_update_failure(self, version: int) -> None:
        """Publish a version again after an engine repeatedly failed to pull it."""
        if self._newest is None or self._collector is not None or version > self._newest[0]:
            return
        newest = self._newest[0]
        if version == newest and self._can_repeat(version):
            self._start(version, again=True)
        elif version < newest and self._is_paused:
            logger.warning(
                "weight update failed while paused: version=%d, announcing version=%d instead",
                version,
                newest,
            )
            self._engines.update_weights(*self._newest)

    def _handle_end(self, task: asyncio.Task[None]) -> None:
        self._collector = None
        if task.cancelled() or self._closed:
            return
        version = int(task.get_name().rpartition(" ")[2])
        if (error := task.exception()) is not None and not isinstance(error, WorkerDied):
            if not isinstance(error, _NotPublished):
                logger.error("%s failed", task.get_name(), exc_info=error)
                self._trainers.mark_dead(f"{task.get_name()} failed: {error}")
                return
            self.num_skipped += 1
            logger.warning("weight update skipped: version=%d, %s", version, error)
        next_version = self._next_version
        if (
            next_version is None
            and error is None
            and (self._newest is None or self._newest[0] < version)
        ):
            next_version = version
        # After the step the hosts have other parameters and publish them as another version.
        if next_version is not None and not self._trainers.is_stepping:
            self._start(next_version)


class _NotPublished(Exception):
    """Reason why a host will never publish a version."""
