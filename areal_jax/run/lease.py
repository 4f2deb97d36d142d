"""Locks and leases on files of a claimed folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import psutil

T = TypeVar("T")

SETTLE_S = 1.0
"""Wait of a claimant where locks do not work, before it checks that no other process has claimed at
the same time."""

_NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)


def try_lock(fd: int, kind: int) -> bool:
    """Lock a file; False where its file system has no locks.

    Raises:
        BlockingIOError: another process has locked it.
    """
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one at the path."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def unlink_unlocked(path: Path) -> bool:
    """Delete a file unless a process has locked it; whether it is deleted."""
    try:
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        try_lock(fd, fcntl.LOCK_EX)
        if is_at(fd, path):
            path.unlink()
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def describe_writers(path: Path) -> str:
    with suppress(OSError):
        return ", ".join(path.read_text().splitlines()) or "of unknown number"
    return "of unknown number"


def new_lease() -> dict[str, Any]:
    """A lease of this process, without token."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_start": psutil.Process().create_time(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "boot": boot_id(),
        "pid_namespace": pid_namespace(),
    }


def is_of_this_system(found: Mapping[str, Any]) -> bool:
    """Whether the number of a lease's process can be looked up here."""
    return found.get("boot") == boot_id() and found.get("pid_namespace") == pid_namespace()


def parse_lease(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def read_lease(path: Path) -> dict[str, Any]:
    """The lease in a file; empty where there is none."""
    try:
        return parse_lease(path.read_bytes())
    except FileNotFoundError:
        return {}


def await_lease(path: Path) -> dict[str, Any]:
    """The lease of a holder that may be about to write it."""
    deadline_s = time.monotonic() + SETTLE_S
    while not (found := read_lease(path)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return found


def is_renewed(read: Callable[[], T], found: T, lease_s: float, interval_s: float) -> bool:
    """Whether a lease changes within a time. Clocks of two hosts are not compared.

    Args:
        read: reads it.
        found: the lease as it was read before.
        lease_s: longest wait.
        interval_s: longest time between two reads.
    """
    deadline_s = time.monotonic() + lease_s
    while time.monotonic() < deadline_s:
        if read() != found:
            return True
        time.sleep(min(interval_s, lease_s / 10))
    return False


def is_running(found: Mapping[str, Any]) -> bool:
    """Whether the process of a lease of this host runs; another process may have its number."""
    try:
        process = psutil.Process(found["pid"])
        return (
            abs(process.create_time() - found["process_start"]) < 1.0
            and process.status() != psutil.STATUS_ZOMBIE
        )
    except psutil.AccessDenied:
        return True
    except (psutil.NoSuchProcess, KeyError):
        return False


def describe_holder(found: Mapping[str, Any]) -> str:
    return f"process {found.get('pid')} on {found.get('host')} (since {found.get('since')})"


def boot_id() -> str:
    """Id of the running kernel, equal in all its containers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {psutil.boot_time():.0f}"


def pid_namespace() -> str:
    """Namespace in which process numbers are unique."""
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""
