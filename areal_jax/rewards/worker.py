"""The grading processes: `python -m areal_jax.rewards.worker PARENT_PID SETTINGS`, forked by
`rewards.fork_worker`.

Requests: {"number", "task", "text"}. Replies: {"number", "kind", "detail", "score", "failed",
"trace"}, or {"number", "unprepared"}: it needs computer algebra, which takes a second to import;
`prepare` imports it once, for all later forks. A tool call: {"number", "tool", "text"}; reply
{"number", "kind", "text"}.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import re
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Literal, NamedTuple

from areal_jax.rewards.fork_worker import send, serve_forks
from areal_jax.rewards.functions import graded, load_function, traceback_of
from areal_jax.rewards.math_answers import (
    compare_plainly,
    compare_symbolically,
    extract_answer,
    extract_boxed,
)

MEMORY_BYTES = 4 << 30
"""Largest address space of a process, in bytes: an answer that needs more is `crashed`."""

PATIENCE = 0.9
"""Share of an answer's time limit after which a program is stopped."""

MAX_DETAIL_CHARS = 300

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
"""What the prompts of reasoning-gym ask for."""


class GradeFields(NamedTuple):
    """A grade. `RewardResult` is in a module that takes long to import."""

    kind: str
    detail: str = ""
    score: float | None = None
    failed: bool = False
    trace: str = ""
    components: dict[str, float] | None = None


class Unprepared(Exception):
    """Computer algebra is needed and not imported."""


Grader = Callable[[dict[str, Any], str], GradeFields]
Tools = dict[str, Callable[[str], tuple[str, str]]]


def main() -> None:
    settings = json.loads(sys.argv[2])
    serve_forks(
        load=lambda: _load(settings),
        serve=lambda connection, loaded: _serve(connection, *loaded, settings),
        what=_describe(settings),
        prepare=_prepare,
        memory_bytes=MEMORY_BYTES,
    )


def _load(settings: dict[str, Any]) -> tuple[Grader, Tools]:
    """Load the grader and the tools; a user's own code may raise anything."""
    grader = (
        _custom_grader(settings["function"], settings["scale"])
        if settings["function"]
        else _grader_of_kind(settings)
    )
    if settings["form"] is not None:
        grader = _in_form(re.compile(settings["form"], re.DOTALL), grader)
    return grader, _tools(settings) if settings["tools"] else {}


def _describe(settings: dict[str, Any]) -> str:
    """Return the settings that name code or files of the user."""
    given = [f"rewards.{name}={settings[name]}" for name in ("function", "form") if settings[name]]
    if tools := settings["tools"]:
        given.append(f"workflow.tools.names={','.join(tools['names'])}")
        if tools["documents"]:
            given.append(f"workflow.tools.documents={tools['documents']}")
    return " ".join(given)


def _prepare() -> dict[str, object]:
    try:
        importlib.import_module("math_verify")
    except ImportError as error:
        return {"error": _named(error)}
    return {}


def _serve(
    connection: socket.socket, grader: Grader, tools: Tools, settings: dict[str, Any]
) -> None:
    """Grade answers and execute tool calls until the connection ends."""
    with connection, connection.makefile("r", encoding="utf-8") as requests:
        for line in requests:
            request = json.loads(line)
            if "tool" in request:
                found = _used(
                    tools[request["tool"]], request["text"], settings["tools"]["max_output_chars"]
                )
            else:
                found = _graded(grader, request["task"], request["text"])
            send(connection, {"number": request["number"], **found})


def _used(
    use: Callable[[str], tuple[str, str]], argument: str, max_output_chars: int
) -> dict[str, object]:
    """Execute a tool call and truncate its output.

    An exception is a fault of the machine: tools report faults of a call in their output.
    """
    try:
        kind, text = use(argument)
    except Exception as error:  # untrusted argument; counted in rewards/tool/*/infrastructure
        traceback.print_exc()
        kind, text = "infrastructure", _named(error)
    return {
        "kind": kind,
        "text": text if len(text) <= max_output_chars else text[:max_output_chars] + " ...",
    }


def _graded(grader: Grader, task: dict[str, Any], text: str) -> dict[str, object]:
    """Grade an answer; a failed call is a grade of kind `crashed` or `infrastructure`."""
    try:
        finding = grader(task, text)
    except Unprepared:
        return {"unprepared": True}
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        # The user's function or a verifier on untrusted text; counted in rewards/failed and
        # rewards/grade/*. OSError is a fault of this machine or of a remote one.
        kind = "infrastructure" if isinstance(error, OSError) else "crashed"
        finding = GradeFields(kind, _named(error), failed=True, trace=traceback_of(error))
    return {
        "kind": finding.kind,
        "detail": finding.detail[:MAX_DETAIL_CHARS],
        "score": finding.score,
        "failed": finding.failed,
        "trace": finding.trace,
        "components": finding.components or {},
    }


