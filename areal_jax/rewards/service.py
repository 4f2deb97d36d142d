"""The reward service: grading processes with a deadline for each answer, killed with all their
children when it passes.

What a policy calls tools for is done there too: it is as little to be trusted."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import chz
import psutil

from areal_jax.errors import ConfigError
from areal_jax.records import ResultKind, RewardResult, Task, ToolResult
from areal_jax.rewards.config import RewardConfig, ToolsConfig
from areal_jax.rewards.failures import FailureLog
from areal_jax.rewards.processes import ending, has_ended, kill_tree, lower_priority

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Starting Python or importing computer algebra takes a second; a busy machine may take many."""

START_ATTEMPTS = 3
ATTEMPTS = 2
"""An answer on which a process died is graded once more on a fresh one: the process may have died
of something else."""

ANSWERS_PER_PROCESS = 1000
"""After so many answers a process is replaced, whatever it has kept of them."""

ASIDE_PER_WORKER = 8
"""Answers set aside at a time, for each of `rewards.num_workers`."""

GRACE_S = 0.5
"""What broke off gets so long to end by itself, so that it is known how it ended."""

KILL_TIMEOUT_S = 10.0

MAX_LINE_BYTES = 16 << 20
"""No answer of a grading process may be longer."""

KINDS = ("math", "code", "countdown")
"""Of tasks for which there are graders."""


def failure_counts(num_failed: int | float, num_calls: int | float) -> dict[str, float]:
    """Metrics of reward calls: how many there were, and how many failed."""
    return {
        "calls": float(num_calls),
        "failed": float(num_failed),
        "failed_fraction": num_failed / max(1, num_calls),
    }


class CannotStart(RuntimeError):
    """No grading process could be started: the machine's fault, not the answer's."""


class Unprepared(Exception):
    """The grading process would first have to import computer algebra."""


