"""Parts of samples.jsonl: rows are appended to it, and earlier ones are in compressed parts.

samples.00000.jsonl.gz is the oldest closed part. A version lies in one part. Positions are those in
all parts together, uncompressed, so that they stay valid when a part is closed.

A closed part consists of gzip members, each with whole rows and, in its header, its sizes
(RFC 1952, section 2.3.1.1): any row is read by decompressing one member.

To close a part, samples.jsonl is renamed to samples.00000.jsonl, and compressed to a file with the
suffix .writing, which is renamed too; then samples.00000.jsonl is deleted. A kill at any point
leaves each row in one part, because the compressed one counts where both exist.
"""

from __future__ import annotations

import math
import os
import re
import struct
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, takewhile
from pathlib import Path
from typing import BinaryIO

from areal_jax.errors import ConfigError
from areal_jax.metrics.files import add_file_name
from areal_jax.metrics.jsonl import cut, is_before

MEMBER_BYTES = 2**18
"""Rows of a gzip member, in bytes: larger ones take 0.1 % less, and longer to read one row."""

NUM_THREADS = 4
"""Threads that decompress."""

_NAME = re.compile(r"samples(?:\.(\d{5,}))?\.jsonl(?:\.gz)?")

# Magic, flags (extra field), time, level, system; then the extra field: its size, name and size of
# the only entry, and that entry: bytes of the member, and of its rows.
_HEADER = struct.Struct("<10sH2sHII")
_START = b"\x1f\x8b\x08\x04\0\0\0\0\x04\xff"
_FIELD = (12, b"AR", 8)

PARTS = "samples*.jsonl*"
"""Pattern of the names of all parts."""

RESTORE = f"restore it from a copy, or move all parts ({PARTS}) away"
"""What to do about a missing or damaged part."""


class DamagedSamples(ConfigError):
    """A closed part cannot be read; the message names it."""


def is_part(name: str) -> bool:
    """Return whether a file of a run folder is a part of the samples."""
    return _NAME.fullmatch(name) is not None


def closed_parts(path: Path) -> list[Path]:
    """List the closed parts of a file of samples, oldest first.

    Raises:
        DamagedSamples: a part is missing.
    """
    found = list(takewhile(bool, (_find_closed(path, number) for number in count())))
    matches = (_NAME.fullmatch(each.name) for each in path.parent.glob("samples*"))
    numbers = [int(match[1]) for match in matches if match and match[1]]
    # The next one may have been closed meanwhile.
    if max(numbers, default=0) > len(found):
        raise DamagedSamples(
            f"{path.parent}: expected {_names(path, len(found))[0].name} before "
            f"{_names(path, max(numbers))[0].name}, found none; {RESTORE}"
        )
    return [part for part in found if part is not None]


def close_part(path: Path) -> None:
    """Close samples.jsonl, which is on disk and not empty. `compress_parts` compresses it."""
    path.rename(_names(path, len(closed_parts(path)))[1])


def compress_parts(path: Path) -> Iterator[None]:
    """Compress the closed parts, one member at a time; also those that a kill left behind."""
    for number in range(len(closed_parts(path))):
        compressed, plain = _names(path, number)
        if plain.exists():
            if not compressed.exists():
                with plain.open("rb") as file:
                    yield from _write(compressed, _blocks(file))
            plain.unlink()


def cut_parts(path: Path, version: int) -> None:
    """Remove the rows of `version` and later, and rows torn by a crash.

    Versions ascend, so that parts at the end are removed and one is rewritten, each atomically.

    Raises:
        DamagedSamples: a part is missing or damaged.
    """
    for _ in compress_parts(path):
        pass
    cut(path, version)
    for part in reversed(closed_parts(path)):
        if path.exists() and path.stat().st_size:
            return
        with part.open("rb") as file:
            if is_before(next(_lines(file, 0, 1)), version):
                blocks = (rows.splitlines(keepends=True) for rows in _members(file, 0))
                kept = (b"".join(row for row in rows if is_before(row, version)) for rows in blocks)
                for _ in _write(part, filter(None, kept)):
                    pass
                return
        part.unlink()


def open_part(path: Path, number: int) -> BinaryIO:
    """Open a part; after the closed ones comes samples.jsonl, which may be closed meanwhile.

    Raises:
        FileNotFoundError: there is no such part.
        DamagedSamples: an earlier part is missing.
    """
    while True:
        closed = _find_closed(path, number)
        if closed is None and (num_closed := len(closed_parts(path))) < number:
            raise FileNotFoundError(f"{path}: expected {number} closed parts, found {num_closed}")
        is_compressed = closed is not None and closed.suffix == ".gz"
        try:
            # Of a compressed part, only headers and some members are read.
            file = (closed or path).open("rb", buffering=0 if is_compressed else 2**20)
        except FileNotFoundError:
            if closed is None and _find_closed(path, number) is None:
                raise
            continue
        if closed is not None or _find_closed(path, number) is None:
            return file
        file.close()


