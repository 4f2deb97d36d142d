"""Several engines take new weights one after another, so that not all stop at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from areal_jax.records import Weights, WeightSource

_TURN_S = 10.0
"""An engine that has not come back by then has lost its turn: it may have died."""


class Rolling:
    """Lets one engine at a time take newer weights from its source.

    An engine's turn begins when `newest` gives it weights, and ends when `swapped` says so, or when it asks again. An engine
    that can do nothing without a version waits for it with `wait`, whoever swaps."""

    def __init__(self, sources: Sequence[WeightSource]):
        """Args: sources: of each engine."""
        self._sources = sources
        # The engine that swaps, and since when (time.monotonic). Guarded by the lock: engines ask in their own threads.
        self._swapping: tuple[int, float] | None = None
        self._lock = threading.Lock()

    def of(self, number: int) -> WeightSource:
        """What the engine of that number, from 0, asks instead of its source."""
        return _Turn(self, number)

    def newest(self, number: int, after: int) -> Weights | None:
        """What the engine's source has, or None while another engine swaps."""
        with self._lock:
            if self._swapping is not None:
                swapping, since_s = self._swapping
                if swapping != number and time.monotonic() - since_s < _TURN_S:
                    return None
            weights = self._sources[number].newest(after)
            self._swapping = None if weights is None else (number, time.monotonic())
            return weights

    def swapped(self, number: int) -> None:
        """The engine's turn is over."""
        with self._lock:
            if self._swapping is not None and self._swapping[0] == number:
                self._swapping = None

    def wait(self, number: int, at_least: int, timeout_s: float) -> Weights:
        """What the engine's source has, as soon as it has it."""
        return self._sources[number].wait(at_least, timeout_s)


@dataclass(frozen=True)
class _Turn:
    """One engine's view."""

    rolling: Rolling
    number: int

    def newest(self, after: int) -> Weights | None:
        return self.rolling.newest(self.number, after)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        return self.rolling.wait(self.number, at_least, timeout_s)
