"""Environments of the user: classes with Gymnasium's `reset` and `step`, each in a process of its
own, and the conversations of the policy with them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from areal_jax.errors import ConfigError, NotGraded
from areal_jax.protocols import Generate, Grader, Tokenizer
from areal_jax.records import (
    ENVIRONMENT,
    Message,
    RewardResult,
    Sample,
    StopReason,
    Task,
    derive_seed,
    task_to_json,
)
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.forks import GRACE_S, START_TIMEOUT_S, CannotStart, ForkedProcess, ForkServer
from areal_jax.rewards.functions import graded
from areal_jax.workflows.config import Environment
from areal_jax.workflows.conversation import Call, build_next_prompt, make_samples
from areal_jax.workflows.single_turn import gather_graded


class EnvironmentFailed(NotGraded):
    """An environment raised, hung, died or returned no episode: the group is rejected."""


class Step(NamedTuple):
    """What follows one action."""

    messages: tuple[Message, ...]
    reward: float
    is_over: bool


class EnvironmentHost:
    """Processes of an environment. A process plays one episode at a time."""

    def __init__(self, config: Environment) -> None:
        """Create a host; its first process starts with `start`.

        Raises:
            ConfigError: the arguments are no JSON object.
        """
        try:
            arguments = json.loads(config.arguments)
        except ValueError as error:
            arguments = str(error)
        if not isinstance(arguments, dict):
            raise ConfigError(
                "workflow.arguments: expected a JSON object of keyword arguments such as "
                f"'{{\"size\": 4}}', found {config.arguments!r}"
            )
        self._config = config
        self._server = ForkServer(
            "areal_jax.workflows.environment_worker",
            {"environment": str(config.environment), "arguments": arguments},
            f"workflow.environment={config.environment}",
        )
        self._idle = list[ForkedProcess]()
        self._slots = asyncio.Semaphore(config.max_running)

    async def start(self) -> None:
        """Load the environment, and make one.

        Raises:
            ConfigError: that fails.
        """
        try:
            async with self.episode() as episode:
                await episode.ask({"make": True}, START_TIMEOUT_S)
        except (EnvironmentFailed, CannotStart) as error:
            raise ConfigError(str(error)) from error

    async def close(self) -> None:
        """Kill all processes."""
        for process in self._idle:
            await process.kill()
        await self._server.close()

    @contextmanager
    def evaluating(self, *, holds: bool) -> Iterator[Self]:
        """Yield the host of an evaluation's episodes; there are no clocks to stop."""
        del holds
        yield self

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """A process for one episode. After an error, or where it was cancelled, it is killed."""
        async with self._slots:
            process = self._idle.pop() if self._idle else ForkedProcess(self._server)
            try:
                await process.start()
                yield Episode(process, self._config)
            except BaseException:
                await process.kill()
                raise
            if process.is_worn:
                await process.kill()
            else:
                self._idle.append(process)


@dataclass(frozen=True, slots=True)
class Episode:
    """One episode in the process of an environment."""

    process: ForkedProcess
    config: Environment

    async def reset(self, seed: int, task: Task) -> tuple[Message, ...]:
        """Begin; the first observation."""
        found = await self._ask({"reset": {"seed": seed, "task": task_to_json(task)}}, "reset")
        return _to_messages(found)

    async def step(self, text: str) -> Step:
        """Take the policy's turn as an action."""
        found = await self._ask({"step": text}, "step")
        is_over = found["terminated"] or found["truncated"]
        return Step(_to_messages(found), found["reward"], is_over)

    async def _ask(self, request: Mapping[str, Any], what: str) -> dict[str, Any]:
        return await self.ask(request, self.config.step_timeout_s, what)

    async def ask(
        self, request: Mapping[str, Any], timeout_s: float, what: str = "the environment"
    ) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            EnvironmentFailed: there is none.
        """
        where = f"workflow.environment={self.config.environment}"
        try:
            reply = await self.process.ask(request, timeout_s)
        except TimeoutError:
            raise EnvironmentFailed(
                f"{where}: {what} did not return within workflow.step_timeout_s={timeout_s:g} s"
            ) from None
        except EOFError as error:
            ended = await self.process.kill(GRACE_S)
            raise EnvironmentFailed(f"{where}: {what}: {error} ({ended})") from None
        if "error" in reply:
            trace = f"\n{reply['trace']}" if reply["trace"] else ""
            raise EnvironmentFailed(f"{where}: {what} raised {reply['error']}{trace}")
        return reply


def _to_messages(found: Mapping[str, Any]) -> tuple[Message, ...]:
    return tuple(Message(each["role"], each["content"]) for each in found["messages"])


@dataclass(frozen=True, slots=True)
class Episodes:
    """Plays `num_samples` episodes of a task, all from the same observation.

    The turns of an episode are one sample, whose reward is the sum of the steps'.
    """

    config: Environment
    tokenizer: Tokenizer
    num_samples: int
    rewards: RewardConfig
    max_prompt_tokens: int
    host: EnvironmentHost

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        del grader  # the environment's steps have the rewards
        async with self.host.episode() as episode:
            first = await episode.reset(seed_of(task), task)
        prompt = self.tokenizer.render((*task.prompt, *first))
        if len(prompt) > self.max_prompt_tokens:
            raise EnvironmentFailed(
                f"workflow.environment={self.config.environment}: the first observation of task "
                f"{task.id} has {len(prompt)} tokens, and "
                f"engine.max_prompt_tokens={self.max_prompt_tokens}; raise it, or "
                "workflow.observation_tokens"
            )
        return tuple(
            await gather_graded(
                self._play(task, first, Call(prompt, each), generate)
                for each in await generate(prompt, self.num_samples)
            )
        )

    async def _play(
        self, task: Task, first: tuple[Message, ...], call: Call, generate: Generate
    ) -> Sample:
        calls, rewards, stop_reason = [call], list[float](), None
        async with self.host.episode() as episode:
            if await episode.reset(seed_of(task), task) != first:
                raise EnvironmentFailed(
                    f"workflow.environment={self.config.environment}: reset(seed={seed_of(task)}) "
                    "returned two different observations; expected it to depend on the seed alone"
                )
            while True:
                text = self.tokenizer.decode(calls[-1].completion.tokens)
                step = await episode.step(text)
                rewards.append(step.reward)
                if step.is_over or len(calls) == self.config.max_turns:
                    break
                prompt = build_next_prompt(self.tokenizer, calls[-1], step.messages)
                if len(prompt) > self.max_prompt_tokens:
                    stop_reason: StopReason | None = "length"
                    break
                (completion,) = await generate(prompt, 1)
                calls.append(Call(prompt, completion))
        return self._sample(calls, rewards, stop_reason)

    def _sample(
        self, calls: list[Call], rewards: list[float], stop_reason: StopReason | None
    ) -> Sample:
        try:
            kind, score, _ = graded(sum(rewards), self.rewards.scale)
        except ValueError as error:
            raise EnvironmentFailed(
                f"workflow.environment={self.config.environment}: the rewards of an episode: "
                f"{error}"
            ) from None
        grade = RewardResult(kind, score=score)
        correct, wrong = self.rewards.correct, self.rewards.wrong
        unit = 1.0 if kind == "scored" else correct - wrong
        (sample,) = make_samples(
            calls,
            [grade.to_reward(correct, wrong)] * len(calls),
            grade,
            stop_reason=stop_reason,
            step_rewards=[unit * reward for reward in rewards],
        )
        return sample


def seed_of(task: Task) -> int:
    """Return the seed with which the episodes of a task begin."""
    return int(task.answer) if task.kind == ENVIRONMENT else derive_seed(0, task.id)
