"""Grading of programs: extracted from an answer, run in a sandbox, and graded by their output
outside of that sandbox.

A program never sees the expected results. A script's output is compared here; the results of a
function are sent, as data, to tests in another sandbox. Nothing that a program prints about itself,
no exit code, and nothing that it does to its own Python makes it correct. It may know what a task's
question or its tests' arguments reveal.
"""

from __future__ import annotations

import ast
import builtins
import math
import re
import signal
import socket
import symtable
import time
import warnings
from decimal import Decimal, DecimalException
from textwrap import dedent
from typing import Any

from areal_jax.data.code_tasks import (
    Asserts,
    CodeTests,
    FunctionCalls,
    RepositoryTests,
    Stdin,
)
from areal_jax.data.repository_files import BadRepository
from areal_jax.records import RewardResult
from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.harness import BROKEN, CRASHED, LATE, PASSED, PRELUDE, RECURSION_LIMIT, WRONG
from areal_jax.rewards.processes import ending
from areal_jax.rewards.repository_grader import grade_repository
from areal_jax.rewards.sandbox import (
    NEEDS_BUBBLEWRAP,
    Ended,
    Job,
    Sandbox,
    Sandboxes,
    SandboxUnavailable,
)

MAX_PROGRAM_CHARS = 200_000

LAST_WORDS_S = 1.0
"""Time in which a program that failed may print its error."""

