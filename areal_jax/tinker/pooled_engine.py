"""A decode engine with places for the weights of samplers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
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
from areal_jax.parallel.sharding import put, shardings_of
from areal_jax.records import NO_VERSION, Weights


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
    reserved_for: str | None = None
    """Path of a sampler that waits for this place; requests of others do not begin here."""
    placed_s: float = 0.0
    """Time at which the sampler got the place."""
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

    def are_reserved_for(self, path: str | None) -> bool:
        """Return whether all places are reserved for a sampler; None: whether none is."""
        return all(seat.reserved_for == path for seat in self.seats)

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
        return shardings_of((shapes.adapters, shapes.scales))

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
