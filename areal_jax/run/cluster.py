"""A run on a cluster: this process is the controller; workers train, decode and grade."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.recovery import deserialize
from areal_jax.checkpoint.store import SAVE_TIMEOUT_S, CheckpointStore
from areal_jax.cluster.config import Ray
from areal_jax.cluster.connection import Connection
from areal_jax.cluster.placement import Cluster, connect
from areal_jax.cluster.trainers import Trainers
from areal_jax.cluster.weight_broadcast import WeightBroadcast
from areal_jax.config.load import written_settings
from areal_jax.errors import NotStarted, WorkerDied
from areal_jax.run.adaptive_hosts import AdaptiveHosts
from areal_jax.run.build import Run, make_run
from areal_jax.run.callbacks import RunControl
from areal_jax.run.claim import Claim
from areal_jax.run.grading import kinds_of_tasks, probe_rewards, task_sets
from areal_jax.run.plan import Plan, possible_splits
from areal_jax.run.recording import start_progress, start_recording
from areal_jax.run.worker_pool import EngineCount, WorkerPool, all_or_none, start_worker

logger = logging.getLogger(__name__)

TRAINER = "areal_jax.run.trainer_host:TrainerHost"

COLLECT_TIMEOUT_S = 600.0
"""Longest time for trainer hosts to put a version of any size into the object store."""


async def train_on_cluster(
    plan: Plan,
    folder: Path,
    train: Callable[[Run[Trainers]], Coroutine[Any, Any, None]],
    *,
    resume: bool,
    source: str | None,
    claim: Claim | None = None,
    control: RunControl | None = None,
) -> None:
    """Train; where a trainer host dies, resume from the last checkpoint, launch.attempts times.

    Args:
        train: trains a run; once for each attempt.
        source: name or file of the experiment.
        claim: on the folder; it keeps trainer hosts of an earlier attempt from writing.
        control: the caller's callbacks and stop requests.

    Raises:
        WorkerDied: more trainer hosts died than launch.attempts.
        NotStarted: a worker could not start.
    """
    launch = plan.experiment.launch
    assert isinstance(launch, Ray)
    splits = possible_splits(plan) if plan.experiment.placement.adaptive else ()
    with connect(launch, [launch.at_split(rollout) for rollout in splits]) as cluster:
        for left in range(launch.attempts, -1, -1):
            try:
                async with build_cluster_run(
                    plan,
                    folder,
                    cluster,
                    resume=resume,
                    source=source,
                    claim=claim,
                    control=control,
                ) as run:
                    await run.trainer.run_while_alive(train(run))
                return
            except WorkerDied as loss:
                if not left or isinstance(loss, NotStarted):
                    raise
                logger.error(
                    "%s; the run resumes from its last checkpoint, %d restarts left",
                    loss,
                    left - 1,
                )
                resume = True


@asynccontextmanager
async def build_cluster_run(
    plan: Plan,
    folder: Path,
    cluster: Cluster,
    *,
    resume: bool,
    source: str | None,
    claim: Claim | None = None,
    control: RunControl | None = None,
) -> AsyncIterator[Run[Trainers]]:
    """Build a run whose components are processes of a Ray cluster, and end them at the end of the
    block.

    The function has more than 60 lines because it lists the parts in the order of their start.

    Args:
        source: name or file of the experiment.
        claim: on the folder.
        control: the caller's callbacks and stop requests.

    Raises:
        WorkerDied: a trainer host died, here or in the block.
        InsufficientResources: the cluster has no room.
    """
    experiment = plan.experiment
    async with AsyncExitStack() as stack:
        if claim is not None:
            await asyncio.to_thread(claim.fence)
        store = CheckpointStore(folder / CHECKPOINTS, experiment.checkpoint.keep)
        stack.callback(store.close)
        saved_version = store.latest_version() if resume else None
        progress = start_progress(stack, plan, folder, saved_version)
        arguments = written_settings(experiment), source
        token = claim.token if claim else None

        async def start_from(version: int | None) -> list[Connection]:
            return await start_hosts(cluster, *arguments, str(folder.absolute()), version, token)

        async def start_trainers() -> tuple[Trainers, Any, float]:
            start_s = time.perf_counter()
            trainers = Trainers(await start_from(saved_version))
            stack.push_async_callback(trainers.close, SAVE_TIMEOUT_S)
            beside = await trainers.join(cluster.config.start_timeout_s)
            return trainers, beside, time.perf_counter() - start_s

        pool = _make_pool(stack, plan, folder, cluster, arguments, progress.say)
        stage = progress.stage("starting trainer hosts, engines and reward workers")
        async with cluster.reserve():
            with stage:
                (trainers, beside, start_s), _ = await all_or_none(start_trainers(), pool.start())
        restored = None if beside is None else deserialize(beside)
        version = trainers.version if resume else None
        recording = start_recording(
            stack, plan, folder, progress, version=version, restored=restored
        )
        broadcast = WeightBroadcast(trainers, pool.engines, collect_timeout_s=COLLECT_TIMEOUT_S)
        stack.push_async_callback(broadcast.close)
        broadcast.publish(trainers.version, trainers.params)
        run = await make_run(
            stack,
            plan,
            folder,
            trainer=trainers,
            writer=trainers,
            weight_channel=broadcast,
            engine=pool.engines,
            grader=pool.graders,
            recording=recording,
            restored=restored,
            control=control or RunControl(),
        )
        if experiment.placement.adaptive:
            run.hosts = AdaptiveHosts(
                run, cluster, pool, broadcast, start_hosts=start_from, start_s=start_s
            )
        yield run


def _make_pool(
    stack: AsyncExitStack,
    plan: Plan,
    folder: Path,
    cluster: Cluster,
    arguments: tuple[Any, ...],
    say: Callable[[str], None],
) -> WorkerPool:
    """Make the pool of engines and reward workers, which the stack closes; none is started."""
    config, experiment = cluster.config, plan.experiment
    pool = WorkerPool(
        cluster,
        arguments,
        sorted(kinds_of_tasks(plan)),
        lambda grader: probe_rewards(grader, experiment, *task_sets(plan), say=say),
        (lambda: cluster.config.rollout_engines)
        if experiment.placement.adaptive
        else EngineCount(folder, config).read,
    )
    stack.push_async_callback(pool.close)
    say(
        f"trainer hosts: {config.trainer_hosts}, engines: {config.rollout_engines}, reward "
        f"workers: {config.reward_workers}, as processes of Ray "
        f"({cluster.accelerator if cluster.accelerator != 'none' else 'CPUs'})"
    )
    return pool


async def start_hosts(cluster: Cluster, *arguments: Any) -> list[Connection]:
    """Start all trainer hosts, which are not joined; where one fails, the others are ended.

    Args:
        arguments: as of `TrainerHost`.
    """
    started = list[Connection]()

    async def host(number: int) -> None:
        connection, _ = await start_worker(cluster, "trainer host", number, TRAINER, *arguments)
        started.append(connection)

    async with AsyncExitStack() as on_failure:
        on_failure.push_async_callback(
            lambda: asyncio.gather(*(connection.close() for connection in started))
        )
        await all_or_none(*(host(number) for number in range(cluster.config.trainer_hosts)))
        on_failure.pop_all()
    return started
