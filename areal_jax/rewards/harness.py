"""The process inside a sandbox: `python harness.py FOLDERS...`. It forks one child per job.

Standard library only, because the package is not visible inside. Standard input is a socket.
Requests: the JSON of `rlimits`, `user_id`, `is_alone` and `keeps`, with the files job, input, output,
errors and, for two jobs that communicate, a channel; during a job, any bytes end it. Processes that a
job leaves are killed, or stopped: `keeps` is nothing, running (they run during the job) or stopped. Replies: {"ready"}, then for each job
{"kernel_bytes"} whenever it changes, and {"returncode"} at its end.

No program reads or writes the memory of this process, which is not dumpable. In a sandbox of its
own it is the first process of its namespace, so that no signal from inside reaches it.

    run     a program as a script, on its input
    serve   a program whose functions are called over the channel
    test    tests that call them; only they know the expected results, and their exit code is the
            outcome

Nothing that a program reports about itself counts: for a script only its output, for a function
only its return values, and both are compared in another process. What crosses the channel is data,
and is never executed. The file has more than 400 lines because it is one script without imports
from the package.
"""

from __future__ import annotations

import builtins
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes long to load
    from typing import Any

PASSED, WRONG, CRASHED, BROKEN, LATE = 100, 101, 102, 103, 104
"""Exit codes of tests: satisfied; not satisfied; the program failed; the tests cannot be run; a
call took too long."""

MAX_FRAME_BYTES = 8 << 20
"""Longest call or result, in bytes."""

PRELUDE = """
from string import *; from re import *; from datetime import *; from collections import *; from heapq import *
from bisect import *; from copy import *; from math import *; from random import *; from statistics import *
from itertools import *; from functools import *; from operator import *; from io import *; from sys import *
from json import *; from builtins import *; from typing import *
import string, re, datetime, collections, heapq, bisect, copy, math, random, statistics, itertools, functools, operator, io, sys
import json
"""
"""Imports of LiveCodeBench's checker before a program, in its order."""

RECURSION_LIMIT = 50_000
"""Recursion limit of that checker."""

SETUP, TESTS = "setup.py", "tests.py"
"""File names of tests in tracebacks."""

PROGRAM = "program.py"
"""File name of the program in its working directory."""

WATCH_S = 0.1
"""Interval of measurements of kernel memory."""

INODE_BYTES = 1536
"""Kernel memory of a file in a tmpfs besides its contents."""

WARM = (
    "collections",
    "itertools",
    "functools",
    "heapq",
    "bisect",
    "operator",
    "copy",
    "string",
    "typing",
    "random",
)
"""Modules that are imported in advance, because most programs use them."""


