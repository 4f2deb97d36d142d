"""python -I -S guard.py LIFELINE PROGRAM [ARGUMENT ...]: run a program, and kill everything that it
started when it ends.

The lifeline is a pipe whose other end the parent holds. When the program or the parent ends, by any
signal, the guard kills all its descendants, daemons included. It imports the standard library only:
it starts in milliseconds, and no agent can block it.
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
    """Run the program of the command line, and exit with its status or signal."""
    lifeline, argv = int(sys.argv[1]), sys.argv[2:]
    on_linux = sys.platform == "linux"
    libc = ctypes.CDLL(None)
    if on_linux:
        # The guard becomes the parent of orphaned descendants, so that it finds them.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    guard, stops = os.getpid(), list[int]()
    program = os.fork()
    if program == 0:
        _become(argv, guard, lifeline, libc if on_linux else None)
    # Only the program holds its ends of the pipes, so that the parent sees them close.
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(null, standard)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: stops.append(number))
    status = None
    while status is None and not stops:
        readable, _, _ = select.select([lifeline, wakeup_read], [], [])
        if wakeup_read in readable:
            os.read(wakeup_read, 4096)
        status = _reap(program)
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


def _reap(program: int) -> int | None:
    """Reap all ended children. Return the program's status if it is one of them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, child_status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == program:
                status = child_status
    return status


def _kill_descendants(guard: int, program: int) -> None:
    """Kill until there are none: a killed process may have started another one before."""
    with suppress(OSError):
        os.killpg(program, signal.SIGKILL)
    while True:
        for pid in _descendants(guard):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        # One scan may miss processes whose parent changes meanwhile; while any lives, the guard has
        # a child.
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_PAUSE_S)


def _descendants(root: int) -> list[int]:
    """Return living descendants from /proc; none if there is no /proc."""
    parents = dict[int, int]()
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        with suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                # The program's name, in brackets, may contain any character.
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
