"""Laws of several engines that answer as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import chz
import jax
import numpy as np
import pytest
from tiny_decode import CONFIG, POLICY, Shelf, engine, request

from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.fleet import Fleet
from areal_jax.engine.routing import BLOCK_TOKENS, TOTALS, digests
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import engine_meshes, make_meshes
from areal_jax.records import Completion, Progress, Request

LONG = chz.replace(CONFIG, num_slots=4, max_prompt_tokens=3 * BLOCK_TOKENS)


@lru_cache
def two_engines(num_devices: int = 2) -> tuple[DecodeEngine, ...]:
    placement = PlacementConfig(rollout_devices=num_devices)
    rollout = make_meshes(placement, jax.devices()[: num_devices // 2 * 2 + 1]).rollout
    meshes = engine_meshes(rollout, 2)
    assert [list(mesh.devices.flat) for mesh in meshes] == [
        [rollout.devices.flat[number]] for number in (0, num_devices - 1)
    ]
    return tuple(DecodeEngine(POLICY, mesh, LONG, np.float32) for mesh in meshes)


class Noting(EngineLoop):
    """Notes which requests it is given."""

    def __init__(self, engine: DecodeEngine, weights: Shelf):
        super().__init__(engine, weights)
        self.given: list[str] = []

    def submit(self, request: Request) -> asyncio.Future[list[Completion]]:
        self.given.append(request.id)
        return super().submit(request)


def home(engine_loops: Sequence[Noting], name: str) -> int:
    """Which engine loop was given a request."""
    return next(
        number for number, engine_loop in enumerate(engine_loops) if name in engine_loop.given
    )


@asynccontextmanager
async def fleet(num_devices: int = 2) -> AsyncIterator[tuple[Fleet, list[Noting]]]:
    engine_loops = [Noting(each, Shelf(each, (0, 0, 0))) for each in two_engines(num_devices)]
    together = Fleet(engine_loops)
    together.start()
    try:
        yield together, engine_loops
    finally:
        together.close()


def run(main: Callable[[Fleet, list[Noting]], Any], num_devices: int = 2) -> Any:
    async def go() -> Any:
        async with fleet(num_devices) as (together, engine_loops):
            return await main(together, engine_loops)

    return asyncio.run(go())


def assert_same(ours: Sequence[Completion], theirs: Sequence[Completion]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.tokens, other.tokens)
        # Requests meet in other batches, whose sums float32 rounds in another order.
        np.testing.assert_allclose(mine.logp, other.logp, rtol=1e-5, atol=1e-5)
        assert mine.stop_reason == other.stop_reason


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_two_engines_sample_the_tokens_of_one(num_devices: int) -> None:
    requests = [request(f"r{i}", (3 + i, 7, 1), num_samples=2, seed=i) for i in range(8)]

    async def main(
        together: Fleet, engine_loops: list[Noting]
    ) -> tuple[list[list[Completion]], list[Any]]:
        assigned: list[tuple[str, int]] = []
        together.on_assignment(lambda id, number: assigned.append((id, number)))
        answers = await asyncio.gather(*map(together.submit, requests))
        assert assigned == [(each.id, home(engine_loops, each.id)) for each in requests]
        return answers, [engine_loop.metrics() for engine_loop in engine_loops]

    answers, each = run(main, num_devices)

    async def alone() -> list[list[Completion]]:
        one = engine()
        engine_loop = EngineLoop(one, Shelf(one, (0, 0, 0)))
        engine_loop.start()
        found = await asyncio.gather(*map(engine_loop.submit, requests))
        engine_loop.close()
        return found

    for ours, theirs in zip(answers, asyncio.run(alone()), strict=True):
        assert_same(ours, theirs)
    # 8 requests of 2 samples of 20 tokens: half of them each.
    assert [measures["tokens"] for measures in each] == [(160.0, 1.0)] * 2


def test_engine_metrics_are_summed_or_averaged() -> None:
    async def main(together: Fleet, engine_loops: list[Noting]) -> dict[str, Any]:
        await asyncio.gather(
            *(
                together.submit(request(f"r{i}", (3, 7 + i), num_samples=2, seed=i))
                for i in range(4)
            )
        )
        return together.metrics()

    found = run(main)
    assert found["tokens"] == (160.0, 1.0) and found["requests"][0] == 4.0
    tokens, seconds = found["tokens_per_s"]
    assert tokens == 160.0 and 0.0 < seconds < 60.0
    assert found["occupancy"][0] == 160.0 and set(TOTALS) <= found.keys()


@pytest.mark.slow
def test_conversation_stays_on_its_engine_unless_it_is_busy() -> None:
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(0, 64, 2 * BLOCK_TOKENS) for _ in range(4)]

    async def main(together: Fleet, engine_loops: list[Noting]) -> tuple[list[int], list[int], int]:
        first, again = [], []
        for i, prefix in enumerate(prefixes):
            future = together.submit(request(f"a{i}", prefix.tolist(), seed=i))
            first.append(home(engine_loops, f"a{i}"))
            if i % 2:
                await future
        await asyncio.sleep(0)
        while any(together._router.load(number) for number in (0, 1)):
            await asyncio.sleep(0.01)
        for i in (3, 1, 2, 0):
            # What was said and 30 tokens more.
            future = together.submit(
                request(f"b{i}", [*prefixes[i].tolist(), *rng.integers(0, 64, 30).tolist()], seed=i)
            )
            again.append(home(engine_loops, f"b{i}"))
            await future
        # Eight samples of its 4 slots: above a quarter of them, the other one is nearer.
        held = together.submit(request("held", prefixes[0].tolist(), num_samples=8, seed=9))
        other = together.submit(request("other", prefixes[0].tolist(), seed=9))
        homes = home(engine_loops, "held"), home(engine_loops, "other")
        await asyncio.gather(held, other)
        assert [together._router.load(number) for number in (0, 1)] == [0, 0]
        return first, again, len(set(homes))

    first, again, num_homes = run(main)
    assert set(first) == {0, 1}
    assert again == [first[3], first[1], first[2], first[0]]
    assert num_homes == 2


def test_a_snapshot_holds_the_requests_of_all_engines() -> None:
    async def main(together: Fleet, engine_loops: list[Noting]) -> None:
        futures = {
            f"r{i}": together.submit(request(f"r{i}", (5, i + 1), num_samples=4, seed=i))
            for i in range(4)
        }
        found = await together.snapshot()
        # A request that finished before the snapshot has returned before it.
        assert all(name in found or future.done() for name, future in futures.items())
        assert found.keys() <= futures.keys()
        assert {home(engine_loops, name) for name in futures} == {0, 1}
        futures["r2"].cancel()
        answers = await asyncio.gather(*(futures[name] for name in ("r0", "r1", "r3")))
        assert [len(completion.tokens) for answer in answers for completion in answer] == [20] * 12
        assert [together._router.load(number) for number in (0, 1)] == [0, 0]

    run(main)


def test_requests_of_an_engine_that_leaves_continue_elsewhere() -> None:
    requests = [request(f"r{i}", (3 + i, 7, 1), num_samples=2, seed=i) for i in range(6)]

    async def main(together: Fleet, engine_loops: list[Noting]) -> list[list[Completion]]:
        reports: dict[str, list[int]] = {each.id: [0, 0] for each in requests}
        under_way = asyncio.Event()

        def count(name: str, news: Sequence[Progress]) -> tuple[int, ...]:
            for sample, sampled in news:
                reports[name][sample] += len(sampled.tokens)
            under_way.set()
            return ()

        watched = [replace(each, on_progress=partial(count, each.id)) for each in requests]
        futures = [together.submit(each) for each in watched]
        await under_way.wait()
        await together.remove_engine(1)
        assert together.num_engines == 1 and 0 < together.num_moved <= 3
        answers = await asyncio.gather(*futures)
        assert together._router.load(0) == 0 and not together._jobs
        # 20 tokens of each sample, of which none is reported twice.
        assert reports == {each.id: [20, 20] for each in requests}
        # Those of the engine that left count, too: 6 requests of 2 samples of 20 tokens.
        assert together.metrics()["tokens"] == (240.0, 1.0)
        return answers

    async def still(together: Fleet, engine_loops: list[Noting]) -> list[list[Completion]]:
        return await asyncio.gather(*map(together.submit, requests))

    for ours, theirs in zip(run(main), run(still), strict=True):
        assert_same(ours, theirs)


def test_an_engine_that_joins_gets_requests() -> None:
    async def main(together: Fleet, engine_loops: list[Noting]) -> None:
        await together.remove_engine(1)
        loop = Noting(two_engines()[1], Shelf(two_engines()[1], (0, 0, 0)))
        loop.start()
        together.add_engine(1, loop)
        futures = [together.submit(request(f"r{i}", (3, i), seed=i)) for i in range(4)]
        assert len(loop.given) == 2
        await asyncio.gather(*futures)

    run(main)


def test_prefixes_differ_by_any_of_their_blocks() -> None:
    tokens = np.arange(3 * BLOCK_TOKENS, dtype=np.int32)
    other = tokens.copy()
    other[0] = 7
    assert len(digests(tokens)) == 3 and digests(tokens)[:2] == digests(
        tokens[: 2 * BLOCK_TOKENS + 5]
    )
    assert not set(digests(tokens)) & set(digests(other))
    assert digests(tokens[: BLOCK_TOKENS - 1]) == []


def test_engines_must_divide_the_rollout_mesh() -> None:
    rollout = make_meshes(
        PlacementConfig(rollout_devices=4, rollout_tensor=2), jax.devices()
    ).rollout
    assert [mesh.shape for mesh in engine_meshes(rollout, 2)] == [{"data": 1, "tensor": 2}] * 2
    with pytest.raises(
        ValueError, match=r"2 shards of slots are not divisible by placement\.engines=4"
    ):
        engine_meshes(rollout, 4)
