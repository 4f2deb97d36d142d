"""The reward service: judging processes with a deadline for each answer, killed with all their children when it passes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import chz
import psutil

from areal_jax.records import Task, Verdict, VerdictKind
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.processes import kill_tree

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
"""Starting Python or importing computer algebra takes a second; a busy machine may take many."""

START_ATTEMPTS = 3
ATTEMPTS = 2
"""An answer on which a process died is judged once more on a fresh one: the process may have died of something else."""

GRACE_S = 0.5
"""What broke off gets so long to end by itself, so that it is known how it ended."""

KILL_TIMEOUT_S = 10.0


class CannotStart(RuntimeError):
    """No judging process could be started: the machine's fault, not the answer's."""


class Worker:
    """One judging process, started when it is needed and again after it was killed."""

    def __init__(self, config: RewardConfig, kinds: Collection[str]) -> None:
        self._settings = json.dumps({**chz.asdict(config), "kinds": list(kinds)})
        self._process: subprocess.Popen[bytes] | None = None
        # One socket pair per process. This side puts a request and takes its answer before the next one; it ends when either
        # side closes it, which a dying process does.
        self._lines: asyncio.StreamReader | None = None
        self._requests: asyncio.StreamWriter | None = None
        self._killed = list[subprocess.Popen[bytes]]()
        """Killed and not yet reaped."""
        self._retired = False
        self._number = 0
        self.starts = 0

    async def start(self) -> None:
        """Start the process where none runs. CannotStart after some attempts, ValueError where the settings are at fault."""
        failure = ""
        for attempt in range(START_ATTEMPTS):
            if self._retired:
                raise RuntimeError("the reward service is closed")
            if self._process is not None:
                return
            try:
                await self._spawn()
                reply = await self._reply(START_TIMEOUT_S)
                if "error" in reply:
                    raise ValueError(reply["error"])
            except (OSError, TimeoutError, EOFError) as error:
                failure = f"{type(error).__name__}: {error} ({await self.kill(GRACE_S)})"
                logger.warning("attempt %d of %d to start a judging process failed: %s", attempt + 1, START_ATTEMPTS, failure)
            except BaseException:
                await self.kill()
                raise
        if self._process is None:
            raise CannotStart(f"no judging process could be started in {START_ATTEMPTS} attempts: {failure}")

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        package_folder = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (package_folder, os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                (sys.executable, "-m", "areal_jax.rewards.worker", str(os.getpid()), self._settings),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            self.starts += 1
            self._lines, self._requests = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def ask(self, task: Task, text: str, timeout_s: float) -> Verdict:
        """Judge one answer. TimeoutError when it takes too long, EOFError when the process dies, CannotStart when its imports
        take too long; the process must then be killed."""
        assert self._requests is not None
        self._number += 1
        request = {"number": self._number, "task": asdict(task), "text": text}
        async with asyncio.timeout(timeout_s):
            self._requests.write(json.dumps(request).encode() + b"\n")
            with suppress(ConnectionError):
                # If the process died reading, the end of its lines says so.
                await self._requests.drain()
            reply = await self._reply(timeout_s)
        if reply.get("status") == "loading":
            try:
                await self._reply(START_TIMEOUT_S)
            except TimeoutError as error:
                raise CannotStart(f"importing computer algebra took more than {START_TIMEOUT_S:g} s") from error
            reply = await self._reply(timeout_s)
        if reply["number"] != self._number:
            raise EOFError(f"the judging process answered request {reply['number']} instead of {self._number}")
        return Verdict(reply["kind"], reply["detail"])

    async def _reply(self, timeout_s: float) -> dict[str, Any]:
        assert self._lines is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._lines.readline()
        except ConnectionError as error:
            raise EOFError(f"the judging process broke off ({error})") from error
        if not line:
            raise EOFError("the judging process ended")
        return json.loads(line)

    async def kill(self, grace_s: float = 0.0) -> str:
        """Kill the process with all its descendants, if it does not end by itself within grace_s; how it ended, in words."""
        process, requests = self._process, self._requests
        self._process = self._lines = self._requests = None
        if requests is not None:
            requests.close()
        if process is None:
            return "it never ran"
        # Reaped by the next kill if this one is cancelled.
        self._killed.append(process)
        try:
            await _until(lambda: _is_zombie(process.pid), grace_s)
        finally:
            kill_tree(process.pid)
        if not await _until(lambda: all([killed.poll() is not None for killed in self._killed]), KILL_TIMEOUT_S):
            logger.error("judging process %d has not ended %g s after it was killed", process.pid, KILL_TIMEOUT_S)
            return "it does not end"
        self._killed.clear()
        code = process.returncode
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def retire(self) -> None:
        """Kill the process for good."""
        self._retired = True
        await self.kill()


async def _until(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until the condition holds; whether it does."""
    clock = asyncio.get_running_loop().time
    deadline_s = clock() + timeout_s
    while not (holds := condition()) and clock() < deadline_s:
        await asyncio.sleep(0.005)
    return holds


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


