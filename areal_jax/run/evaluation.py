"""An evaluation from the first problem to the report: who answers, what is kept, and where it goes
on after a stop."""

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
from areal_jax.evaluation.answers import Answer, AnswerFolder, answer_of
from areal_jax.evaluation.remote import (
    MAX_CONNECTIONS,
    TOKEN_VARIABLE,
    ChatServer,
    RequestSampling,
    Server,
    TokenServer,
    sampling_of_chats,
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
"""What the keys of settings begin with that decide the answers, or how they are graded."""

NOT_DECIDING = ("rewards.num_workers",)

Ask: TypeAlias = Callable[[int, Task], Awaitable[Sequence[Answer]]]
"""Graded answers to the task at a place."""


class Unanswered(RuntimeError):
    """Nobody answers any more, or not every task that can be answered was."""


@dataclass(frozen=True, eq=False)
class Local:
    """A policy that answers on this machine."""

    experiment: AnyExperiment
    decoding: DecodingPolicy

    @property
    def name(self) -> str:
        """For the folder."""
        checkpoint, config = self.decoding.checkpoint, self.decoding.config
        if checkpoint is not None:
            return f"{checkpoint.folder.resolve().name}-v{self.version}"
        return Path(config.adapter or config.path).resolve().name

    @property
    def version(self) -> int:
        return self.decoding.version

    @property
    def headline(self) -> str:
        """Which policy, on which devices."""
        decoding, engine = self.decoding, self.decoding.engine
        policy = policy_text(decoding.config, decoding.policy, engine.compute_dtype)
        trained = (
            decoding.checkpoint
            and f", as {decoding.checkpoint.folder} has trained it to version {self.version}"
        )
        return f"policy: {policy}{trained or ''}; devices: {self.devices}"

    @property
    def max_running(self) -> int:
        """Tasks at the same time."""
        return num_tasks_to_fill(
            self.experiment.engine.num_slots, self.experiment.evaluation.samples_per_task
        )

    @property
    def devices(self) -> str:
        mesh = self.decoding.engine.mesh
        return f"{mesh.size} {mesh.devices.flat[0].device_kind}"

    def identity(self) -> dict[str, JSON]:
        """What tells the policy from others."""
        return {"version": self.version, "weights": self.decoding.fingerprint()}

    @asynccontextmanager
    async def answering(self, grader: RewardService) -> AsyncIterator[Ask]:
        """The engine at work, with the weights."""
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
    """The experiment's policy, or what a run has trained. ConfigError where it cannot be had, or
    cannot read the tasks."""
    experiment = with_limits(experiment, tasks)
    mesh = decoding_mesh(experiment.placement, "placement.rollout_devices")
    decoding = find_decoding_policy(
        experiment.policy, experiment.engine, mesh, checkpoint, seed=experiment.seed
    )
    if problems := list(find_unreadable(experiment, decoding.engine, decoding.tokenizer)):
        raise ConfigError("\n".join(problems))
    return Local(experiment, decoding)


def with_limits(experiment: AnyExperiment, tasks: Sequence[Task]) -> AnyExperiment:
    """The experiment with a limit on prompts that these tasks need, if it has none; says what will
    not fit."""
    limited = limit_prompts(experiment, eval_tasks=tasks)
    for warning in limited.warnings:
        print(f"areal_jax: warning: {warning}", file=sys.stderr)
    return limited.experiment


@dataclass(frozen=True, eq=False)
class Remote:
    """A server that answers."""

    experiment: AnyExperiment
    server: Server
    model: str
    tokenizer: HFTokenizer | None
    """Where the server speaks its tokens; None: it is asked in words."""
    sampling_mode: RequestSampling

    version: int = 0
    devices: str = "the server's"
    max_running: int = MAX_CONNECTIONS
    """Tasks at the same time."""

    @property
    def name(self) -> str:
        """For the folder."""
        return self.model

    @property
    def headline(self) -> str:
        """Which model, where, and how it is asked."""
        how = "words" if self.tokenizer is None else "tokens"
        return f"policy: {self.model} at {self.server.url}, asked in {how}"

    def identity(self) -> dict[str, JSON]:
        """What tells the server from others."""
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
        """The server, asked through the experiment's workflow where it speaks tokens."""
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
    """The server at a URL. ValueError where it does not answer, refuses, has several models, or
    cannot do what the workflow needs."""
    server = Server(url, os.environ.get(TOKEN_VARIABLE), experiment.engine.request_timeout_s)
    model = server.model()
    try:
        folder, ignored = (
            resolve_policy_folder(experiment.policy.path),
            experiment.policy.ignore_config_keys,
        )
        tokenizer = HFTokenizer.from_folder(folder, ignored)
    except FileNotFoundError:
        tokenizer = None  # then nobody here knows which tokens the server speaks
    try:
        if tokenizer and (
            found := asyncio.run(TokenServer.probed(server, model, tokenizer, tasks[0].prompt))
        ):
            return Remote(
                with_limits(experiment, tasks), server, model, tokenizer, found.sampling_mode
            )
        if isinstance(experiment.workflow, SingleTurn):
            return Remote(
                experiment, server, model, None, asyncio.run(sampling_of_chats(server, model))
            )
    except (InvalidRequest, RuntimeError) as error:
        raise ValueError(f"checkpoint={url}: {error}") from error
    raise ValueError(
        f"checkpoint={url} does not speak the tokens of policy.path={experiment.policy.path}, "
        "which "
        f"workflow={type(experiment.workflow).__name__} needs; set policy.path to the policy "
        "that is served, or "
        "workflow=SingleTurn"
    )


@asynccontextmanager
async def through_workflow(
    experiment: AnyExperiment,
    tokenizer: HFTokenizer,
    engine: Engine,
    grader: RewardService,
    version: int,
) -> AsyncIterator[Ask]:
    """Ask an engine the way that training asks it."""
    sampling = evaluation_sampling(experiment, tokenizer.stop_token_ids)
    async with AsyncExitStack() as stack:
        agents = await start_agents(stack, experiment, tokenizer)
        workflow = workflow_of(
            experiment, tokenizer, experiment.evaluation.samples_per_task, grader.use, agents
        )

        async def ask(place: int, task: Task) -> Sequence[Answer]:
            samples = await workflow(
                task, EvaluationCalls(engine, version, sampling, experiment.seed, place), grader
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
    """Answer what the folder lacks, grader it, and write the figures.

    Args: checkpoint: of a run, instead of the experiment's policy. server: URL of who answers,
        instead of either. folder: None for one named after the settings. ConfigError where
        something cannot be had; Unanswered where no task could be answered, or one has failed that
        may be answered when it is asked again."""
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
        "temperature "
        f"{config.temperature:g}; folder: {folder}"
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
                raise Unanswered(f"{error}; the same command goes on with what is left") from error
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
            # What does not fit never will; what failed otherwise may be answered when it is asked
            # again.
            if again := [
                error for error in failures.values() if not isinstance(error, InvalidRequest)
            ]:
                raise Unanswered(
                    f"{len(again)} of {len(tasks)} problems failed, {results.treatment}, the "
                    f"last: {again[-1]}; "
                    "the same command asks them again"
                )


@contextmanager
def _opened(folder: Path, settings: Mapping[str, JSON], version: int) -> Iterator[AnswerFolder]:
    """The folder, claimed. ConfigError where another process has it, it is of other settings, or
    cannot be written to."""
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
    """Have the tasks answered that are not yet, and each kept at once; what those failed with that
    cannot be."""
    left = [(place, task) for place, task in enumerate(tasks) if place not in answers.found]
    if not left:
        return {}
    began_s, num_tokens = time.monotonic(), 0

    def keep(place: int, task: Task, found: Sequence[Answer]) -> None:
        nonlocal num_tokens
        answers.add(place, task, found)
        num_tokens += sum(answer.num_tokens for answer in found)
        graded = [answer for of_task in answers.found.values() for answer in of_task]
        progress.update(
            len(answers.found),
            {
                **score_of(graded, is_raw=experiment.rewards.scale == "raw"),
                names.ROLLOUT_TOKENS_PER_S: num_tokens / (time.monotonic() - began_s),
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
    seconds = time.monotonic() - began_s
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
    """All settings that decide the answers or the grades, and a digest of the tasks as they were
    read."""
    listed = to_json(experiment)
    deciding = {
        key: listed[key] for key in listed if key.startswith(DECIDING) and key not in NOT_DECIDING
    }
    return deciding | {"tasks": _digest([asdict(task) for task in tasks])}


def folder_name(experiment: str, answerer: str, settings: Mapping[str, JSON]) -> str:
    """A name that another evaluation would not have."""
    return re.sub(r"[^\w.-]+", "_", f"{experiment}-{answerer}-{_digest(settings)}")


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
