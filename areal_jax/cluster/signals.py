"""SIGINT and SIGTERM: a command ends in time, with one message and exit status 128 + signal."""

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
"""Time after a signal until the process and all its children are killed, in seconds."""


class Interrupted(KeyboardInterrupt):
    """Raised in the main thread by a signal that asks the process to end."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or signal.Signals(number).name)
        self.number = number


class Stopped(Exception):
    """A signal ended the work early; its progress is saved."""

    def __init__(self, number: int, done: str) -> None:
        """Create the error.

        Args:
            number: Signal.
            done: Progress of the work.
        """
        super().__init__(f"stopped by {signal.Signals(number).name} {done}")
        self.number = number


class Interruption:
    """Message of a command that a signal ends."""

    def __init__(self) -> None:
        self.advice: Callable[[], str] = lambda: "no work has started"
        """Returns what is saved and how to resume."""

    def text(self, number: int) -> str:
        """Return the message for a signal."""
        return f"areal_jax: interrupted by {signal.Signals(number).name}; {self.advice()}"

    def refused(self, interrupt: KeyboardInterrupt) -> int:
        """Print the message and return the exit status."""
        number = interrupt.number if isinstance(interrupt, Interrupted) else signal.SIGINT
        print(self.text(number), file=sys.stderr, flush=True)
        return exit_status(number)


@contextmanager
def interruptible(end_s: float = END_S) -> Iterator[Interruption]:
    """Raise Interrupted in the main thread on a signal until the block ends.

    After `end_s` or on a second signal the process is killed, even while the main thread compiles
    or loads. Handlers that the block installs itself take precedence.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)

    def interrupt(number: int, _frame: object) -> NoReturn:
        raise Interrupted(number)

    def watch() -> None:
        # Python's handlers run between two bytecodes of the main thread; the wakeup socket
        # receives signal numbers at once.
        if number := _next_signal(receiver, None):
            with suppress(TimeoutError):
                if not _next_signal(receiver, end_s):
                    return
            exit_now(interruption.text(number), number)

    restore = save_handlers()
    for number in SIGNALS:
        signal.signal(number, interrupt)
    signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    # Owned by this block; ends when the sender is closed.
    watcher = threading.Thread(target=watch, name="signals", daemon=True)
    watcher.start()
    try:
        yield interruption
    finally:
        restore()
        sender.close()
        watcher.join()
        receiver.close()


def save_handlers() -> Callable[[], None]:
    """Return a function that restores the current signal handlers; for the main thread."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)

    return restore


def exit_now(text: str, number: int) -> NoReturn:
    """Kill all child processes and end this one at once."""
    kill_children()
    with suppress(OSError):
        # A progress line hides the cursor.
        print(("\x1b[?25h" if sys.stderr.isatty() else "") + text, file=sys.stderr, flush=True)
    os._exit(exit_status(number))


def kill_children() -> None:
    """Kill all descendants of this process."""
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()


def exit_status(number: int) -> int:
    """Return the exit status of a process that a signal ended."""
    return 128 + number


def exit_process(status: int) -> NoReturn:
    """End the process with a status; after a signal, do not wait for threads."""
    if status in map(exit_status, SIGNALS):
        kill_children()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _next_signal(receiver: socket.socket, timeout_s: float | None) -> int:
    """Wait for the next of SIGNALS; return 0 when the sender is closed."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        receiver.settimeout(
            None if deadline_s is None else max(1e-3, deadline_s - time.monotonic())
        )
        number = int.from_bytes(receiver.recv(1))
        if number == 0 or number in SIGNALS:
            return number
