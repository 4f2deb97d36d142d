"""Weights that stay as they are, for an engine that serves or evaluates one version."""

from __future__ import annotations

from dataclasses import dataclass

from areal_jax.records import Weights


@dataclass(frozen=True, slots=True)
class Pinned:
    """One version, from the first look on."""

    weights: Weights

    def newest(self, after: int) -> Weights | None:
        return self.weights if self.weights.version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """TimeoutError where more than this version is asked for: there will be no other."""
        if self.weights.version < at_least:
            raise TimeoutError(
                f"version {at_least} will not come: the weights are pinned at version "
                f"{self.weights.version}"
            )
        return self.weights
