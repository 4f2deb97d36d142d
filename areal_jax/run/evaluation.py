"""An evaluation by the command line: answer the tasks that a folder lacks, grade, report, and
resume after a stop."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    closing,
    contextmanager,
    nullcontext,
)
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from areal_jax.config.experiment import AnyExperiment
from areal_jax.config.overrides import JSON, to_json
from areal_jax.config.policy_names import RunCheckpoint
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.sources import load_tasks
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import ConfigError, EngineStopped, InvalidRequest, config_errors
from areal_jax.evaluation.answers import Answer, AnswerFolder, make_answer
from areal_jax.evaluation.remote import (
    MAX_CONNECTIONS,
    TOKEN_VARIABLE,
    ChatServer,
    RequestSampling,
    Server,
    TokenServer,
    probe_chat,
)
from areal_jax.evaluation.report import TIMES, summary, write_report
from areal_jax.evaluation.results import compute_results
from areal_jax.evaluation.scoring import EvaluationCalls, answer_all, num_tasks_to_fill
from areal_jax.metrics import names
from areal_jax.metrics.description import write_description
from areal_jax.metrics.files import add_file_name
from areal_jax.metrics.progress import Progress, facts_of_evaluation
from areal_jax.protocols import Engine
from areal_jax.records import Task
from areal_jax.rewards.service import RewardService
from areal_jax.run.checks import find_unreadable
from areal_jax.run.claim import claimed, writable
from areal_jax.run.generation import evaluation_sampling, start_agents, workflow_of
from areal_jax.run.grading import start_rewards
from areal_jax.run.models import DecodingPolicy, decoding_mesh, find_decoding_policy
from areal_jax.run.plan_report import count_text, policy_text
from areal_jax.run.prompt_limits import limit_prompts
from areal_jax.weights.pinned import Pinned
from areal_jax.workflows.config import SingleTurn
from areal_jax.workflows.from_config import find_tools_config

EVALUATIONS_FOLDER = Path("evaluations")

DECIDING = (
    *("seed", "policy.", "prompt.", "eval_tasks", "rewards.", "workflow"),
    *("engine.max_prompt_tokens", "engine.max_new_tokens"),
    *("evaluation.num_tasks", "evaluation.samples_per_task", "evaluation.temperature"),
)
"""Prefixes of the settings that decide the answers, or how they are graded."""

NOT_DECIDING = ("rewards.num_workers",)

Ask: TypeAlias = Callable[[int, Task], Awaitable[Sequence[Answer]]]
"""Returns graded answers to a task, given its index and the task."""


class Unanswered(RuntimeError):
    """The engine stopped, or tasks failed that may succeed when they are tried again."""


@dataclass(frozen=True, eq=False)
class Local:
    """A policy on this machine."""

    experiment: AnyExperiment
    decoding: DecodingPolicy

    @property
    def name(self) -> str:
        """Name in the folder's name."""
        checkpoint, config = self.decoding.checkpoint, self.decoding.config
        if checkpoint is not None:
            return f"{checkpoint.folder.resolve().name}-v{self.version}"
        return Path(config.adapter or config.path).resolve().name

    @property
    def version(self) -> int:
        return self.decoding.version

    @property
    def headline(self) -> str:
        """Policy and devices."""
        decoding, engine = self.decoding, self.decoding.engine
        policy = policy_text(decoding.config, decoding.policy, engine.compute_dtype)
        trained = (
            decoding.checkpoint
            and f", trained by {decoding.checkpoint.folder} to version {self.version}"
        )
        return f"policy: {policy}{trained or ''}; devices: {self.devices}"

    @property
    def max_running(self) -> int:
        """Tasks that run at the same time."""
        return num_tasks_to_fill(
            self.experiment.engine.num_slots, self.experiment.evaluation.samples_per_task
        )

    @property
    def devices(self) -> str:
        mesh = self.decoding.engine.mesh
        return f"{mesh.size} {mesh.devices.flat[0].device_kind}"

    def identity(self) -> dict[str, JSON]:
        """Facts that identify the policy."""
        return {"version": self.version, "weights": self.decoding.fingerprint()}

    @asynccontextmanager
    async def answering(self, grader: RewardService) -> AsyncIterator[Ask]:
        """Load the weights and start the engine, until the block ends."""
        decoding = self.decoding
        weights = await asyncio.to_thread(decoding.load)
        with closing(EngineLoop(decoding.engine, Pinned(weights))) as engine:
            engine.start()
            async with through_workflow(
                self.experiment, decoding.tokenizer, engine, grader, self.version
            ) as ask:
                yield ask


