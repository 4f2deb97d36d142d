"""Environments of the user: classes with Gymnasium's `reset` and `step`, each in a process of its
own, and the conversations of their players with them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from jaxtyping import Int32

from areal_jax.errors import ConfigError, NotGraded
from areal_jax.protocols import Generate, Grader, Tokenizer
from areal_jax.records import (
    ENVIRONMENT,
    Completion,
    Message,
    RewardResult,
    Sample,
    StopReason,
    Task,
    derive_seed,
    task_to_json,
)
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.forks import (
    GRACE_S,
    MAX_LINE_BYTES,
    START_TIMEOUT_S,
    CannotStart,
    ForkedProcess,
    ForkServer,
)
from areal_jax.rewards.functions import graded
from areal_jax.workflows.config import Environment
from areal_jax.workflows.conversation import Call, build_next_prompt, make_samples
from areal_jax.workflows.single_turn import gather_graded


class EnvironmentFailed(NotGraded):
    """An environment raised, hung, died or returned no episode: the group is rejected."""


class Step(NamedTuple):
    """What begins an episode, or follows actions."""

    messages: Mapping[str, tuple[Message, ...]]
    """What each player that acts next observes."""
    rewards: Mapping[str, float]
    is_over: bool


@runtime_checkable
class Opponent(Protocol):
    """A frozen policy that plays against the one that is trained."""

    async def __call__(self, prompt_tokens: Int32[np.ndarray, "P"], key: str) -> Completion:
        """Return the answer to a prompt, which depends on it and on `key` alone.

        A resumed run therefore needs no journal of opponents.
        """
        ...


class EnvironmentHost:
    """Processes of an environment. A process plays one episode at a time."""

    def __init__(
        self, config: Environment, opponents: Mapping[str, Opponent] | None = None
    ) -> None:
        """Create a host; its first process starts with `start`.

        Args:
            config: settings of the environment.
            opponents: those of `workflow.opponents`, by name; None: the policy takes their place.

        Raises:
            ConfigError: the arguments are no JSON object.
        """
        self.opponents = opponents
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
                made = await episode.ask({"make": True}, START_TIMEOUT_S)
        except (EnvironmentFailed, CannotStart) as error:
            raise ConfigError(str(error)) from error
        if self._config.opponents and len(made["players"]) < 2:
            raise ConfigError(
                f"workflow.opponents={','.join(self._config.opponents)} with "
                f"workflow.environment={self._config.environment}, which has one player; give it "
                "an attribute `players` with two names or more, or leave out workflow.opponents"
            )

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

    async def reset(self, seed: int, task: Task) -> tuple[tuple[str, ...], Step]:
        """Begin; the players, and the first observations."""
        found = await self._ask({"reset": {"seed": seed, "task": task_to_json(task)}}, "reset")
        return tuple(found["players"]), Step(_to_messages(found), {}, False)

    async def step(self, actions: Mapping[str, str]) -> Step:
        """Take turns of players as their actions."""
        found = await self._ask({"step": actions}, "step")
        return Step(_to_messages(found), found["rewards"], found["is_over"])

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
        except ValueError:
            raise EnvironmentFailed(
                f"{where}: {what} returned more than {MAX_LINE_BYTES >> 20} MiB; expected an "
                "observation that the policy can read"
            ) from None
        except EOFError as error:
            ended = await self.process.kill(GRACE_S)
            raise EnvironmentFailed(f"{where}: {what}: {error} ({ended})") from None
        if "error" in reply:
            trace = f"\n{reply['trace']}" if reply["trace"] else ""
            raise EnvironmentFailed(f"{where}: {what} raised {reply['error']}{trace}")
        return reply


def _to_messages(found: Mapping[str, Any]) -> dict[str, tuple[Message, ...]]:
    return {
        player: tuple(Message(each["role"], each["content"]) for each in messages)
        for player, messages in found["messages"].items()
    }


@dataclass(slots=True)
class _Player:
    """One player of an episode: its view of the game as a conversation, and who answers."""

    answer: Callable[[Int32[np.ndarray, "P"], int], Awaitable[Completion]]
    """Answers a prompt, given the number of earlier ones."""
    is_trained: bool
    calls: list[Call] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Of each call; a reward after another player's turn counts as the last call's."""


