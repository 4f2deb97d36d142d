"""Reward workers in processes of their own, joining and leaving, that grader as one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from areal_jax.checkpoint.recovery import task_to_json
from areal_jax.cluster.registry import Channel, Registry
from areal_jax.errors import WorkerDied
from areal_jax.records import RewardResult, Task, ToolResult
from areal_jax.rewards.failures import FailureLog
from areal_jax.rewards.service import failure_counts

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""An answer whose worker was lost so often may be what they were lost by."""


class Graders:
    """A `records.Grader` and `records.Tools` made of any number of parts. Use it from the asyncio
    thread.

    What a worker that is lost was grading, another graders. Where none is left, answers wait for
    one, `wait_s` at most."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._registry = Registry()
        # Answers that each worker graders.
        self._load = Counter[int]()
        self._counts: dict[int, dict[str, float]] = {}
        """What each worker has counted, by its last report; also those that are lost."""
        self._num_ungraded = 0
        """Calls that no worker has answered."""
        self._failures = FailureLog()
        self.num_answered = 0
        # The worker that each question under way was put to, oldest first. Owned by `_asked`.
        self._asked_of: dict[object, int] = {}

    def join(self, number: int, connection: Channel, on_loss: Callable[[], None]) -> None:
        """Let a worker grader from now on."""

        def left(loss: WorkerDied) -> None:
            logger.warning(
                "%s; %d answers that it was grading go to others", loss, self._load.pop(number, 0)
            )

        def reported(_topic: str, counts: Any) -> None:
            self._counts[number] = counts

        self._registry.join(number, connection, reported=reported, left=left, on_loss=on_loss)

    @property
    def connections(self) -> list[Channel]:
        """To the workers that there are."""
        return list(self._registry.values())

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        """As RewardService: every answer gets a grade."""
        try:
            grade = RewardResult(**await self._asked("grade_answer", task_to_json(task), answer))
        except _Ungraded as failure:
            self._num_ungraded += 1
            grade = RewardResult("infrastructure", str(failure), failed=True)
        if grade.failed:
            self._failures.add(task.id, grade)
        return grade

    async def use(self, tool: str, argument: str) -> ToolResult:
        """As RewardService: use a tool."""
        try:
            return ToolResult(**await self._asked("use", tool, argument))
        except _Ungraded as failure:
            return ToolResult("infrastructure", f"Error: {failure}")

    def counters(self) -> dict[str, float]:
        """Counts and seconds since the run began, of all workers, by their last reports."""
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
        """As `Waits.progress`: answers."""
        return self.num_answered

    @property
    def is_empty(self) -> bool:
        """Whether answers wait for a worker to join, `wait_s` at most."""
        return not self._registry

    def waits(self) -> str:
        """As `Waits.waits`: how many answers each worker grades."""
        said = [
            f"{self._registry[number].name} grades {self._load[number]} answers"
            for number in self._registry
        ]
        return ", ".join(said or ["there is no reward worker"])

    def replace_stalled(self, why: str) -> str | None:
        """Give up the worker with an answer that it was asked for before all others; its name, or
        None where none has one."""
        if (
            number := next(iter(self._asked_of.values()), None)
        ) is None or number not in self._registry:
            return None
        connection = self._registry[number]
        connection.give_up(why)
        return connection.name

    async def close(self) -> None:
        """End all workers."""
        await self._registry.close()
        self._failures.close()

    async def _asked(self, verb: str, *arguments: Any) -> dict[str, Any]:
        """What a worker answers. _Ungraded where none does: nothing is known, a worker may have
        been lost by anything."""
        last = WorkerDied("none was asked")
        for _ in range(ATTEMPTS):
            try:
                await self._registry.until(lambda: bool(self._registry), self._wait_s)
            except TimeoutError:
                raise _Ungraded(f"no reward worker has joined within {self._wait_s:g} s") from None
            number = min(self._registry, key=self._load.__getitem__)
            self._load[number] += 1
            question = object()
            self._asked_of[question] = number
            try:
                answer = await self._registry[number].ask(verb, *arguments)
                self.num_answered += 1
                return answer
            except WorkerDied as loss:
                last = loss
            finally:
                del self._asked_of[question]
                if number in self._registry:
                    self._load[number] -= 1
        raise _Ungraded(f"{ATTEMPTS} reward workers were lost over it, the last: {last}")


class _Ungraded(Exception):
    """Why no worker has answered."""
