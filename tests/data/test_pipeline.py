from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.data.config import PromptConfig, Synthetic
from areal_jax.data.pipeline import TaskStream
from areal_jax.data.sources import load_tasks
from areal_jax.records import Message, Task


def tasks(num: int) -> list[Task]:
    return [Task(f"task-{i}", (Message("user", "?"),), "1") for i in range(num)]


def ids(stream: TaskStream, num: int) -> list[str]:
    return [next(stream).id for _ in range(num)]


@settings(max_examples=20)
@given(st.integers(1, 200), st.integers(0, 2**31 - 1))
def test_every_task_comes_once_per_epoch(num: int, seed: int) -> None:
    stream = TaskStream(tasks(num), seed)
    for _ in range(3):
        assert Counter(ids(stream, num)) == Counter(task.id for task in tasks(num))


def test_order_depends_on_epoch_and_seed() -> None:
    stream, again, other = (
        TaskStream(tasks(50), 7),
        TaskStream(tasks(50), 7),
        TaskStream(tasks(50), 8),
    )
    first, second = ids(stream, 50), ids(stream, 50)
    assert ids(again, 100) == first + second
    assert first != second
    assert ids(other, 50) != first
    assert first != [task.id for task in tasks(50)]


@settings(max_examples=20)
@given(st.integers(0, 600), st.integers(0, 600))
def test_restored_stream_continues_exactly(before: int, after: int) -> None:
    stream = TaskStream(tasks(230), 5)
    ids(stream, before)
    state = json.loads(json.dumps(stream.state()))
    expected = ids(stream, after)
    resumed = TaskStream(tasks(230), 5)
    ids(resumed, 3)
    resumed.restore(state)
    assert ids(resumed, after) == expected
    assert resumed.state() == stream.state()


@pytest.mark.parametrize(("num", "seed"), [(229, 5), (230, 6)])
def test_state_of_another_stream_is_refused(num: int, seed: int) -> None:
    state = TaskStream(tasks(230), 5).state()
    with pytest.raises(ValueError, match="resume with the same tasks and seed"):
        TaskStream(tasks(num), seed).restore(state)


def test_empty_stream_is_refused() -> None:
    with pytest.raises(ValueError, match="found none"):
        TaskStream([], 0)


def test_stream_of_generated_tasks() -> None:
    loaded = load_tasks(Synthetic(num_tasks=64), PromptConfig())
    assert len({next_task.id for next_task in islice(TaskStream(loaded.tasks, 1), 64)}) == 64
