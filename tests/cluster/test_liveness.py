"""Weight broadcast, rolling update, engines and router under simulated time and faults.

Every run ends and keeps its invariants.

    AREAL_JAX_SCHEDULES=10000 python -m pytest tests/cluster/test_liveness.py
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import Counter
from typing import Any

import pytest
from cluster_model import FAULTS, LENGTH, EngineModel, Fault, Setup, World, simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_jax.cluster.engines import MOVE_QUEUED_S, MOVE_RUNNING_S
from areal_jax.sim import clock

NUM_SCHEDULES = int(os.environ.get("AREAL_JAX_SCHEDULES", "300"))

setups = st.builds(
    Setup,
    seed=st.integers(0, 2**20),
    num_engines=st.sampled_from([1, 2, 2, 3, 3, 17]),
    num_slots=st.sampled_from([1, 4]),
    max_staleness=st.integers(0, 2),
    evaluate_every=st.sampled_from([0, 1, 2]),
    loss=st.sampled_from([0.0, 0.0, 0.05, 0.2]),
    doubled=st.sampled_from([0.0, 0.2]),
    most_delay_s=st.sampled_from([0.01, 0.5, 2.0]),
    most_pull_s=st.sampled_from([0.2, 8.0]),
    failed_pulls=st.sampled_from([0.0, 0.0, 0.3]),
    most_swap_s=st.sampled_from([0.1, 4.5]),
)
faults = st.lists(
    st.builds(
        Fault,
        after_s=st.sampled_from([0.0, 0.3, 1.0, 3.0, 8.0]),
        kind=st.sampled_from(FAULTS),
        which=st.integers(0, 9),
    ),
    max_size=12,
)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Suppress the log: thousands of runs log tens of thousands of deaths."""
    caplog.set_level(logging.ERROR, logger="areal_jax")


@settings(
    max_examples=NUM_SCHEDULES, derandomize="AREAL_JAX_SCHEDULES" not in os.environ, database=None
)
@given(setup=setups, faults=faults)
@pytest.mark.timeout(0)
@pytest.mark.slow
def test_runs_end_and_keep_invariants_under_faults(setup: Setup, faults: list[Fault]) -> None:
    assert simulated(setup, faults).broken == []


def test_an_engine_that_joins_during_an_evaluation_gets_its_weights() -> None:
    # Every step is evaluated and engines die all the time: replacements join while the weight
    # broadcast is paused.
    kills = [Fault(2.5, "kill")] * 20
    assert (
        simulated(Setup(num_engines=2, evaluate_every=1, num_steps=4, start_s=0.5), kills).broken
        == []
    )


def test_version_that_no_engine_could_pull_is_published_again() -> None:
    # Synchronous: nothing newer comes before it has arrived.
    losses = [Fault(0.3, "lose objects")] * 40
    assert simulated(Setup(max_staleness=0, most_pull_s=3.0), losses).broken == []


def test_lost_requests_and_answers_are_sent_again() -> None:
    assert simulated(Setup(loss=0.3, num_engines=1), []).broken == []
    assert simulated(Setup(loss=0.3, num_engines=3), []).broken == []


@pytest.mark.parametrize(
    ("has_slots", "patience_s"),
    [(False, MOVE_QUEUED_S), (True, MOVE_RUNNING_S)],
    ids=["queued", "running"],
)
def test_requests_leave_an_engine_that_hangs(has_slots: bool, patience_s: float) -> None:
    async def whole() -> tuple[float, list[str]]:
        world = World(Setup(num_engines=2, num_slots=8))
        for _ in range(2):
            world.start_engine()
        world.broadcast.publish(0, None)
        await world.engines.wait_for_version(0, 60.0)
        # It is alive and reports its requests; they have slots once it decodes with version 0.
        while has_slots and world.living[0].version < 0:
            await asyncio.sleep(0.1)
        world.living[0].hangs_until_s = math.inf
        began_s = world.loop.time()
        try:
            async with asyncio.timeout(10 * patience_s):
                await asyncio.gather(*(world.submit(f"group {number}", 0) for number in range(4)))
        finally:
            await world.close()
        return world.loop.time() - began_s, world.outcome.broken

    took_s, broken = clock.run(whole())
    assert patience_s < took_s < patience_s + 15.0
    assert broken == []


def test_nothing_is_sampled_again_when_an_engine_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    # No report reaches the controller: what the engine has sampled comes by its snapshot alone.
    async def silent(_: EngineModel) -> None:
        await asyncio.Event().wait()

    sampled = list[int]()
    draw = EngineModel._draw_one

    def counted(engine: EngineModel, held: Any) -> None:
        sampled.append(engine.number)
        draw(engine, held)

    monkeypatch.setattr(EngineModel, "_report", silent)
    monkeypatch.setattr(EngineModel, "_draw_one", counted)

    async def whole() -> list[str]:
        world = World(Setup(num_engines=2, num_slots=8))
        world.start_engine()
        world.broadcast.publish(0, None)
        await world.engines.wait_for_version(0, 60.0)
        submitted = [asyncio.create_task(world.submit(f"group {each}", 0)) for each in range(4)]
        while len(sampled) < 4 * 3:
            await asyncio.sleep(0.01)
        world.start_engine()
        await world.engines.leave(0)
        assert world.engines.num_deaths == 0 and len(world.engines.staying) == 1
        await asyncio.gather(*submitted)
        await world.close()
        return world.outcome.broken

    assert clock.run(whole()) == []
    assert Counter(sampled) == {0: 4 * 3, 1: 4 * (LENGTH - 3)}
