from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import pytest

from areal_jax.errors import EngineStopped
from areal_jax.models.known import known_shape
from areal_jax.records import Completion, Request, Sampling
from areal_jax.sim.clock import run
from areal_jax.sim.costs import Efficiency, EngineCosts
from areal_jax.sim.engine import EngineBehavior
from areal_jax.sim.fleet import SimulatedFleet
from areal_jax.sim.hardware import DEVICES
from areal_jax.sim.lengths import LogNormal, Recorded

T = TypeVar("T")

COSTS = EngineCosts(known_shape("qwen2.5-1.5b"), DEVICES["H100"])
PROMPT = 100
PREFILL_S = COSTS.prefill_s(float(PROMPT), PROMPT**2 / 2)


@dataclass(frozen=True)
class FixedLengths:
    """The same lengths for the samples of every request."""

    lengths: tuple[int, ...]

    def sample_lengths(self, chance: object, num: int) -> list[int]:
        return list(self.lengths[:num])


def request(
    name: str, num_samples: int, resume: tuple[Completion, ...] = (), min_version: int = 0
) -> Request:
    return Request(
        name, np.zeros(PROMPT, np.int32), num_samples, Sampling(10_000), 0, min_version, resume
    )


def timed(main: Coroutine[Any, Any, T]) -> tuple[T, float]:
    async def inner() -> tuple[T, float]:
        return await main, asyncio.get_running_loop().time()

    return run(inner())


def decode_s(num: int, steps: int, context: int) -> float:
    """Sum the times of steps of `num` sequences, each with the caches at its middle."""
    step = COSTS.step(num)
    return sum(step.fixed_s + step.context_s * num * (context + i + 0.5) for i in range(steps))


def test_equal_sequences_take_the_closed_forms_time() -> None:
    async def main() -> list[Completion]:
        return await SimulatedFleet(COSTS, FixedLengths((300,) * 8), 1).submit(request("a", 8))

    completions, seconds = timed(main())
    assert [len(completion.tokens) for completion in completions] == [300] * 8
    assert seconds == pytest.approx(PREFILL_S + decode_s(8, 300, PROMPT), rel=1e-6)


def test_a_step_grows_cheaper_as_sequences_end() -> None:
    # Two of 100 tokens, then one alone for 200 more.
    async def main() -> list[Completion]:
        return await SimulatedFleet(COSTS, FixedLengths((100, 300)), 1).submit(request("a", 2))

    _, seconds = timed(main())
    expected = PREFILL_S + decode_s(2, 100, PROMPT) + decode_s(1, 200, PROMPT + 100)
    assert seconds == pytest.approx(expected, rel=1e-6)


def test_engine_time_adds_up_and_tokens_are_sampled_once() -> None:
    async def main() -> tuple[SimulatedFleet, int]:
        fleet = SimulatedFleet(COSTS, LogNormal(400.0, 1.0), 3, EngineBehavior(num_slots=5))
        answers = [fleet.submit(request(str(i), 4)) for i in range(20)]
        for version in range(1, 4):
            await asyncio.sleep(1.0)
            fleet.publish(version, [0.1, 0.2, 0.3])
        completions = [completion for answer in answers for completion in await answer]
        return fleet, sum(len(completion.tokens) for completion in completions)

    async def accounted() -> tuple[float, float, int, int]:
        fleet, sampled = await main()
        clock = asyncio.get_running_loop().time()
        return sum(fleet.seconds().values()), clock, sampled, fleet.counts["tokens"]

    total, clock, sampled, counted = run(accounted())
    assert total == pytest.approx(3 * clock)
    assert sampled == counted > 80 * 400


def test_slots_bound_running_sequences_and_the_queue_is_fifo() -> None:
    # Two slots, three sequences of 100: two together, then one.
    async def main() -> float:
        fleet = SimulatedFleet(COSTS, FixedLengths((100,)), 1, EngineBehavior(num_slots=2))
        await asyncio.gather(*(fleet.submit(request(name, 1)) for name in "abc"))
        return asyncio.get_running_loop().time()

    expected = 3 * PREFILL_S + decode_s(2, 100, PROMPT) + decode_s(1, 100, PROMPT)
    assert run(main()) == pytest.approx(expected, rel=1e-6)


