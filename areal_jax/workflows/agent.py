"""Agents: user programs that call the policy through an OpenAI-compatible API, and the samples of
their calls.

Agents never run in the training process: functions run in worker processes, several in each;
commands run in a process each. Each such process has a guard, which kills it and its descendants.

The file has more than 400 lines because hosts, workers and guards share the rules by which an agent
is cancelled, restarted or blamed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import pickle
import shlex
import shutil
import struct
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from areal_jax.errors import EngineStopped
from areal_jax.protocols import Generate, Grader, Session, Sessions, Tokenizer
from areal_jax.records import Completion, RewardResult, Sample, Task, task_to_json
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.functions import graded
from areal_jax.rewards.processes import ending
from areal_jax.threads import log_failure
from areal_jax.workflows import guard
from areal_jax.workflows.config import Agent, Verifiers
from areal_jax.workflows.conversation import Call, Export, make_samples
from areal_jax.workflows.single_turn import gather_graded, grade_answer

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S, LOAD_TIMEOUT_S = 10.0, 120.0

MAX_WORKERS = 16
"""Maximum number of worker processes. One is enough until an agent blocks it."""

# Limit on an agent's first step; beyond it the worker counts as blocked, and gets no more agents.
_STEP_S = 0.25
# Limit on the end of a cancelled agent; beyond it the worker is retired.
_CANCEL_S = 2.0
# Maximum number of restarts of an agent because another one blocked its worker.
_MAX_MOVES = 3
# Maximum length of a worker's message, in bytes.
_MAX_LINE = 1 << 20


class AgentFailed(RuntimeError):
    """An agent raised, was killed or made no calls: its group is rejected."""


class RemoteTraceback(RuntimeError):
    """Traceback of an agent's error, formatted in its process."""


def _failure(task: Task, error: BaseException) -> AgentFailed:
    """Return the failure of an agent that raised an error."""
    text = str(error)
    if not isinstance(error.__cause__, RemoteTraceback):
        text = f"{type(error).__name__}: {error}"
    return AgentFailed(f"the agent on task {task.id} failed: {text}")


class AgentWorkerDied(RuntimeError):
    """The worker process of an agent has ended."""

    def __init__(self, message: str, *, was_alone: bool) -> None:
        """Create the error.

        Args:
            message: text of the error.
            was_alone: whether the agent was alone in its worker, so that no other can be the cause.
        """
        super().__init__(message)
        self.was_alone = was_alone


class WorkerBlocked(AgentWorkerDied):
    """Another agent blocks an agent's worker process."""


