"""Sources of answers for an evaluation: a policy on this machine, or a server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import (
    AsyncExitStack,
    asynccontextmanager,
    closing,
)
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from areal_jax.config.experiment import AnyExperiment
from areal_jax.config.overrides import JSON
from areal_jax.config.policy_names import RunCheckpoint
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.engine_loop import EngineLoop
from areal_jax.errors import ConfigError, InvalidRequest
from areal_jax.evaluation.answers import Answer, make_answer
from areal_jax.evaluation.remote import (
    MAX_CONNECTIONS,
    TOKEN_VARIABLE,
    ChatServer,
    ModelServer,
    RequestSampling,
    TokenServer,
    probe_chat,
)
from areal_jax.evaluation.scoring import EvaluationCalls, num_tasks_to_fill
from areal_jax.protocols import Engine
from areal_jax.records import Task
from areal_jax.rewards.service import RewardService
from areal_jax.run.checks import find_unreadable
from areal_jax.run.generation import evaluation_sampling, start_host, workflow_of
from areal_jax.run.models import DecodingPolicy, decoding_mesh, find_decoding_policy
from areal_jax.run.opponents import start_opponents
from areal_jax.run.plan_report import policy_text
from areal_jax.run.prompt_limits import limit_prompts
from areal_jax.weights.pinned import Pinned
from areal_jax.workflows.config import Environment, SingleTurn
from areal_jax.workflows.environment import Opponent

Ask: TypeAlias = Callable[[int, Task], Awaitable[Sequence[Answer]]]
"""Returns graded answers to a task, given its index and the task."""


@dataclass(frozen=True, eq=False)
class LocalAnswerer:
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
        engine_loop = EngineLoop(decoding.engine, Pinned(weights), grammars=decoding.grammars())
        with closing(engine_loop) as engine:
            engine.start()
            async with AsyncExitStack() as stack:
                opponents = await start_opponents(
                    stack, self.experiment, decoding.engine, decoding.tokenizer
                )
                yield await stack.enter_async_context(
                    through_workflow(
                        self.experiment,
                        decoding.tokenizer,
                        engine,
                        grader,
                        self.version,
                        opponents,
                    )
                )


def find_local(
    experiment: AnyExperiment, checkpoint: RunCheckpoint | None, tasks: Sequence[Task]
) -> LocalAnswerer:
    """Find the experiment's policy, or what a run has trained.

    Raises:
        ConfigError: the policy is missing, or cannot read the tasks.
    """
    experiment = with_limits(experiment, tasks)
    mesh = decoding_mesh(experiment.placement, "placement.rollout_devices")
    decoding = find_decoding_policy(
        experiment.policy, experiment.engine, mesh, checkpoint, seed=experiment.seed
    )
    if problems := list(find_unreadable(experiment, decoding.policy.config, decoding.tokenizer)):
        raise ConfigError("\n".join(problems))
    return LocalAnswerer(experiment, decoding)


def with_limits(experiment: AnyExperiment, tasks: Sequence[Task]) -> AnyExperiment:
    """The experiment with the limit on prompts that these tasks need, where it has none; warn of
    tasks that will not fit.
    """
    limited = limit_prompts(experiment, eval_tasks=tasks)
    for warning in limited.warnings:
        print(f"areal_jax: warning: {warning}", file=sys.stderr)
    return limited.experiment


@dataclass(frozen=True, eq=False)
class RemoteAnswerer:
    """A server with OpenAI's protocol."""

    experiment: AnyExperiment
    server: ModelServer
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
        requests are tokens.
        """
        experiment = self.experiment
        with closing(self.server):
            if self.tokenizer is not None:
                engine = TokenServer(self.server, self.model, self.tokenizer, self.sampling_mode)
                async with through_workflow(
                    experiment, self.tokenizer, engine, grader, self.version, {}
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


def find_server(experiment: AnyExperiment, url: str, tasks: Sequence[Task]) -> RemoteAnswerer:
    """Find the model of the server at a URL, and whether it takes tokens.

    Raises:
        ValueError: the server does not answer, refuses, has several models, or cannot do what the
            workflow needs.
    """
    workflow = experiment.workflow
    if isinstance(workflow, Environment) and workflow.opponents:
        raise ValueError(
            f"checkpoint={url} with workflow.opponents={','.join(workflow.opponents)}: the server "
            "has one policy; evaluate a folder or a run"
        )
    server = ModelServer(url, os.environ.get(TOKEN_VARIABLE), experiment.engine.request_timeout_s)
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
            return RemoteAnswerer(
                with_limits(experiment, tasks), server, model, tokenizer, found.sampling_mode
            )
        if isinstance(experiment.workflow, SingleTurn):
            return RemoteAnswerer(
                experiment, server, model, None, asyncio.run(probe_chat(server, model))
            )
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
    opponents: Mapping[str, Opponent],
) -> AsyncIterator[Ask]:
    """Generate as training does, through the experiment's workflow."""
    sampling = evaluation_sampling(experiment, tokenizer.stop_token_ids)
    async with AsyncExitStack() as stack:
        host = await start_host(stack, experiment, tokenizer, opponents)
        workflow = workflow_of(
            experiment, tokenizer, experiment.evaluation.samples_per_task, grader.use, host
        )

        async def ask(index: int, task: Task) -> Sequence[Answer]:
            samples = await workflow(
                task,
                EvaluationCalls(engine, version, sampling, experiment.seed, index, task.images),
                grader,
            )
            return [
                make_answer(sample, tokenizer, experiment.rewards.accept_plain)
                for sample in samples
            ]

        yield ask
