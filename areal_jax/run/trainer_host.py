"""Role of a trainer host: one of the processes that train together on a cluster."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.recovery import decode, deserialize, serialize
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.cluster.config import Ray
from areal_jax.cluster.worker import Emit
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import read_settings
from areal_jax.engine.decode_state import lay_out_params
from areal_jax.errors import ConfigError
from areal_jax.parallel.hosts import join
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.run.checkpointing import Checkpointer
from areal_jax.run.claim import Writer
from areal_jax.run.compiled_programs import refusing_what_does_not_fit
from areal_jax.run.make_plan import make_training_plan
from areal_jax.run.memory_checks import RESIDENT, format_bytes, format_memory
from areal_jax.run.plan import TrainingPlan
from areal_jax.run.reward_worker import Facts, releases
from areal_jax.run.trainer import initial_weights, rl_trainer
from areal_jax.run.worker_roles import describe_devices
from areal_jax.weights.object_store import ShardPublisher


class TrainerHost:
    """One of the processes that train together on one mesh."""

    def __init__(
        self,
        emit: Emit,
        settings: str,
        source: str | None,
        run_folder: str,
        saved_version: int | None,
        claim_token: str | None = None,
    ) -> None:
        """
        Args:
            emit: sends an event to the run.
            settings: the experiment's settings, in the form of config.json.
            source: the experiment's name or file, which may define classes that the settings name.
            run_folder: a folder that all hosts share.
            saved_version: version of the checkpoint to resume from.
            claim_token: token of the claim on the folder, which is required for writing; None: no
                claim is required.
        """
        self._experiment = read_settings(settings, source)
        try:
            self._writer = None if claim_token is None else Writer(Path(run_folder), claim_token)
        except FileNotFoundError as error:
            raise ConfigError(
                f"{run_folder} is not on {socket.gethostname()}; set --run-folder to a folder "
                "that all trainer hosts share; for gs:// and s3://, set AREAL_JAX_CACHE to one"
            ) from error
        self._folder, self._saved_version = Path(run_folder), saved_version
        self._num_steps_under_way = 0

    async def begin(self) -> Facts:
        """Report the releases; the trainer is built by `join`, when all hosts are running."""
        return releases()

    async def join(self, coordinator: str, host: int, num_hosts: int, timeout_s: float) -> Facts:
        """Connect to the other hosts, build the trainer, load its weights and compile."""
        return await asyncio.to_thread(self._join, coordinator, host, num_hosts, timeout_s)

    async def step(
        self, packed: Sequence[Any]
    ) -> tuple[dict[str, Any], Sequence[Sequence[Any]], Mapping[str, tuple[float, float]]]:
        """Run one trainer step.

        Args:
            packed: reference to the groups in the object store.

        Returns:
            Metrics, stale tokens, and metrics of weight publishing since the last step.
        """
        groups = await packed[0]
        # Until the step ends, the parameters belong to no version. `publish` runs in this thread.
        self._num_steps_under_way += 1
        try:
            return await asyncio.to_thread(self._step, groups)
        finally:
            self._num_steps_under_way -= 1

    def publish(self, version: int, again: bool = False) -> None:
        """Publish a version, unless it is published or no longer the trainer's; never waits.

        Args:
            again: put it into the object store again.
        """
        if self._num_steps_under_way == 0 and self._trainer.version == version:
            self._publisher.publish(version, self._trainer.params, again=again)

    async def contribution(self, after: int, timeout_s: float) -> Any:
        """References to this host's shards of its newest version above `after`; None where there is
        none in time, and a reason as text where none is being published.
        """
        if (
            found := await asyncio.to_thread(self._publisher.next_contribution, after, timeout_s)
        ) is not None:
            return found
        return (
            None
            if self._publisher.is_busy
            else self._publisher.last_failure or "nothing newer was published"
        )

    async def save(self, version: int, packed: Sequence[Any]) -> None:
        """Start writing a checkpoint.

        Args:
            packed: reference to the rollout state in the object store.
        """
        self._require_claim()
        beside = deserialize(await packed[0])
        await asyncio.to_thread(self._checkpointer.save, version, beside)

    async def finish_saving(self) -> None:
        """Wait for the checkpoint that is being written."""
        await asyncio.to_thread(self._checkpointer.store.wait)

    async def write_results(self, version: int) -> list[str]:
        """As `Checkpointer.write_results`; a collective operation of all hosts."""
        self._require_claim()
        return await asyncio.to_thread(self._checkpointer.write_results, version)

    async def end(self) -> None:
        """Finish the checkpoint that is being written."""
        if hasattr(self, "_checkpointer"):
            await asyncio.to_thread(self._publisher.close)
            await asyncio.to_thread(self._checkpointer.store.close)
        if self._writer is not None:
            self._writer.close()

    def _require_claim(self) -> None:
        if self._writer is not None:
            self._writer.require()

    def _join(self, coordinator: str, host: int, num_hosts: int, timeout_s: float) -> Facts:
        if num_hosts > 1:
            try:
                join(coordinator, num_hosts, host, timeout_s)
            except OSError as error:
                raise ConfigError(
                    f"trainer host {host} cannot connect to the others: {error}"
                ) from error
        devices, launch = jax.devices(), self._experiment.launch
        assert isinstance(launch, Ray) and isinstance(self._experiment, Experiment)
        if len(devices) != num_hosts * launch.trainer_devices:
            raise ConfigError(
                f"{num_hosts} trainer hosts have {len(devices)} devices together, expected "
                f"launch.trainer_devices={launch.trainer_devices} each"
            )
        plan = make_training_plan(
            self._experiment, make_train_mesh(self._experiment.placement, devices)
        )
        require_memory(plan, devices)
        # The trainer has a copy of its own.
        self._trainer = rl_trainer(plan, *initial_weights(plan))
        store = CheckpointStore(self._folder / CHECKPOINTS, self._experiment.checkpoint.keep)
        self._checkpointer = Checkpointer(
            plan=plan, folder=self._folder, trainer=self._trainer, store=store
        )
        beside = (
            None
            if self._saved_version is None
            else serialize(self._checkpointer.restore(self._saved_version))
        )
        with refusing_what_does_not_fit(plan, self._trainer):
            self._trainer.warm_up()
        self._publisher = ShardPublisher(
            lambda params: lay_out_params(
                plan.policy, params, plan.compute_dtype, plan.experiment.engine.weights_dtype
            )
        )
        return {"version": self._trainer.version, "beside": beside}

    def _step(
        self, packed: Any
    ) -> tuple[dict[str, Any], Sequence[Sequence[Any]], Mapping[str, tuple[float, float]]]:
        groups = decode(deserialize(packed))[0].buffered
        found = self._trainer.step(groups)
        metrics = {
            name: tuple(float(part) for part in value) if isinstance(value, tuple) else float(value)
            for name, value in found.metrics.items()
        }
        return metrics, found.stale, self._publisher.metrics()


def require_memory(plan: TrainingPlan, devices: Sequence[jax.Device]) -> None:
    """Require that each device can hold its resident memory; unknown on CPUs.

    Raises:
        ConfigError: it cannot; the message has the sizes.
    """
    has = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    parts = {name: size for name, size in plan.train_bytes().items() if name in RESIDENT}
    if sum(parts.values()) > has > 0:
        raise ConfigError(
            f"{describe_devices(devices)} cannot hold the policy: expected at least "
            f"{format_memory(parts)} on each, found {format_bytes(has)}; raise "
            "launch.trainer_hosts or launch.trainer_devices, or set placement.train_fsdp"
        )
