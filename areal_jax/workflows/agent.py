"""Agents: programs of the user's that call the policy as OpenAI's API is called, and the samples that come of their calls.

Where they run is a host's business: async functions in the event loop of a thread of their own, other functions in a thread
each, commands as processes. None of them can hold up the thread that counts.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import shlex
import shutil
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import psutil
from jaxtyping import Int32

from areal_jax.records import (
    Completion,
    EngineStopped,
    Generate,
    Judge,
    Sample,
    Session,
    Sessions,
    Task,
    Tokenizer,
    Verdict,
)
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.functions import graded, load_function
from areal_jax.rewards.processes import ending, kill_tree
from areal_jax.threads import in_thread
from areal_jax.workflows.config import Agent
from areal_jax.workflows.conversation import Call, Export, samples_of
from areal_jax.workflows.single_turn import judged, side_by_side

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class AgentFailed(RuntimeError):
    """An agent that ended otherwise than by returning: its group is not trained on."""


@dataclass(frozen=True, slots=True)
class Agents:
    """Let `num_samples` agents work on a task, each in a session of its own; what the policy said in them becomes samples.

    A reward belongs to all of an agent's calls. One that returns none has its last answer judged."""

    tokenizer: Tokenizer
    num_samples: int
    rewards: RewardConfig
    host: AgentHost
    # A place for each agent at work, given in order of asking; each has a deadline once it has one. Those of an evaluation are
    # not those of training, whose agents may hold theirs until the evaluation lets newer weights come.
    places: asyncio.Semaphore
    export: Export = "concatenated"

    async def __call__(self, task: Task, generate: Generate, judge: Judge) -> tuple[Sample, ...]:
        episodes = (self._episode(task, generate, judge) for _ in range(self.num_samples))
        return tuple(sample for episode in await side_by_side(episodes) for sample in episode)

    async def _episode(self, task: Task, generate: Generate, judge: Judge) -> tuple[Sample, ...]:
        async with self.places:
            found, drawn = await self.host.run(task, generate)
        calls = [Call(prompt, completion) for prompt, completion in drawn]
        if not calls:
            raise AgentFailed(f"the agent on task {task.id} has ended without a call of the policy")
        if found is None:
            verdict = await judged(task, judge, self.tokenizer.decode(calls[-1].completion.tokens))
        else:
            try:
                kind, score = graded(found, self.rewards.scale)
            except (TypeError, ValueError) as error:
                raise AgentFailed(f"what the agent on task {task.id} returned: {error}") from None
            verdict = Verdict(kind, score=score)
        reward = verdict.worth(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer)
        return samples_of(calls, [reward] * len(calls), verdict.kind, export=self.export)


Drawn = tuple[tuple[Int32[np.ndarray, "_"], Completion], ...]


