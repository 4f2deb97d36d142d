from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import chz
import numpy as np
import pytest
from tiny_engine import TinyEngine

from areal_jax.errors import AllRejected, EngineStopped, RewardsFailing
from areal_jax.protocols import Generate, Grader, Workflow
from areal_jax.records import (
    Completion,
    Group,
    Message,
    RewardResult,
    RolloutState,
    Sample,
    Sampling,
    SuspendedGroup,
    Task,
)
from areal_jax.rollout.buffer import TasksExhausted
from areal_jax.rollout.config import RolloutConfig
from areal_jax.rollout.controller import (
    MAX_BATCHES_WITHOUT_SIGNAL,
    MAX_REJECTED_IN_A_ROW,
    MIN_GROUPS_WITHOUT_SIGNAL,
    Rollouts,
    open_gate,
    run_rollouts,
)
from areal_jax.workflows.turns import ToolFailed

SAMPLING = Sampling(max_new_tokens=6, stop_token_ids=(0,))


@dataclass
class Numbers:
    """Tasks 0, 1, 2 ... in this order."""

    num: int
    place: int = 0
    programs: Container[int] = ()
    """Numbers of the tasks of kind code."""

    def __next__(self) -> Task:
        if self.place == self.num:
            raise StopIteration
        self.place += 1
        kind = "code" if self.place - 1 in self.programs else "math"
        return Task(f"task-{self.place - 1}", (Message("user", "?"),), "1", kind=kind)

    def state(self) -> Mapping[str, int]:
        return {"place": self.place}


async def grader(task: Task, answer: str) -> RewardResult:
    await asyncio.sleep(0)
    return RewardResult("correct")


def prompt_of(task: Task) -> np.ndarray:
    return np.array([int(task.id.removeprefix("task-")), 1], np.int32)


def sample_of(completion: Completion, grade: RewardResult) -> Sample:
    return Sample(
        completion.tokens,
        np.ones(len(completion.tokens), np.bool_),
        completion.logp,
        completion.versions,
        1.0,
        grade.kind,
        completion.stop_reason,
    )


