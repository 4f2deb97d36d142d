"""Trainer hosts in separate processes with one train mesh, called together as one trainer."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

import ray

from areal_jax.checkpoint.recovery import Columns, encode, serialize
from areal_jax.cluster.connection import Connection
from areal_jax.errors import ConfigError, NotStarted, WorkerDied
from areal_jax.records import Group, RolloutState, StepResult

logger = logging.getLogger(__name__)

CONTRIBUTION_TIMEOUT_S = 5.0
"""Time after which a host replies even if it has no newer weights, in seconds."""


class Trainers:
    """All trainer hosts as one trainer.

    `step`, `save` and `write_results` block: call them from a thread of their own, all other
    methods from the event loop's thread. All hosts receive the same calls in the same order,
    because their devices run one program. When one host dies, every call raises WorkerDied.
    """

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._loop = asyncio.get_running_loop()
        self.version = 0
        """Number of trainer steps applied to the parameters."""
        self.is_stepping = False
        """Whether a step is in progress, so that the parameters belong to no version."""
        self._measures: dict[str, tuple[float, float]] = {}
        # Calls in flight. One thread at a time makes them.
        self._num_calls = 0
        self._death: asyncio.Future[WorkerDied] = self._loop.create_future()
        self.use(connections)

    def use(self, connections: Sequence[Connection]) -> None:
        """Work with these hosts, which have started; those before are closed."""
        self.connections: Sequence[Connection] = connections
        for connection in connections:
            connection.subscribe(lambda _topic, _payload: None, self._handle_death)

    async def join(self, timeout_s: float) -> Any:
        """Join the hosts, each of which builds its part of the trainer; takes their version.

        Args:
            timeout_s: Longest wait of the hosts for each other.

        Returns:
            The rollout state in their checkpoint, packed; None without one.

        Raises:
            WorkerDied: A host died.
            NotStarted: A host raises an error.
            ConfigError: A host rejects the settings.
        """
        self._num_calls += 1
        try:
            coordinator = await self.connections[0].address()
            joined = await gather_replies(
                (each, "join", (coordinator, number, self.num_hosts, timeout_s))
                for number, each in enumerate(self.connections)
            )
        except (ConfigError, WorkerDied):
            raise
        except Exception as error:  # of another process, of any class: it ends the run
            raise NotStarted(
                f"trainer hosts could not start: {type(error).__name__}: {error}"
            ) from error
        finally:
            self._num_calls -= 1
        self.version = joined[0]["version"]
        return joined[0]["beside"]

    async def close(self, timeout_s: float) -> None:
        """End all hosts, which may finish the checkpoint being written within `timeout_s`."""
        connections, self.connections = self.connections, ()
        await asyncio.gather(*(each.close(timeout_s) for each in connections))

    @property
    def is_empty(self) -> bool:
        """Whether hosts are being replaced, which has its own deadlines."""
        return not self.connections

    @property
    def params(self) -> None:
        """Return None: the parameters stay on the trainer hosts."""
        return None

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Run one trainer step and increment `version`."""
        # Put into the object store once for all hosts.
        state = RolloutState({}, next_group_id=0, rejected={}, buffered=tuple(groups), suspended=())
        packed = ray.put(serialize(encode(state)))
        self.is_stepping = True
        try:
            (metrics, stale, self._measures), *_ = self._call_all("step", [packed])
        finally:
            self.is_stepping = False
        self.version += 1
        return StepResult(metrics, stale)

    def save(self, version: int, controller_state: Columns) -> None:
        """Save a checkpoint: every host writes its shards into the shared run folder."""
        self._call_all("save", version, [ray.put(serialize(controller_state))])

    def finish_saving(self) -> None:
        """Wait until the checkpoint that is being written is complete.

        Raises:
            CheckpointError: It cannot be written.
        """
        self._call_all("finish_saving")

    def write_results(self, version: int) -> list[str]:
        """Write the policy to the run folder, wait for the checkpoint and return summary lines."""
        return self._call_all("write_results", version)[0]

    def publish(self, version: int, *, again: bool = False) -> None:
        """Start to publish a version; never waits.

        Args:
            version: A version in flight is left alone.
            again: Put it into the object store once more.
        """
        for connection in self.connections:
            connection.notify("publish", version, again)

    def metrics(self) -> dict[str, tuple[float, float]]:
        """Return the metrics of `ShardPublisher.metrics` of the first host."""
        measures, self._measures = self._measures, {}
        return measures

    async def contribution(self, host: int, after: int) -> Any:
        """Return the location of a host's shards of its newest version above `after`.

        Returns:
            None if there is none yet; the reason, as a string, if none is in flight.
        """
        return await self.connections[host].call("contribution", after, CONTRIBUTION_TIMEOUT_S)

    async def run_while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine that needs all hosts; cancel it when one dies.

        Raises:
            WorkerDied: A host died. Without this, waiting for its weights would never end.
        """
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._death), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._death.result()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def num_hosts(self) -> int:
        return len(self.connections)

    def mark_dead(self, why: str) -> None:
        """Count all hosts as dead and kill them."""
        for connection in self.connections[:1]:  # its death is that of the others
            connection.mark_dead(why)

    @property
    def cpu_s(self) -> float:
        """Processor time of all hosts by their last reports, in seconds."""
        return sum(connection.cpu_s for connection in self.connections)

    def replace_stalled(self, why: str) -> str | None:
        """Kill all hosts if a call is pending; return their name, or None if there is no call."""
        if not self._num_calls:
            return None
        self.mark_dead(why)
        return "trainer hosts"

    def _handle_death(self, death: WorkerDied) -> None:
        logger.error("worker died: %s", death)
        if not self._death.done():
            self._death.set_result(death)
        # The other hosts cannot finish their collectives without it.
        for connection in self.connections:
            connection.mark_dead(f"{death}", report=False)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        assert threading.current_thread() is not threading.main_thread(), (
            "a blocking call in the event loop's thread would wait for itself"
        )
        replies = gather_replies((connection, method, arguments) for connection in self.connections)
        self._num_calls += 1
        try:
            return asyncio.run_coroutine_threadsafe(replies, self._loop).result()
        finally:
            self._num_calls -= 1


async def gather_replies(calls: Iterable[tuple[Connection, str, tuple[Any, ...]]]) -> list[Any]:
    """Call trainer hosts that work together and return their replies in order.

    Raises:
        WorkerDied: A host died. The errors of the other hosts follow from it: their collectives
            fail before the death is detected.
    """
    pending = [
        (connection, connection.call(method, *arguments)) for connection, method, arguments in calls
    ]
    answers = [answer for _, answer in pending]
    try:
        await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        # If no host died, those that did not fail may wait forever for the one that did.
        await asyncio.wait(
            answers, timeout=max(connection.silence_timeout_s for connection, _ in pending)
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
