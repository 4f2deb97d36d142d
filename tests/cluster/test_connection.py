"""Connection to a worker: order of messages, classes of errors, and detection of its death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from areal_jax.checkpoint.checksums import CheckpointError
from areal_jax.cluster.connection import Connection
from areal_jax.errors import (
    ClaimLost,
    ConfigError,
    CorruptedState,
    InvalidRequest,
    NotStarted,
    WorkerDied,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_here")]

T = TypeVar("T")

HERE = str(Path(__file__).parent)
"""Folder of the role, for the worker's PYTHONPATH."""


async def opened(
    *arguments: str, silence_timeout_s: float = 30.0, start_timeout_s: float = 30.0
) -> tuple[Connection, Any]:
    return await Connection.open(
        "echo 7",
        "echoing_role:Echo",
        arguments,
        options={"num_cpus": 0.1, "runtime_env": {"env_vars": {"PYTHONPATH": HERE}}},
        simulated_devices=3,
        start_timeout_s=start_timeout_s,
        silence_timeout_s=silence_timeout_s,
    )


def run_scenario(scenario: Callable[[Connection], Awaitable[T]], **timeouts: float) -> T:
    async def run() -> T:
        connection, _ = await opened(**timeouts)
        try:
            async with asyncio.timeout(60):
                return await scenario(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def test_worker_has_its_devices_and_replies() -> None:
    async def run() -> None:
        connection, facts = await opened()
        try:
            assert connection.process_id == facts["pid"]
            # This process has eight.
            assert facts["devices"].split()[-1] == "--xla_force_host_platform_device_count=3"
            array = np.arange(5, dtype=np.int32)
            answers = await asyncio.gather(
                *(connection.call("say", what) for what in (1, "two", {"three": array}))
            )
            assert answers[:2] == [1, "two"]
            np.testing.assert_array_equal(answers[2]["three"], array)
            host, port = (await connection.address()).split(":")
            assert host and 0 < int(port) < 65536
        finally:
            await connection.close()

    asyncio.run(run())


def test_reports_arrive_before_the_reply_that_follows_them() -> None:
    async def scenario(connection: Connection) -> list[int]:
        received: list[int] = []
        connection.subscribe(lambda _topic, number: received.append(number), lambda _death: None)
        for number in range(20):
            assert await connection.call("report_and_say", number) == number
            # Another thread emits the report; it arrives at the latest with the next reply.
        await connection.call("say", "end")
        return received

    assert run_scenario(scenario) == list(range(20))


def test_slow_call_does_not_block_others() -> None:
    async def scenario(connection: Connection) -> bool:
        late = connection.call("say_late", "late", 30.0)
        assert await connection.call("say", "soon") == "soon"
        is_late = not late.done()
        late.cancel()
        return is_late

    assert run_scenario(scenario)


def test_cancellation_reaches_the_worker() -> None:
    async def scenario(connection: Connection) -> list[str]:
        wanted, unwanted = (
            connection.call("say_late", name, after_s)
            for name, after_s in (("wanted", 0.2), ("unwanted", 30.0))
        )
        await connection.call("say", 0)
        unwanted.cancel()
        assert await wanted == "wanted"
        return await connection.call("were_cancelled")

    assert run_scenario(scenario) == ["unwanted"]


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("InvalidRequest", InvalidRequest, "so"),
        ("CorruptedState", CorruptedState, "^so$"),
        ("CheckpointError", CheckpointError, "^so$"),
        ("ClaimLost", ClaimLost, "^so$"),
        ("ConfigError", ConfigError, "so"),
        ("ValueError", ValueError, "echo 7: so"),
        ("KeyError", KeyError, "echo 7: "),
    ],
)
def test_errors_keep_their_class(kind: str, expected: type[Exception], text: str) -> None:
    async def scenario(connection: Connection) -> None:
        with pytest.raises(expected, match=text):
            await connection.call("fail", kind)
        assert await connection.call("say", "still there") == "still there"

    run_scenario(scenario)


def test_closed_worker_finishes_its_work(tmp_path: Path) -> None:
    async def scenario(connection: Connection) -> None:
        await connection.call("end_into", str(tmp_path / "ended"))

    run_scenario(scenario)
    assert (tmp_path / "ended").read_text(encoding="utf-8") == "ended"


def test_worker_death_fails_calls_and_is_reported_once() -> None:
    async def scenario(connection: Connection) -> list[WorkerDied]:
        deaths: list[WorkerDied] = []
        connection.subscribe(lambda _topic, _payload: None, deaths.append)
        waiting = connection.call("say_late", "never", 60.0)
        connection.notify("die")
        with pytest.raises(WorkerDied, match="echo 7 died"):
            await waiting
        with pytest.raises(WorkerDied):
            await connection.call("say", "anybody?")
        return deaths

    assert len(run_scenario(scenario)) == 1


def test_worker_marked_dead_is_reported_once_and_ignored() -> None:
    async def scenario(connection: Connection) -> tuple[list[WorkerDied], list[int]]:
        deaths: list[WorkerDied] = []
        received: list[int] = []
        connection.subscribe(lambda _topic, number: received.append(number), deaths.append)
        waiting = connection.call("report_and_say", 1)
        connection.mark_dead("it is of no use")
        with pytest.raises(WorkerDied, match="echo 7 died: it was killed: it is of no use"):
            await waiting
        connection.mark_dead("again")
        # The listener detects that the process has ended.
        await asyncio.wait(
            [task for task in asyncio.all_tasks() if task.get_name() == "poll events of echo 7"],
            timeout=30.0,
        )
        return deaths, received

    deaths, received = run_scenario(scenario)
    assert [str(death) for death in deaths] == ["echo 7 died: it was killed: it is of no use"]
    assert received == []


def test_silent_worker_counts_as_dead() -> None:
    async def scenario(connection: Connection) -> float:
        began_s = time.monotonic()
        with pytest.raises(
            WorkerDied, match=r"echo 7 died: it sent no heartbeat for launch.silence_timeout_s=3"
        ):
            await connection.call("fall_silent")
        return time.monotonic() - began_s

    assert 2 < run_scenario(scenario, silence_timeout_s=3.0) < 30


@pytest.mark.parametrize(
    ("fault", "start_timeout_s", "expected", "text"),
    [
        ("settings", 30.0, ConfigError, "no.such.setting=1 is nothing"),
        (
            "library",
            30.0,
            NotStarted,
            r"^echo 7 could not start: ImportError: libcudart.so.12: cannot open",
        ),
        ("death", 30.0, WorkerDied, "echo 7 ended before it was ready"),
        ("slow", 2.0, WorkerDied, r"echo 7 was not ready within launch.start_timeout_s=2"),
    ],
)
def test_worker_that_cannot_start_reports_the_cause(
    fault: str, start_timeout_s: float, expected: type[Exception], text: str
) -> None:
    with pytest.raises(expected, match=text):
        asyncio.run(opened(fault, start_timeout_s=start_timeout_s))
