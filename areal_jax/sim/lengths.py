"""Completion lengths: from a distribution or from a recorded run; deterministic given the seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Lengths(Protocol):
    """Samples the lengths of the completions of one prompt."""

    def sample_lengths(self, chance: random.Random, num: int) -> list[int]: ...


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths; half of the completions are longer than `median`."""

    median: float
    sigma: float

    def sample_lengths(self, chance: random.Random, num: int) -> list[int]:
        mu = math.log(self.median)
        return [max(1, round(chance.lognormvariate(mu, self.sigma))) for _ in range(num)]


@dataclass(frozen=True)
class Recorded:
    """Recorded lengths, sampled uniformly."""

    lengths: tuple[int, ...]

    def sample_lengths(self, chance: random.Random, num: int) -> list[int]:
        return chance.choices(self.lengths, k=num)


def capped_mean(lengths: LogNormal, longest: int) -> float:
    """Return the mean of lengths truncated at `longest`.

    E min(X, c) = exp(mu + s²/2) Phi((ln c - mu) / s - s) + c (1 - Phi((ln c - mu) / s)).
    """
    mu, sigma = math.log(lengths.median), lengths.sigma
    if sigma == 0:
        return min(lengths.median, float(longest))

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    z = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * phi(z - sigma) + longest * (1 - phi(z))
