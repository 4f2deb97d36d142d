"""The claim on a folder: one process at a time writes to it.

A file in the folder is locked (flock) for the life of the process and holds a lease, which names
the holder and is renewed every few seconds. Between processes that share a mount, the lock decides.
Between hosts, where flock may not work, the lease decides: it is stale when it was not renewed for
LEASE_S.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from areal_jax.cluster.signals import kill_children
from areal_jax.errors import ClaimLost, ConfigError
from areal_jax.metrics.files import describe_disk_error
from areal_jax.run.lease import (
    SETTLE_S,
    await_lease,
    describe_holder,
    describe_writers,
    is_at,
    is_of_this_system,
    is_renewed,
    is_running,
    new_lease,
    parse_lease,
    read_lease,
    try_lock,
    unlink_unlocked,
)
from areal_jax.storage import LOCAL_FILES, shown

logger = logging.getLogger(__name__)

CLAIM, WRITERS = LOCAL_FILES
"""Locked file in a claimed folder, with the lease, which is deleted when the claim is released; and
the file that other processes which write for the holder, such as trainer hosts, lock (shared).
"""

RENEW_S = 5.0
"""Interval at which a lease is renewed."""

LEASE_S = 30.0
"""Time without renewal after which a lease of another host is stale."""

WRITERS_TIMEOUT_S = 60.0
"""Longest wait for processes of an earlier holder to end."""

LEASE_BYTES = 1024
"""Size of every lease, which is padded so that a single write replaces it in place."""


class FolderInUse(ConfigError):
    """Another process holds the claim."""


class Claim:
    """A claim that this process holds. `token` identifies the holder to processes that write for
    it.
    """

    def __init__(self, folder: Path, setting: str) -> None:
        """Take the claim.

        Args:
            folder: an existing folder.
            setting: that names the folder, for messages.

        Raises:
            FolderInUse: another process holds the claim; the message names that process.
            OSError: the folder cannot be written to.
        """
        self.folder, self._path = folder, folder / CLAIM
        self._lease = new_lease()
        self._fd: int | None = None
        # Serializes the renewing thread with `fence` and `release`.
        self._lock = threading.Lock()
        self._released = threading.Event()
        fd, is_locked = self._open(setting)
        with ExitStack() as undo:
            close = undo.enter_context(ExitStack())
            close.callback(os.close, fd)
            self._require_free(fd, is_locked, setting)
            self._lease["device"] = os.fstat(fd).st_dev
            close.pop_all()  # from here on `release` closes it
            self._fd = fd
            undo.callback(self.release)
            self._write_lease(secrets.token_hex(8))
            if not is_locked:
                time.sleep(SETTLE_S)
                if (found := read_lease(self._path)).get("token") != self.token:
                    raise FolderInUse(refusal(folder, found, setting))
            self.fence()
            undo.pop_all()
        # A forked child shares the lock with its parent. It closes its copy, so that the parent's
        # death frees the folder.
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (claim := reference()) and claim._forget())
        # Owned by this object; ends with `release`.
        threading.Thread(target=self._renew, name=f"claim on {folder}", daemon=True).start()

    @property
    def token(self) -> str:
        return self._lease["token"]

    def fence(self) -> None:
        """Replace the token, and wait until no process writes with an earlier one.

        Raises:
            FolderInUse: processes of an earlier run still write.
        """
        path = self.folder / WRITERS
        if not path.exists():
            return
        with self._lock:
            self._write_lease(secrets.token_hex(8))
        start_s, is_reported = time.monotonic(), False
        while not unlink_unlocked(path):
            waited_s = time.monotonic() - start_s
            if waited_s > WRITERS_TIMEOUT_S:
                raise FolderInUse(
                    f"{self.folder}: processes of an earlier run still write there after "
                    f"{WRITERS_TIMEOUT_S:g} s ({describe_writers(path)}); end them, then resume"
                )
            if waited_s > 1.0 and not is_reported:
                is_reported = True
                logger.warning(
                    "%s: waiting for processes of an earlier run to end (%s)",
                    self.folder,
                    describe_writers(path),
                )
            time.sleep(0.1)

    def release(self) -> None:
        """Release the claim, and delete its files."""
        self._released.set()
        with self._lock:
            fd, self._fd = self._fd, None
            if fd is None:
                return
            with suppress(OSError):
                unlink_unlocked(self.folder / WRITERS)
                if is_at(fd, self._path) and read_lease(self._path).get("token") == self.token:
                    self._path.unlink()
            os.close(fd)

    def _open(self, setting: str) -> tuple[int, bool]:
        """Open and lock the claim's file; its descriptor, and whether it is locked (False where the
        file system has no locks).
        """
        while True:
            with ExitStack() as undo:
                fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
                undo.callback(os.close, fd)
                try:
                    is_locked = try_lock(fd, fcntl.LOCK_EX)
                except BlockingIOError:
                    found = await_lease(self._path)
                    raise FolderInUse(refusal(self.folder, found, setting)) from None
                # The last holder may have deleted the file between the opening and the locking.
                if is_at(fd, self._path):
                    undo.pop_all()
                    return fd, is_locked

    def _require_free(self, fd: int, is_locked: bool, setting: str) -> None:
        """Require that the lease in the file, if any, is of a dead process.

        Raises:
            FolderInUse: its process is alive.
        """
        found = parse_lease(os.pread(fd, LEASE_BYTES, 0))
        if not found:
            return
        same_boot = found.get("boot") == self._lease["boot"]
        if is_of_this_system(found):
            is_alive = is_running(found)
        elif same_boot and is_locked and found.get("device") == os.fstat(fd).st_dev:
            is_alive = False  # a process of another container, whose lock would be visible here
        else:
            is_alive = self._is_renewed(found)
        if is_alive:
            raise FolderInUse(refusal(self.folder, found, setting))
        logger.warning(
            "%s: taking over from %s, which has ended", self.folder, describe_holder(found)
        )

    def _is_renewed(self, found: Mapping[str, Any]) -> bool:
        """Whether the lease changes within LEASE_S."""
        logger.warning(
            "%s is claimed by %s: waiting %g s for its lease to be renewed",
            self.folder,
            describe_holder(found),
            LEASE_S,
        )
        return is_renewed(partial(read_lease, self._path), found, LEASE_S, 0.5)

    def _write_lease(self, token: str) -> None:
        assert self._fd is not None
        self._lease |= {
            "token": token,
            "renewed": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "beat": time.time(),
        }
        data = json.dumps(self._lease).ljust(LEASE_BYTES - 1).encode() + b"\n"
        try:
            written = 0
            # A disk that becomes full writes a part, and fails at the next call.
            while written < len(data):
                written += os.pwrite(self._fd, data[written:], written)
            os.fsync(self._fd)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def _renew(self) -> None:
        while not self._released.wait(RENEW_S):
            with self._lock:
                if self._fd is None:
                    return
                try:
                    found = read_lease(self._path)
                    if found.get("token") != self.token or not is_at(self._fd, self._path):
                        end_unclaimed(str(self._path), found)
                    self._write_lease(self.token)
                except OSError as error:
                    logger.warning(
                        "%s: the claim could not be renewed (%s)", self._path, error.strerror
                    )

    def _forget(self) -> None:
        fd, self._fd = self._fd, None
        self._lock = threading.Lock()  # the copy may be locked for ever
        if fd is not None:
            os.close(fd)


@contextmanager
def claimed(folder: Path, setting: str = "--run-folder") -> Iterator[Claim]:
    """Claim a folder, which is made where it does not exist, until the block ends. Raises as
    `Claim`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    claim = Claim(folder, setting)
    try:
        yield claim
    finally:
        claim.release()


