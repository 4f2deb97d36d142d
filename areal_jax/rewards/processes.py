"""Ending processes with all that they started."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

import psutil


def kill_tree(pid: int) -> None:
    """Kill a process, its group, and descendants that left the group. It is not yet reaped, so the id is still its own."""
    root = psutil.Process(pid)
    family, found = set[psutil.Process](), {root}
    # All are stopped before any is killed: what is stopped starts no more of them.
    while found - family:
        for process in found - family:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        family |= found
        with suppress(psutil.NoSuchProcess):
            found = set(root.children(recursive=True))
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def memory_of_tree(pid: int) -> int:
    """Bytes of memory that a process and its descendants hold; what they share counts for each."""
    num_bytes = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                num_bytes += process.memory_info().rss
    return num_bytes
