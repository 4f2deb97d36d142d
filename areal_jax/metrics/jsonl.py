"""Files of JSON lines: appended whole or not at all, read by any tool, cut where a run resumes from
an earlier version.

Every row begins with its version, so that cutting reads no more of it than that.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from areal_jax.metrics.files import add_file_name

_VERSION = re.compile(rb'\{"version":(\d+)[,}]')


def encode(value: object) -> str:
    """JSON on one line. NaN and infinities, for which JSON has no word, become null; numpy becomes
    numbers and lists."""
    try:
        return json.dumps(value, allow_nan=False, default=_unwrap, separators=(",", ":"))
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))


def _unwrap(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{value!r} is no JSON value")


def _finite(value: object) -> object:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class JsonLines:
    """A file to which rows are appended. A row that could not be written whole (disk full) leaves
    no trace."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open(
            "ab", buffering=0
        )  # unbuffered: once `append` returns, a kill of this process loses nothing
        self._num_bytes = os.fstat(self._file.fileno()).st_size

    def append(self, version: int, row: Mapping[str, object]) -> None:
        """Append one row, to which `version` is added as its first entry. OSError where the disk
        does not take it."""
        if "version" in row:
            raise ValueError(
                f"a row must not have an entry named version of its own, it has {row['version']!r}"
            )
        data = memoryview(f"{encode({'version': version, **row})}\n".encode())
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            os.ftruncate(self._file.fileno(), self._num_bytes)
            reported = f"{error.strerror}, so a row of version {version} was not written"
            raise OSError(error.errno, reported, str(self.path)) from error
        self._num_bytes += written

    def sync(self) -> None:
        """Bring what was appended to the disk itself, so that not even a power cut loses it."""
        with add_file_name(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut(path: Path, version: int) -> int:
    """Remove the rows of `version` and later, and rows torn by a crash; returns how many. A missing
    file has none.

    The file is replaced in one moment by a copy, made row by row."""
    if not path.exists():
        return 0
    copy = path.with_name(f"{path.name}.cut")
    removed = 0
    with add_file_name(copy), path.open("rb") as old, copy.open("wb") as new:
        for line in old:
            match = _VERSION.match(line)
            if match and int(match[1]) < version and line.endswith(b"}\n"):
                new.write(line)
            else:
                removed += 1
        new.flush()
        os.fsync(new.fileno())
    copy.replace(path)
    return removed


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, oldest first; one that a crash tore, or that is being written now, is
    left out."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"}\n"):
                yield json.loads(line)
