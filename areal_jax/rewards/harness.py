"""What runs inside the sandbox: `python harness.py FOLDERS...`, a process that forks one child for each job it is given.

Standard library only: the package is not to be seen from inside. On standard input is a socket. In: the JSON of `rlimits`,
`user_id` and `is_alone`, with the files job, input, output, errors and, for two jobs that talk to each other, a channel. Out:
{"ready"}, then {"returncode"} for each job.

    run     a program as a script, on its input
    serve   a program whose functions are called over the channel
    test    tests that call them; alone in knowing what is expected. It says how they went by its exit code

Nothing that a program under test says is believed: of a script only the output counts, of a function only what it returns, and
both are compared in another process. What crosses the channel is data, and stays data.
"""

from __future__ import annotations

import builtins
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

PASSED, WRONG, CRASHED, BROKEN = 100, 101, 102, 103
"""Exit codes of tests: satisfied; not satisfied; the program failed; the tests themselves cannot be run."""

MAX_FRAME_BYTES = 8 << 20
"""No call and no result may be longer."""

PRELUDE = """
import bisect, collections, copy, functools, heapq, itertools, math, operator, random, re, string, sys
from typing import *; from collections import *; from itertools import *; from functools import *
from heapq import *; from bisect import *; from math import *; from builtins import *
"""
"""What LeetCode's and LiveCodeBench's solutions find imported."""


WARM = ("collections", "itertools", "functools", "heapq", "bisect", "operator", "copy", "string", "typing", "random")
"""Imported ahead of use: programs need them more often than not."""


def main() -> None:
    control = socket.socket(fileno=os.dup(0))
    sys.path += sys.argv[1:]
    control.send(b'{"ready": true}\n')
    for module in WARM:
        # Until there is work.
        if select.select([control], [], [], 0)[0]:
            break
        __import__(module)
    while True:
        message, files, _, _ = socket.recv_fds(control, 4096, 5)
        if not message:
            return
        limits = json.loads(message)
        child = os.fork()
        if child == 0:
            control.close()
            # The interpreter ends as after any script: threads joined, buffers flushed, exit handlers run.
            return become(limits, files)
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        if limits["is_alone"]:
            end_all_others()
        control.send(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}).encode() + b"\n")


def end_all_others() -> None:
    """Kill what the job left behind, lest it disturb the next. For a process namespace of one's own."""
    with suppress(ProcessLookupError):  # it left nothing
        os.kill(-1, signal.SIGKILL)


def become(limits: dict, files: list[int]) -> None:
    """Turn this process into the job described in the first of the files, within the limits."""
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
    sys.argv = ["program.py"]
    # As `site` has them, which takes too long to load.
    builtins.exit = builtins.quit = sys.exit
    match job["kind"]:
        case "run":
            execute(job["program"], "__main__")
        case "serve":
            serve(Wire(files[4]), execute(job["program"], "program", job["prelude"]))
        case "test":
            code = test(job, Wire(files[4]))
            sys.stderr.flush()
            # Nobody waits for more of it.
            os._exit(code)


def execute(program: str, name: str, prelude: str = "") -> dict:
    """Run a program as a module of this name; what it defines."""
    module = type(sys)(name)
    sys.modules[name] = module
    exec(compile(prelude, "prelude.py", "exec"), module.__dict__)
    exec(compile(program, "program.py", "exec"), module.__dict__)
    return module.__dict__


class Wire:
    """Frames of JSON, one a line."""

    def __init__(self, file: int) -> None:
        self._in, self._out = os.fdopen(os.dup(file), "rb"), os.fdopen(file, "wb")

    def send(self, frame: dict) -> None:
        line = json.dumps(frame).encode() + b"\n"
        if len(line) > MAX_FRAME_BYTES:
            raise ValueError(f"values of {len(line)} bytes as JSON, expected at most {MAX_FRAME_BYTES}")
        self._out.write(line)
        self._out.flush()

    def receive(self) -> dict | None:
        """The next frame, or None at the end."""
        line = self._in.readline(MAX_FRAME_BYTES + 1)
        return json.loads(line) if line.endswith(b"\n") else None


# Values. What is no plain data stays with the program, and is called {"ref": number}.


def encode(value: Any, keep=None):
    """A value as JSON. Subclasses of plain types, and numpy's, are taken for plain; `keep(value)` names anything else."""
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
        raise TypeError(f"expected plain data, came {type(value).__name__}")
    return keep(value)


def decode(value: Any, find) -> Any:
    """The value of what `encode` made; `find` looks up {"ref"} and {"name"}."""
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
    """Do what is asked over the wire until it ends. What ends this process ends the tests."""
    kept = dict[int, object]()

    def keep(value: object) -> dict:
        kept[id(value)] = value
        return {"ref": id(value)}

    def find(target: dict) -> object:
        if "ref" in target:
            return kept[target["ref"]]
        name = target["name"]
        # Before what the prelude may have by the same name, such as `count`.
        if hasattr(defined.get("Solution"), name):
            return getattr(defined["Solution"](), name)
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
        except Exception as error:
            wire.send({"error": type(error).__name__, "text": str(error)[:300]})


# The tests' side.


class ProgramFailed(Exception):
    """The program ended, or said what is no answer."""


class Remote:
    """Something of the program's that is no plain data. It can be called, read and iterated, and equals nothing but itself."""

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


class Asking:
    """Ask the program to do one operation: its result, its changes to the arguments, or its exception."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._remotes = dict[int, Remote]()
        self.failures = list[BaseException]()
        """Exceptions of the program, and of the wire to it."""

    def __call__(self, operation: str, *arguments):
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
            if isinstance(kind, type) and issubclass(kind, Exception):
                failure = kind(frame["text"])
            else:
                failure = ProgramFailed(f"{frame['error']}: {frame['text']}")
        except BrokenPipeError:
            failure = ProgramFailed("the program ended")
        except ProgramFailed as error:
            failure = error
        except Exception as error:
            # Whatever cannot be made sense of.
            failure = ProgramFailed(f"{type(error).__name__}: {error}"[:300])
        self.failures.append(failure)
        raise failure

    def _find(self, target: dict) -> Remote:
        number = target["ref"]
        return self._remotes.setdefault(number, Remote(self, {"ref": number}))


def take_over(old, new) -> None:
    """Give containers the contents of others that were made of them elsewhere."""
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
    """Make the tests; the exit code."""
    asking = Asking(wire)
    names = {name: Remote(asking, {"name": name}) for name in job["names"]}
    try:
        if "cases" in job:
            (called,) = names.values()
            for arguments, expected in job["cases"]:
                came = called(*arguments)
                if not equal(came, expected):
                    raise AssertionError(f"expected {short(expected)}, came {short(came)}")
        else:
            tests = {"__name__": "tests"}
            exec(compile(job["setup"], "setup.py", "exec"), tests)
            tests.update(names)
            exec(compile(job["tests"], "tests.py", "exec"), tests)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
        if error in asking.failures:
            return CRASHED
        return BROKEN if isinstance(error, SyntaxError | ImportError | NameError) else WRONG
    return PASSED


def equal(came, expected) -> bool:
    """Whether a result is what was expected: tuples as lists, floats within 1e-5, as LeetCode compares them."""
    if isinstance(came, list | tuple) and isinstance(expected, list):
        return len(came) == len(expected) and all(map(equal, came, expected))
    if isinstance(came, float | int) and isinstance(expected, float):
        return math.isclose(came, expected, rel_tol=1e-5, abs_tol=1e-5)
    return type(came) is not Remote and came == expected


def short(value) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."


if __name__ == "__main__":
    main()
