"""The other side of `rewards.forks`: a process that loads code once, and forks itself on request.

Its arguments are the id of its parent and its settings. Its standard input is a socket. Messages
are JSON objects, one per line. Requests: {"do": "fork"} with a socket for the new process, {"do":
"prepare"}, {"do": "reap", "pid"}. Replies: {"status": "ready"} when it can fork, or {"error"} if it
never can; then {"pid"}, {} or {"error"}, {"returncode"}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import psutil

from areal_jax.rewards.functions import traceback_of

T = TypeVar("T")


def serve_forks(
    *,
    load: Callable[[], T],
    serve: Callable[[socket.socket, T], None],
    what: str,
    memory_bytes: int,
    prepare: Callable[[], dict[str, object]] = dict,
) -> None:
    """Load once, then fork a process at each request, until the parent ends.

    Args:
        load: loads what every process needs; its code may raise anything.
        serve: answers requests in a forked process, until the connection ends.
        what: settings that name code or files, for the error.
        memory_bytes: largest address space of a process.
        prepare: loads more for later forks; the reply.
    """
    _end_with(int(sys.argv[1]))
    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    control = socket.socket(fileno=os.dup(0))
    _redirect_standard_streams()
    try:
        loaded = load()
    except (Exception, SystemExit) as error:  # the user's code; reported to the parent
        reason = f"{what}: {type(error).__name__}: {error}".removeprefix(": ")
        send(control, {"error": "\n".join(filter(None, (reason, traceback_of(error))))})
        return
    send(control, {"status": "ready"})
    _fork_on_request(control, lambda connection: serve(connection, loaded), prepare)


def _fork_on_request(
    control: socket.socket,
    serve: Callable[[socket.socket], None],
    prepare: Callable[[], dict[str, object]],
) -> None:
    nursery_pid, own_children = (
        os.getpid(),
        {process.pid for process in psutil.Process().children()},
    )
    while True:
        line, files, _, _ = socket.recv_fds(control, 4096, 1)
        if not line:
            return
        match json.loads(line):
            case {"do": "fork"}:
                pid = os.fork()
                if pid == 0:
                    control.close()
                    # A process group, so that it is killed as one. No session, because priorities
                    # are relative to the processes of a session.
                    os.setpgrp()
                    _end_with(nursery_pid)
                    return serve(socket.socket(fileno=files[0]))
                os.close(files[0])
                own_children.add(pid)
                send(control, {"pid": pid})
            case {"do": "prepare"}:
                send(control, prepare())
            case {"do": "reap", "pid": pid}:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    own_children.remove(pid)
                    _end_orphans(own_children)
                send(control, {"returncode": os.waitstatus_to_exitcode(status) if ended else None})


def send(to: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    to.sendall(json.dumps(message).encode() + b"\n")


def _end_with(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent dies, and adopt orphaned descendants, so
    that whoever kills this process finds them.
    """
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent_pid:
        sys.exit(f"the parent process {parent_pid} has ended")


def _end_orphans(own_children: set[int]) -> None:
    """Kill descendants of processes that died."""
    while left := [
        process for process in psutil.Process().children() if process.pid not in own_children
    ]:
        for process in left:
            process.kill()
            process.wait()


def _redirect_standard_streams() -> None:
    """Let user code read nothing from standard input and print to standard error."""
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
