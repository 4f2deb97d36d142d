"""All that lives while a policy trains: put together from a plan, and taken apart again in the
right order."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import psutil
from jaxtyping import Bool
from numpy import ndarray

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import saved_versions
from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.cluster.config import Ray
from areal_jax.cluster.signals import SIGNALS, Stopped, keep_handlers
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.config.load import CONFIG_FILE, read_plainly, write_config
from areal_jax.config.overrides import to_json
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.decode import EngineParams
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.engine.fleet import Fleet
from areal_jax.errors import ConfigError, NotLearning, NotSaved
from areal_jax.evaluation.scoring import Evaluation, evaluate, num_tasks_to_fill
from areal_jax.metrics import consistency, description, names
from areal_jax.metrics.config import METRICS
from areal_jax.metrics.description import write_description
from areal_jax.metrics.files import describe_disk_error
from areal_jax.metrics.health import HealthMonitor
from areal_jax.metrics.jsonl import read
from areal_jax.metrics.meters import Meters
from areal_jax.metrics.progress import Progress
from areal_jax.metrics.report import collect, write_report
from areal_jax.metrics.samples import TrainedSample
from areal_jax.metrics.sinks import Sinks
from areal_jax.metrics.trace import Trace
from areal_jax.models import lora
from areal_jax.models.decoder import Params
from areal_jax.protocols import Engine, Grader, Tokenizer, Tools, Workflow
from areal_jax.records import Group, RewardResult, Sampling, Task, ToolResult
from areal_jax.rewards.probe import probe
from areal_jax.rewards.service import CannotStart, RewardService
from areal_jax.run.plan import Plan, TrainingPlan
from areal_jax.run.trainer import Checkpointer, initial_weights
from areal_jax.serve.sessions import AgentServer
from areal_jax.threads import in_thread
from areal_jax.trainer.step import Metrics
from areal_jax.trainer.versions import Versions
from areal_jax.weights.local import WeightChannel
from areal_jax.weights.rolling import RollingSource, rolling_sources
from areal_jax.workflows.agent import AgentHost, Runner
from areal_jax.workflows.config import Agent
from areal_jax.workflows.from_config import find_tools_config, make_workflow

logger = logging.getLogger(__name__)

T = TypeVar("T")
AnyTrainer = TypeVar("AnyTrainer", bound="Trains", covariant=True)
AnyVersions = TypeVar("AnyVersions", bound=Versions)

TRACE = "trace.json"

RUN_ID = "run"
"""Note of a checkpoint: the id that config.json has too."""

TRAINER, CHECKPOINT = "trainer", "checkpoint"
"""Lanes of the trace, of what the trainer does."""

WEIGHTS_TIMEOUT_S = 1800.0
"""For weights of any size to reach the engine."""


@runtime_checkable
class Publisher(Protocol):
    """Whoever brings new versions to the engines."""

    def publish(self, version: int, params: Any) -> None: ...
    def wait_everywhere(self, at_least: int, timeout_s: float) -> None: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def metrics(self) -> Mapping[str, tuple[float, float]]: ...


@runtime_checkable
class MeasuredEngine(Engine, Protocol):
    """An engine that tells what it did."""

    def metrics(self) -> Mapping[str, tuple[float, float]]: ...


@runtime_checkable
class CountedGrader(Grader, Protocol):
    """A grader that tells what it did, and uses tools."""

    async def use(self, tool: str, argument: str) -> ToolResult: ...
    def counters(self) -> Mapping[str, float]: ...


@runtime_checkable
class CheckpointWriter(Protocol):
    """Whoever can write down what was trained: `training.Checkpointer`, or those who ask keepers
    elsewhere."""

    def save(self, version: int, beside: Columns) -> None: ...
    def write_results(self, version: int) -> Sequence[str]: ...


@runtime_checkable
class Trains(Protocol):
    """What all trainers have."""

    @property
    def version(self) -> int: ...
    @property
    def params(self) -> Any: ...


@dataclass
class Run(Generic[AnyTrainer]):
    """What training consists of while it goes on."""

    plan: Plan
    folder: Path
    trainer: AnyTrainer
    checkpointer: CheckpointWriter
    weight_channel: Publisher
    engine: MeasuredEngine
    grader: Grader
    tools: Tools
    agents: AgentHost | None
    """Where agents run, if the workflow is one of them."""
    sinks: Sinks
    trace: Trace
    progress: Progress
    stop: StopRequest
    """Set on Ctrl-C or SIGTERM: end after the step under way."""
    restored: Columns | None
    """What the checkpoint that the run resumes from holds beside the trainer's state."""
    # At most one task: while an evaluation is under way no other begins. Begun by
    # `evaluate_meanwhile`, and awaited or cancelled by `finish`.
    evaluations: set[asyncio.Task[None]] = field(default_factory=set)
    spans: list[tuple[str, str]] = field(default_factory=list)
    """Lane and name of what trains or is written at the moment."""
    num_spans: int = 0
    """How often something began to."""

    health: HealthMonitor = field(init=False)

    def __post_init__(self) -> None:
        experiment = self.experiment
        self.health = HealthMonitor(
            experiment.health, type(experiment.workflow).__name__, experiment.num_steps
        )
        self._first_version = self.trainer.version

    @property
    def experiment(self) -> AnyExperiment:
        return self.plan.experiment

    async def unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What the work returns, or None if stopping is asked for first.

        It is never begun where stopping was asked for before, and what it has done is never thrown
        away: a batch that was taken is in no buffer any more."""
        if self.stop.is_set():
            work.close()
            return None
        wanted, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait((wanted, stopped), return_when=asyncio.FIRST_COMPLETED)
            return await wanted if wanted.done() else None
        finally:
            wanted.cancel()
            stopped.cancel()
            await asyncio.gather(wanted, stopped, return_exceptions=True)

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Draw what happens inside on a lane of the trace."""
        start_s = time.perf_counter()
        self.num_spans += 1
        computes = [(lane, name)] if lane in (TRAINER, CHECKPOINT) else []
        self.spans += computes
        try:
            yield
        finally:
            for span in computes:
                self.spans.remove(span)
            self.trace.span(lane, name, start_s, time.perf_counter())

    def record(
        self, version: int, metrics: Metrics, rollout: dict[str, float] | None = None
    ) -> None:
        """Write and show what the step from `version` did, with what engine, weight channel and
        graders did meanwhile."""
        meters = Meters()
        meters.update(metrics, "trainer/")
        if self.plan.decodes:
            meters.update(self.engine.metrics(), "rollout/")
            meters.update(self.weight_channel.metrics(), "weights/")
        meters.update(rollout or {}, "rollout/")
        if self.plan.decodes and isinstance(self.grader, TracedGrader):
            meters.update(self.grader.counters(), "rewards/")
        meters.gauge("trainer/resident_gib", psutil.Process().memory_info().rss / 2**30)
        row = meters.flatten()
        before = self.health.active
        row |= self.health.update(version, row)
        self.sinks.write(version, row)
        self.progress.update(version + 1, row)
        for line in self.health.changes(before, version):
            self.progress.say(line)
        if self.health.active and self.experiment.health.stop:
            self.stop.set()

    def save(self, version: int, rollout: Columns) -> None:
        """Begin a checkpoint. One that cannot be written is told, and training goes on: its samples
        are worth more."""
        rollout.facts.setdefault("notes", {})[RUN_ID] = read_plainly(self.folder / CONFIG_FILE)[0]
        try:
            with self.span(CHECKPOINT, f"version {version}"):
                self.sinks.flush()
                self.checkpointer.save(version, rollout)
        except CheckpointError as error:
            self.progress.say(f"warning: {error}")

    def workflow(self, num_samples: int) -> Workflow:
        """How a task becomes so many samples in training."""
        return workflow_of(
            self.experiment, self.plan.tokenizer, num_samples, self.tools, self.agents
        )

    async def evaluate(self, version: int) -> None:
        """Answer the held-out problems with weights of `version`, or of at least it, and write down
        the score."""
        if self.experiment.evaluation.every_steps:
            await self._pin(version)
            await self._evaluate(version)

    async def evaluate_meanwhile(self, version: int) -> None:
        """Evaluate while training goes on, unless the last such evaluation is still under way."""
        if not self.evaluations:
            await self._pin(version)
            task = asyncio.create_task(
                self._evaluate(version), name=f"evaluation of version {version}"
            )
            self.evaluations.add(task)
            task.add_done_callback(self.evaluations.discard)
            task.add_done_callback(_log_failure)

    async def _pin(self, version: int) -> None:
        """See to it that an evaluation that begins now finds this version: wait for it, before a
        newer one is published."""
        if self.experiment.evaluation.pinned:
            await in_thread(
                partial(self.weight_channel.wait_everywhere, version, WEIGHTS_TIMEOUT_S),
                "waiting for weights",
            )

    async def _evaluate(self, version: int) -> None:
        experiment, config = self.experiment, self.experiment.evaluation
        tokenizer = self.plan.tokenizer
        held = self.weight_channel.paused() if config.pinned else nullcontext()
        evaluating = (
            nullcontext() if self.agents is None else self.agents.evaluating(holds=config.pinned)
        )
        with held, evaluating as agents, self.span("evaluation", f"version {version}"):
            found = await evaluate(
                self.plan.eval_tasks.tasks[: config.num_tasks],
                workflow_of(experiment, tokenizer, config.samples_per_task, self.tools, agents),
                self.engine,
                self.grader,
                version=version,
                sampling=evaluation_sampling(experiment, tokenizer.stop_token_ids),
                seed=experiment.seed,
                max_running=num_tasks_to_fill(self.plan.num_slots, config.samples_per_task),
            )
        self.record_evaluation(version, evaluation_metrics(found), evaluation_line(found))

    def record_evaluation(self, version: int, metrics: dict[str, float], line: str) -> None:
        """Write and show what was found out about `version`."""
        self.sinks.write(version, metrics)
        self.progress.evaluated(metrics)
        self.progress.say(line)

    async def finish(self) -> None:
        """Write the policy, evaluate what came out unless stopping is asked for, and in any case
        write the report."""
        version = self.trainer.version
        if self.stop.is_set():
            for task in self.evaluations:
                task.cancel()
        evaluations = await asyncio.gather(*self.evaluations, return_exceptions=True)
        is_evaluated = False

        async def evaluate() -> bool:
            await self.evaluate(version)
            return True

        try:
            # What was trained goes first: an evaluation can be made up for.
            with self.span(CHECKPOINT, "results"):
                lines = await asyncio.to_thread(self.checkpointer.write_results, version)
            for line in lines:
                self.progress.say(line)
            is_evaluated = bool(await self.unless_stopped(evaluate()))
        finally:
            self.report()
        if self.experiment.metrics.progress:
            for line in result_lines(
                self.folder, answers=self.plan.policy.config.readout == "CausalLM"
            ):
                self.progress.say(line)
        for outcome in evaluations:
            if isinstance(outcome, OSError):
                raise outcome
        if version not in saved_versions(self.folder / CHECKPOINTS):
            raise NotSaved(
                f"version {version}, the last that was trained, has no checkpoint: see the "
                "warning above"
            )
        self.require_learning()
        num_steps = self.experiment.num_steps
        if self.stop.is_set() and version < num_steps:
            raise Stopped(self.stop.number, f"after {version} of {num_steps} steps")
        if self.stop.is_set() and not is_evaluated:
            raise Stopped(
                self.stop.number,
                f"after all {num_steps} steps, before the last version was evaluated",
            )

    def report(self) -> None:
        """Write the report, and say where it is."""
        self.sinks.flush()
        self.progress.say(f"report: {write_report(self.folder)}")

    def require_learning(self) -> None:
        """NotLearning where the run ends for its health, or after steps of which none has changed
        the policy."""
        version, found = self.trainer.version, ", ".join(sorted(self.health.active))
        num_steps = version - self._first_version
        if found and self.experiment.health.stop:
            raise NotLearning(f"health.stop=true ends the run after {version} steps: {found}")
        if num_steps and not self.health.has_learnt and not self.stop.is_set():
            why = found or "no gradient"
            raise NotLearning(
                f"nothing was learnt: none of {num_steps} steps has changed the policy ({why})"
            )
        if found:
            self.progress.say(
                f"health: at the end of the run there is still {found}; the report says what "
                "to "
                "change"
            )


