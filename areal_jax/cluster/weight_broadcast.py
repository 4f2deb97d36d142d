"""Weights from trainer hosts to engines: what every host says of a version is brought together, and
every engine told of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

from areal_jax.errors import WorkerDied

logger = logging.getLogger(__name__)

RETRY_S = 2.0
"""Pause before what failed is tried again."""


@runtime_checkable
class Gives(Protocol):
    """Trainer hosts."""

    @property
    def num_hosts(self) -> int: ...
    @property
    def version(self) -> int: ...
    @property
    def is_stepping(self) -> bool: ...
    def publish(self, version: int, *, again: bool = False) -> None: ...
    async def contribution(self, host: int, after: int) -> Any: ...
    def metrics(self) -> Mapping[str, tuple[float, float]]: ...
    def give_up(self, why: str) -> None: ...


@runtime_checkable
class Takes(Protocol):
    """Engines."""

    def offer(self, version: int, contributions: Any) -> None: ...
    def on_skip(self, skipped: Callable[[int], None]) -> None: ...
    async def arrived(self, version: int, timeout_s: float) -> None: ...


class Relay:
    """The weights themselves do not come by here, only where they are. Use it from the asyncio
    thread.

    One version is under way at a time, so that all hosts give the same one. The newest of what is
    published meanwhile follows, unless the trainer is at work on the next one by then. A version
    that hosts could not give, or engines could not take, is given anew for as long as the trainer
    has it."""

    def __init__(self, trainers: Gives, engines: Takes, *, offer_timeout_s: float) -> None:
        self._trainers, self._engines, self._offer_timeout_s = trainers, engines, offer_timeout_s
        self._loop = asyncio.get_running_loop()
        self._newest: tuple[int, Any] | None = None
        """The newest version that all hosts have given, and where."""
        self._wanted: int | None = None
        """Published while another one was under way."""
        self._is_held = False
        # Owned by this object; carries one version and ends.
        self._carrier: asyncio.Task[None] | None = None
        self._closed = False
        self.num_skipped = 0
        engines.on_skip(self._skipped)

    def progress(self) -> Hashable:
        """As `Waits.progress`: the newest version that all hosts have given."""
        return None if self._newest is None else self._newest[0]

    def waits(self) -> str:
        """As `Waits.waits`: the version that is published, and whether it is held."""
        given = "no version is" if self._newest is None else f"version {self._newest[0]} is"
        held = ", held for an evaluation" if self._is_held else ""
        return f"{given} given to engines{held}" + (
            f", {self._carrier.get_name()} under way" if self._carrier else ""
        )

    def replace_stalled(self, why: str) -> str | None:
        """Give up the trainer hosts, where they owe a version; their name, or None."""
        if self._carrier is None:
            return None
        self._trainers.give_up(why)
        return "trainer hosts"

    def publish(self, version: int, params: Any) -> None:
        """Send a version on its way without waiting. Args: params: those of the trainer hosts,
        which have them."""
        if self._carrier is None:
            self._carry(version)
        else:
            self._wanted = version

    def wait_everywhere(self, at_least: int, timeout_s: float) -> None:
        """As `WeightChannel.wait_everywhere`; in a worker thread."""
        asyncio.run_coroutine_threadsafe(
            self._engines.arrived(at_least, timeout_s), self._loop
        ).result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """As `WeightChannel.paused`. Engines that join meanwhile are given the version that is
        held."""
        if self._is_held:
            raise RuntimeError("weights are held already: one evaluation at a time")
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            self._offer()

    def metrics(self) -> Mapping[str, tuple[float, float]]:
        """As `WeightChannel.metrics`, of the first trainer host; and how many versions could not be
        had."""
        return {**self._trainers.metrics(), "skipped": (float(self.num_skipped), 1.0)}

    async def close(self) -> None:
        """Carry nothing more."""
        self._closed = True
        if self._carrier is not None:
            self._carrier.cancel()
            await asyncio.gather(self._carrier, return_exceptions=True)

    def _offer(self) -> None:
        if self._newest is not None and not self._is_held:
            self._engines.offer(*self._newest)

    def _carry(self, version: int, *, again: bool = False) -> None:
        self._wanted = None
        self._trainers.publish(version, again=again)
        self._carrier = asyncio.create_task(
            self._carried(version), name=f"weights of version {version}"
        )
        self._carrier.add_done_callback(self._ended)

    async def _carried(self, version: int) -> None:
        hosts = range(self._trainers.num_hosts)
        try:
            async with asyncio.timeout(self._offer_timeout_s):
                contributions = await asyncio.gather(*(self._of(host, version) for host in hosts))
        except TimeoutError:
            self.num_skipped += 1
            logger.warning(
                "version %d is skipped: not every host gave it within %g s",
                version,
                self._offer_timeout_s,
            )
            return
        is_held_version = self._newest is not None and self._newest[0] == version
        self._newest = version, contributions
        if is_held_version:
            # Given anew: engines that could not take it may, also while it is held.
            self._engines.offer(version, contributions)
        else:
            self._offer()

    async def _of(self, host: int, version: int) -> Any:
        """What a host gives of a version, asked for until it is there."""
        while True:
            found = await self._trainers.contribution(host, version - 1)
            if found is not None and not isinstance(found, str):
                return found
            if self._may_repeat(version):
                # Where it did not fit into the store all hosts put it anew: they work on one
                # program.
                self._trainers.publish(version, again=found is not None)
                if found is not None:
                    await asyncio.sleep(RETRY_S)
            elif found is not None:
                raise _NotGiven(f"host {host}: {found}")

    def _may_repeat(self, version: int) -> bool:
        """Whether the hosts still have the parameters of a version. Later they will publish others,
        under their own version."""
        return self._trainers.version == version and not self._trainers.is_stepping

    def _skipped(self, version: int) -> None:
        """An engine could not take a version that it was offered."""
        if self._newest is None or self._carrier is not None or version > self._newest[0]:
            return
        newest = self._newest[0]
        if version == newest and self._may_repeat(version):
            self._carry(version, again=True)
        elif version < newest and self._is_held:
            logger.warning(
                "version %d, which is held, could not be taken: version %d is offered instead",
                version,
                newest,
            )
            self._engines.offer(*self._newest)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._carrier = None
        if task.cancelled() or self._closed:
            return
        version = int(task.get_name().rpartition(" ")[2])
        if (error := task.exception()) is not None and not isinstance(error, WorkerDied):
            if not isinstance(error, _NotGiven):
                logger.error("%s failed", task.get_name(), exc_info=error)
                self._trainers.give_up(f"{task.get_name()} failed: {error}")
                return
            self.num_skipped += 1
            logger.warning("version %d is skipped: %s", version, error)
        wanted = self._wanted
        if wanted is None and error is None and (self._newest is None or self._newest[0] < version):
            wanted = version
        # Later the hosts have other parameters, which will be published under their own version.
        if wanted is not None and not self._trainers.is_stepping:
            self._carry(wanted)


class _NotGiven(Exception):
    """Why a host has no contribution to a version, and never will."""
