"""Admission of the work of several tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from areal_jax.tinker.fairness import FairQueue


def admitted(works: Sequence[tuple[str, int]], capacity: int, cancelled: int | None = None) -> str:
    """Sessions in order of admission, while works end one by one, the oldest first. Sessions whose
    letters differ in case only are of one tenant.
    """

    async def main() -> str:
        queue, order, ends = FairQueue(lambda: capacity), list[str](), list[asyncio.Event]()

        async def work(tenant: str, size: int) -> None:
            async with queue.turn((tenant.lower(), tenant, ""), size):
                order.append(tenant)
                ends.append(asyncio.Event())
                await ends[-1].wait()

        tasks = [asyncio.create_task(work(*each)) for each in works]
        await asyncio.sleep(0)
        if cancelled is not None:
            tasks[cancelled].cancel()
        for number in range(len(works)):
            await asyncio.sleep(0.001)
            if number < len(ends):
                ends[number].set()
        async with asyncio.timeout(10):
            await asyncio.gather(*tasks, return_exceptions=True)
        return "".join(order)

    return asyncio.run(main())


def test_the_tenant_with_the_least_running_work_is_next() -> None:
    # Room for two. When the first work of a ends, b has none; when the second ends, a has none.
    assert admitted([("a", 1)] * 4 + [("b", 1)] * 2, 2) == "aababa"


def test_larger_work_waits_for_room_and_keeps_its_turn() -> None:
    # b needs all of the room: after a's first work it is next, and a's third waits for it.
    assert admitted([("a", 1), ("a", 1), ("b", 2), ("a", 1)], 2) == "aaba"


def test_work_beyond_the_capacity_runs_alone() -> None:
    assert admitted([("a", 9), ("b", 1)], 2) == "ab"


def test_cancelled_work_leaves_its_place() -> None:
    assert admitted([("a", 2), ("b", 2), ("c", 2)], 2, cancelled=1) == "ac"
    # Also while it runs.
    assert admitted([("a", 2), ("b", 2)], 2, cancelled=0) == "ab"


def test_sessions_of_one_tenant_share_its_turns() -> None:
    # Room for two: one of a's sessions and b, although a has three sessions that ask.
    works = [("a", 1), ("A", 1), ("a", 1), ("A", 1), ("b", 1), ("b", 1)]
    assert admitted(works, 2) == "aAbabA"


def test_paused_work_delays_only_its_sampler() -> None:
    async def main() -> str:
        queue, order, found = FairQueue(lambda: 2), list[str](), asyncio.Event()

        async def work(sampler: str, number: int) -> None:
            async with queue.turn(("a", "a", sampler), 2) as paused:
                if sampler == "new" and not found.is_set():
                    with paused():
                        await found.wait()
                order.append(f"{sampler}{number}")
                await asyncio.sleep(0)

        async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
            for number, sampler in enumerate(("new", "new", "old", "old")):
                tasks.create_task(work(sampler, number))
            await asyncio.sleep(0.01)
            order.append("|")
            found.set()
        return " ".join(order)

    # One at a time. The second work of the sampler does not begin while the first is paused.
    assert asyncio.run(main()) == "old2 old3 | new0 new1"