def result_lines(folder: Path, *, answers: bool) -> Iterator[str]:
    """How the score of a run in `folder` has changed, and the commands that ask its newest
    checkpoint.

    Args: answers: whether the policy gives any; a reward model does not."""
    found = collect(read(folder / METRICS))
    for name, label, form in (
        (names.PASS_AT_1, "pass@1", ".1%"),
        (names.EVAL_REWARD, "mean reward", ".4g"),
    ):
        # A version that was evaluated again has its last score.
        scores = dict(zip(*found.get(name, ([], [])), strict=True))
        if len(scores) > 1:
            (first, before), *_, (last, after) = scores.items()
            yield f"{label} {before:{form}} of version {first}, {after:{form}} of version {last}"
    if not answers or not saved_versions(folder / CHECKPOINTS):
        return
    where = shlex.quote(str(folder))
    yield f"evaluate it: python -m areal_jax.evaluate checkpoint={where}"
    yield f"serve it: python -m areal_jax.serve model={where}"


class TracedGrader:
    """Whoever graders, with every judgement sampled on the trace."""

    def __init__(self, grader: CountedGrader, trace: Trace) -> None:
        self.counted, self._trace = grader, trace

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        start_s = time.perf_counter()
        grade = await self.counted(task, answer)
        self._trace.span("rewards", grade.kind, start_s, time.perf_counter(), {"task": task.id})
        return grade

    async def use(self, tool: str, argument: str) -> ToolResult:
        """Use a tool, and draw that too."""
        start_s = time.perf_counter()
        result = await self.counted.use(tool, argument)
        self._trace.span("rewards", f"{tool}: {result.kind}", start_s, time.perf_counter())
        return result

    def counters(self) -> Mapping[str, float]:
        """The grader's own counts."""
        return self.counted.counters()


