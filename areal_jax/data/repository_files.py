"""Repositories from archives and folders, and unified diffs of their files.

Nothing is extracted here: files are read into memory, within limits, and written to disk inside
sandboxes only.
"""

from __future__ import annotations

import base64
import binascii
import codecs
import gzip
import io
import os
import re
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TypeAlias, cast

MAX_FILES = 20_000
"""Files and folders of a repository."""

MAX_BYTES = 256 << 20
"""Bytes of all files of a repository, not compressed."""

DATA = "data:"
"""Start of a repository that is an archive as base64 (or a data URL of one), instead of a path."""

IGNORED = frozenset({".git", ".hg", ".svn", "__pycache__"})
"""Folders that are left out: a history may hold the solution, and bytecode is of other sources."""


class BadRepository(ValueError):
    """A repository or a patch cannot be used; the message says why."""


class RepositoryFile(NamedTuple):
    """A file of a repository."""

    data: bytes
    """Its content; of a symbolic link its target, relative to its folder."""
    kind: Literal["file", "program", "link"] = "file"
    """`program`: it is executable."""


RepositoryFiles: TypeAlias = Mapping[str, RepositoryFile]
"""Files by their path, with / between folders."""

_Kind: TypeAlias = Literal["file", "program", "link", "folder", "other"]


class _Member(NamedTuple):
    path: str
    size: int
    """Bytes, known before they are read."""
    kind: _Kind
    read: Callable[[], bytes]


def read_repository(where: str) -> RepositoryFiles:
    """Read a repository: a folder, a .tar, .tar.gz or .zip, or an archive as base64 after DATA.

    Files of an archive that are all in one folder are taken as the content of that folder.

    Raises:
        BadRepository: It cannot be read, has a path or a symbolic link that leads outside, a hard
            link, a pipe or a device, or more than MAX_FILES or MAX_BYTES.
    """
    if where.startswith(DATA):
        return _read_archive(where)
    if os.path.isdir(where):
        return _collect(_walk(Path(where)), where)
    try:
        state = os.stat(where)
    except OSError as error:
        raise BadRepository(f"expected a repository at {where}, found none ({error})") from error
    return _read_archive(where, state.st_mtime_ns, state.st_size)


# The samples of a group, and their grades, are of the same repository.
@lru_cache(maxsize=4)
def _read_archive(where: str, *_state: int) -> RepositoryFiles:
    name = where[:200]
    try:
        with ExitStack() as stack:
            if where.startswith(DATA):
                name = "the archive of the row"
                content = where.rpartition(",")[2].removeprefix(DATA)
                file: IO[bytes] = io.BytesIO(base64.b64decode(content, validate=True))
            else:
                file = stack.enter_context(open(where, "rb"))
            found = _collect(_members(file, stack), name)
    except (
        *(OSError, EOFError, RuntimeError, NotImplementedError),  # encryption, unknown compression
        *(tarfile.TarError, zipfile.BadZipFile, zlib.error, binascii.Error),
    ) as error:
        raise BadRepository(f"{name}: expected a .tar, .tar.gz or .zip file ({error})") from error
    folders = {path.partition("/")[0] for path in found}
    if len(folders) == 1 and all("/" in path for path in found):
        return {path.partition("/")[2]: file for path, file in found.items()}
    return found


def _members(file: IO[bytes], stack: ExitStack) -> Iterator[_Member]:
    start = file.read(4)
    file.seek(0)
    if start == b"PK\3\4":
        zipped = stack.enter_context(zipfile.ZipFile(file))
        for each in zipped.infolist():
            # Archives made on Windows have no modes.
            mode = each.external_attr >> 16 or stat.S_IFREG
            kind = "folder" if each.is_dir() else _kind(mode)
            yield _Member(each.filename, each.file_size, kind, partial(zipped.read, each))
        return
    if start[:2] == b"\x1f\x8b":
        file = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=file)))
    # As a stream, in which names and headers count as well before they are held in memory.
    stream: Any = _Limited(file)
    archive = stack.enter_context(tarfile.open(fileobj=stream, mode="r|"))  # noqa: SIM115
    for each in archive:
        if each.issym():
            yield _Member(each.name, 0, "link", partial(os.fsencode, each.linkname))
        elif each.isreg():
            content = archive.extractfile(each)
            assert content is not None  # it is a file
            yield _Member(each.name, each.size, _kind(each.mode | stat.S_IFREG), content.read)
        else:
            yield _Member(each.name, 0, "folder" if each.isdir() else "other", bytes)


