"""Object storage (gs://, s3://) through fsspec: local copies of files and folders that URLs name.

The copy of a URL is in the cache folder, which AREAL_JAX_CACHE names. All other code sees the copy,
whose path has the URL in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, unquote

from areal_jax.errors import ConfigError
from areal_jax.json_files import read_json
from areal_jax.metrics.files import write_atomically

PACKAGES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}
"""By scheme: the package that reads and writes it, and the extra that installs it."""

LEASE = "lease.json"
"""Object of a run folder that names the process which writes it; `run.mirror` renews it."""

PART_BYTES = 16 * 2**20
"""JSON Lines files grow, and objects do not: such a file is stored in parts of this size, as
`metrics.jsonl/000000`."""

MAX_PARTS = 10**6
"""Bound on the parts of a file. After samples.jsonl was closed, as samples.00000.jsonl.gz, which
replaces its parts, the parts of the next samples.jsonl begin at `samples.jsonl/1000000`."""

LOCAL_FILES = ("claim.json", "claim.writers")
"""Files of a run folder that name its process on this machine, and are never stored."""

NUM_THREADS = 8

LOCK_TIMEOUT_S = 3600.0
"""Longest wait for another process that downloads the same URL."""

_URL = re.compile(r"(gs|s3)://[\w.-]+(/.*)?")
_PART = re.compile(r"(.+\.jsonl)/(\d{6,})")


class StorageError(ConfigError):
    """Object storage cannot be read or written; the message has the URL and the cause."""


def is_url(text: str) -> bool:
    return text.startswith(tuple(f"{scheme}://" for scheme in PACKAGES))


def local_path(text: str) -> Path:
    """The path that a text names; of a gs:// or s3:// URL the path of its local copy, which may not
    exist yet.
    """
    if not is_url(text):
        return Path(text).expanduser()
    folder, _, name = text.rstrip("/").rpartition("/")
    return _cache() / quote(folder, safe="") / name


def shown(path: Path) -> str:
    """A path for messages: in the local copy of a URL, the URL."""
    cache = _cache()
    if not path.is_relative_to(cache):
        return str(path)
    folder, *names = path.relative_to(cache).parts
    return "/".join([unquote(folder), *names])


def local_only(text: str) -> Path:
    """A path on this machine.

    Raises:
        ConfigError: it is the URL of an object.
    """
    if is_url(text):
        raise ConfigError(f"{text}: expected a path on this machine, found object storage")
    return Path(text)


class ObjectFolder:
    """The objects below a URL, or one object."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            ConfigError: it is no URL of an object, or the extra for it is not installed.
        """
        # What follows the scheme is not repeated: it may be a key.
        scheme = url.partition(":")[0]
        if _URL.fullmatch(url) is None or _leads_outside(url):
            raise ConfigError(
                f"{scheme}:// URL: expected {scheme}://BUCKET/PATH, found something else; "
                "credentials belong into the environment"
            )
        package, extra = PACKAGES[scheme]
        if find_spec(package) is None:
            raise ConfigError(
                f"{url}: reading {scheme}:// needs {package}, which is not installed: pip install "
                f"'areal-jax[{extra}]'"
            )
        import fsspec

        self.url = url.rstrip("/")
        self._root = self.url.removeprefix(f"{scheme}://")
        # s3fs sends checksums without being asked, and the store compares them.
        self._checked = {"consistency": "md5"} if scheme == "gs" else {}
        with self._errors():
            self._files = fsspec.filesystem(scheme, use_listings_cache=False)

    def names(self) -> dict[str, list[Any]]:
        """Names of all objects relative to the URL, with size and ETag; empty for the object of the
        URL itself.

        Raises:
            StorageError: they cannot be listed, or one names a file outside of a folder of copies.
        """
        with self._errors():
            found: Mapping[str, Any] = self._files.find(self._root, detail=True)
        for path in found:
            if _leads_outside(path):
                raise StorageError(
                    f"{self.url}: expected names of objects without '..', found {path[:200]!r}; "
                    "rename the object"
                )
        return {
            path.removeprefix(self._root).lstrip("/"): [
                info["size"],
                info.get("ETag") or info.get("etag"),
            ]
            for path, info in found.items()
            if not path.endswith("/")
        }

    def read(self, name: str) -> bytes | None:
        """Read an object; None if there is none."""
        with self._errors():
            try:
                return self._files.cat_file(self._path(name))
            except FileNotFoundError:
                return None

    def write(self, name: str, data: bytes) -> None:
        with self._errors():
            self._files.pipe_file(self._path(name), data, **self._checked)

    def upload(self, file: Path, name: str) -> None:
        """Upload a file; its object is replaced as a whole.

        Raises:
            FileNotFoundError: the file was deleted.
            StorageError: it could not be uploaded, or what is stored has another checksum.
        """
        file.stat()
        with self._errors():
            self._files.put_file(str(file), self._path(name), **self._checked)

    def download(self, name: str, file: Path) -> None:
        with _replaced(file) as unfinished, self._errors():
            self._files.get_file(self._path(name), str(unfinished))

    def delete(self, names: Collection[str]) -> None:
        with self._errors():
            for name in names:
                self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of a library, which has errors of its own for every store
            cause = str(error).partition("\n")[0]
            raise StorageError(
                f"{self.url}: object storage failed ({type(error).__name__}: {cause}); check the "
                "bucket and this machine's credentials for it"
            ) from error


def fetch_objects(
    text: str,
    select: Callable[[Collection[str]], Collection[str]] | None = None,
) -> Path:
    """Make the local copy of a gs:// or s3:// URL equal to what is stored; a path is returned as it
    is.

    Only what has changed is downloaded. A copy in which a run of this machine wrote what is not
    stored yet is left alone.

    Args:
        select: chooses among the names below the URL, which may be none; None: all.

    Raises:
        ConfigError: the URL cannot be read.
        FileNotFoundError: nothing is stored there.
    """
    local = local_path(text)
    if not is_url(text):
        return local
    stored = ObjectFolder(text)
    found = stored.names()
    if select is None and not found:
        raise FileNotFoundError(f"{text}: expected an object or a folder, found none")
    own = token_of(read_lease_copy(local))
    if own is not None and LEASE in found and own == token_of(stored.read(LEASE)):
        return local
    found.pop(LEASE, None)
    # A kill may leave parts of a closed file.
    found = {name: state for name, state in found.items() if _closed_file(name) not in found}
    files: dict[str, list[str]] = {}
    for name in sorted(found, key=_place):
        files.setdefault(_file_of(name), []).append(name)
    chosen = {_file_of(name) for name in (found if select is None else select(found))}
    with _locked(_beside(local, "lock"), text):
        index = _beside(local, "objects")
        had = read_json(index) if index.is_file() else {}
        # A kill leaves no index that claims files which were not downloaded.
        index.unlink(missing_ok=True)

        def state(file: str) -> list[Any]:
            return [[found[part] for part in files[file]], _state(_within(local, file))]

        current = {file for file in files if had.get(file) == state(file)}
        _delete_others(local, {_within(local, file) for file in current | chosen})

        def download(file: str) -> None:
            if files[file] == [file]:
                stored.download(file, _within(local, file))
            else:
                _join(stored, files[file], _within(local, file))

        with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="download") as pool:
            for _ in pool.map(download, chosen - current):
                pass
        index.write_text(json.dumps({file: state(file) for file in current | chosen}))
    return local


def token_of(lease: bytes | None) -> str | None:
    """Token of a lease, which identifies the process that holds it."""
    return json.loads(lease)["token"] if lease else None


def read_lease_copy(local: Path) -> bytes | None:
    """The last lease that a process of this machine has stored beside a local copy."""
    path = _beside(local, "lease")
    return path.read_bytes() if path.is_file() else None


def write_lease_copy(local: Path, lease: bytes) -> None:
    write_atomically(_beside(local, "lease"), lease)


def delete_lease_copy(local: Path) -> None:
    _beside(local, "lease").unlink(missing_ok=True)


def read_part(file: BinaryIO, start: int, end: int) -> bytes:
    """Read the bytes of the part that begins at `start`, up to `end` at most."""
    file.seek(start)
    return file.read(min(PART_BYTES, end - start))


def parts_of(
    name: str, num_bytes: int, first_byte: int = 0, num_closed: int = 0
) -> Iterator[tuple[str, int]]:
    """Names and first bytes of the parts of a JSON Lines file, from the one with a byte on.

    Args:
        num_closed: closed files with earlier rows.
    """
    for number in range(first_byte // PART_BYTES, max(1, -(-num_bytes // PART_BYTES))):
        yield f"{name}/{num_closed * MAX_PARTS + number:06d}", number * PART_BYTES


def file_of_part(name: str) -> tuple[str, int] | None:
    """Name of the JSON Lines file that an object is a part of, and the number of closed files with
    earlier rows; None: it is no part.
    """
    match = _PART.fullmatch(name)
    return (match[1], int(match[2]) // MAX_PARTS) if match else None


def _closed_file(name: str) -> str | None:
    """Name of the closed file that has the rows of a part, once it is stored."""
    if (found := file_of_part(name)) is None:
        return None
    return f"{found[0].removesuffix('.jsonl')}.{found[1]:05d}.jsonl.gz"


def _join(stored: ObjectFolder, parts: Collection[str], file: Path) -> None:
    with _replaced(file) as unfinished, unfinished.open("wb") as joined:
        for part in parts:
            joined.write(stored.read(part) or b"")


@contextmanager
def _replaced(file: Path) -> Iterator[Path]:
    """Yield a path whose file takes the place of `file` at the end of the block."""
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield unfinished
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def _delete_others(local: Path, kept: Collection[Path]) -> None:
    """Delete the other files of a local copy, and empty folders."""
    paths = [local, *sorted(local.rglob("*"))] if local.exists() else []
    for path in reversed(paths):
        if path.is_dir():
            if path in kept or not any(path.iterdir()):
                path.rmdir()
        elif path not in kept and path.name not in LOCAL_FILES:
            path.unlink()


def _file_of(name: str) -> str:
    """Name of the file that an object is, or is a part of."""
    return _place(name)[0]


def _place(name: str) -> tuple[str, int]:
    """Key that sorts the parts of a file by their order in it."""
    match = _PART.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, 0)


def _leads_outside(name: str) -> bool:
    return ".." in name.split("/")


def _within(local: Path, file: str) -> Path:
    return local / file if file else local


@contextmanager
def _locked(path: Path, url: str) -> Iterator[None]:
    """Wait until no other process makes the copy of this URL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise StorageError(
                        f"{url}: another process of this machine has downloaded it for "
                        f"{LOCK_TIMEOUT_S:g} s; wait until it ends, or set AREAL_JAX_CACHE to "
                        "another folder"
                    ) from None
                time.sleep(0.2)
        yield


def _state(file: Path) -> list[int] | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns]


def _beside(local: Path, kind: str) -> Path:
    return local.with_name(f".{local.name}.{kind}.json")


def _cache() -> Path:
    named = os.environ.get("AREAL_JAX_CACHE") or Path.home() / ".cache" / "areal_jax"
    return Path(named).absolute()
