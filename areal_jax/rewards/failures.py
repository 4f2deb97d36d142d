"""Log of failed reward calls: each distinct error once, then the number of its repetitions."""

from __future__ import annotations

import logging

from areal_jax.records import RewardResult

logger = logging.getLogger(__name__)

MAX_DISTINCT = 64
"""Number of remembered errors; the one that was seen least recently is dropped."""


class FailureLog:
    """Logs failed reward calls. Errors with the same frames count as the same error, whatever their
    messages.
    """

    def __init__(self) -> None:
        # By lines of code and type of the error, the latest last: its number, and its first
        # report.
        # its first report.
        self._seen: dict[str, tuple[int, str]] = {}

    def add(self, task: str, grade: RewardResult) -> None:
        """Log a failed call for the task of this id, at its 1st, 11th, 101st, 1001st ... time."""
        frames = [line for line in grade.trace.splitlines() if line.startswith('  File "')]
        # Without frames: the expectation, without what was found.
        same = grade.detail.partition(":" if frames else ", found ")[0]
        key = "\n".join((grade.kind, same, *frames))
        count, reported = self._seen.pop(key, (0, grade.detail))
        self._seen[key] = count + 1, reported
        if count == 0:
            logger.warning("reward call failed (task %s): %s", task, grade.trace or grade.detail)
            if len(self._seen) > MAX_DISTINCT:
                del self._seen[next(iter(self._seen))]
        elif str(count).strip("0") == "1" and count > 1:
            self._repeat(count, reported)

    def close(self) -> None:
        """Log the number of repetitions of each error."""
        for count, reported in self._seen.values():
            if count > 1:
                self._repeat(count - 1, reported)
        self._seen.clear()

    def _repeat(self, count: int, reported: str) -> None:
        logger.warning("reward call failed: same error %d times since: %s", count, reported)