class RewardService:
    """Judges answers in `num_workers` processes: `async with RewardService(config) as judge: await judge(task, text)`.

    Every answer gets a verdict: what hangs is `timeout`, what kills its process twice is `crashed`, and where no process can be
    started it is `infrastructure`, which says nothing of the answer.
    """

    def __init__(self, config: RewardConfig, kinds: Collection[str] = ("math",)) -> None:
        """Args: kinds: of the tasks that will be judged; "math" and "code" are known, a function of one's own judges any."""
        if config.num_workers < 1 or config.timeout_s <= 0:
            raise ValueError(
                f"expected rewards.num_workers >= 1 and rewards.timeout_s > 0, came {config.num_workers} and {config.timeout_s}"
            )
        if config.function is None and (unknown := set(kinds) - {"math", "code"}):
            raise ValueError(f"no judge for tasks of kind {', '.join(sorted(unknown))}; set rewards.function to one of yours")
        self.config, self._kinds = config, kinds
        self.verdicts = Counter[VerdictKind]()
        self.judged_s = 0.0
        """Time that answers spent being judged, waiting for a process not included."""
        self._workers = [Worker(config, kinds) for _ in range(config.num_workers)]
        # Workers that judge nothing now. Each call takes one and puts it back, in the asyncio thread; the last one put is the
        # first taken, so that few processes stay warm. A call waits here at most for those before it, each of which has its
        # deadline. It ends with `close`.
        self._free: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        for worker in self._workers:
            self._free.put_nowait(worker)

    async def start(self) -> None:
        """Start all processes now rather than when they are needed. CannotStart or ValueError where that fails."""
        workers = [self._free.get_nowait() for _ in range(self._free.qsize())]
        try:
            results = await asyncio.gather(*(worker.start() for worker in workers), return_exceptions=True)
        finally:
            for worker in workers:
                self._free.put_nowait(worker)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def __call__(self, task: Task, answer: str) -> Verdict:
        """Judge one answer; cancelling the call kills the process that judges it."""
        if task.kind not in self._kinds and self.config.function is None:
            raise ValueError(
                f"task {task.id}: no judge for tasks of kind {task.kind!r}, this service judges {', '.join(self._kinds)}; "
                "set rewards.function to one of yours"
            )
        worker = await self._free.get()
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            verdict = await self._judge(worker, task, answer)
        finally:
            self.judged_s += clock() - began_s
            self._free.put_nowait(worker)
        self.verdicts[verdict.kind] += 1
        return verdict

    async def _judge(self, worker: Worker, task: Task, answer: str) -> Verdict:
        deaths = list[str]()
        while len(deaths) < ATTEMPTS:
            try:
                await worker.start()
                return await worker.ask(task, answer, self.config.timeout_s)
            except CannotStart as error:
                await worker.kill()
                return Verdict("infrastructure", str(error))
            except TimeoutError:
                await worker.kill()
                return Verdict("timeout", f"no verdict within rewards.timeout_s={self.config.timeout_s:g} s")
            except EOFError as error:
                deaths.append(f"{error} ({await worker.kill(GRACE_S)})")
            except BaseException:
                await worker.kill()
                raise
        logger.warning("judging an answer to task %s: the process died %d times: %s", task.id, ATTEMPTS, deaths[-1])
        return Verdict("crashed", deaths[-1])

    def counters(self) -> dict[str, float]:
        """Counts and seconds since the service began."""
        verdicts = {f"verdict/{kind}": float(number) for kind, number in sorted(self.verdicts.items())}
        return {**verdicts, "judged_s": self.judged_s, "worker_starts": float(sum(worker.starts for worker in self._workers))}

    async def close(self) -> None:
        """Kill all processes; answers still being judged raise."""
        await asyncio.gather(*(worker.retire() for worker in self._workers))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
