"""The rollout controller: takes tasks, runs a workflow for each, and buffers finished groups.

The gate admits tasks. Running groups are replayed on resuming: a checkpoint holds the task and the
completions of its generate calls. The workflow runs again, and its calls return the journaled
completions.

The file has more than 400 lines because running groups, their rejections and their snapshot share
one state.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, takewhile
from typing import Protocol, runtime_checkable

from areal_jax.errors import (
    AllRejected,
    EngineStopped,
    InvalidRequest,
    NotGraded,
    RewardsFailing,
    first_error,
)
from areal_jax.protocols import Engine, Grader, Workflow
from areal_jax.records import (
    Group,
    RewardResult,
    RolloutState,
    Sample,
    Sampling,
    SuspendedGroup,
    Task,
)
from areal_jax.rollout.buffer import Buffer
from areal_jax.rollout.calls import JournaledGenerate, RewardCalls
from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.gate import Gate

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 120.0
"""Limit on the engine's answer to a snapshot; an engine beyond it has failed."""

CLOSE_TIMEOUT_S = 10.0
"""Limit on the end of cancelled workflows; those beyond it are logged and abandoned."""

NO_SIGNAL = "NoSignal"
"""Rejection reason of groups whose success rate is out of bounds."""

MAX_REJECTED_IN_A_ROW = 32
"""Consecutively started groups that are all rejected: a fault of the run, not of the tasks."""

MAX_BATCHES_WITHOUT_SIGNAL = 10
"""Consecutive batches' worth of groups without signal that end the run (max_num_gen_batches of DAPO
in verl)."""

MIN_GROUPS_WITHOUT_SIGNAL = 256
"""Lower bound on that number of groups: with small batches, fewer may be chance."""


@runtime_checkable
class Tasks(Protocol):
    """The stream of tasks. `next` must not block: it is called in the asyncio thread."""

    def __next__(self) -> Task: ...
    def state(self) -> Mapping[str, int]: ...


def open_gate(
    config: RolloutConfig, version: int, restored: RolloutState | None = None
) -> tuple[Gate, Buffer]:
    """Create gate and buffer of a run.

    Args:
        config: batch shape and staleness.
        version: the version that trains next.
        restored: state of a checkpoint to resume from; None: a new run.
    """
    buffered = restored.buffered if restored else ()
    accepted = version * config.groups_per_batch + len(buffered)
    gate = Gate(
        config.max_staleness,
        config.groups_per_batch,
        config.max_running_groups,
        version,
        accepted,
        config.staleness_of_kind(),
    )
    if config.min_sequence_ess is not None:
        # From synchronous on: a policy changes most in its first steps.
        gate.limit = 0 if restored is None else restored.staleness_limit
    return gate, Buffer(config.batch_timeout_s, gate.__repr__, buffered)


