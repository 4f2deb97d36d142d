"""samples.jsonl: every trained sample, token by token, written by a background thread. Axes: T
tokens of a sample."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int32

from areal_jax.metrics.jsonl import JsonLines

MAX_WAITING_BATCHES = 8

Decode = Callable[[np.ndarray], str]


@dataclass(frozen=True, slots=True, eq=False)
class TrainedSample:
    """One sample as the trainer used it."""

    task: str
    """Id of the task."""
    group: int
    """Id of the group."""
    number: int
    """Index of the sample in its group."""
    tokens: Int32[np.ndarray, "T"]
    loss_mask: Bool[np.ndarray, "T"]
    """True where the policy sampled the token."""
    behave_logp: Float32[np.ndarray, "T"]
    versions: Int32[np.ndarray, "T"]
    stale: Bool[np.ndarray, "T"]
    """True where a sampled token was too stale and masked from the loss."""
    reward: float
    grade: str
    stop_reason: str


class SampleWriter:
    """Appends samples to a file in a background thread."""

    def __init__(self, path: Path, decode: Decode | None = None, timeout_s: float = 60.0) -> None:
        """Open the file and start the thread.

        Args:
            path: the file.
            decode: decodes tokens to text, in the writer's thread; None: rows hold no text.
            timeout_s: limit on the wait of any call, in seconds.
        """
        self.path = path
        self._decode = decode
        self._timeout_s = timeout_s
        self._lines = JsonLines(path)
        self._error: Exception | None = None
        # Owned by this writer. The training thread puts a batch, an Event to set when all earlier
        # items are on disk, or None to end; the writer's thread takes. `close` ends it. A process
        # that ends without `close` loses queued batches, which a resumed run writes again.
        self._queue: queue.Queue[tuple[int, Sequence[TrainedSample]] | threading.Event | None] = (
            queue.Queue(MAX_WAITING_BATCHES)
        )
        self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
        self._thread.start()

    def write(self, version: int, samples: Sequence[TrainedSample]) -> None:
        """Queue the samples that `version` was trained on.

        Raises:
            Exception: the error of an earlier write.
            TimeoutError: the queue stayed full.
        """
        self._raise_error()
        self._put((version, samples))

    def flush(self) -> None:
        """Wait until all queued samples are on disk.

        Raises:
            Exception: the error of an earlier write.
            TimeoutError: the samples were not written in time.
        """
        done = threading.Event()
        self._put(done)
        if not done.wait(self._timeout_s):
            raise TimeoutError(
                f"samples are still being written to {self.path} after {self._timeout_s:g} s"
            )
        self._raise_error()

    def close(self) -> None:
        """Write the queued samples and end the thread.

        Raises:
            Exception: the error of an earlier write.
            TimeoutError: the samples were not written in time.
        """
        self._put(None)
        self._thread.join(self._timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"samples are still being written to {self.path} after {self._timeout_s:g} s"
            )
        self._lines.close()
        self._raise_error()

    def _put(self, item: tuple[int, Sequence[TrainedSample]] | threading.Event | None) -> None:
        try:
            self._queue.put(item, timeout=self._timeout_s)
        except queue.Full:
            raise TimeoutError(
                f"{self.path}: {MAX_WAITING_BATCHES} batches of samples waited for "
                f"{self._timeout_s:g} s; set metrics.samples=false or another --run-folder"
            ) from None

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._serve(item)
            except Exception as error:  # handed on: raised in the caller's thread at the next call
                self._error = error

    def _serve(self, item: tuple[int, Sequence[TrainedSample]] | threading.Event) -> None:
        if isinstance(item, threading.Event):
            try:
                self._lines.sync()
            finally:
                item.set()
        else:
            version, samples = item
            for sample in samples:
                self._lines.append(version, row(sample, self._decode))


def row(sample: TrainedSample, decode: Decode | None) -> dict[str, object]:
    """Return the row of a sample, short entries first.

    `stale` lists the positions of stale tokens. `text`, with `decode`, is a list of [version, is
    stale, text of consecutive tokens that share both].
    """
    facts: dict[str, object] = {
        "grade": sample.grade,
        "stop_reason": sample.stop_reason,
        "num_versions": len(np.unique(sample.versions[sample.loss_mask])),
        "reward": sample.reward,
        "task": sample.task,
        "group": sample.group,
        "number": sample.number,
        "num_tokens": len(sample.tokens),
        "num_sampled": int(sample.loss_mask.sum()),
        "num_stale": int(sample.stale.sum()),
        "stale": np.flatnonzero(sample.stale),
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask.astype(np.int32),
        # Nine digits identify a float32.
        "behave_logp": [float(f"{logp:.9g}") for logp in sample.behave_logp.tolist()],
        "versions": sample.versions,
    }
    return facts if decode is None else {**facts, "text": _text(sample, decode)}


def _text(sample: TrainedSample, decode: Decode) -> list[tuple[int, bool, str]]:
    changes = (np.diff(sample.versions) != 0) | (sample.stale[1:] != sample.stale[:-1])
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(sample.tokens) else []
    ends = [*starts[1:], len(sample.tokens)]
    return [
        (int(sample.versions[start]), bool(sample.stale[start]), decode(sample.tokens[start:end]))
        for start, end in zip(starts, ends, strict=False)
    ]
