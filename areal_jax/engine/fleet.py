"""Several decode engines of one process that answer as one."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence

from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.routing import Router, together
from areal_jax.records import Completion, Request


class Fleet:
    """The local `records.Engine`: one engine loop or several, on meshes of their own. Use it from
    the asyncio thread."""

    def __init__(self, engine_loops: Sequence[EngineLoop]):
        self._engine_loops, self._router = engine_loops, Router()
        for number, engine_loop in enumerate(engine_loops):
            self._router.join(number, engine_loop.num_slots)

    def start(self) -> None:
        """Start answering."""
        for engine_loop in self._engine_loops:
            engine_loop.start()

    def close(self) -> None:
        """End all engine loops; requests that are not finished fail with EngineStopped."""
        for engine_loop in self._engine_loops:
            engine_loop.close()

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """As `EngineLoop.submit`, by one of the engine loops."""
        number = self._router.give(request.prompt_tokens, request.num_samples)
        try:
            future = self._engine_loops[number].submit(request)
        except Exception:
            self._router.done(number, request.num_samples)
            raise
        future.add_done_callback(lambda _: self._router.done(number, request.num_samples))
        return future

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """As `EngineLoop.snapshot`: of every engine loop between two dispatches of its own."""
        partials: dict[str, tuple[Completion, ...]] = {}
        for found in await asyncio.gather(
            *(engine_loop.snapshot() for engine_loop in self._engine_loops)
        ):
            partials |= found
        return partials

    def progress(self) -> Hashable:
        """Different whenever a engine loop has decoded a token or taken new weights."""
        return tuple(
            (engine_loop.num_tokens, engine_loop.version) for engine_loop in self._engine_loops
        )

    def waits(self) -> str:
        """What each engine loop has to do, in words."""
        return "; ".join(
            (
                f"engine {number} has version {engine_loop.version}, {self._router.load(number)} "
                "samples to decode"
            )
            for number, engine_loop in enumerate(self._engine_loops)
        )

    def metrics(self) -> dict[str, tuple[float, float]]:
        """As `EngineLoop.metrics`, of all engine loops together: what is counted in one time adds
        up, what is a mean stays one."""
        return together([engine_loop.metrics() for engine_loop in self._engine_loops])
