"""Engines that join and die: requests resume from the last reported tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from counting_engine_role import IN_ITS_TURN

from areal_jax.cluster import engines as engines_module
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
    connection, _ = await Connection.open(
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


def kill_after(
    connection: Connection, num_tokens: int, on_progress: OnProgress = lambda _: []
) -> OnProgress:
    """Return a callback that kills the engine once that many tokens of sample 0 are reported."""
    num_reported = 0

    def count(news: Sequence[Progress]) -> Iterable[int]:
        nonlocal num_reported
        num_reported += sum(len(each.sampled.tokens) for each in news if each.sample == 0)
        if num_reported == num_tokens:
            connection.notify("die")
        return on_progress(news)

    return count


def with_engines(scenario: Callable[[Engines], Awaitable[T]], wait_s: float = 30.0) -> T:
    async def run() -> T:
        engines = Engines(wait_s=wait_s)
        try:
            async with asyncio.timeout(120):
                return await scenario(engines)
        finally:
            await engines.close()

    return asyncio.run(run())


@pytest.mark.slow
def test_request_resumes_on_another_engine_from_the_last_report(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assigned: list[tuple[str, int]] = []

    async def scenario(engines: Engines) -> list[Completion]:
        engines.on_assignment(lambda id, number: assigned.append((id, number)))
        first = await join(engines, 0, dies_at=5)
        future = engines.submit(request("a", on_progress=kill_after(first, 5)))
        # It joins while the first one decodes.
        await join(engines, 1)
        return await future

    with caplog.at_level(logging.WARNING):
        completions = with_engines(scenario)
    assert assigned == [("a", 0), ("a", 1)]
    for completion in completions:
        # Five tokens of the engine that died, each known before, and then those of the other: none
        # twice, none missing.
        assert completion.tokens.tolist() == list(range(LENGTH))
        assert completion.versions.tolist() == [0] * 5 + [1] * (LENGTH - 5)
        # The experts of all tokens, from the engine that prefilled the first ones again.
        assert completion.experts is not None and completion.experts.dtype == np.uint8
        assert completion.experts[:, 0].tolist() == [[i, 1] for i in range(LENGTH)]
        assert completion.experts[:, 1].tolist() == [[1, i] for i in range(LENGTH)]
    assert any(
        "worker died: engine 0" in message and "moved_requests=1" in message
        for message in caplog.messages
    )


@pytest.mark.slow
def test_request_without_engine_waits_and_times_out() -> None:
    async def scenario(engines: Engines) -> list[Completion]:
        first = await join(engines, 0, dies_at=1)
        future = engines.submit(request("a", on_progress=kill_after(first, 1)))
        while engines.num_deaths == 0:
            await asyncio.sleep(0.05)
        assert not future.done()
        assert len((await engines.snapshot())["a"][0].tokens) == 1
        await join(engines, 1)
        return await future

    assert [len(completion.tokens) for completion in with_engines(scenario)] == [LENGTH] * 2

    async def without_engine(engines: Engines) -> list[Completion]:
        return await engines.submit(request("a"))

    with pytest.raises(EngineStopped, match=r"all engines died and no engine joined within 0\.5 s"):
        with_engines(without_engine, wait_s=0.5)


@pytest.mark.slow
def test_progress_has_every_token_once_and_can_end_a_sample() -> None:
    received: dict[int, list[int]] = {0: [], 1: []}

    def on_progress(news: Sequence[Progress]) -> list[int]:
        for each in news:
            received[each.sample] += each.sampled.tokens.tolist()
        return [1] if len(received[1]) >= 6 else []

    async def scenario(engines: Engines) -> list[Completion]:
        first = await join(engines, 0, dies_at=3)
        future = engines.submit(request("a", on_progress=kill_after(first, 3, on_progress)))
        await join(engines, 1)
        return await future

    first, second = with_engines(scenario)
    assert first.tokens.tolist() == received[0] == list(range(LENGTH))
    assert received[1] == list(range(len(received[1])))
    # A token or two may be sampled until the command to end the sample reaches the engine.
    assert 6 <= len(second.tokens) < LENGTH


@pytest.mark.slow
def test_requests_balance_load_and_weights_reach_every_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The first engine waits without weights until the second one has started.
    monkeypatch.setattr(engines_module, "LAG_S", float("inf"))

    async def scenario(engines: Engines) -> None:
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
        engines.update_weights(3, [])
        await engines.wait_for_version(3, timeout_s=10.0)
        with pytest.raises(
            TimeoutError,
            match=r"version 4 to reach every engine; engine 0 version 3, engine 1 version 3",
        ):
            await engines.wait_for_version(4, timeout_s=0.1)
        # What is withdrawn reaches no engine that joins.
        engines.withdraw_weights()
        await join(engines, 2)
        await asyncio.sleep(2 * engines_module.TICK_S)
        with pytest.raises(TimeoutError, match=r"engine 1 version 3, engine 2 version -1"):
            await engines.wait_for_version(3, timeout_s=0.1)
        engines.update_weights(3, [])
        await engines.wait_for_version(3, timeout_s=10.0)
        assert "engine 2 has version 3 of 3" in engines.describe_wait()

    with_engines(scenario)


@pytest.mark.slow
def test_engines_swap_in_turns_and_a_dead_engine_loses_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rolling, "_TURN_S", float("inf"))

    async def scenario(engines: Engines) -> None:
        connections = [await join(engines, 0, dies_at=IN_ITS_TURN)] + [
            await join(engines, number) for number in (1, 2)
        ]
        # The first one alone has its turn, and dies in it.
        connections[0].notify("update_weights", 1, [])
        while engines.num_deaths == 0:
            await asyncio.sleep(0.05)
        engines.update_weights(1, [])
        swaps = list[tuple[float, float]]()
        while len(swaps) < 2:
            await asyncio.sleep(0.1)
            found = [await connection.call("swap") for connection in connections[1:]]
            swaps = sorted(
                (begin_s, end_s) for begin_s, end_s in filter(None, found) if begin_s < end_s
            )
        (_, first_ended), (second_began, _) = swaps
        assert second_began >= first_ended

    with_engines(scenario)


@pytest.mark.slow
def test_cancelled_request_leaves_its_engine() -> None:
    async def scenario(engines: Engines) -> None:
        await join(engines, 0)
        future = engines.submit(request("a"))
        with pytest.raises(ValueError, match="in use"):
            engines.submit(request("a"))
        await asyncio.sleep(0.3)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await future
        assert await engines.snapshot() == {}

    with_engines(scenario)
