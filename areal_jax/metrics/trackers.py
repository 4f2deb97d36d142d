"""Experiment trackers (wandb, trackio, MLflow), each through its own library, which is an extra and
need not be installed.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from areal_jax.errors import ConfigError

logger = logging.getLogger(__name__)

MAX_WAITING_ROWS = 10_000
MAX_PARAMS = 100
"""MLflow takes at most as many params in one call."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers know it."""

    folder: Path
    """The run's folder, whose name is the name of the run."""
    run_id: str
    """Identifies the run, also when it is resumed."""
    project: str
    settings: Mapping[str, Any]
    """All settings by dotted key."""


@runtime_checkable
class Tracker(Protocol):
    """One run at a tracker."""

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        """Send finite metrics of a version."""
        ...

    def close(self) -> None:
        """Send what waits, and end the run."""
        ...


class Wandb:
    """A run of Weights & Biases. WANDB_MODE=offline writes it to the run folder."""

    def __init__(self, run: TrackedRun) -> None:
        """Start or resume the run."""
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project=run.project,
            name=run.folder.name,
            id=run.run_id,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.settings),
        )
        # wandb's own steps only grow, but an evaluation may end after the next step.
        self._run.define_metric("*", step_metric="version")

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"version": version, **metrics})

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run of trackio, by default in a local database (TRACKIO_DIR)."""

    def __init__(self, run: TrackedRun) -> None:
        """Start or resume the run."""
        import trackio  # pyright: ignore[reportMissingImports]

        self._run = trackio.init(
            project=run.project,
            name=f"{run.folder.name}-{run.run_id[:8]}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
        )

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=version)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of MLflow, at MLFLOW_TRACKING_URI. MLflow refuses `@` in names: `pass@1` is
    `pass at 1`.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Start or resume the run."""
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        found = self._client.get_experiment_by_name(run.project)
        experiment = found.experiment_id if found else self._client.create_experiment(run.project)
        tag = "areal_jax.run"
        known = self._client.search_runs([experiment], f"tags.`{tag}` = '{run.run_id}'")
        self._id = (
            known[0]
            if known
            else self._client.create_run(
                experiment, tags={tag: run.run_id}, run_name=run.folder.name
            )
        ).info.run_id
        if not known:
            params = [Param(key, str(value)) for key, value in run.settings.items()]
            for first in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])

    def log(self, version: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now_ms = int(time.time() * 1000)
        self._client.log_batch(
            self._id,
            metrics=[
                Metric(name.replace("@", " at "), value, now_ms, version)
                for name, value in metrics.items()
            ],
        )

    def close(self) -> None:
        self._client.set_terminated(self._id)


TRACKERS = {"wandb": Wandb, "trackio": Trackio, "mlflow": MLflow}


def find_missing(names: Sequence[str]) -> Iterator[str]:
    """Trackers whose library is not installed, each in a sentence with its extra."""
    for name in names:
        if find_spec(name) is None:
            yield (
                f"metrics.trackers={name} needs {name}, which is not installed: pip install "
                f"'areal-jax[{name}]'"
            )


def start_trackers(names: Sequence[str], run: TrackedRun) -> Trackers | None:
    """Start a run at each tracker; None without trackers.

    Raises:
        ConfigError: a tracker could not start the run.
    """
    started: dict[str, Tracker] = {}
    for name in dict.fromkeys(names):
        try:
            started[name] = TRACKERS[name](run)
        except Exception as error:  # of a library, which has errors of its own
            raise ConfigError(
                f"metrics.trackers={name}: {name} could not start a run "
                f"({type(error).__name__}: {error}); follow its message, or leave it out"
            ) from error
    return Trackers(started) if started else None


class Trackers:
    """Sends rows to trackers in a background thread. A tracker that fails ends nothing: its first
    error is logged, and all are counted.
    """

    def __init__(self, trackers: Mapping[str, Tracker], timeout_s: float = 60.0) -> None:
        """Start the thread.

        Args:
            trackers: by name.
            timeout_s: longest wait of `close`, in seconds.
        """
        self._trackers, self._timeout_s = trackers, timeout_s
        self.num_failed = 0
        """Rows that did not reach a tracker."""
        self._failed: set[str] = set()
        # Owned by this object. The training thread puts rows, and None to end; the thread takes. A
        # daemon, because a library may hang without network.
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(
            MAX_WAITING_ROWS
        )
        self._thread = threading.Thread(target=self._run, name="trackers", daemon=True)
        self._thread.start()

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Queue the finite metrics of a version; never waits."""
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        try:
            self._queue.put_nowait((version, finite))
        except queue.Full:
            self.num_failed += 1

    def close(self) -> None:
        """Send what waits and end the runs at the trackers; a tracker that hangs is left."""
        try:
            self._queue.put(None, timeout=self._timeout_s)
            self._thread.join(self._timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            logger.warning(
                "trackers %s did not end within %g s; rows may be missing there",
                ", ".join(self._trackers),
                self._timeout_s,
            )

    def _run(self) -> None:
        while (row := self._queue.get()) is not None:
            for name, tracker in self._trackers.items():
                self._guard(name, lambda tracker=tracker, row=row: tracker.log(*row))
        for name, tracker in self._trackers.items():
            self._guard(name, tracker.close)

    def _guard(self, name: str, send: Any) -> None:
        try:
            send()
        except Exception as error:  # of a library or its network: training continues
            self.num_failed += 1
            if name not in self._failed:
                self._failed.add(name)
                logger.warning(
                    "tracker %s failed: %s: %s; training continues, trackers/failed counts its "
                    "failures",
                    name,
                    type(error).__name__,
                    error,
                )
