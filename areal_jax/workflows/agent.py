"""Agents: programs of the user's that call the policy as OpenAI's API is called, and the samples
that come of their calls.

Where they run is a host's business, and never the process that trains: functions in workers,
several in each; commands in a process each. Each such process has a guard, which ends it with all
that it started.
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
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

from areal_jax.errors import EngineStopped
from areal_jax.protocols import Generate, Grader, Session, Sessions, Tokenizer
from areal_jax.records import Completion, RewardResult, Sample, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.functions import graded
from areal_jax.rewards.processes import ending
from areal_jax.workflows import guard
from areal_jax.workflows.config import Agent
from areal_jax.workflows.conversation import Call, Export, make_samples
from areal_jax.workflows.single_turn import grade_answer, side_by_side

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S, LOAD_TIMEOUT_S = 10.0, 120.0

MAX_WORKERS = 16
"""Processes of function agents at the same time. One is enough until an agent blocks it."""

# An agent whose first step takes longer is taken to block its worker; the next agents go to another
# one.
_STEP_S = 0.25
# An agent that was cancelled has so long to end before its worker takes no more of them.
_CANCEL_S = 2.0
# So often an agent starts again because another one has blocked its worker.
_MAX_MOVES = 3
# Of a line that a worker sends.
_MAX_LINE = 1 << 20


class AgentFailed(RuntimeError):
    """An agent that ended otherwise than by returning: its group is not trained on."""


class RemoteTraceback(RuntimeError):
    """The traceback of an agent's error, as its process wrote it."""


class AgentWorkerDied(RuntimeError):
    """The process in which an agent ran has ended."""

    def __init__(self, message: str, *, was_alone: bool) -> None:
        """Args: was_alone: no other agent can be the cause."""
        super().__init__(message)
        self.was_alone = was_alone


class WorkerBlocked(AgentWorkerDied):
    """Another agent blocks the process in which an agent ran."""


