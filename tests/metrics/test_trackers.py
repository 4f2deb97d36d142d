"""Rows reach trackers in a background thread, and a tracker that fails ends nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from areal_jax.metrics.config import METRICS, MetricsConfig
from areal_jax.metrics.jsonl import read
from areal_jax.metrics.sinks import Sinks
from areal_jax.metrics.trackers import MAX_WAITING_ROWS, TRACKERS, Trackers, find_missing


class Memory:
    """A tracker in memory; from version `fails_from` on it has no network."""

    def __init__(self, fails_from: int = 1 << 30) -> None:
        self.rows = list[tuple[int, dict[str, float]]]()
        self.is_closed = False
        self.fails_from = fails_from

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        if version >= self.fails_from:
            raise ConnectionError("no route to host")
        self.rows.append((version, dict(metrics)))

    def close(self) -> None:
        self.is_closed = True


def test_every_tracker_gets_every_finite_metric() -> None:
    one, other = Memory(), Memory()
    trackers = Trackers({"one": one, "other": other})
    trackers.write(0, {"loss": float("nan"), "evaluation/pass@1": 0.25})
    trackers.write(1, {"loss": 2.0})
    trackers.close()
    assert one.rows == other.rows == [(0, {"evaluation/pass@1": 0.25}), (1, {"loss": 2.0})]
    assert one.is_closed and other.is_closed


def test_failing_tracker_is_logged_once_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = Memory(), Memory(fails_from=2)
    trackers = Trackers({"good": good, "bad": bad})
    with caplog.at_level(logging.WARNING):
        sinks = Sinks(tmp_path, MetricsConfig(tensorboard=False, samples=False), trackers=trackers)
        for version in range(5):
            sinks.write(version, {"trainer/reward": 1.0})
        sinks.close()
        trackers.close()
    # Versions 2, 3 and 4 fail.
    assert trackers.num_failed == 3
    assert [version for version, _ in bad.rows] == [0, 1] and bad.is_closed
    assert [version for version, _ in good.rows] == [0, 1, 2, 3, 4]
    (record,) = caplog.records
    assert "tracker bad failed: ConnectionError: no route to host" in record.message
    rows = list(read(tmp_path / METRICS))
    assert [row["version"] for row in rows] == [0, 1, 2, 3, 4]
    assert all(0 <= row["trackers/failed"] <= 3 for row in rows)


def test_hanging_tracker_neither_blocks_training_nor_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()

    class Hanging(Memory):
        def log(self, version: int, metrics: Mapping[str, float]) -> None:
            release.wait(30)

    trackers = Trackers({"hanging": Hanging()}, timeout_s=0.1)
    for version in range(MAX_WAITING_ROWS + 10):
        trackers.write(version, {"x": 1.0})
    # One row is being sent, if the thread has begun, and the queue is full.
    assert trackers.num_failed in (9, 10)
    with caplog.at_level(logging.WARNING):
        trackers.close()
    assert "trackers hanging did not end within 0.1 s" in caplog.text
    release.set()


def test_missing_library_names_its_extra() -> None:
    missing = [name for name in TRACKERS if find_spec(name) is None]
    found = list(find_missing(list(TRACKERS)))
    assert len(found) == len(missing)
    for name, sentence in zip(missing, found, strict=True):
        assert sentence.endswith(f"which is not installed: pip install 'areal-jax[{name}]'")
