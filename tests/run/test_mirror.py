"""Run folders in object storage: what is stored at any instant can be resumed from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from object_stores import SECRET
from run_laws import broken_laws
from test_crash import GROUPS, SAMPLES, SMALL, STEPS, finished

from areal_jax import storage
from areal_jax.checkpoint.checksums import verify, write_checksums
from areal_jax.checkpoint.folders import newest_whole, saved_versions
from areal_jax.cli.report import main as report
from areal_jax.config.policy_names import named_policy
from areal_jax.errors import NotSaved
from areal_jax.metrics.jsonl import JsonLines, cut, read
from areal_jax.run import mirror
from areal_jax.run.claim import FolderInUse
from areal_jax.run.mirror import Uploader, mirrored
from areal_jax.storage import (
    LEASE,
    ObjectFolder,
    StorageError,
    fetch_objects,
    local_path,
)


class Killed(BaseException):
    pass


def killed_at(operation: Callable[..., object], left: list[int]) -> Callable[..., object]:
    """The operation, which is killed once none of all operations are left."""

    def run(*arguments: object, **named: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return operation(*arguments, **named)

    return run


def save_checkpoint(run: Path, version: int, num_files: int = 3) -> None:
    folder = run / "checkpoints" / str(version)
    (folder / "d").mkdir(parents=True)
    for number in range(num_files):
        (folder / "d" / f"{version}-{number}").write_text(f"weights {version} {number}")
    write_checksums(folder)


def append_rows(run: Path, *versions: int) -> None:
    run.mkdir(parents=True, exist_ok=True)
    rows = JsonLines(run / "metrics.jsonl")
    for version in versions:
        rows.append(version, {"loss": 1.0})
    rows.close()


@pytest.fixture
def elsewhere(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Path]:
    """Fetch the run on another machine: into another cache."""
    number = iter(range(1000))

    def fetch() -> Path:
        with monkeypatch.context() as machine:
            machine.setenv("AREAL_JAX_CACHE", str(tmp_path / f"machine {next(number)}"))
            return fetch_objects(bucket, newest_whole)

    return fetch


def test_a_half_uploaded_checkpoint_is_never_chosen() -> None:
    whole = ["checkpoints/2/d/a", "checkpoints/2/files.json", "metrics.jsonl/000000"]
    half = ["checkpoints/10/d/a", "checkpoints/10/_METADATA"]
    assert newest_whole([*whole, *half]) == set(whole)
    assert newest_whole(half) == set()
    assert newest_whole([*whole, "checkpoints/2.1/files.json"]) == {
        *whole[2:],
        "checkpoints/2.1/files.json",
    }
    assert newest_whole([*whole, *half, "checkpoints/10/files.json"], version=2) == set(whole)


def test_the_end_of_a_run_is_stored(
    bucket: str, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "SETTLE_S", 0.0)
    run = local_path(bucket)
    with mirrored(run):
        append_rows(run, 0, 1)
        save_checkpoint(run, 2)
        (run / "claim.json").write_text("{}")
        (run / "config.json.writing").write_text("{")
        (run / "tensorboard").mkdir()
        (run / "tensorboard" / "events").write_bytes(b"event")
    found = elsewhere()
    assert {path.relative_to(found).as_posix() for path in found.rglob("*") if path.is_file()} == {
        "metrics.jsonl",
        "tensorboard/events",
        "checkpoints/2/files.json",
        *(f"checkpoints/2/d/2-{number}" for number in range(3)),
    }
    assert verify(found / "checkpoints" / "2")
    assert LEASE not in ObjectFolder(bucket).names()


def test_a_kill_at_any_operation_leaves_a_whole_checkpoint(
    bucket: str, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a stored checkpoint are stored before it, and it is stored before older ones go."""

    left = [0]
    run, stored = local_path(bucket), ObjectFolder(bucket)
    append_rows(run, 0, 1)
    save_checkpoint(run, 2)
    Uploader(run, stored).store(stores_all=True)
    append_rows(run, 2, 3)
    save_checkpoint(run, 4)
    shutil.rmtree(run / "checkpoints" / "2")
    monkeypatch.setattr(mirror, "NUM_THREADS", 1)
    files, versions = stored._files, []
    for operation in ("put_file", "pipe_file", "rm_file"):
        monkeypatch.setattr(files, operation, killed_at(getattr(files, operation), left))
    for number in range(100):
        left[0] = number
        with suppress(Killed):
            Uploader(run, stored).store(stores_all=True)
        left[0] = 1000
        found = elsewhere()
        (version,) = saved_versions(found / "checkpoints")
        assert verify(found / "checkpoints" / str(version))
        rows = {row["version"] for row in read(found / "metrics.jsonl")}
        assert rows >= set(range(version)), (number, version, rows)
        versions.append(version)
        if not any("/2/" in name for name in stored.names()):
            break
    assert versions == sorted(versions) and {*versions} == {2, 4}


