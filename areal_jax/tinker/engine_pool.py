"""Decode engines that serve the adapters of many samplers in one batch."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params
from areal_jax.parallel.sharding import put
from areal_jax.records import NO_VERSION, Weights

logger = logging.getLogger(__name__)


class SamplerWeights(NamedTuple):
    """Weights of a sampler."""

    lora: LoRA | None
    """Settings of the adapter; None: all parameters."""
    params: Params
    """On the host, or on the rollout mesh."""
    step: int
    """Optimizer steps that made them."""


class SwitchedWeights:
    """Weight source of an engine whose weights are switched; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._weights = Weights(NO_VERSION, None)

    def switch(self, params: EngineParams) -> int:
        """Offer other weights, in the engine's layout; return their version on this engine."""
        with self._changed:
            version = self._weights.version + 1
            self._weights = Weights(version, params)
            self._changed.notify_all()
        return version

    def newest(self, after: int) -> Weights | None:
        with self._changed:
            return self._weights if self._weights.version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for a version.

        Raises:
            TimeoutError: it was not offered in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._weights.version >= at_least, timeout_s):
                raise TimeoutError(f"waited {timeout_s} s for weights of version {at_least}")
            return self._weights


@dataclass(eq=False, slots=True)
class Seat:
    """Place of a sampler's weights in an engine."""

    engine: PooledEngine
    adapter: int
    """Number of the adapter in the engine."""
    path: str | None = None
    """Path of the sampler; None: its weights are nobody's any more. The base has an empty path."""
    num_running: int = 0
    history: list[tuple[int, int]] = field(default_factory=list)
    """Versions of the engine that changed the weights, with the optimizer steps that made them."""

    @property
    def version(self) -> int:
        """Version with which a request must start at least."""
        return self.history[-1][0]

    @property
    def step(self) -> int:
        """Optimizer steps that made the newest weights."""
        return self.history[-1][1]

    def step_of(self, version: int) -> int:
        """Return the optimizer steps that made the weights of a version of the engine."""
        return next(step for first, step in reversed(self.history) if first <= version)


class PooledEngine:
    """An engine with places for several adapters of at most its rank, or for one whole policy."""

    def __init__(self, shape: LoRA | None, engine: DecodeEngine, base: EngineParams | None) -> None:
        """
        Args:
            shape: shape of the adapters, which are padded to it; None: all parameters are sampled
                from.
            engine: its programs.
            base: frozen parameters; None where all are trained.
        """
        self.shape, self.engine, self._base = shape, engine, base
        self._source = SwitchedWeights()
        self.loop = EngineLoop(engine, self._source)
        self.seats = [Seat(self, number) for number in range(max(1, engine.shapes.num_adapters))]
        self.used_s = time.monotonic()
        # Held while weights are written, so that none is lost.
        self._writing = threading.Lock()
        self._stack: tuple[Params, Float32[Array, "_"]] | None = None
        self.loop.start()

    @property
    def num_running(self) -> int:
        """Number of unfinished requests."""
        return sum(seat.num_running for seat in self.seats)

    def write(self, seat: Seat, weights: SamplerWeights, *, is_new: bool) -> None:
        """Give weights to a seat; running requests of the seat take them between two tokens.

        Args:
            seat: a seat of this engine.
            weights: weights of its shape, or of a smaller one.
            is_new: whether they are of another sampler than those before.
        """
        engine = self.engine
        with self._writing:
            if weights.lora is None:
                params: Any = jax.jit(engine.layout, out_shardings=engine.param_shardings)(
                    weights.params
                )
            else:
                assert self._base is not None
                scale = np.float32(weights.lora.scale)
                self._stack = self._set(*self._adapters(), seat.adapter, weights.params, scale)
                params = lora.attach_stack(self._base, *self._stack)
            now = self._source.switch(params), weights.step
            # A request may have begun meanwhile with the last ones.
            before = seat.history if seat.num_running else seat.history[-1:]
            seat.history = [now] if is_new else [*before, now]

    def _adapters(self) -> tuple[Params, Any]:
        if self._stack is None:
            shapes = self.engine.shapes
            zeros = jax.tree.map(
                lambda leaf: np.zeros(leaf.shape, leaf.dtype), (shapes.adapters, shapes.scales)
            )
            return put(zeros, self._placed)
        return self._stack

    @cached_property
    def _placed(self) -> Any:
        shapes = self.engine.shapes
        return jax.tree.map(lambda leaf: leaf.sharding, (shapes.adapters, shapes.scales))

    @cached_property
    def _set(self) -> Callable[..., tuple[Params, Float32[Array, "_"]]]:
        """Program that replaces one adapter; the engine may still decode with the old array."""

        def replace(
            stack: Params,
            scales: Float32[Array, "_"],
            number: Int[Array, ""],
            adapter: Params,
            scale: Float32[Array, ""],
        ) -> tuple[Params, Float32[Array, "_"]]:
            own = jax.tree.map(lambda leaf: leaf[0], stack)
            padded = lora.pad(self.engine.layout(adapter), own)
            changed = jax.tree.map(lambda all, one: all.at[number].set(one), stack, padded)
            return changed, scales.at[number].set(jnp.float32(scale))

        return jax.jit(replace, out_shardings=self._placed)


