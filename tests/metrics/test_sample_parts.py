"""Closed parts and samples.jsonl together are the file that samples.jsonl would be."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from areal_jax.metrics import sample_parts, samples
from areal_jax.metrics.jsonl import cut
from areal_jax.metrics.sample_parts import (
    DamagedSamples,
    SampleParts,
    close_part,
    closed_parts,
    compress_parts,
    cut_parts,
)
from areal_jax.metrics.samples import SampleWriter
from tests.metrics.test_sinks import a_sample

VERSIONS = 12


class Killed(BaseException):
    pass


def write(folder: Path, part_bytes: int, versions: range = range(VERSIONS)) -> Path:
    """Write three samples of each version, one batch at a time."""
    folder.mkdir(exist_ok=True)
    path = folder / "samples.jsonl"
    writer = SampleWriter(path, part_bytes=part_bytes)
    for version in versions:
        for number in range(3):
            writer.write(version, [replace(a_sample(number), group=version)])
    writer.close()
    return path


def read(path: Path) -> bytes:
    found = list(SampleParts(path).read())
    assert [place for place, _ in found] == [
        sum(len(line) for _, line in found[:number]) for number in range(len(found))
    ]
    return b"".join(line for _, line in found)


@pytest.fixture
def whole(tmp_path: Path) -> bytes:
    return write(tmp_path / "whole", 2**20).read_bytes()


@pytest.fixture(autouse=True)
def small_members(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_parts, "MEMBER_BYTES", 500)


@pytest.fixture
def part_bytes(whole: bytes) -> int:
    """Two versions and a half, so that a part has three."""
    return len(whole) * 5 // (2 * VERSIONS)


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Raise at one of the next changes of the disk; -1: at none."""
    left = [-1]

    def killed(operation: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object, **named: object) -> object:
            left[0] -= 1
            if left[0] == -1:
                raise Killed
            return operation(*arguments, **named)

        return run

    monkeypatch.setattr(os, "fsync", killed(os.fsync))
    monkeypatch.setattr(sample_parts.zlib, "compress", killed(sample_parts.zlib.compress))
    for name in ("rename", "replace", "unlink"):
        monkeypatch.setattr(Path, name, killed(getattr(Path, name)))

    def kill(number: int) -> None:
        left[0] = number

    return kill


def test_parts_together_equal_the_file_without_parts(
    tmp_path: Path, whole: bytes, part_bytes: int
) -> None:
    path = write(tmp_path / "run", part_bytes)
    assert [each.name for each in closed_parts(path)] == [
        f"samples.0000{number}.jsonl.gz" for number in range(3)
    ]
    # The current part is closed only before the next version.
    assert len(list(path.parent.iterdir())) == 4 and path.stat().st_size > part_bytes
    assert read(path) == whole
    files = [*closed_parts(path), path]
    assert subprocess.run(["zcat", "-f", *files], stdout=subprocess.PIPE).stdout == whole
    versions = [[row["version"] for row in map(json.loads, rows(part))] for part in files]
    assert versions == [[at for at in range(n, n + 3) for _ in range(3)] for n in (0, 3, 6, 9)]


def rows(part: Path) -> list[bytes]:
    data = part.read_bytes()
    return (gzip.decompress(data) if part.suffix == ".gz" else data).splitlines()


def test_one_part_at_a_time_is_not_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_plain = list[int]()

    def close_and_count(path: Path) -> None:
        close_part(path)
        num_plain.append(len(list(path.parent.glob("samples.0*.jsonl"))))

    monkeypatch.setattr(samples, "close_part", close_and_count)
    write(tmp_path / "run", 1)
    assert num_plain == [1] * (VERSIONS - 1)


def test_a_kill_while_a_part_is_closed_loses_and_doubles_nothing(
    tmp_path: Path, whole: bytes, part_bytes: int, kill_at: Callable[[int], None]
) -> None:
    longer = write(tmp_path / "longer", 2**20, range(VERSIONS + 2))
    num_kills = 0
    while True:
        path = write(tmp_path / str(num_kills), part_bytes)
        kill_at(num_kills)
        with suppress(Killed):
            close_part(path)
            for _ in compress_parts(path):
                pass
            break
        kill_at(-1)
        num_kills += 1
        assert read(path) == whole
        # The next process closes a part too.
        write(path.parent, 1, range(VERSIONS, VERSIONS + 2))
        assert read(path) == longer.read_bytes()
        assert [*path.parent.glob("*.jsonl")] == [path] and not [*path.parent.glob("*.writing")]
    # Rename, at least three members, sync, rename, delete.
    assert num_kills > 6


def test_cut_at_any_version_equals_the_cut_of_one_file(
    tmp_path: Path, whole: bytes, part_bytes: int
) -> None:
    for version in range(VERSIONS + 1):
        path = write(tmp_path / str(version), part_bytes)
        path.write_bytes(path.read_bytes() + b'{"version":12,"torn')
        cut_parts(path, version)
        one = tmp_path / "one.jsonl"
        one.write_bytes(whole)
        cut(one, version)
        assert read(path) == one.read_bytes()
        write(path.parent, part_bytes, range(version, VERSIONS))
        assert read(path) == whole


