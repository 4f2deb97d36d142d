"""Meters: named numbers of one trainer step, whose totals and weights are divided last."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsFloat, TypeAlias

Metrics: TypeAlias = Mapping[str, SupportsFloat | tuple[SupportsFloat, SupportsFloat]]
"""Metrics by name, as components report them: a number, or a total and its weight (`Mean`)."""


class Mean(NamedTuple):
    """A total and the weight that divides it, kept apart so that the means of parts add up.

    A pytree of two leaves. In a compiled program both are scalar arrays; in `Meters` both are
    floats.
    """

    total: Any
    weight: Any

    @property
    def value(self) -> float | None:
        """The mean, or None if nothing was measured, which is if the weight is 0."""
        return self.total / self.weight if self.weight else None


class Sum(NamedTuple):
    """A sum or count."""

    value: float


class Gauge(NamedTuple):
    """A latest value."""

    value: float


class Maximum(NamedTuple):
    """A maximum."""

    value: float


Meter = Mean | Sum | Gauge | Maximum


class Meters:
    """Meters by name. Not thread-safe."""

    def __init__(self) -> None:
        self._meters: dict[str, Meter] = {}

    def update(self, metrics: Metrics, prefix: str = "") -> None:
        """Add the metrics of a component: a pair adds to a mean, a number replaces the last one."""
        for name, value in metrics.items():
            if isinstance(value, tuple):
                self.mean(prefix + name, *value)
            else:
                self.gauge(prefix + name, value)

    def mean(self, name: str, total: SupportsFloat, weight: SupportsFloat = 1.0) -> None:
        """Add to a mean."""
        self._add(name, Mean(float(total), float(weight)))

    def count(self, name: str, by: SupportsFloat = 1.0) -> None:
        """Add to a count."""
        self._add(name, Sum(float(by)))

    def gauge(self, name: str, value: SupportsFloat) -> None:
        """Set a gauge."""
        self._add(name, Gauge(float(value)))

    def maximum(self, name: str, value: SupportsFloat) -> None:
        """Update a maximum; a nan persists, so that it is seen."""
        self._add(name, Maximum(float(value)))

    def merge(self, later: Meters) -> None:
        """Merge later measurements."""
        for name, meter in later._meters.items():
            self._add(name, meter)

    def metrics(self) -> dict[str, float | Mean]:
        """The inverse of `update`: means as they are, and the values of all other meters."""
        return {
            name: meter if isinstance(meter, Mean) else meter.value
            for name, meter in self._meters.items()
        }

    def flatten(self) -> dict[str, float]:
        """Return one number per name; means without weight are omitted."""
        return {
            name: meter.value for name, meter in self._meters.items() if meter.value is not None
        }

    def _add(self, name: str, meter: Meter) -> None:
        self._meters[name] = (
            _merge(name, self._meters[name], meter) if name in self._meters else meter
        )


def _merge(name: str, known: Meter, later: Meter) -> Meter:
    match known, later:
        case Mean(), Mean():
            return Mean(known.total + later.total, known.weight + later.weight)
        case Sum(), Sum():
            return Sum(known.value + later.value)
        case Gauge(), Gauge():
            return later
        case Maximum(), Maximum():
            return known if math.isnan(known.value) or known.value >= later.value else later
    kinds = f"{type(known).__name__} and as {type(later).__name__}"
    raise ValueError(f"{name}: expected one kind of meter, found {kinds}; rename one of the two")
