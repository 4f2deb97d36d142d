"""Pool of reward workers in separate processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from areal_jax.cluster.registry import Registry, WorkerHandle
from areal_jax.errors import WorkerDied
from areal_jax.records import RewardResult, Task, ToolResult, task_to_json
from areal_jax.rewards.failures import FailureLog
from areal_jax.rewards.service import failure_counts

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Number of worker deaths after which an answer fails: it may be their cause."""


class Graders:
    """Pool of reward workers as one `protocols.Grader` and `protocols.Tools`; asyncio thread only.

    Answers of a dead worker go to another one; without a worker they wait for one, at most
    `wait_s`.
    """

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._registry = Registry()
        # Number of answers at each worker.
        self._load = Counter[int]()
        self._counts: dict[int, dict[str, float]] = {}
        """Counters of each worker by its last report, including dead workers."""
        self._num_ungraded = 0
        """Number of calls without a reply."""
        self._failures = FailureLog()
        self.num_answered = 0
        # Worker of each pending call, oldest first. Owned by `_call`.
        self._pending_workers: dict[object, int] = {}

    def join(self, number: int, connection: WorkerHandle, on_death: Callable[[], None]) -> None:
        """Add a worker to the pool."""

        def handle_removal(death: WorkerDied) -> None:
            logger.warning("worker died: %s; moved_answers=%d", death, self._load.pop(number, 0))

        def handle_report(_topic: str, counts: Any) -> None:
            self._counts[number] = counts

        self._registry.join(
            number,
            connection,
            on_report=handle_report,
            on_removal=handle_removal,
            on_death=on_death,
        )

    @property
    def connections(self) -> list[WorkerHandle]:
        """Connections of live workers."""
        return list(self._registry.values())

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        """Grade an answer; never raises for a failure of the workers."""
        try:
            grade = RewardResult(**await self._call("grade_answer", task_to_json(task), answer))
        except _Ungraded as failure:
            self._num_ungraded += 1
            grade = RewardResult("infrastructure", str(failure), failed=True)
        if grade.failed:
            self._failures.add(task.id, grade)
        return grade

    async def use(self, tool: str, argument: str) -> ToolResult:
        """Call a tool; a failure of the workers is a result of kind `infrastructure`."""
        try:
            return ToolResult(**await self._call("use", tool, argument))
        except _Ungraded as failure:
            return ToolResult("infrastructure", f"Error: {failure}")

    def counters(self) -> dict[str, float]:
        """Return counts and seconds of all workers since the run started, by their last reports."""
        total = Counter[str]()
        for counts in self._counts.values():
            total.update(counts)
        failed = failure_counts(
            total["failed"] + self._num_ungraded, total["calls"] + self._num_ungraded
        )
        return {
            **total,
            **failed,
            "workers": float(len(self._registry)),
            "workers_lost": float(self._registry.num_deaths),
        }

    def progress(self) -> Hashable:
        """Return the number of replies."""
        return self.num_answered

    @property
    def is_empty(self) -> bool:
        """Whether there is no worker, so that answers wait for one, at most `wait_s`."""
        return not self._registry

    def describe_wait(self) -> str:
        """Describe how many answers each worker grades."""
        descriptions = [
            f"{self._registry[number].name} grades {self._load[number]} answers"
            for number in self._registry
        ]
        return ", ".join(descriptions or ["there is no reward worker"])

    def replace_stalled(self, why: str) -> str | None:
        """Kill the worker with the oldest pending call.

        Returns:
            Its name; None if no call is pending.
        """
        if (
            number := next(iter(self._pending_workers.values()), None)
        ) is None or number not in self._registry:
            return None
        connection = self._registry[number]
        connection.mark_dead(why)
        return connection.name

    async def close(self) -> None:
        """End all workers."""
        await self._registry.close()
        self._failures.close()

    async def _call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call a worker, and others if it dies.

        Raises:
            _Ungraded: No worker replied; the cause of the deaths is unknown.
        """
        last = WorkerDied("no worker was called")
        for _ in range(ATTEMPTS):
            try:
                await self._registry.wait_until(lambda: bool(self._registry), self._wait_s)
            except TimeoutError:
                raise _Ungraded(f"no reward worker has joined within {self._wait_s:g} s") from None
            number = min(self._registry, key=self._load.__getitem__)
            self._load[number] += 1
            key = object()
            self._pending_workers[key] = number
            try:
                answer = await self._registry[number].call(method, *arguments)
                self.num_answered += 1
                return answer
            except WorkerDied as death:
                last = death
            finally:
                del self._pending_workers[key]
                if number in self._registry:
                    self._load[number] -= 1
        raise _Ungraded(f"{ATTEMPTS} reward workers died with this call, the last: {last}")


class _Ungraded(Exception):
    """Reason why no worker replied."""
