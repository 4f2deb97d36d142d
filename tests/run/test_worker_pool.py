"""Engines that join and leave a run on Ray; the wanted number of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_runs import find_faults, small_run

from areal_jax import loop
from areal_jax.cluster.config import Ray
from areal_jax.cluster.engines import Engines
from areal_jax.cluster.signals import Stopped
from areal_jax.cluster.trainers import Trainers
from areal_jax.metrics import jsonl
from areal_jax.run.build import Run
from areal_jax.run.cluster import train_on_cluster
from areal_jax.run.make_plan import make_plan
from areal_jax.run.worker_pool import ENGINES_FILE, EngineCount


def test_the_file_in_the_run_folder_gives_the_number_of_engines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    count = EngineCount(tmp_path, Ray(rollout_engines=2, max_engines=5))
    file = tmp_path / ENGINES_FILE
    assert count.read() == 5
    assert EngineCount(tmp_path, Ray(rollout_engines=2)).read() == 2
    for text, expected in (("3\n", 3), (" 1", 1), ("5", 5), ("03", 3)):
        file.write_text(text)
        assert count.read() == expected
    assert not caplog.messages
    for text in ("0", "6", "-1", "", "two", "1.5", "٣", "9" * 5000):
        file.write_text(text)
        caplog.clear()
        assert count.read() is None and count.read() is None
        (message,) = caplog.messages
        assert "from 1 to 5 (launch.max_engines), found" in message and len(message) < 400
    file.unlink()
    file.mkdir()
    assert count.read() is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.ray_run
def test_engines_join_and_leave_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    experiment = small_run(
        *("launch.rollout_engines=1", "launch.max_engines=2", "launch.trainer_hosts=1"),
        *("num_steps=2000", "tasks.num_tasks=2400", "checkpoint.every_steps=1000"),
    )
    sizes, versions = list[int](), list[int]()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not condition():
                await asyncio.sleep(0.05)

    async def resizing(run: Run[Trainers]) -> None:
        engines = run.engine
        assert isinstance(engines, Engines)
        await until(lambda: len(engines.connections) == 2)
        joined = engines.connections[1].name
        version = run.trainer.version
        await until(lambda: run.trainer.version > version + 1)
        (tmp_path / ENGINES_FILE).write_text("1\n")
        await until(lambda: len(engines.connections) == 1)
        sizes.append(1)
        (tmp_path / ENGINES_FILE).write_text("2\n")
        await until(lambda: len(engines.connections) == 2)
        sizes.append(2)
        assert joined == "engine 1" and engines.connections[1].name == "engine 2"
        assert engines.num_deaths == 0
        version = run.trainer.version
        await until(lambda: run.trainer.version > version + 1)

    async def train(run: Run[Trainers]) -> None:
        task = asyncio.create_task(resizing(run))
        task.add_done_callback(lambda _: run.stop.set())
        try:
            await loop.train(run, experiment)
        finally:
            versions.append(run.trainer.version)
            await task

    with caplog.at_level(logging.INFO), pytest.raises(Stopped):
        asyncio.run(
            train_on_cluster(make_plan(experiment), tmp_path, train, resume=False, source="aime")
        )
    assert sizes == [1, 2]
    assert any("engine left: engine" in message for message in caplog.messages)
    assert find_faults(tmp_path, num_steps=versions[0]) == []
    rows = jsonl.read(tmp_path / "metrics.jsonl")
    assert {1.0, 2.0} <= {row["rollout/engines"] for row in rows if "rollout/engines" in row}