def _grader_of_kind(settings: dict[str, Any]) -> Grader:
    """Return a grader of all kinds.

    Raises:
        SandboxUnavailable: Programs are among them, and there is no sandbox.
    """
    graders: dict[str, Grader] = {
        "math": _math_grader(settings["accept_plain"]),
        "countdown": _countdown_grader,
    }
    if "code" in settings["kinds"]:
        graders["code"] = _code_grader(settings["sandbox"])
    if "reasoning_gym" in settings["kinds"]:
        graders["reasoning_gym"] = _puzzle_grader(settings["accept_plain"])
    return lambda task, text: graders[task["kind"]](task, text)


def _in_form(form: re.Pattern[str], grader: Grader) -> Grader:
    return lambda task, text: (
        grader(task, text)
        if form.fullmatch(text)
        else GradeFields("no_answer", "not in rewards.form")
    )


def _math_grader(accept_plain: bool) -> Grader:
    def grader(task: dict[str, Any], text: str) -> GradeFields:
        answer, reference = extract_answer(text, accept_plain), task["answer"]
        if answer is None:
            return GradeFields("no_answer")
        correct = compare_plainly(answer, reference)
        if correct is None:
            if "math_verify" not in sys.modules:
                raise Unprepared
            correct = compare_symbolically(answer, reference)
        return GradeFields("correct" if correct else "wrong", answer)

    return grader


def _countdown_grader(task: dict[str, Any], text: str) -> GradeFields:
    from areal_jax.rewards.countdown import grade_answer

    return GradeFields(*grade_answer(task["answer"], text))


def _puzzle_grader(accept_plain: bool) -> Grader:
    # Imported here, for all forks: the package takes seconds.
    from areal_jax.data import reasoning_gym

    reasoning_gym.load()

    def grader(task: dict[str, Any], text: str) -> GradeFields:
        tagged = _ANSWER_TAG.findall(text)
        answer = tagged[-1] if tagged else extract_boxed(text)
        if answer is None and accept_plain:
            answer = text
        if answer is None or not (answer := answer.strip()):
            return GradeFields("no_answer")
        score, failure = reasoning_gym.score_answer(task["answer"], answer)
        found = graded(score, "unit")
        return GradeFields(found.kind, failure or answer, found.score)

    return grader


def _code_grader(sandbox: dict[str, Any]) -> Grader:
    # Imported here, so that grading mathematics does not wait for these imports.
    from areal_jax.data.code_tasks import parse_tests
    from areal_jax.rewards.code_grader import CodeGrader
    from areal_jax.rewards.config import SandboxConfig
    from areal_jax.rewards.sandbox import find_sandbox_command

    config = SandboxConfig(**sandbox)
    bwrap = find_sandbox_command(config)
    programs = list[CodeGrader]()

    def grader(task: dict[str, Any], text: str) -> GradeFields:
        if not programs:
            # One in each grading process. A program that is too slow is stopped here, which needs
            # no new process.
            programs.append(CodeGrader(config, bwrap, PATIENCE * config.total_timeout_s))
        grade = programs[0].grade_answer(parse_tests(task["answer"]), text)
        return GradeFields(grade.kind, grade.detail, components=dict(grade.components))

    return grader


def _tools(settings: dict[str, Any]) -> Tools:
    """Return the tools that a policy may call. Documents are read once, for all forks."""
    from areal_jax.rewards.config import SandboxConfig
    from areal_jax.rewards.tools import make_tools

    given = settings["tools"]
    return make_tools(
        given["names"],
        given["documents"],
        given["num_results"],
        SandboxConfig(**settings["sandbox"]),
        PATIENCE * given["timeout_s"],
    )


def _custom_grader(function: str, scale: Literal["unit", "raw"]) -> Grader:
    """Return a grader that calls the function FILE.py:NAME or MODULE:NAME."""
    from areal_jax.records import task_from_json
    from areal_jax.rewards.adapters import adapt

    loops = list[asyncio.Runner]()

    def finished(found: object) -> object:
        if not inspect.isawaitable(found):
            return found
        # One event loop for all answers of a process, because connections that the function keeps
        # open belong to it.
        loops[:] = loops or [asyncio.Runner()]
        return loops[0].run(_awaited(found))

    own = adapt(load_function(function), finished)

    def grader(task: dict[str, Any], text: str) -> GradeFields:
        found = graded(own(task_from_json(task), text), scale)
        return GradeFields(found.kind, score=found.score, components=found.components)

    return grader


async def _awaited(found: Awaitable[object]) -> object:
    return await found


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_DETAIL_CHARS]


if __name__ == "__main__":
    main()
