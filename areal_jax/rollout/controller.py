"""The controller: draws tasks as the gate allows, runs a workflow for each, and puts finished
groups into the buffer.

A group is replayed rather than saved: what a checkpoint holds of a group under way is its task and
what its generate calls were answered. The workflow then runs again, and those calls are not sampled
again.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

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
    CallIds,
    Completion,
    Group,
    OnProgress,
    Request,
    RewardResult,
    RolloutState,
    Sample,
    Sampling,
    SuspendedGroup,
    Task,
    derive_seed,
)
from areal_jax.rollout.buffer import Buffer
from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.gate import Gate

logger = logging.getLogger(__name__)

SNAPSHOT_TIMEOUT_S = 120.0
"""An engine that has not told by then what it is drawing has an error, not a long queue."""

CLOSE_TIMEOUT_S = 10.0
"""Cancelled workflows that have not ended by then are named and left behind."""

NO_SIGNAL = "NoSignal"
"""Reason of groups whose success rate is out of bounds: nothing failed, but another group is
sampled in their place."""

MAX_REJECTED_IN_A_ROW = 32
"""So many groups, started one after another and all rejected, are a fault of the run, not of the
tasks."""


MAX_BATCHES_WITHOUT_SIGNAL = 10
"""So many batches' worth of groups in a row, all without signal, end the run (DAPO's
max_num_gen_batches in verl)."""

MIN_GROUPS_WITHOUT_SIGNAL = 256
"""Fewer groups than this, in runs with small batches, may be bad luck."""


@runtime_checkable
class Tasks(Protocol):
    """The stream of tasks. Drawing one must not block: it happens in the asyncio thread."""

    def __next__(self) -> Task: ...
    def state(self) -> Mapping[str, int]: ...


def open_gate(
    config: RolloutConfig, version: int, restored: RolloutState | None = None
) -> tuple[Gate, Buffer]:
    """The gate and the buffer of a run that trains `version` next, as they were when `restored` was
    taken."""
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
    return gate, Buffer(config.batch_timeout_s, gate.__repr__, buffered)


@dataclass(slots=True, eq=False)
class Calls:
    """One group's `generate`, and the journal of what it was answered.

    Calls bear the names of `CallIds`, by which turns that run side by side find their own answers
    in the journal.
    """

    engine: Engine
    min_version: int
    """Oldest weights that may start a request."""
    sampling: Sampling
    seed: int
    group_id: int
    journal: dict[str, tuple[Completion, ...]]
    """Request id to completions: of finished calls, and of those that a restored group had under
    way."""
    pending: set[str] = field(default_factory=set)
    """Ids of the requests that the engine has not answered."""
    _call_ids: CallIds = field(init=False)

    def __post_init__(self) -> None:
        self._call_ids = CallIds(self.group_id)

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        call_id = self._call_ids.next(prompt_tokens, num_samples, max_new_tokens)
        sampled = self.journal.get(call_id, ())
        if sampled and len(sampled) != num_samples:
            raise ValueError(
                f"request {call_id}: {num_samples} samples asked for, the journal holds "
                f"{len(sampled)}"
            )
        if sampled and all(completion.stop_reason != "suspended" for completion in sampled):
            return list(sampled)
        request = Request(
            id=call_id,
            prompt_tokens=prompt_tokens,
            num_samples=num_samples,
            sampling=self.sampling.with_max_new_tokens(max_new_tokens),
            seed=derive_seed(self.seed, call_id),
            min_version=self.min_version,
            resume=sampled,
            on_progress=on_progress,
        )
        self.pending.add(call_id)
        try:
            completions = await self.engine.submit(request)
        finally:
            self.pending.discard(call_id)
        if len(completions) != num_samples:
            raise ValueError(
                f"request {call_id}: {num_samples} samples asked for, the engine answered "
                f"{len(completions)}"
            )
        self.journal[call_id] = tuple(completions)
        return completions

    def sampled(
        self, partials: Mapping[str, tuple[Completion, ...]]
    ) -> dict[str, tuple[Completion, ...]]:
        """The journal with what unfinished requests have sampled, where the engine knows it better
        than the journal."""
        return self.journal | {
            call_id: partials[call_id] for call_id in self.pending if call_id in partials
        }


@dataclass(slots=True, eq=False)
class RewardCalls:
    """One group's `grader`, and how its calls went."""

    grader: Grader
    num_graded: int = 0
    failure: RewardResult | None = None
    """The last call that failed."""

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        grade = await self.grader(task, answer)
        if grade.failed:
            self.failure = grade
        else:
            self.num_graded += 1
        return grade