@dataclass(frozen=True, slots=True)
class Episodes:
    """Plays `num_samples` episodes of a task, all from the same observations.

    The turns of a player are one sample, whose reward is the sum of the steps'.
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
            names, first = await episode.reset(seed_of(task), task)
        games = [self._seat(task, names, generate, number) for number in range(self.num_samples)]
        for name, messages in first.messages.items():
            prompt = self.tokenizer.render((*task.prompt, *messages))
            if len(prompt) > self.max_prompt_tokens:
                raise EnvironmentFailed(
                    f"workflow.environment={self.config.environment}: the first observation of "
                    f"task {task.id} has {len(prompt)} tokens, and "
                    f"engine.max_prompt_tokens={self.max_prompt_tokens}; raise it, or "
                    "workflow.observation_tokens"
                )
            trained = [players[name] for players in games if players[name].is_trained]
            if trained:
                opening = await generate(prompt, len(trained))
                for player, completion in zip(trained, opening, strict=True):
                    player.calls.append(Call(prompt, completion))
        found = await gather_graded(self._play(task, first, players) for players in games)
        return tuple(sample for samples in found for sample in samples)

    def _seat(
        self, task: Task, names: Sequence[str], generate: Generate, number: int
    ) -> dict[str, _Player]:
        """Give each player of an episode to the policy or to an opponent.

        The policy's seat changes from one episode of a group to the next.
        """

        async def ask_policy(prompt: Int32[np.ndarray, "P"], _: int) -> Completion:
            (completion,) = await generate(prompt, 1)
            return completion

        chosen, opponents = self.config.opponents, self.host.opponents
        if not chosen or opponents is None:
            return {name: _Player(ask_policy, True) for name in names}
        own = names[(derive_seed(0, f"{task.id}/seat") + number) % len(names)]

        def seat(name: str) -> _Player:
            if name == own:
                return _Player(ask_policy, True)
            key = f"{task.id}/{number}/{name}"
            opponent = opponents[chosen[derive_seed(0, key) % len(chosen)]]
            return _Player(lambda prompt, turn: opponent(prompt, f"{key}/{turn}"), False)

        return {name: seat(name) for name in names}

    async def _play(
        self, task: Task, first: Step, players: Mapping[str, _Player]
    ) -> tuple[Sample, ...]:
        stop_reason: StopReason | None = None
        async with self.host.episode() as episode:
            if await episode.reset(seed_of(task), task) != (tuple(players), first):
                raise EnvironmentFailed(
                    f"workflow.environment={self.config.environment}: reset(seed={seed_of(task)}) "
                    "returned two different observations; expected it to depend on the seed alone"
                )
            step = first
            for turn in range(self.config.max_turns):
                acting = [players[name] for name in step.messages]
                if turn or not all(player.calls for player in acting):
                    prompts = [
                        self._next_prompt(task, player, messages)
                        for player, messages in zip(acting, step.messages.values(), strict=True)
                    ]
                    if max(map(len, prompts)) > self.max_prompt_tokens:
                        stop_reason = "length"
                        break
                    await self._answer(acting, prompts, is_first=not turn)
                texts = map(self._take_turn, acting)
                step = await episode.step(dict(zip(step.messages, texts, strict=True)))
                for name, reward in step.rewards.items():
                    if players[name].rewards:
                        players[name].rewards[-1] += reward
                if step.is_over:
                    break
        return tuple(
            self._sample(player, stop_reason)
            for player in players.values()
            if player.is_trained and player.calls
        )

    def _next_prompt(
        self, task: Task, player: _Player, messages: tuple[Message, ...]
    ) -> Int32[np.ndarray, "P"]:
        if player.calls:
            return build_next_prompt(self.tokenizer, player.calls[-1], messages)
        return self.tokenizer.render((*task.prompt, *messages))

    async def _answer(
        self,
        players: Sequence[_Player],
        prompts: Sequence[Int32[np.ndarray, "P"]],
        *,
        is_first: bool,
    ) -> None:
        """Have players answer at the same time; first answers of the policy are there already."""

        async def answer(player: _Player, prompt: Int32[np.ndarray, "P"]) -> None:
            completion = await player.answer(prompt, len(player.calls))
            player.calls.append(Call(prompt, completion))

        async with asyncio.TaskGroup() as answering:
            for player, prompt in zip(players, prompts, strict=True):
                if not (is_first and player.calls):
                    answering.create_task(answer(player, prompt))

    def _take_turn(self, player: _Player) -> str:
        player.rewards.append(0.0)
        return self.tokenizer.decode(player.calls[-1].completion.tokens)

    def _sample(self, player: _Player, stop_reason: StopReason | None) -> Sample:
        try:
            kind, score, _ = graded(sum(player.rewards), self.rewards.scale)
        except ValueError as error:
            raise EnvironmentFailed(
                f"workflow.environment={self.config.environment}: the rewards of an episode: "
                f"{error}"
            ) from None
        grade = RewardResult(kind, score=score)
        correct, wrong = self.rewards.correct, self.rewards.wrong
        unit = 1.0 if kind == "scored" else correct - wrong
        (sample,) = make_samples(
            player.calls,
            [grade.to_reward(correct, wrong)] * len(player.calls),
            grade,
            stop_reason=stop_reason,
            step_rewards=[unit * reward for reward in player.rewards],
        )
        return sample


def seed_of(task: Task) -> int:
    """Return the seed with which the episodes of a task begin."""
    return int(task.answer) if task.kind == ENVIRONMENT else derive_seed(0, task.id)
