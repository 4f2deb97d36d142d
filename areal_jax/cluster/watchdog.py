"""Watchdog of a run: without progress it warns, replaces the stalled worker or ends the run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

logger = logging.getLogger(__name__)

CPU_SHARE = 0.25
"""Share of one core above which a process counts as working, for example compiling."""

MIN_WINDOW_S = 5.0
"""Minimum interval of a processor time measurement, in seconds: processes report every 2 s."""

MOST_REPLACED = 3
"""Maximum number of successive replacements without progress: then workers are not the cause."""


class Stalled(RuntimeError):
    """A run made no progress for launch.stall_timeout_s, and no worker could be replaced."""

    during: Sequence[tuple[str, str]] = ()
    """Lane and name of the trainer's spans in progress."""


@runtime_checkable
class ProgressSource(Protocol):
    """Component of a run with observable progress."""

    def progress(self) -> Hashable:
        """Return a value that changes with every progress."""
        ...

    def describe_wait(self) -> str:
        """Describe pending work and what it waits for."""
        ...


@runtime_checkable
class WorkerGroup(Protocol):
    """Component of a run that consists of workers."""

    @property
    def is_empty(self) -> bool:
        """Whether it waits for a worker to join, which has its own deadline."""
        ...


@runtime_checkable
class CpuTimeSource(Protocol):
    """Component of a run in separate processes."""

    @property
    def cpu_s(self) -> float:
        """Processor time of its processes, in seconds."""
        ...


@runtime_checkable
class WorkerReplacer(Protocol):
    """Component of a run that can replace a stalled worker."""

    def replace_stalled(self, why: str) -> str | None:
        """Kill the worker with the oldest pending call.

        Returns:
            Its name; None if no call is pending.
        """
        ...


class Watchdog:
    """Watches the progress of a run.

    Processor time counts as progress of workers without reports.
    """

    def __init__(
        self,
        *,
        warning_s: float,
        timeout_s: float,
        progress: Callable[[], Hashable],
        cpu_s: Callable[[], float],
        describe_wait: Callable[[], str],
        replace: Callable[[str], str | None],
    ) -> None:
        """Create a watchdog; `watch` runs it.

        Args:
            warning_s: launch.stall_warning_s.
            timeout_s: launch.stall_timeout_s.
            progress: Returns a value that changes with every decoded token, graded answer or step.
            cpu_s: Returns the processor time of processes that work without reports, in seconds.
            describe_wait: Describes in one line what each component waits for.
            replace: Replaces the stalled worker, given the reason; returns its name or None.
        """
        self._warning_s, self._timeout_s = warning_s, timeout_s
        self._progress, self._cpu_s = progress, cpu_s
        self._describe_wait, self._replace = describe_wait, replace

    async def watch(self) -> None:
        """Watch forever.

        Raises:
            Stalled: The run made no progress and no worker could be replaced.
        """
        clock = asyncio.get_running_loop().time
        pause_s = min(self._warning_s, self._timeout_s, 10 * MIN_WINDOW_S) / 10
        known, cpu_s, since_s, window_s, is_warned = (
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
            if now_s - window_s >= MIN_WINDOW_S:
                used_s = self._cpu_s()
                is_working = used_s - cpu_s >= CPU_SHARE * (now_s - window_s)
                cpu_s, window_s = used_s, now_s
            if current != known or is_working:
                if is_warned:
                    logger.warning("progress again after %.0f s", now_s - since_s)
                known, since_s, is_warned, num_replaced = current, now_s, False, 0
                continue
            still_s = now_s - since_s
            if still_s >= self._warning_s and not is_warned:
                logger.warning("no progress for %.0f s: %s", still_s, self._describe_wait())
                is_warned = True
            if still_s >= self._timeout_s:
                why = (
                    f"no progress for launch.stall_timeout_s={self._timeout_s:g}: "
                    f"{self._describe_wait()}"
                )
                replaced = self._replace(why) if num_replaced < MOST_REPLACED else None
                if replaced is None:
                    raise Stalled(why)
                logger.error("restarting stalled worker: %s, %s", replaced, why)
                since_s, is_warned, num_replaced = now_s, False, num_replaced + 1
