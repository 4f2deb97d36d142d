"""Decode engines that serve the adapters of many samplers in one batch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams
from areal_jax.models.config import LoRA
from areal_jax.tinker.pooled_engine import PooledEngine, SamplerWeights, Seat

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EnginePool:
    """Assigns samplers to places in engines; those that wait are served in order of arrival.

    Requests of all samplers with adapters of one bucket of ranks decode together in one engine, and
    all engines share the frozen policy. It has more than 200 lines because assignment and weights
    are about the same places.

    Attributes:
        make_engine: Makes the engine of a bucket.
        bucket: Returns the shape to which adapters of a shape are padded.
        base: The frozen policy in the layout of an engine; None where all parameters are trained.
        load: Loads the weights of a sampler by its path.
        max_engines: Most engines.
        patience_s: Time, in seconds, after which a sampler that waits gets the place that another
            one has held longest: the other's requests under way end there, later ones wait.
    """

    make_engine: Callable[[LoRA | None], DecodeEngine]
    bucket: Callable[[LoRA], LoRA]
    base: Callable[[], EngineParams | None]
    load: Callable[[str], Awaitable[SamplerWeights]]
    max_engines: int
    patience_s: float = 5.0
    # Compiled programs stay when an engine is closed.
    _programs: dict[LoRA | None, DecodeEngine] = field(default_factory=dict)
    _engines: list[PooledEngine] = field(default_factory=list)
    # In the order of their last use.
    _seats: list[Seat] = field(default_factory=list)
    # Paths whose weights are being loaded, with newer ones that were published meanwhile.
    _arriving: dict[str, SamplerWeights | None] = field(default_factory=dict)
    # Shapes of the samplers that wait for a place, by path, in order of arrival.
    _waiting: dict[str, LoRA | None] = field(default_factory=dict)
    # Held while a place is found and gets its weights.
    _placing: asyncio.Lock = field(default_factory=asyncio.Lock)
    # A request has ended, or a sampler has got a place.
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    # Weights are written in order.
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def shapes(self) -> tuple[LoRA | None, ...]:
        """Shapes of adapters that engines have programs for, those of running engines first."""
        running = (engine.shape for engine in self._engines)
        return tuple(dict.fromkeys((*running, *self._programs)))

    @property
    def num_engines(self) -> int:
        """Number of engines that run."""
        return len(self._engines)

    def is_placed(self, path: str) -> bool:
        """Return whether a request of a sampler can begin in an engine."""
        return path not in self._arriving and self._open_seat(path) is not None

    @contextmanager
    def held(self, path: str) -> Iterator[Seat]:
        """Hold the place of a sampler, which has one, in the block."""
        seat = self._open_seat(path)
        assert seat is not None
        seat.num_running += 1
        self._seats.remove(seat)
        self._seats.append(seat)
        try:
            yield seat
        finally:
            seat.num_running -= 1
            seat.engine.used_s = time.monotonic()
            self._changed.set()

    async def place(self, path: str) -> None:
        """Wait for a place of a sampler in an engine; another may have it when this returns."""
        if path in self._arriving:
            await self._change()
            return
        self._arriving[path] = None
        try:
            await self._assign(path)
            while (newer := self._arriving[path]) is not None:
                self._arriving[path] = None
                await self._write(path, newer)
        finally:
            del self._arriving[path]
            self._changed.set()

    async def publish(self, path: str, weights: SamplerWeights) -> None:
        """Give newer weights to the engine of a sampler that follows a model, if it has one.

        Running requests take them between two tokens.
        """
        if path in self._arriving:
            self._arriving[path] = weights
        await self._write(path, weights)

    async def _write(self, path: str, weights: SamplerWeights) -> None:
        async with self._writing:
            for seat in list(self._of(path)):
                await asyncio.to_thread(seat.engine.write, seat, weights, is_new=False)

    def has(self, path: str) -> bool:
        """Return whether an engine has the weights of a path, or will have."""
        return path in self._arriving or any(self._of(path))

    def invalidate(self, path: str) -> None:
        """Load the weights of a path again when they are used next: it has others."""
        for seat in list(self._of(path)):
            seat.path = None

    def discard(self, engine: PooledEngine) -> None:
        """Forget an engine that has stopped."""
        if engine in self._engines:
            self._engines.remove(engine)
            self._seats = [seat for seat in self._seats if seat.engine is not engine]

    async def close_idle(self, idle_s: float) -> None:
        """End the engines without requests for so long: their KV caches and adapters are freed."""
        if self._placing.locked():
            return
        async with self._placing:
            for engine in list(self._engines):
                if not engine.num_running and time.monotonic() - engine.used_s >= idle_s:
                    logger.info("idle engine ended: rank=%s", engine.shape and engine.shape.rank)
                    await self._close(engine)

    async def close(self) -> None:
        """End all engines; running requests fail."""
        for engine in list(self._engines):
            await self._close(engine)

    def _of(self, path: str) -> Iterator[Seat]:
        return (seat for seat in self._seats if seat.path == path)

    def _open_seat(self, path: str) -> Seat | None:
        return next((seat for seat in self._of(path) if seat.reserved_for is None), None)

    async def _change(self, timeout_s: float | None = None) -> None:
        """Wait for a change, or for the timeout."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _close(self, engine: PooledEngine) -> None:
        self.discard(engine)
        await asyncio.to_thread(engine.loop.close)

    async def _assign(self, path: str) -> None:
        """Give a place in an engine to a sampler."""
        weights = await self.load(path)
        shape = None if weights.lora is None else self.bucket(weights.lora)
        self._waiting[path], end_s = shape, time.monotonic() + self.patience_s
        try:
            while not (self._open_seat(path) or await self._seat(path, shape, weights)):
                left_s = end_s - time.monotonic()
                if left_s > 0 or not self._reserve(path, shape):
                    await self._change(left_s if left_s > 0 else None)
        finally:
            del self._waiting[path]
            for seat in self._seats:
                if seat.reserved_for == path:
                    seat.reserved_for = None

    def _reserve(self, path: str, shape: LoRA | None) -> bool:
        """Reserve the place that was held longest for a sampler, or all of the oldest engine if
        there is none of this shape; return False if that changes nothing.
        """
        if any(seat.reserved_for == path for seat in self._seats):
            return False
        own = [seat for seat in self._seats if seat.engine.shape == shape]
        if own:
            open_ = [seat for seat in own if seat.reserved_for is None]
            seats = [min(open_, key=lambda seat: seat.placed_s)] if open_ else []
        else:
            whole = (each.seats for each in self._engines if each.are_reserved_for(None))
            seats = next(whole, [])
        for seat in seats:
            seat.reserved_for = path
        return bool(seats)

    def _is_first(self, path: str, shape: LoRA | None) -> bool:
        """Return whether none waits longer for the same places: those of a shape, or of a new
        engine.
        """
        running = {engine.shape for engine in self._engines}
        return path == next(
            other
            for other, its in self._waiting.items()
            if its == shape or not {its, shape} & running
        )

    async def _seat(self, path: str, shape: LoRA | None, weights: SamplerWeights) -> bool:
        """Write weights to a place that is free; return whether there is one."""
        async with self._placing:
            if (seat := await self._find(path, shape)) is None:
                return False
            async with self._writing:
                seat.path = None
                await asyncio.to_thread(seat.engine.write, seat, weights, is_new=True)
                seat.path, seat.placed_s = path, time.monotonic()
        return True

    async def _find(self, path: str, shape: LoRA | None) -> Seat | None:
        """Return the idle place of this shape that was used least recently; start an engine if
        there is none. None: requests must end before, or others wait longer.
        """
        allowed = {path, None} if self._is_first(path, shape) else {path}
        own = [seat for seat in self._seats if seat.engine.shape == shape]
        if own:
            idle = [seat for seat in own if not seat.num_running and seat.reserved_for in allowed]
            # Those of nobody first.
            return min(idle, key=lambda seat: seat.path is not None, default=None)
        if len(self._engines) >= self.max_engines:
            idle_engines = [
                engine
                for engine in self._engines
                if not engine.num_running and any(map(engine.are_reserved_for, allowed))
            ]
            if not idle_engines:
                return None
            await self._close(min(idle_engines, key=lambda engine: engine.used_s))
        engine = await asyncio.to_thread(self._start, shape)
        self._engines.append(engine)
        self._seats += engine.seats
        logger.info("engine started: engines=%d rank=%s", self.num_engines, shape and shape.rank)
        return engine.seats[0]

    def _start(self, shape: LoRA | None) -> PooledEngine:
        if shape not in self._programs:
            self._programs[shape] = self.make_engine(shape)
        return PooledEngine(shape, self._programs[shape], self.base())