class SampleParts:
    """Reads the complete rows that were appended since the last read, and rows by position."""

    def __init__(self, path: Path) -> None:
        """
        Args:
            path: samples.jsonl, which may not exist yet.
        """
        self.path = path
        self.offset = 0
        """Bytes that were read."""
        self._ends: list[int] = []  # of the closed parts that were read to their ends
        self._last = b""

    def is_replaced(self) -> bool:
        """Return whether a resumed run has cut rows that were read.

        The next read then begins at the first row.
        """
        try:
            found = self.rows(self.offset - len(self._last), len(self._last))
        except FileNotFoundError:
            found = []
        if replaced := b"".join(found) != self._last:
            self.offset, self._ends, self._last = 0, [], b""
        return replaced

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the new complete rows, each with its position.

        Raises:
            DamagedSamples: a part is missing or damaged.
        """
        is_closed = True
        while is_closed:
            try:
                file = open_part(self.path, len(self._ends))
            except FileNotFoundError:
                return
            with file:
                is_closed = Path(file.name) != self.path
                for line in _lines(file, self.offset - self._start(len(self._ends))):
                    if not (is_closed or line.endswith(b"\n")):
                        return  # it is being written
                    position, self.offset = self.offset, self.offset + len(line)
                    self._last = line
                    yield position, line
            if is_closed:
                self._ends.append(self.offset)

    def rows(self, position: int, num_bytes: int) -> list[bytes]:
        """Read the rows from a position on that have so many bytes, from one part.

        Raises:
            FileNotFoundError: the part does not exist.
            DamagedSamples: a part is missing or damaged.
        """
        number = bisect_right(self._ends, position)
        start, found = position - self._start(number), list[bytes]()
        with open_part(self.path, number) as file:
            for line in _lines(file, start, start + num_bytes):
                if num_bytes <= 0:
                    break
                found.append(line)
                num_bytes -= len(line)
        return found

    def _start(self, number: int) -> int:
        return self._ends[number - 1] if number else 0


def _names(path: Path, number: int) -> tuple[Path, Path]:
    """Paths of a closed part, compressed and not."""
    plain = path.with_name(f"{path.stem}.{number:05d}.jsonl")
    return plain.with_name(f"{plain.name}.gz"), plain


def _find_closed(path: Path, number: int) -> Path | None:
    compressed, plain = _names(path, number)
    # It may be compressed between two of these looks.
    return next((each for each in (compressed, plain, compressed) if each.exists()), None)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while rows := file.readlines(MEMBER_BYTES):
        yield b"".join(rows)


def _write(part: Path, blocks: Iterable[bytes]) -> Iterator[None]:
    """Write a compressed part atomically, one member at a time."""
    unfinished = part.with_name(f"{part.name}.writing")
    with add_file_name(unfinished), unfinished.open("wb") as file:
        for rows in blocks:
            member = zlib.compress(rows, level=1, wbits=31)[len(_START) :]
            num_bytes = _HEADER.size + len(member)
            file.write(_HEADER.pack(_START, *_FIELD, num_bytes, len(rows)) + member)
            yield
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(part)


def _lines(file: BinaryIO, start: int, end: float = math.inf) -> Iterator[bytes]:
    """Yield the lines of a part from a byte on, at least to another."""
    if file.name.endswith(".gz"):
        for rows in _members(file, start, end):
            yield from rows.splitlines(keepends=True)
    else:
        file.seek(start)
        yield from file


def _members(file: BinaryIO, start: int, end: float = math.inf) -> Iterator[bytes]:
    """Yield the rows of each member with a byte from `start` to `end`, the first from `start` on.

    Some members are decompressed ahead.
    """
    place, size = file.seek(0), os.fstat(file.fileno()).st_size
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="decompress samples") as pool:
        waiting = deque[Future[bytes]]()
        while place < end and (at := file.tell()) < size:
            head = file.read(_HEADER.size).ljust(_HEADER.size)
            magic, *field, num_bytes, num_row_bytes = _HEADER.unpack(head)
            if (magic, *field) != (_START, *_FIELD) or num_bytes < _HEADER.size:
                raise DamagedSamples(
                    f"{file.name}: expected at byte {at} a gzip member that has its sizes, found "
                    f"{head.hex()}; decompress this part with gunzip, or {RESTORE}"
                )
            if at + num_bytes > size:
                raise DamagedSamples(
                    f"{file.name}: expected {at + num_bytes} bytes or more, found {size}; {RESTORE}"
                )
            if place + num_row_bytes > start:
                member = head + file.read(num_bytes - len(head))
                waiting.append(pool.submit(_decompress, file, at, member, max(0, start - place)))
            else:
                file.seek(at + num_bytes)
            place += num_row_bytes
            if len(waiting) > NUM_THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _decompress(file: BinaryIO, at: int, member: bytes, start: int) -> bytes:
    try:
        return zlib.decompress(member, wbits=31)[start:]
    except zlib.error as error:
        raise DamagedSamples(
            f"{file.name}: expected a gzip member at byte {at}, found {error}; {RESTORE}"
        ) from error
