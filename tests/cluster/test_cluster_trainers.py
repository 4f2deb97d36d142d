"""Trainer hosts as one trainer: the death of one fails all calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from areal_jax.cluster.connection import Connection
from areal_jax.cluster.trainers import Trainers, gather_replies
from areal_jax.errors import WorkerDied

pytestmark = pytest.mark.usefixtures("ray_here")

T = TypeVar("T")
HERE = str(Path(__file__).parent)


def with_two(
    scenario: Callable[[list[Connection]], Awaitable[T]], silence_timeout_s: float = 60.0
) -> T:
    async def opened(number: int) -> Connection:
        connection, _ = await Connection.open(
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
                return await scenario(connections)
        finally:
            await asyncio.gather(*(connection.close() for connection in connections))

    return asyncio.run(run())


def asked(connections: list[Connection], *questions: tuple[Any, ...]) -> Awaitable[list[Any]]:
    return gather_replies(
        (connection, question[0], question[1:])
        for connection, question in zip(connections, questions, strict=True)
    )


@pytest.mark.slow
def test_replies_keep_order_and_errors_are_raised_at_once() -> None:
    async def scenario(connections: list[Connection]) -> float:
        assert await asked(connections, ("say_late", "first", 0.2), ("say", "second")) == [
            "first",
            "second",
        ]
        began_s = time.monotonic()
        with pytest.raises(ValueError, match="trainer host 0: so"):
            await asked(connections, ("fail", "ValueError"), ("fail", "KeyError"))
        return time.monotonic() - began_s

    assert with_two(scenario) < 30


@pytest.mark.slow
def test_worker_death_takes_precedence_over_errors_of_other_hosts() -> None:
    async def scenario(connections: list[Connection]) -> None:
        answers = asyncio.ensure_future(
            asked(connections, ("fail", "ValueError"), ("say_late", "never", 60.0))
        )
        # By now the first one has failed.
        assert await connections[0].call("say", "well") == "well"
        connections[1].notify("die")
        with pytest.raises(WorkerDied, match="trainer host 1 died"):
            await answers

    with_two(scenario)


@pytest.mark.slow
def test_error_of_one_host_ends_the_wait_for_the_others() -> None:
    async def scenario(connections: list[Connection]) -> None:
        with pytest.raises(ValueError, match="trainer host 0: so"):
            await asked(connections, ("fail", "ValueError"), ("say_late", "never", 60.0))

    with_two(scenario, silence_timeout_s=8.0)


@pytest.mark.slow
def test_worker_death_cancels_work_without_a_pending_call() -> None:
    async def scenario(connections: list[Connection]) -> bool:
        trainers, was_cancelled = Trainers(connections), False

        async def waiting_for_weights() -> None:
            nonlocal was_cancelled
            connections[1].notify("die")
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                was_cancelled = True
                raise

        await trainers.run_while_alive(asyncio.sleep(0))
        with pytest.raises(ZeroDivisionError):
            await trainers.run_while_alive(failing())
        with pytest.raises(WorkerDied, match="trainer host 1 died"):
            await trainers.run_while_alive(waiting_for_weights())
        return was_cancelled

    async def failing() -> None:
        raise ZeroDivisionError

    assert with_two(scenario)