def is_claimed(folder: Path) -> bool:
    """Return whether a process holds the claim on a folder, judging by its lease."""
    path = folder / CLAIM
    found = read_lease(path)
    if not found:
        return False
    if found.get("host") == socket.gethostname():
        return is_running(found)
    try:
        return time.time() - path.stat().st_mtime < LEASE_S
    except FileNotFoundError:
        return False


@contextmanager
def writable(folder: Path, setting: str) -> Iterator[None]:
    """Convert errors of writing to a folder to ConfigError, with the setting that names the folder.

    Raises:
        ConfigError: in place of an OSError that is no fault of the disk.
    """
    try:
        yield
    except OSError as error:
        if describe_disk_error(error):
            raise
        raise ConfigError(
            f"{setting}={folder}: cannot be written to ({error.strerror}); give another"
        ) from error


class Writer:
    """The lock of a process that writes to a claimed folder for the claim's holder. It outlives the
    holder, but not the process.
    """

    def __init__(self, folder: Path, token: str) -> None:
        """Lock the folder for writing.

        Args:
            token: of the claim.

        Raises:
            ClaimLost: another process has taken over the claim.
        """
        self._folder, self._token = folder, token
        path = folder / WRITERS
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            with suppress(BlockingIOError):
                try_lock(self._fd, fcntl.LOCK_SH)
                if is_at(self._fd, path):
                    break
            os.close(self._fd)
            self.require()
            time.sleep(0.05)
        reference = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: (writer := reference()) and writer.close())
        with ExitStack() as undo:
            undo.callback(self.close)
            self.require()
            os.write(self._fd, f"{socket.gethostname()} process {os.getpid()}\n".encode())
            undo.pop_all()

    def require(self) -> None:
        """Require that the claim still has the token; otherwise nothing may be written.

        Raises:
            ClaimLost: another process has taken over the claim.
        """
        found = await_lease(self._folder / CLAIM)
        if found.get("token") != self._token:
            holder = describe_holder(found) if found else "nobody"
            raise ClaimLost(
                f"{self._folder} is claimed by {holder}, no longer by the run of this process; "
                "nothing is written"
            )

    def close(self) -> None:
        """Unlock the folder."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def refusal(folder: Path, found: Mapping[str, Any], setting: str) -> str:
    """Why a folder cannot be claimed, and what to do."""
    who = describe_holder(found) if found else "a process that is starting"
    return (
        f"{shown(folder)} is in use by {who}; wait until that process has ended or stop it, or "
        f"give another {setting}"
    )


def end_unclaimed(path: str, found: Mapping[str, Any]) -> NoReturn:
    """End this process at once: another process may write to the folder."""
    how = f"was taken over by {describe_holder(found)}" if found else "was deleted"
    print(
        f"areal_jax: the claim {path} {how}; this process ends, so that no two write there",
        file=sys.stderr,
        flush=True,
    )
    kill_children()
    os._exit(1)