@asynccontextmanager
async def assembled(
    plan: Plan,
    folder: Path,
    *,
    resume: bool,
    make_trainer: Callable[[TrainingPlan, Params, Params | None], AnyVersions],
) -> AsyncIterator[Run[AnyVersions]]:
    """A run in this process, with its engine and graders at work; on leaving all of it is ended and
    closed."""
    experiment = plan.experiment
    # What is entered first is left last: the files outlive those who write to them.
    async with AsyncExitStack() as stack:
        store = CheckpointStore(folder / CHECKPOINTS, experiment.checkpoint.keep)
        stack.callback(store.close)
        saved_version = store.latest_version() if resume else None
        progress = shown_progress(stack, plan, folder, saved_version)
        params, base = initial_weights(plan)
        trainer, restored = make_trainer(plan, params, base), None
        del params  # the trainer has its own copy
        checkpointer = Checkpointer(plan, folder, trainer, base, store)
        if saved_version is not None:
            restored = checkpointer.restore(saved_version)
        sinks, trace = written_files(
            stack, plan, folder, trainer.version if resume else None, restored
        )
        service = await stack.enter_async_context(_reward_service(plan))
        if plan.decodes:
            await start_rewards(
                service, plan.experiment, plan.tasks.tasks, plan.eval_tasks.tasks, say=progress.say
            )
        weight_channel = WeightChannel(
            plan.engine.layout,
            [engine.param_shardings for engine in plan.engines],
            plan.train_mesh,
            complete=None
            if base is None
            else [partial(lora.attach, plan.policy, there) for there in _bases(plan, base)],
            on_event=partial(trace.span, "weight_channel"),
        )
        stack.callback(weight_channel.close)
        sources = rolling_sources(
            [weight_channel.of(number) for number in range(len(plan.engines))]
        )
        engine = Fleet(
            [
                EngineLoop(
                    each, source, on_event=partial(_start_engine_loop, trace, source, number)
                )
                for number, (each, source) in enumerate(zip(plan.engines, sources, strict=True))
            ]
        )
        stack.callback(engine.close)
        # Everything is compiled before anything waits for it: deadlines are for work, not for the
        # compiler.
        if plan.decodes:
            weight_channel.publish(trainer.version, trainer.params)
            await asyncio.gather(
                asyncio.to_thread(trainer.warm_up),
                *(asyncio.to_thread(each.warm_up) for each in plan.engines),
            )
            engine.start()
        else:
            await asyncio.to_thread(trainer.warm_up)
        stop = stack.enter_context(stopping_on_signals())
        agents = await agents_of(stack, experiment, plan.tokenizer)
        grader = TracedGrader(service, trace)
        yield Run(
            *(
                plan,
                folder,
                trainer,
                checkpointer,
                weight_channel,
                engine,
                grader,
                grader.use,
                agents,
            ),
            *(sinks, trace, progress, stop, restored),
        )


