"""Where the numbers of a run go: metrics.jsonl always, TensorBoard events and samples.jsonl as
configured."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from areal_jax.metrics.config import METRICS, MetricsConfig
from areal_jax.metrics.files import add_file_name
from areal_jax.metrics.jsonl import JsonLines, cut
from areal_jax.metrics.samples import Decode, SampleWriter, TrainedSample

SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"

Event: Any = vars(event_pb2)["Event"]
SessionLog: Any = vars(event_pb2)["SessionLog"]
"""protobuf makes these classes when the module is imported."""


class Sinks:
    """The files of one run. One thread writes."""

    def __init__(
        self,
        run_folder: Path,
        config: MetricsConfig,
        resume_version: int | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Open the files in `run_folder`, which is made where it does not exist.

        Args: resume_version: version that the run resumes from, 0 for its very beginning: rows of
            this version and later are cut, so that nothing is written twice; None: a new run.
            decode: text of tokens, for samples.jsonl. FileExistsError where a new run finds the
            rows of another."""
        run_folder.mkdir(parents=True, exist_ok=True)
        metrics, samples = run_folder / METRICS, run_folder / SAMPLES
        if resume_version is None:
            for path in (metrics, samples):
                if path.exists() and path.stat().st_size:
                    raise FileExistsError(
                        f"{path} holds the rows of another run; set --run-folder to a new "
                        "folder, or resume that run"
                    )
        else:
            cut(metrics, resume_version)
            cut(samples, resume_version)
        self._tensorboard = (
            TensorBoard(run_folder / TENSORBOARD, resume_version) if config.tensorboard else None
        )
        self._metrics = JsonLines(metrics)
        self._samples = SampleWriter(samples, decode) if config.samples else None

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Append one row of metrics, with the time of day; nan and infinities become null.

        Several rows may be written for one version, as when an evaluation ends later than its
        step."""
        self._metrics.append(version, {"time_s": time.time(), **metrics})
        if self._tensorboard is not None:
            self._tensorboard.write(version, metrics)

    def write_samples(self, version: int, samples: Sequence[TrainedSample]) -> None:
        """Hand over the samples that `version` was trained on; another thread writes them. Raises
        what went wrong with earlier ones, such as OSError on a full disk."""
        if self._samples is not None:
            self._samples.write(version, samples)

    def flush(self) -> None:
        """Bring all rows to disk. Call it before a checkpoint: a run resumed from there can only
        cut rows, not bring back."""
        self._metrics.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()
        if self._samples is not None:
            self._samples.flush()

    def close(self) -> None:
        """Write all that waits and close the files; TimeoutError where that takes too long."""
        try:
            if self._samples is not None:
                self._samples.close()
        finally:
            self._metrics.close()
            if self._tensorboard is not None:
                self._tensorboard.close()


class TensorBoard:
    """A file of TensorBoard events, written in the caller's thread: a full disk is an OSError, not
    a thread that died."""

    def __init__(self, folder: Path, resume_version: int | None) -> None:
        """Args: resume_version: TensorBoard hides what an earlier process wrote from this version
        on."""
        self._folder = folder
        with add_file_name(folder):
            folder.mkdir(exist_ok=True)
            self._events = EventsWriter(str(folder / "events"))
            if resume_version is not None:
                start = SessionLog(status=SessionLog.START)
                self._events.write_event(
                    Event(wall_time=time.time(), step=resume_version, session_log=start)
                )
            self._events.flush()

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Write what is finite."""
        with add_file_name(self._folder):
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._events.write_event(
                        Event(wall_time=time.time(), step=version, summary=scalar(name, value))
                    )
            self._events.flush()

    def flush(self) -> None:
        """Bring all events to the file."""
        with add_file_name(self._folder):
            self._events.flush()

    def close(self) -> None:
        """Close the file."""
        with add_file_name(self._folder):
            self._events.close()
