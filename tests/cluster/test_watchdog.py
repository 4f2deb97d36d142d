"""The watchdog under simulated time: stalled runs are logged, repaired or ended."""

from __future__ import annotations

import asyncio
import logging

import pytest

from areal_jax.cluster.watchdog import MOST_REPLACED, Stalled, Watchdog
from areal_jax.sim import clock


class Seen:
    """Inputs of a watchdog, and its replacements of workers."""

    def __init__(self) -> None:
        self.progress, self.cpu_s, self.replaced, self.workers = 0, 0.0, list[float](), 0

    def replace(self, why: str) -> str | None:
        if not self.workers:
            return None
        self.replaced.append(asyncio.get_running_loop().time())
        self.workers -= 1
        return "engine 3"

    def watchdog(self) -> Watchdog:
        return Watchdog(
            warning_s=60.0,
            timeout_s=300.0,
            progress=lambda: self.progress,
            cpu_s=lambda: self.cpu_s,
            describe_wait=lambda: "the trainer waits for the batch of version 27",
            replace=self.replace,
        )


def stalled_s(seen: Seen) -> float:
    """Return the time when the watchdog ends the run."""

    async def run() -> float:
        with pytest.raises(
            Stalled,
            match=r"no progress for launch.stall_timeout_s=300: the trainer waits for the batch of",
        ):
            await seen.watchdog().watch()
        return asyncio.get_running_loop().time()

    return clock.run(run())


def test_stall_is_logged_once_and_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert 300 <= stalled_s(Seen()) < 310
    assert caplog.messages == [
        "no progress for 60 s: the trainer waits for the batch of version 27"
    ]


def test_stalled_worker_is_replaced_a_limited_number_of_times() -> None:
    seen = Seen()
    seen.workers = 100
    assert 300 * (MOST_REPLACED + 1) <= stalled_s(seen) < 310 * (MOST_REPLACED + 1)
    assert len(seen.replaced) == MOST_REPLACED


@pytest.mark.parametrize("what", ["progress", "cpu_s"])
def test_progress_or_cpu_use_is_no_stall(what: str, caplog: pytest.LogCaptureFixture) -> None:
    seen = Seen()

    async def run() -> None:
        watching = asyncio.create_task(seen.watchdog().watch())
        for _ in range(100):
            await asyncio.sleep(50.0)
            setattr(seen, what, getattr(seen, what) + 25)
        assert not watching.done() and not caplog.messages
        watching.cancel()

    with caplog.at_level(logging.WARNING):
        clock.run(run())


def test_idle_process_counts_as_stalled() -> None:
    seen = Seen()

    async def idle() -> None:
        while True:
            await asyncio.sleep(1.0)
            seen.cpu_s += 0.05

    async def run() -> float:
        idling = asyncio.create_task(idle())
        with pytest.raises(Stalled):
            await seen.watchdog().watch()
        idling.cancel()
        return asyncio.get_running_loop().time()

    assert clock.run(run()) < 310
