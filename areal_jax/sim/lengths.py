"""How long answers are: sampled from a distribution, or from lengths that a run recorded; the same
for the same seed."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class Lengths(Protocol):
    """Draws the lengths of the answers to one prompt."""

    def sample_lengths(self, chance: random.Random, num: int) -> list[int]: ...


@dataclass(frozen=True)
class LogNormal:
    """exp of a normal variate; half of the answers are longer than `median`."""

    median: float
    sigma: float

    def sample_lengths(self, chance: random.Random, num: int) -> list[int]:
        mu = math.log(self.median)
        return [max(1, round(chance.lognormvariate(mu, self.sigma))) for _ in range(num)]


@dataclass(frozen=True)
class Recorded:
    """Any of these, each as likely as the others."""

    lengths: tuple[int, ...]

    def sample_lengths(self, chance: random.Random, num: int) -> list[int]:
        return chance.choices(self.lengths, k=num)


def capped_mean(lengths: LogNormal, longest: int) -> float:
    """Mean of lengths that are cut at `longest`.

    E min(X, c) = exp(mu + s²/2) Phi((ln c - mu) / s - s) + c (1 - Phi((ln c - mu) / s))."""
    mu, sigma = math.log(lengths.median), lengths.sigma
    if sigma == 0:
        return min(lengths.median, float(longest))

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    z = (math.log(longest) - mu) / sigma
    return math.exp(mu + sigma**2 / 2) * phi(z - sigma) + longest * (1 - phi(z))
