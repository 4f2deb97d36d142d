"""Trainer hosts in processes of their own, joined into one train mesh: asked together, they are one
trainer."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import ray

from areal_jax.checkpoint.recovery import Columns, encode, pack
from areal_jax.cluster.connection import Connection
from areal_jax.errors import WorkerDied
from areal_jax.records import Group, RolloutState, StepResult

logger = logging.getLogger(__name__)

LOOK_S = 5.0
"""A host answers after so long even where it has no newer weights to tell of."""


class Trainers:
    """All trainer hosts. `step`, `save` and `write_results` block: call them from a worker thread,
    all else from the loop's.

    What one of them is asked all are asked, in the same order: their devices work on one program.
    When one is lost, so is the work of all, and everything raises WorkerDied."""

    def __init__(self, connections: Sequence[Connection], version: int) -> None:
        self.connections, self._loop = connections, asyncio.get_running_loop()
        self.version = version
        """Trainer steps that the parameters have seen."""
        self.is_stepping = False
        """Whether the parameters are neither those of `version` nor yet those of the next one."""
        self._measures: dict[str, tuple[float, float]] = {}
        # Questions under way. One thread at a time asks them.
        self._num_asked = 0
        self._loss: asyncio.Future[WorkerDied] = self._loop.create_future()
        for connection in connections:
            connection.listen(lambda _topic, _what: None, self._lost)

    @property
    def params(self) -> None:
        """They stay where they are."""
        return None

    def step(self, groups: Sequence[Group]) -> StepResult:
        """One trainer step, after which `version` is one higher."""
        # Written to the object store once, for all hosts.
        state = RolloutState({}, next_group_id=0, rejected={}, buffered=tuple(groups), suspended=())
        packed = ray.put(pack(encode(state)))
        self.is_stepping = True
        try:
            (metrics, stale, self._measures), *_ = self._asked("step", [packed])
        finally:
            self.is_stepping = False
        self.version += 1
        return StepResult(metrics, stale)

    def save(self, version: int, beside: Columns) -> None:
        """As `CheckpointStore.save`; every host writes its part into the run's folder, which all
        must see."""
        self._asked("save", version, [ray.put(pack(beside))])

    def write_results(self, version: int) -> list[str]:
        """Write the policy to the run's folder, and wait for the checkpoint under way; what to tell
        of it, a line each."""
        return self._asked("write_results", version)[0]

    def publish(self, version: int, *, again: bool = False) -> None:
        """Send a version on its way, unless it is already; never waits. Args: again: put it into
        the object store anew."""
        for connection in self.connections:
            connection.tell("publish", version, again)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """As `WeightChannel.metrics`, of the first host."""
        measures, self._measures = self._measures, {}
        return measures

    async def contribution(self, host: int, after: int) -> Any:
        """Where a host's shards of its newest version above `after` are; None where there is none
        yet, and a text that says why where none are on their way."""
        return await self.connections[host].ask("contribution", after, LOOK_S)

    async def while_whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that needs all hosts. WorkerDied when one is lost: who waits for weights of
        its, would wait for ever."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._loss), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._loss.result()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def num_hosts(self) -> int:
        return len(self.connections)

    def give_up(self, why: str) -> None:
        """Take all hosts for lost."""
        self.connections[0].give_up(why)

    @property
    def cpu_s(self) -> float:
        """Processor time of all hosts, as far as they have reported it."""
        return sum(connection.cpu_s for connection in self.connections)

    def replace_stalled(self, why: str) -> str | None:
        """Give up all hosts, where they owe an answer; their name, or None."""
        if not self._num_asked:
            return None
        self.give_up(why)
        return "trainer hosts"

    def _lost(self, loss: WorkerDied) -> None:
        logger.error("%s", loss)
        if not self._loss.done():
            self._loss.set_result(loss)
        # What the others are at they cannot end without it.
        for connection in self.connections:
            connection.give_up(f"{loss}", tell=False)

    def _asked(self, verb: str, *arguments: Any) -> list[Any]:
        assert threading.current_thread() is not threading.main_thread(), "would wait for itself"
        asked = answers_of((connection, verb, arguments) for connection in self.connections)
        self._num_asked += 1
        try:
            return asyncio.run_coroutine_threadsafe(asked, self._loop).result()
        finally:
            self._num_asked -= 1


async def answers_of(questions: Iterable[tuple[Connection, str, tuple[Any, ...]]]) -> list[Any]:
    """What trainer hosts answer that work together. WorkerDied where one is lost, whatever the
    others fail with for that reason.

    They notice first: their collectives break before anybody knows why."""
    asked = [
        (connection, connection.ask(verb, *arguments)) for connection, verb, arguments in questions
    ]
    answers = [answer for _, answer in asked]
    try:
        await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        # Where none is lost, those that did not fail may wait for ever for the one that did.
        await asyncio.wait(
            answers, timeout=max(connection.silence_timeout_s for connection, _ in asked)
        )
    finally:
        for answer in answers:
            answer.cancel()
    failures = [
        error
        for answer in answers
        if not answer.cancelled() and (error := answer.exception()) is not None
    ]
    for error in sorted(failures, key=lambda error: not isinstance(error, WorkerDied)):
        raise error
    return [answer.result() for answer in answers]
