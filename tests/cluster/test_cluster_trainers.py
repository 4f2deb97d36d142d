"""Trainer hosts, asked together: one that is lost is what all others fail with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from areal_jax.cluster.connection import Connection
from areal_jax.cluster.trainers import Trainers, answers_of
from areal_jax.errors import WorkerDied

pytestmark = pytest.mark.usefixtures("ray_here")

T = TypeVar("T")
HERE = str(Path(__file__).parent)


def with_two(
    talk: Callable[[list[Connection]], Awaitable[T]], silence_timeout_s: float = 60.0
) -> T:
    async def opened(number: int) -> Connection:
        connection, _ = await Connection.opened(
            f"trainer host {number}",
            "echoing_role:Echo",
            (),
            options={"num_cpus": 0.1, "runtime_env": {"env_vars": {"PYTHONPATH": HERE}}},
            simulated_devices=None,
            start_timeout_s=60.0,
            silence_timeout_s=silence_timeout_s,
        )
        return connection

    async def run() -> T:
        connections = list(await asyncio.gather(opened(0), opened(1)))
        try:
            async with asyncio.timeout(120):
                return await talk(connections)
        finally:
            await asyncio.gather(*(connection.close() for connection in connections))

    return asyncio.run(run())


def asked(connections: list[Connection], *questions: tuple[Any, ...]) -> Awaitable[list[Any]]:
    return answers_of(
        (connection, question[0], question[1:])
        for connection, question in zip(connections, questions, strict=True)
    )


def test_all_answers_come_in_order_and_what_all_fail_with_is_raised_at_once() -> None:
    async def talk(connections: list[Connection]) -> float:
        assert await asked(connections, ("say_late", "first", 0.2), ("say", "second")) == [
            "first",
            "second",
        ]
        began_s = time.monotonic()
        with pytest.raises(ValueError, match="trainer host 0: so"):
            await asked(connections, ("fail", "ValueError"), ("fail", "KeyError"))
        return time.monotonic() - began_s

    assert with_two(talk) < 30


def test_where_one_is_lost_that_is_told_whatever_the_other_failed_with_before() -> None:
    async def talk(connections: list[Connection]) -> None:
        answers = asyncio.ensure_future(
            asked(connections, ("fail", "ValueError"), ("say_late", "never", 60.0))
        )
        # By now the first one has failed.
        assert await connections[0].ask("say", "well") == "well"
        connections[1].tell("die")
        with pytest.raises(WorkerDied, match="trainer host 1 was lost"):
            await answers

    with_two(talk)


def test_one_that_waits_for_what_another_has_failed_at_is_not_waited_for_for_ever() -> None:
    async def talk(connections: list[Connection]) -> None:
        with pytest.raises(ValueError, match="trainer host 0: so"):
            await asked(connections, ("fail", "ValueError"), ("say_late", "never", 60.0))

    with_two(talk, silence_timeout_s=8.0)


def test_what_needs_all_hosts_ends_when_one_is_lost_though_nothing_was_asked() -> None:
    async def talk(connections: list[Connection]) -> bool:
        trainers, was_cancelled = Trainers(connections, version=0), False

        async def waiting_for_weights() -> None:
            nonlocal was_cancelled
            connections[1].tell("die")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        await trainers.while_whole(asyncio.sleep(0))
        with pytest.raises(ZeroDivisionError):
            await trainers.while_whole(failing())
        with pytest.raises(WorkerDied, match="trainer host 1 was lost"):
            await trainers.while_whole(waiting_for_weights())
        return was_cancelled

    async def failing() -> None:
        raise ZeroDivisionError

    assert with_two(talk)