def test_tokens_carry_the_version_that_sampled_them() -> None:
    async def main(on_update: str) -> tuple[list[int], float]:
        behavior = EngineBehavior(on_update="keep" if on_update == "keep" else "recompute")
        fleet = SimulatedFleet(COSTS, FixedLengths((200,)), 1, behavior)
        answer = fleet.submit(request("a", 1))
        # After half of its 200 tokens, and a little.
        await asyncio.sleep(PREFILL_S + decode_s(1, 100, PROMPT) + 1e-6)
        fleet.publish(7, [0.0])
        (completion,) = await answer
        return completion.versions.tolist(), asyncio.get_running_loop().time()

    # The current token has the old version: 101 of it.
    kept, kept_s = run(main("keep"))
    recomputed, recomputed_s = run(main("recompute"))
    assert kept == recomputed == [0] * 101 + [7] * 99
    assert recomputed_s - kept_s == pytest.approx(
        COSTS.prefill_s(PROMPT + 100.0, (PROMPT + 100) ** 2 / 2), rel=1e-3
    )


def test_draining_engines_swap_when_empty_and_admit_nothing_before() -> None:
    async def main() -> tuple[list[int], list[int], float]:
        fleet = SimulatedFleet(COSTS, FixedLengths((200,)), 1, EngineBehavior(on_update="drain"))
        first = fleet.submit(request("a", 1))
        await asyncio.sleep(0.1)
        fleet.publish(7, [0.0])
        await asyncio.sleep(0.001)
        later = fleet.submit(request("b", 1))
        (before,), (after,) = await first, await later
        return before.versions.tolist(), after.versions.tolist(), asyncio.get_running_loop().time()

    before, after, seconds = run(main())
    assert (before, after) == ([0] * 200, [7] * 200)
    assert seconds == pytest.approx(
        2 * (PREFILL_S + decode_s(1, 200, PROMPT)) + COSTS.copy_s, rel=1e-6
    )


def test_a_request_waits_for_the_weights_that_may_start_it() -> None:
    async def main() -> list[int]:
        fleet = SimulatedFleet(COSTS, FixedLengths((10,)), 2)
        answer = fleet.submit(request("a", 1, min_version=1))
        await asyncio.sleep(5.0)
        assert not answer.done()
        fleet.publish(1, [1.0, 2.0])
        (completion,) = await answer
        return completion.versions.tolist()

    versions, seconds = timed(main())
    assert versions == [1] * 10
    assert seconds > 6


def test_full_caches_preempt_the_youngest_and_lose_nothing() -> None:
    # KV caches of 2000 tokens besides the weights: three sequences of 900 with their prompts do not
    # fit.
    tight = replace(
        DEVICES["H100"],
        memory_bytes=(COSTS.weight_bytes + 2000 * 2 * COSTS.model.cached_per_token) / 0.9,
    )
    costs = replace(COSTS, device=tight)
    assert costs.kv_tokens in (1999, 2000)

    async def main() -> tuple[list[Completion], int]:
        fleet = SimulatedFleet(costs, FixedLengths((900,) * 3), 1)
        return await fleet.submit(request("a", 3)), fleet.counts["preempted"]

    completions, preempted = run(main())
    assert [len(completion.versions) for completion in completions] == [900] * 3
    assert preempted == 1


def test_sequences_of_a_failed_engine_continue_elsewhere() -> None:
    async def main() -> tuple[int, float]:
        fleet = SimulatedFleet(COSTS, FixedLengths((1000,)), 2)
        answers = [fleet.submit(request(str(i), 1)) for i in range(4)]
        await asyncio.sleep(1.0)
        sampled = {name: len(parts[0].tokens) for name, parts in (await fleet.snapshot()).items()}
        fleet.fail(0, repaired_after_s=1e4)
        assert {
            name: len(parts[0].tokens) for name, parts in (await fleet.snapshot()).items()
        } == sampled
        completions = [(await answer)[0] for answer in answers]
        assert [len(completion.tokens) for completion in completions] == [1000] * 4
        return sampled["0"], asyncio.get_running_loop().time()

    sampled, seconds = run(main())
    assert 100 < sampled < 1000
    # Four together for the remaining tokens: nothing was sampled again.
    assert seconds == pytest.approx(1.0 + decode_s(4, 1000 - sampled, PROMPT + sampled), rel=0.02)