class AgentHost:
    """Runs agents."""

    def __init__(self, config: Agent, sessions: Sessions) -> None:
        """Whatever is wrong with the function's file is raised. ValueError unless there is one of function and command, and
        where no program is what the command names."""
        if (config.function is None) == (config.command is None):
            raise ValueError(f"workflow.function={config.function} and workflow.command={config.command}: expected one of them")
        self._config, self._sessions = config, sessions
        self._function = None if config.function is None else load_function(config.function)
        self._argv = [] if config.command is None else argv_of(config.command)
        # The loop of async functions: started with the first of them, ended by `close`. A daemon, for a function that blocks
        # it cannot be ended.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._at_work: list[str] = []
        """Tasks that async functions work on; the loop's own thread adds and removes them."""

    async def run(self, task: Task, generate: Generate) -> tuple[object, Drawn]:
        """Let an agent work on a task; what it says it is worth, and the calls that it made.

        TimeoutError after workflow.timeout_s. AgentFailed, with the agent's own error as cause, where it fails; EngineStopped
        where that is why."""
        stopped = list[EngineStopped]()

        async def watched(prompt_tokens: Int32[np.ndarray, "P"], num_samples: int, **how: Any) -> list[Completion]:
            try:
                return await generate(prompt_tokens, num_samples, **how)
            except EngineStopped as error:
                stopped.append(error)
                raise

        timeout_s = self._config.timeout_s
        deadline = asyncio.timeout(timeout_s)
        async with self._sessions.open(watched) as session:
            try:
                async with deadline:
                    found = await self._found(task, session)
            except TimeoutError as error:
                if deadline.expired():
                    raise TimeoutError(f"the agent on task {task.id} has not ended within {timeout_s:g} s") from error
                raise AgentFailed(f"the agent on task {task.id} failed: TimeoutError: {error}") from error
            except Exception as error:
                if stopped:
                    raise stopped[0] from error
                raise AgentFailed(f"the agent on task {task.id} failed: {type(error).__name__}: {error}") from error
            return found, session.calls()

    async def _found(self, task: Task, session: Session) -> Any:
        given, function = (task, session.base_url, session.api_key), self._function
        if function is None:
            return await self._command(*given)
        if inspect.iscoroutinefunction(function):
            return await self._in_loop(self._worked(task, function(*given)))
        return await in_thread(partial(_called, partial(function, *given)), "agent")

    async def _in_loop(self, agent: Coroutine[Any, Any, Any]) -> Any:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._run, args=(self._loop,), name="agents", daemon=True)
            self._thread.start()
        # Cancelling the wrapped future cancels the agent.
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(agent, self._loop))

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        # A task of an agent's own that raises one of these has it as its outcome too; the others go on.
        while not self._closing:
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()

    async def _worked(self, task: Task, agent: Coroutine[Any, Any, Any]) -> Any:
        """What an async function returns."""
        here = asyncio.current_task()
        assert here is not None
        self._at_work.append(task.id)
        try:
            return await agent
        except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
            if here.cancelling():
                raise
            raise _not_returned(error) from error
        finally:
            self._at_work.remove(task.id)

    async def _command(self, task: Task, base_url: str, api_key: str) -> Any:
        process = await asyncio.create_subprocess_exec(
            *self._argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key},
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate(json.dumps(asdict(task)).encode())
        finally:
            if process.returncode is None:
                kill_tree(psutil.Process(process.pid))
                await asyncio.wait_for(process.wait(), CLOSE_TIMEOUT_S)
        if process.returncode:
            raise RuntimeError(f"workflow.command ended with {ending(process.returncode)}")
        lines = output.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "null")
        try:
            return json.loads(last)
        except ValueError:
            raise ValueError(
                f"expected the last line of output to be a number from 0 to 1, or null, came {last[:100]!r}"
            ) from None

    def close(self) -> None:
        """End the loop of async functions; agents in it are cancelled, and those that do not end are named and left behind."""
        if self._loop is None or self._thread is None:
            return
        self._closing = True
        try:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(CLOSE_TIMEOUT_S)
        except TimeoutError:
            left = ", ".join(sorted(self._at_work))
            logger.error("agents still not ended %g s after being cancelled, left behind: on %s", CLOSE_TIMEOUT_S, left)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()


def argv_of(command: str) -> list[str]:
    """The words of workflow.command. ValueError where the first of them is no program that can be run here."""
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"workflow.command={command}: {error}") from None
    if not argv or shutil.which(argv[0]) is None:
        program = argv[0] if argv else "nothing"
        raise ValueError(f"workflow.command={command}: expected a program that can be run, came {program}")
    return argv


def _called(agent: Callable[[], Any]) -> Any:
    """What a function that is not async returns."""
    try:
        return agent()
    except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
        raise _not_returned(error) from error


def _not_returned(error: BaseException) -> RuntimeError:
    """What else would end more than the agent, said as the agent's failure."""
    return RuntimeError(f"expected it to return, it raised {type(error).__name__}({error})")


async def _cancel_others() -> None:
    loop = asyncio.get_running_loop()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await loop.shutdown_asyncgens()
