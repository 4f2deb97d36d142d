"""python -m areal_jax.workflows.agent_worker FILE.py:NAME ARGUMENTS STALL_S: a process that runs
agent functions.

Async functions share the event loop of the main thread, so that they can share a client; other
functions have a thread each. The worker reads pickled messages on standard input and writes lines
of JSON to standard output; agents' prints go to standard error. A watchdog reports the line at
which an agent blocks the event loop.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import linecache
import os
import pickle
import struct
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from areal_jax.records import Task
from areal_jax.rewards.functions import graded, load_function

MAX_TEXT = 16_000
"""Maximum length of an error message or traceback, in characters."""

_PERIOD_S = 0.5


class Channel:
    """Writes messages to the host, from any thread, but not from a process that an agent
    forked.
    """

    def __init__(self, out: int) -> None:
        self._out, self._pid, self._lock = out, os.getpid(), threading.Lock()

    def send(self, **message: Any) -> None:
        """Send a message. A forked copy of the worker exits instead: its agent runs in the
        worker.
        """
        if os.getpid() != self._pid:
            os._exit(0)
        line = memoryview(json.dumps(message).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._out, line) :]


class Worker:
    """Runs agents. Its event loop is in the main thread; reader and watchdog have their own
    threads.
    """

    def __init__(self, function: Callable[..., Any], channel: Channel, stall_s: float) -> None:
        self._function, self._channel, self._stall_s = function, channel, stall_s
        called = function if inspect.isroutine(function) else type(function).__call__
        self._is_async = inspect.iscoroutinefunction(called)
        self._loop = asyncio.new_event_loop()
        self._main = threading.get_ident()
        # By number: put by the loop or an agent's thread, read by the reader.
        self._tasks = dict[int, asyncio.Task[Any]]()
        self._threads = dict[int, int]()
        self._names = dict[int, str]()

    def run(self, source: BinaryIO) -> None:
        """Run agents until the host closes the channel."""
        threading.Thread(target=self._read, args=(source,), name="reader", daemon=True).start()
        if self._is_async:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        asyncio.set_event_loop(self._loop)
        while True:
            # An agent's task that raises one of these reports it as its failure; the other agents
            # continue.
            with suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    def _read(self, source: BinaryIO) -> None:
        while len(head := source.read(4)) == 4:
            message = pickle.loads(source.read(struct.unpack("!I", head)[0]))
            match message:
                case "start", number, task, base_url, api_key:
                    self._names[number] = task.id
                    if self._is_async:
                        self._loop.call_soon_threadsafe(
                            self._start, number, task, base_url, api_key
                        )
                    else:
                        self._start_thread(number, task, base_url, api_key)
                case "cancel", number:
                    self._channel.send(kind="cancelling", number=number, where=self._where(number))
                    self._loop.call_soon_threadsafe(self._cancel, number)
        os._exit(0)  # the host has ended

    def _start(self, number: int, task: Task, base_url: str, api_key: str) -> None:
        self._tasks[number] = self._loop.create_task(
            self._run_agent(number, self._function(task, base_url, api_key))
        )
        # Runs after the agent's first step, so that an agent that blocks in it delays this.
        self._loop.call_soon(lambda: self._channel.send(kind="started", number=number))

    async def _run_agent(self, number: int, agent: Awaitable[Any]) -> None:
        try:
            outcome = _outcome(await agent)
        except BaseException as error:  # untrusted code; counted in rollout/rejected/agent_failed
            outcome = _failure(error)
        self._tasks.pop(number, None)
        self._end(number, outcome)

    def _start_thread(self, number: int, task: Task, base_url: str, api_key: str) -> None:
        def work() -> None:
            self._threads[number] = threading.get_ident()
            try:
                outcome = _outcome(self._function(task, base_url, api_key))
            except (
                BaseException
            ) as error:  # untrusted code; counted in rollout/rejected/agent_failed
                outcome = _failure(error)
            self._threads.pop(number, None)
            self._end(number, outcome)

        threading.Thread(target=work, name=f"agent on task {task.id}", daemon=True).start()
        self._channel.send(kind="started", number=number)

    def _end(self, number: int, outcome: Mapping[str, Any]) -> None:
        self._names.pop(number, None)
        self._channel.send(kind="ended", number=number, **outcome)

    def _cancel(self, number: int) -> None:
        if (task := self._tasks.get(number)) is not None:
            task.cancel()

    def _where(self, number: int) -> str:
        """Return the line that an agent executes or awaits."""
        thread, task = self._threads.get(number), self._tasks.get(number)
        if thread is not None:
            return _line(sys._current_frames().get(thread))
        if task is None:
            return ""
        if asyncio.current_task(self._loop) is task:
            return _line(sys._current_frames().get(self._main))
        # Follow the chain of awaited coroutines.
        coroutine, frames = task.get_coro(), list[FrameType]()
        while (frame := getattr(coroutine, "cr_frame", None)) is not None:
            frames.append(frame)
            coroutine = getattr(coroutine, "cr_await", None)
        return next((_line(frame) for frame in reversed(frames) if not _is_ours(frame)), "")

    def _watch(self) -> None:
        """Report an event loop that is blocked for more than `stall_s`, and its recovery."""
        is_blocked, is_alive, requested_s = False, threading.Event(), time.monotonic()
        self._loop.call_soon_threadsafe(is_alive.set)
        while True:
            # If an agent holds the interpreter lock, no thread runs, not even this one; then
            # faulthandler writes the traceback.
            faulthandler.dump_traceback_later(2 * self._stall_s, file=sys.__stderr__ or 2)
            if is_alive.wait(_PERIOD_S):
                if is_blocked:
                    self._channel.send(kind="unblocked", seconds=time.monotonic() - requested_s)
                is_blocked = False
                time.sleep(_PERIOD_S)
                is_alive.clear()
                requested_s = time.monotonic()
                self._loop.call_soon_threadsafe(is_alive.set)
            elif not is_blocked and (seconds := time.monotonic() - requested_s) > self._stall_s:
                is_blocked = True
                running = asyncio.current_task(self._loop)
                agent = next(
                    (number for number, task in list(self._tasks.items()) if task is running), None
                )
                where = _line(sys._current_frames().get(self._main))
                self._channel.send(kind="blocked", number=agent, seconds=seconds, where=where)


def _load(function: str, arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """Load the agent's function, or make an object of its class."""
    loaded = load_function(function)
    if isinstance(loaded, type):
        return loaded(**arguments)
    return partial(loaded, **arguments) if arguments else loaded