def find_local(
    experiment: AnyExperiment, checkpoint: RunCheckpoint | None, tasks: Sequence[Task]
) -> Local:
    """Find the experiment's policy, or what a run has trained.

    Raises:
        ConfigError: the policy is missing, or cannot read the tasks.
    """
    experiment = with_limits(experiment, tasks)
    mesh = decoding_mesh(experiment.placement, "placement.rollout_devices")
    decoding = find_decoding_policy(
        experiment.policy, experiment.engine, mesh, checkpoint, seed=experiment.seed
    )
    if problems := list(find_unreadable(experiment, decoding.engine, decoding.tokenizer)):
        raise ConfigError("\n".join(problems))
    return Local(experiment, decoding)


def with_limits(experiment: AnyExperiment, tasks: Sequence[Task]) -> AnyExperiment:
    """The experiment with the limit on prompts that these tasks need, where it has none; warn of
    tasks that will not fit."""
    limited = limit_prompts(experiment, eval_tasks=tasks)
    for warning in limited.warnings:
        print(f"areal_jax: warning: {warning}", file=sys.stderr)
    return limited.experiment


@dataclass(frozen=True, eq=False)
class Remote:
    """A server that speaks OpenAI's protocol."""

    experiment: AnyExperiment
    server: Server
    model: str
    tokenizer: HFTokenizer | None
    """The tokenizer of the server's policy; None: requests are text."""
    sampling_mode: RequestSampling

    version: int = 0
    devices: str = "the server's"
    max_running: int = MAX_CONNECTIONS
    """Tasks that run at the same time."""

    @property
    def name(self) -> str:
        """Name in the folder's name."""
        return self.model

    @property
    def headline(self) -> str:
        """Model, URL and form of the requests."""
        return f"policy: {self.model} at {self.server.url}, requests as {self.request_form}"

    @property
    def request_form(self) -> str:
        return "text" if self.tokenizer is None else "tokens"

    def identity(self) -> dict[str, JSON]:
        """Facts that identify the server's policy."""
        sampled = ", ".join(f"{name}={value:g}" for name, value in self.sampling_mode.items())
        asked_in = "words" if self.tokenizer is None else "tokens"
        return {
            "server": self.server.url,
            "model": self.model,
            "asked in": asked_in,
            "sampled with": sampled,
        }

    @asynccontextmanager
    async def answering(self, grader: RewardService) -> AsyncIterator[Ask]:
        """Send requests to the server until the block ends: through the experiment's workflow where
        requests are tokens."""
        experiment = self.experiment
        with closing(self.server):
            if self.tokenizer is not None:
                engine = TokenServer(self.server, self.model, self.tokenizer, self.sampling_mode)
                async with through_workflow(
                    experiment, self.tokenizer, engine, grader, self.version
                ) as ask:
                    yield ask
            else:
                yield ChatServer(
                    self.server,
                    self.model,
                    self.sampling_mode,
                    grader,
                    num_samples=experiment.evaluation.samples_per_task,
                    sampling=evaluation_sampling(experiment, ()),
                    seed=experiment.seed,
                    rewards=experiment.rewards,
                ).answers


