"""Several decode engines of one process that answer as one."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

from areal_jax.engine.driver import Driver
from areal_jax.engine.routing import Router, together
from areal_jax.records import Completion, Request


class Fleet:
    """The local `records.Engine`: one driver or several, on meshes of their own. Use it from the asyncio thread."""

    def __init__(self, drivers: Sequence[Driver]):
        self._drivers, self._router = drivers, Router()
        for number, driver in enumerate(drivers):
            self._router.join(number, driver.num_slots)

    def start(self) -> None:
        """Start answering."""
        for driver in self._drivers:
            driver.start()

    def close(self) -> None:
        """End all drivers; requests that are not finished fail with EngineStopped."""
        for driver in self._drivers:
            driver.close()

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """As `Driver.submit`, by one of the drivers."""
        number = self._router.give(request.prompt_tokens, request.num_samples)
        try:
            future = self._drivers[number].submit(request)
        except Exception:
            self._router.done(number, request.num_samples)
            raise
        future.add_done_callback(lambda _: self._router.done(number, request.num_samples))
        return future

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """As `Driver.snapshot`: of every driver between two dispatches of its own."""
        partials: dict[str, tuple[Completion, ...]] = {}
        for found in await asyncio.gather(*(driver.snapshot() for driver in self._drivers)):
            partials |= found
        return partials

    def progress(self) -> Hashable:
        """Different whenever a driver has decoded a token or taken new weights."""
        return tuple((driver.num_tokens, driver.version) for driver in self._drivers)

    def waits(self) -> str:
        """What each driver has to do, in words."""
        return "; ".join(
            f"engine {number} has version {driver.version}, {self._router.load(number)} samples to decode"
            for number, driver in enumerate(self._drivers)
        )

    def metrics(self) -> dict[str, tuple[float, float]]:
        """As `Driver.metrics`, of all drivers together: what is counted in one time adds up, what is a mean stays one."""
        return together([driver.metrics() for driver in self._drivers])