def test_without_any_engine_requests_wait_for_a_repair() -> None:
    async def main() -> int:
        fleet = SimulatedFleet(COSTS, FixedLengths((50,)), 1)
        answer = fleet.submit(request("a", 1))
        await asyncio.sleep(0.05)
        fleet.fail(0, repaired_after_s=60.0)
        return len((await answer)[0].tokens)

    tokens, seconds = timed(main())
    assert tokens == 50
    assert 60 < seconds < 61


def test_request_resumes_from_its_tokens() -> None:
    async def main() -> tuple[list[int], list[int], int]:
        fleet = SimulatedFleet(COSTS, FixedLengths((20, 400)), 1)
        answer = fleet.submit(request("a", 2))
        await asyncio.sleep(1.0)
        parts = (await fleet.snapshot())["a"]
        whole = [len(completion.tokens) for completion in await answer]
        other = SimulatedFleet(COSTS, FixedLengths((20, 400)), 1, version=3)
        resumed = await other.submit(request("a", 2, resume=parts))
        versions = resumed[1].versions
        return (
            whole,
            [len(completion.tokens) for completion in resumed],
            int((versions == 0).sum()) - len(parts[1].tokens),
        )

    whole, resumed, difference = run(main())
    assert whole == resumed == [20, 400]
    assert difference == 0


def test_entry_can_represent_many_tokens() -> None:
    async def main() -> list[int]:
        fleet = SimulatedFleet(
            COSTS, FixedLengths((100, 64, 1)), 1, EngineBehavior(tokens_per_entry=32)
        )
        return [len(completion.versions) for completion in await fleet.submit(request("a", 3))]

    assert run(main()) == [4, 2, 1]


def test_lengths_depend_on_the_seed_only_and_end_at_the_budget() -> None:
    async def main(first: bool) -> dict[int, list[tuple[int, str]]]:
        fleet = SimulatedFleet(COSTS, LogNormal(5000.0, 1.0), 4)
        seeds = (1, 2, 3) if first else (3, 1, 2)
        answers = {seed: fleet.submit(replace(request(str(seed), 6), seed=seed)) for seed in seeds}
        return {
            seed: [(len(c.tokens), c.stop_reason) for c in await answer]
            for seed, answer in sorted(answers.items())
        }

    found = run(main(True))
    assert found == run(main(False))
    everything = [pair for pairs in found.values() for pair in pairs]
    assert all((tokens == 10_000) == (reason == "length") for tokens, reason in everything)
    assert {reason for _, reason in everything} == {"stop", "length"}


def test_recorded_lengths_are_sampled_from_the_recording() -> None:
    async def main() -> set[int]:
        completions = await SimulatedFleet(COSTS, Recorded((3, 5)), 1).submit(request("a", 40))
        return {len(completion.tokens) for completion in completions}

    assert run(main()) == {3, 5}


def test_engines_that_stop_fail_their_requests() -> None:
    async def main() -> None:
        fleet = SimulatedFleet(COSTS, FixedLengths((50,)), 1)
        answer = fleet.submit(request("a", 1))
        fleet.stop(MemoryError("device"))
        with pytest.raises(EngineStopped, match="device"):
            await answer

    run(main())


def test_weights_that_do_not_fit_are_refused() -> None:
    async def main() -> None:
        # 65.5 GB in 0.9 · 32 GB: short of 140 000 tokens of 262 kB.
        SimulatedFleet(
            EngineCosts(known_shape("qwen2.5-32b"), DEVICES["TPU v5e"], 2, Efficiency()),
            FixedLengths((1,)),
            1,
        )

    with pytest.raises(
        ValueError, match=r"memory for KV caches besides the weights, found -1\d\d,\d{3}"
    ):
        run(main())