async def try_grading(plan: Plan) -> None:
    """Start whoever would grader here, and end it again. ConfigError where the settings ask for
    what cannot be had."""
    # A cluster's graders are elsewhere, with other files and another system.
    if plan.decodes and not isinstance(plan.experiment.launch, Ray):
        async with _reward_service(plan) as service:
            experiment = plan.experiment
            await start_rewards(
                service, experiment, plan.tasks.tasks, plan.eval_tasks.tasks, say=logger.warning
            )


async def start_rewards(
    service: RewardService,
    experiment: AnyExperiment,
    *tasks: Sequence[Task],
    say: Callable[[str], None],
) -> None:
    """Start reward workers, and grade answers to the first rows of each source. ConfigError where
    that does not work."""
    try:
        await service.start()
    except CannotStart as error:
        raise ConfigError(str(error)) from error
    await probe_rewards(service.grade, experiment, *tasks, say=say)


async def probe_rewards(
    grader: Grader, experiment: AnyExperiment, *tasks: Sequence[Task], say: Callable[[str], None]
) -> None:
    """Grade answers to the first rows of each source, and say what looks wrong. ConfigError where
    the reward does not work."""
    # An agent may grade itself, and tasks of its own need no answer that a verifier can read.
    must_grade = not isinstance(experiment.workflow, Agent)
    for of_source in tasks:
        for warning in await probe(grader, of_source, experiment.rewards, must_grade=must_grade):
            say(f"warning: {warning}")


