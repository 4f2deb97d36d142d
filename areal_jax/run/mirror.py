"""The copy of a run folder in object storage, which a run keeps up to date while it writes.

The run writes its local folder as any other; two threads store it, so that training never waits for
object storage. A checkpoint is stored after all rows that belong to it, and its files.json after
its other files: a checkpoint with files.json is whole, and one without it is never read.

One process at a time stores a run. Its lease, an object beside the others, is renewed every few
seconds, and stale after LEASE_S as that of a claim between hosts.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import BinaryIO

from areal_jax.checkpoint.config import CHECKPOINTS
from areal_jax.checkpoint.folders import FILES, find_checkpoints, newest_whole
from areal_jax.errors import NotSaved
from areal_jax.metrics.sample_parts import closed_parts, is_part, open_part
from areal_jax.metrics.sinks import SAMPLES
from areal_jax.run.claim import (
    LEASE_S,
    RENEW_S,
    FolderInUse,
    end_unclaimed,
    refusal,
)
from areal_jax.run.lease import (
    SETTLE_S,
    describe_holder,
    is_of_this_system,
    is_renewed,
    is_running,
    new_lease,
    parse_lease,
)
from areal_jax.storage import (
    LEASE,
    LOCAL_FILES,
    NUM_THREADS,
    ObjectFolder,
    StorageError,
    delete_lease_copy,
    fetch_objects,
    file_of_part,
    is_url,
    parts_of,
    read_lease_copy,
    read_part,
    shown,
    token_of,
    write_lease_copy,
)

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0
"""Time between two looks for files that have changed."""

BYTES_PER_S = 1e6
"""Limit on how often a file that changes is stored as a whole, so that a growing one costs a
constant rate."""

STORE_TIMEOUT_S = 1200.0
"""Longest wait for the rest to be stored at the end of a run."""

_UNSTORED = (*LOCAL_FILES, "trial")
_UNFINISHED = (".writing", ".cut", ".deleting")


@contextmanager
def mirrored(folder: Path) -> Iterator[None]:
    """Store a claimed run folder while the block runs, if it is the local copy of a URL.

    Raises:
        FolderInUse: another process stores this run.
        StorageError: the object storage cannot be read or written at the start.
        NotSaved: the end of the run could not be stored.
    """
    url = shown(folder)
    if not is_url(url):
        yield
        return
    mirror = Mirror(folder, url)
    try:
        yield
    except BaseException:
        try:
            mirror.close()
        except NotSaved as error:
            logger.warning("%s", error)
        raise
    mirror.close()


class Uploader:
    """Stores what has changed in a run folder. For one thread."""

    def __init__(self, folder: Path, stored: ObjectFolder) -> None:
        self._folder, self._stored = folder, stored
        # By name: inode and size when a file was stored, and the time of its last change.
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._stored_s: dict[str, float] = {}
        self._checkpoints = {name for name in self._whole() if self._is_stored(name)}
        self._sample_parts: set[tuple[str, int]] | None = None
        names = stored.names()
        for part in closed_parts(folder / SAMPLES):
            # Closed parts do not change, but for a cut, which makes them smaller.
            state = _state(part.stat())
            if part.name in names and names[part.name][0] == state[1]:
                self._seen[part.name] = state

    def store(self, *, stores_all: bool) -> None:
        """Store what has changed; with a new checkpoint, everything before it.

        Args:
            stores_all: whether a file is stored that was stored a moment ago.

        Raises:
            StorageError: it could not be stored; the next call goes on.
        """
        whole = self._whole()
        new = [name for name in whole if name not in self._checkpoints]
        for name, path in self._files():
            with suppress(FileNotFoundError):  # replaced or deleted meanwhile
                if path.suffix == ".jsonl":
                    with path.open("rb") as file:
                        self._store_rows(name, file)
                else:
                    self._store_file(name, path, at_once=stores_all or bool(new))
        self._store_samples()
        for name in new:
            try:
                self._store_checkpoint(name)
            except FileNotFoundError:  # overtaken: deleted locally meanwhile
                continue
            self._checkpoints.add(name)
            logger.info("checkpoint stored: %s/%s/%s", self._stored.url, CHECKPOINTS, name)
            self._delete_checkpoints(lambda name: name not in self._checkpoints & set(whole))

    def _store_file(self, name: str, path: Path, *, at_once: bool) -> None:
        state = _state(path.stat())
        if self._seen.get(name) == state:
            return
        elapsed_s = time.monotonic() - self._stored_s.get(name, -1e9)
        if not at_once and elapsed_s < state[1] / BYTES_PER_S:
            return
        self._stored.upload(path, name)
        self._seen[name], self._stored_s[name] = state, time.monotonic()

    def _store_rows(self, name: str, file: BinaryIO, num_closed: int = 0) -> None:
        """Store the parts that have changed of an open file to which rows were appended.

        Args:
            num_closed: closed files with earlier rows.
        """
        key, state = f"{name}/{num_closed}", _state(os.fstat(file.fileno()))
        inode, seen_bytes, _ = seen = self._seen.get(key, (0, 0, 0))
        if seen == state:
            return
        num_bytes = state[1]
        if inode != state[0] or seen_bytes > num_bytes:
            seen_bytes = 0
            kept = {part for part, _ in parts_of(name, num_bytes, num_closed=num_closed)}
            # Delete before writing, from the end: a kill leaves the beginning of the old file.
            others = [
                part for part in self._stored.names() if file_of_part(part) == (name, num_closed)
            ]
            self._stored.delete(sorted(set(others) - kept, reverse=True))
        for part, start in parts_of(name, num_bytes, seen_bytes, num_closed):
            self._stored.write(part, read_part(file, start, num_bytes))
        self._seen[key] = state

    def _store_samples(self) -> None:
        """Store each closed part once, and the rows of the other parts."""
        path, stored = self._folder / SAMPLES, set[tuple[str, int]]()
        with suppress(FileNotFoundError):  # after the last part
            for number in count():
                with open_part(path, number) as file:
                    part = Path(file.name)
                    if part.suffix == ".gz":
                        self._store_file(part.name, part, at_once=True)
                        stored.add((part.name, 0))
                    else:
                        self._store_rows(SAMPLES, file, number)
                        stored.add((SAMPLES, number))
                if part == path:
                    break
        if stored != self._sample_parts:
            # Compressed parts replace their rows. What a resumed run has cut is deleted too.
            found = {name: file_of_part(name) or (name, 0) for name in self._stored.names()}
            stale = [name for name, of in found.items() if is_part(of[0]) and of not in stored]
            self._stored.delete(sorted(stale, reverse=True))
            self._sample_parts = stored

    def _store_checkpoint(self, name: str) -> None:
        folder = self._folder / CHECKPOINTS / name
        self._delete_checkpoints(lambda other: other == name)  # what a killed process has stored
        files = [path for path in folder.rglob("*") if path.is_file() and path.name != FILES]
        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="upload") as pool:
            for _ in pool.map(lambda path: self._stored.upload(path, self._name(path)), files):
                pass
        self._stored.upload(folder / FILES, self._name(folder / FILES))

    def _delete_checkpoints(self, is_deleted: Callable[[str], bool]) -> None:
        """Delete stored checkpoints, files.json first: a checkpoint without it is never read."""
        names = [
            name
            for name in self._stored.names()
            if name.startswith(f"{CHECKPOINTS}/") and is_deleted(name.split("/")[1])
        ]
        self._stored.delete(sorted(names, key=lambda name: not name.endswith(f"/{FILES}")))

    def _whole(self) -> list[str]:
        """Names of the complete checkpoints in the folder, oldest first."""
        found = sorted(find_checkpoints(self._folder / CHECKPOINTS).items())
        return [path.name for _, path in found if (path / FILES).is_file()]

    def _is_stored(self, name: str) -> bool:
        file = self._folder / CHECKPOINTS / name / FILES
        return self._stored.read(self._name(file)) == file.read_bytes()

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Names and paths of all files but samples, those of checkpoints, and unfinished ones."""
        for path in sorted(self._folder.rglob("*")):
            name = self._name(path)
            if (
                path.is_file()
                and name.split("/")[0] not in (CHECKPOINTS, *_UNSTORED)
                and not path.name.startswith(".")
                and not name.endswith(_UNFINISHED)
                and not is_part(name)
            ):
                yield name, path

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()


