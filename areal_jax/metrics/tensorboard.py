"""TensorBoard events of a run."""

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

from areal_jax.metrics.files import add_file_name
from areal_jax.metrics.samples import Decode, TrainedSample

MAX_TEXT_CHARS = 4000
"""Of a longer sample, TensorBoard shows the beginning."""

# protobuf creates these classes at import.
Event: Any = vars(event_pb2)["Event"]
SessionLog: Any = vars(event_pb2)["SessionLog"]
Summary: Any = vars(summary_pb2)["Summary"]


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