def _reward_service(plan: Plan) -> RewardService:
    return RewardService(
        plan.experiment.rewards, kinds_of_tasks(plan), find_tools_config(plan.experiment.workflow)
    )


def shown_progress(
    stack: AsyncExitStack, plan: Plan, folder: Path, saved_version: int | None
) -> Progress:
    """What the run shows, until the stack ends. Args: saved_version: of the checkpoint it resumes
    from."""
    experiment = plan.experiment
    headline = f"{plan.headline()}; run folder: {folder}"
    progress = Progress(
        headline, experiment.num_steps, saved_version or 0, show_steps=experiment.metrics.progress
    )
    stack.callback(progress.close)
    if saved_version is not None:
        progress.say(f"resuming from the checkpoint of version {saved_version}")
    return progress


def written_files(
    stack: AsyncExitStack, plan: Plan, folder: Path, version: int | None, restored: Columns | None
) -> tuple[Sinks, Trace]:
    """What the run writes down, until the stack ends.

    Args:
        version: that the run resumes from; None: from the start.
        restored: what the checkpoint of that version holds beside the trainer's state.

    Raises:
        ConfigError: the files in the folder disagree with the checkpoint."""
    experiment = plan.experiment
    gaps = None if version is None else require_consistency(plan, folder, version, restored)
    run_id = None if version is None else read_plainly(folder / CONFIG_FILE)[0]
    sinks = Sinks(folder, experiment.metrics, version, plan.tokenizer.decode)
    # Not before what was trained is restored: settings under which that cannot be must not take the
    # place of its own.
    write_config(experiment, folder / CONFIG_FILE, run_id or secrets.token_hex(8))
    stack.callback(sinks.close)
    trace = Trace(folder / TRACE if experiment.metrics.trace else None)
    stack.callback(trace.close)
    write_description(folder, plan.headline(), to_json(experiment), plan.devices, gaps)
    return sinks, trace


