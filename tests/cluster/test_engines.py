"""Engines that join, are lost and leave: requests resume from what was last told of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from counting_engine_role import IN_ITS_TURN

from areal_jax.cluster.connection import Connection
from areal_jax.cluster.engines import Engines
from areal_jax.errors import EngineStopped
from areal_jax.records import Completion, OnProgress, Progress, Request, Sampling
from areal_jax.weights import rolling

pytestmark = pytest.mark.usefixtures("ray_here")

T = TypeVar("T")
HERE = str(Path(__file__).parent)
LENGTH = 12


def request(name: str, num_samples: int = 2, on_progress: OnProgress | None = None) -> Request:
    prompt = np.arange(3, dtype=np.int32)
    return Request(name, prompt, num_samples, Sampling(LENGTH), seed=1, on_progress=on_progress)


async def join(engines: Engines, number: int, dies_at: int = -1) -> Connection:
    connection, _ = await Connection.opened(
        f"engine {number}",
        "counting_engine_role:Counting",
        (number, dies_at),
        options={"num_cpus": 0.1, "runtime_env": {"env_vars": {"PYTHONPATH": HERE}}},
        simulated_devices=None,
        start_timeout_s=60.0,
        silence_timeout_s=60.0,
    )
    engines.join(number, connection, 4, lambda: None)
    return connection


def with_engines(talk: Callable[[Engines], Awaitable[T]], wait_s: float = 30.0) -> T:
    async def run() -> T:
        engines = Engines(wait_s=wait_s)
        try:
            async with asyncio.timeout(120):
                return await talk(engines)
        finally:
            await engines.close()

    return asyncio.run(run())


def test_a_request_goes_on_at_another_engine_from_what_was_last_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk(engines: Engines) -> list[Completion]:
        await join(engines, 0, dies_at=5)
        future = engines.submit(request("a"))
        # It joins while the first one draws.
        await join(engines, 1)
        return await future

    with caplog.at_level(logging.WARNING):
        completions = with_engines(talk)
    for completion in completions:
        # Five tokens of the engine that died, each known before, and then those of the other: none
        # twice, none missing.
        assert completion.tokens.tolist() == list(range(LENGTH))
        assert completion.versions.tolist() == [0] * 5 + [1] * (LENGTH - 5)
    assert any(
        "engine 0 was lost" in message and "1 requests under way there" in message
        for message in caplog.messages
    )


def test_where_no_engine_is_left_a_request_waits_for_one_and_not_for_ever() -> None:
    async def talk(engines: Engines) -> list[Completion]:
        await join(engines, 0, dies_at=1)
        future = engines.submit(request("a"))
        await asyncio.sleep(1.0)
        assert not future.done() and engines.num_deaths == 1
        assert len((await engines.snapshot())["a"][0].tokens) == 1
        await join(engines, 1)
        return await future

    assert [len(completion.tokens) for completion in with_engines(talk)] == [LENGTH] * 2

    async def in_vain(engines: Engines) -> list[Completion]:
        return await engines.submit(request("a"))

    with pytest.raises(
        EngineStopped, match=r"all engines are lost, and none has joined within 0\.5 s"
    ):
        with_engines(in_vain, wait_s=0.5)


def test_whoever_watches_hears_every_token_once_also_when_an_engine_is_lost_and_may_end_a_sample() -> (
    None
):
    heard: dict[int, list[int]] = {0: [], 1: []}

    def on_progress(news: Sequence[Progress]) -> list[int]:
        for each in news:
            heard[each.sample] += each.sampled.tokens.tolist()
        return [1] if len(heard[1]) >= 6 else []

    async def talk(engines: Engines) -> list[Completion]:
        await join(engines, 0, dies_at=3)
        future = engines.submit(request("a", on_progress=on_progress))
        await join(engines, 1)
        return await future

    first, second = with_engines(talk)
    assert first.tokens.tolist() == heard[0] == list(range(LENGTH))
    assert heard[1] == list(range(len(heard[1])))
    # A token or two may be sampled until the engine hears that the sample shall end.
    assert 6 <= len(second.tokens) < LENGTH


def test_requests_are_dealt_by_load_and_weights_are_waited_for_everywhere() -> None:
    async def talk(engines: Engines) -> None:
        await join(engines, 0)
        await join(engines, 1)
        answers = await asyncio.gather(
            *(engines.submit(request(str(number), num_samples=1)) for number in range(4))
        )
        assert sorted(answer[0].versions[0] for answer in answers) == [0, 0, 1, 1]
        measures = engines.metrics()
        # Of two engines: tokens add up, occupancy is a mean.
        assert measures["tokens"] == (4.0 * LENGTH, 1.0)
        assert measures["occupancy"][0] / measures["occupancy"][1] == 0.5
        engines.offer(3, [])
        await engines.arrived(3, timeout_s=10.0)
        with pytest.raises(
            TimeoutError,
            match=r"version 4 to reach every engine; engine 0 version 3, engine 1 version 3",
        ):
            await engines.arrived(4, timeout_s=0.1)

    with_engines(talk)


def test_new_weights_are_taken_in_turns_and_an_engine_that_is_lost_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rolling, "_TURN_S", float("inf"))

    async def talk(engines: Engines) -> None:
        connections = [await join(engines, 0, dies_at=IN_ITS_TURN)] + [
            await join(engines, number) for number in (1, 2)
        ]
        # The first one alone has its turn, and dies in it.
        connections[0].tell("offer", 1, [])
        while engines.num_deaths == 0:
            await asyncio.sleep(0.05)
        engines.offer(1, [])
        swaps = list[tuple[float, float]]()
        while len(swaps) < 2:
            await asyncio.sleep(0.1)
            found = [await connection.ask("swap") for connection in connections[1:]]
            swaps = sorted(
                (begin_s, end_s) for begin_s, end_s in filter(None, found) if begin_s < end_s
            )
        (_, first_ended), (second_began, _) = swaps
        assert second_began >= first_ended

    with_engines(talk)


def test_a_request_that_is_not_wanted_any_more_leaves_its_engine() -> None:
    async def talk(engines: Engines) -> None:
        await join(engines, 0)
        future = engines.submit(request("a"))
        with pytest.raises(ValueError, match="in use"):
            engines.submit(request("a"))
        await asyncio.sleep(0.3)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        assert await engines.snapshot() == {}

    with_engines(talk)