@dataclass(frozen=True, slots=True)
class Agents:
    """Runs `num_samples` agents on a task, each in its own session, and makes samples of their
    calls.

    All calls of an agent share its reward. If an agent returns None, its last answer is graded.
    """

    tokenizer: Tokenizer
    num_samples: int
    rewards: RewardConfig
    host: Runner
    # Bounds concurrent agents, first come, first served; an agent's deadline starts once it runs.
    # Evaluations have their own semaphore: training's agents may wait until a pinned evaluation
    # releases the weights.
    slots: asyncio.Semaphore
    export: Export = "concatenated"

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        episodes = (self._episode(task, generate, grader) for _ in range(self.num_samples))
        return tuple(sample for episode in await gather_graded(episodes) for sample in episode)

    async def _episode(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        async with self.slots:
            result, sampled = await self.host.run(task, generate)
        calls = [Call(prompt, completion) for prompt, completion in sampled]
        if not calls:
            raise AgentFailed(
                f"the agent on task {task.id} failed: expected a call of the policy, found none"
            )
        if result is None:
            grade = await grade_answer(
                task, grader, self.tokenizer.decode(calls[-1].completion.tokens)
            )
        else:
            try:
                kind, score, components = graded(result, self.rewards.scale)
            except (TypeError, ValueError) as error:
                raise AgentFailed(f"result of the agent on task {task.id}: {error}") from None
            grade = RewardResult(kind, score=score, components=components)
        reward = grade.to_reward(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer)
        return make_samples(calls, [reward] * len(calls), grade, export=self.export)


def _arguments(config: Agent) -> str:
    """Return the keyword arguments of the agent's function, as JSON.

    Raises:
        ValueError: the settings have none.
    """
    try:
        found = json.loads(config.arguments)
    except ValueError as error:
        found = error
    if not isinstance(found, dict):
        raise ValueError(
            "workflow.arguments: expected a JSON object of keyword arguments such as "
            f'{{"retries": 2}}, found {config.arguments!r}'
        )
    if isinstance(config, Verifiers):
        found = {
            "environment": config.environment,
            "settings": found,
            "renderer": config.renderer,
        }
    return json.dumps(found)


SampledTokens = tuple[tuple[Int32[np.ndarray, "P"], Completion], ...]


@runtime_checkable
class Runner(Protocol):
    """Runs agents."""

    async def run(self, task: Task, generate: Generate) -> tuple[object, SampledTokens]:
        """Run an agent on a task; return its result and its calls."""
        ...


class AgentHost:
    """Runs the agents of training and evaluations."""

    def __init__(self, config: Agent, sessions: Sessions) -> None:
        """Create a host.

        Args:
            config: settings of the agents.
            sessions: serves the policy to them.

        Raises:
            ValueError: not exactly one of function and command is set, the command is no program,
                or the arguments are no JSON object.
        """
        if (config.function is None) == (config.command is None):
            raise ValueError(
                "expected one of workflow.function and workflow.command, found "
                f"workflow.function={config.function} and workflow.command={config.command}"
            )
        self._config, self._sessions = config, sessions
        self._argv = [] if config.command is None else parse_command(config.command)
        self._workers = (
            None
            if config.function is None
            else Workers(config.function, _arguments(config), config.stall_warning_s)
        )
        # Deadlines of training's running agents, with the time left of each when its clock was
        # stopped.
        self._deadlines = dict[asyncio.Timeout, float]()
        self._num_paused = 0

    async def start(self) -> None:
        """Load the function.

        Raises:
            ValueError: the function cannot be loaded; the message holds its error.
        """
        if self._workers is not None:
            await self._workers.start()

    async def close(self) -> None:
        """Kill all agents and their descendants."""
        if self._workers is not None:
            await self._workers.close()

    @contextmanager
    def evaluating(self, *, holds: bool) -> Iterator[Runner]:
        """Yield the runner of an evaluation's agents.

        Args:
            holds: whether the evaluation pins the weights; then the clocks of training's agents
                stop meanwhile.
        """
        if holds:
            self._num_paused += 1
            self._reschedule()
        try:
            yield _EvaluationRunner(self)
        finally:
            if holds:
                self._num_paused -= 1
                self._reschedule()

    def _reschedule(self) -> None:
        """Stop or restart the clocks of training's agents."""
        now_s = asyncio.get_running_loop().time()
        for deadline, left_s in self._deadlines.items():
            when_s = deadline.when()
            if deadline.expired():
                continue
            if self._num_paused and when_s is not None:
                self._deadlines[deadline] = when_s - now_s
                deadline.reschedule(None)
            elif not self._num_paused and when_s is None:
                deadline.reschedule(now_s + left_s)

    @asynccontextmanager
    async def _deadline(self, *, is_held: bool) -> AsyncIterator[asyncio.Timeout]:
        timeout_s = self._config.timeout_s
        async with asyncio.timeout(timeout_s) as deadline:
            if is_held:
                self._deadlines[deadline] = timeout_s
                if self._num_paused:
                    deadline.reschedule(None)
            try:
                yield deadline
            finally:
                self._deadlines.pop(deadline, None)

    async def run(self, task: Task, generate: Generate) -> tuple[object, SampledTokens]:
        """Run an agent of training on a task; return its result and its calls.

        Raises:
            TimeoutError: it ran for workflow.timeout_s, not counting pinned evaluations.
            AgentFailed: it failed, with its own error as cause.
            EngineStopped: the engine stopped, and the agent failed because of it.
        """
        return await self.attempt(task, generate, is_held=True)

    async def attempt(
        self, task: Task, generate: Generate, *, is_held: bool
    ) -> tuple[object, SampledTokens]:
        """Run an agent, as `run` does.

        Args:
            task: the task.
            generate: samples the session's calls.
            is_held: whether its clock stops while an evaluation pins the weights.
        """
        stopped = list[EngineStopped]()

        async def generate_and_watch(
            prompt_tokens: Int32[np.ndarray, "P"], num_samples: int, **how: Any
        ) -> list[Completion]:
            try:
                return await generate(prompt_tokens, num_samples, **how)
            except EngineStopped as error:
                stopped.append(error)
                raise

        deadline, is_alone, num_moves = None, False, 0
        while True:
            async with self._sessions.open(generate_and_watch) as session:
                place = None
                try:
                    if self._workers is not None:
                        # Its clock starts once it has a worker.
                        place = await self._workers.find(
                            is_alone=is_alone, may_move=num_moves < _MAX_MOVES
                        )
                    async with self._deadline(is_held=is_held) as deadline:
                        result = await self._run(task, session, place)
                except TimeoutError as error:
                    if deadline is None or not deadline.expired():
                        raise _failure(task, error) from error
                    line = "" if place is None else await place.worker.retire_after(place.number)
                    raise TimeoutError(
                        f"the agent on task {task.id} has not ended within "
                        f"workflow.timeout_s={self._config.timeout_s:g}"
                        + (f"; it was at {line}" if line else "")
                    ) from error
                except AgentWorkerDied as error:
                    if not error.was_alone:
                        # Another agent may be the cause: restart this one in another worker, alone
                        # if its own worker died.
                        is_moved = isinstance(error, WorkerBlocked)
                        is_alone, num_moves = is_alone or not is_moved, num_moves + is_moved
                        continue
                    raise AgentFailed(f"the agent on task {task.id} failed: {error}") from error
                # Untrusted code; counted in rollout/rejected/agent_failed.
                except Exception as error:
                    raise (stopped[0] if stopped else _failure(task, error)) from error
                return result, session.calls()

    async def _run(self, task: Task, session: Session, place: Place | None) -> Any:
        arguments = (task, session.base_url, session.api_key)
        return await (
            self._run_command(*arguments)
            if place is None
            else place.worker.run(place.number, *arguments)
        )

    async def _run_command(self, task: Task, base_url: str, api_key: str) -> Any:
        environment = {
            **os.environ,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            # Anthropic's clients append /v1 themselves.
            "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": api_key,
        }
        async with guarded(*self._argv, env=environment) as process:
            output, _ = await process.communicate(json.dumps(task_to_json(task)).encode())
        if process.returncode:
            raise RuntimeError(f"workflow.command ended with {ending(process.returncode)}")
        lines = output.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "null")
        try:
            return json.loads(last)
        except ValueError:
            raise ValueError(
                "workflow.command: expected a number from 0 to 1, or null, in the last line of "
                f"output, found {last[:100]!r}"
            ) from None


