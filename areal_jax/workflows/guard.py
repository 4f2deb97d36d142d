"""python -I -S guard.py LIFELINE PROGRAM [ARGUMENT ...]: run a program, and end with it everything
that it started.

The lifeline is a pipe of which the starter holds the other end. When the program ends, or the
starter does, by whatever signal, the guard kills all processes that descend from it, those that
became daemons too. It imports the standard library alone: it starts in milliseconds, and nothing
that an agent does can hold it up.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from contextlib import suppress

# Numbers of Linux' prctl(2).
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PAUSE_S = 0.01


def main() -> None:
    """Run the program of the command line, and end as it ends."""
    lifeline, argv = int(sys.argv[1]), sys.argv[2:]
    on_linux = sys.platform == "linux"
    libc = ctypes.CDLL(None)
    if on_linux:
        # Orphans among the descendants become children of the guard, which finds them there.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    guard, stops = os.getpid(), list[int]()
    program = os.fork()
    if program == 0:
        _become(argv, guard, lifeline, libc if on_linux else None)
    # The program's ends of its pipes are its own, so that their ends are seen.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nowhere, standard)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stops.append(number))
    status = None
    while status is None and not stops:
        readable, _, _ = select.select([lifeline, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
        status = _reaped(program)
        if lifeline in readable:
            break
    _kill_descendants(guard, program)
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    with suppress(OSError):
        signal.signal(number, signal.SIG_DFL)
    os.kill(guard, number)


def _become(argv: list[str], guard: int, lifeline: int, libc: ctypes.CDLL | None) -> None:
    """Turn this process into the program."""
    try:
        os.setsid()
        os.close(lifeline)
        signal.set_wakeup_fd(-1)
        for number in (
            signal.SIGCHLD,
            signal.SIGTERM,
            signal.SIGINT,
            signal.SIGHUP,
            signal.SIGPIPE,
        ):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == guard:
            os.execvp(argv[0], argv)
    except OSError as error:
        os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _reaped(program: int) -> int | None:
    """Reap all children that have ended. Returns the program's status where it is one of them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, ended = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == program:
                status = ended
    return status


def _kill_descendants(guard: int, program: int) -> None:
    """Kill until there are none: one that is killed may have started another before."""
    with suppress(OSError):
        os.killpg(program, signal.SIGKILL)
    while True:
        for pid in _descendants(guard):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # One scan may miss whoever gets another parent meanwhile; while any lives, the guard has a
        # child.
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)


def _descendants(root: int) -> list[int]:
    """Processes that have not ended, by /proc; none where there is no such folder."""
    parents = dict[int, int]()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                # The name of a program, in brackets, may hold anything.
                state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                parents[int(name)] = int(parent)
    found, latest = list[int](), {root}
    while latest:
        latest = {pid for pid, parent in parents.items() if parent in latest}
        found += latest
    return found


if __name__ == "__main__":
    main()
