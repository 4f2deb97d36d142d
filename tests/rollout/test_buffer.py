from __future__ import annotations

import asyncio
import random

import pytest

from areal_jax.records import Group, Message, Task
from areal_jax.rollout.buffer import Buffer, TasksExhausted


def group(id: int) -> Group:
    return Group(id, Task(f"task-{id}", (Message("user", "?"),), "1"), ())


def ids(groups: list[Group] | tuple[Group, ...]) -> list[int]:
    return [group.id for group in groups]


def test_those_started_first_come_first_whatever_the_order_in_which_they_finish() -> None:
    async def take() -> None:
        order = list(range(16))
        random.Random(5).shuffle(order)
        buffer = Buffer(1.0, groups=map(group, order))
        assert ids(await buffer.take(8, 0)) == list(range(8))
        assert ids(buffer.snapshot()) == list(range(8, 16))
        # A straggler of the first batch goes before all that is left.
        buffer.put(group(16))
        assert ids(await buffer.take(8, 1)) == list(range(8, 16))
        assert ids(await buffer.take(1, 2)) == [16]

    asyncio.run(take())


def test_a_straggler_goes_before_those_that_overtook_it() -> None:
    async def take() -> None:
        buffer = Buffer(1.0, groups=map(group, [1, 2, 3]))
        assert ids(await buffer.take(2, 0)) == [1, 2]
        buffer.put(group(0))
        assert ids(await buffer.take(2, 1)) == [0, 3]

    asyncio.run(take())


def test_a_group_is_used_once() -> None:
    async def take() -> None:
        buffer = Buffer(1.0, groups=[group(0)])
        with pytest.raises(ValueError, match="group 0 was put into the buffer before"):
            buffer.put(group(0))
        await buffer.take(1, 0)
        with pytest.raises(ValueError, match="group 0 was put into the buffer before"):
            buffer.put(group(0))

    asyncio.run(take())


def test_a_take_waits_for_the_last_group_of_its_batch() -> None:
    async def take() -> None:
        buffer = Buffer(5.0)
        waiting = asyncio.create_task(buffer.take(2, 0))
        for id in (1, 0):
            await asyncio.sleep(0)
            assert not waiting.done()
            buffer.put(group(id))
        assert ids(await waiting) == [0, 1]

    asyncio.run(take())


def test_a_batch_that_is_late_says_what_it_waited_for() -> None:
    async def take() -> None:
        buffer = Buffer(0.02, lambda: "gate at version 7, 3 running", [group(0)])
        with pytest.raises(
            TimeoutError,
            match=r"batch_timeout_s=0.02 s for the 4 groups of version 7, 1 are finished; gate at",
        ):
            await buffer.take(4, 7)
        assert 0.02 <= buffer.waited_s < 1
        assert ids(buffer.snapshot()) == [0]

    asyncio.run(take())


def test_a_failure_reaches_the_take_that_waits_and_every_later_one() -> None:
    async def take() -> None:
        buffer = Buffer(5.0, groups=[group(0), group(1)])
        waiting = asyncio.create_task(buffer.take(3, 0))
        await asyncio.sleep(0)
        buffer.fail(TimeoutError("the engine is silent"))
        buffer.fail(RuntimeError("a consequence"))
        for take in (waiting, buffer.take(3, 0), buffer.take(1, 0)):
            with pytest.raises(TimeoutError, match="the engine is silent"):
                await take

    asyncio.run(take())


def test_when_the_tasks_have_run_out_whole_batches_still_come_and_then_it_is_said() -> None:
    async def take() -> None:
        buffer = Buffer(5.0, groups=map(group, range(3)))
        waiting = asyncio.create_task(buffer.take(4, 0))
        await asyncio.sleep(0)
        buffer.end()
        with pytest.raises(TasksExhausted, match="3 finished groups remain, a batch takes 4"):
            await waiting
        assert ids(await buffer.take(2, 0)) == [0, 1]
        with pytest.raises(TasksExhausted, match="1 finished groups remain, a batch takes 2"):
            await buffer.take(2, 1)

    asyncio.run(take())
