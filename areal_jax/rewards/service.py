"""The reward service: grades answers in processes that are killed at a deadline, and executes tool
calls there, because both come from the policy and are untrusted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import chz

from areal_jax.errors import ConfigError
from areal_jax.python_objects import PythonObject
from areal_jax.records import PUZZLE, ResultKind, RewardResult, Task, ToolResult, task_to_json
from areal_jax.rewards.config import RewardConfig, ToolsConfig
from areal_jax.rewards.failures import FailureLog
from areal_jax.rewards.forks import GRACE_S, CannotStart, ForkedProcess, ForkServer
from areal_jax.rewards.in_process import InProcessGrader
from areal_jax.rewards.judge import Judge
from areal_jax.rewards.reward_model import ModelReward, Scorer

logger = logging.getLogger(__name__)

ATTEMPTS = 2
"""Number of processes on which an answer is graded before it counts as `crashed`: the first may
have died of something else."""

ASIDE_PER_WORKER = 8
"""Largest number of slow answers set aside, for each of `rewards.num_workers`."""

KINDS = ("math", "code", "countdown", PUZZLE)
"""Kinds of tasks that have a verifier."""


def failure_counts(num_failed: int | float, num_calls: int | float) -> dict[str, float]:
    """Return the metrics of reward calls: their number, and how many failed."""
    return {
        "calls": float(num_calls),
        "failed": float(num_failed),
        "failed_fraction": num_failed / max(1, num_calls),
    }


class RewardService:
    """Grades answers in `num_workers` processes.

        async with RewardService(config) as grader:
            result = await grader(task, text)

    Every answer gets a result. A failed call has the kind `timeout` if it hangs, `crashed` if it
    raises or kills its process twice, and `infrastructure` if no process can be started.

    It has more than 200 lines because places, processes and slow answers share one state.
    """

    def __init__(
        self,
        config: RewardConfig,
        kinds: Collection[str] = ("math",),
        tools: ToolsConfig | None = None,
        *,
        scorer: Scorer | None = None,
        logs_failures: bool = True,
    ) -> None:
        """
        Args:
            config: Settings.
            kinds: Kinds of the tasks that will be graded. A user's function grades any.
            tools: Tools that can be called.
            scorer: The reward model of `rewards.model.path`.
            logs_failures: Whether failed calls are logged here.

        Raises:
            ConfigError: A kind has no verifier.
        """
        needs_none = any(each and each.weight == 1 for each in (config.judge, config.model))
        if config.function is None and not needs_none and (unknown := set(kinds) - set(KINDS)):
            raise ConfigError(
                f"no grader for tasks of kind {', '.join(sorted(unknown))}; set "
                "rewards.function to a function of yours"
            )
        self.config, self.tools, self._kinds = config, tools, kinds
        self.judge = None if config.judge is None else Judge(config.judge)
        self.model = config.model and ModelReward(config.model, config.scale, scorer)
        config = chz.replace(config, judge=None, model=None)
        if needs_none:
            kinds = set(kinds) & set(KINDS)
        self.grades = Counter[ResultKind]()
        self.num_failed = 0
        """Number of failed calls."""
        self._failures = FailureLog() if logs_failures else None
        self.tool_results = Counter[str]()
        """Number of tool calls by tool and outcome, TOOL/OUTCOME."""
        self._num_open = 0
        self.graded_s = 0.0
        """Time of grading, without waits for a place."""
        self.num_set_aside = 0
        """Number of slow answers that were set aside."""
        self._in_process: InProcessGrader | None = None
        function = config.function
        if isinstance(function, PythonObject) and not function.has_import_path:
            self._in_process = InProcessGrader(config)
            config = chz.replace(config, function=None)
            kinds = set(kinds) & set(KINDS)
        self._server = ForkServer(
            "areal_jax.rewards.worker",
            {**chz.asdict(config), "kinds": list(kinds), "tools": tools and chz.asdict(tools)},
            "the reward service",
        )
        # Idle processes, last in first out, so that few processes stay warm.
        self._idle = list[ForkedProcess]()
        # Places of answers in progress, first come first served. A slow answer exchanges its place
        # for one of those aside. If all are taken, answers wait, at most for the deadlines of those
        # before them.
        self._places = asyncio.Semaphore(config.num_workers)
        self._places_aside = asyncio.Semaphore(ASIDE_PER_WORKER * config.num_workers)

    async def start(self) -> None:
        """Start the processes now, instead of at their first use.

        Raises:
            CannotStart: No process could be started.
            ConfigError: A function, form, tool, sandbox or reward model of the settings does not
                work.
        """
        if self.model is not None:
            await self.model.scorer.start()
        if self._in_process is not None and self.tools is None:
            return
        starting, self._idle = self._idle, []
        starting += [
            ForkedProcess(self._server) for _ in range(self.config.num_workers - len(starting))
        ]
        try:
            for process in starting:
                await process.start()
        finally:
            self._idle += starting

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        """Grade one answer and count the result. Cancelling the call kills its process."""
        result = await self.grade(task, answer)
        self.grades[result.kind] += 1
        self.num_failed += result.failed
        if result.failed and self._failures is not None:
            self._failures.add(task.id, result)
        return result

    async def grade(self, task: Task, answer: str) -> RewardResult:
        """Grade one answer without counting or logging it.

        Raises:
            ValueError: The task's kind has no verifier.
        """
        if self.model is not None:
            is_verified = self.config.function is not None or task.kind in KINDS
            found = await self._verify(task, answer) if is_verified else None
            if found is not None and found.failed:
                return found
            return await self.model(task, answer, found)
        if self.judge is None:
            return await self._verify(task, answer)
        verified = RewardResult("wrong")
        if self.judge.config.weight < 1:
            verified = await self._verify(task, answer)
        # What has no answer to be judged costs no vote.
        if verified.failed or verified.kind == "no_answer" or not answer.strip():
            return verified
        return await self.judge(task, answer, verified)

    async def _verify(self, task: Task, answer: str) -> RewardResult:
        """Grade one answer by the verifier of its kind or the user's function."""
        if task.kind not in self._kinds and self.config.function is None:
            raise ValueError(
                f"task {task.id}: no grader for tasks of kind {task.kind!r}, this service grades "
                f"{', '.join(self._kinds)}; set rewards.function to a function of yours"
            )
        # Programs have their own limits, and use so much CPU that running more of them at a time
        # would delay all.
        can_be_set_aside = task.kind != "code" or self.config.function is not None
        timeout_s = self.config.timeout_s
        if not can_be_set_aside:
            timeout_s = self.config.sandbox.total_timeout_s
        if self._in_process is not None:
            found = await self._in_process.grade(task, answer)
        else:
            request = {"task": task_to_json(task), "text": answer}
            found = await self._execute(request, timeout_s, can_be_set_aside)
        # A result without `failed` is not from the process: the call failed.
        return RewardResult(
            found["kind"],
            found["detail"],
            found.get("score"),
            found.get("failed", True),
            found.get("trace", ""),
            found.get("components", {}),
        )

    async def use(self, tool: str, argument: str) -> ToolResult:
        """Execute a tool call. Cancelling it kills its process.

        The result of a call that hangs or kills its process says so, for the policy to read.

        Raises:
            ValueError: The service does not have the tool.
        """
        if self.tools is None or tool not in self.tools.names:
            raise ValueError(
                f"no tool {tool!r}; this service has "
                f"{', '.join(self.tools.names) if self.tools else 'none'}"
            )
        found = await self._execute(
            {"tool": tool, "text": argument}, self.tools.timeout_s, tool != "python"
        )
        result = ToolResult(
            found["kind"], found["text"] if "text" in found else f"Error: {found['detail']}"
        )
        self.tool_results[f"{tool}/{result.kind}"] += 1
        return result

    async def _execute(
        self, request: Mapping[str, Any], timeout_s: float, can_be_set_aside: bool
    ) -> dict[str, Any]:
        """Return a process's reply to a request, or why there is none: {"kind", "detail"}."""
        self._num_open += 1
        try:
            return await self._execute_in_place(request, timeout_s, can_be_set_aside)
        finally:
            self._num_open -= 1

    async def _execute_in_place(
        self, request: Mapping[str, Any], timeout_s: float, can_be_set_aside: bool
    ) -> dict[str, Any]:
        await self._places.acquire()
        # The semaphore that this answer holds: a list, which `_set_aside_if_slow` changes.
        held = [self._places]
        process = self._idle.pop() if self._idle else ForkedProcess(self._server)
        clock = asyncio.get_running_loop().time
        start_s = clock()
        try:
            found = await self._call(process, held, request, timeout_s, can_be_set_aside)
            if (
                process.is_worn
                or held != [self._places]
                or len(self._idle) >= self.config.num_workers
            ):
                await process.kill()
        finally:
            self.graded_s += clock() - start_s
            if process.is_running:
                self._idle.append(process)
            held[0].release()
        return found

    @asynccontextmanager
    async def _set_aside_if_slow(
        self, process: ForkedProcess, held: list[asyncio.Semaphore]
    ) -> AsyncIterator[None]:
        """Set the answer of the block aside after `rewards.patience_s`: its process continues at a
        lower priority, and its place is free for another answer.
        """

        async def set_aside() -> None:
            await asyncio.sleep(self.config.patience_s)
            await self._places_aside.acquire()
            process.lower_priority()
            self.num_set_aside += 1
            held[0].release()
            held[0] = self._places_aside

        waiting = asyncio.create_task(set_aside()) if held == [self._places] else None
        try:
            yield
        finally:
            if waiting is not None:
                waiting.cancel()

    async def _call(
        self,
        process: ForkedProcess,
        held: list[asyncio.Semaphore],
        request: Mapping[str, Any],
        timeout_s: float,
        can_be_set_aside: bool,
    ) -> dict[str, Any]:
        deaths = list[str]()
        while len(deaths) < ATTEMPTS:
            # Whatever ends the call early, also a cancellation, leaves a process without a use.
            async with AsyncExitStack() as undo:
                undo.push_async_callback(process.kill)
                try:
                    await process.start()
                    if can_be_set_aside:
                        watch = self._set_aside_if_slow(process, held)
                    else:
                        watch = nullcontext()
                    async with watch:
                        reply = await process.ask(request, timeout_s)
                    if "unprepared" not in reply:
                        undo.pop_all()
                        return reply
                    await process.kill()
                    if failure := await self._server.prepare():
                        return {"kind": "infrastructure", "detail": failure}
                except CannotStart as error:
                    return {"kind": "infrastructure", "detail": str(error)}
                except TimeoutError:
                    late = f"no result within {timeout_s:g} s"
                    if "task" in request:
                        setting = "rewards.sandbox.total_timeout_s"
                        if can_be_set_aside:
                            setting = "rewards.timeout_s"
                        late = f"no grade within {setting}={timeout_s:g} s"
                    return {"kind": "timeout", "detail": late}
                except EOFError as error:
                    deaths.append(f"{error} ({await process.kill(GRACE_S)})")
        what = (
            f"calling {request['tool']}"
            if "tool" in request
            else f"grading an answer to task {request['task']['id']}"
        )
        logger.warning("%s: the process died %d times: %s", what, ATTEMPTS, deaths[-1])
        return {"kind": "crashed", "detail": deaths[-1]}

    def progress(self) -> int:
        """Return the number of graded answers and tool calls so far."""
        return self.grades.total() + self.tool_results.total()

    def describe_wait(self) -> str:
        """Describe the calls in progress."""
        return f"{self._num_open} answers are being graded"

    def counters(self) -> dict[str, float]:
        """Return counts and seconds since the start of the service."""
        return {
            **failure_counts(self.num_failed, self.grades.total()),
            **{f"grade/{kind}": float(number) for kind, number in sorted(self.grades.items())},
            **{f"tool/{name}": float(number) for name, number in sorted(self.tool_results.items())},
            "graded_s": self.graded_s,
            "set_aside": float(self.num_set_aside),
            "worker_starts": float(self._server.num_forks),
            **({} if self.judge is None else self.judge.counters()),
            **({} if self.model is None else self.model.counters()),
        }

    async def close(self) -> None:
        """Kill all processes; calls in progress raise."""
        if self.judge is not None:
            await self.judge.close()
        if self.model is not None:
            await self.model.scorer.close()
        if self._in_process is not None:
            await asyncio.to_thread(self._in_process.close)
        idle, self._idle = self._idle, []
        for process in idle:
            await process.kill()
        await self._server.close()
        if self._failures is not None:
            self._failures.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
