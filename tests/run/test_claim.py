"""Claims on folders: one holder, refusals that name it, and what a dead holder leaves."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_jax.errors import ClaimLost, ConfigError
from areal_jax.run import claim as claims
from areal_jax.run import lease as leases
from areal_jax.run.claim import (
    CLAIM,
    WRITERS,
    Claim,
    FolderInUse,
    Writer,
    claimed,
    writable,
)

ROOT = Path(__file__).parents[2]


def other_process(folder: Path, code: str = "", setup: str = "") -> subprocess.Popen[str]:
    """Start a process that claims the folder, reports it, and waits for the end of its stdin."""
    source = (
        "import os, sys\nfrom pathlib import Path\nfrom areal_jax.run.claim import "
        f"claimed\n{setup}\nwith claimed(Path({str(folder)!r})) as claim:\n    {code or 'pass'}\n  "
        "  print('claimed', flush=True)\n    sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def lease_of_another(folder: Path, **changes: object) -> None:
    """Leave the lease of a process that has died elsewhere."""
    with claimed(folder):
        lease = json.loads((folder / CLAIM).read_text())
    lease |= {
        "host": "elsewhere",
        "pid": 77,
        "boot": "another",
        "token": "old",
        "since": "yesterday",
    } | changes
    (folder / CLAIM).write_text(json.dumps(lease))


def test_a_second_process_is_refused_by_name(tmp_path: Path) -> None:
    process = other_process(tmp_path)
    try:
        with pytest.raises(FolderInUse) as refused:
            Claim(tmp_path, "--run-folder")
        since = json.loads((tmp_path / CLAIM).read_text())["since"]
        said = (
            f"{tmp_path} is in use by process {process.pid} on {socket.gethostname()} (since "
            f"{since})"
        )
        assert str(refused.value).startswith(said) and "--run-folder" in str(refused.value)
        assert process.communicate(timeout=60)[0] == "" and process.returncode == 0
    finally:
        killed(process)
    with claimed(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_second_claim_in_one_process_is_refused(tmp_path: Path) -> None:
    with claimed(tmp_path), pytest.raises(FolderInUse, match=f"process {os.getpid()} "):
        Claim(tmp_path, "--folder")


def test_one_of_simultaneous_claims_is_granted(tmp_path: Path) -> None:
    source = (
        "import sys, time\nfrom pathlib import Path\nfrom areal_jax.run.claim import FolderInUse, "
        "claimed\nprint('ready', flush=True)\nsys.stdin.readline()\ntry:\n    with "
        f"claimed(Path({str(tmp_path)!r})):\n        print('granted', flush=True)\n        "
        "sys.stdin.read()\nexcept FolderInUse:\n    print('refused', flush=True)\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", source],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for _ in range(3)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = sorted(
            process.stdout.readline() for process in processes if process.stdout is not None
        )
        assert said == ["granted\n", "refused\n", "refused\n"]
    finally:
        for process in processes:
            killed(process)


def test_the_claim_of_a_killed_process_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    process = other_process(tmp_path)
    killed(process)
    assert (tmp_path / CLAIM).exists()
    with caplog.at_level(logging.WARNING), claimed(tmp_path):
        assert f"taking over from process {process.pid} on {socket.gethostname()}" in caplog.text


def test_a_forked_child_does_not_hold_its_parents_claim(tmp_path: Path) -> None:
    folder, number = tmp_path / "run", tmp_path / "child"
    # The child writes its process id after it has released the claim.
    write = f"Path({str(number)!r}).write_text(f'{{os.getpid()}} ')"
    forking = f"child = os.fork()\n    ({write}, os.read(os.pipe()[0], 1)) if child == 0 else None"
    process = other_process(folder, forking)
    deadline_s = time.monotonic() + 60
    while not (number.exists() and number.read_text().endswith(" ")):
        assert time.monotonic() < deadline_s, "the child wrote no number within 60 s"
        time.sleep(0.01)
    process.kill()
    process.wait(60)
    child = int(number.read_text())
    try:
        os.kill(child, 0)
        with claimed(folder):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate()


def test_lease_without_renewal_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims, "LEASE_S", 0.4)
    lease_of_another(tmp_path)
    with caplog.at_level(logging.WARNING), claimed(tmp_path):
        assert "taking over from process 77 on elsewhere (since yesterday)" in caplog.text


def test_a_renewed_lease_of_another_host_is_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "LEASE_S", 60.0)
    lease_of_another(tmp_path)
    renewing = threading.Timer(0.5, lease_of_another_renewed, [tmp_path])
    renewing.start()
    with pytest.raises(FolderInUse, match="process 77 on elsewhere"):
        Claim(tmp_path, "--run-folder")
    renewing.join()


def lease_of_another_renewed(folder: Path) -> None:
    lease = json.loads((folder / CLAIM).read_text())
    (folder / CLAIM).write_text(json.dumps(lease | {"beat": lease["beat"] + 1}))


def test_container_on_the_same_kernel_is_detected_by_the_lock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lease_of_another(tmp_path, boot=leases.boot_id(), pid_namespace="pid:[1]", pid=os.getpid())
    with caplog.at_level(logging.WARNING), claimed(tmp_path):
        assert "taking over from" in caplog.text and "waiting" not in caplog.text


def test_reused_process_id_is_not_the_holder(tmp_path: Path) -> None:
    here = {"boot": leases.boot_id(), "pid_namespace": leases.pid_namespace(), "pid": os.getpid()}
    lease_of_another(tmp_path, **here, process_start=1.0)
    with claimed(tmp_path):
        lease = json.loads((tmp_path / CLAIM).read_text())
    assert lease["pid"] == os.getpid() and lease["process_start"] > 1.0


def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, kind: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(leases.fcntl, "flock", refuse)
    monkeypatch.setattr(claims, "SETTLE_S", 0.2)


def test_without_locks_the_lease_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = other_process(tmp_path)
    without_locks(monkeypatch)
    with pytest.raises(FolderInUse, match=f"process {process.pid} "):
        Claim(tmp_path, "--run-folder")
    killed(process)
    with claimed(tmp_path):
        pass


def test_without_locks_one_of_two_simultaneous_claims_is_granted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_locks(monkeypatch)
    monkeypatch.setattr(
        Claim, "_require_free", lambda *_: None
    )  # both look before either has written
    with ThreadPoolExecutor(2) as pool:
        found = [
            future.exception()
            for future in [pool.submit(Claim, tmp_path, "--run-folder") for _ in range(2)]
        ]
    assert [type(error) for error in found if error is not None] == [FolderInUse]


def test_holder_exits_after_its_claim_is_taken_over(tmp_path: Path) -> None:
    process = other_process(
        tmp_path, setup="import areal_jax.run.claim as claims; claims.RENEW_S = 0.1"
    )
    path = tmp_path / CLAIM
    deadline_s = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline_s:
        path.write_text(json.dumps({"token": "another", "pid": 77, "host": "elsewhere"}))
        time.sleep(0.01)
    assert process.returncode == 1
    process.communicate()


def test_writer_of_an_earlier_holder_is_awaited_and_blocked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "WRITERS_TIMEOUT_S", 1.5)
    with claimed(tmp_path) as first:
        token = first.token
    with claimed(tmp_path) as claim, pytest.raises(ClaimLost, match="nothing is written"):
        assert claim.token != token
        Writer(tmp_path, token)
    with claimed(tmp_path) as claim:
        writer = Writer(tmp_path, claim.token)
        with pytest.raises(FolderInUse, match=rf"still write there .* process {os.getpid()}\)"):
            claim.fence()
        with pytest.raises(ClaimLost, match=f"claimed by process {os.getpid()}"):
            writer.require()
        writer.close()
        claim.fence()
        assert not (tmp_path / WRITERS).exists()


def test_waiting_for_writers_ends_with_the_last_of_them(tmp_path: Path) -> None:
    with claimed(tmp_path) as claim:
        writer = Writer(tmp_path, claim.token)
        threading.Timer(0.5, writer.close).start()
        before_s = time.monotonic()
        claim.fence()
        assert time.monotonic() - before_s > 0.4


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR])
def test_an_unwritable_folder_is_refused_by_its_setting(number: int, tmp_path: Path) -> None:
    expected = f"--folder={tmp_path}: cannot be written to ({os.strerror(number)}); give another"
    with pytest.raises(ConfigError, match=re.escape(expected)), writable(tmp_path, "--folder"):
        raise OSError(number, os.strerror(number))


def test_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"), writable(tmp_path, "--folder"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