class _Limited:
    """Reads of a decompressed archive, which end where it is larger than a repository may be."""

    def __init__(self, file: IO[bytes]) -> None:
        # Each file has a header of 512 bytes and is filled up to a multiple of 512.
        self._file, self._left = file, MAX_BYTES + 4096 * MAX_FILES

    def read(self, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise tarfile.ReadError(f"more than {MAX_BYTES} bytes")
        return self._file.read(size)


def _walk(folder: Path) -> Iterator[_Member]:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - IGNORED)
        links = [name for name in folders if os.path.islink(os.path.join(where, name))]
        for name in sorted([*names, *links]):
            path = Path(where, name)
            state = path.lstat()
            kind = _kind(state.st_mode)
            read = partial(os.readlink, os.fsencode(path)) if kind == "link" else path.read_bytes
            yield _Member(path.relative_to(folder).as_posix(), state.st_size, kind, read)


def _kind(mode: int) -> _Kind:
    if stat.S_ISLNK(mode):
        return "link"
    if stat.S_ISREG(mode):
        return "program" if mode & 0o100 else "file"
    return "other"


def _collect(members: Iterable[_Member], name: str) -> RepositoryFiles:
    """Check the members of a repository, and read its files."""
    found, num_bytes = dict[str, RepositoryFile](), 0
    for number, (path, size, kind, read) in enumerate(members):
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if path.startswith("/") or ".." in parts or "\0" in path:
            raise BadRepository(f"{name}: expected paths inside of it, found {path[:200]!r}")
        if not IGNORED.isdisjoint(parts) or not parts:
            continue
        num_bytes += size
        if number >= MAX_FILES or num_bytes > MAX_BYTES:
            raise BadRepository(
                f"{name}: expected at most {MAX_FILES} files and {MAX_BYTES} bytes, found more"
            )
        if kind == "other":
            raise BadRepository(
                f"{name}: expected files, folders and symbolic links, found {path[:200]!r}, which "
                "is a hard link, a pipe or a device; make the archive with git archive"
            )
        if kind != "folder":
            data = read()
            if kind == "link" and _leads_outside(parts, os.fsdecode(data)):
                raise BadRepository(
                    f"{name}: expected links inside of it, found {path[:200]!r} to {data[:200]!r}"
                )
            found["/".join(parts)] = RepositoryFile(data, kind)
    for path in found:
        above = next((each for each in parents(path) if each in found), None)
        if above is not None:
            raise BadRepository(f"{name}: expected a folder at {above!r}, found a file or link")
    return found


def parents(path: str) -> Iterator[str]:
    """Yield the folders of a path, from the outermost."""
    for place, letter in enumerate(path):
        if letter == "/":
            yield path[:place]


def _leads_outside(parts: list[str], target: str) -> bool:
    depth = len(parts) - 1
    for part in target.split("/"):
        depth += {"": 0, ".": 0, "..": -1}.get(part, 1)
        if depth < 0:
            return True
    return target.startswith("/")


def pack_files(files: RepositoryFiles) -> bytes:
    """Return a .tar.gz of files, equal for equal files."""
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", compresslevel=1, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as archive,
    ):
        for path, file in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.mode = 0o644 if file.kind == "file" else 0o755
            if file.kind == "link":
                member.type, member.linkname = tarfile.SYMTYPE, os.fsdecode(file.data)
                archive.addfile(member)
            else:
                member.size = len(file.data)
                archive.addfile(member, io.BytesIO(file.data))
    return packed.getvalue()


# Unified diffs.

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class Hunk(NamedTuple):
    """Lines that replace others."""

    start: int
    """Number of lines before it in the old file."""
    old: list[bytes]
    new: list[bytes]
    """With what ends each line."""


class FileDiff(NamedTuple):
    """What a diff says of one file."""

    old: str | None
    """Path before; None: there was none."""
    new: str | None
    """Path after; None: it is deleted."""
    hunks: list[Hunk]