def main() -> None:
    make_undumpable()
    # A first process ignores what it does not handle.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    control = socket.socket(fileno=os.dup(0))
    sys.path += sys.argv[1:]
    control.send(b'{"ready": true}\n')
    for module in WARM:
        # Stop at the first request.
        if select.select([control], [], [], 0)[0]:
            break
        __import__(module)
    # Jobs must not collect garbage of, and thereby copy, memory that they share with this process.
    gc.freeze()
    while True:
        message, files, _, _ = socket.recv_fds(control, 4096, 5)
        if not message:
            return
        limits = json.loads(message)
        if limits["is_alone"]:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        if limits["keeps"] == "running":
            signal_all_others(signal.SIGCONT)
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            signal.signal(signal.SIGINT, signal.default_int_handler)
            control.close()
            # The interpreter ends as after any script: threads joined, buffers flushed, exit
            # handlers run.
            return become(limits, files)
        for file in files:
            os.close(file)
        if limits["is_alone"]:
            status = watch(child, control)
            if (
                limits["keeps"] != "nothing"
                and count_others() <= limits["rlimits"]["RLIMIT_NPROC"] // 2
            ):
                signal_all_others(signal.SIGSTOP)
            else:
                end_all_others()
        else:
            _, status = os.waitpid(child, 0)
        control.send(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def make_undumpable() -> None:
    """Close this process's memory (/proc/PID/mem, ptrace) to other processes of its user."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_DUMPABLE = 4  # linux/prctl.h
        if ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0):
            raise OSError("prctl(PR_SET_DUMPABLE, 0) failed")


def watch(child: int, control: socket.socket) -> int:
    """Wait for the end of a job, reap its orphans, and report its kernel memory.

    Returns:
        Its wait status.
    """
    socket_bytes = 2 * control.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    reported = 0
    while True:
        signal.sigtimedwait([signal.SIGCHLD], WATCH_S)
        if select.select([control], [], [], 0)[0] and control.recv(64):
            signal_all_others(signal.SIGKILL)
        pid = child
        while pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                return status
        if (num_bytes := kernel_bytes(socket_bytes)) != reported:
            reported = num_bytes
            control.send(json.dumps({"kernel_bytes": num_bytes}).encode() + b"\n")


def kernel_bytes(socket_bytes: int) -> int:
    """Return the bytes that no process's size includes: files in tmpfs, and full buffers of all
    sockets.
    """
    num_bytes = 0
    for folder in ("/tmp", "/dev/shm"):
        found = os.statvfs(folder)
        num_bytes += (found.f_blocks - found.f_bfree) * found.f_frsize + (
            found.f_files - found.f_ffree
        ) * INODE_BYTES
    with open("/proc/net/sockstat", encoding="ascii") as lines:
        # "sockets: used N", of this network namespace.
        return num_bytes + socket_bytes * int(lines.readline().split()[2])


def signal_all_others(number: int) -> None:
    """Send a signal to all other processes. Use it only in a process namespace of its own."""
    with suppress(ProcessLookupError):  # there is none
        os.kill(-1, number)


def count_others() -> int:
    """Count the other processes of the namespace."""
    return sum(name.isdecimal() for name in os.listdir("/proc")) - 1


def end_all_others() -> None:
    """Kill all remaining processes, so that they do not disturb the next job."""
    signal_all_others(signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def become(limits: dict, files: list[int]) -> None:
    """Become the job that the first file describes, within the limits."""
    job_file, *standard = files[:4]
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    with os.fdopen(job_file, "rb") as text:
        job = json.load(text)
    for name, limit in limits["rlimits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    if (user_id := limits["user_id"]) is not None:
        os.setgroups([])
        os.setresgid(user_id, user_id, user_id)
        os.setresuid(user_id, user_id, user_id)
    # Those of the harness have buffered earlier input and output.
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.argv = [PROGRAM]
    num_cpus = max(1, min(os.cpu_count() or 1, limits["rlimits"]["RLIMIT_NPROC"] // 4))
    # Pools of processes and threads choose their size by it.
    os.cpu_count = lambda: num_cpus
    # As `site` defines them, whose import takes too long.
    builtins.exit = builtins.quit = sys.exit
    sys.setrecursionlimit(job.get("recursion_limit", sys.getrecursionlimit()))
    match job["kind"]:
        case "run":
            try:
                execute(job["program"], "__main__", job.get("prelude", ""))
            except SystemExit:
                if not job.get("ignores_exit_code"):
                    raise
        case "serve":
            serve(Wire(files[4]), execute(job["program"], "program", job["prelude"]))
        case "test":
            code = test(job, Wire(files[4]))
            sys.stderr.flush()
            # Its reader has ended.
            os._exit(code)


def execute(program: str, name: str, prelude: str = "") -> dict:
    """Run a program as a module of this name, and return its globals."""
    module = type(sys)(name)
    module.__file__ = os.path.abspath(PROGRAM)
    with open(PROGRAM, "w", encoding="utf-8", errors="replace") as file:
        file.write(program)
    sys.modules[name] = module
    exec(compile(prelude, "prelude.py", "exec"), module.__dict__)
    exec(compile(program, module.__file__, "exec"), module.__dict__)
    return module.__dict__


class Wire:
    """JSON frames, one per line."""

    def __init__(self, file: int) -> None:
        self._in, self._out = os.fdopen(os.dup(file), "rb"), os.fdopen(file, "wb")

    def send(self, frame: dict) -> None:
        line = json.dumps(frame).encode() + b"\n"
        if len(line) > MAX_FRAME_BYTES:
            raise ValueError(
                f"values of {len(line)} bytes as JSON, expected at most {MAX_FRAME_BYTES}"
            )
        self._out.write(line)
        self._out.flush()

    def receive(self) -> dict | None:
        """Return the next frame; None at the end."""
        line = self._in.readline(MAX_FRAME_BYTES + 1)
        return json.loads(line) if line.endswith(b"\n") else None


# Values. Objects other than plain data stay with the program, and are sent as {"ref": number}.


def encode(value: Any, keep=None):
    """Encode a value as JSON. Subclasses of plain types and numpy's types count as plain;
    `keep(value)` names any other object.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value) if -(2**53) < value < 2**53 else {"int": hex(value)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Remote):
        return object.__getattribute__(value, "_target")
    if isinstance(value, list):
        return [encode(each, keep) for each in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key, keep), encode(each, keep)] for key, each in value.items()]}
    if isinstance(value, tuple | set | frozenset):
        kind = next(kind for kind in (tuple, set, frozenset) if isinstance(value, kind))
        return {kind.__name__: [encode(each, keep) for each in value]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, range):
        return {"range": [value.start, value.stop, value.step]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), keep)
    if type(value).__name__ == "deque":
        return {"deque": [encode(each, keep) for each in value]}
    if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
        return {"type": value.__name__}
    if keep is None:
        raise TypeError(f"expected plain data, found {type(value).__name__}")
    return keep(value)