_FENCE = re.compile(r"^[ \t]*```[ \t]*([A-Za-z0-9_+-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "python3", "py")


def extract_program(text: str, prompt: str = "") -> str | None:
    """Extract the program of an answer.

    It is the last closed ```python block, or else the last one without a language; otherwise the
    whole text, if it is Python alone or after the prompt. A truncated block is none.
    """
    text = text[-MAX_PROGRAM_CHARS:]
    found = dict[bool, str]()
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        language, is_closing = fence.group(1).lower(), opened is not None and not fence.group(1)
        if opened is not None and is_closing:
            language = opened.group(1).lower()
            if language in (*_PYTHON, ""):
                found[language != ""] = text[opened.end() + 1 : fence.start()]
        opened = None if is_closing else fence
    if "```" in text:
        program = found.get(True, found.get(False, ""))
        return program if program.strip() else None
    return text if _is_code(text) or (prompt and _is_code(prompt + text, len(prompt))) else None


def _is_code(text: str, after: int = 0) -> bool:
    """Return whether a text is Python, and more than a bare word or an expression without
    effect.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return bool(text[after:].strip()) and any(
        isinstance(node, ast.Call)
        or (isinstance(node, ast.stmt) and not isinstance(node, ast.Expr))
        for node in ast.walk(tree)
    )


def continues(tests: Asserts, program: str) -> bool:
    """Return whether the program continues the prompt's function instead of defining it again."""
    anew = (rf"^\s*(?:async\s+def|def|class)\s+{re.escape(name)}\b" for name in tests.names)
    return tests.prompt != "" and not any(
        re.search(pattern, program, re.MULTILINE) for pattern in anew
    )


class CodeGrader:
    """Grades programs one after another, each in a sandbox; the next one starts meanwhile."""

    def __init__(self, config: SandboxConfig, bwrap: str | None, timeout_s: float) -> None:
        """
        Args:
            bwrap: Result of `find_sandbox_command`.
            timeout_s: Time limit of one answer.
        """
        self._config, self._timeout_s = config, timeout_s
        self._sandboxes = Sandboxes(config, bwrap)
        self._tester: Sandbox | None = None
        """Sandbox of the tests, which are not the policy's: one for all."""

    def grade_answer(self, tests: CodeTests, text: str) -> RewardResult:
        """Grade one answer; `infrastructure` if the sandbox itself failed.

        Args:
            text: Text with a program; for tests of a repository, its files: an archive as base64.
        """
        program = text
        if not isinstance(tests, RepositoryTests):
            prompt = tests.prompt if isinstance(tests, Asserts) else ""
            if (program := extract_program(text, prompt)) is None:
                return RewardResult("no_answer")
        deadline_s = time.monotonic() + self._timeout_s
        try:
            sandbox = self._sandboxes.take()
            try:
                if isinstance(tests, RepositoryTests):
                    if self._config.isolation != "bubblewrap":
                        raise SandboxUnavailable(NEEDS_BUBBLEWRAP)
                    return grade_repository(sandbox, tests, program, deadline_s, self._failed)
                if isinstance(tests, Stdin):
                    return self._grade_script(sandbox, tests, program, deadline_s)
                return self._grade_functions(sandbox, tests, program, deadline_s)
            finally:
                sandbox.close()
        except (SandboxUnavailable, BadRepository, OSError) as error:
            self._close_tester()
            return RewardResult("infrastructure", f"sandbox: {error}")

    def _grade_script(
        self, sandbox: Sandbox, tests: Stdin, program: str, deadline_s: float
    ) -> RewardResult:
        # Exit codes do not count: the checkers of LiveCodeBench and APPS take any SystemExit
        # for the end.
        # for the end.
        job = {"kind": "run", **_program_job(tests, program), "ignores_exit_code": True}
        for number, (given, expected) in enumerate(tests.cases):
            with sandbox.start(job, given) as running:
                ended = sandbox.wait(self._left_s(deadline_s))
                if ended != Ended("exit", 0):
                    return self._failed(ended, running, f"test {number}: ")
                if not is_same_output(running.output(), expected, tests.is_exact):
                    return RewardResult("wrong", f"test {number}: another output than expected")
        return RewardResult("correct")

    def _grade_functions(
        self, sandbox: Sandbox, tests: FunctionCalls | Asserts, program: str, deadline_s: float
    ) -> RewardResult:
        self._tester = tester = self._tester or self._sandboxes.take()
        # Each case is a test, and timed at its call; asserts are one test.
        left_s = (
            self._left_s(deadline_s)
            if isinstance(tests, Asserts)
            else deadline_s - time.monotonic()
        )
        ours, theirs = socket.socketpair()
        with ours, theirs:
            serving = sandbox.start(
                {"kind": "serve", **_program_job(tests, program)}, channel=ours, cpu_s=left_s
            )
            testing = tester.start(
                {"kind": "test", **self._test_job(tests)}, channel=theirs, cpu_s=left_s
            )
        with serving, testing:
            ended = tester.wait(left_s, also=[sandbox])
            if ended.how != "exit":
                self._close_tester()
            match ended:
                case Ended("exit", code) if code == PASSED:
                    return RewardResult("correct")
                case Ended("exit", code) if code == WRONG:
                    return RewardResult("wrong", testing.last_error())
                case Ended("exit", code) if code == CRASHED:
                    sandbox.wait(LAST_WORDS_S)
                    return RewardResult("crashed", serving.last_error() or testing.last_error())
                case Ended("exit", code) if code == LATE:
                    return self._failed(Ended("timeout"), testing)
                case Ended("exit", code) if code == BROKEN:
                    return RewardResult(
                        "infrastructure", f"the tests cannot be run: {testing.last_error()}"
                    )
                case Ended("gone"):
                    return RewardResult("infrastructure", "the sandbox of the tests has fallen")
                case _:
                    return self._failed(ended, testing)

    def _test_job(self, tests: FunctionCalls | Asserts) -> dict[str, Any]:
        if isinstance(tests, Asserts):
            return {
                "names": tests.names,
                "setup": f"{tests.prompt}\n{tests.imports}",
                "tests": tests.tests,
            }
        timeout_s = self._config.test_timeout_s
        return {
            "names": [tests.function],
            "cases": tests.cases,
            "is_exact": tests.is_exact,
            "timeout_s": timeout_s,
        }

    def _left_s(self, deadline_s: float) -> float:
        return min(self._config.test_timeout_s, deadline_s - time.monotonic())

    def _failed(self, ended: Ended, job: Job, where: str = "") -> RewardResult:
        """Return the grade of a program that did not end normally."""
        match ended:
            case Ended("timeout"):
                return RewardResult(
                    "timeout",
                    where + "no end within rewards.sandbox.test_timeout_s or total_timeout_s",
                )
            case Ended("exit", code) if code == -signal.SIGXCPU:
                return RewardResult(
                    "timeout", where + "more processor time than rewards.sandbox.test_timeout_s"
                )
            case Ended("memory"):
                return RewardResult(
                    "crashed",
                    where + f"more than rewards.sandbox.memory_bytes={self._config.memory_bytes}",
                )
            case Ended("output"):
                limit = f"rewards.sandbox.max_file_bytes={self._config.max_file_bytes}"
                return RewardResult("crashed", f"{where}more output than {limit}")
            case Ended("gone"):
                return RewardResult("crashed", where + "it brought down its sandbox")
            case Ended("exit", code) if code < 0:
                return RewardResult("crashed", where + ending(code))
            case _:
                return RewardResult(
                    "crashed", where + (job.last_error() or f"exit code {ended.returncode}")
                )

    def close(self) -> None:
        """Close the idle sandboxes."""
        self._sandboxes.close()
        self._close_tester()

    def _close_tester(self) -> None:
        if self._tester is not None:
            self._tester.close()
            self._tester = None


def _program_job(tests: CodeTests, program: str) -> dict[str, Any]:
    if not isinstance(tests, Asserts):
        program = dedent(program)
        # Importing takes longer than most programs run.
        prelude = PRELUDE if uses_undefined_names(program) else ""
        return {"prelude": prelude, "program": program, "recursion_limit": RECURSION_LIMIT}
    if continues(tests, program):
        return {"prelude": "", "program": tests.prompt + program}
    # The rest of the prompt, such as imports, may be needed; two pieces, so that each may
    # begin with `from __future__`.
    # begin with `from __future__`.
    return {"prelude": tests.prompt, "program": dedent(program)}


_DEFINED = {*dir(builtins), "__file__"}
_LOOKS_UP = {"eval", "exec", "globals", "locals", "vars"}


def uses_undefined_names(program: str) -> bool:
    """Return whether a program uses names that neither its module level nor Python defines, or
    might define.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = symtable.symtable(program, "program.py", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    scopes, used, defined = [module], set[str](), set[str]()
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            is_given = symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
            if is_given and (scope is module or symbol.is_declared_global()):
                defined.add(symbol.get_name())
            if symbol.is_referenced() and (scope is module or symbol.is_global()):
                used.add(symbol.get_name())
    return bool(used - defined - _DEFINED or used & _LOOKS_UP)


def is_same_output(found: str, expected: str, is_exact: bool = False) -> bool:
    """Return whether two outputs are equal except for spaces around lines, empty lines at the end,
    and the notation of numbers: 1.50 is 1.5, and where a fraction is expected, 1e-6 is tolerated.

    Exact comparison is that of LiveCodeBench's checker: lines are equal, or are equal decimals.
    """
    ours, theirs = (
        [line.strip() for line in text.strip().split("\n")] for text in (found, expected)
    )
    return len(ours) == len(theirs) and all(
        map(_is_same_decimals if is_exact else _is_same_line, ours, theirs)
    )


def _is_same_decimals(found: str, expected: str) -> bool:
    if found == expected:
        return True
    try:
        ours, theirs = (list(map(Decimal, line.split())) for line in (found, expected))
        return ours == theirs
    except (DecimalException, ValueError):
        return False


def _is_same_line(found: str, expected: str) -> bool:
    if found == expected:
        return True
    ours, theirs = found.split(), expected.split()
    return len(ours) == len(theirs) and all(map(_is_same_word, ours, theirs))


_DECIMAL = re.compile(r"[-+]?[0-9]{1,300}(\.[0-9]{0,300})?([eE][-+]?[0-9]{1,3})?")


def _is_same_word(found: str, expected: str) -> bool:
    if found == expected:
        return True
    numbers = _DECIMAL.fullmatch(found), _DECIMAL.fullmatch(expected)
    if None in numbers or not (numbers[1] and (numbers[1].group(1) or numbers[1].group(2))):
        return False
    return math.isclose(float(found), float(expected), rel_tol=1e-6, abs_tol=1e-6)