@dataclass(frozen=True, slots=True)
class Agents:
    """Let `num_samples` agents work on a task, each in a session of its own; what the policy said
    in them becomes samples.

    A reward belongs to all of an agent's calls. One that returns none has its last answer
    graded."""

    tokenizer: Tokenizer
    num_samples: int
    rewards: RewardConfig
    host: Runner
    # A place for each agent at work, given in order of asking; each has a deadline once it has one.
    # Those of an evaluation are not those of training, whose agents may hold theirs until the
    # evaluation lets newer weights come.
    places: asyncio.Semaphore
    export: Export = "concatenated"

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        episodes = (self._episode(task, generate, grader) for _ in range(self.num_samples))
        return tuple(sample for episode in await side_by_side(episodes) for sample in episode)

    async def _episode(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        async with self.places:
            found, sampled = await self.host.run(task, generate)
        calls = [Call(prompt, completion) for prompt, completion in sampled]
        if not calls:
            raise AgentFailed(f"the agent on task {task.id} has ended without a call of the policy")
        if found is None:
            grade = await grade_answer(
                task, grader, self.tokenizer.decode(calls[-1].completion.tokens)
            )
        else:
            try:
                kind, score = graded(found, self.rewards.scale)
            except (TypeError, ValueError) as error:
                raise AgentFailed(f"what the agent on task {task.id} returned: {error}") from None
            grade = RewardResult(kind, score=score)
        reward = grade.to_reward(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer)
        return make_samples(calls, [reward] * len(calls), grade.kind, export=self.export)


SampledTokens = tuple[tuple[Int32[np.ndarray, "P"], Completion], ...]


@runtime_checkable
class Runner(Protocol):
    """Whoever runs agents."""

    async def run(self, task: Task, generate: Generate) -> tuple[object, SampledTokens]:
        """Let an agent work on a task; what it says it is worth, and the calls that it made."""
        ...


class AgentHost:
    """Runs agents, of training and of evaluations."""

    def __init__(self, config: Agent, sessions: Sessions) -> None:
        """ValueError unless there is one of function and command, and where no program is what the
        command names."""
        if (config.function is None) == (config.command is None):
            raise ValueError(
                f"workflow.function={config.function} and workflow.command={config.command}: "
                "expected one of them"
            )
        self._config, self._sessions = config, sessions
        self._argv = [] if config.command is None else parse_command(config.command)
        self._workers = (
            None if config.function is None else Workers(config.function, config.stall_warning_s)
        )
        # Deadlines of agents at work in training, and what was left of each when the clock was
        # stopped.
        self._deadlines = dict[asyncio.Timeout, float]()
        self._num_paused = 0

    async def start(self) -> None:
        """Load the function. ValueError where its file cannot be loaded, with its error."""
        if self._workers is not None:
            await self._workers.start()

    async def close(self) -> None:
        """End all agents, with all that they started."""
        if self._workers is not None:
            await self._workers.close()

    @contextmanager
    def evaluating(self, *, holds: bool) -> Iterator[Runner]:
        """Yield the runner of an evaluation's agents.

        Args: holds: the evaluation holds the weights, so that the clocks of training's agents stop
            meanwhile."""
        if holds:
            self._num_paused += 1
            self._reschedule()
        try:
            yield _OfEvaluation(self)
        finally:
            if holds:
                self._num_paused -= 1
                self._reschedule()

    def _reschedule(self) -> None:
        """Stop the clock of every agent in training, or let it go on."""
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
        """Let an agent of training work on a task; what it says it is worth, and the calls that it
        made.

        TimeoutError after workflow.timeout_s, in which no evaluation holds the weights.
        AgentFailed, with the agent's own error as cause, where it fails; EngineStopped where that
        is why."""
        return await self.attempt(task, generate, is_held=True)

    async def attempt(
        self, task: Task, generate: Generate, *, is_held: bool
    ) -> tuple[object, SampledTokens]:
        """`run`. Args: is_held: its clock stops while an evaluation holds the weights."""
        stopped = list[EngineStopped]()

        async def watched(
            prompt_tokens: Int32[np.ndarray, "P"], num_samples: int, **how: Any
        ) -> list[Completion]:
            try:
                return await generate(prompt_tokens, num_samples, **how)
            except EngineStopped as error:
                stopped.append(error)
                raise

        deadline, is_alone, num_moves = None, False, 0
        while True:
            async with self._sessions.open(watched) as session:
                place = None
                try:
                    if self._workers is not None:
                        # Its clock does not run before there is a worker for it.
                        place = await self._workers.find(
                            is_alone=is_alone, may_move=num_moves < _MAX_MOVES
                        )
                    async with self._deadline(is_held=is_held) as deadline:
                        found = await self._found(task, session, place)
                except TimeoutError as error:
                    if deadline is not None and deadline.expired():
                        line = (
                            "" if place is None else await place.worker.retire_after(place.number)
                        )
                        raise TimeoutError(
                            (
                                f"the agent on task {task.id} has not ended within "
                                f"workflow.timeout_s={self._config.timeout_s:g}"
                            )
                            + (f"; it was at {line}" if line else "")
                        ) from error
                    raise AgentFailed(
                        f"the agent on task {task.id} failed: TimeoutError: {error}"
                    ) from error
                except AgentWorkerDied as error:
                    if not error.was_alone:
                        # Another agent is the cause, or may be: again, in another process, or in
                        # one of its own.
                        is_moved = isinstance(error, WorkerBlocked)
                        is_alone, num_moves = is_alone or not is_moved, num_moves + is_moved
                        continue
                    raise AgentFailed(f"the agent on task {task.id} failed: {error}") from error
                except Exception as error:
                    if stopped:
                        raise stopped[0] from error
                    words = (
                        str(error)
                        if isinstance(error.__cause__, RemoteTraceback)
                        else f"{type(error).__name__}: {error}"
                    )
                    raise AgentFailed(f"the agent on task {task.id} failed: {words}") from error
                return found, session.calls()

    async def _found(self, task: Task, session: Session, place: Place | None) -> Any:
        given = (task, session.base_url, session.api_key)
        return await (
            self._command(*given) if place is None else place.worker.run(place.number, *given)
        )

    async def _command(self, task: Task, base_url: str, api_key: str) -> Any:
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        async with guarded(*self._argv, env=environment) as process:
            output, _ = await process.communicate(json.dumps(asdict(task)).encode())
        if process.returncode:
            raise RuntimeError(f"workflow.command ended with {ending(process.returncode)}")
        lines = output.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "null")
        try:
            return json.loads(last)
        except ValueError:
            raise ValueError(
                "expected the last line of output to be a number from 0 to 1, or null, came "
                f"{last[:100]!r}"
            ) from None


