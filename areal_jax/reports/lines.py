"""Files of lines that another thread or process appends to, read without reading twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


class Lines:
    """Reads the complete lines that were appended since the last read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        """Bytes that were read."""
        self._inode = 0

    def is_replaced(self) -> bool:
        """Return whether the file is another one than before, or shorter: a resumed run cuts rows.

        The next read then begins at the start of the file.
        """
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        replaced = self._inode not in (0, found.st_ino) or found.st_size < self.offset
        if replaced:
            self.offset = 0
        self._inode = found.st_ino
        return replaced

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the new complete lines, each with its offset; none if there is no file."""
        try:
            file = self.path.open("rb", buffering=1 << 20)
        except FileNotFoundError:
            return
        with file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                start, self.offset = self.offset, self.offset + len(line)
                yield start, line
