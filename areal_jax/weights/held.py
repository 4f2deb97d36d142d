"""Weights that stay as they are: for good, or for as long as an evaluation asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from areal_jax.records import Weights, WeightSource


class Fixed:
    """The source of an engine whose weights never change."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights

    def newest(self, after: int) -> Weights | None:
        """The weights, where they are newer."""
        return self._weights if self._weights.version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """The weights. TimeoutError at once where they are older than that: no newer ones will come."""
        if self._weights.version < at_least:
            raise TimeoutError(f"the weights are fixed at version {self._weights.version}, asked for version {at_least}")
        return self._weights


class Holdable:
    """A source that can be held at one version: the engine then takes no newer one, and goes on with what it has."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        # Set and cleared by the asyncio thread, read by the engine's; guarded by the condition.
        self._changed = threading.Condition()
        self._held: Weights | None = None

    @contextmanager
    def holding(self, weights: Weights) -> Iterator[None]:
        """Hand out nothing newer than these weights while inside. RuntimeError where others are held already."""
        with self._changed:
            if self._held is not None:
                raise RuntimeError(f"version {weights.version} cannot be held while version {self._held.version} is")
            self._held = weights
        try:
            yield
        finally:
            with self._changed:
                self._held = None
                self._changed.notify_all()

    def newest(self, after: int) -> Weights | None:
        """The newest complete version above `after`, or the one that is held; None where that is not above. Never waits."""
        with self._changed:
            source = self._source if self._held is None else Fixed(self._held)
        return source.newest(after)

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Wait for a version of at least `at_least`. TimeoutError names the version waited for."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: self._held is None or self._held.version >= at_least, timeout_s)
            source = self._source if self._held is None else Fixed(self._held)
        return source.wait(at_least, max(0.0, until_s - time.monotonic()))