def _outcome(result: Any) -> dict[str, Any]:
    """Return the message part of an agent's result: a number, named components of the reward or
    None; TypeError for others.
    """
    if result is None or type(result) in (bool, int, float):
        return {"result": result}
    found = graded(result, "raw")
    if found.components:
        return {"result": {**found.components, "score": found.score}}
    return {"result": found.score}


def _failure(error: BaseException) -> dict[str, Any]:
    """Return the message part of an agent's error; exits count as errors of the agent."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit | KeyboardInterrupt | asyncio.CancelledError | GeneratorExit):
        text = f"RuntimeError: expected it to return, it raised {type(error).__name__}({error})"
    return {
        "error": text[:MAX_TEXT],
        "trace": "".join(traceback.format_exception(error))[-MAX_TEXT:],
    }


def _is_ours(frame: FrameType) -> bool:
    """Return whether a frame belongs to Python, a library or the worker, not to the agent."""
    return frame.f_code.co_filename.startswith((str(Path(__file__)), sys.base_prefix, sys.prefix))


def _line(frame: FrameType | None) -> str:
    """Format the agent's innermost line with its function."""
    innermost = frame
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number} in {frame.f_code.co_name}: {linecache.getline(file, number).strip()}"


def main() -> None:
    """Run the worker of the command line."""
    source, channel = os.fdopen(os.dup(0), "rb"), Channel(os.dup(1))
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    # If memory runs out, the kernel kills an agent that leaks before the trainer.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        function = _load(sys.argv[1], json.loads(sys.argv[2]))
    except BaseException as error:  # untrusted code: any error of the user's file
        channel.send(kind="unloadable", error=f"{type(error).__name__}: {error}"[:MAX_TEXT])
        os._exit(1)
    channel.send(kind="ready")
    Worker(function, channel, float(sys.argv[3])).run(source)


if __name__ == "__main__":
    main()