class Rollouts:
    """The running groups of `run_rollouts`, with snapshots of the state between tasks and trainer.

    It has more than 200 lines because a snapshot must find each group in one place: start, end and
    rejection of a group change all containers without an await between them.
    """

    def __init__(
        self,
        tasks: Tasks,
        engine: Engine,
        workflow: Workflow,
        grader: Grader,
        gate: Gate,
        buffer: Buffer,
        config: RolloutConfig,
        sampling: Sampling,
        seed: int,
        restored: RolloutState | None = None,
        max_consecutive_failures: int = 3,
    ) -> None:
        self._max_consecutive_failures = max_consecutive_failures
        self.gate, self.buffer, self._config = gate, buffer, config
        self._tasks, self._engine, self._workflow, self._grader = tasks, engine, workflow, grader
        self._sampling, self._seed = sampling, seed
        self.next_group_id = restored.next_group_id if restored else 0
        self.rejected = Counter(restored.rejected) if restored else Counter[str]()
        """Rejected groups by the class of their error, or NoSignal."""
        self.waited_s = 0.0
        """Total wait of tasks for the gate, in seconds of the event loop's clock."""
        self._num_without_signal = 0
        """Groups rejected as NoSignal since the last accepted one."""
        self._rejected_ids: set[int] = set()
        self._traced: set[str] = set()
        """Classes of errors whose traceback was logged: one each is enough to find the fault."""
        # The latest groups of which every reward or tool call failed, with the reason of their
        # rejection. If the run stops because of them, they are suspended instead, and graded again
        # on resuming.
        self._ungraded: dict[int, tuple[SuspendedGroup, JournaledGenerate, str]] = {}
        self._stopped_grading = False
        # Groups that wait for the gate, oldest first: restored ones, or one whose kind has a
        # smaller bound than others. The feeder empties it before it takes a task.
        self._waiting = list(restored.suspended) if restored else []
        # Every running group as it was started, and its calls. Its asyncio task removes it when it
        # ends, without an await between that and the changes of gate and buffer, so that a snapshot
        # finds each group in one place.
        self._running: dict[int, tuple[SuspendedGroup, JournaledGenerate]] = {}
        # Owned by `run_rollouts`, which cancels and awaits them all: the feeder, and one asyncio
        # task for every running group.
        self._feeder: asyncio.Task[None] | None = None
        self._group_tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def snapshot(self) -> RolloutState:
        """Return all state between the task stream and the trainer, as of one moment.

        Each task ever taken is in the snapshot, was rejected or was passed to the trainer, exactly
        once. A batch that was taken counts as trained on: take snapshots between two steps.

        Raises:
            TimeoutError: the engine did not answer.
        """
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                partials = await self._engine.snapshot()
        except TimeoutError as error:
            raise TimeoutError(
                f"the engine returned no snapshot within {SNAPSHOT_TIMEOUT_S:g} s; {self.gate}"
            ) from error
        # No await from here on, so that all state is as of this moment. A call that finished after
        # the engine's snapshot is in its journal.
        running = [
            replace(record, calls=calls.sampled(partials))
            for record, calls in self._running.values()
        ]
        return RolloutState(
            tasks=dict(self._tasks.state()),
            next_group_id=self.next_group_id,
            rejected=dict(self.rejected),
            buffered=self.buffer.snapshot(),
            suspended=tuple(sorted([*running, *self._waiting], key=lambda record: record.id)),
            staleness_limit=self.gate.limit,
        )

    def counters(self) -> dict[str, float]:
        """Return counts since the start of the run, and times since the start of this process."""
        counts = {
            "started": self.next_group_id,
            "running": self.gate.running,
            "accepted": self.gate.accepted,
            "buffered": len(self.buffer),
            "rejected": sum(self.rejected.values()),
            **{
                f"rejected/{_snake_case(reason)}": number
                for reason, number in sorted(self.rejected.items())
            },
            "gate_wait_s": self.waited_s,
            "batch_wait_s": self.buffer.waited_s,
        }
        if self.gate.limit is not None:
            counts["staleness_limit"] = self.gate.limit
        return {name: float(number) for name, number in counts.items()}

    def begin(self) -> None:
        """Start the feeder."""
        self._feeder = asyncio.create_task(self._feed(), name="feeder")
        self._feeder.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel all running groups and wait up to CLOSE_TIMEOUT_S for their end."""
        self._closing = True
        tasks = {*self._group_tasks, *([self._feeder] if self._feeder else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            if left:
                names = ", ".join(sorted(task.get_name() for task in left))
                logger.error(
                    "groups still running %g s after cancellation, abandoned: %s",
                    CLOSE_TIMEOUT_S,
                    names,
                )

    async def _feed(self) -> None:
        """Start groups as the gate allows, restored ones first, until the tasks end."""
        while True:
            if not self._waiting:
                # Take a task only when one may start, so that as few as possible wait.
                await self._wait_for_gate()
                task = next(self._tasks, None)
                if task is None:
                    break
                self._waiting.append(SuspendedGroup(self.next_group_id, task))
                self.next_group_id += 1
            await self._wait_for_gate(self._waiting[0].task.kind)
            self._start(self._waiting.pop(0))
        while self._group_tasks:
            await asyncio.wait(self._group_tasks)
        self.buffer.end()

    async def _wait_for_gate(self, kind: str | None = None) -> None:
        if self.gate.capacity(kind):
            return
        clock = asyncio.get_running_loop().time
        start_s = clock()
        await self.gate.wait_open(kind)
        self.waited_s += clock() - start_s

    def _start(self, record: SuspendedGroup) -> None:
        min_version = self.gate.start(record.task.kind)
        calls = JournaledGenerate(
            self._engine,
            min_version,
            self._sampling,
            self._seed,
            record.id,
            dict(record.calls),
            record.task.images,
        )
        self._running[record.id] = (record, calls)
        task = asyncio.create_task(
            self._run(record, calls), name=f"group {record.id} (task {record.task.id})"
        )
        self._group_tasks.add(task)
        task.add_done_callback(self._group_tasks.discard)
        task.add_done_callback(self._ended)

    async def _run(self, record: SuspendedGroup, calls: JournaledGenerate) -> None:
        grading = RewardCalls(self._grader)
        try:
            samples = await self._workflow(record.task, calls, grading)
            if not samples:
                raise ValueError("the workflow returned no samples")
        except Exception as error:  # a workflow runs untrusted code: its error rejects the group
            if isinstance(cause := first_error(error), EngineStopped):
                # The group stays in `_running`: a resumed run finishes it with another engine.
                self._fail(cause)
                return
            failure = None if grading.num_graded else grading.failure
            if not grading.num_graded and isinstance(cause, NotGraded):
                failure = failure or RewardResult("infrastructure", str(cause), failed=True)
            if failure is not None and self._stopped_grading:
                return  # the group stays in `_running`, and is graded again on resuming
            del self._running[record.id]
            self.gate.reject()
            self._record_rejection(record, cause, is_logged=grading.failure is not None)
            if failure is not None:
                self._record_ungraded(record, calls, type(cause).__name__, failure)
        else:
            del self._running[record.id]
            if self._is_within_bounds(samples):
                self._num_without_signal = 0
                self.gate.accept()
                self.buffer.put(Group(record.id, record.task, samples))
            else:
                self.gate.reject()
                self.rejected[NO_SIGNAL] += 1
                self._require_signal(record.task)
        if grading.num_graded:
            self._ungraded.clear()

    def _require_signal(self, task: Task) -> None:
        """Count a group without signal, and fail the buffer after too many in a row.

        Otherwise rejected groups would be replaced without end.
        """
        self._num_without_signal += 1
        num_groups = max(
            MAX_BATCHES_WITHOUT_SIGNAL * self._config.groups_per_batch, MIN_GROUPS_WITHOUT_SIGNAL
        )
        if self._num_without_signal >= num_groups:
            above, below = self._config.success_rate_above, self._config.success_rate_below
            bounds = f"rollout.success_rate_above={above} and rollout.success_rate_below={below}"
            self._fail(
                AllRejected(
                    f"{num_groups} groups in a row were rejected, the last of task {task.id}: "
                    f"expected a share of correct answers within {bounds}; choose tasks that the "
                    "policy solves sometimes, or widen the bounds"
                )
            )

    def _record_ungraded(
        self, record: SuspendedGroup, calls: JournaledGenerate, reason: str, failure: RewardResult
    ) -> None:
        """Count a group of which every reward or tool call failed; fail the buffer after too many
        in a row.
        """
        self._ungraded[record.id] = record, calls, reason
        if len(self._ungraded) < self._max_consecutive_failures:
            return
        self._stopped_grading = True
        for group_id, (group, group_calls, group_reason) in self._ungraded.items():
            self._running[group_id] = group, group_calls
            self.rejected[group_reason] -= 1
        trace = f"{failure.trace}\n" if failure.trace else ""
        self._fail(
            RewardsFailing(
                f"{trace}every reward or tool call of {len(self._ungraded)} groups in a row failed "
                f"(rewards.max_consecutive_failures), the last of task {record.task.id}: "
                f"{failure.detail}"
            )
        )

    def _is_within_bounds(self, samples: Sequence[Sample]) -> bool:
        """Return whether a group's share of correct answers is within bounds.

        This is the dynamic sampling of DAPO (arXiv:2503.14476).
        """
        above, below = self._config.success_rate_above, self._config.success_rate_below
        rate = sum(sample.grade == "correct" for sample in samples) / len(samples)
        return (above is None or rate > above) and (below is None or rate < below)

    def _record_rejection(
        self, record: SuspendedGroup, error: Exception, *, is_logged: bool
    ) -> None:
        """Count and log a rejected group; fail the buffer after too many in a row.

        Args:
            record: the group.
            error: reason of the rejection.
            is_logged: whether the log already holds its traceback.
        """
        kind = type(error).__name__
        self.rejected[kind] += 1
        self._rejected_ids.add(record.id)
        trace = (
            error
            if kind not in self._traced and not isinstance(error, InvalidRequest) and not is_logged
            else None
        )
        self._traced.add(kind)
        logger.warning(
            "group rejected: group=%d task=%s error=%s",
            record.id,
            record.task.id,
            error,
            exc_info=trace,
        )
        # In a row by id, not by time of end: failing groups end at once, before groups that started
        # earlier and will be accepted.
        neighbours = (
            takewhile(self._rejected_ids.__contains__, ids)
            for ids in (count(record.id + 1), count(record.id - 1, -1))
        )
        in_a_row = 1 + sum(1 for ids in neighbours for _ in ids)
        if in_a_row >= MAX_REJECTED_IN_A_ROW:
            last = f"{type(error).__name__}: {error}"
            failure = AllRejected(
                f"{in_a_row} groups in a row were rejected, the last of task {record.task.id}: "
                f"{last}"
            )
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        self.buffer.fail(error)
        if self._feeder is not None:
            self._feeder.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail the buffer if the feeder or a group ends unexpectedly: the trainer must not wait."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif task.cancelled() and not self._closing:
            self._fail(RuntimeError(f"{task.get_name()} was cancelled during the run"))


def _snake_case(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z][a-z])", "_", class_name).lower()


@asynccontextmanager
async def run_rollouts(
    tasks: Tasks,
    engine: Engine,
    workflow: Workflow,
    grader: Grader,
    gate: Gate,
    buffer: Buffer,
    config: RolloutConfig,
    *,
    sampling: Sampling,
    seed: int,
    restored: RolloutState | None = None,
    max_consecutive_failures: int = 3,
) -> AsyncIterator[Rollouts]:
    """Generate groups into `buffer`, as far ahead as `gate` allows, while the body runs.

    On leaving, running groups are cancelled: take a snapshot first to resume from. A workflow that
    raises rejects its group: the error is logged and counted by its class. The buffer fails after
    MAX_REJECTED_IN_A_ROW rejections, after `max_consecutive_failures` groups without any graded
    answer, and when the engine stops.

    Args:
        tasks: the task stream.
        engine: generates completions.
        workflow: turns one task into samples.
        grader: grades answers.
        gate: admits groups.
        buffer: receives finished groups.
        config: batch shape and bounds on success rates.
        sampling: sampling parameters.
        seed: seed of all sampling; each call derives its own from it.
        restored: state to resume from; its groups start first, under their old ids. `tasks`, `gate`
            and `buffer` must be restored from it too (`open_gate`, `TaskStream.restore`).
        max_consecutive_failures: consecutive groups without any graded answer that fail the buffer.
    """
    rollouts = Rollouts(
        tasks,
        engine,
        workflow,
        grader,
        gate,
        buffer,
        config,
        sampling,
        seed,
        restored,
        max_consecutive_failures,
    )
    rollouts.begin()
    try:
        yield rollouts
    finally:
        await rollouts.close()