def parse_diff(diff: str) -> list[FileDiff]:
    """Parse a unified diff, such as git's.

    Raises:
        BadRepository: It is none, is of binary files, or has paths that lead outside.
    """
    found, lines, at = list[FileDiff](), _split(diff.encode(errors="surrogateescape")), 0
    while at < len(lines):
        line, is_new_file = lines[at].rstrip(b"\r\n"), not found or bool(found[-1].hunks)
        at += 1
        if line.startswith(b"diff --git "):
            names = line[11:]
            old, new = names[: len(names) // 2], names[len(names) // 2 + 1 :]
            # Where they differ, lines of a renamed file follow.
            is_same = old.partition(b"/")[2] == new.partition(b"/")[2]
            path = _path(new) if is_same else None
            found.append(FileDiff(path, path, []))
        elif line.startswith((b"GIT binary patch", b"Binary files ", b"copy from ")):
            raise BadRepository(f"expected a diff of texts, found {line[:100]!r}")
        elif line.startswith(b"--- ") and lines[at : at + 1] and lines[at].startswith(b"+++ "):
            each = FileDiff(_path(line[4:]), _path(lines[at].rstrip(b"\r\n")[4:]), [])
            found[len(found) - (not is_new_file) :] = [each]
            at += 1
        elif line.startswith(b"rename from "):
            found[-1] = found[-1]._replace(old=_checked(_unquoted(line[12:])))
        elif line.startswith(b"rename to "):
            found[-1] = found[-1]._replace(new=_checked(_unquoted(line[10:])))
        elif line.startswith(b"new file mode "):
            found[-1] = found[-1]._replace(old=None)
        elif line.startswith(b"deleted file mode "):
            found[-1] = found[-1]._replace(new=None)
        elif (match := _HUNK.match(line)) and found:
            hunk, at = _parse_hunk(match, lines, at)
            found[-1].hunks.append(hunk)
    if diff.strip() and not found:
        raise BadRepository(f"expected a unified diff, found {diff[:100]!r}")
    return found


def _parse_hunk(head: re.Match[bytes], lines: list[bytes], at: int) -> tuple[Hunk, int]:
    """Return the hunk whose lines start at `at`, and where they end."""
    num_old, num_new = (1 if head[group] is None else int(head[group]) for group in (2, 3))
    # A hunk without old lines is behind the line that its head names.
    hunk = Hunk(int(head[1]) - (num_old > 0), [], [])
    while len(hunk.old) < num_old or len(hunk.new) < num_new:
        line = lines[at] if at < len(lines) else b""
        sides = {b" ": (hunk.old, hunk.new), b"-": (hunk.old,), b"+": (hunk.new,)}
        # Some tools remove the space of an empty line.
        sides |= {b"\n": sides[b" "]}
        if line[:1] not in sides:
            raise BadRepository(f"expected lines of the hunk {head[0]!r}, found {line[:100]!r}")
        ends_open = lines[at + 1 : at + 2] and lines[at + 1].startswith(b"\\")
        text = line[1:] or line
        for side in sides[line[:1]]:
            side.append(text.removesuffix(b"\n") if ends_open else text)
        at += 2 if ends_open else 1
    return hunk, at


def _path(name: bytes) -> str | None:
    """Return the path of a line of a diff, without its first folder, which is a/ or b/."""
    path = _unquoted(name.partition(b"\t")[0])
    return None if path == "/dev/null" else _checked(path.partition("/")[2])


def _unquoted(name: bytes) -> str:
    if name.startswith(b'"'):
        name = codecs.escape_decode(name.strip(b'"'))[0]  # pyright: ignore[reportAssignmentType]
    return name.decode(errors="surrogateescape")


def _checked(path: str) -> str:
    if not path or path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise BadRepository(f"expected paths a/PATH and b/PATH in a diff, found {path[:200]!r}")
    return path


def apply_diff(files: RepositoryFiles, diff: str) -> dict[str, RepositoryFile | None]:
    """Apply a unified diff exactly: lines and their context must be where it says.

    Returns:
        The changed files; None is a deleted one.

    Raises:
        BadRepository: The diff is invalid, or of other files.
    """
    changed = dict[str, RepositoryFile | None]()
    for old, new, hunks in parse_diff(diff):
        before = RepositoryFile(b"") if old is None else files.get(old)
        if before is None or before.kind == "link":
            raise BadRepository(f"expected the file {old!r} of the diff, found none")
        lines, shift = _split(before.data), 0
        for hunk in hunks:
            start = hunk.start + shift
            if lines[start : start + len(hunk.old)] != hunk.old:
                raise BadRepository(
                    f"expected the old text of the diff at line {hunk.start + 1} of {old!r}, found "
                    "another; the repository must be that of base_commit"
                )
            lines[start : start + len(hunk.old)] = hunk.new
            shift += len(hunk.new) - len(hunk.old)
        if old is not None and old != new:
            changed[old] = None
        if new is not None:
            changed[new] = before._replace(data=b"".join(lines))
    return changed


def _split(data: bytes) -> list[bytes]:
    """Return lines with their ends. Only \\n ends a line."""
    return re.findall(rb"[^\n]*\n|[^\n]+", data)