@dataclass(frozen=True, slots=True)
class _EvaluationRunner:
    """Runs agents of an evaluation, whose clocks never stop."""

    _host: AgentHost

    async def run(self, task: Task, generate: Generate) -> tuple[object, SampledTokens]:
        return await self._host.attempt(task, generate, is_held=False)


@asynccontextmanager
async def guarded(*argv: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program that is killed, with its descendants, when the body or this process ends."""
    lifeline, ours = os.pipe()
    with ExitStack() as close_on_error:
        close_on_error.callback(os.close, ours)
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", guard.__file__, str(lifeline), *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(lifeline,),
                start_new_session=True,
                limit=_MAX_LINE,
                **options,
            )
        finally:
            os.close(lifeline)
        close_on_error.pop_all()
    try:
        yield process
    finally:
        os.close(ours)
        # The guard ends after all that it guards. A process stuck in the kernel is left to the
        # guard.
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)


class Place(NamedTuple):
    """An agent's worker and its number there."""

    worker: AgentWorker
    number: int


class Workers:
    """Pool of worker processes that run agent functions.

    An agent goes to the least loaded worker that is not blocked by an agent's first step. If there
    is none, a new worker is started, up to MAX_WORKERS.
    """

    def __init__(self, function: str, arguments: str, stall_s: float) -> None:
        self._argv = (function, arguments, str(stall_s))
        self._workers = list[AgentWorker]()
        self._changed = asyncio.Event()
        """Set when a worker may take an agent; the waiter clears it."""
        self._numbers = count()
        self._starting = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Start the first worker.

        Raises:
            ValueError: the function cannot be loaded.
        """
        await self._add()

    async def close(self) -> None:
        """Kill all workers."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def find(self, *, is_alone: bool, may_move: bool) -> Place:
        """Wait for a free worker and reserve it for an agent, which must run there next.

        Args:
            is_alone: whether no other agent may share the worker.
            may_move: whether the agent may be restarted if another one blocks the worker.
        """
        number = next(self._numbers)
        while True:
            self._workers = [worker for worker in self._workers if not worker.has_ended]
            usable = [worker for worker in self._workers if worker.is_free(alone=is_alone)]
            if usable:
                worker = min(usable, key=lambda worker: len(worker.agents))
                worker.take(number, is_alone=is_alone, may_move=may_move)
                return Place(worker, number)
            self._changed.clear()
            may_add = len(self._workers) < MAX_WORKERS and not self._starting.locked()
            if may_add and not any(worker.is_stepping for worker in self._workers):
                await self._add()
                continue
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _STEP_S)

    async def _add(self) -> None:
        async with self._starting:
            if self._closed:
                raise EngineStopped("the agent host is closed")
            worker = AgentWorker(self._changed)
            self._workers.append(worker)
            async with AsyncExitStack() as close_on_error:
                close_on_error.push_async_callback(worker.close)
                await worker.start(self._argv)
                close_on_error.pop_all()
        self._changed.set()