def find_server(experiment: AnyExperiment, url: str, tasks: Sequence[Task]) -> Remote:
    """Find the model of the server at a URL, and whether it takes tokens.

    Raises:
        ValueError: the server does not answer, refuses, has several models, or cannot do what the
            workflow needs.
    """
    server = Server(url, os.environ.get(TOKEN_VARIABLE), experiment.engine.request_timeout_s)
    model = server.model()
    try:
        folder, ignored = (
            resolve_policy_folder(experiment.policy.path),
            experiment.policy.ignore_config_keys,
        )
        tokenizer = HFTokenizer.from_folder(folder, ignored)
    except FileNotFoundError:
        tokenizer = None  # the server's tokens are unknown here
    try:
        if tokenizer and (
            found := asyncio.run(TokenServer.probe(server, model, tokenizer, tasks[0].prompt))
        ):
            return Remote(
                with_limits(experiment, tasks), server, model, tokenizer, found.sampling_mode
            )
        if isinstance(experiment.workflow, SingleTurn):
            return Remote(experiment, server, model, None, asyncio.run(probe_chat(server, model)))
    except (InvalidRequest, RuntimeError) as error:
        raise ValueError(f"checkpoint={url}: {error}") from error
    raise ValueError(
        f"checkpoint={url}: expected the tokens of policy.path={experiment.policy.path}, which "
        f"workflow={type(experiment.workflow).__name__} needs, found others; set policy.path to "
        "the policy that is served, or workflow=SingleTurn"
    )


@asynccontextmanager
async def through_workflow(
    experiment: AnyExperiment,
    tokenizer: HFTokenizer,
    engine: Engine,
    grader: RewardService,
    version: int,
) -> AsyncIterator[Ask]:
    """Generate as training does, through the experiment's workflow."""
    sampling = evaluation_sampling(experiment, tokenizer.stop_token_ids)
    async with AsyncExitStack() as stack:
        agents = await start_agents(stack, experiment, tokenizer)
        workflow = workflow_of(
            experiment, tokenizer, experiment.evaluation.samples_per_task, grader.use, agents
        )

        async def ask(index: int, task: Task) -> Sequence[Answer]:
            samples = await workflow(
                task, EvaluationCalls(engine, version, sampling, experiment.seed, index), grader
            )
            return [
                make_answer(sample, tokenizer, experiment.rewards.accept_plain)
                for sample in samples
            ]

        yield ask


def run(
    experiment: AnyExperiment,
    *,
    checkpoint: RunCheckpoint | None,
    server: str | None,
    folder: Path | None,
) -> None:
    """Answer the tasks that the folder lacks, grade the answers, and write the report.

    Args:
        checkpoint: of a run, instead of the experiment's policy.
        server: URL of a server, instead of either.
        folder: None: one named after the settings.

    Raises:
        ConfigError: an input is missing or does not fit.
        Unanswered: no task was answered, or tasks failed that may succeed when they are tried
            again.
    """
    config = experiment.evaluation
    with config_errors("eval_tasks"):
        found = load_tasks(experiment.eval_tasks, experiment.prompt)
    tasks = found.tasks[: config.num_tasks]
    with config_errors() if server else nullcontext():
        answerer = (
            find_server(experiment, server, tasks)
            if server
            else find_local(experiment, checkpoint, tasks)
        )
    experiment = answerer.experiment
    settings = identity(experiment, tasks) | answerer.identity()
    folder = folder or EVALUATIONS_FOLDER / folder_name(experiment.name, answerer.name, settings)
    data = count_text("tasks", *found, experiment.eval_tasks)
    some = "" if len(tasks) == len(found.tasks) else f"the first {len(tasks)} of "
    headline = (
        f"{answerer.headline}; data: {some}{data}; samples_per_task {config.samples_per_task}, "
        f"temperature {config.temperature:g}; folder: {folder}"
    )
    with _opened(folder, settings, answerer.version) as answers:
        progress = Progress(
            headline,
            len(tasks),
            len(answers.found),
            show_steps=experiment.metrics.progress,
            unit="task",
            facts=facts_of_evaluation,
        )
        with closing(progress):
            write_description(folder, headline, to_json(experiment), answerer.devices)
            try:
                failures = asyncio.run(
                    _answer(experiment, tasks, found.kinds, answerer, answers, progress)
                )
            except EngineStopped as error:
                raise Unanswered(
                    f"{error}; the same command answers the remaining tasks"
                ) from error
            if not answers.found:
                last = list(failures.values())[-1]
                raise Unanswered(
                    f"none of the {len(tasks)} tasks could be answered, the last: {last}"
                ) from last
            results = compute_results(
                tasks, answers.found, failures, is_raw=experiment.rewards.scale == "raw"
            )
            report = write_report(folder, headline, settings, results, tasks, answers.found)
            progress.say("; ".join(f"{name} {figure}" for name, figure in summary(results)))
            progress.say(f"report: {report}")
            # An invalid request stays invalid; other failures may not repeat.
            if again := [
                error for error in failures.values() if not isinstance(error, InvalidRequest)
            ]:
                raise Unanswered(
                    f"{len(again)} of {len(tasks)} problems failed, {results.treatment}, the last: "
                    f"{again[-1]}; the same command tries them again"
                )