def decode(value: Any, find) -> Any:
    """Decode a value; `find` looks up {"ref"} and {"name"}."""
    if isinstance(value, list):
        return [decode(each, find) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "dict":
            return {decode(key, find): decode(each, find) for key, each in content}
        case "tuple" | "set" | "frozenset":
            return getattr(builtins, kind)(decode(each, find) for each in content)
        case "int":
            return int(content, 16)
        case "type" if isinstance(getattr(builtins, content), type):
            return getattr(builtins, content)
        case "bytes" | "bytearray":
            return getattr(builtins, kind).fromhex(content)
        case "complex" | "range":
            return getattr(builtins, kind)(*content)
        case "deque":
            from collections import deque

            return deque(decode(each, find) for each in content)
        case _:
            return find(value)


# The program's side.

OPERATIONS = {
    "call": lambda called, arguments, named: called(*arguments, **named),
    "getattr": getattr,
    "setattr": setattr,
    "getitem": lambda container, key: container[key],
    "len": len,
    "iter": iter,
    "next": next,
}


def serve(wire: Wire, defined: dict) -> None:
    """Execute operations from the wire until it ends. The end of this process ends the tests."""
    kept, solutions = dict[int, object](), list[object]()

    def keep(value: object) -> dict:
        kept[id(value)] = value
        return {"ref": id(value)}

    def find(target: dict) -> object:
        if "ref" in target:
            return kept[target["ref"]]
        name = target["name"]
        # Takes precedence over names of the prelude, such as `count`.
        if hasattr(defined.get("Solution"), name):
            if not solutions:
                solutions.append(defined["Solution"]())
            return getattr(solutions[0], name)
        if name not in defined:
            raise NameError(f"the program defines no {name}")
        return defined[name]

    while (frame := wire.receive()) is not None:
        try:
            arguments: list = decode(frame["arguments"], find)
            before = [encode(each, keep) for each in arguments]
            reply = {"value": encode(OPERATIONS[frame["operation"]](*arguments), keep)}
            after = [encode(each, keep) for each in arguments]
            wire.send({**reply, "changed": after if after != before else None})
        except Exception as error:  # of the untrusted program; the tests receive it
            wire.send({"error": type(error).__name__, "text": str(error)[:300]})


# The tests' side.


class ProgramFailed(Exception):
    """The program ended, or sent an invalid reply."""


class Remote:
    """Proxy of an object of the program that is not plain data. It can be called, read and
    iterated, and is equal to itself only.
    """

    __slots__ = ("_ask", "_target")

    def __init__(self, ask, target: dict) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_target", target)

    def __call__(self, *arguments, **named):
        return self._ask("call", self, arguments, named)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._ask("setattr", self, name, value)

    def __getitem__(self, key):
        return self._ask("getitem", self, key)

    def __len__(self):
        return self._ask("len", self)

    def __bool__(self):
        return True

    def __iter__(self):
        iterator = self._ask("iter", self)
        while True:
            try:
                yield self._ask("next", iterator)
            except StopIteration:
                return

    def __next__(self):
        return self._ask("next", self)


class Asking:
    """Execute one operation in the program: returns its result, applies its changes to the
    arguments, or raises its exception.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.num_asked = 0
        self._remotes = dict[int, Remote]()
        self.failures = list[BaseException]()
        """Exceptions of the program and of the wire."""

    def __call__(self, operation: str, *arguments):
        self.num_asked += 1
        try:
            self._wire.send({"operation": operation, "arguments": encode(list(arguments))})
            frame = self._wire.receive()
            if frame is None:
                raise ProgramFailed("the program ended")
            if "error" not in frame:
                value, changed = decode(frame["value"], self._find), frame["changed"]
                if changed is not None:
                    take_over(list(arguments), decode(changed, self._find))
                return value
            kind = getattr(builtins, frame["error"], None)
            # Raised here, an end of iteration would end that of the tests: `all(map(f, ...))` would
            # be true.
            is_end = kind in (StopIteration, StopAsyncIteration) and operation != "next"
            if isinstance(kind, type) and issubclass(kind, Exception) and not is_end:
                failure = kind(frame["text"])
            else:
                failure = ProgramFailed(f"{frame['error']}: {frame['text']}")
        except BrokenPipeError:
            failure = ProgramFailed("the program ended")
        except ProgramFailed as error:
            failure = error
        except Exception as error:  # of an untrusted reply; it counts as the program's failure
            failure = ProgramFailed(f"{type(error).__name__}: {error}"[:300])
        self.failures.append(failure)
        raise failure

    def _find(self, target: dict) -> Remote:
        number = target["ref"]
        return self._remotes.setdefault(number, Remote(self, {"ref": number}))


def take_over(old, new) -> None:
    """Update containers in place with the contents of their changed copies."""
    if type(old) is not type(new):
        return
    if isinstance(old, list | tuple) and len(old) == len(new):
        for each, other in zip(old, new, strict=True):
            take_over(each, other)
    if isinstance(old, list) and old != new:
        old[:] = new
    elif isinstance(old, dict | set) and old != new:
        old.clear()
        old.update(new)


def test(job: dict, wire: Wire) -> int:
    """Run the tests, and return the exit code."""
    asking = Asking(wire)
    names = {name: Remote(asking, {"name": name}) for name in job["names"]}
    tests = {"__name__": "tests"}
    try:
        if "cases" in job:
            (called,) = names.values()
            signal.signal(signal.SIGALRM, end_late)
            for arguments, expected in job["cases"]:
                signal.setitimer(signal.ITIMER_REAL, job["timeout_s"])
                found = called(*arguments)
                signal.setitimer(signal.ITIMER_REAL, 0.0)
                if not (equal_exactly if job["is_exact"] else equal)(found, expected):
                    raise AssertionError(f"expected {short(expected)}, found {short(found)}")
        else:
            exec(compile(job["setup"], SETUP, "exec"), tests)
            tests.update(names)
            exec(compile(job["tests"], TESTS, "exec"), tests)
    except BaseException as error:  # of untrusted tests and program; the exit code is the grade
        print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
        if error in asking.failures:
            return CRASHED
        return BROKEN if not asking.num_asked or is_tests_fault(error, job) else WRONG
    # Exceptions that tests caught do not count, unless the program ended.
    failed = next(
        (failure for failure in asking.failures if isinstance(failure, ProgramFailed)), None
    )
    if failed is not None:
        print(failed, file=sys.stderr)
        return CRASHED
    return PASSED


def end_late(*_: object) -> None:
    print("a call took too long", file=sys.stderr, flush=True)
    os._exit(LATE)


def is_tests_fault(error: BaseException, job: dict) -> bool:
    """Whether tests failed of their own.

    They do not compile, import what is not there, or use a name that nothing in them defines. A
    name that is defined and has no value is missing because of what the program returned.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_code if trace is not None else None
    if isinstance(error, SyntaxError) and where is test.__code__:
        return True
    if where is None or where.co_filename not in (SETUP, TESTS):
        return False
    if isinstance(error, ImportError):
        return True
    if (
        not isinstance(error, NameError)
        or isinstance(error, UnboundLocalError)
        or error.name is None
    ):
        return False
    return error.name not in names_bound(job["setup"], job["tests"])


def names_bound(*sources: str) -> set:
    """Names that code gives values to, anywhere in it."""
    import symtable

    found, scopes = set(), [symtable.symtable(source, TESTS, "exec") for source in sources]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        found |= {
            symbol.get_name()
            for symbol in scope.get_symbols()
            if symbol.is_assigned() or symbol.is_imported()
        }
    return found


def equal_exactly(found, expected) -> bool:
    """Whether a result is what was expected, as LiveCodeBench compares them: a tuple is taken for a
    list.
    """
    return (list(found) if isinstance(found, tuple) else found) == expected


def equal(found, expected) -> bool:
    """Whether a result is what was expected: tuples as lists, floats within 1e-5, as LeetCode
    compares them.
    """
    if isinstance(found, list | tuple) and isinstance(expected, list):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(found, float | int) and isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-5, abs_tol=1e-5)
    return type(found) is not Remote and found == expected


def short(value) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


if __name__ == "__main__":
    main()
