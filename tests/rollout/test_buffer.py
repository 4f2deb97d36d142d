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


def test_take_returns_oldest_groups_first() -> None:
    async def take() -> None:
        order = list(range(16))
        random.Random(5).shuffle(order)
        buffer = Buffer(1.0, groups=map(group, order))
        assert ids(await buffer.take(8, 0)) == list(range(8))
        assert ids(buffer.snapshot()) == list(range(8, 16))
        # A straggler of the first batch goes before the remaining groups.
        buffer.put(group(16))
        assert ids(await buffer.take(8, 1)) == list(range(8, 16))
        assert ids(await buffer.take(1, 2)) == [16]

    asyncio.run(take())


def test_late_group_is_taken_before_younger_ones() -> None:
    async def take() -> None:
        buffer = Buffer(1.0, groups=map(group, [1, 2, 3]))
        assert ids(await buffer.take(2, 0)) == [1, 2]
        buffer.put(group(0))
        assert ids(await buffer.take(2, 1)) == [0, 3]

    asyncio.run(take())


def test_group_is_taken_once() -> None:
    async def take() -> None:
        buffer = Buffer(1.0, groups=[group(0)])
        with pytest.raises(ValueError, match="found group 0 a second time"):
            buffer.put(group(0))
        await buffer.take(1, 0)
        with pytest.raises(ValueError, match="found group 0 a second time"):
            buffer.put(group(0))

    asyncio.run(take())


def test_take_waits_for_the_last_group_of_its_batch() -> None:
    async def take() -> None:
        buffer = Buffer(5.0)
        waiting = asyncio.create_task(buffer.take(2, 0))
        for number in (1, 0):
            await asyncio.sleep(0)
            assert not waiting.done()
            buffer.put(group(number))
        assert ids(await waiting) == [0, 1]

    asyncio.run(take())


def test_batch_timeout_describes_the_gate() -> None:
    async def take() -> None:
        buffer = Buffer(0.02, lambda: "gate at version 7, 3 running", [group(0)])
        with pytest.raises(
            TimeoutError,
            match=r"4 groups for version 7 within .*batch_timeout_s=0.02 s, found 1; gate at",
        ):
            await buffer.take(4, 7)
        assert 0.02 <= buffer.waited_s < 1
        assert ids(buffer.snapshot()) == [0]

    asyncio.run(take())


def test_failure_is_raised_by_waiting_and_later_takes() -> None:
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


def test_whole_batches_are_taken_after_the_tasks_end() -> None:
    async def take() -> None:
        buffer = Buffer(5.0, groups=map(group, range(3)))
        waiting = asyncio.create_task(buffer.take(4, 0))
        await asyncio.sleep(0)
        buffer.end()
        with pytest.raises(TasksExhausted, match="expected 4 groups for a batch, found 3"):
            await waiting
        assert ids(await buffer.take(2, 0)) == [0, 1]
        with pytest.raises(TasksExhausted, match="expected 2 groups for a batch, found 1"):
            await buffer.take(2, 1)

    asyncio.run(take())