@contextmanager
def _opened(folder: Path, settings: Mapping[str, JSON], version: int) -> Iterator[AnswerFolder]:
    """Claim and open the folder.

    Raises:
        ConfigError: another process has claimed it, it belongs to other settings, or it cannot be
            written to.
    """
    with ExitStack() as stack:
        try:
            with writable(folder, "--folder"):
                stack.enter_context(claimed(folder, "--folder"))
                answers = stack.enter_context(closing(AnswerFolder(folder, settings, version)))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        yield answers


async def _answer(
    experiment: AnyExperiment,
    tasks: Sequence[Task],
    kinds: set[str],
    answerer: Local | Remote,
    answers: AnswerFolder,
    progress: Progress,
) -> dict[int, Exception]:
    """Answer the remaining tasks, and write each answer at once; the errors of tasks that failed,
    by index."""
    left = [(index, task) for index, task in enumerate(tasks) if index not in answers.found]
    if not left:
        return {}
    start_s, num_tokens = time.monotonic(), 0

    def keep(index: int, task: Task, found: Sequence[Answer]) -> None:
        nonlocal num_tokens
        answers.add(index, task, found)
        num_tokens += sum(answer.num_tokens for answer in found)
        graded = [answer for of_task in answers.found.values() for answer in of_task]
        progress.update(
            len(answers.found),
            {
                **score_of(graded, is_raw=experiment.rewards.scale == "raw"),
                names.ROLLOUT_TOKENS_PER_S: num_tokens / (time.monotonic() - start_s),
            },
        )

    async with RewardService(
        experiment.rewards, kinds, find_tools_config(experiment.workflow)
    ) as grader:
        await start_rewards(grader, experiment, tasks, say=progress.say)
        async with answerer.answering(grader) as ask:
            failures = await answer_all(
                left, ask, keep, name="evaluation", max_running=answerer.max_running
            )
    seconds = time.monotonic() - start_s
    with (
        add_file_name(answers.path / TIMES),
        (answers.path / TIMES).open("a", encoding="utf-8") as file,
    ):
        row = {
            "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
            "num_tasks": len(left) - len(failures),
            "num_tokens": num_tokens,
        }
        file.write(
            json.dumps(row | {"seconds": seconds, "tokens_per_s": num_tokens / seconds}) + "\n"
        )
    return failures


def score_of(answers: Sequence[Answer], *, is_raw: bool) -> dict[str, float]:
    """The score of the answers so far, under its name."""
    if is_raw:
        return {names.EVAL_REWARD: fmean([answer.reward or 0.0 for answer in answers])}
    return {names.PASS_AT_1: fmean([answer.grade == "correct" for answer in answers])}


def identity(experiment: AnyExperiment, tasks: Sequence[Task]) -> dict[str, JSON]:
    """The settings that decide the answers or the grades, and a digest of the tasks."""
    listed = to_json(experiment)
    deciding = {
        key: listed[key] for key in listed if key.startswith(DECIDING) and key not in NOT_DECIDING
    }
    return deciding | {"tasks": _digest([asdict(task) for task in tasks])}


def folder_name(experiment: str, answerer: str, settings: Mapping[str, JSON]) -> str:
    """A folder name that is unique to an evaluation."""
    return re.sub(r"[^\w.-]+", "_", f"{experiment}-{answerer}-{_digest(settings)}")


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
