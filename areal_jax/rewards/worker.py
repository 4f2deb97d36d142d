"""A judging process: `python -m areal_jax.rewards.worker PARENT_PID SETTINGS`, started and killed by `rewards.service`.

One JSON object a line. In: {"number", "task", "text"}. Out: {"status": "ready"} when it can judge, or {"error"} when it never
will; then {"number", "kind", "detail"} for every request, before which {"status": "loading"} and {"status": "loaded"} say that
time went into importing, not into the answer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any

from areal_jax.rewards.math_answers import compare_plainly, compare_symbolically, extract_answer

MEMORY_BYTES = 4 << 30
"""Address space of the process: an answer that wants more is `crashed`, not the end of the machine."""

PATIENCE = 0.9
"""Share of the time for an answer after which a program has taken too long."""

MAX_DETAIL_CHARS = 300

Say = Callable[[dict[str, object]], None]
Judge = Callable[[dict[str, Any], str], Iterator[dict[str, object]]]
"""Task and text to messages: the last one is the verdict, without its number."""


def main() -> None:
    parent_pid, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    _end_with(parent_pid)
    with _own(0, "r") as requests, _own(1, "w") as replies:

        def say(message: dict[str, object]) -> None:
            replies.write(json.dumps(message) + "\n")
            replies.flush()

        try:
            judge = _own_judge(settings["function"]) if settings["function"] else _judge_by_kind(settings)
        except Exception as error:
            traceback.print_exc()
            function = f"rewards.function={settings['function']}: " if settings["function"] else ""
            say({"error": f"{function}{type(error).__name__}: {error}"})
            return
        say({"status": "ready"})
        for line in requests:
            request = json.loads(line)
            for message in _guarded(judge, request["task"], request["text"]):
                say({"number": request["number"], **message})


def _end_with(parent_pid: int) -> None:
    """Be killed when the parent dies, even in the middle of a computation, and take orphaned descendants as children, so that
    who kills this process finds them."""
    if sys.platform == "linux":
        import ctypes
        import resource

        PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.getppid() != parent_pid:
        sys.exit(f"the process {parent_pid} that asked for judging is gone")


def _own(standard: int, mode: str) -> IO[str]:
    """Standard input or output for the protocol alone: not inherited by children, who would keep it open after the end of this
    process, and out of reach of what the user's code reads and prints, which goes to nothing and to standard error."""
    lines = os.fdopen(os.dup(standard), mode, encoding="utf-8")
    if mode == "r":
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), standard)
    else:
        os.dup2(2, standard)
    return lines


def _judge_by_kind(settings: dict[str, Any]) -> Judge:
    """The judges of the kinds of tasks there are; SandboxUnavailable where programs are among them and cannot be run."""
    judges = {"math": _math_judge(settings["accept_plain"])}
    if "code" in settings["kinds"]:
        judges["code"] = _code_judge(settings["sandbox"], settings["timeout_s"])
    return lambda task, text: judges[task["kind"]](task, text)


def _code_judge(sandbox: dict[str, Any], timeout_s: float) -> Judge:
    # What judges mathematics is not to wait for these imports.
    from areal_jax.data.code_tasks import tests_of
    from areal_jax.rewards.code_tests import CodeJudge
    from areal_jax.rewards.config import SandboxConfig

    # A program that takes too long is to end here, which takes no new judging process.
    programs = CodeJudge(SandboxConfig(**sandbox), PATIENCE * timeout_s)

    def judge(task: dict[str, Any], text: str) -> Iterator[dict[str, object]]:
        verdict = programs.judge(tests_of(task["answer"]), text)
        yield {"kind": verdict.kind, "detail": verdict.detail}

    return judge


def _math_judge(accept_plain: bool) -> Judge:
    def judge(task: dict[str, Any], text: str) -> Iterator[dict[str, object]]:
        answer, reference = extract_answer(text, accept_plain), task["answer"]
        if answer is None:
            yield {"kind": "no_answer", "detail": ""}
            return
        correct = compare_plainly(answer, reference)
        if correct is None:
            if "math_verify" not in sys.modules:
                yield {"status": "loading"}
                try:
                    importlib.import_module("math_verify")
                except ImportError as error:
                    yield {"kind": "infrastructure", "detail": _named(error)}
                    return
                yield {"status": "loaded"}
            correct = compare_symbolically(answer, reference)
        yield {"kind": "correct" if correct else "wrong", "detail": answer}

    return judge


def _own_judge(function: str) -> Judge:
    """The function called FILE.py:NAME or MODULE:NAME."""
    from areal_jax.records import Message, Task

    where, _, name = function.rpartition(":")
    if where.endswith(".py"):
        spec = importlib.util.spec_from_file_location("own_judge", where)
        if spec is None or spec.loader is None:
            raise ValueError(f"{where} is no Python file")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(where)
    is_correct: Callable[[Task, str], object] = getattr(module, name)

    def judge(task: dict[str, Any], text: str) -> Iterator[dict[str, object]]:
        prompt = tuple(Message(**message) for message in task["prompt"])
        correct = is_correct(Task(**{**task, "prompt": prompt}), text)
        if not isinstance(correct, bool):
            raise TypeError(f"{function}: expected a bool, came {type(correct).__name__}")
        yield {"kind": "correct" if correct else "wrong", "detail": ""}

    return judge


def _guarded(judge: Judge, task: dict[str, Any], text: str) -> Iterator[dict[str, object]]:
    """An answer on which judging fails has a verdict too. The trace goes to standard error, the verdict is counted."""
    try:
        for message in judge(task, text):
            yield {**message, **({"detail": str(message["detail"])[:MAX_DETAIL_CHARS]} if "detail" in message else {})}
    except Exception as error:
        traceback.print_exc()
        yield {"kind": "crashed", "detail": _named(error)}


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]


if __name__ == "__main__":
    main()
