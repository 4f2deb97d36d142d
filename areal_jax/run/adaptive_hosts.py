"""placement.adaptive under launch=Ray: trainer hosts become engines, and engines trainer hosts.

The processes of `jax.distributed` are fixed, so that a move ends all trainer hosts and starts new
ones from a checkpoint. Engines that stay go on meanwhile, the requests of engines that leave
continue on them, and new engines join when the trainer hosts have started.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial

import chz
import jax

from areal_jax.checkpoint.checksums import CheckpointError
from areal_jax.checkpoint.store import SAVE_TIMEOUT_S
from areal_jax.cluster.config import Ray
from areal_jax.cluster.connection import Connection
from areal_jax.cluster.placement import Cluster
from areal_jax.cluster.trainers import Trainers
from areal_jax.cluster.weight_broadcast import WeightBroadcast
from areal_jax.errors import ConfigError, NotSaved, NotStarted, config_errors
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.run.build import Run
from areal_jax.run.compiled_programs import abstract_trainer
from areal_jax.run.make_plan import make_training_plan
from areal_jax.run.plan import possible_splits
from areal_jax.run.recording import CHECKPOINT, TRAINER
from areal_jax.run.split_meter import SplitMeter, describe_reason
from areal_jax.run.worker_pool import WorkerPool
from areal_jax.threads import run_in_thread

FIRST_STALL = 2.0
"""Estimated duration of the first move, as a multiple of the start of the first trainer hosts: a
checkpoint is written and read besides."""

WEIGHTS_WAIT_S = 60.0
"""Longest wait for engines to have the version with which they generate during a move, in seconds;
without it they get the version after the move."""


class AdaptiveHosts:
    """Measures the steps of a run, and moves trainer hosts' devices where a gain is forecast.

    Used from the asyncio thread.
    """

    def __init__(
        self,
        run: Run[Trainers],
        cluster: Cluster,
        pool: WorkerPool,
        broadcast: WeightBroadcast,
        *,
        start_hosts: Callable[[int], Awaitable[list[Connection]]],
        start_s: float,
    ) -> None:
        """
        Args:
            run: Its recording receives one line for each move.
            cluster: Its `config` has the present split.
            pool: Engines of the run.
            broadcast: Weight channel of the run.
            start_hosts: Starts trainer hosts, not joined, from the checkpoint of a version.
            start_s: Seconds that the start of the first trainer hosts took.
        """
        self._plan, self._trainers, self._recording = run.plan, run.trainer, run.recording
        self._cluster, self._pool, self._broadcast = cluster, pool, broadcast
        self._checkpointing, self._start_hosts, self.start_s = (
            run.checkpointing,
            start_hosts,
            start_s,
        )
        self._meter = SplitMeter(
            cluster.config.num_devices, possible_splits(run.plan), self.rollout_devices
        )
        self._was_complete = False

    @property
    def rollout_devices(self) -> int:
        """Number of devices in engines."""
        config = self._cluster.config
        return config.rollout_engines * config.engine_devices

    @property
    def is_ready(self) -> bool:
        """Whether all engines of the split run, which a move requires."""
        return self._pool.is_complete

    def observe(self, row: Mapping[str, float]) -> dict[str, float]:
        """Measure a step by its row of metrics, if all engines ran; return counts of moves."""
        was_complete, self._was_complete = self._was_complete, self.is_ready
        # Steps without a report of an engine are shorter than a move could matter for.
        is_measured = was_complete and self._was_complete and "rollout/wait_s" in row
        self._meter.observe(row, self._cluster.config.rollout_engines if is_measured else None)
        return self.counters()

    def counters(self) -> dict[str, float]:
        """Return counts of moves since the run started here, or was resumed after a death."""
        return self._meter.counters()

    async def adapt(self, save: Callable[[], Awaitable[None]]) -> None:
        """Move to the best split, if all engines run and the move pays.

        Args:
            save: Saves a checkpoint of the present version.
        """
        num_left = self._plan.experiment.num_steps - self._trainers.version
        if self.is_ready and (
            move := self._meter.chooser.choose(num_left, lambda _: self._cost_s())
        ):
            await self.move(move.rollout, save, describe_reason(move))

    async def move(self, rollout: int, save: Callable[[], Awaitable[None]], reason: str) -> None:
        """Move to a split, between two steps, while `is_ready`. One that is impossible is not
        chosen again; where its trainer hosts do not start, those before are started again.

        Args:
            rollout: Number of devices in engines.
            save: Saves a checkpoint of the present version.
            reason: Shown with the measured seconds of the move.

        Raises:
            WorkerDied: A trainer host died.
        """
        start_s, trainers, before = time.perf_counter(), self._trainers, self._cluster.config
        launch, version = before.at_split(rollout), trainers.version
        with self._recording.span(TRAINER, f"move to {rollout} rollout devices"):
            try:
                await run_in_thread(partial(self._require_mesh, launch), "check a split")
                leaving = self._pool.choose_leaving(launch.trainer_hosts - before.trainer_hosts)
                await save()
                with self._recording.span(CHECKPOINT, f"version {version} is written"):
                    await run_in_thread(trainers.finish_saving, "checkpoint")
                self._checkpointing.require_saved(version)
            except (ConfigError, CheckpointError, NotSaved) as refusal:
                self._refuse(rollout, refusal)
                return
            await self._wait_for_engines(version)
            async with self._pool.without(leaving):
                await self._broadcast.withdraw()
                await trainers.close(SAVE_TIMEOUT_S)
                try:
                    await self._start(launch, version)
                except (ConfigError, NotStarted) as refusal:
                    self._refuse(rollout, refusal)
                    await self._start(before, version)
            # Pulled by the engines that lack it.
            self._broadcast.publish(version, trainers.params)
        moved_to = self.rollout_devices
        self._was_complete = False
        self._meter.moved(moved_to, time.perf_counter() - start_s)
        if moved_to == rollout:
            self._recording.say(
                f"placement.adaptive: {before.rollout_engines} -> {launch.rollout_engines} "
                f"engines, {before.trainer_hosts} -> {launch.trainer_hosts} trainer hosts, before "
                f"step {version}; {reason}the move took {self._meter.stall_s:.2g} s"
            )

    async def _start(self, launch: Ray, version: int) -> None:
        """Start the trainer hosts of a split from a checkpoint, and join them."""
        self._cluster.config = launch
        self._trainers.use(await self._start_hosts(version))
        async with AsyncExitStack() as on_failure:
            on_failure.push_async_callback(self._trainers.close, SAVE_TIMEOUT_S)
            await self._trainers.join(launch.start_timeout_s)
            on_failure.pop_all()

    async def _wait_for_engines(self, version: int) -> None:
        """Wait until engines have a version, with which they generate during the move."""
        try:
            await self._pool.engines.wait_for_version(version, WEIGHTS_WAIT_S)
        except TimeoutError as late:
            self._recording.say(f"warning: {late}; devices move without it")

    def _require_mesh(self, launch: Ray) -> None:
        """Require that a trainer can be made on the trainer hosts of a split."""
        experiment = chz.replace(self._plan.experiment, launch=launch)
        devices = jax.devices()[: launch.trainer_hosts * launch.trainer_devices]
        with config_errors():
            mesh = make_train_mesh(experiment.placement, devices)
            abstract_trainer(make_training_plan(experiment, mesh))

    def _refuse(self, rollout: int, refusal: Exception) -> None:
        self._meter.chooser.splits.discard(rollout)
        self._recording.say(
            f"placement.adaptive: {rollout} rollout devices are impossible: {refusal}"
        )

    def _cost_s(self) -> float:
        return self._meter.stall_s or FIRST_STALL * self.start_s
