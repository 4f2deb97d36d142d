"""Grading of the files of a repository by its tests, in a sandbox of its own."""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from areal_jax.data.code_tasks import RepositoryTests
from areal_jax.data.repository_files import apply_diff, pack_files, read_repository
from areal_jax.records import ResultKind, RewardResult
from areal_jax.rewards import repository_runner
from areal_jax.rewards.repository_runner import is_protected, is_test_file
from areal_jax.rewards.sandbox import Ended, Job, Sandbox, SandboxUnavailable

_PROGRAM = Path(repository_runner.__file__).read_text(encoding="utf-8")


class _Layout(NamedTuple):
    """Files that do not come from the policy."""

    trusted: str
    removed: list[str]
    modules: list[str]
    paths: list[str]
    """Files of tests."""


def grade_repository(
    sandbox: Sandbox,
    tests: RepositoryTests,
    files: str,
    deadline_s: float,
    failed: Callable[[Ended, Job], RewardResult],
) -> RewardResult:
    """Run the tests on files.

    Args:
        sandbox: A new one.
        tests: The tests.
        files: Archive of the files, as base64; empty: the repository is unchanged.
        deadline_s: End of the tests, by the monotonic clock.
        failed: Grade of a job that did not exit with 0.

    Raises:
        BadRepository: The repository or the test patch cannot be used.
        SandboxUnavailable: The sandbox did not start, or pytest is missing.
    """
    layout = _lay_out(tests)
    files = files or base64.b64encode(pack_files(read_repository(tests.repository))).decode()

    def run(name: str, **arguments: Any) -> tuple[Ended, Job]:
        program = {"kind": "run", "program": _PROGRAM}
        left_s = max(0.0, deadline_s - time.monotonic())
        job = sandbox.start(program, json.dumps({"job": name, **arguments}), cpu_s=left_s)
        with job:
            ended = sandbox.wait(left_s)
            job.drain()
            return ended, job

    ended, job = run(
        "lay_out",
        files=files,
        trusted=layout.trusted,
        removed=layout.removed,
        modules=layout.modules,
        needs="" if tests.test_command else "pytest",
    )
    if ended != Ended("exit", 0):
        if "expected the package" in job.last_error():
            raise SandboxUnavailable(job.last_error())
        return failed(ended, job)
    secret, names = secrets.token_hex(16), [*tests.fail_to_pass, *tests.pass_to_pass]
    ended, job = run(
        "run_tests", secret=secret, names=names, paths=layout.paths, command=tests.test_command
    )
    _, is_written, written = job.output().partition(f"\n{secret} ")
    if not is_written:
        result = failed(ended, job) if ended != Ended("exit", 0) else RewardResult("crashed")
        return _result(tests, {}, result.detail or "the process of the tests ended", result.kind)
    passed, note = json.loads(written)
    ended, job = run("check", trusted=layout.trusted)
    if ended != Ended("exit", 0):
        passed, note = {}, job.last_error()
    return _result(tests, passed, note)


def _lay_out(tests: RepositoryTests) -> _Layout:
    files = read_repository(tests.repository)
    # Of the repository: a test file that the policy changed is replaced.
    changed = apply_diff(files, tests.test_patch)
    trusted = {path: file for path, file in files.items() if is_protected(path)}
    trusted |= {path: file for path, file in changed.items() if file is not None}
    removed = [path for path, file in changed.items() if file is None]
    for path in removed:
        trusted.pop(path, None)
    names = [*tests.fail_to_pass, *tests.pass_to_pass]
    paths = dict.fromkeys(name.partition("::")[0] for name in names if "::" in name)
    if not all("::" in name for name in names):
        paths |= dict.fromkeys(path for path in changed if is_test_file(path.rpartition("/")[2]))
    tops = {path.removeprefix("src/").partition("/")[0].partition(".")[0] for path in files}
    packed = base64.b64encode(pack_files(trusted)).decode()
    return _Layout(packed, removed, sorted(tops), list(paths))


def _result(
    tests: RepositoryTests,
    passed: Mapping[str, bool],
    note: str,
    otherwise: ResultKind = "wrong",
) -> RewardResult:
    components, detail, is_correct = dict[str, float](), list[str](), True
    for what, names in (("fail_to_pass", tests.fail_to_pass), ("pass_to_pass", tests.pass_to_pass)):
        failing = [name for name in names if not passed.get(name)]
        components[what] = 1 - len(failing) / len(names) if names else 1.0
        if failing:
            is_correct = False
            detail.append(f"{len(failing)} of {len(names)} {what} fail, such as {failing[0]}")
    text = "; ".join([*detail, *filter(None, [note])])
    return RewardResult("correct" if is_correct else otherwise, text, components=components)
