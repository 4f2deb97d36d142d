"""Outputs of a run: metrics.jsonl always; TensorBoard events, samples.jsonl and trackers as
configured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2
from tensorboardX.summary import histogram, text

from areal_jax.metrics.config import METRICS, MetricsConfig
from areal_jax.metrics.files import add_file_name
from areal_jax.metrics.jsonl import JsonLines, cut
from areal_jax.metrics.samples import Decode, SampleWriter, TrainedSample
from areal_jax.metrics.trackers import Trackers

SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"

MAX_TEXT_CHARS = 4000
"""Of a longer sample, TensorBoard shows the beginning."""

# protobuf creates these classes at import.
Event: Any = vars(event_pb2)["Event"]
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]


class Sinks:
    """Output files of one run, for one thread."""

    def __init__(
        self,
        run_folder: Path,
        config: MetricsConfig,
        resume_version: int | None = None,
        decode: Decode | None = None,
        trackers: Trackers | None = None,
    ) -> None:
        """Open the files.

        Args:
            run_folder: the run's folder; created if missing.
            config: which files to write.
            resume_version: version that the run resumes from; rows of this version and later are
                cut, so that nothing is written twice. None: a new run.
            decode: decodes tokens to text for samples.
            trackers: of the run; the caller closes them.

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
            TensorBoard(run_folder / TENSORBOARD, resume_version, decode)
            if config.tensorboard
            else None
        )
        self._trackers = trackers
        self._metrics = JsonLines(metrics)
        self._samples = SampleWriter(samples, decode) if config.samples else None

    def write(self, version: int, metrics: Mapping[str, float]) -> None:
        """Append one row of metrics with the wall-clock time; nan and infinities become null.

        A version may have several rows: an evaluation may end after its step.
        """
        if self._trackers is not None:
            metrics = {**metrics, "trackers/failed": float(self._trackers.num_failed)}
            self._trackers.write(version, metrics)
        self._metrics.append(version, {"time_s": time.time(), **metrics})
        if self._tensorboard is not None:
            self._tensorboard.write(version, metrics)

    def write_samples(self, version: int, samples: Sequence[TrainedSample]) -> None:
        """Write the samples that `version` was trained on: to TensorBoard now, to samples.jsonl in
        the writer's thread.

        Raises:
            Exception: the error of an earlier write, such as OSError on a full disk.
        """
        if self._tensorboard is not None:
            self._tensorboard.write_samples(version, samples)
        if self._samples is not None:
            self._samples.write(version, samples)

    def flush(self) -> None:
        """Sync all rows to disk. Call it before a checkpoint: a resumed run can cut rows, but not
        restore lost ones.
        """
        self._metrics.sync()
        if self._tensorboard is not None:
            self._tensorboard.flush()
        if self._samples is not None:
            self._samples.flush()

    def close(self) -> None:
        """Write queued samples, and close the files.

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
    OSError there.
    """

    def __init__(
        self, folder: Path, resume_version: int | None, decode: Decode | None = None
    ) -> None:
        """Open the file.

        Args:
            folder: folder of the events.
            resume_version: version from which TensorBoard hides an earlier process's events.
            decode: decodes tokens to text.
        """
        self._folder, self._decode = folder, decode
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
        # Not by tensorboardX.summary.scalar, which replaces the `@` of `pass@1`.
        self._write(
            version,
            [
                Summary(value=[Summary.Value(tag=name, simple_value=value)])
                for name, value in metrics.items()
                if math.isfinite(value)
            ],
        )

    def write_samples(self, version: int, samples: Sequence[TrainedSample]) -> None:
        """Write histograms of the samples, and the first one as text."""
        if not samples:
            return
        sampled = np.concatenate([sample.versions[sample.loss_mask] for sample in samples])
        values = {
            "reward": np.array([sample.reward for sample in samples]),
            "sampled_tokens": np.array([sample.loss_mask.sum() for sample in samples]),
            "token_staleness": version - sampled,
        }
        written = [
            histogram(f"samples/{name}", found, bins="auto" if name == "reward" else 20)
            for name, found in values.items()
            if found.size and np.isfinite(found).all()
        ]
        if self._decode is not None:
            first = samples[0]
            shown = self._decode(first.tokens)[:MAX_TEXT_CHARS].replace("\n", "\n    ")
            title = f"task {first.task}, reward {first.reward:g}, {first.grade}"
            written.append(text("samples/first", f"{title}\n\n    {shown}"))
        self._write(version, written)

    def _write(self, version: int, summaries: Sequence[Any]) -> None:
        with add_file_name(self._folder):
            for summary in summaries:
                self._events.write_event(
                    Event(wall_time=time.time(), step=version, summary=summary)
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
