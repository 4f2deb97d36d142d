"""Files that are replaced whole, and errors of the disk that name their file."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ESTALE)
"""Faults of the disk, not of the program."""


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace a file in one moment; text is written as UTF-8. OSError, which names the file, leaves
    the one before."""
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
    """Where writing fails inside, for which the system names no file, the OSError names this
    one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def describe_disk_error(error: OSError) -> str | None:
    """What is wrong with the disk, and which file that is about; None where the error is
    another."""
    number = error.errno
    if number is None and (match := re.search(r"\[Errno (\d+)\]", str(error))):
        number = int(match[1])  # of another process, whose error arrived as text
    if number not in DISK_ERRORS:
        return None
    if error.errno is None:
        return str(error)
    # Of a copy the second file is the one that is written.
    file = error.filename2 or error.filename or "the output of this command"
    return f"{os.fsdecode(file)}: {error.strerror}"
