"""Atomic file writes, and disk errors with file names."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Error numbers of disk faults."""


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace a file atomically; text is written as UTF-8.

    Raises:
        OSError: writing failed, and the old file is kept; the error names the file.
    """
    unfinished = path.with_name(f"{path.name}.writing")
    with add_file_name(path):
        try:
            unfinished.write_bytes(
                data.encode("utf-8", "replace") if isinstance(data, str) else data
            )
            unfinished.replace(path)
        except OSError:
            with suppress(OSError):
                unfinished.unlink()
            raise


@contextmanager
def add_file_name(path: Path) -> Iterator[None]:
    """Add `path` to OSErrors of the body that name no file."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def describe_disk_error(error: OSError) -> str | None:
    """Describe a disk error with its file; None if the error is no disk error."""
    number = error.errno
    if number is None and (match := re.search(r"\[Errno (\d+)\]", str(error))):
        number = int(match[1])  # an error of another process, which arrived as text
    if number not in DISK_ERRORS:
        return None
    if error.errno is None:
        return str(error)
    # For a copy, the second file is the written one.
    file = error.filename2 or error.filename or "the output of this command"
    return f"{os.fsdecode(file)}: {error.strerror}"
