"""Metrics by name, collected from rows and reduced to what a chart can show. Axes: N rows, P points
of a chart.
"""

from __future__ import annotations

import base64
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

MAX_POINTS = 512
"""Points of one line in a chart; more would not be visible."""

STEP_S, WAITING_S, OTHER_S = "time/step", "time/waiting", "time/other"
"""Derived from consecutive rows: seconds from step to step, its part in which the trainer waits for
rollouts, and what no metric measures."""

WAITING_SHARE = "time/waiting_share"
TOKEN_ESS = "policy/token_ess"
"""Effective sample size of the tokens' importance weights w, as a share: mean(w)² / mean(w²)."""

_PARTS = ("trainer/seconds_step", "weights/publish_s")
_ACTIVE_PARTS = ("packing", "values", "frozen", "proximal", "update")


class Series(NamedTuple):
    """Values of one metric, ordered by version."""

    versions: list[int]
    values: list[float]


class Points(NamedTuple):
    """A line of a chart."""

    versions: Int64[np.ndarray, "P"]
    means: Float64[np.ndarray, "P"]
    lows: Float64[np.ndarray, "P"] | None
    """Smallest value of the steps that a point stands for; None: each stands for one step."""
    highs: Float64[np.ndarray, "P"] | None


class MetricSeries:
    """Metrics by name, to which rows are added. For one thread."""

    def __init__(self) -> None:
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._before: Mapping[str, Any] | None = None
        self.last_version = -1
        """Version of the newest step."""
        self.step_times = dict[int, float]()
        """Time at which the latest steps ended, in seconds since 1970."""

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def names(self) -> list[str]:
        """Return the names of all metrics, sorted."""
        return sorted(self._columns)

    def series(self, name: str) -> Series | None:
        """Return all values of a metric; None if no row has it."""
        column = self._columns.get(name)
        return None if column is None else Series(column[0].tolist(), column[1].tolist())

    def add(self, row: Mapping[str, Any]) -> None:
        """Add one row. Null values, which were nan, are omitted; a version that is measured again
        has its last value.
        """
        version = row["version"]
        for name, value in row.items():
            if name not in ("version", "time_s") and value is not None:
                self._append(name, version, value)
        if is_step(row):
            for name, value in derive(row, self._before).items():
                self._append(name, version, value)
            self._before = row
            self.last_version = version
            if "time_s" in row:
                self.step_times[version] = row["time_s"]
                if len(self.step_times) > MAX_POINTS:
                    del self.step_times[next(iter(self.step_times))]

    def _append(self, name: str, version: int, value: float | int) -> None:
        versions, found = self._columns.setdefault(name, (array("q"), array("d")))
        if not versions or version > versions[-1]:
            versions.append(version)
            found.append(value)
            return
        place = bisect_left(versions, version)
        if versions[place] == version:
            found[place] = value
        else:
            versions.insert(place, version)
            found.insert(place, value)

    def points(self, name: str, max_points: int = MAX_POINTS) -> Points:
        """Return the line of a metric with at most `max_points` points.

        Raises:
            KeyError: no row has the metric.
        """
        versions, found = self._columns[name]
        return reduce(np.array(versions, np.int64), np.array(found, np.float64), max_points)

    def encode(self, max_points: int = MAX_POINTS) -> list[dict[str, Any]]:
        """Return all lines as columns for the page, those with the same versions together.

        Versions are little-endian int32 and values little-endian float32, in base64. Smallest and
        largest values are left out where they equal the means.
        """
        frames: dict[bytes, dict[str, list[str]]] = {}
        for name in self.names():
            line = self.points(name, max_points)
            columns = [encode(line.means)]
            if line.lows is not None and line.highs is not None and np.any(line.lows < line.highs):
                columns += [encode(line.lows), encode(line.highs)]
            frames.setdefault(line.versions.astype("<i4").tobytes(), {})[name] = columns
        return [
            {"versions": base64.b64encode(versions).decode(), "columns": columns}
            for versions, columns in frames.items()
        ]

    def ranges(self) -> dict[str, tuple[float, float, float, float, int]]:
        """Return first, last, smallest and largest value and the last version of each metric."""
        found: dict[str, tuple[float, float, float, float, int]] = {}
        for name in self.names():
            versions, values = self._columns[name]
            array_of = np.frombuffer(values)
            low, high = float(array_of.min()), float(array_of.max())
            found[name] = (values[0], values[-1], low, high, versions[-1])
            del array_of  # an array that is viewed cannot grow
        return found


def is_step(row: Mapping[str, Any]) -> bool:
    """Return whether a row is of a trainer step, not of an evaluation."""
    return any(name.startswith("trainer/") for name in row)


def derive(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    """Return what the report derives from the row of a step and the row before it."""
    found = step_times(row, before)
    if WAITING_S in found:
        found[WAITING_SHARE] = min(1.0, found[WAITING_S] / found[STEP_S])
    weight, squared = (
        row.get(f"trainer/behave_weight{suffix}") or 0.0 for suffix in ("", "_squared")
    )
    return found | ({TOKEN_ESS: weight * weight / squared} if squared > 0.0 else {})


def step_times(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, float]:
    """Return where the time since the previous step went, in seconds.

    Counters start again when a run resumes, and the time between two processes is no step's: a
    step after that has none.
    """
    if before is None or "time_s" not in row or "time_s" not in before:
        return {}
    waiting = row.get("rollout/batch_wait_s", 0.0) - before.get("rollout/batch_wait_s", 0.0)
    passed = row["time_s"] - before["time_s"]
    if waiting < 0.0 or passed <= 0.0 or row["version"] <= before["version"]:
        return {}
    measured = waiting + sum(row.get(name) or 0.0 for name in _PARTS)
    active = sum(row.get(f"trainer/seconds_{part}") or 0.0 for part in _ACTIVE_PARTS)
    unmeasured = max(0.0, (row.get("trainer/seconds_step") or 0.0) - active)
    waited = {WAITING_S: waiting} if "rollout/batch_wait_s" in row else {}
    other = max(0.0, passed - measured) + unmeasured
    return {STEP_S: passed, **waited, **({OTHER_S: other} if active else {})}


def reduce(
    versions: Int64[np.ndarray, "N"], values: Float64[np.ndarray, "N"], max_points: int
) -> Points:
    """Reduce a line to at most `max_points` points, each the mean, minimum and maximum of a range
    of versions.

    Ranges start at multiples of a power of two, so that lines with the same versions have the same
    points, and points stay when rows are added. A point stands at the last version of its range.
    """
    if len(versions) <= max_points:
        return Points(versions, values, None, None)
    size = 1
    while versions[-1] // size - versions[0] // size + 1 > max_points:
        size *= 2
    starts = np.flatnonzero(np.diff(versions // size, prepend=-1))
    ends = np.append(starts[1:], len(versions))
    return Points(
        versions[ends - 1],
        np.add.reduceat(values, starts) / (ends - starts),
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
    )


def encode(values: Float64[np.ndarray, "P"]) -> str:
    """Encode as little-endian float32 in base64."""
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def collect(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Collect the metrics of rows by name."""
    metrics = MetricSeries()
    for row in rows:
        metrics.add(row)
    return {name: found for name in metrics.names() if (found := metrics.series(name)) is not None}