@dataclass(slots=True, eq=False)
class AgentWorker:
    """Host's view of one worker process.

    It has more than 200 lines because every message of the process changes the same state.
    """

    _changed: asyncio.Event
    agents: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """Results of the running agents, by number."""
    _tasks: dict[int, str] = field(default_factory=dict)
    """Task ids, by number."""
    _cancel_lines: dict[int, asyncio.Future[str]] = field(default_factory=dict)
    """Lines at which cancelled agents stood, by number."""
    # The agent whose first step is not done, and the start of the step.
    _stepping: tuple[int, float] | None = None
    _is_ready: bool = False
    _is_alone: bool = False
    _is_retired: bool = False
    _cancelled: set[int] = field(default_factory=set)
    _movable: set[int] = field(default_factory=set)
    has_ended: bool = False
    _process: asyncio.subprocess.Process | None = None
    _serving: asyncio.Task[None] | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _background: set[asyncio.Task[None]] = field(default_factory=set)

    def is_free(self, *, alone: bool) -> bool:
        """Return whether an agent may start here."""
        is_open = (
            self._is_ready
            and not self._is_retired
            and not self._is_alone
            and self._stepping is None
        )
        return is_open and not self.has_ended and not (alone and self.agents)

    @property
    def is_stepping(self) -> bool:
        """Whether an agent's first step is within its limit, so that the worker may soon be
        free.
        """
        now_s = asyncio.get_running_loop().time()
        return (
            self._stepping is not None
            and now_s - self._stepping[1] < _STEP_S
            and not self._is_retired
        )

    def take(self, number: int, *, is_alone: bool, may_move: bool) -> None:
        """Reserve the worker for an agent's first step."""
        if may_move:
            self._movable.add(number)
        loop = asyncio.get_running_loop()
        self.agents[number] = loop.create_future()
        self._stepping, self._is_alone = (number, loop.time()), is_alone

    async def start(self, argv: tuple[str, ...]) -> None:
        """Start the process.

        Raises:
            ValueError: it cannot load the function.
        """
        ready = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(ready, argv))
        try:
            await asyncio.wait_for(ready, LOAD_TIMEOUT_S)
        except TimeoutError:
            raise ValueError(f"loading it did not end within {LOAD_TIMEOUT_S:g} s") from None
        self._is_ready = True

    async def close(self) -> None:
        """Kill the process and its descendants."""
        self._stop.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        for task in self._background:
            task.cancel()

    async def run(self, number: int, task: Task, base_url: str, api_key: str) -> Any:
        """Run an agent for which `take` reserved the worker; return its result."""
        self._tasks[number] = task.id
        result = self.agents[number]
        try:
            self._send("start", number, task, base_url, api_key)
            return await result
        except (asyncio.CancelledError, WorkerBlocked):
            # It counts as running until the worker reports its end.
            if not self.has_ended:
                self._cancelled.add(number)
                self._cancel_lines[number] = asyncio.get_running_loop().create_future()
                self._send("cancel", number)
                self._run_in_background(self._end_cancelled(number))
            raise

    async def retire_after(self, number: int) -> str:
        """Retire the worker: it takes no more agents and ends once no other runs.

        Returns:
            The line at which the cancelled agent stood; empty if unknown.
        """
        line = ""
        if (reply := self._cancel_lines.get(number)) is not None:
            with suppress(TimeoutError):
                line = await asyncio.wait_for(reply, _CANCEL_S)
        self._retire()
        return line

    async def _end_cancelled(self, number: int) -> None:
        await asyncio.sleep(_CANCEL_S)
        self._cancel_lines.pop(number, None)
        if number in self.agents:
            self._retire()
            if self._stepping is not None:
                # It blocks the event loop of the other agents, which restart in another worker.
                self._stop.set()

    def _retire(self) -> None:
        self._is_retired = True
        self._changed.set()
        if self.agents.keys() <= self._cancelled:
            self._stop.set()

    def _run_in_background(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(log_failure)

    def _send(self, *message: Any) -> None:
        if (
            self._process is not None
            and self._process.stdin is not None
            and not self._process.stdin.is_closing()
        ):
            packed = pickle.dumps(message)
            self._process.stdin.write(struct.pack("!I", len(packed)) + packed)

    async def _serve(self, ready: asyncio.Future[None], argv: tuple[str, ...]) -> None:
        argv = (sys.executable, "-m", "areal_jax.workflows.agent_worker", *argv)
        killed = False
        try:
            async with guarded(*argv) as process:
                self._process = process
                reading, stopped = (
                    asyncio.create_task(self._read(ready)),
                    asyncio.create_task(self._stop.wait()),
                )
                await asyncio.wait([reading, stopped], return_when=asyncio.FIRST_COMPLETED)
                killed = not reading.done()
                for task in (reading, stopped):
                    task.cancel()
                if not killed:
                    # Its output has closed, so the process is ending; the guard reports its status.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
            cause = (
                "its worker was killed because of another agent"
                if killed
                else f"its process ended with {ending(process.returncode or 0)}"
            )
        finally:
            self.has_ended = True
            self._changed.set()
        if not ready.done():
            ready.set_exception(
                ValueError(f"loading it ended the process with {ending(process.returncode or 0)}")
            )
        working = {number: future for number, future in self.agents.items() if not future.done()}
        was_alone = len(working) == 1 and not killed
        for future in working.values():
            future.set_exception(AgentWorkerDied(cause, was_alone=was_alone))

    async def _read(self, ready: asyncio.Future[None]) -> None:
        assert self._process is not None and self._process.stdout is not None
        async for line in self._process.stdout:
            message = json.loads(line)
            self._handle(ready, message.pop("kind"), message)

    def _handle(self, ready: asyncio.Future[None], kind: str, message: Mapping[str, Any]) -> None:
        number = message.get("number")
        match kind:
            case "ready":
                ready.set_result(None)
            case "unloadable":
                ready.set_exception(ValueError(message["error"]))
            case "started" if self._stepping is not None and self._stepping[0] == number:
                self._stepping = None
                self._changed.set()
            case "ended":
                self._end(message["number"], message)
            case "cancelling" if (
                reply := self._cancel_lines.get(message["number"])
            ) is not None and not reply.done():
                reply.set_result(message["where"])
            case "blocked":
                name = (
                    "an agent" if number is None else f"the agent on task {self._tasks.get(number)}"
                )
                # New agents go to other workers until this one is free.
                self._stepping = self._stepping or (-1, -math.inf)
                logger.warning(
                    "event loop blocked: %s for %.1f s, %d other agents wait, at %s",
                    *(name, message["seconds"], len(self.agents) - 1, message["where"]),
                )
                for other in (
                    self._movable & self.agents.keys() - {number} if number is not None else ()
                ):
                    if not self.agents[other].done():
                        self.agents[other].set_exception(
                            WorkerBlocked("another agent blocks its process", was_alone=False)
                        )
            case "unblocked":
                logger.warning("event loop of agents unblocked after %.1f s", message["seconds"])
                if self._stepping is not None and self._stepping[0] == -1:
                    self._stepping = None
                self._changed.set()

    def _end(self, number: int, message: Mapping[str, Any]) -> None:
        future = self.agents.pop(number, None)
        self._tasks.pop(number, None)
        self._cancelled.discard(number)
        self._movable.discard(number)
        if not self.agents:
            self._is_alone = False
        if self._stepping is not None and self._stepping[0] == number:
            self._stepping = None
        if self._is_retired:
            self._retire()
        self._changed.set()
        if future is None or future.done():
            return
        if "error" in message:
            error = AgentFailed(message["error"])
            error.__cause__ = RemoteTraceback(message["trace"])
            future.set_exception(error)
        else:
            future.set_result(message["result"])


def parse_command(command: str) -> list[str]:
    """Split workflow.command into arguments.

    Raises:
        ValueError: its first word is no program that can be run here.
    """
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"workflow.command={command}: {error}") from None
    if not argv or shutil.which(argv[0]) is None:
        program = argv[0] if argv else "nothing"
        raise ValueError(
            f"workflow.command={command}: expected a program on the PATH, found {program}"
        )
    return argv