@dataclass(eq=False)
class EnginePool:
    """Assigns samplers to places in engines, first come, first served.

    Requests of all samplers with adapters of one bucket of ranks decode together in one engine, and
    all engines share the frozen policy.

    Attributes:
        make_engine: Makes the engine of a bucket.
        bucket: Returns the shape to which adapters of a shape are padded.
        base: The frozen policy in the layout of an engine; None where all parameters are trained.
        load: Loads the weights of a sampler by its path.
        max_engines: Most engines.
    """

    make_engine: Callable[[LoRA | None], DecodeEngine]
    bucket: Callable[[LoRA], LoRA]
    base: Callable[[], EngineParams | None]
    load: Callable[[str], Awaitable[SamplerWeights]]
    max_engines: int
    # Compiled programs stay when an engine is closed.
    _programs: dict[LoRA | None, DecodeEngine] = field(default_factory=dict)
    _engines: list[PooledEngine] = field(default_factory=list)
    # In the order of their last use.
    _seats: list[Seat] = field(default_factory=list)
    # Paths whose weights are being loaded, with newer ones that were published meanwhile.
    _arriving: dict[str, SamplerWeights | None] = field(default_factory=dict)
    # Requests are assigned in order of arrival.
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    # Weights are written in order.
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def shapes(self) -> tuple[LoRA | None, ...]:
        """Shapes of adapters that engines have programs for."""
        return tuple(self._programs)

    @property
    def num_engines(self) -> int:
        """Number of engines that run."""
        return len(self._engines)

    @asynccontextmanager
    async def assigned(self, path: str) -> AsyncIterator[Seat]:
        """Wait for an engine that has a sampler's weights, and hold their place in the block."""
        async with self._turn:
            seat = next(self._of(path), None)
            if seat is None:
                self._arriving[path] = None
                try:
                    seat = await self._assign(path)
                finally:
                    newer = self._arriving.pop(path)
                if newer is not None:
                    await self.publish(path, newer)
            seat.num_running += 1
            if seat in self._seats:
                self._seats.remove(seat)
                self._seats.append(seat)
        try:
            yield seat
        finally:
            seat.num_running -= 1
            seat.engine.used_s = time.monotonic()
            self._freed.set()

    async def publish(self, path: str, weights: SamplerWeights) -> None:
        """Give newer weights to the engine of a sampler that follows a model, if it has one.

        Running requests take them between two tokens.
        """
        if path in self._arriving:
            self._arriving[path] = weights
            return
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
        if self._turn.locked():
            return
        async with self._turn:
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

    async def _close(self, engine: PooledEngine) -> None:
        self.discard(engine)
        await asyncio.to_thread(engine.loop.close)

    async def _assign(self, path: str) -> Seat:
        """Give a place in an engine to a sampler."""
        weights = await self.load(path)
        shape = None if weights.lora is None else self.bucket(weights.lora)
        while (seat := await self._find(shape)) is None:
            self._freed.clear()
            await self._freed.wait()
        async with self._writing:
            seat.path = None
            await asyncio.to_thread(seat.engine.write, seat, weights, is_new=True)
            seat.path = path
        return seat

    async def _find(self, shape: LoRA | None) -> Seat | None:
        """Return the idle place of this shape that was used least recently; start an engine if
        there is none. None: requests must end before.
        """
        own = [seat for seat in self._seats if seat.engine.shape == shape]
        if own:
            idle = [seat for seat in own if not seat.num_running]
            # Those of nobody first.
            return min(idle, key=lambda seat: seat.path is not None, default=None)
        if len(self._engines) >= self.max_engines:
            idle_engines = [engine for engine in self._engines if not engine.num_running]
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