async def one_call(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
    completions = await generate(prompt_of(task), 2)
    return tuple([sample_of(completion, await grader(task, "")) for completion in completions])


async def concurrent_turns(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
    """Run three concurrent conversations of up to three turns, interleaved by their latency."""

    async def converse(first: int) -> list[Sample]:
        prompt, samples = np.append(prompt_of(task), np.int32(first)), []
        for _ in range(1 + len(samples) + int(task.id.removeprefix("task-")) % 3):
            (completion,) = await generate(prompt, 1)
            samples.append(sample_of(completion, await grader(task, "")))
            # Another turn's prompt is another: what was message goes into it.
            prompt = np.append(prompt[:3], completion.tokens[:6])
        return samples

    async with asyncio.TaskGroup() as conversations:
        talking = [conversations.create_task(converse(first)) for first in range(3)]
    return tuple(sample for talk in talking for sample in talk.result())


CONFIG = RolloutConfig(
    groups_per_batch=4,
    samples_per_group=2,
    max_staleness=2,
    max_running_groups=7,
    batch_timeout_s=20.0,
)


@asynccontextmanager
async def running(engine: TinyEngine) -> AsyncIterator[TinyEngine]:
    ticking = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        ticking.cancel()
        await asyncio.wait([ticking])


@asynccontextmanager
async def run(
    workflow: Workflow,
    num_tasks: int = 40,
    engine: TinyEngine | None = None,
    config: RolloutConfig = CONFIG,
    version: int = 0,
    restored: RolloutState | None = None,
    programs: Container[int] = (),
    grader: Grader = grader,
) -> AsyncIterator[tuple[Rollouts, TinyEngine]]:
    tasks = Numbers(num_tasks, restored.tasks["place"] if restored else 0, programs)
    gate, buffer = open_gate(config, version, restored)
    async with (
        running(engine or TinyEngine(version=version)) as engine,
        run_rollouts(
            tasks,
            engine,
            workflow,
            grader,
            gate,
            buffer,
            config,
            sampling=SAMPLING,
            seed=3,
            restored=restored,
        ) as rollouts,
    ):
        yield rollouts, engine


def reported(groups: list[Group]) -> dict[int, tuple[str, list[list[int]]]]:
    return {
        group.id: (group.task.id, [sample.tokens.tolist() for sample in group.samples])
        for group in groups
    }


async def train_all(rollouts: Rollouts, engine: TinyEngine, version: int = 0) -> list[Group]:
    """Take batches until the tasks end, then the rest of the buffer."""
    trained: list[Group] = []
    try:
        while True:
            trained += await rollouts.buffer.take(CONFIG.groups_per_batch, version)
            version += 1
            rollouts.gate.version = engine.version = version
    except TasksExhausted:
        return trained + list(rollouts.buffer.snapshot())


@pytest.mark.parametrize("workflow", [one_call, concurrent_turns])
def test_every_task_becomes_one_group_with_ids_in_start_order(workflow: Workflow) -> None:
    async def main() -> None:
        async with run(workflow) as (rollouts, engine):
            groups = await train_all(rollouts, engine)
            assert sorted((group.id, group.task.id) for group in groups) == [
                (i, f"task-{i}") for i in range(40)
            ]
            assert rollouts.counters()["accepted"] == 40

    asyncio.run(main())


def test_zero_staleness_samples_every_token_with_the_trained_version() -> None:
    async def main() -> None:
        config = RolloutConfig(
            groups_per_batch=4, samples_per_group=2, max_staleness=0, batch_timeout_s=20.0
        )
        async with run(one_call, 20, config=config) as (rollouts, engine):
            for version in range(5):
                groups = await rollouts.buffer.take(4, version)
                assert [group.id for group in groups] == list(range(4 * version, 4 * version + 4))
                assert {
                    v
                    for group in groups
                    for sample in group.samples
                    for v in sample.versions.tolist()
                } == {version}
                assert rollouts.gate.capacity() == 0
                rollouts.gate.version = version + 1
                # The weights come later than the gate opens: requests wait for them.
                for _ in range(20):
                    await asyncio.sleep(0)
                engine.version = version + 1

    asyncio.run(main())


def test_waiting_kind_is_not_overtaken_and_not_lost() -> None:
    # Batches of 4. Programs may be 2 versions old, all else must be fresh: tasks 0 to 3 fill the
    # first batch, the programs 4 to 6 start ahead of theirs, and task 7 waits for version 1, with
    # all that comes after it.
    config = chz.replace(CONFIG, max_staleness=0, max_staleness_of_code=2, max_running_groups=40)

    async def main() -> None:
        async with run(one_call, 20, config=config, programs=(4, 5, 6, 12, 13)) as (
            rollouts,
            engine,
        ):
            first = await rollouts.buffer.take(4, 0)
            assert [group.id for group in first] == [0, 1, 2, 3]
            while rollouts.gate.accepted < 7:
                await asyncio.sleep(0)
            state = await rollouts.snapshot()
            assert [group.task.id for group in state.buffered] == ["task-4", "task-5", "task-6"]
            assert [record.task.id for record in state.suspended] == ["task-7"] and state.tasks == {
                "place": 8
            }
            rollouts.gate.version = engine.version = 1
            later = await train_all(rollouts, engine, 1)
            assert sorted(group.id for group in later) == list(range(4, 20))
            oldest = {
                group.id: min(sample.versions.min() for sample in group.samples) for group in later
            }
            # Group 7 trains version 1 and is of it; the programs of that batch are of version 0.
            assert [oldest[i] for i in range(4, 8)] == [0, 0, 0, 1]

    asyncio.run(main())


def test_samples_depend_on_seed_and_group_only() -> None:
    async def main(num_slots: int, delay: int) -> dict[int, tuple[str, list[list[int]]]]:
        async def slow(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
            for _ in range(delay * int(task.id[-1])):
                await asyncio.sleep(0)
            return await one_call(task, generate, grader)

        async with run(slow, engine=TinyEngine(num_slots=num_slots)) as (rollouts, engine):
            return reported(await train_all(rollouts, engine))

    assert asyncio.run(main(1, 0)) == asyncio.run(main(8, 3))


@pytest.mark.parametrize("workflow", [one_call, concurrent_turns])
@pytest.mark.parametrize("seed", range(15))
def test_crash_at_any_time_loses_and_repeats_no_task(seed: int, workflow: Workflow) -> None:
    """Crash repeatedly at random ticks and resume from the last snapshot.

    The trained groups equal those of a run without crashes, token by token.
    """
    chance = random.Random(seed)

    async def live(
        restored: RolloutState | None, trained: list[Group]
    ) -> tuple[RolloutState | None, list[Group]]:
        """Train until the crash; what the last snapshot holds, with the groups trained on until
        then.
        """
        version = len(trained) // CONFIG.groups_per_batch
        until_snapshot = chance.randrange(2, 25)
        async with run(workflow, version=version, restored=restored) as (rollouts, engine):
            training = asyncio.create_task(train_until_stopped(rollouts, engine, trained))
            for _ in range(until_snapshot):
                await asyncio.sleep(0)
            if training.done():
                return None, training.result()
            # The trainer waits while the snapshot is taken, as in the loop.
            stand_still.clear()
            state = await rollouts.snapshot()
            kept = list(trained)
            everywhere = [group.id for group in (*kept, *state.buffered)] + [
                record.id for record in state.suspended
            ]
            assert sorted(everywhere) == list(range(state.next_group_id))
            assert state.tasks["place"] == state.next_group_id
            assert rollouts.gate.running + len(rollouts._waiting) == len(state.suspended)
            stand_still.set()
            # Progress between the snapshot and the crash is lost, without effect on the result.
            for _ in range(chance.randrange(30)):
                await asyncio.sleep(0)
            training.cancel()
            await asyncio.wait([training])
        return state, kept

    async def train_until_stopped(
        rollouts: Rollouts, engine: TinyEngine, trained: list[Group]
    ) -> list[Group]:
        version = len(trained) // CONFIG.groups_per_batch
        try:
            while True:
                await stand_still.wait()
                trained += await rollouts.buffer.take(CONFIG.groups_per_batch, version)
                version += 1
                rollouts.gate.version = engine.version = version
        except TasksExhausted:
            return trained + list(rollouts.buffer.snapshot())

    async def crashing() -> tuple[list[Group], int]:
        state, trained, crashes = None, [], 0
        while True:
            state, trained = await live(state, list(trained))
            if state is None:
                return trained, crashes
            crashes += 1

    async def undisturbed() -> list[Group]:
        async with run(workflow) as (rollouts, engine):
            return await train_all(rollouts, engine)

    stand_still = asyncio.Event()
    stand_still.set()
    groups, crashes = asyncio.run(crashing())
    assert crashes >= 2
    assert len(groups) == 40
    assert reported(groups) == reported(asyncio.run(undisturbed()))


def test_sampled_tokens_survive_a_crash() -> None:
    async def main() -> None:
        async with run(one_call, 7) as (rollouts, before):
            for _ in range(4):
                await asyncio.sleep(0)
            sampled_before = before.num_sampled
            state = await rollouts.snapshot()
        parts = [
            part for record in state.suspended for parts in record.calls.values() for part in parts
        ]
        assert any(part.stop_reason == "suspended" and len(part.tokens) for part in parts)
        kept = sum(len(part.tokens) for part in parts)
        kept += sum(len(sample.tokens) for group in state.buffered for sample in group.samples)
        assert kept >= sampled_before > 0
        async with run(one_call, 7, restored=state) as (rollouts, after):
            groups = await train_all(rollouts, after)
        total = sum(len(sample.tokens) for group in groups for sample in group.samples)
        assert after.num_sampled == total - kept

    asyncio.run(main())


def test_finished_calls_are_not_submitted_again() -> None:
    async def main() -> None:
        grading = asyncio.Event()

        async def stuck_at_grading(
            task: Task, generate: Generate, grader: Grader
        ) -> tuple[Sample, ...]:
            completions = await generate(prompt_of(task), 2)
            await grading.wait()
            return tuple(
                [sample_of(completion, RewardResult("wrong")) for completion in completions]
            )

        async with run(stuck_at_grading, 1) as (rollouts, _):
            while not (state := await rollouts.snapshot()).suspended[0].calls or any(
                part.stop_reason == "suspended"
                for part in next(iter(state.suspended[0].calls.values()))
            ):
                await asyncio.sleep(0)
        grading.set()
        async with run(stuck_at_grading, 1, restored=state) as (rollouts, engine):
            (group,) = await rollouts.buffer.take(1, 0)
        assert engine.submitted == []
        assert [sample.tokens.tolist() for sample in group.samples] == [
            part.tokens.tolist() for part in next(iter(state.suspended[0].calls.values()))
        ]

    asyncio.run(main())


def test_restored_groups_start_first_and_keep_their_ids() -> None:
    async def main() -> None:
        old = tuple(
            SuspendedGroup(number, Task(f"task-{number}", (Message("user", "?"),), "1"))
            for number in (8, 11)
        )
        state = RolloutState({"place": 12}, 12, {"GradingFailed": 2}, (), old)
        started: list[str] = []

        async def noting(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
            started.append(task.id)
            return await one_call(task, generate, grader)

        async with run(noting, 14, version=2, restored=state) as (rollouts, engine):
            groups = await train_all(rollouts, engine, version=2)
            assert started == ["task-8", "task-11", "task-12", "task-13"]
            assert [group.id for group in groups] == [8, 11, 12, 13]
            counters = rollouts.counters()
            # 2 versions of 4 groups and these 4 are accepted; 2 were rejected before the crash.
            assert (
                counters["started"],
                counters["accepted"],
                counters["rejected/grading_failed"],
            ) == (14, 12, 2)

    asyncio.run(main())


def test_snapshot_of_restored_run_keeps_running_and_waiting_groups() -> None:
    async def main() -> None:
        old = tuple(
            SuspendedGroup(number, Task(f"task-{number}", (Message("user", "?"),), "1"))
            for number in range(5)
        )
        state = RolloutState({"place": 5}, 5, {}, (), old)
        # Two may run, three wait for the gate; the engine does not run.
        narrow = RolloutConfig(groups_per_batch=4, max_staleness=2, max_running_groups=2)
        async with run(one_call, 20, TinyEngine(version=-1), narrow, version=1, restored=state) as (
            rollouts,
            _,
        ):
            rollouts.gate.version = 2
            again = await rollouts.snapshot()
            assert rollouts.gate.running == 2
        assert [(record.id, record.task.id) for record in again.suspended] == [
            (record.id, record.task.id) for record in old
        ]
        assert (again.next_group_id, again.tasks) == (5, {"place": 5})

    asyncio.run(main())


def test_restored_buffer_counts_as_accepted() -> None:
    buffered = tuple(
        Group(number, Task(f"task-{number}", (Message("user", "?"),), "1"), ()) for number in (9, 8)
    )
    gate, buffer = open_gate(CONFIG, 2, RolloutState({"place": 10}, 10, {}, buffered, ()))
    # Two batches of 4 are trained on and 2 wait: of (2 + 2 + 1) * 4 places 10 are left, of which 7
    # may run at a time.
    assert (gate.accepted, gate.capacity(), gate.version) == (10, 7, 2)
    assert [group.id for group in buffer.snapshot()] == [8, 9]


def test_workflow_error_rejects_its_group_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def failing(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        number = int(task.id.removeprefix("task-"))
        if number % 5 == 1:
            raise KeyError(f"bad {task.id}")
        if number % 5 == 2:
            async with asyncio.TaskGroup() as turns:
                turns.create_task(generate(np.zeros(99, np.int32), 1))
        return await one_call(task, generate, grader)

    async def main() -> None:
        async with run(failing) as (rollouts, engine):
            groups = await train_all(rollouts, engine)
            assert sorted(group.id for group in groups) == [
                i for i in range(40) if i % 5 not in (1, 2)
            ]
            counters = rollouts.counters()
            assert (
                counters["rejected"],
                counters["rejected/key_error"],
                counters["rejected/invalid_request"],
            ) == (16, 8, 8)
            assert (rollouts.gate.accepted, rollouts.gate.rejected, rollouts.gate.running) == (
                24,
                16,
                0,
            )

    asyncio.run(main())
    assert "bad task-6" in caplog.text
    assert caplog.text.count("Traceback") == 1, "one trace of a kind is enough"
    assert "prompt of 99 tokens, engine.max_prompt_tokens=16" in caplog.text


def test_many_rejections_in_a_row_end_the_run_with_their_cause() -> None:
    async def broken(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        raise ZeroDivisionError("no grader is this wrong")

    async def main() -> None:
        async with run(broken, 1000) as (rollouts, _):
            with pytest.raises(
                AllRejected,
                match=f"{MAX_REJECTED_IN_A_ROW} groups in a row.*task-31.*no grader is this wrong",
            ):
                await rollouts.buffer.take(4, 0)
            # Those already started end too; no new one is started.
            await asyncio.sleep(0.01)
            assert rollouts.next_group_id <= MAX_REJECTED_IN_A_ROW + CONFIG.max_running_groups

    asyncio.run(main())


def graded() -> Workflow:
    """A workflow that grades two answers of every task."""

    async def workflow(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        samples = await one_call(task, generate, grader)
        grades = [await grader(task, answer) for answer in ("a", "b")]
        if any(grade.failed for grade in grades):
            raise RuntimeError("no reward")
        return samples

    return workflow


def test_ungraded_groups_stop_the_run_and_are_suspended() -> None:
    async def grader(task: Task, answer: str) -> RewardResult:
        return RewardResult(
            "crashed",
            "ValueError: boom",
            failed=int(task.id.removeprefix("task-")) >= 6,
            trace="in own.py",
        )

    async def main() -> RolloutState:
        async with run(graded(), 100, grader=grader) as (rollouts, engine):
            trained = await rollouts.buffer.take(4, 0)
            rollouts.gate.version = engine.version = 1
            with pytest.raises(
                RewardsFailing,
                match=r"^in own\.py\nevery reward or tool call of 3 groups .*ValueError: boom$",
            ):
                await rollouts.buffer.take(4, 1)
            await asyncio.sleep(0.05)  # running groups end after it
            state = await rollouts.snapshot()
            kept = {group.id for group in (*trained, *state.buffered)} | {
                record.id for record in state.suspended
            }
            # Group 6 may have ended before a group that was graded; what failed in a row is no
            # loss.
            assert len(kept) + sum(state.rejected.values()) == state.next_group_id
            assert kept >= set(range(state.next_group_id)) - {6}
            assert all(record.calls for record in state.suspended if record.id < 9), (
                "with what was sampled for it"
            )
            return state

    state = asyncio.run(main())

    async def resumed() -> None:
        async with run(graded(), 20, version=1, restored=state) as (rollouts, engine):
            groups = await train_all(rollouts, engine, 1)
            assert {group.id for group in groups} >= {record.id for record in state.suspended}

    asyncio.run(resumed())


def test_failing_tools_stop_the_run() -> None:
    async def workflow(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        await generate(prompt_of(task), 2)
        raise ExceptionGroup("tools", [ToolFailed("search: no process")])

    async def main() -> None:
        async with run(workflow, 100) as (rollouts, _):
            with pytest.raises(RewardsFailing, match=r"3 groups in a row.*search: no process"):
                await rollouts.buffer.take(4, 0)
            await asyncio.sleep(0.05)  # running groups end after it
            state = await rollouts.snapshot()
            assert len(state.suspended) == state.next_group_id
            assert sum(state.rejected.values()) == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    "failing", [lambda number, answer: answer == "a", lambda number, answer: number % 3 > 0]
)
def test_single_reward_failures_reject_their_groups_only(
    failing: Callable[[int, str], bool],
) -> None:
    async def grader(task: Task, answer: str) -> RewardResult:
        return RewardResult("wrong", failed=failing(int(task.id.removeprefix("task-")), answer))

    async def main() -> None:
        async with run(
            graded(), 12, config=chz.replace(CONFIG, max_running_groups=1), grader=grader
        ) as (rollouts, engine):
            groups = await train_all(rollouts, engine)
            assert len(groups) + rollouts.rejected["RuntimeError"] == 12
            assert rollouts.rejected["RuntimeError"] in (12, 8)

    asyncio.run(main())


def test_accepted_group_between_rejections_keeps_the_run_alive() -> None:
    async def mostly_broken(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        if int(task.id.removeprefix("task-")) % 20:
            raise ZeroDivisionError
        return await one_call(task, generate, grader)

    async def main() -> None:
        async with run(mostly_broken, 200) as (rollouts, engine):
            assert len(await train_all(rollouts, engine)) == 10

    asyncio.run(main())


def test_groups_out_of_bounds_are_counted_and_replaced() -> None:
    # Every third task has both answers right, every third none, every third one of two.
    async def thirds(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        samples = await one_call(task, generate, grader)
        right = int(task.id.removeprefix("task-")) % 3
        return tuple(
            replace(sample, grade="correct" if i < right else "wrong")
            for i, sample in enumerate(samples)
        )

    def kept(**bounds: float) -> tuple[set[int], int, int]:
        async def main() -> tuple[set[int], int, int]:
            async with run(thirds, 30, config=chz.replace(CONFIG, **bounds)) as (rollouts, engine):
                trained = await train_all(rollouts, engine)
                assert rollouts.gate.running == 0
                assert rollouts.gate.accepted == len(trained)
                rates = {int(group.task.id.removeprefix("task-")) % 3 for group in trained}
                return rates, len(trained), (await rollouts.snapshot()).rejected.get("NoSignal", 0)

        return asyncio.run(main())

    assert kept() == ({0, 1, 2}, 30, 0)
    assert kept(success_rate_above=0.0, success_rate_below=1.0) == ({1}, 10, 20)
    assert kept(success_rate_above=0.05) == ({1, 2}, 20, 10)
    assert kept(success_rate_below=0.95) == ({0, 1}, 20, 10)


@pytest.mark.parametrize("num_accepted", [0, 1])
def test_run_without_signal_ends(num_accepted: int) -> None:
    config = chz.replace(CONFIG, success_rate_below=0.5)
    num_groups = max(
        MAX_BATCHES_WITHOUT_SIGNAL * config.groups_per_batch, MIN_GROUPS_WITHOUT_SIGNAL
    )

    async def solved_but_for_some(
        task: Task, generate: Generate, grader: Grader
    ) -> tuple[Sample, ...]:
        samples = await one_call(task, generate, grader)
        # In a row by the order in which they end: no accepted one is far from the middle.
        is_wrong = num_accepted and task.id == f"task-{num_groups // 2}"
        return tuple(replace(sample, grade="wrong") for sample in samples) if is_wrong else samples

    async def main() -> None:
        async with run(solved_but_for_some, num_tasks=num_groups + 10, config=config) as (
            rollouts,
            _,
        ):
            message = f"{num_groups} groups in a row .* rollout.success_rate_below=0.5"
            with pytest.raises(
                TasksExhausted if num_accepted else AllRejected,
                match=None if num_accepted else message,
            ):
                await rollouts.buffer.take(4, 0)
            assert rollouts.counters()["accepted"] == num_accepted

    asyncio.run(main())


def test_dead_engine_fails_the_take_with_its_cause() -> None:
    async def main() -> None:
        async with run(one_call) as (rollouts, engine):
            waiting = asyncio.create_task(rollouts.buffer.take(30, 0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            engine.stop(MemoryError("device"))
            with pytest.raises(EngineStopped):
                await waiting
            assert rollouts.counters()["rejected"] == 0

    asyncio.run(main())


def test_task_stream_error_fails_the_take() -> None:
    class Broken(Numbers):
        def __next__(self) -> Task:
            if self.place == 3:
                raise OSError("shard 2 is unreadable")
            return super().__next__()

    async def main() -> None:
        gate, buffer = open_gate(CONFIG, 0)
        async with (
            running(TinyEngine()) as engine,
            run_rollouts(
                Broken(9), engine, one_call, grader, gate, buffer, CONFIG, sampling=SAMPLING, seed=0
            ),
        ):
            with pytest.raises(OSError, match="shard 2"):
                await buffer.take(4, 0)

    asyncio.run(main())


def test_cancelled_group_fails_the_take() -> None:
    async def cancelled(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        raise asyncio.CancelledError

    async def main() -> None:
        async with run(cancelled) as (rollouts, _):
            with pytest.raises(
                RuntimeError, match=r"group 0 \(task task-0\) was cancelled during the run"
            ):
                await rollouts.buffer.take(4, 0)

    asyncio.run(main())


@dataclass
class Stubborn:
    """A workflow that ignores its cancellation."""

    released: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        while not self.released.is_set():
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                continue
        return ()


def test_close_cancels_groups_and_logs_abandoned_ones(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_jax.rollout.controller.CLOSE_TIMEOUT_S", 0.05)

    async def main() -> None:
        stubborn = Stubborn()
        async with run(stubborn, 2):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        stubborn.released.set()
        await asyncio.sleep(0)

        async with run(one_call):
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert "abandoned: group 0 (task task-0), group 1 (task task-1)" in caplog.text


def test_silent_engine_fails_the_snapshot_with_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_jax.rollout.controller.SNAPSHOT_TIMEOUT_S", 0.02)

    async def main() -> None:
        gate, buffer = open_gate(CONFIG, 0)
        # This engine does not run.
        async with run_rollouts(
            Numbers(9),
            TinyEngine(),
            one_call,
            grader,
            gate,
            buffer,
            CONFIG,
            sampling=SAMPLING,
            seed=0,
        ) as rollouts:
            with pytest.raises(TimeoutError, match=r"no snapshot within 0.02 s; gate at version 0"):
                await rollouts.snapshot()

    asyncio.run(main())
