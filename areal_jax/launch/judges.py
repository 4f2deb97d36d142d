"""Reward workers in processes of their own, joining and leaving, that judge as one."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from areal_jax.launch.connection import Connection, PartLost
from areal_jax.records import Task, ToolResult, Verdict

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""An answer whose worker was lost so often may be what they were lost by."""


class Judges:
    """A `records.Judge` and `records.Tools` made of any number of parts. Use it from the asyncio thread.

    What a worker that is lost was judging, another judges. Where none is left, answers wait for one, `wait_s` at most."""

    def __init__(self, *, wait_s: float) -> None:
        self._wait_s = wait_s
        self._members: dict[int, Connection] = {}
        # Answers that each worker judges.
        self._load = Counter[int]()
        self._joined = asyncio.Condition()
        self._counts: dict[int, dict[str, float]] = {}
        """What each worker has counted, by its last report; also those that are lost."""
        self.num_lost = 0

    async def join(self, number: int, connection: Connection, on_loss: Callable[[int, PartLost], None]) -> None:
        """Let a worker judge from now on."""

        def lost(loss: PartLost) -> None:
            if self._members.pop(number, None) is not None:
                logger.warning("%s; %d answers that it was judging go to others", loss, self._load.pop(number, 0))
                self.num_lost += 1
            on_loss(number, loss)

        def told(_topic: str, counts: Any) -> None:
            self._counts[number] = counts

        self._members[number] = connection
        connection.listen(told, lost)
        async with self._joined:
            self._joined.notify_all()

    @property
    def connections(self) -> list[Connection]:
        """To the workers that there are."""
        return list(self._members.values())

    async def __call__(self, task: Task, answer: str) -> Verdict:
        """As RewardService: every answer gets a verdict."""
        found = await self._asked("judge", asdict(task), answer)
        return Verdict(**found)

    async def use(self, tool: str, argument: str) -> ToolResult:
        """As RewardService: use a tool."""
        found = await self._asked("use", tool, argument)
        if "text" not in found:
            found = {"kind": found["kind"], "text": f"Error: {found['detail']}"}
        return ToolResult(**found)

    def counters(self) -> dict[str, float]:
        """Counts and seconds since the run began, of all workers, by their last reports."""
        total = Counter[str]()
        for counts in self._counts.values():
            total.update(counts)
        return {**total, "workers": float(len(self._members)), "workers_lost": float(self.num_lost)}

    async def close(self) -> None:
        """End all workers."""
        members, self._members = list(self._members.values()), {}
        await asyncio.gather(*(connection.close() for connection in members))

    async def _asked(self, verb: str, *arguments: Any) -> dict[str, Any]:
        last = PartLost("none was asked")
        for _ in range(ATTEMPTS):
            try:
                number = await self._least()
            except TimeoutError:
                return {"kind": "infrastructure", "detail": f"no reward worker has joined within {self._wait_s:g} s"}
            self._load[number] += 1
            question = self._members[number].ask(verb, *arguments)
            try:
                return await question
            except PartLost as loss:
                last = loss
            finally:
                if number in self._members:
                    self._load[number] -= 1
        # Nothing is known about the answer: its worker may have been lost by anything.
        return {"kind": "infrastructure", "detail": f"{ATTEMPTS} reward workers were lost over it, the last: {last}"}

    async def _least(self) -> int:
        async with asyncio.timeout(self._wait_s), self._joined:
            await self._joined.wait_for(lambda: bool(self._members))
        return min(self._members, key=self._load.__getitem__)
