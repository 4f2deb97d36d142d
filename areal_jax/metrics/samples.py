"""samples.jsonl: every trained sample, token by token, written by a background thread, which also
closes and compresses its parts. Axes: T tokens of a sample.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float32, Int32

from areal_jax.image_files import ImageFile, thumbnail_uri
from areal_jax.metrics.config import MetricsConfig
from areal_jax.metrics.jsonl import JsonLines
from areal_jax.metrics.sample_parts import close_part, compress_parts

MAX_WAITING_BATCHES = 8

MAX_EXPECTED_CHARS = 1000
"""Of a longer reference answer, such as the tests of a program, rows have the beginning."""

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
    expected: str = ""
    """Reference answer of the task; empty if it has none."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward."""
    images: tuple[ImageFile, ...] = ()
    """Images of the prompt, of the first sample of a group."""


class SampleWriter:
    """Appends samples to a file in a background thread."""

    def __init__(
        self,
        path: Path,
        decode: Decode | None = None,
        timeout_s: float = 60.0,
        part_bytes: int = MetricsConfig().samples_part_bytes,
    ) -> None:
        """Open the file and start the thread.

        Args:
            path: the file.
            decode: decodes tokens to text, in the writer's thread; None: rows hold no text.
            timeout_s: limit on the wait of any call, in seconds.
            part_bytes: size from which on the file is closed as a part, before the next version.
        """
        self.path = path
        self._texts = None if decode is None else TokenTexts(decode)
        self._timeout_s = timeout_s
        self._lines = JsonLines(path)
        self._part_bytes, self._version = part_bytes, -1
        # Compresses a closed part, a member at each step, while no batch waits.
        self._compression: Iterator[None] | None = None
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
        is_open = True
        while is_open or self._compression is not None:
            try:
                if self._compression is not None and self._queue.empty():
                    if next(self._compression, "done") == "done":
                        self._compression = None
                elif (item := self._queue.get()) is None:
                    is_open = False
                else:
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
            if version != self._version and self._lines.num_bytes >= self._part_bytes:
                self._close_part()
            self._version = version
            for sample in samples:
                self._lines.append(version, row(sample, version, self._texts))

    def _close_part(self) -> None:
        # One part at a time, so that uncompressed ones do not pile up.
        for _ in self._compression or ():
            pass
        self._lines.sync()
        close_part(self.path)
        closed, self._lines = self._lines, JsonLines(self.path)
        closed.close()
        self._compression = compress_parts(self.path)


class TokenTexts:
    """Decodes tokens, and says how many characters each of them stands for. For one thread."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        # By token: characters, and whether it may hold a part of a character only.
        self._known: dict[int, tuple[int, bool]] = {}

    def decode(self, tokens: Int32[np.ndarray, "T"]) -> tuple[str, list[int]]:
        """Return the text of consecutive tokens, and the characters of each token.

        Of tokens that share one character, the first has it. If the text does not consist of the
        tokens' own texts, the first token has all characters.
        """
        text = self._decode(tokens)
        listed = tokens.tolist()
        if missing := set(listed) - self._known.keys():
            self._known |= {token: self._measure(token) for token in missing}
        chars = [self._known[token][0] for token in listed]
        start = 0
        for is_partial, run in groupby(listed, lambda token: self._known[token][1]):
            end = start + len(list(run))
            if is_partial:
                chars[start:end] = [len(self._decode(tokens[start:end])), *[0] * (end - start - 1)]
            start = end
        excess = sum(chars) - len(text)
        # Decoders of sentencepiece omit the space before the first token of a text.
        if excess == 1 and chars[0]:
            chars[0] -= 1
        elif excess:
            chars = [len(text), *[0] * (len(listed) - 1)]
        return text, chars

    def _measure(self, token: int) -> tuple[int, bool]:
        once, twice = (self._decode(np.full(n, token, np.int32)) for n in (1, 2))
        return len(twice) - len(once), "\ufffd" in once


def row(sample: TrainedSample, version: int, texts: TokenTexts | None) -> dict[str, object]:
    """Return the row of a sample that `version` was trained on, short entries first.

    `staleness` counts the sampled tokens by staleness, from 0. `stale` lists the positions of stale
    tokens. `text`, with `texts`, is a list of [version, is stale, text of consecutive tokens that
    share both], and `chars_per_token` the number of its characters that each token stands for.
    `images`, if there are some, are small copies as data URIs.
    """
    staleness = np.maximum(version - sample.versions[sample.loss_mask], 0)
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
        "staleness": np.bincount(staleness),
        "expected": sample.expected[:MAX_EXPECTED_CHARS],
        "stale": np.flatnonzero(sample.stale),
        "tokens": sample.tokens,
        "loss_mask": sample.loss_mask.astype(np.int32),
        # Nine digits identify a float32.
        "behave_logp": [float(f"{logp:.9g}") for logp in sample.behave_logp.tolist()],
        "versions": sample.versions,
    }
    if sample.components:
        facts["components"] = dict(sample.components)
    if sample.images:
        facts["images"] = [thumbnail_uri(image) for image in sample.images]
    if texts is None:
        return facts
    spans = list(_spans(sample, texts))
    return {
        **facts,
        "text": [span for span, _ in spans],
        "chars_per_token": list(chain.from_iterable(chars for _, chars in spans)),
    }


def _spans(
    sample: TrainedSample, texts: TokenTexts
) -> Iterator[tuple[tuple[int, bool, str], list[int]]]:
    changes = (np.diff(sample.versions) != 0) | (sample.stale[1:] != sample.stale[:-1])
    starts = [0, *(np.flatnonzero(changes) + 1).tolist()] if len(sample.tokens) else []
    ends = [*starts[1:], len(sample.tokens)]
    for start, end in zip(starts, ends, strict=False):
        text, chars = texts.decode(sample.tokens[start:end])
        yield (int(sample.versions[start]), bool(sample.stale[start]), text), chars
