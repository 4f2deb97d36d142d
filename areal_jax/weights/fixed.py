"""Weights that stay as they are."""

from __future__ import annotations

from areal_jax.records import Weights


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
