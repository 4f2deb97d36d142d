"""Engines that join, leave and die in a run on Ray; the wanted number of them."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
from cluster_runs import family, find_faults, kill, tiny_run

from areal_jax import loop
from areal_jax.cluster.config import Ray
from areal_jax.cluster.engines import Engines
from areal_jax.cluster.graders import Graders
from areal_jax.cluster.signals import Stopped
from areal_jax.cluster.trainers import Trainers
from areal_jax.metrics import jsonl
from areal_jax.records import Group, StepResult
from areal_jax.run.build import Run
from areal_jax.run.cluster import train_on_cluster
from areal_jax.run.grading import TracedGrader
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
def test_engines_join_leave_and_die_in_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reward worker dies, too. Nothing is lost, and the processes of the dead end."""
    experiment = tiny_run(
        tmp_path,
        *("launch.rollout_engines=1", "launch.max_engines=2", "launch.trainer_hosts=1"),
        *("num_steps=2000", "tasks.num_tasks=2400", "checkpoint.every_steps=1000"),
    )
    sizes, versions, killed = list[int](), list[int](), list[str]()
    processes: list[psutil.Process] = []
    # The trainer waits where the engines are awaited: it is faster than a process starts.
    may_step = threading.Event()

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(300):
            while not condition():
                await asyncio.sleep(0.05)

    async def resizing(run: Run[Trainers]) -> None:
        engines, file = run.engine, tmp_path / ENGINES_FILE
        assert isinstance(engines, Engines) and isinstance(run.grader, TracedGrader)
        graders = run.grader.counted
        assert isinstance(graders, Graders)

        async def steps() -> None:
            may_step.set()
            version = run.trainer.version
            await until(lambda: run.trainer.version > version + 1)
            may_step.clear()

        await until(lambda: len(engines.connections) == 2)
        assert engines.connections[1].name == "engine 1"
        await steps()
        file.write_text("1\n")
        await until(lambda: len(engines.connections) == 1)
        sizes.append(1)
        await steps()
        file.write_text("2\n")
        await until(lambda: len(engines.connections) == 2)
        sizes.append(2)
        assert engines.connections[1].name == "engine 2"
        assert engines.num_deaths == 0
        await steps()
        for registry in (engines, graders):
            processes.extend(family(registry.connections[0]))
            killed.append(kill(registry.connections[0]))

        def living() -> list[str]:
            return [each.name for each in (*engines.connections, *graders.connections)]

        await until(lambda: len(living()) == 4 and not {*killed} & {*living()})
        assert engines.num_deaths == 1
        await steps()
        for each in (*engines.connections, *graders.connections):
            processes.extend(family(each))

    async def train(run: Run[Trainers]) -> None:
        step = run.trainer.step

        def waited(groups: Sequence[Group]) -> StepResult:
            assert may_step.wait(300)
            return step(groups)

        run.trainer.step = waited
        task = asyncio.create_task(resizing(run))

        def stop(_: asyncio.Task[None]) -> None:
            may_step.set()
            run.stop.set()

        task.add_done_callback(stop)
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
    died = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert all(any(name in message for message in died) for name in killed), died
    assert len(processes) > 6, "grading processes are among them"
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    assert find_faults(tmp_path, num_steps=versions[0]) == []
    rows = jsonl.read(tmp_path / "metrics.jsonl")
    assert {1.0, 2.0} <= {row["rollout/engines"] for row in rows if "rollout/engines" in row}
