from __future__ import annotations

import asyncio
import random
import time

import pytest

from areal_jax.sim.clock import NoEventsLeft, run


def test_simulated_hour_takes_no_real_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return asyncio.get_running_loop().time()

    began = time.perf_counter()
    assert run(main()) == pytest.approx(3600, abs=1e-6)
    assert time.perf_counter() - began < 60


def test_timers_fire_in_their_order_and_at_their_times() -> None:
    chance = random.Random(0)
    delays = [chance.uniform(0, 1e5) for _ in range(200)]
    fired: list[tuple[float, float]] = []

    async def wait(delay: float) -> None:
        await asyncio.sleep(delay)
        fired.append((asyncio.get_running_loop().time(), delay))

    async def main() -> None:
        await asyncio.gather(*(wait(delay) for delay in delays))

    run(main())
    assert [delay for _, delay in fired] == sorted(delays)
    assert all(abs(at - delay) < 1e-6 for at, delay in fired)


def test_work_between_two_waits_takes_no_simulated_time() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert run(main()) == 0


def test_deadline_passes_at_its_virtual_time() -> None:
    async def main() -> tuple[float, bool]:
        clock = asyncio.get_running_loop().time
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(100):
                await asyncio.sleep(1000)
        at = clock()
        async with asyncio.timeout(100):
            await asyncio.sleep(99)
        return at, clock() == pytest.approx(199)

    assert run(main()) == (pytest.approx(100), True)


def test_waiting_forever_is_an_error() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NoEventsLeft, match="no timer is set"):
        run(main())


def test_an_error_in_a_callback_ends_the_run() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(5, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run(main())
