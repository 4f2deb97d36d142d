"""A whole run on Ray on this machine: no task is skipped or repeated when workers are killed."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from cluster_runs import family, find_faults, small_run

from areal_jax import loop
from areal_jax.cluster.engines import Engines
from areal_jax.cluster.graders import Graders
from areal_jax.cluster.registry import WorkerHandle
from areal_jax.cluster.trainers import Trainers
from areal_jax.run.build import Run
from areal_jax.run.cluster import train_on_cluster
from areal_jax.run.grading import TracedGrader
from areal_jax.run.make_plan import make_plan


def kill(connection: WorkerHandle) -> str:
    os.kill(connection.process_id, signal.SIGKILL)
    return connection.name


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.ray_run
def test_worker_deaths_lose_no_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    experiment = small_run()
    killed: list[str] = []
    processes: list[psutil.Process] = []

    async def killing(run: Run[Trainers]) -> None:
        """Kill an engine, a reward worker and, before the first restart, the trainer host.

        The kills are a few steps apart.
        """
        assert isinstance(run.engine, Engines) and isinstance(run.grader, TracedGrader)
        graders = run.grader.counted
        assert isinstance(graders, Graders)
        victims: list[tuple[int, Sequence[WorkerHandle]]] = [
            (2, run.engine.connections),
            (5, graders.connections),
        ]
        if len(killed) < 3:
            for version, connections in [*victims, (8, run.trainer.connections)]:
                while run.trainer.version < version:
                    await asyncio.sleep(0.01)
                processes.extend(family(connections[0]))
                killed.append(kill(connections[0]))

    async def train(run: Run[Trainers]) -> None:
        killer = asyncio.create_task(killing(run))
        try:
            await loop.train(run, experiment)
            assert isinstance(run.engine, Engines)
            processes.extend(
                process for connection in run.engine.connections for process in family(connection)
            )
        finally:
            killer.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(
            train_on_cluster(make_plan(experiment), tmp_path, train, resume=False, source="aime")
        )

    assert [name.rpartition(" ")[0] for name in killed] == [
        "engine",
        "reward worker",
        "trainer host",
    ]
    assert all(any(name in message for message in caplog.messages) for name in killed), (
        caplog.messages
    )
    assert find_faults(tmp_path) == []
    assert len(processes) > len(killed), "grading processes die with their worker"
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
