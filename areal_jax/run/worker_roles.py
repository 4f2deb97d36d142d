"""Roles of the worker processes of a run on a cluster: trainer host, engine, reward worker.

A role reads the settings as the run wrote them, builds the same components as a run in one process,
and reports facts that the run compares.
"""

from __future__ import annotations

import asyncio
import platform
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from areal_jax import __version__
from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.recovery import decode, pack, task_from_json, unpack
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.cluster import wire
from areal_jax.cluster.config import Ray
from areal_jax.cluster.worker import Emit
from areal_jax.config.experiment import Experiment
from areal_jax.config.load import read_settings
from areal_jax.engine.decode import laid_out
from areal_jax.engine.engine_loop import EngineLoop, EngineStatus
from areal_jax.errors import ConfigError
from areal_jax.models import lora
from areal_jax.parallel.hosts import join
from areal_jax.parallel.mesh import make_train_mesh
from areal_jax.records import NO_VERSION, Completion
from areal_jax.rewards.service import RewardService
from areal_jax.run.checkpointing import Checkpointer
from areal_jax.run.claim import Writer
from areal_jax.run.make_plan import make_training_plan
from areal_jax.run.memory_checks import RESIDENT, format_bytes, format_memory
from areal_jax.run.models import decoding_mesh, find_decoding_policy
from areal_jax.run.plan import TrainingPlan
from areal_jax.run.trainer import initial_weights, rl_trainer
from areal_jax.trainer.state import trained
from areal_jax.weights.object_store import ShardPublisher, ShardReader
from areal_jax.weights.rolling import RollingSource
from areal_jax.workflows.from_config import find_tools_config

Facts = dict[str, Any]

STATE_EVERY_S = 1.0
"""Shortest interval at which an engine reports its weights and its requests."""

_ALL = -1
"""Number of reported tokens of a finished sample."""


