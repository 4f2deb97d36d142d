"""A whole run on Ray, on this machine: parts are killed while it goes on, and nothing is lost or repeated."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from run_laws import each_task_was_trained_on_once

from areal_jax import loop
from areal_jax.assembly import Run, TracedJudge
from areal_jax.clustered import train_on_cluster
from areal_jax.config import Experiment, load_experiment
from areal_jax.launch.connection import Connection
from areal_jax.launch.engines import Engines
from areal_jax.launch.judges import Judges
from areal_jax.launch.trainers import Trainers
from areal_jax.metrics import jsonl
from areal_jax.run_plan import make_plan

STEPS, GROUPS, SAMPLES, STALENESS = 12, 4, 2, 2
SMALL = (
    "launch=ray",
    "launch.trainer_hosts=2",
    "launch.rollout_engines=2",
    "launch.reward_workers=2",
    "launch.report_every_s=0.1",
    "launch.attempts=1",
    f"num_steps={STEPS}",
    "tasks.num_tasks=600",
    f"rollout.groups_per_batch={GROUPS}",
    f"rollout.samples_per_group={SAMPLES}",
    f"rollout.max_staleness={STALENESS}",
    "engine.num_slots=8",
    "engine.max_new_tokens=64",
    "engine.steps_per_dispatch=4",
    "trainer.num_mini_batches=1",
    "trainer.rows_per_micro_batch=4",
    "rewards.num_workers=1",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=2",
    "checkpoint.export_hf=false",
)


def kill(connection: Connection) -> str:
    os.kill(connection.process_id, signal.SIGKILL)
    return connection.name


def family(connection: Connection) -> list[psutil.Process]:
    """The process of a part with all that it has started, such as judging processes."""
    process = psutil.Process(connection.process_id)
    return [process, *process.children(recursive=True)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_loses_no_task_with_an_engine_a_reward_worker_and_a_trainer_host(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    experiment = load_experiment("aime", SMALL)
    assert isinstance(experiment, Experiment)
    killed: list[str] = []
    processes: list[psutil.Process] = []

    async def killing(run: Run[Trainers]) -> None:
        """An engine, then a reward worker, then, in the run's first life, the trainer host; each a few steps after the last."""
        assert isinstance(run.engine, Engines) and isinstance(run.judge, TracedJudge)
        judges = run.judge.counted
        assert isinstance(judges, Judges)
        victims: list[tuple[int, Sequence[Connection]]] = [(2, run.engine.connections), (5, judges.connections)]
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
            processes.extend(process for connection in run.engine.connections for process in family(connection))
        finally:
            killer.cancel()

    with caplog.at_level(logging.WARNING):
        asyncio.run(train_on_cluster(make_plan(experiment), tmp_path, train, resume=False, source="aime"))

    assert [name.rpartition(" ")[0] for name in killed] == ["engine", "reward worker", "trainer host"]
    assert all(any(name in message for message in caplog.messages) for name in killed), caplog.messages
    each_task_was_trained_on_once(tmp_path, num_steps=STEPS, groups=GROUPS, samples=SAMPLES, max_staleness=STALENESS)
    assert all(row["gate/rejected"] == 0 for row in jsonl.read(tmp_path / "metrics.jsonl") if "gate/rejected" in row)
    assert len(processes) > len(killed), "judging processes die with their worker"
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
