"""trace.json: a timeline of the run in Chrome's trace format; open it at https://ui.perfetto.dev.

The file is a JSON array without its optional closing bracket, so that the trace of a killed run is
valid. (Trace Event Format,
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
"""Lanes from top to bottom. Other lanes follow in order of first use."""

REMEMBERED_SPANS = 256
TAIL_BYTES = 1 << 20
"""Size of the end of an existing trace in which its last event is searched."""


class Trace:
    """A file of spans, for any thread."""

    def __init__(self, path: Path | None) -> None:
        """Open the file.

        Args:
            path: the file; an existing one is continued as a further process. None: spans are
                dropped.
        """
        self._lock = threading.Lock()
        self._rows: dict[str, list[_Row]] = {}
        self._num_rows = 0
        self._file = None
        if path is not None:
            self._open(path)

    def _open(self, path: Path) -> None:
        num_bytes, last_process = _find_complete_events(path) if path.exists() else (0, 0)
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
        """Add a span to a lane. Overlapping spans that are not nested get further rows.

        Args:
            lane: the lane.
            name: name of the span.
            start_s: start, in seconds of one clock for all lanes.
            end_s: end, on the same clock.
            args: details to show.
        """
        with self._lock:
            if self._file is None:
                return
            try:
                self._place(lane, name, start_s, end_s, args or {})
            except OSError as error:
                # A full disk must not stop generation or training because of the trace.
                logger.warning("trace stopped: cannot write %s: %s", self._file.name, error)
                self._file.close()
                self._file = None

    def close(self) -> None:
        """Close the array and the file; later spans are dropped."""
        with self._lock:
            if self._file is not None:
                with suppress(OSError):  # disk full: the bracket is optional
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
        # Further rows of a lane are below its first row, above the next lane.
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
        # One unbuffered write per event, so that a kill leaves complete events.
        assert self._file is not None
        text = encode({"pid": self._process, **event})
        self._file.write(f"{'[' if self._empty else ','}\n{text}".encode())
        self._empty = False


class _Row:
    """One row of the timeline, whose spans are disjoint or nested."""

    def __init__(self, number: int) -> None:
        self.number = number
        # Outermost spans, oldest first, of which the latest REMEMBERED_SPANS are kept.
        self._spans: deque[tuple[float, float]] = deque()
        self._dropped_until_s = float("-inf")

    def take(self, start_s: float, end_s: float) -> bool:
        """Add a span if it follows all others or encloses the last ones; return whether it
        does.
        """
        followers = list(takewhile(lambda span: span[1] > start_s, reversed(self._spans)))
        if start_s < self._dropped_until_s or any(
            span[0] < start_s or span[1] > end_s for span in followers
        ):
            return False
        for _ in followers:
            self._spans.pop()
        self._spans.append((start_s, end_s))
        if len(self._spans) > REMEMBERED_SPANS:
            self._dropped_until_s = self._spans.popleft()[1]
        return True


def read(path: Path) -> list[dict[str, Any]]:
    """Read the events of a trace, also of a killed run's."""
    num_bytes, _ = _find_complete_events(path)
    return json.loads(path.read_bytes()[:num_bytes] + b"]") if num_bytes else []


def _find_complete_events(path: Path) -> tuple[int, int]:
    """Return the length in bytes up to the last complete event, and the number of its process;
    (0, 0) without events.
    """
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
