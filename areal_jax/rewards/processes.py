"""Processes with their descendants: how they are killed, and their memory."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil

LOWEST_PRIORITY = 19


def kill_tree(root: psutil.Process) -> None:
    """Kill a process, its group, and descendants that left the group."""
    family, found = set[psutil.Process](), {root}
    # All are stopped before any is killed, because a stopped process starts no more of them.
    while found - family:
        for process in found - family:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        family |= found
        with suppress(psutil.NoSuchProcess):
            found = set(root.children(recursive=True))
    # If another process has its id by now, the process group of that id is not this one's.
    if root.is_running():
        with suppress(ProcessLookupError):
            os.killpg(root.pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended, reaped or not."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def lower_priority(root: psutil.Process) -> None:
    """Give a process and its descendants the lowest priority."""
    with suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.nice(LOWEST_PRIORITY)


def memory_of_tree(root: psutil.Process) -> int:
    """Return the memory of a process and its descendants, in bytes; shared memory counts for
    each.
    """
    num_bytes = 0
    with suppress(psutil.NoSuchProcess):
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                num_bytes += process.memory_info().rss
    return num_bytes


def ending(returncode: int) -> str:
    """Describe how a process ended."""
    if returncode >= 0:
        return f"exit code {returncode}"
    # Most real-time signals have no name.
    names = {each.value: each.name for each in signal.Signals}
    return f"signal {names.get(-returncode, -returncode)}"
