"""JSON Lines files: rows are appended atomically, and cut when a run resumes from a version.

Every row begins with its version, so that cutting parses nothing else.
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
    """Encode as one line of JSON. NaN and infinities become null; numpy becomes numbers and
    lists.
    """
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
    """A file to which rows are appended. A row that fails half-written (disk full) is removed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unbuffered: once `append` has returned, a kill of this process loses nothing.
        self._file = path.open("ab", buffering=0)
        self.num_bytes = os.fstat(self._file.fileno()).st_size
        """Size of the file."""

    def append(self, version: int, row: Mapping[str, object]) -> None:
        """Append one row, with `version` as its first entry.

        Raises:
            OSError: the row was not written.
            ValueError: the row has an entry named version.
        """
        if "version" in row:
            raise ValueError(
                f"expected a row without an entry `version`, found version={row['version']!r}"
            )
        data = memoryview(f"{encode({'version': version, **row})}\n".encode())
        written = 0
        try:
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            os.ftruncate(self._file.fileno(), self.num_bytes)
            message = f"{error.strerror}, so a row of version {version} was not written"
            raise OSError(error.errno, message, str(self.path)) from error
        self.num_bytes += written

    def sync(self) -> None:
        """Sync the file to disk, so that a power failure loses no row."""
        with add_file_name(self.path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut(path: Path, version: int) -> int:
    """Remove the rows of `version` and later, and rows torn by a crash.

    The file is replaced atomically. A missing file has no rows.

    Returns:
        The number of removed rows.
    """
    if not path.exists():
        return 0
    copy = path.with_name(f"{path.name}.cut")
    removed = 0
    with add_file_name(copy), path.open("rb") as old, copy.open("wb") as new:
        for line in old:
            if is_before(line, version):
                new.write(line)
            else:
                removed += 1
        new.flush()
        os.fsync(new.fileno())
    copy.replace(path)
    return removed


def is_before(line: bytes, version: int) -> bool:
    """Return whether a line is a complete row of a version below `version`."""
    match = _VERSION.match(line)
    return match is not None and int(match[1]) < version and line.endswith(b"}\n")


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete rows of a file, oldest first."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"}\n"):
                yield json.loads(line)