class Nursery:
    """The process that grading processes are forked from: what they need is loaded once, and
    starting one takes a moment.

    One request at a time, each with its answer. It is started when it is needed, and again after it
    died."""

    def __init__(
        self, config: RewardConfig, kinds: Collection[str], tools: ToolsConfig | None
    ) -> None:
        self._settings = json.dumps(
            {**chz.asdict(config), "kinds": list(kinds), "tools": tools and chz.asdict(tools)}
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lines: asyncio.StreamReader | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._asking = asyncio.Lock()
        self._closed = False
        self.num_forks = 0

    async def fork(self) -> tuple[int, socket.socket]:
        """A new grading process: its id, and the socket to talk to it by. CannotStart after some
        attempts, ConfigError where the settings are at fault."""
        failure = ""
        for attempt in range(START_ATTEMPTS):
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    pid = (await self._ask({"do": "fork"}, theirs))["pid"]
                self.num_forks += 1
                return pid, ours
            except (OSError, TimeoutError, EOFError) as error:
                ours.close()
                failure = f"{type(error).__name__}: {error} ({await self.kill(GRACE_S)})"
                logger.warning(
                    "attempt %d of %d to start a grading process failed: %s",
                    attempt + 1,
                    START_ATTEMPTS,
                    failure,
                )
            except BaseException:
                ours.close()
                raise
        raise CannotStart(
            f"no grading process could be started in {START_ATTEMPTS} attempts: {failure}"
        )

    async def prepare(self) -> str:
        """Import computer algebra for all that is forked from now on; why it failed, empty where it
        did not."""
        try:
            return (await self._ask({"do": "prepare"})).get("error", "")
        except (OSError, TimeoutError, EOFError) as error:
            return (
                f"importing computer algebra: {type(error).__name__}: {error} "
                f"({await self.kill(GRACE_S)})"
            )

    async def reap(self, pid: int) -> int | None:
        """The exit code of a forked process that has ended; None while it has not."""
        return (await self._ask({"do": "reap", "pid": pid}))["returncode"]

    async def _ask(
        self, request: dict[str, Any], file: socket.socket | None = None
    ) -> dict[str, Any]:
        # Cancelled, it goes on to the answer, lest the next request take that for its own.
        return await asyncio.shield(
            asyncio.ensure_future(self._asked(request, file and file.dup()))
        )

    async def _asked(self, request: dict[str, Any], file: socket.socket | None) -> dict[str, Any]:
        try:
            async with self._asking:
                if self._process is None:
                    await self._spawn()
                assert self._control is not None
                socket.send_fds(
                    self._control,
                    [json.dumps(request).encode() + b"\n"],
                    [file.fileno()] if file else [],
                )
                return await self._reply()
        finally:
            if file is not None:
                file.close()

    async def _spawn(self) -> None:
        if self._closed:
            raise RuntimeError("the reward service is closed")
        ours, theirs = socket.socketpair()
        package_folder = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
        with theirs:
            try:
                self._process = subprocess.Popen(
                    (
                        sys.executable,
                        "-m",
                        "areal_jax.rewards.worker",
                        str(os.getpid()),
                        self._settings,
                    ),
                    stdin=theirs.fileno(),
                    env={**os.environ, "PYTHONPATH": path},
                    start_new_session=True,
                )
                self._lines, self._requests = await asyncio.open_connection(sock=ours)
                self._control = ours
            except BaseException:
                ours.close()
                raise
        reply = await self._reply()
        if "error" in reply:
            await self.kill()
            raise ConfigError(reply["error"])

    async def _reply(self) -> dict[str, Any]:
        assert self._lines is not None
        return await read_line(self._lines, START_TIMEOUT_S)

    async def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process with all its descendants, if it does not end by itself within grace_s;
        how it ended, in words."""
        process, requests = self._process, self._requests
        self._process = self._lines = self._requests = self._control = None
        if requests is not None:
            requests.close()
        if process is None:
            return "it never ran"
        found = psutil.Process(process.pid)
        try:
            await _until(lambda: has_ended(found), grace_s)
        finally:
            kill_tree(found)
        if not await _until(lambda: process.poll() is not None, KILL_TIMEOUT_S):
            logger.error(
                "process %d has not ended %g s after it was killed", process.pid, KILL_TIMEOUT_S
            )
            return "it does not end"
        return ending(process.returncode)

    async def close(self) -> None:
        """Kill the process for good."""
        self._closed = True
        await self.kill()


class Worker:
    """One grading process, forked when it is needed and again after it was killed."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._process: psutil.Process | None = None
        # One socket pair per process. This side puts a request and takes its answer before the next
        # one; it ends when either side closes it, which a dying process does.
        self._lines: asyncio.StreamReader | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._number = 0

    async def start(self) -> None:
        """Fork the process where none runs. CannotStart, or ConfigError where the settings are at
        fault."""
        if self._process is None:
            pid, ours = await self._nursery.fork()
            # Distinguishes this process from a later one with the same id.
            self._process, self._number = psutil.Process(pid), 0
            self._lines, self._requests = await asyncio.open_connection(
                sock=ours, limit=MAX_LINE_BYTES
            )

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Grader one answer, or use a tool. TimeoutError when it takes too long, EOFError when the
        process dies, Unprepared when it lacks computer algebra; the process must then be killed."""
        assert self._requests is not None and self._lines is not None
        self._number += 1
        async with asyncio.timeout(timeout_s):
            self._requests.write(json.dumps({"number": self._number, **request}).encode() + b"\n")
            with suppress(ConnectionError):
                # If the process died reading, the end of its lines says so.
                await self._requests.drain()
            reply = await read_line(self._lines, timeout_s)
        if reply["number"] != self._number:
            raise EOFError(
                f"the grading process answered request {reply['number']} instead of {self._number}"
            )
        if "unprepared" in reply:
            raise Unprepared
        return reply

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def is_worn(self) -> bool:
        """Whether it has graded so much that a fresh process is the safer one."""
        return self._number >= ANSWERS_PER_PROCESS

    def give_way(self) -> None:
        """Lower the priority of the process, for good."""
        if self._process is not None:
            lower_priority(self._process)

    async def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process with all its descendants, if it does not end by itself within grace_s;
        how it ended, in words."""
        process, requests = self._process, self._requests
        self._process = self._lines = self._requests = None
        if requests is not None:
            requests.close()
        if process is None:
            return "it never ran"
        try:
            await _until(lambda: has_ended(process), grace_s)
        finally:
            kill_tree(process)
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                while (code := await self._nursery.reap(process.pid)) is None:
                    await asyncio.sleep(0.005)
        except (OSError, TimeoutError, EOFError, RuntimeError) as error:
            logger.warning(
                "grading process %d was killed, and nothing is known of its end: %s",
                process.pid,
                error,
            )
            return "nobody knows how"
        return ending(code)


async def read_line(lines: asyncio.StreamReader, timeout_s: float) -> dict[str, Any]:
    """The next line as JSON. TimeoutError, or EOFError at the end of lines."""
    try:
        async with asyncio.timeout(timeout_s):
            line = await lines.readline()
    except ConnectionError as error:
        raise EOFError(f"the grading process broke off ({error})") from error
    if not line:
        raise EOFError("the grading process ended")
    return json.loads(line)


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until the condition holds; whether it does."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while not (holds := condition()) and clock() < deadline_s:
        await asyncio.sleep(0.005)
    return holds


class RewardService:
    """Grader answers in `num_workers` processes: `async with RewardService(config) as grader: await
    grader(task, text)`.

    Every answer gets a grade. That of a call that failed says so: what hangs is `timeout`, what
    raises or kills its process twice is `crashed`, and where no process can be started it is
    `infrastructure`.
    """

    def __init__(
        self,
        config: RewardConfig,
        kinds: Collection[str] = ("math",),
        tools: ToolsConfig | None = None,
        *,
        logs_failures: bool = True,
    ) -> None:
        """
        Args:
            kinds: of the tasks that will be graded; those of KINDS are known, a function of one's
            own graders any.
            tools: what can be used besides.
            logs_failures: false where whoever asks logs them.
        ConfigError where there is no grader for these.
        """
        if config.function is None and (unknown := set(kinds) - set(KINDS)):
            raise ConfigError(
                f"no grader for tasks of kind {', '.join(sorted(unknown))}; set "
                "rewards.function to one of yours"
            )
        self.config, self.tools, self._kinds = config, tools, kinds
        self.grades = Counter[ResultKind]()
        self.num_failed = 0
        """Calls that failed."""
        self._failures = FailureLog() if logs_failures else None
        self.tool_results = Counter[str]()
        """By tool and outcome, TOOL/OUTCOME."""
        self._num_open = 0
        self.graded_s = 0.0
        """Time that answers spent being graded, waiting for a place not included."""
        self.num_set_aside = 0
        """Answers that made way for others because they took long."""
        self._nursery = Nursery(config, kinds, tools)
        # Idle workers; the last one put is the first taken, so that few
        # processes stay warm.
        self._idle = list[Worker]()
        # A place for each answer being graded, given in order of asking. An answer that takes long
        # gives its place up for one of those aside. Where all are taken answers wait, at most for
        # the deadlines of those before them.
        self._places = asyncio.Semaphore(config.num_workers)
        self._places_aside = asyncio.Semaphore(ASIDE_PER_WORKER * config.num_workers)

    async def start(self) -> None:
        """Start processes now rather than when they are needed. CannotStart where that fails,
        ConfigError where the settings are at fault: a function, form, tool or sandbox that cannot
        be had."""
        starting, self._idle = self._idle, []
        starting += [Worker(self._nursery) for _ in range(self.config.num_workers - len(starting))]
        try:
            for worker in starting:
                await worker.start()
        finally:
            self._idle += starting

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        """Grader one answer, and count how it went; cancelling the call kills the process that
        graders it."""
        grade = await self.grade(task, answer)
        self.grades[grade.kind] += 1
        self.num_failed += grade.failed
        if grade.failed and self._failures is not None:
            self._failures.add(task.id, grade)
        return grade

    async def grade(self, task: Task, answer: str) -> RewardResult:
        """The same, without a trace in counts and log."""
        if task.kind not in self._kinds and self.config.function is None:
            raise ValueError(
                f"task {task.id}: no grader for tasks of kind {task.kind!r}, this service graders "
                f"{', '.join(self._kinds)}; set rewards.function to one of yours"
            )
        # Programs have limits of their own, and so much to do that more of them at a time would
        # only make all late.
        makes_way = task.kind != "code" or self.config.function is not None
        timeout_s = self.config.timeout_s if makes_way else self.config.sandbox.total_timeout_s
        found = await self._done({"task": asdict(task), "text": answer}, timeout_s, makes_way)
        # What did not come from the process itself says that it gave no grade.
        score, failed, trace = found.get("score"), found.get("failed", True), found.get("trace", "")
        return RewardResult(found["kind"], found["detail"], score, failed, trace)

    async def use(self, tool: str, argument: str) -> ToolResult:
        """Use a tool; cancelling the call kills the process that does. What hangs or kills its
        process is reported to the policy."""
        if self.tools is None or tool not in self.tools.names:
            raise ValueError(
                f"no tool {tool!r}; this service has "
                f"{', '.join(self.tools.names) if self.tools else 'none'}"
            )
        found = await self._done(
            {"tool": tool, "text": argument}, self.tools.timeout_s, tool != "python"
        )
        result = ToolResult(
            found["kind"], found["text"] if "text" in found else f"Error: {found['detail']}"
        )
        self.tool_results[f"{tool}/{result.kind}"] += 1
        return result

    async def _done(
        self, request: Mapping[str, Any], timeout_s: float, makes_way: bool
    ) -> dict[str, Any]:
        """What a process answers a request, or why there is no answer: {"kind", "detail"}."""
        self._num_open += 1
        try:
            return await self._placed(request, timeout_s, makes_way)
        finally:
            self._num_open -= 1

    async def _placed(
        self, request: Mapping[str, Any], timeout_s: float, makes_way: bool
    ) -> dict[str, Any]:
        await self._places.acquire()
        paused = [self._places]
        worker = self._idle.pop() if self._idle else Worker(self._nursery)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            found = await self._asked(worker, paused, request, timeout_s, makes_way)
            if (
                worker.is_worn
                or paused != [self._places]
                or len(self._idle) >= self.config.num_workers
            ):
                await worker.kill()
        finally:
            self.graded_s += clock() - began_s
            if worker.is_running:
                self._idle.append(worker)
            paused[0].release()
        return found

    @asynccontextmanager
    async def _making_way(
        self, worker: Worker, paused: list[asyncio.Semaphore]
    ) -> AsyncIterator[None]:
        """Set what is done inside aside when it takes long: its process goes on with what others
        leave of the processors."""

        async def make_way() -> None:
            await asyncio.sleep(self.config.patience_s)
            await self._places_aside.acquire()
            worker.give_way()
            self.num_set_aside += 1
            paused[0].release()
            paused[0] = self._places_aside

        making_way = asyncio.create_task(make_way()) if paused == [self._places] else None
        try:
            yield
        finally:
            if making_way is not None:
                making_way.cancel()

    async def _asked(
        self,
        worker: Worker,
        paused: list[asyncio.Semaphore],
        request: Mapping[str, Any],
        timeout_s: float,
        makes_way: bool,
    ) -> dict[str, Any]:
        deaths = list[str]()
        while len(deaths) < ATTEMPTS:
            try:
                await worker.start()
                async with self._making_way(worker, paused) if makes_way else nullcontext():
                    return await worker.ask(request, timeout_s)
            except Unprepared:
                await worker.kill()
                failure = await self._nursery.prepare()
                if failure:
                    return {"kind": "infrastructure", "detail": failure}
            except CannotStart as error:
                await worker.kill()
                return {"kind": "infrastructure", "detail": str(error)}
            except TimeoutError:
                await worker.kill()
                late = f"no result within {timeout_s:g} s"
                if "task" in request:
                    setting = (
                        "rewards.timeout_s" if makes_way else "rewards.sandbox.total_timeout_s"
                    )
                    late = f"no grade within {setting}={timeout_s:g} s"
                return {"kind": "timeout", "detail": late}
            except EOFError as error:
                deaths.append(f"{error} ({await worker.kill(GRACE_S)})")
            except BaseException:
                await worker.kill()
                raise
        what = (
            f"using {request['tool']}"
            if "tool" in request
            else f"grading an answer to task {request['task']['id']}"
        )
        logger.warning("%s: the process died %d times: %s", what, ATTEMPTS, deaths[-1])
        return {"kind": "crashed", "detail": deaths[-1]}

    def progress(self) -> int:
        """How many answers were graded and tools used so far."""
        return self.grades.total() + self.tool_results.total()

    def describe_wait(self) -> str:
        """What is being done, in words."""
        return f"{self._num_open} answers are graded"

    def counters(self) -> dict[str, float]:
        """Counts and seconds since the service began."""
        return {
            **failure_counts(self.num_failed, self.grades.total()),
            **{f"grade/{kind}": float(number) for kind, number in sorted(self.grades.items())},
            **{f"tool/{name}": float(number) for name, number in sorted(self.tool_results.items())},
            "graded_s": self.graded_s,
            "set_aside": float(self.num_set_aside),
            "worker_starts": float(self._nursery.num_forks),
        }

    async def close(self) -> None:
        """Kill all processes; answers still being graded raise."""
        idle, self._idle = self._idle, []
        for worker in idle:
            await worker.kill()
        await self._nursery.close()
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
