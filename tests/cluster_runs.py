"""A small run on a cluster, and the processes of its workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
from run_laws import broken_laws
from tiny_runs import tiny_settings

from areal_jax.cluster.registry import WorkerHandle
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import load_experiment
from areal_jax.metrics import jsonl

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
    # The fewest programs in every engine.
    "engine.prefill_chunk_tokens=32",
    "trainer.num_mini_batches=1",
    "trainer.rows_per_micro_batch=4",
    "rewards.num_workers=1",
    "rewards.timeout_s=60",
    "evaluation.every_steps=0",
    "checkpoint.every_steps=2",
    "checkpoint.export_hf=false",
    "metrics.tensorboard=false",
)


def small_run(*settings: str) -> Experiment:
    """Load the small experiment with further overrides."""
    experiment = load_experiment("aime", *SMALL, *settings)
    assert isinstance(experiment, Experiment)
    return experiment


def tiny_run(folder: Path, *settings: str) -> Experiment:
    """The small run with a tiny policy, whose answers of random tokens have their full length, and
    a reward for half of them.
    """
    return small_run(*tiny_settings(folder), *settings)


def find_faults(run_folder: Path, num_steps: int = STEPS) -> list[str]:
    """Return the laws that a finished small run broke, and its steps with rejected groups."""
    rows = jsonl.read(run_folder / "metrics.jsonl")
    rejected = [
        f"rejected groups by step {row['version']}" for row in rows if row.get("rollout/rejected")
    ]
    return rejected + broken_laws(
        run_folder, num_steps=num_steps, groups=GROUPS, samples=SAMPLES, max_staleness=STALENESS
    )


def family(connection: WorkerHandle) -> list[psutil.Process]:
    """Return the process of a worker with its descendants, such as grading processes."""
    process = psutil.Process(connection.process_id)
    return [process, *process.children(recursive=True)]


def kill(connection: WorkerHandle) -> str:
    """Kill a worker without warning; return its name."""
    os.kill(connection.process_id, signal.SIGKILL)
    return connection.name