class Rollouts:
    """What `run_rollouts` yields: the groups under way, and a snapshot of all that lies between
    tasks and trainer."""

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
        """Groups given up, by the class of the error; those whose success rate is out of bounds as
        NoSignal."""
        self.waited_s = 0.0
        """Time that the next task has waited for the gate so far, by the event loop's clock."""
        self._num_without_signal = 0
        """Groups rejected as NoSignal since the last one that was accepted."""
        self._rejected_ids: set[int] = set()
        self._traced: set[str] = set()
        """Kinds of errors whose trace was shown: one is enough to find the fault."""
        # The last groups to end, as long as every reward or tool call of theirs failed, and why
        # they were rejected. Where the run stops for it they are suspended after all, and graded
        # again on resuming.
        self._ungraded: dict[int, tuple[SuspendedGroup, Calls, str]] = {}
        self._stopped_grading = False
        # Groups that the gate has not yet let through, oldest first: restored ones, or one whose
        # kind must wait longer than others. The feeder empties it before it draws a task.
        self._waiting = list(restored.suspended) if restored else []
        # Every group under way as it was started, and what its calls have sampled. Its asyncio task
        # takes it out when it ends, in the same breath as it changes the gate's count and the
        # buffer, so that a snapshot finds each group in one place.
        self._running: dict[int, tuple[SuspendedGroup, Calls]] = {}
        # Owned by `run_rollouts`, which cancels and awaits them all: the feeder, and one asyncio
        # task for every running group.
        self._feeder: asyncio.Task[None] | None = None
        self._group_tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def snapshot(self) -> RolloutState:
        """Everything between the task stream and the trainer, as of one moment in the asyncio
        thread: each task that was ever sampled has been handed to the trainer, or was rejected, or
        is in the snapshot, once.

        A batch that was taken counts as trained on: snapshot between two steps. TimeoutError where
        the engine is silent."""
        try:
            async with asyncio.timeout(SNAPSHOT_TIMEOUT_S):
                partials = await self._engine.snapshot()
        except TimeoutError as error:
            raise TimeoutError(
                f"the engine gave no snapshot within {SNAPSHOT_TIMEOUT_S:g} s; {self.gate}"
            ) from error
        # No await from here on: this is the moment. A call answered since the engine's moment is in
        # its journal, finished.
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
        )

    def counters(self) -> dict[str, float]:
        """Counts since the run began, times since this process began it."""
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
        return {name: float(number) for name, number in counts.items()}

    def begin(self) -> None:
        self._feeder = asyncio.create_task(self._feed(), name="feeder")
        self._feeder.add_done_callback(self._ended)

    async def close(self) -> None:
        """Cancel all groups under way and wait for their end, but not for ever."""
        self._closing = True
        tasks = {*self._group_tasks, *([self._feeder] if self._feeder else [])}
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)
            if left:
                names = ", ".join(sorted(task.get_name() for task in left))
                logger.error(
                    "still not ended %g s after being cancelled, left behind: %s",
                    CLOSE_TIMEOUT_S,
                    names,
                )

    async def _feed(self) -> None:
        """Start groups as the gate allows, the restored ones first, until the tasks run out."""
        while True:
            if not self._waiting:
                # Not sampled before some task may start, so that as few as can be are under way.
                await self._gate_opened()
                task = next(self._tasks, None)
                if task is None:
                    break
                self._waiting.append(SuspendedGroup(self.next_group_id, task))
                self.next_group_id += 1
            await self._gate_opened(self._waiting[0].task.kind)
            self._start(self._waiting.pop(0))
        while self._group_tasks:
            await asyncio.wait(self._group_tasks)
        self.buffer.end()

    async def _gate_opened(self, kind: str | None = None) -> None:
        if self.gate.capacity(kind):
            return
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self.gate.wait_open(kind)
        self.waited_s += clock() - began_s

    def _start(self, record: SuspendedGroup) -> None:
        min_version = self.gate.start(record.task.kind)
        calls = Calls(
            self._engine, min_version, self._sampling, self._seed, record.id, dict(record.calls)
        )
        self._running[record.id] = (record, calls)
        task = asyncio.create_task(
            self._run(record, calls), name=f"group {record.id} (task {record.task.id})"
        )
        self._group_tasks.add(task)
        task.add_done_callback(self._group_tasks.discard)
        task.add_done_callback(self._ended)

    async def _run(self, record: SuspendedGroup, calls: Calls) -> None:
        grading = RewardCalls(self._grader)
        try:
            samples = await self._workflow(record.task, calls, grading)
            if not samples:
                raise ValueError("the workflow returned no samples")
        except Exception as error:
            if isinstance(cause := first_error(error), EngineStopped):
                # The group stays among the running: nothing is wrong with it, and another engine
                # may finish it.
                self._fail(cause)
                return
            failure = None if grading.num_graded else grading.failure
            if not grading.num_graded and isinstance(cause, NotGraded):
                failure = failure or RewardResult("infrastructure", str(cause), failed=True)
            if failure is not None and self._stopped_grading:
                return  # it stays among the running, and is graded again on resuming
            del self._running[record.id]
            self.gate.reject()
            self._rejected(record, cause, is_logged=grading.failure is not None)
            if failure is not None:
                self._not_graded(record, calls, type(cause).__name__, failure)
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
        """Fail the buffer where no group is ever accepted: others are sampled in place of rejected
        ones without end."""
        self._num_without_signal += 1
        num_groups = max(
            MAX_BATCHES_WITHOUT_SIGNAL * self._config.groups_per_batch, MIN_GROUPS_WITHOUT_SIGNAL
        )
        if self._num_without_signal >= num_groups:
            above, below = self._config.success_rate_above, self._config.success_rate_below
            bounds = f"rollout.success_rate_above={above} and rollout.success_rate_below={below}"
            self._fail(
                AllRejected(
                    f"{num_groups} groups in a row were rejected, the last (task {task.id}): "
                    "their share of correct answers "
                    f"is not within {bounds}; take tasks that the policy solves sometimes, or "
                    "widen the bounds"
                )
            )

    def _not_graded(
        self, record: SuspendedGroup, calls: Calls, reason: str, failure: RewardResult
    ) -> None:
        """Count a group of which every reward or tool call failed; the last of too many in a row
        ends the run."""
        self._ungraded[record.id] = record, calls, reason
        if len(self._ungraded) < self._max_consecutive_failures:
            return
        self._stopped_grading = True
        for number, (suspended, its_calls, rejected_for) in self._ungraded.items():
            self._running[number] = suspended, its_calls
            self.rejected[rejected_for] -= 1
        trace = f"{failure.trace}\n" if failure.trace else ""
        self._fail(
            RewardsFailing(
                f"{trace}every reward or tool call of {len(self._ungraded)} groups in a row failed "
                f"(rewards.max_consecutive_failures), the last (task {record.task.id}): "
                f"{failure.detail}"
            )
        )

    def _is_within_bounds(self, samples: Sequence[Sample]) -> bool:
        """Whether a group's share of correct answers is one to train on (DAPO's dynamic sampling,
        arXiv:2503.14476)."""
        above, below = self._config.success_rate_above, self._config.success_rate_below
        rate = sum(sample.grade == "correct" for sample in samples) / len(samples)
        return (above is None or rate > above) and (below is None or rate < below)

    def _rejected(self, record: SuspendedGroup, error: Exception, *, is_logged: bool) -> None:
        """Args: is_logged: whether the trace is in the log already."""
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
            "group %d rejected (task %s): %s", record.id, record.task.id, error, exc_info=trace
        )
        # In a row by their ids, not by their ends: what fails, fails at once, and overtakes all
        # that will yet be accepted.
        neighbours = (
            takewhile(self._rejected_ids.__contains__, ids)
            for ids in (count(record.id + 1), count(record.id - 1, -1))
        )
        in_a_row = 1 + sum(1 for ids in neighbours for _ in ids)
        if in_a_row >= MAX_REJECTED_IN_A_ROW:
            last = f"{type(error).__name__}: {error}"
            failure = AllRejected(
                f"{in_a_row} groups in a row were rejected, the last (task {record.task.id}): "
                f"{last}"
            )
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        self.buffer.fail(error)
        if self._feeder is not None:
            self._feeder.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A feeder or a group that ends in another way than it should must not leave the trainer
        waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        elif task.cancelled() and not self._closing:
            self._fail(RuntimeError(f"{task.get_name()} was cancelled, though the run goes on"))


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
    """Generate groups into `buffer`, as far ahead as `gate` allows, while the body runs; on
    leaving, what is under way is cancelled (take a snapshot first to resume from it).

    A workflow that raises costs its group: logged, counted by the error's class, its place freed.
    MAX_REJECTED_IN_A_ROW of them, or max_consecutive_failures of which no answer could be graded,
    or an engine that stopped, fail the buffer.

    Args: seed: of every draw, together with the group and its call. restored: groups to start
        first, under their old ids; `tasks`, `gate` and `buffer` are as the same snapshot left them
        (`open_gate`, TaskStream.restore)."""
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
