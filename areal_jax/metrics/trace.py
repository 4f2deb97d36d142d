"""trace.json: who did what when, in Chrome's trace format; open it at https://ui.perfetto.dev.

The file is a JSON array whose closing bracket the format allows to be missing, so that a killed run
leaves a valid one. (Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from areal_jax.metrics.jsonl import encode

logger = logging.getLogger(__name__)

LANES = ("trainer", "rollout engine loop", "weight_channel", "rewards", "checkpoint", "evaluation")
"""Their order from top to bottom. Other lanes come below, in order of first use."""

REMEMBERED_SPANS = 256
TAIL_BYTES = 1 << 20
"""Where a trace is gone on with, its last event is looked for in so many bytes."""


class Trace:
    """A file of spans; any thread may add some."""

    def __init__(self, path: Path | None) -> None:
        """Args: path: the file, which is gone on with where it exists, as one more process; None:
        spans are dropped."""
        self._lock = threading.Lock()
        self._rows: dict[str, list[_Row]] = {}
        self._num_rows = 0
        self._file = None
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        num_bytes, last_process = _whole_part(path) if path.exists() else (0, 0)
        self._process = last_process + 1
        self._file = path.open("r+b" if num_bytes else "wb", buffering=0)
        self._file.truncate(num_bytes)
        self._file.seek(num_bytes)
        self._empty = num_bytes == 0
        self._write(
            {"ph": "M", "name": "process_name", "args": {"name": f"process {self._process}"}}
        )
        for lane in LANES:
            self._new_row(lane)

    def span(
        self,
        lane: str,
        name: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, object] | None = None,
    ) -> None:
        """Draw `name` on `lane` from start_s to end_s, in seconds on one clock for all lanes.

        What overlaps without lying inside each other, such as answers that are graded side by side,
        takes further rows."""
        with self._lock:
            if self._file is None:
                return
            try:
                self._place(lane, name, start_s, end_s, args or {})
            except OSError as error:
                # The callers generate and train, and a full disk must not end that for the sake of
                # a picture.
                logger.warning(
                    "the trace ends here, as %s cannot be written: %s", self._file.name, error
                )
                self._file.close()
                self._file = None

    def close(self) -> None:
        """Close the array and the file; later spans are dropped."""
        with self._lock:
            if self._file is not None:
                with suppress(OSError):  # of a full disk: the bracket may be missing
                    self._file.write(b"\n]\n")
                self._file.close()
                self._file = None

    def _place(
        self, lane: str, name: str, start_s: float, end_s: float, args: Mapping[str, object]
    ) -> None:
        rows = self._rows.get(lane) or [self._new_row(lane)]
        row = next((row for row in rows if row.take(start_s, end_s)), None)
        if row is None:
            row = self._new_row(lane)
            row.take(start_s, end_s)
        microseconds = {"ts": round(start_s * 1e6, 3), "dur": round((end_s - start_s) * 1e6, 3)}
        self._write(
            {"ph": "X", "name": name, "tid": row.number, **microseconds, "args": dict(args)}
        )

    def _new_row(self, lane: str) -> _Row:
        self._num_rows += 1
        row = _Row(self._num_rows)
        rows = self._rows.setdefault(lane, [])
        rows.append(row)
        # Further rows of a lane stand below its first one, before the next lane.
        order = 1000 * list(self._rows).index(lane) + len(rows)
        name = lane if len(rows) == 1 else f"{lane} {len(rows)}"
        self._write({"ph": "M", "name": "thread_name", "tid": row.number, "args": {"name": name}})
        self._write(
            {
                "ph": "M",
                "name": "thread_sort_index",
                "tid": row.number,
                "args": {"sort_index": order},
            }
        )
        return row

    def _write(self, event: Mapping[str, object]) -> None:
        # One unbuffered write for each event: a kill tears none.
        assert self._file is not None
        text = encode({"pid": self._process, **event})
        self._file.write(f"{'[' if self._empty else ','}\n{text}".encode())
        self._empty = False


class _Row:
    """One line of the picture, on which spans lie beside or inside each other but never across."""

    def __init__(self, number: int) -> None:
        self.number = number
        # Outermost spans, oldest first; only those are remembered that a span still to come may
        # meet.
        self._spans: deque[tuple[float, float]] = deque()
        self._forgotten_until_s = float("-inf")

    def take(self, start_s: float, end_s: float) -> bool:
        """Place a span, if it follows all others or encloses the last of them."""
        followers = list(takewhile(lambda span: span[1] > start_s, reversed(self._spans)))
        if start_s < self._forgotten_until_s or any(
            span[0] < start_s or span[1] > end_s for span in followers
        ):
            return False
        for _ in followers:
            self._spans.pop()
        self._spans.append((start_s, end_s))
        if len(self._spans) > REMEMBERED_SPANS:
            self._forgotten_until_s = self._spans.popleft()[1]
        return True


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace, also of one that a kill has left without its end."""
    num_bytes, _ = _whole_part(path)
    return json.loads(path.read_bytes()[:num_bytes] + b"]") if num_bytes else []


def _whole_part(path: Path) -> tuple[int, int]:
    """Bytes up to the last whole event, without what follows it, and the number of its process; (0,
    0) where there is none."""
    with path.open("rb") as file:
        start = max(0, path.stat().st_size - TAIL_BYTES)
        file.seek(start)
        lines = file.read().split(b"\n")
    while lines and not _is_event(lines[-1]):
        lines.pop()
    if not lines:
        return 0, 0
    lines[-1] = lines[-1].removesuffix(b",")
    return start + len(b"\n".join(lines)), json.loads(lines[-1])["pid"]


def _is_event(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.removesuffix(b",")), dict)
    except ValueError:
        return False
