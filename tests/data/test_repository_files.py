"""Repositories from archives and folders, and diffs, compared with git's own."""

from __future__ import annotations

import base64
import gzip
import io
import os
import random
import stat
import subprocess
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_jax.data import repository_files
from areal_jax.data.repository_files import (
    BadRepository,
    RepositoryFile,
    apply_diff,
    pack_files,
    parse_diff,
    read_repository,
)

FILES = {
    "a.py": RepositoryFile(b"x = 1\n"),
    "d/run": RepositoryFile(b"#!/bin/sh\n", "program"),
    "d/link": RepositoryFile(b"../a.py", "link"),
}


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for member, data in members:
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.type, found.linkname = kind, target
    return found


@pytest.mark.parametrize("form", ["tar.gz", "tar", "zip", "folder", "data", "in a folder"])
def test_every_form_has_the_same_files(tmp_path: Path, form: str):
    packed = pack_files(FILES)
    path = tmp_path / "r"
    match form:
        case "tar.gz":
            path.write_bytes(packed)
        case "tar":
            path.write_bytes(gzip.decompress(packed))
        case "folder" | "zip" | "in a folder":
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extraction_filter = getattr(tarfile, "data_filter", None)
                archive.extractall(path)
            (path / ".git").mkdir()
            (path / ".git" / "packed").write_text("the solution")
            (path / "__pycache__").mkdir()
            (path / "__pycache__" / "a.pyc").write_text("")
        case _:
            pass
    where = "data:" + base64.b64encode(packed).decode() if form == "data" else str(path)
    if form == "zip":
        with zipfile.ZipFile(tmp_path / "z", "w") as zipped:
            for name, file in FILES.items():
                info = zipfile.ZipInfo(name)
                kinds = {"file": stat.S_IFREG | 0o644, "program": stat.S_IFREG | 0o755}
                info.external_attr = kinds.get(file.kind, stat.S_IFLNK | 0o777) << 16
                zipped.writestr(info, file.data)
        where = str(tmp_path / "z")
    if form == "in a folder":
        with tarfile.open(tmp_path / "t", "w") as archive:
            archive.add(path, "project-1.0")
        where = str(tmp_path / "t")
    assert read_repository(where) == FILES
    assert pack_files(read_repository(where)) == packed


@pytest.mark.parametrize(
    ("name", "kind", "target", "words"),
    [
        ("../x", tarfile.REGTYPE, "", "paths inside of it, found '../x'"),
        ("/etc/x", tarfile.REGTYPE, "", "paths inside of it, found '/etc/x'"),
        ("a/../../x", tarfile.REGTYPE, "", "paths inside of it"),
        ("a", tarfile.SYMTYPE, "/etc/passwd", "links inside of it, found 'a'"),
        ("a/b", tarfile.SYMTYPE, "../../x", "links inside of it"),
        ("a", tarfile.LNKTYPE, "b", "'a', which is a hard link, a pipe or a device"),
        ("a", tarfile.CHRTYPE, "", "a device"),
        ("a", tarfile.FIFOTYPE, "", "a pipe"),
        ("link/x", tarfile.REGTYPE, "", "expected a folder at 'link'"),
    ],
)
def test_members_that_lead_outside_are_refused(
    tmp_path: Path, name: str, kind: bytes, target: str, words: str
):
    link = member("link", tarfile.SYMTYPE, "d"), b""
    path = write_tar(tmp_path / "r.tar", link, (member(name, kind, target), b""))
    with pytest.raises(BadRepository, match=words):
        read_repository(str(path))


def bomb_of_zeros(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        head = member("zeros")
        head.size = 8 << 20
        file.write(head.tobuf() + bytes(8 << 20))


def bomb_of_a_name(path: Path) -> None:
    # A header whose name alone is larger than a repository may be.
    with gzip.open(path, "wb", compresslevel=1) as file:
        head = member("././@LongLink", tarfile.GNUTYPE_LONGNAME)
        head.size = 8 << 20
        file.write(head.tobuf() + b"a" * (8 << 20))


def bomb_of_files(path: Path) -> None:
    write_tar(path, *((member(f"f{n}"), b"") for n in range(40)))


def zip_bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(8 << 20))


