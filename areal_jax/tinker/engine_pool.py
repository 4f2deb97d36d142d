"""Decode engines that serve the adapters of many samplers, one adapter on each engine at a time."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.decode_state import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.models import lora
from areal_jax.models.config import LoRA
from areal_jax.models.decoder import Params
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
        self._steps: dict[int, int] = {}

    def switch(self, params: EngineParams, step: int) -> int:
        """Offer other weights.

        Args:
            params: in the engine's layout.
            step: optimizer steps that made them.

        Returns:
            Their version on this engine.
        """
        with self._changed:
            version = self._weights.version + 1
            self._weights, self._steps[version] = Weights(version, params), step
            self._changed.notify_all()
        return version

    def step_of(self, version: int) -> int:
        """Return the optimizer steps that made a version."""
        with self._changed:
            return self._steps[version]

    def forget_before(self, version: int) -> None:
        """Drop the steps of earlier versions, which no request has any more."""
        with self._changed:
            self._steps = {each: step for each, step in self._steps.items() if each >= version}

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
    """An engine, and the sampler whose weights it has."""

    shape: LoRA | None
    loop: EngineLoop
    source: SwitchedWeights
    path: str | None = None
    """Path of the sampler; None: its weights are nobody's any more. The base has an empty path."""
    version: int = NO_VERSION
    """Version with which a request must start at least."""
    num_running: int = 0


@dataclass(eq=False)
class EnginePool:
    """Assigns samplers to engines, first come, first served.

    Samplers whose adapters have the same shape use engines of the same compiled programs, and all
    engines share the frozen policy. Requests of one sampler decode together on one engine.

    Attributes:
        make_engine: Makes the engine of adapters of a shape.
        base: The frozen policy in the layout of an engine; None where all parameters are trained.
        load: Loads the weights of a sampler by its path.
        max_engines: Most engines.
    """

    make_engine: Callable[[LoRA | None], DecodeEngine]
    base: Callable[[DecodeEngine], EngineParams | None]
    load: Callable[[str], Awaitable[SamplerWeights]]
    max_engines: int
    _engines: dict[LoRA | None, DecodeEngine] = field(default_factory=dict)
    # The least recently used first.
    _seats: list[Seat] = field(default_factory=list)
    # Paths whose weights are being loaded, with newer ones that were published meanwhile.
    _arriving: dict[str, SamplerWeights | None] = field(default_factory=dict)
    # Requests are assigned in order of arrival.
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    # Weights are published in order.
    _publishing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def shapes(self) -> tuple[LoRA | None, ...]:
        """Shapes of adapters that engines have programs for."""
        return tuple(self._engines)

    @asynccontextmanager
    async def assigned(self, path: str) -> AsyncIterator[Seat]:
        """Wait for an engine that has a sampler's weights, and hold it in the block."""
        async with self._turn:
            seat = next((each for each in self._seats if each.path == path), None)
            if seat is None:
                self._arriving[path] = None
                try:
                    seat = await self._seat(path)
                finally:
                    newer = self._arriving.pop(path)
                if newer is not None:
                    await self.publish(path, newer)
            seat.num_running += 1
            self._seats.remove(seat)
            self._seats.append(seat)
        try:
            yield seat
        finally:
            seat.num_running -= 1
            self._freed.set()

    async def publish(self, path: str, weights: SamplerWeights) -> None:
        """Give newer weights to the engine of a sampler that follows a model, if it has one.

        Running requests take them between two tokens.
        """
        if path in self._arriving:
            self._arriving[path] = weights
            return
        async with self._publishing:
            if not any(seat.path == path for seat in self._seats):
                return
            params = await asyncio.to_thread(self._laid_out, weights)
            for seat in self._seats:
                if seat.path == path:
                    seat.version = seat.source.switch(params, weights.step)

    def has(self, path: str) -> bool:
        """Return whether an engine has the weights of a path, or will have."""
        return path in self._arriving or any(seat.path == path for seat in self._seats)

    def invalidate(self, path: str) -> None:
        """Load the weights of a path again when they are used next: it has others."""
        for seat in self._seats:
            if seat.path == path:
                seat.path = None

    def discard(self, path: str) -> None:
        """Forget the engine of a path, which has stopped."""
        self._seats = [seat for seat in self._seats if seat.path != path]

    async def close(self) -> None:
        """End all engines; running requests fail."""
        seats, self._seats = self._seats, []
        for seat in seats:
            await asyncio.to_thread(seat.loop.close)

    async def _seat(self, path: str) -> Seat:
        """Assign an idle engine, or a new one, to a sampler."""
        weights = await self.load(path)
        params = await asyncio.to_thread(self._laid_out, weights)
        while True:
            idle = [seat for seat in self._seats if not seat.num_running]
            same = next((seat for seat in idle if seat.shape == weights.lora), None)
            if same is None and len(self._seats) < self.max_engines:
                seat = self._start(weights.lora)
                break
            if same is not None:
                seat = same
                break
            if idle:
                self._seats.remove(idle[0])
                await asyncio.to_thread(idle[0].loop.close)
                continue
            self._freed.clear()
            await self._freed.wait()
        seat.path = path
        seat.version = seat.source.switch(params, weights.step)
        seat.source.forget_before(seat.version)
        return seat

    def _start(self, shape: LoRA | None) -> Seat:
        source = SwitchedWeights()
        loop = EngineLoop(self._engines[shape], source)
        loop.start()
        seat = Seat(shape, loop, source)
        self._seats.append(seat)
        logger.info("engine started: engines=%d rank=%s", len(self._seats), shape and shape.rank)
        return seat

    def _laid_out(self, weights: SamplerWeights) -> EngineParams:
        """Return weights in the layout of their engine, on its mesh."""
        if weights.lora not in self._engines:
            self._engines[weights.lora] = self.make_engine(weights.lora)
        engine = self._engines[weights.lora]
        params: Any = jax.jit(engine.layout, out_shardings=engine.param_shardings)(weights.params)
        base = self.base(engine)
        return params if base is None else lora.attach(engine.policy, base, params)