def test_rows_are_stored_in_parts_and_cut(
    bucket: str, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "PART_BYTES", 100)
    run, stored, written = local_path(bucket), ObjectFolder(bucket), []
    monkeypatch.setattr(
        stored,
        "write",
        lambda name, data: (written.append(name), ObjectFolder.write(stored, name, data)),
    )
    uploader = Uploader(run, stored)
    append_rows(run, *range(20))
    uploader.store(stores_all=False)
    assert len(written) == len(stored.names()) > 3
    last, _ = written[-1], written.clear()
    append_rows(run, 20)
    uploader.store(stores_all=False)
    assert written[0] == last and len(written) <= 2
    assert (elsewhere() / "metrics.jsonl").read_bytes() == (run / "metrics.jsonl").read_bytes()
    cut(run / "metrics.jsonl", 3)
    Uploader(run, stored).store(stores_all=False)
    assert [row["version"] for row in read(elsewhere() / "metrics.jsonl")] == [0, 1, 2]


def test_growing_files_are_stored_at_a_bounded_rate(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, stored = local_path(bucket), ObjectFolder(bucket)
    run.mkdir(parents=True)
    uploader = Uploader(run, stored)
    for size in (1, 2, 3):
        (run / "events").write_bytes(size * b"x")
        monkeypatch.setattr(mirror, "BYTES_PER_S", 1e6 if size < 3 else 1e-6)
        uploader.store(stores_all=False)
    assert stored.read("events") == b"xx"
    uploader.store(stores_all=True)
    assert stored.read("events") == b"xxx"


def test_one_process_at_a_time_stores_a_run(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "SETTLE_S", 0.0)
    monkeypatch.setattr(mirror, "LEASE_S", 0.3)
    with mirrored(local_path(bucket)):
        monkeypatch.setenv("AREAL_JAX_CACHE", str(tmp_path / "another machine"))
        refused = f"{bucket} is in use by process {os.getpid()} on"
        with pytest.raises(FolderInUse, match=refused), mirrored(local_path(bucket)):
            pass
    stored = ObjectFolder(bucket)
    lease = {"boot": "another", "token": "another", "pid": 1, "host": "another"}
    stored.write(LEASE, json.dumps(lease).encode())
    with mirrored(local_path(bucket)):  # not renewed: its holder has died
        assert stored.read(LEASE) != json.dumps(lease).encode()


def test_a_copy_that_could_not_be_stored_is_resumed_from(
    bucket: str, elsewhere: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "SETTLE_S", 0.0)
    run, upload = local_path(bucket), ObjectFolder.upload
    with mirrored(run):
        save_checkpoint(run, 2)

    def fail(*_: object) -> None:
        raise StorageError("no network")

    message = f"no network.*--resume={bucket} on this machine"
    with pytest.raises(NotSaved, match=message), mirrored(run):
        save_checkpoint(run, 4)
        monkeypatch.setattr(ObjectFolder, "upload", fail)
    monkeypatch.setattr(ObjectFolder, "upload", upload)
    assert saved_versions(elsewhere() / "checkpoints") == [2]
    with mirrored(fetch_objects(bucket, newest_whole)):
        assert saved_versions(run / "checkpoints") == [2, 4]
    assert saved_versions(elsewhere() / "checkpoints") == [4]


def test_what_another_machine_stored_replaces_the_copy(
    bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mirror, "SETTLE_S", 0.0)
    run = local_path(bucket)
    with mirrored(run):
        save_checkpoint(run, 2)
    save_checkpoint(run, 8)  # never stored
    with monkeypatch.context() as machine:
        machine.setenv("AREAL_JAX_CACHE", str(tmp_path / "another machine"))
        with mirrored(local_path(bucket)):
            save_checkpoint(local_path(bucket), 4)
    assert saved_versions(fetch_objects(bucket, newest_whole) / "checkpoints") == [4]


HANGS_BEFORE_IT_IS_WHOLE = """
import sys, threading
from areal_jax.storage import ObjectFolder
upload = ObjectFolder.upload
def hang(self, file, name):
    if name == "checkpoints/6/files.json":
        print("in mid-upload", file=sys.stderr, flush=True)
        threading.Event().wait(600)
    upload(self, file, name)
ObjectFolder.upload = hang
from areal_jax.train import main
sys.exit(main())
"""


@pytest.mark.slow
def test_a_run_killed_in_mid_upload_resumes_from_the_last_whole(
    bucket: str,
    tmp_path: Path,
    of_a_command: dict[str, str],
    elsewhere: Callable[[], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches = [tmp_path / name for name in ("first", "second")]
    environment = {**of_a_command, **os.environ}
    environment |= {name: of_a_command[name] for name in ("PYTHONPATH", "XLA_FLAGS")}
    process = subprocess.Popen(
        [
            *(sys.executable, "-c", HANGS_BEFORE_IT_IS_WHOLE, "--exp=aime"),
            *(f"--run-folder={bucket}", *SMALL, "checkpoint.keep=9"),
        ],
        cwd=tmp_path,
        env=environment | {"AREAL_JAX_CACHE": str(caches[0])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout is not None
    output = ""
    while "in mid-upload" not in output:
        output += process.stdout.readline() or pytest.fail(output)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    names = ObjectFolder(bucket).names()
    assert any(name.startswith("checkpoints/6/") for name in names)
    assert "checkpoints/6/files.json" not in names
    whole = elsewhere() / "checkpoints"
    assert saved_versions(whole) == [4]
    monkeypatch.setenv("AREAL_JAX_CACHE", str(caches[0]))
    assert contents(whole / "4") == contents(local_path(bucket) / "checkpoints" / "4")

    resumed = subprocess.Popen(
        [sys.executable, "-m", "areal_jax.train", f"--resume={bucket}"],
        cwd=tmp_path,
        env=environment | {"AREAL_JAX_CACHE": str(caches[1])},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output += finished(resumed)
    assert "resuming from the checkpoint of version 4" in output
    assert f"run folder: {bucket}\n" in output and f"checkpoint={bucket}\n" in output

    monkeypatch.setenv("AREAL_JAX_CACHE", str(tmp_path / "third"))
    assert report([bucket]) == 0
    run = fetch_objects(bucket, newest_whole)
    found = {"num_steps": STEPS, "groups": GROUPS, "samples": SAMPLES, "max_staleness": 2}
    assert broken_laws(run, **found) == []
    named = named_policy(bucket, "checkpoint").checkpoint
    assert named is not None and named.folder == run
    assert verify(run / "checkpoints" / str(STEPS))
    shown_texts = [output.encode(), *contents(run).values()]
    assert not any(SECRET.encode() in text for text in shown_texts)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
