"""How a command ends on Ctrl-C and SIGTERM: in time, with one message, and with exit status 128 +
the signal's number."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import psutil

SIGNALS = (signal.SIGINT, signal.SIGTERM)

END_S = 10.0
"""An interrupted command that has not ended by itself after so long is ended, with all processes
that it has started."""


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by a signal that asks the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Stopped(Exception):
    """A signal ended the work early, and what was done of it is saved."""

    def __init__(self, number: int, done: str) -> None:
        """Args: done: how far the work came."""
        super().__init__(f"stopped by {signal.Signals(number).name} {done}")
        self.number = number


class Interruption:
    """What a command says when a signal ends it."""

    def __init__(self) -> None:
        self.advice: Callable[[], str] = lambda: "nothing has begun"
        """What is left, and how it can be continued."""

    def text(self, number: int) -> str:
        return f"areal_jax: interrupted by {signal.Signals(number).name}; {self.advice()}"

    def refused(self, interrupt: KeyboardInterrupt) -> int:
        """Say it; the exit status."""
        number = interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT
        print(self.text(number), file=sys.stderr, flush=True)
        return exit_status(number)


@contextmanager
def interruptible(end_s: float = END_S) -> Iterator[Interruption]:
    """Until the block ends, a signal raises Interrupted in the main thread; after end_s, or on
    another signal, it ends the process even where that thread compiles or loads. Handlers that the
    block itself installs go before."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    heard, reported = socket.socketpair()
    reported.setblocking(False)

    def interrupt(number: int, _frame: object) -> NoReturn:
        raise Interrupted(number)

    def watch() -> None:
        # Python's own handlers run between two steps of the main thread; the numbers of signals
        # arrive here at once.
        if number := _next_signal(heard, None):
            with suppress(TimeoutError):
                if not _next_signal(heard, end_s):
                    return
            end_at_once(interruption.text(number), number)

    restore = keep_handlers()
    for number in SIGNALS:
        signal.signal(number, interrupt)
    signal.set_wakeup_fd(reported.fileno(), warn_on_full_buffer=False)
    # Owned by this block, ends with it: nothing more is told then.
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield interruption
    finally:
        restore()
        reported.close()
        watcher.join()
        heard.close()


def keep_handlers() -> Callable[[], None]:
    """What makes signals do again what they do now. Call both from the main thread."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    return restore


def end_at_once(text: str, number: int) -> NoReturn:
    """End this process, and all that it has started, without waiting for anything."""
    kill_children()
    with suppress(OSError):
        # A progress line hides the cursor.
        print(("\x1b[?25h" if sys.stderr.isatty() else "") + text, file=sys.stderr, flush=True)
    os._exit(exit_status(number))


def kill_children() -> None:
    """Kill all that this process has started, and what that has started."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def exit_status(number: int) -> int:
    """By which a shell knows that a signal ended a command."""
    return 128 + number


def leave(status: int) -> NoReturn:
    """End the process with a status; after a signal without waiting for threads that still compile
    or load."""
    if status in map(exit_status, SIGNALS):
        kill_children()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _next_signal(heard: socket.socket, timeout_s: float | None) -> int:
    """The next of SIGNALS; 0 at the end, TimeoutError after timeout_s."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        heard.settimeout(None if deadline_s is None else max(1e-3, deadline_s - time.monotonic()))
        number = int.from_bytes(heard.recv(1))
        if number == 0 or number in SIGNALS:
            return number
