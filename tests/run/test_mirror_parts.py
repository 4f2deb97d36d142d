"""Closed parts of the samples in object storage: no row is lost, doubled or stored again."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_mirror import Killed, elsewhere, killed_at, save_checkpoint

from areal_jax.checkpoint.folders import saved_versions
from areal_jax.metrics.jsonl import JsonLines, is_before
from areal_jax.metrics.sample_parts import SampleParts, close_part, compress_parts, cut_parts
from areal_jax.run.mirror import Uploader
from areal_jax.storage import ObjectFolder, local_path

__all__ = ["elsewhere"]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty folder in an object store, whose objects are files here."""
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem

    store = DirFileSystem(str(tmp_path / "store"), LocalFileSystem(auto_mkdir=True))
    monkeypatch.setattr("fsspec.filesystem", lambda *_, **__: store)
    monkeypatch.setenv("AREAL_JAX_CACHE", str(tmp_path / "cache"))
    return f"gs://bucket/{secrets.token_hex(4)}"


def test_a_kill_while_parts_are_stored_keeps_every_sample(
    bucket: str, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stored = local_path(bucket), ObjectFolder(bucket)
    path = run / "samples.jsonl"

    def compress() -> None:
        close_part(path)
        for _ in compress_parts(path):
            pass

    # What the run does between two looks for changes, and the rows and checkpoint after it. At the
    # end it resumes from version 8 and writes other rows.
    stages: list[tuple[Callable[[], object], range, int | None]] = [
        (lambda: None, range(4), 4),
        (lambda: close_part(path), range(4, 6), 6),
        (lambda: [*compress_parts(path)], range(6, 8), 8),
        (compress, range(8, 10), None),
        (compress, range(10, 12), None),
        (lambda: cut_parts(path, 8), range(8, 10), 10),
    ]
    left = [1000]
    for operation in ("put_file", "pipe_file", "rm_file"):
        monkeypatch.setattr(
            stored._files, operation, killed_at(getattr(stored._files, operation), left)
        )
    for number, (change, versions, checkpoint) in enumerate(stages):
        run.mkdir(parents=True, exist_ok=True)
        change()
        rows = JsonLines(path)
        for version in versions:
            rows.append(version, {"stage": number, "text": 100 * "x"})
        rows.close()
        if checkpoint is not None:
            shutil.rmtree(run / "checkpoints", ignore_errors=True)
            save_checkpoint(run, checkpoint, num_files=1)
        is_killed, num_kills = True, 0
        while is_killed:
            left[0] = num_kills
            try:
                Uploader(run, stored).store(stores_all=True)
                is_killed = False
            except Killed:
                num_kills += 1
            left[0] = 1000
            found = elsewhere()
            (saved,) = saved_versions(found / "checkpoints") or (0,)
            assert before(found, saved) == before(run, saved), (number, num_kills)
        assert [*SampleParts(elsewhere() / path.name).read()] == [*SampleParts(path).read()]


def before(run: Path, version: int) -> list[bytes]:
    rows = SampleParts(run / "samples.jsonl").read()
    return [row for _, row in rows if is_before(row, version)]


def test_closed_parts_are_stored_once(
    bucket: str, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stored, uploaded = local_path(bucket), ObjectFolder(bucket), list[str]()
    monkeypatch.setattr(
        stored,
        "upload",
        lambda file, name: (uploaded.append(name), ObjectFolder.upload(stored, file, name)),
    )
    run.mkdir(parents=True)
    path = run / "samples.jsonl"
    uploader = Uploader(run, stored)
    for version in range(4):
        rows = JsonLines(path)
        rows.append(version, {})
        rows.close()
        if version % 2:
            close_part(path)
            uploader.store(stores_all=False)
            for _ in compress_parts(path):
                pass
        uploader.store(stores_all=False)
        # A run that resumes.
        uploader = Uploader(run, stored)
        uploader.store(stores_all=True)
    parts = [f"samples.0000{number}.jsonl.gz" for number in (0, 1)]
    assert uploaded == parts and [*stored.names()] == parts
    assert [path.name for path in sorted(elsewhere().iterdir())] == parts
