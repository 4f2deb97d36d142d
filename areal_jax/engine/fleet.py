"""Several decode engines of one process behind one interface."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack

from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.routing import Router, merge_engines
from areal_jax.records import Completion, Request


class Fleet:
    """The local `records.Engine`: one engine loop or several, on meshes of their own.

    Use it from the asyncio thread.
    """

    def __init__(self, loops: Sequence[EngineLoop]):
        self._loops, self._router = loops, Router()
        self._on_assignment: Callable[[str, int], None] = lambda _request, _engine: None
        for number, loop in enumerate(loops):
            self._router.add_engine(number, loop.num_slots)

    def start(self) -> None:
        """Start the threads."""
        for loop in self._loops:
            loop.start()

    def close(self) -> None:
        """Close all engine loops; unfinished requests fail with EngineStopped."""
        for loop in self._loops:
            loop.close()

    def on_assignment(self, callback: Callable[[str, int], None]) -> None:
        """Set the callback for the id of every request and the number of its engine."""
        self._on_assignment = callback

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        """Submit a request to one of the engine loops, as `EngineLoop.submit`."""
        number = self._router.route(request.prompt_tokens, request.num_samples)
        with ExitStack() as undo:
            undo.callback(self._router.complete, number, request.num_samples)
            future = self._loops[number].submit(request)
            undo.pop_all()
        self._on_assignment(request.id, number)
        future.add_done_callback(lambda _: self._router.complete(number, request.num_samples))
        return future

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        """Return partial completions of all engines, each between two of its dispatches."""
        partials: dict[str, tuple[Completion, ...]] = {}
        for found in await asyncio.gather(*(loop.snapshot() for loop in self._loops)):
            partials |= found
        return partials

    def progress(self) -> Hashable:
        """Return a value that changes whenever an engine decodes a token or swaps weights."""
        return tuple((loop.num_tokens, loop.version) for loop in self._loops)

    def describe_wait(self) -> str:
        """Describe the load of each engine."""
        return "; ".join(
            f"engine {number} has version {loop.version}, {self._router.load(number)} samples to "
            "decode"
            for number, loop in enumerate(self._loops)
        )

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Merge the metrics of all engines: counts and rates add up, means are averaged."""
        return merge_engines([loop.metrics() for loop in self._loops])