def require_consistency(
    plan: Plan, folder: Path, version: int, restored: Columns | None
) -> consistency.Gaps:
    """ConfigError where settings, metrics.jsonl or samples.jsonl are not those of the checkpoint of
    `version`.

    Returns the versions whose rows are known to be absent, by file."""
    run_id, before = read_plainly(folder / CONFIG_FILE)
    start = f"{folder} cannot be resumed from its checkpoint of version {version}: "
    facts = {} if restored is None else restored.facts
    saved_id = facts.get("notes", {}).get(RUN_ID)
    if saved_id is not None and saved_id != run_id:
        raise ConfigError(
            f"{start}{CONFIG_FILE} is of another run (expected the run {saved_id}, found "
            f"{run_id or 'no name'}); put the "
            f"{CONFIG_FILE} of this run back"
        )
    is_rl = isinstance(plan.experiment, Experiment)
    stream = plan.tasks.tasks if is_rl else plan.examples.examples
    for name, what, here in (
        ("seed", "seed", plan.experiment.seed),
        ("num_tasks", "tasks or examples", len(stream)),
    ):
        if (there := facts.get("tasks", {}).get(name, here)) != here:
            raise ConfigError(
                f"{start}it was trained with {what} {there}, and the settings give {here}; with "
                "others tasks are lost or "
                f"repeated. Set {what} as before"
            )
    ids = [entry["id"] for kind in ("buffered", "suspended") for entry in facts.get(kind, ())]
    unused = (
        consistency.UnusedGroups(ids, facts["next_group_id"])
        if facts and is_rl
        else consistency.UnusedGroups()
    )
    found = consistency.check_rows(
        folder,
        version,
        known_gaps=consistency.read_gaps(folder / description.FILE),
        writes_samples=is_rl and bool(before.get("metrics.samples", True)),
        unused_groups=unused,
    )
    if found.faults:
        reported = "; ".join(f"{fault.file} {fault.text}" for fault in found.faults)
        older = saved_versions(folder / CHECKPOINTS)
        raise ConfigError(
            f"{start}{reported}. To go on, "
            f"{consistency.suggest_remedy(folder, found.faults[0], version, older)}"
        )
    return found.gaps


def kinds_of_tasks(plan: Plan) -> frozenset[str]:
    """Of tasks that will be graded."""
    return frozenset(plan.tasks.kinds | plan.eval_tasks.kinds)


def workflow_of(
    experiment: AnyExperiment,
    tokenizer: Tokenizer,
    num_samples: int,
    tools: Tools,
    agents: Runner | None,
) -> Workflow:
    """The experiment's workflow, for so many samples of a task."""
    return make_workflow(
        experiment.workflow,
        tokenizer,
        num_samples,
        experiment.rewards,
        max_prompt_tokens=experiment.engine.max_prompt_tokens,
        tools=tools,
        agents=agents,
    )