@pytest.mark.parametrize(
    "bomb", [bomb_of_zeros, bomb_of_a_name, bomb_of_files, zip_bomb], ids=lambda each: each.__name__
)
def test_sizes_and_counts_are_limited_before_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bomb: Callable[[Path], None]
):
    monkeypatch.setattr(repository_files, "MAX_BYTES", 1 << 20)
    monkeypatch.setattr(repository_files, "MAX_FILES", 32)
    bomb(tmp_path / "r")
    with pytest.raises(BadRepository, match="more"):
        read_repository(str(tmp_path / "r"))


@pytest.mark.parametrize("content", [b"", b"text", b"PK\3\4", b"\x1f\x8b\x08", os.urandom(999)])
def test_other_files_are_named(tmp_path: Path, content: bytes):
    (tmp_path / "r.zip").write_bytes(content)
    with pytest.raises(BadRepository, match=r"r\.zip: expected a \.tar"):
        assert read_repository(str(tmp_path / "r.zip"))


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return done.stdout.decode(errors="surrogateescape")


def scramble(folder: Path, rng: random.Random) -> None:
    """Edit, add, rename and delete files."""
    for path in sorted(each for each in folder.rglob("*.t")):
        match rng.randrange(6):
            case 0:
                path.unlink()
            case 1:
                path.rename(path.with_name(f"n{rng.randrange(10**6)} é.t"))
            case 2:
                path.write_bytes(b"")
            case 3:
                pass
            case _:
                lines = path.read_bytes().split(b"\n")
                for _ in range(rng.randint(1, 4)):
                    at = rng.randint(0, len(lines))
                    lines[at : at + rng.randrange(3)] = [
                        b"new %d" % rng.randrange(99)
                    ] * rng.randrange(3)
                path.write_bytes(b"\n".join(lines))
    for _ in range(rng.randrange(3)):
        words = [b"", b"+++ x", b"--- a/y", b"z\r", b"\xff\x0c", b"@@ -1 +1 @@"]
        path = folder / f"d{rng.randrange(3)}" / f"{rng.randrange(10**6)}.t"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"\n".join(rng.choices(words, k=rng.randrange(30))))


@pytest.mark.slow
def test_diffs_of_git_give_the_files_that_git_has(tmp_path: Path):
    rng = random.Random(0)
    git(tmp_path, "init", "-q")
    git(tmp_path, "config", "core.autocrlf", "false")
    num_changed = 0
    for _ in range(30):
        scramble(tmp_path, rng)
        before = read_repository(str(tmp_path))
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "--allow-empty", "-m", "1")
        scramble(tmp_path, rng)
        git(tmp_path, "add", "-A")
        context = f"-U{rng.choice((0, 1, 3))}"
        changed = apply_diff(before, git(tmp_path, "diff", "--cached", "--text", "-M", context))
        after = {path: file for path, file in {**before, **changed}.items() if file is not None}
        assert after == read_repository(str(tmp_path))
        num_changed += len(changed)
    assert num_changed > 50


@pytest.mark.parametrize(
    ("diff", "words"),
    [
        ("no diff", "expected a unified diff"),
        ("--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n", r"paths a/PATH and b/PATH .* '../x'"),
        ("--- a//x\n+++ b//x\n@@ -1 +1 @@\n-a\n+b\n", "paths a/PATH and b/PATH"),
        ("diff --git a/x b/x\nGIT binary patch\nliteral 1\n", "a diff of texts"),
        ("--- a/a.py\n+++ b/a.py\n@@ -1,2 +1 @@\n-x = 1\n", "lines of the hunk"),
        ("--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-y = 1\n+y\n", "at line 1 of 'a.py', found another"),
        ("--- a/b.py\n+++ b/b.py\n@@ -1 +1 @@\n-y = 1\n+y\n", "expected the file 'b.py'"),
    ],
)
def test_diffs_of_other_files_are_refused(diff: str, words: str):
    with pytest.raises(BadRepository, match=words):
        apply_diff(FILES, diff)
    assert parse_diff("") == []