def _state(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


class Mirror:
    """Stores a run folder. Two threads, which `close` ends: one stores, one renews the lease."""

    def __init__(self, folder: Path, url: str) -> None:
        """Take the lease, make the folder equal to what is stored, and start the threads. Raises as
        `mirrored`.
        """
        self._folder, self._stored = folder, ObjectFolder(url)
        self._lease = new_lease() | {"token": secrets.token_hex(8)}
        if not self._take_lease():
            fetch_objects(url, newest_whole)
        write_lease_copy(folder, json.dumps(self._lease).encode())
        uploader = Uploader(folder, self._stored)
        self._failure: Exception | None = None
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._storing = threading.Thread(
            target=self._run, args=(uploader,), name=f"storing {url}", daemon=True
        )
        self._storing.start()
        threading.Thread(target=self._renew, name=f"lease of {url}", daemon=True).start()

    def close(self) -> None:
        """Store the remaining changes, end the threads, and delete the lease.

        Raises:
            NotSaved: it could not be stored.
        """
        self._ending.set()
        self._storing.join(STORE_TIMEOUT_S)
        url, failure = self._stored.url, self._failure
        if self._storing.is_alive():
            failure = TimeoutError(f"not stored after {STORE_TIMEOUT_S:g} s")
        self._ended.set()
        if failure is not None:
            # The lease stays: with it, this machine knows that its copy is newer.
            raise NotSaved(
                f"the end of the run is not in {url}: {failure}. It is in {self._folder}, from "
                f"where --resume={url} on this machine resumes and stores it"
            ) from failure
        try:
            self._stored.delete([LEASE])
        except StorageError as error:
            logger.warning("%s", error)
        delete_lease_copy(self._folder)

    def _take_lease(self) -> bool:
        """Take the lease; whether the local copy is newer than what is stored, because the last
        holder was a process of this machine.
        """
        found, own = self._stored.read(LEASE), token_of(read_lease_copy(self._folder))
        # The claim on the local copy says that a holder with this copy has ended.
        is_ahead = own is not None and own == token_of(found)
        if found and not is_ahead and self._is_alive(found):
            raise FolderInUse(refusal(self._folder, parse_lease(found), "--run-folder"))
        lease = json.dumps(self._lease).encode()
        self._stored.write(LEASE, lease)
        time.sleep(SETTLE_S)
        if (now := self._stored.read(LEASE)) != lease:
            raise FolderInUse(refusal(self._folder, parse_lease(now or b""), "--run-folder"))
        return is_ahead

    def _is_alive(self, lease: bytes) -> bool:
        found = parse_lease(lease)
        if is_of_this_system(found):
            return is_running(found)
        logger.warning(
            "%s is in use by %s: waiting %g s for its lease to be renewed",
            self._stored.url,
            describe_holder(found),
            LEASE_S,
        )
        return is_renewed(partial(self._stored.read, LEASE), lease, LEASE_S, 2.0)

    def _renew(self) -> None:
        while not self._ended.wait(RENEW_S):
            try:
                found = self._stored.read(LEASE)
                if self._ended.is_set():
                    return
                if token_of(found) != self._lease["token"]:
                    end_unclaimed(f"{self._stored.url}/{LEASE}", parse_lease(found or b""))
                self._stored.write(LEASE, json.dumps(self._lease | {"beat": time.time()}).encode())
            except StorageError as error:
                logger.warning("the lease could not be renewed: %s", error)

    def _run(self, uploader: Uploader) -> None:
        is_last = False
        while not is_last:
            is_last = self._ending.wait(INTERVAL_S)
            try:
                uploader.store(stores_all=is_last)
                self._failure = None
            except StorageError as error:
                if self._failure is None:
                    logger.warning("%s; it is tried again every %g s", error, INTERVAL_S)
                self._failure = error
            except Exception as error:  # handed on: `close` raises it
                self._failure = error
                return
