"""Talking to a process that Ray has started: in order, with errors that keep their class, and a
loss that is noticed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from areal_jax.cluster.connection import Connection
from areal_jax.errors import ConfigError, CorruptedState, InvalidRequest, NotStarted, WorkerDied

pytestmark = pytest.mark.usefixtures("ray_here")

T = TypeVar("T")

HERE = str(Path(__file__).parent)
"""Of the role, for the process that is to have it."""


async def opened(
    *arguments: str, silence_timeout_s: float = 30.0, start_timeout_s: float = 30.0
) -> tuple[Connection, Any]:
    return await Connection.opened(
        "echo 7",
        "echoing_role:Echo",
        arguments,
        options={"num_cpus": 0.1, "runtime_env": {"env_vars": {"PYTHONPATH": HERE}}},
        simulated_devices=3,
        start_timeout_s=start_timeout_s,
        silence_timeout_s=silence_timeout_s,
    )


def talking(talk: Callable[[Connection], Awaitable[T]], **timeouts: float) -> T:
    async def run() -> T:
        connection, _ = await opened(**timeouts)
        try:
            async with asyncio.timeout(60):
                return await talk(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def test_a_part_has_the_devices_it_was_given_and_answers_what_it_was_asked() -> None:
    async def run() -> None:
        connection, facts = await opened()
        try:
            assert connection.process_id == facts["pid"]
            # This process has eight.
            assert facts["devices"].split()[-1] == "--xla_force_host_platform_device_count=3"
            array = np.arange(5, dtype=np.int32)
            answers = await asyncio.gather(
                *(connection.ask("say", what) for what in (1, "two", {"three": array}))
            )
            assert answers[:2] == [1, "two"]
            np.testing.assert_array_equal(answers[2]["three"], array)
            host, port = (await connection.address()).split(":")
            assert host and 0 < int(port) < 65536
        finally:
            await connection.close()

    asyncio.run(run())


def test_what_is_told_comes_before_the_answer_that_followed_it() -> None:
    async def talk(connection: Connection) -> list[int]:
        heard: list[int] = []
        connection.listen(lambda _topic, number: heard.append(number), lambda _loss: None)
        for number in range(20):
            assert await connection.ask("tell_and_say", number) == number
            # Told from another thread, it is under way at the latest when the next answer is.
        await connection.ask("say", "end")
        return heard

    assert talking(talk) == list(range(20))


def test_a_late_answer_does_not_keep_others_waiting() -> None:
    async def talk(connection: Connection) -> bool:
        late = connection.ask("say_late", "late", 30.0)
        assert await connection.ask("say", "soon") == "soon"
        is_late = not late.done()
        late.cancel()
        return is_late

    assert talking(talk)


def test_what_is_cancelled_here_is_cancelled_there() -> None:
    async def talk(connection: Connection) -> list[str]:
        wanted, unwanted = (
            connection.ask("say_late", name, after_s)
            for name, after_s in (("wanted", 0.2), ("unwanted", 30.0))
        )
        await connection.ask("say", 0)
        unwanted.cancel()
        assert await wanted == "wanted"
        return await connection.ask("were_cancelled")

    assert talking(talk) == ["unwanted"]


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("InvalidRequest", InvalidRequest, "so"),
        ("CorruptedState", CorruptedState, "^so$"),
        ("ConfigError", ConfigError, "so"),
        ("ValueError", ValueError, "echo 7: so"),
        ("KeyError", KeyError, "echo 7: "),
    ],
)
def test_errors_keep_their_class(kind: str, expected: type[Exception], text: str) -> None:
    async def talk(connection: Connection) -> None:
        with pytest.raises(expected, match=text):
            await connection.ask("fail", kind)
        assert await connection.ask("say", "still there") == "still there"

    talking(talk)


def test_a_part_that_is_closed_may_finish_what_it_has_begun(tmp_path: Path) -> None:
    async def talk(connection: Connection) -> None:
        await connection.ask("end_into", str(tmp_path / "ended"))

    talking(talk)
    assert (tmp_path / "ended").read_text(encoding="utf-8") == "ended"


def test_a_part_that_dies_fails_what_it_was_asked_and_whoever_listens_is_told_once() -> None:
    async def talk(connection: Connection) -> list[WorkerDied]:
        losses: list[WorkerDied] = []
        connection.listen(lambda _topic, _what: None, losses.append)
        waiting = connection.ask("say_late", "never", 60.0)
        connection.tell("die")
        with pytest.raises(WorkerDied, match="echo 7 was lost"):
            await waiting
        with pytest.raises(WorkerDied):
            await connection.ask("say", "anybody?")
        return losses

    assert len(talking(talk)) == 1


def test_what_is_given_up_is_told_of_once_and_heard_no_more() -> None:
    async def talk(connection: Connection) -> tuple[list[WorkerDied], list[int]]:
        losses: list[WorkerDied] = []
        heard: list[int] = []
        connection.listen(lambda _topic, number: heard.append(number), losses.append)
        waiting = connection.ask("tell_and_say", 1)
        connection.give_up("it is of no use")
        with pytest.raises(WorkerDied, match="echo 7 is given up: it is of no use"):
            await waiting
        connection.give_up("again")
        # The listener finds out that the process has ended.
        await asyncio.wait(
            [task for task in asyncio.all_tasks() if task.get_name() == "listening to echo 7"],
            timeout=30.0,
        )
        return losses, heard

    losses, heard = talking(talk)
    assert [str(loss) for loss in losses] == ["echo 7 is given up: it is of no use"]
    assert heard == []


def test_a_part_that_says_nothing_is_taken_for_lost() -> None:
    async def talk(connection: Connection) -> float:
        began_s = time.monotonic()
        with pytest.raises(WorkerDied, match=r"echo 7 said nothing for launch.silence_timeout_s=3"):
            await connection.ask("fall_silent")
        return time.monotonic() - began_s

    assert 2 < talking(talk, silence_timeout_s=3.0) < 30


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
def test_a_part_that_cannot_begin_says_why(
    fault: str, start_timeout_s: float, expected: type[Exception], text: str
) -> None:
    with pytest.raises(expected, match=text):
        asyncio.run(opened(fault, start_timeout_s=start_timeout_s))
