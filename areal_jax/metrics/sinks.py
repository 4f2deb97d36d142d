"""Outputs of a run: metrics.jsonl always; TensorBoard events, samples.jsonl and trackers as
configured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_jax.metrics.config import METRICS, MetricsConfig
from areal_jax.metrics.jsonl import JsonLines, cut
from areal_jax.metrics.sample_parts import closed_parts, cut_parts
from areal_jax.metrics.samples import Decode, SampleWriter, TrainedSample
from areal_jax.metrics.trackers import Trackers

SAMPLES = "samples.jsonl"
TENSORBOARD = "tensorboard"


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
            DamagedSamples: a part of the samples is missing or damaged.
        """
        run_folder.mkdir(parents=True, exist_ok=True)
        metrics, samples = run_folder / METRICS, run_folder / SAMPLES
        if resume_version is None:
            for path in (metrics, samples, *closed_parts(samples)):
                if path.exists() and path.stat().st_size:
                    raise FileExistsError(
                        f"{path} holds the rows of another run; set --run-folder to a new "
                        "folder, or resume that run"
                    )
        else:
            cut(metrics, resume_version)
            cut_parts(samples, resume_version)
        self._tensorboard = None
        if config.tensorboard:
            # Half a second to import, which reports and runs without TensorBoard do not spend.
            from areal_jax.metrics.tensorboard import TensorBoard

            self._tensorboard = TensorBoard(run_folder / TENSORBOARD, resume_version, decode)
        self._trackers = trackers
        self._metrics = JsonLines(metrics)
        self._samples = None
        if config.samples:
            self._samples = SampleWriter(samples, decode, part_bytes=config.samples_part_bytes)

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