def releases() -> Facts:
    """Versions that must be equal in all processes of a run."""
    return {
        "areal_jax": __version__,
        "jax": jax.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


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
                "that all trainer hosts share"
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
        none in time, and a reason as text where none is being published."""
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
        beside = unpack(await packed[0])
        await asyncio.to_thread(self._checkpointer.save, version, beside)

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
        params, base = initial_weights(plan)
        self._trainer = rl_trainer(plan, params, base)
        del params  # the trainer has its own copy
        store = CheckpointStore(self._folder / CHECKPOINTS, self._experiment.checkpoint.keep)
        self._checkpointer = Checkpointer(
            plan=plan, folder=self._folder, trainer=self._trainer, base=base, store=store
        )
        beside = (
            None
            if self._saved_version is None
            else pack(self._checkpointer.restore(self._saved_version))
        )
        self._trainer.warm_up()
        self._publisher = ShardPublisher(
            lambda params: laid_out(plan.policy, params, plan.compute_dtype)
        )
        return {"version": self._trainer.version, "beside": beside}

    def _step(
        self, packed: Any
    ) -> tuple[dict[str, Any], Sequence[Sequence[Any]], Mapping[str, tuple[float, float]]]:
        groups = decode(unpack(packed))[0].buffered
        found = self._trainer.step(groups)
        metrics = {
            name: tuple(float(part) for part in value) if isinstance(value, tuple) else float(value)
            for name, value in found.metrics.items()
        }
        return metrics, found.stale, self._publisher.metrics()


class EngineHost:
    """One engine on all devices of its process."""

    def __init__(self, emit: Emit, settings: str, source: str | None) -> None:
        """Find the policy, compile and start the engine loop. Arguments as of `TrainerHost`."""
        self._emit, self._experiment = emit, read_settings(settings, source)
        exp = self._experiment
        mesh = decoding_mesh(exp.placement, "placement.rollout_devices")
        found = find_decoding_policy(exp.policy, exp.engine, mesh, None, seed=exp.seed)
        launch, engine = exp.launch, found.engine
        assert isinstance(launch, Ray)
        if engine.mesh.size != launch.engine_devices:
            raise ConfigError(
                f"an engine has {engine.mesh.size} devices, expected "
                f"launch.engine_devices={launch.engine_devices}"
            )
        self._found, self._report_every_s = found, launch.report_every_s
        base = found.load_base()
        self._reader = ShardReader(
            engine.param_shardings,
            jax.eval_shape(engine.layout, trained(found.policy).abstract),
            complete=None
            if base is None
            else lambda arrived: lora.attach(found.policy, base, arrived),
            on_event=lambda name, _start_s, _end_s, args: emit(name, args["version"]),
            on_failure=lambda version, why: emit("update_failed", (version, why)),
        )
        self._rolling_source = RollingSource(
            self._reader,
            request_turn=lambda ticket, _: emit("turn_requested", ticket),
            end_turn=lambda ticket: emit("turn_ended", ticket),
        )
        self._engine_loop = EngineLoop(
            engine, self._rolling_source, on_event=self._start_engine_loop
        )
        engine.warm_up()
        self._engine_loop.start()
        # Number of reported tokens by request and sample.
        self._reported: dict[str, list[int]] = {}
        self._status = EngineStatus(NO_VERSION, (), 0)
        self._reporters: list[asyncio.Task[None]] = []

    async def begin(self) -> Facts:
        """Start reporting."""
        self._reporters = [
            asyncio.create_task(report(), name="reporter")
            for report in (self._report, self._report_state)
        ]
        engine = self._found.engine
        facts = {"num_slots": engine.config.num_slots, "policy": self._found.fingerprint()}
        return releases() | facts | {"devices": describe_devices(list(engine.mesh.devices.flat))}

    async def submit(self, plain: Any) -> Any:
        """Answer a request. A cancelled request frees its slots."""
        request = wire.decode_request(plain)
        reported = self._reported[request.id] = [
            len(sampled.tokens) for sampled in request.resume
        ] or [0] * request.num_samples
        try:
            return wire.encode_completions(await self._engine_loop.submit(request))
        finally:
            if self._reported.get(request.id) is reported:
                del self._reported[request.id]

    async def snapshot(self) -> dict[str, Any]:
        """Partial completions of all unfinished requests."""
        return {
            name: wire.encode_completions(sampled)
            for name, sampled in (await self._engine_loop.snapshot()).items()
        }

    def end_sample(self, request_id: str, sample: int) -> None:
        """As `EngineLoop.end_sample`."""
        self._engine_loop.end_sample(request_id, sample)

    def update_weights(self, version: int, contributions: Sequence[Any]) -> None:
        """Receive references to the weights of a version."""
        self._reader.pull(version, contributions)

    def grant_turn(self, ticket: float) -> None:
        """Allow the engine to switch to the newest weights that it has."""
        self._rolling_source.grant_turn(ticket)

    async def end(self) -> None:
        """Stop the engine loop."""
        for reporter in self._reporters:
            reporter.cancel()
        await asyncio.to_thread(self._engine_loop.close)
        await asyncio.to_thread(self._reader.close)

    def _start_engine_loop(
        self, name: str, start_s: float, end_s: float, args: Mapping[str, int | float]
    ) -> None:
        if name == "swap":
            self._rolling_source.complete_swap()

    async def _report(self) -> None:
        """Report sampled tokens and metrics at an interval."""
        while True:
            await asyncio.sleep(self._report_every_s)
            sampled = await self._engine_loop.snapshot()
            news = {
                name: found
                for name, completions in sampled.items()
                if (found := self._news(name, completions))
            }
            if news:
                self._emit("progress", news)
            self._emit("measures", self._engine_loop.metrics())
            self._status = await self._engine_loop.status()

    async def _report_state(self) -> None:
        """Report versions and requests at an interval, also while the engine loop is busy."""
        while True:
            self._emit(
                "state",
                {
                    "version": self._reader.newest_version,
                    "pulling": self._reader.pending_version,
                    "decoding": self._status.version,
                    "requests": list(self._reported),
                    "running": list(self._status.running),
                },
            )
            await asyncio.sleep(max(self._report_every_s, STATE_EVERY_S))

    def _news(self, name: str, completions: Sequence[Completion]) -> dict[int, Any]:
        """New tokens since the last report: by sample, the index of the first one, and the
        tokens."""
        reported, news = self._reported.get(name, []), dict[int, Any]()
        for sample, (start, sampled) in enumerate(zip(reported, completions, strict=False)):
            is_finished = sampled.stop_reason != "suspended"
            if start != _ALL and (is_finished or len(sampled.tokens) > start):
                news[sample] = start, wire.encode_completion(sampled.slice(start))
                reported[sample] = _ALL if is_finished else len(sampled.tokens)
        return news


class RewardWorker:
    """A reward service, with its own grading processes."""

    def __init__(self, emit: Emit, settings: str, source: str | None, kinds: Sequence[str]) -> None:
        """
        Args:
            emit: as of `TrainerHost`; so are settings and source.
            kinds: of tasks that will be graded.
        """
        experiment = read_settings(settings, source)
        assert isinstance(experiment.launch, Ray)
        self._emit, self._report_every_s = emit, experiment.launch.report_every_s
        self._service = RewardService(
            experiment.rewards, kinds, find_tools_config(experiment.workflow), logs_failures=False
        )
        self._reporter: asyncio.Task[None] | None = None

    async def begin(self) -> Facts:
        """Start the grading processes, and reporting."""
        await self._service.start()
        self._reporter = asyncio.create_task(self._report(), name="reporter")
        return releases()

    async def grade_answer(self, task: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Grade an answer, as `RewardService.__call__`."""
        return asdict(await self._service(task_from_json(task), answer))

    async def grade(self, task: Mapping[str, Any], answer: str) -> dict[str, Any]:
        """Grade an answer without counting it, as `RewardService.grade`."""
        return asdict(await self._service.grade(task_from_json(task), answer))

    async def use(self, tool: str, argument: str) -> dict[str, Any]:
        """Execute a tool call, as `RewardService.use`."""
        return asdict(await self._service.use(tool, argument))

    async def end(self) -> None:
        """End all grading processes."""
        if self._reporter is not None:
            self._reporter.cancel()
        await self._service.close()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(self._report_every_s)
            self._emit("counts", self._service.counters())


def require_memory(plan: TrainingPlan, devices: Sequence[jax.Device]) -> None:
    """Require that each device can hold its resident memory; unknown on CPUs.

    Raises:
        ConfigError: it cannot; the message has the sizes.
    """
    has = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    parts = {name: size for name, size in plan.train_bytes().items() if name in RESIDENT}
    if sum(parts.values()) > has > 0:
        raise ConfigError(
            f"{describe_devices(devices)} cannot hold the policy: {format_memory(parts)} are needed on "
            f"each, which has {format_bytes(has)}; raise launch.trainer_hosts or launch.trainer_devices, or set "
            "placement.train_fsdp"
        )


def describe_devices(devices: Sequence[jax.Device]) -> str:
    """Number, kind and host of devices."""
    return f"{len(devices)} {devices[0].device_kind} at {socket.gethostname()}"