@dataclass(frozen=True, slots=True)
class _OfEvaluation:
    """Runs agents whose clocks never stop."""

    _host: AgentHost

    async def run(self, task: Task, generate: Generate) -> tuple[object, SampledTokens]:
        return await self._host.attempt(task, generate, is_held=False)


@asynccontextmanager
async def guarded(*argv: str, **how: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that ends with the body, or with this process, and with it all that it started."""
    lifeline, ours = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", guard.__file__, str(lifeline), *argv),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(lifeline,),
            start_new_session=True,
            limit=_MAX_LINE,
            **how,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(lifeline)
    try:
        yield process
    finally:
        os.close(ours)
        # Its end is that of all that it guards; a process that the kernel does not let end is left
        # to it.
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)


class Place(NamedTuple):
    """Where an agent runs."""

    worker: Worker
    number: int


class Workers:
    """The processes in which functions of agents run, several in each.

    An agent goes to the worker with the fewest agents among those that have run the first step of
    each. Where there is none, agents block their workers, and a new one is started, up to
    MAX_WORKERS."""

    def __init__(self, function: str, stall_s: float) -> None:
        self._function, self._stall_s = function, stall_s
        self._workers = list[Worker]()
        self._changed = asyncio.Event()
        """Set when a worker may take an agent, and cleared by whoever looks."""
        self._numbers = count()
        self._starting = asyncio.Lock()
        self._closed = False

    async def start(self) -> None:
        """Start the first. ValueError where the function cannot be loaded."""
        await self._add()

    async def close(self) -> None:
        """End all."""
        self._closed = True
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def find(self, *, is_alone: bool, may_move: bool) -> Place:
        """Wait for a place, in which the agent has to run next.

        Args: is_alone: no other agent shares the worker. may_move: the agent can start again where
            another one blocks it."""
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
                raise EngineStopped("the run's agents are closed")
            worker = Worker(self._changed)
            self._workers.append(worker)
            try:
                await worker.start(self._function, self._stall_s)
            except BaseException:
                await worker.close()
                raise
        self._changed.set()


@dataclass(slots=True, eq=False)
class Worker:
    """One process, as its host sees it."""

    _changed: asyncio.Event
    agents: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    """By number: what each that is at work returns."""
    _tasks: dict[int, str] = field(default_factory=dict)
    _asked: dict[int, asyncio.Future[str]] = field(default_factory=dict)
    # The agent whose first step is not done, and since when.
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
    _later: set[asyncio.Task[None]] = field(default_factory=set)

    def is_free(self, *, alone: bool) -> bool:
        """Whether an agent may start here."""
        is_open = (
            self._is_ready
            and not self._is_retired
            and not self._is_alone
            and self._stepping is None
        )
        return is_open and not self.has_ended and not (alone and self.agents)

    @property
    def is_stepping(self) -> bool:
        """Whether it may be free in a moment."""
        now_s = asyncio.get_running_loop().time()
        return (
            self._stepping is not None
            and now_s - self._stepping[1] < _STEP_S
            and not self._is_retired
        )

    def take(self, number: int, *, is_alone: bool, may_move: bool) -> None:
        """Give a place to an agent."""
        if may_move:
            self._movable.add(number)
        loop = asyncio.get_running_loop()
        self.agents[number] = loop.create_future()
        self._stepping, self._is_alone = (number, loop.time()), is_alone

    async def start(self, function: str, stall_s: float) -> None:
        """Start the process. ValueError where it cannot load the function."""
        ready = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve(ready, function, stall_s))
        try:
            await asyncio.wait_for(ready, LOAD_TIMEOUT_S)
        except TimeoutError:
            raise ValueError(f"loading it has not ended within {LOAD_TIMEOUT_S:g} s") from None
        self._is_ready = True

    async def close(self) -> None:
        """End the process with all that it started."""
        self._stop.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
        for task in self._later:
            task.cancel()

    async def run(self, number: int, task: Task, base_url: str, api_key: str) -> Any:
        """What the agent returns; it has a place."""
        self._tasks[number] = task.id
        ended = self.agents[number]
        try:
            self._send("start", number, task, base_url, api_key)
            return await ended
        except (asyncio.CancelledError, WorkerBlocked):
            # It is at work until it says that it has ended.
            if not self.has_ended:
                self._cancelled.add(number)
                self._asked[number] = asyncio.get_running_loop().create_future()
                self._send("cancel", number)
                self._in_a_while(self._end_cancelled(number))
            raise

    async def retire_after(self, number: int) -> str:
        """Take no more agents, and end as soon as no other is at work. Returns the line at which
        the agent stands."""
        line = ""
        if (asked := self._asked.get(number)) is not None:
            with suppress(TimeoutError):
                line = await asyncio.wait_for(asked, _CANCEL_S)
        self._retire()
        return line

    async def _end_cancelled(self, number: int) -> None:
        await asyncio.sleep(_CANCEL_S)
        self._asked.pop(number, None)
        if number in self.agents:
            self._retire()
            if self._stepping is not None:
                # It blocks the loop in which the others wait: they start again elsewhere.
                self._stop.set()

    def _retire(self) -> None:
        self._is_retired = True
        self._changed.set()
        if self.agents.keys() <= self._cancelled:
            self._stop.set()

    def _in_a_while(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._later.add(task)
        task.add_done_callback(self._later.discard)

    def _send(self, *message: Any) -> None:
        if (
            self._process is not None
            and self._process.stdin is not None
            and not self._process.stdin.is_closing()
        ):
            packed = pickle.dumps(message)
            self._process.stdin.write(struct.pack("!I", len(packed)) + packed)

    async def _serve(self, ready: asyncio.Future[None], function: str, stall_s: float) -> None:
        argv = (sys.executable, "-m", "areal_jax.workflows.agent_worker", function, str(stall_s))
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
                    # Its output has ended, and so does the process: how, its guard says.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
            how = (
                "it was ended with another agent"
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
            future.set_exception(AgentWorkerDied(how, was_alone=was_alone))

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
                asked := self._asked.get(message["number"])
            ) is not None and not asked.done():
                asked.set_result(message["where"])
            case "blocked":
                name = (
                    "an agent" if number is None else f"the agent on task {self._tasks.get(number)}"
                )
                # The next agents go elsewhere until it is free again.
                self._stepping = self._stepping or (-1, -math.inf)
                logger.warning(
                    (
                        "%s has blocked its event loop for %.1f s, and the %d agents that share it "
                        "wait: %s"
                    ),
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
                logger.warning("the event loop of agents goes on after %.1f s", message["seconds"])
                if self._stepping is not None and self._stepping[0] == -1:
                    self._stepping = None
                self._changed.set()

    def _end(self, number: int, ended: Mapping[str, Any]) -> None:
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
        if "error" in ended:
            error = AgentFailed(ended["error"])
            error.__cause__ = RemoteTraceback(ended["trace"])
            future.set_exception(error)
        else:
            future.set_result(ended["found"])


def parse_command(command: str) -> list[str]:
    """The words of workflow.command. ValueError where the first of them is no program that can be
    run here."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"workflow.command={command}: {error}") from None
    if not argv or shutil.which(argv[0]) is None:
        program = argv[0] if argv else "nothing"
        raise ValueError(
            f"workflow.command={command}: expected a program that can be run, came {program}"
        )
    return argv