def evaluation_sampling(experiment: AnyExperiment, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How an evaluation draws."""
    return Sampling(
        experiment.engine.max_new_tokens,
        experiment.evaluation.temperature,
        stop_token_ids=stop_token_ids,
    )


async def agents_of(
    stack: AsyncExitStack, experiment: AnyExperiment, tokenizer: HFTokenizer
) -> AgentHost | None:
    """Where agents run, and the server that they call, until the stack ends; None where the
    workflow has none."""
    chosen = experiment.workflow
    if not isinstance(chosen, Agent):
        return None
    # The end of an agent's session ends its calls too.
    server = AgentServer(tokenizer, experiment.engine.max_new_tokens, math.inf)
    sessions = await stack.enter_async_context(server.listening())
    named = "" if chosen.function is None else f"workflow.function={chosen.function}: "
    try:
        host = AgentHost(chosen, sessions)
        stack.push_async_callback(host.close)
        await host.start()
    except ValueError as error:
        raise ConfigError(f"{named}{error}") from error
    return host


def _start_engine_loop(
    trace: Trace,
    source: RollingSource,
    number: int,
    name: str,
    start_s: float,
    end_s: float,
    args: Mapping[str, int | float],
) -> None:
    """What a engine loop tells: sampled on its lane of the trace, and where it has swapped, the
    next engine may."""
    trace.span(
        "rollout engine loop" + (f" {number + 1}" if number else ""),
        name,
        start_s,
        end_s,
        {"engine": number, **args},
    )
    if name == "swap":
        source.swapped()


def _bases(plan: Plan, base: Params) -> list[EngineParams]:
    """The frozen weights on the mesh of every engine: they go there once, the way that versions
    go."""
    targets = [engine.base_shardings for engine in plan.engines]
    with closing(WeightChannel(plan.engine.layout, targets, plan.train_mesh)) as weight_channel:
        weight_channel.publish(0, base)
        return [
            weight_channel.wait(0, WEIGHTS_TIMEOUT_S, number).params
            for number in range(len(targets))
        ]


class StopRequest(asyncio.Event):
    """An event that the first Ctrl-C or SIGTERM sets."""

    number = signal.SIGINT
    """Of the signal."""


@contextmanager
def stopping_on_signals() -> Iterator[StopRequest]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one acts as it would without
    this."""
    stop, loop, restore = StopRequest(), asyncio.get_running_loop(), keep_handlers()

    def let_go() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
        restore()

    def request_stop(number: signal.Signals) -> None:
        stop.number = number
        stop.set()
        let_go()

    for number in SIGNALS:
        loop.add_signal_handler(number, request_stop, number)
    try:
        yield stop
    finally:
        let_go()


def trained_samples(
    groups: Sequence[Group], stale: Sequence[Sequence[Bool[ndarray, "_"]]]
) -> list[TrainedSample]:
    """What samples.jsonl tells of a batch. Args: stale: by group and sample, the tokens left out of
    the loss for their age."""
    return [
        TrainedSample(
            task=group.task.id,
            group=group.id,
            number=number,
            tokens=sample.tokens,
            loss_mask=sample.loss_mask,
            behave_logp=sample.behave_logp,
            versions=sample.versions,
            stale=too_old,
            reward=sample.reward,
            grade=sample.grade,
            stop_reason=sample.stop_reason,
        )
        for group, of_group in zip(groups, stale, strict=True)
        for number, (sample, too_old) in enumerate(zip(group.samples, of_group, strict=True))
    ]


def evaluation_metrics(found: Evaluation) -> dict[str, float]:
    """What metrics.jsonl tells of an evaluation."""
    if math.isnan(found.pass_at_1):  # raw rewards: nothing is correct or wrong
        score = {
            names.EVAL_REWARD: found.mean_reward,
            names.EVAL_REWARD_ERROR: found.standard_error,
        }
    else:
        score = {names.PASS_AT_1: found.pass_at_1, names.PASS_AT_1_ERROR: found.standard_error}
    return {
        **score,
        "evaluation/truncated_fraction": found.truncated,
        "evaluation/answer_tokens": found.mean_tokens,
        "evaluation/num_tasks": found.num_tasks,
        "evaluation/num_failed": sum(found.failed.values()),
        "evaluation/newest_version": found.versions[1],
        "evaluation/seconds": found.seconds,
        **{f"evaluation/grade/{kind}": count for kind, count in found.grades.items()},
        **{
            f"evaluation/family/{family}": score
            for family, score in found.by_family.items()
            if family
        },
    }


def evaluation_line(found: Evaluation) -> str:
    low, high = found.interval_95
    score = f"pass@1 {found.pass_at_1:.1%} (95 %: {low:.1%} to {high:.1%})"
    treated = "counted as wrong"
    if math.isnan(found.pass_at_1):
        score, treated = (
            f"mean reward {found.mean_reward:.4g} (95 %: {low:.4g} to {high:.4g})",
            "left out",
        )
    failed = f", {sum(found.failed.values())} of them failed and {treated}" if found.failed else ""
    return (
        f"evaluation of version {found.version}: {score} on "
        f"{found.num_tasks} problems{failed}, {found.truncated:.1%} truncated, "
        f"{found.seconds:.1f} s"
    )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        where = None if isinstance(error, OSError) and describe_disk_error(error) else error
        logger.error("%s failed: %s", task.get_name(), error, exc_info=where)
