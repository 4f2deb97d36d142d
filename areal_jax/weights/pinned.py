"""Weight source of one fixed version, for serving and evaluation."""

from __future__ import annotations

from dataclasses import dataclass

from areal_jax.records import Weights


@dataclass(frozen=True, slots=True)
class Pinned:
    """Source that always has the same version."""

    weights: Weights

    def newest(self, after: int) -> Weights | None:
        return self.weights if self.weights.version > after else None

    def wait(self, at_least: int, timeout_s: float) -> Weights:
        """Return the weights.

        Raises:
            TimeoutError: A newer version is required; there will be none.
        """
        if self.weights.version < at_least:
            raise TimeoutError(
                f"expected weights of version {at_least}, the weights are pinned at version "
                f"{self.weights.version}"
            )
        return self.weights