def test_a_killed_cut_is_finished_by_the_next(
    tmp_path: Path, whole: bytes, part_bytes: int, kill_at: Callable[[int], None]
) -> None:
    one = tmp_path / "one.jsonl"
    one.write_bytes(whole)
    cut(one, 4)
    num_kills = 0
    while True:
        path = write(tmp_path / str(num_kills), part_bytes)
        kill_at(num_kills)
        with suppress(Killed):
            cut_parts(path, 4)
            break
        kill_at(-1)
        num_kills += 1
        # Rows that are kept are always there.
        assert read(path).startswith(one.read_bytes())
        cut_parts(path, 4)
        assert read(path) == one.read_bytes()
    # Samples.jsonl is synced and replaced, a part deleted, and one written, synced and replaced.
    assert num_kills > 5


def test_positions_stay_valid_while_parts_are_closed(
    tmp_path: Path, whole: bytes, part_bytes: int
) -> None:
    path = write(tmp_path / "run", 2**20, range(2))
    parts, places = SampleParts(path), dict[int, bytes]()

    def update() -> None:
        assert not parts.is_replaced()
        places.update(parts.read())
        for place, row in places.items():
            assert parts.rows(place, len(row)) == [row]

    update()
    for version in range(2, VERSIONS):
        write(path.parent, 2**20, range(version, version + 1))
        if version % 2:
            close_part(path)
            update()
            for _ in compress_parts(path):
                update()
        update()
    assert b"".join(places.values()) == whole == read(path)
    cut_parts(path, 3)
    assert parts.is_replaced()
    assert b"".join(row for _, row in parts.read()) == read(path)


def test_a_part_that_is_closed_while_it_is_opened_is_the_same(
    tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, find = write(tmp_path / "run", 2**20), sample_parts._find_closed
    changes: list[Callable[[], object]] = [
        lambda: list(compress_parts(path)),
        lambda: [close_part(path), path.write_bytes(b'{"version":12}\n')],
    ]

    def find_before_a_change(path: Path, number: int) -> Path | None:
        found = find(path, number)
        with monkeypatch.context() as unchanged:
            unchanged.setattr(sample_parts, "_find_closed", find)
            if is_due.pop(0):
                changes.pop()()
        return found

    monkeypatch.setattr(sample_parts, "_find_closed", find_before_a_change)
    for _ in range(2):
        is_due = [True, *[False] * 9]
        with sample_parts.open_part(path, 0) as file:
            assert b"".join(sample_parts._lines(file, 0)) == whole
    assert not changes and find(path, 0) == closed_parts(path)[0]


def test_a_row_is_read_without_the_rest_of_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()

    class Counted(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            data = super().read(size) or b""
            sizes.append(len(data))
            return data

    path = write(tmp_path / "run", 2**20, range(200))
    close_part(path)
    num_members = sum(1 for _ in compress_parts(path))
    parts = SampleParts(path)
    places = list(parts.read())
    (part,) = closed_parts(path)
    monkeypatch.setattr(sample_parts, "open_part", lambda path, number: Counted(str(part)))
    for place, row in places[::50]:
        sizes.clear()
        assert parts.rows(place, len(row)) == [row]
        # Headers of 24 bytes, and the rest of one member.
        assert len(sizes) <= num_members + 1 and len([n for n in sizes if n > 24]) == 1


def test_damaged_parts_are_named(tmp_path: Path, part_bytes: int) -> None:
    path = write(tmp_path / "run", part_bytes)
    first, *_ = closed_parts(path)
    data = first.read_bytes()
    restore = r"restore it from a copy, or move all parts \(samples\*.jsonl\*\) away"
    for damaged, expected in (
        (data[:-9], f"expected {len(data)} bytes or more, found {len(data) - 9}; {restore}"),
        (data[:12], "expected at byte 0 a gzip member that has its sizes"),
        (data[:40] + b"x" + data[41:], f"expected a gzip member at byte 0, found .*; {restore}"),
        (gzip.compress(gzip.decompress(data)), "decompress this part with gunzip"),
    ):
        first.write_bytes(damaged)
        with pytest.raises(DamagedSamples, match=f"{first}: .*{expected}"):
            read(path)
    subprocess.run(["gunzip", first], check=True)
    assert read(path).startswith(gzip.decompress(data))
    first.with_suffix("").unlink()
    message = "expected samples.00000.jsonl.gz before samples.00002.jsonl.gz, found none; restore"
    with pytest.raises(DamagedSamples, match=message):
        read(path)


def test_an_error_while_a_part_is_closed_reaches_the_run(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(sample_parts.zlib, "compress", fail)
        with pytest.raises(OSError, match=r"No space left on device.*samples.00000.jsonl.gz"):
            write(tmp_path / "run", part_bytes)
    assert read(tmp_path / "run" / "samples.jsonl")
