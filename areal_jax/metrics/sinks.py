"""Output files of a run: metrics.jsonl always, TensorBoard events and samples.jsonl as configured."""

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
"""protobuf creates these classes at import."""


class Sinks:
    """Output files of one run, for one thread."""

    def __init__(
        self,
        run_folder: Path,
        config: MetricsConfig,
        resume_version: int | None = None,
        decode: Decode | None = None,
    ) -> None:
        """Open the files.

        Args:
            run_folder: the run's folder; created if missing.
            config: which files to write.
            resume_version: version that the run resumes from; rows of this version and later are
                cut, so that nothing is written twice. None: a new run.
            decode: decodes tokens to text for samples.jsonl.

        Raises:
            FileExistsError: the folder of a new run holds rows of another run.
        """
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
        """Append one row of metrics with the wall-clock time; nan and infinities become null.

        A version may have several rows: an evaluation may end after its step.
        """
        self._metrics.append(version, {"time_s": time.time(), **metrics})
        if self._tensorboard is not None:
            self._tensorboard.write(version, metrics)

    def write_samples(self, version: int, samples: Sequence[TrainedSample]) -> None:
        """Queue the samples that `version` was trained on for the writer thread.

        Raises:
            Exception: the error of an earlier write, such as OSError on a full disk.
        """
        if self._samples is not None:
            self._samples.write(version, samples)

    def flush(self) -> None:
        """Sync all rows to disk. Call it before a checkpoint: a resumed run can cut rows, but not
        restore lost ones."""
        self._metrics.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()
        if self._samples is not None:
            self._samples.flush()

    def close(self) -> None:
        """Write queued samples and close the files.

        Raises:
            TimeoutError: the samples were not written in time.
        """
        try:
            if self._samples is not None:
                self._samples.close()
        finally:
            self._metrics.close()
            if self._tensorboard is not None:
                self._tensorboard.close()


class TensorBoard:
    """A file of TensorBoard events, written in the caller's thread, so that a full disk raises an
    OSError there."""

    def __init__(self, folder: Path, resume_version: int | None) -> None:
        """Open the file.

        Args:
            folder: folder of the events.
            resume_version: version from which TensorBoard hides an earlier process's events.
        """
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
        """Write the finite metrics."""
        with add_file_name(self._folder):
            for name, value in metrics.items():
                if math.isfinite(value):
                    self._events.write_event(
                        Event(wall_time=time.time(), step=version, summary=scalar(name, value))
                    )
            self._events.flush()

    def flush(self) -> None:
        """Flush all events to the file."""
        with add_file_name(self._folder):
            self._events.flush()

    def close(self) -> None:
        """Close the file."""
        with add_file_name(self._folder):
            self._events.close()
