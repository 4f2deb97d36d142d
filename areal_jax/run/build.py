"""A run: everything that lives while a policy trains, built from a plan and closed in reverse
order.

The file has more than 400 lines because a run and the order in which its parts start are one thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.recovery import Columns, decode
from areal_jax.checkpoint.store import CheckpointStore
from areal_jax.cluster.signals import Stopped
from areal_jax.cluster.watchdog import Stalled
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.data.pipeline import TaskStream
from areal_jax.errors import AllRejected, NotLearning
from areal_jax.metrics.meters import Meters
from areal_jax.models.decoder import Params
from areal_jax.parallel.executables import ExecutableFolder
from areal_jax.protocols import (
    Grader,
    MeasuredEngine,
    RunningRollouts,
    StepMetrics,
    Tools,
    VersionedTrainer,
    WeightPublisher,
    Workflow,
)
from areal_jax.records import RolloutState, Sampling
from areal_jax.rewards.workspace import Workspaces
from areal_jax.run.adaptive_split import AdaptiveSplit
from areal_jax.run.callbacks import RunControl
from areal_jax.run.checkpointing import Checkpointer, Checkpointing, CheckpointWriter
from areal_jax.run.compiled_programs import refusing_what_does_not_fit
from areal_jax.run.generation import WorkflowHost, start_host, training_sampling, workflow_of
from areal_jax.run.grading import (
    CountedGrader,
    TracedGrader,
    reward_service,
    start_rewards,
    task_sets,
)
from areal_jax.run.liveness import Liveness
from areal_jax.run.local_engines import LocalEngines
from areal_jax.run.opponents import start_opponents
from areal_jax.run.periodic_evaluation import PeriodicEvaluation
from areal_jax.run.plan import Plan, TrainingPlan
from areal_jax.run.recording import Recording, start_progress, start_recording
from areal_jax.run.stopping import StopRequest, stopping_on_signals
from areal_jax.run.summary import next_commands
from areal_jax.run.trainer import initial_weights
from areal_jax.threads import run_in_thread
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.versions import Versions
from areal_jax.workflows.environment import Opponent

AnyTrainer = TypeVar("AnyTrainer", bound=VersionedTrainer, covariant=True)
AnyVersions = TypeVar("AnyVersions", bound=Versions)


class MovableHosts(Protocol):
    """`adaptive_hosts.AdaptiveHosts`, which needs Ray."""

    def observe(self, row: Mapping[str, float]) -> dict[str, float]: ...
    async def adapt(self, save: Callable[[], Awaitable[None]]) -> None: ...


@dataclass(kw_only=True)
class Run(Generic[AnyTrainer]):
    """A run under way: what `loop.train` and `finetune.fine_tune` train with.

    The class has more than 200 lines because loops know a run as one object.
    """

    plan: Plan
    folder: Path
    trainer: AnyTrainer
    weight_channel: WeightPublisher
    engine: MeasuredEngine
    grader: Grader
    tools: Tools
    host: WorkflowHost | None
    """Runs agents or environments, where the workflow has them."""
    stop: StopRequest
    """Set on Ctrl-C or SIGTERM: the run ends after the current step."""
    stream: TaskStream[Any]
    """Tasks or examples, positioned where training continues."""
    restored: RolloutState | None
    """State of the rollouts in the checkpoint from which the run resumes."""
    recording: Recording
    evaluation: PeriodicEvaluation
    checkpointing: Checkpointing
    control: RunControl
    split: AdaptiveSplit | None = None
    hosts: MovableHosts | None = None
    """Trainer hosts whose devices move, with placement.adaptive under launch=Ray."""
    first_version: int = field(init=False)

    def __post_init__(self) -> None:
        self.first_version = self.trainer.version
        self.control.checkpoints(self.folder, call=False)

    @property
    def experiment(self) -> AnyExperiment:
        return self.plan.experiment

    @property
    def workflow(self) -> Workflow:
        """The workflow of training."""
        exp = self.experiment
        assert isinstance(exp, Experiment)
        num_samples = exp.rollout.samples_per_group
        return workflow_of(exp, self.plan.tokenizer, num_samples, self.tools, self.host)

    @property
    def sampling(self) -> Sampling:
        """How training samples."""
        return training_sampling(self.experiment, self.plan.tokenizer.stop_token_ids)

    @property
    def eval_examples(self) -> Sequence[Any]:
        return self.plan.eval_examples.examples

    @property
    def decodes(self) -> bool:
        return self.plan.decodes

    def record(
        self, version: int, metrics: StepMetrics, counters: Mapping[str, float] | None = None
    ) -> None:
        """Record the metrics of the step that trained `version`, with those of engine, weight
        channel and grader since the last step; stop a run that health checks end.

        Args:
            counters: of the rollouts.
        """
        meters = Meters()
        meters.update(metrics, "trainer/")
        if self.decodes:
            meters.update(self.engine.metrics(), "rollout/")
            meters.update(self.weight_channel.metrics(), "weights/")
        meters.update(counters or {}, "rollout/")
        if self.decodes and isinstance(self.grader, TracedGrader):
            meters.update(self.grader.counters(), "rewards/")
        if isinstance(self.host, Workspaces):
            meters.update(self.host.counters(), "rewards/")
        if (split := self.split or self.hosts) is not None:
            meters.update(split.observe(meters.flatten()), "rollout/")
        self.recording.record_step(version, meters)
        self.control.checkpoints(self.folder)
        if self.recording.health.active and self.experiment.health.stop:
            self.stop.set()

    async def adapt_split(self) -> None:
        """As `AdaptiveSplit.adapt`; not in an evaluation, which may withhold weights."""
        if self.split is not None and not self.evaluation.running:
            await self.split.adapt()

    async def adapt_hosts(self, save: Callable[[], Awaitable[None]]) -> None:
        """As `MovableHosts.adapt`; not in an evaluation, nor in a run that ends."""
        if self.hosts is not None and not self.evaluation.running and not self.stop.is_set():
            await self.hosts.adapt(save)

    async def save(self, version: int, state: RolloutState) -> None:
        """As `Checkpointing.save`, in a thread."""
        self.control.checkpoints(self.folder)  # before older ones are deleted
        await run_in_thread(partial(self.checkpointing.save, version, state), "checkpoint")

    @asynccontextmanager
    async def watched(self, rollouts: RunningRollouts | None = None) -> AsyncIterator[None]:
        """Watch the run's progress while the block runs.

        With rollouts, a run that stalls between two steps, or that rejects every group, ends with a
        checkpoint: finished groups are kept, and the run can resume once the fault is mended.

        Raises:
            Stalled: the run makes no progress, and no worker of it can be replaced.
        """
        grader = self.grader.counted if isinstance(self.grader, TracedGrader) else self.grader
        liveness = Liveness(
            experiment=self.experiment,
            trainer=self.trainer,
            engine=self.engine,
            components=(self.trainer, self.weight_channel, grader, self.engine),
            recording=self.recording,
            rollouts=rollouts,
        )
        try:
            async with liveness.watch():
                try:
                    yield
                except AllRejected:
                    if rollouts is not None:
                        await self.save(self.trainer.version, await rollouts.snapshot())
                        self.recording.report()
                    raise
        except Stalled as stalled:
            if rollouts is not None:
                if not stalled.during:
                    await self._save_stalled(stalled, rollouts)
                self.recording.report()
            raise

    async def _save_stalled(self, stalled: Stalled, rollouts: RunningRollouts) -> None:
        version = self.trainer.version
        try:
            await self.save(version, await rollouts.snapshot())
        except TimeoutError as error:
            stalled.add_note(f"no checkpoint of version {version} was saved: {error}")

    async def finish(self) -> None:
        """Write the results, evaluate the last version unless the run is asked to stop, and in any
        case write the report.

        Raises:
            NotSaved: the last version has no checkpoint.
            NotLearning: as `require_learning`.
            Stopped: a signal ended the run early.
            Exception: the error of a callback.
        """
        version = self.trainer.version
        failures = await self.evaluation.join(cancel=self.stop.is_set())
        is_evaluated = False

        async def evaluate() -> bool:
            await self.evaluation.evaluate(version)
            return True

        try:
            # Results first: an evaluation can be repeated.
            await asyncio.to_thread(self.checkpointing.write_results, version)
            self.control.checkpoints(self.folder)
            is_evaluated = bool(await self.stop.unless_set(evaluate()))
        finally:
            self.recording.report()
        if self.experiment.metrics.progress:
            self.recording.summarize(self.experiment.num_steps)
            if self.plan.policy.config.readout == "CausalLM":
                for line in next_commands(self.folder):
                    self.recording.say(line)
        for failure in failures:
            if isinstance(failure, OSError):
                raise failure
        self.checkpointing.require_saved(version)
        if self.control.error is not None:
            raise self.control.error
        self.require_learning()
        if self.control.stopped_by:
            return
        num_steps = self.experiment.num_steps
        if self.stop.is_set() and version < num_steps:
            raise Stopped(self.stop.number, f"after {version} of {num_steps} steps")
        if self.stop.is_set() and not is_evaluated:
            raise Stopped(
                self.stop.number,
                f"after all {num_steps} steps, before the last version was evaluated",
            )

    def require_learning(self) -> None:
        """Require that training changed the policy.

        Raises:
            NotLearning: health checks ended the run, or no step changed the policy.
        """
        health, version = self.recording.health, self.trainer.version
        num_steps, active = version - self.first_version, ", ".join(sorted(health.active))
        if active and self.experiment.health.stop:
            raise NotLearning(f"health.stop=true ends the run after {version} steps: {active}")
        if num_steps and not health.has_learnt and not self.stop.is_set():
            raise NotLearning(
                f"nothing was learnt: none of {num_steps} steps has changed the policy "
                f"({active or 'no gradient'})"
            )
        if active:
            self.recording.say(
                f"health: at the end of the run there is still {active}; the report says what to "
                "change"
            )


@asynccontextmanager
async def build_run(
    plan: Plan,
    folder: Path,
    *,
    resume: bool,
    make_trainer: Callable[[TrainingPlan, Params, Params | None], AnyVersions],
    control: RunControl | None = None,
) -> AsyncIterator[Run[AnyVersions]]:
    """Build a run in this process, with engines and reward workers started, and close it at the end
    of the block.

    The function has more than 60 lines because it lists the parts in the order of their start.
    """
    # Entered first, closed last: files outlive those who write to them.
    async with AsyncExitStack() as stack:
        store = CheckpointStore(folder / CHECKPOINTS, plan.experiment.checkpoint.keep)
        stack.callback(store.close)
        saved_version = store.latest_version() if resume else None
        progress = start_progress(stack, plan, folder, saved_version)
        with progress.stage("loading"):
            params, base = initial_weights(plan)
            trainer, restored = make_trainer(plan, params, base), None
            del params  # the trainer has its own copy
            checkpointer = Checkpointer(plan=plan, folder=folder, trainer=trainer, store=store)
            if saved_version is not None:
                restored = checkpointer.restore(saved_version)
        version = trainer.version if resume else None
        recording = start_recording(
            stack, plan, folder, progress, version=version, restored=restored
        )
        service = await stack.enter_async_context(reward_service(plan))
        if plan.decodes:
            with progress.stage("starting reward workers"):
                await start_rewards(service, plan.experiment, *task_sets(plan), say=progress.say)
        engines = LocalEngines(plan, base or {}, recording.trace)
        stack.callback(engines.close)
        weight_channel, engine = engines.weight_channel, engines.fleet
        del base  # trainer and engines have it
        # Everything is compiled before anything waits: timeouts are for work, not for the compiler.
        if plan.decodes:
            weight_channel.publish(trainer.version, trainer.params)
        with progress.stage("compiling") as stage, refusing_what_does_not_fit(plan, trainer):
            await asyncio.gather(
                asyncio.to_thread(trainer.warm_up, partial(stage.compiles, "trainer")),
                *(
                    asyncio.to_thread(
                        each.warm_up, on_program=partial(stage.compiles, f"engine {number}")
                    )
                    for number, each in enumerate(plan.engines, 1)
                    if plan.decodes
                ),
            )
        if isinstance(plan.compiler, ExecutableFolder):
            progress.say(plan.compiler.summary())
        opponents = {}
        if plan.decodes:
            engine.start()
            opponents = await start_opponents(stack, plan.experiment, plan.engine, plan.tokenizer)
        run = await make_run(
            stack,
            plan,
            folder,
            trainer=trainer,
            writer=checkpointer,
            weight_channel=weight_channel,
            engine=engine,
            grader=service,
            recording=recording,
            restored=restored,
            control=control or RunControl(),
            opponents=opponents,
        )
        if plan.experiment.placement.adaptive and isinstance(trainer, Trainer):
            run.split = AdaptiveSplit(plan, trainer, engines, recording)
            stack.push_async_callback(run.split.close)
        yield run


async def make_run(
    stack: AsyncExitStack,
    plan: Plan,
    folder: Path,
    *,
    trainer: AnyTrainer,
    writer: CheckpointWriter,
    weight_channel: WeightPublisher,
    engine: MeasuredEngine,
    grader: CountedGrader,
    recording: Recording,
    restored: Columns | None,
    control: RunControl,
    opponents: Mapping[str, Opponent] | None = None,
) -> Run[AnyTrainer]:
    """Put a run together from started components, here or on a cluster.

    Args:
        restored: what the checkpoint holds beside the trainer's state.
        control: the caller's callbacks and stop requests.
        opponents: frozen policies that the workflow names.
    """
    experiment = plan.experiment
    stop = stack.enter_context(stopping_on_signals())
    stack.enter_context(control.stopping(stop))
    recording.control = control
    if recording.rollout_log is not None:
        engine.on_assignment(recording.rollout_log.assign)
    host = await start_host(stack, experiment, plan.tokenizer, opponents or {})
    traced = TracedGrader(grader, recording.trace)
    state = None if restored is None else decode(restored)[0]
    is_rl = isinstance(experiment, Experiment)
    stream = TaskStream(plan.tasks.tasks if is_rl else plan.examples.examples, experiment.seed)
    if state is not None:
        stream.restore(state.tasks)
    evaluation = PeriodicEvaluation(
        plan=plan,
        engine=engine,
        grader=traced,
        tools=traced.use,
        host=host,
        weight_channel=weight_channel,
        recording=recording,
    )
    return Run(
        plan=plan,
        folder=folder,
        trainer=trainer,
        weight_channel=weight_channel,
        engine=engine,
        grader=traced,
        tools=traced.use,
        host=host,
        stop=stop,
        stream=stream,
        restored=state,
        recording=recording,
        evaluation=evaluation,
        checkpointing=Checkpointing(folder=folder, writer=writer, recording=recording),
        control=control,
    )
