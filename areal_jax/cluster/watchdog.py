"""A run without progress: who waits for whom is named, and then what does not progress is replaced,
or the run ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

logger = logging.getLogger(__name__)

CPU_SHARE = 0.25
"""Of one core: a process that computes for this share of the time is at work, for example
compiling."""

LEAST_WINDOW_S = 5.0
"""Over less, processor time says nothing: processes report theirs every two seconds."""


MOST_REPLACED = 3
"""Workers replaced without any progress after it: what stalls then is not one of them."""


class Stalled(RuntimeError):
    """A run made no progress for launch.stall_timeout_s, and no worker of it could be replaced."""

    during: Sequence[tuple[str, str]] = ()
    """Lane and name of what was under way in the trainer."""


@runtime_checkable
class Waits(Protocol):
    """A part of a run of which it can be seen whether it progresses."""

    def progress(self) -> Hashable:
        """What is different whenever the part has progressed."""
        ...

    def waits(self) -> str:
        """What it has to do and what it waits for, in words."""
        ...


@runtime_checkable
class Grows(Protocol):
    """A part of a run that is made of workers."""

    @property
    def is_empty(self) -> bool:
        """Whether it waits for a worker to join, which has a deadline of its own."""
        ...


@runtime_checkable
class Computes(Protocol):
    """A part of a run in processes of its own."""

    @property
    def cpu_s(self) -> float:
        """Processor time that they have used."""
        ...


@runtime_checkable
class Replaces(Protocol):
    """A part of a run that can replace what does not progress."""

    def replace_stalled(self, why: str) -> str | None:
        """Give up the worker that owes an answer for longest; its name, or None where none owes
        any."""
        ...


class Watchdog:
    """Watches whether a run progresses. Time spent computing counts as progress where a worker
    cannot report any."""

    def __init__(
        self,
        *,
        warning_s: float,
        timeout_s: float,
        progress: Callable[[], Hashable],
        cpu_s: Callable[[], float],
        waits: Callable[[], str],
        replace: Callable[[str], str | None],
    ) -> None:
        """
        Args:
            warning_s: launch.stall_warning_s.
            timeout_s: launch.stall_timeout_s.
            progress: what is different whenever a token was decoded, an answer graded, or a step
                made.
            cpu_s: processor time of whoever may be at work without reporting progress.
            waits: who waits for whom, in one line.
            replace: replaces the worker that does not progress, given why; its name, or None where
                there is none.
        """
        self._warning_s, self._timeout_s = warning_s, timeout_s
        self._progress, self._cpu_s, self._waits, self._replace = progress, cpu_s, waits, replace

    async def watch(self) -> None:
        """Never returns. Raises Stalled."""
        clock = asyncio.get_running_loop().time
        pause_s = min(self._warning_s, self._timeout_s, 10 * LEAST_WINDOW_S) / 10
        known, cpu_s, since_s, window_s, is_named = (
            self._progress(),
            self._cpu_s(),
            clock(),
            clock(),
            False,
        )
        num_replaced = 0
        while True:
            await asyncio.sleep(pause_s)
            current, now_s = self._progress(), clock()
            is_working = False
            if now_s - window_s >= LEAST_WINDOW_S:
                used_s = self._cpu_s()
                is_working = used_s - cpu_s >= CPU_SHARE * (now_s - window_s)
                cpu_s, window_s = used_s, now_s
            if current != known or is_working:
                if is_named:
                    logger.warning("progress again after %.0f s", now_s - since_s)
                known, since_s, is_named, num_replaced = current, now_s, False, 0
                continue
            still_s = now_s - since_s
            if still_s >= self._warning_s and not is_named:
                logger.warning("no progress for %.0f s: %s", still_s, self._waits())
                is_named = True
            if still_s >= self._timeout_s:
                why = f"no progress for launch.stall_timeout_s={self._timeout_s:g}: {self._waits()}"
                replaced = self._replace(why) if num_replaced < MOST_REPLACED else None
                if replaced is None:
                    raise Stalled(why)
                logger.error("%s is replaced: %s", replaced, why)
                since_s, is_named, num_replaced = now_s, False, num_replaced + 1
