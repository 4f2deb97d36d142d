"""Repositories graded by their tests: what counts, and what a policy cannot do about it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from repository_exploits import CLOSED, OPEN
from swe_rows import FILES, make_row

from areal_jax.data.code_tasks import RepositoryTests
from areal_jax.data.repository_files import (
    RepositoryFile,
    apply_diff,
    pack_files,
    read_repository,
)
from areal_jax.data.swe_rows import read_repository_row
from areal_jax.records import RewardResult
from areal_jax.rewards.code_grader import CodeGrader
from areal_jax.rewards.config import SandboxConfig
from areal_jax.rewards.sandbox import find_sandbox_command
from areal_jax.rewards.workspace import Workspace

CONFIG = SandboxConfig(tmp_bytes=16 << 20)
BWRAP = find_sandbox_command(CONFIG)


@pytest.fixture(scope="module")
def grader() -> Iterator[CodeGrader]:
    grader = CodeGrader(CONFIG, BWRAP, 300.0)
    yield grader
    grader.close()


def swe_tests(**fields: Any) -> RepositoryTests:
    return read_repository_row(make_row(**fields), Path())[1]


def grade(grader: CodeGrader, tests: RepositoryTests, **changed: str | None) -> RewardResult:
    """Grade the repository with changed files, by path; None deletes one."""
    files = dict(read_repository(tests.repository))
    for path, text in changed.items():
        files.pop(path, None)
        if text is not None:
            files[path] = RepositoryFile(text.encode())
    return grader.grade_answer(tests, base64.b64encode(pack_files(files)).decode())


def repaired() -> dict[str, str]:
    changed = apply_diff(read_repository(swe_tests().repository), make_row()["patch"])
    return {path: file.data.decode() for path, file in changed.items() if file is not None}


def test_the_reference_scores_1(grader: CodeGrader):
    right = grade(grader, swe_tests(), **repaired())
    assert (right.kind, right.to_reward(1.0, 0.0)) == ("correct", 1)
    assert right.components == {"fail_to_pass": 1.0, "pass_to_pass": 1.0}


@pytest.mark.slow
def test_an_unchanged_repository_scores_0(grader: CodeGrader):
    nothing = grader.grade_answer(swe_tests(), "")
    assert nothing.kind == "wrong" and nothing.to_reward(1.0, 0.0) == 0
    assert "2 of 2 fail_to_pass fail" in nothing.detail
    assert nothing.components == {"fail_to_pass": 0.0, "pass_to_pass": 1.0}


@pytest.mark.slow
def test_shares_of_each_list_are_components(grader: CodeGrader):
    half = repaired()["calc/ops.py"].replace("x / 2", "x // 2")
    result = grade(grader, swe_tests(), **{"calc/ops.py": half})
    assert result.kind == "wrong" and result.to_reward(1.0, 0.0) == 0
    assert result.components == {"fail_to_pass": 1.0, "pass_to_pass": 0.5}
    # The policy's tests and configuration do not count, and tests that are gone fail.
    names = ["tests/test_ops.py::test_add", "tests/test_ops.py::test_none", "tests/no.py::test"]
    result = grade(grader, swe_tests(FAIL_TO_PASS=names), **repaired())
    assert result.components["fail_to_pass"] == pytest.approx(1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python3 -m pytest -rA tests", "tests/test_ops.py::TestAdd::test_add"),
        ("python3 -m pytest -v tests", "tests/test_ops.py::TestAdd::test_add"),
        ("python3 -m unittest -v tests.test_ops", "test_add (tests.test_ops.TestAdd.test_add)"),
    ],
)
def test_output_of_a_command_is_read(grader: CodeGrader, command: str, name: str):
    tests = swe_tests(
        test_command=command,
        repository=FILES | {"tests/__init__.py": ""},
        FAIL_TO_PASS=[name],
        PASS_TO_PASS=[],
    )
    assert grade(grader, tests, **repaired()).kind == "correct"
    nothing = grader.grade_answer(tests, "")
    assert nothing.kind == "wrong" and "exit code 1" in nothing.detail


def exploit(command: str) -> str:
    assert BWRAP is not None
    start = pack_files(read_repository(swe_tests().repository))
    workspace = Workspace(BWRAP, CONFIG, 23_457, 60.0, start)
    try:
        kind, text = workspace.use("shell", command)
        assert kind == "done" and "[exit code" not in text, text
        files = workspace.archive()
        assert files is not None
        return base64.b64encode(files).decode()
    finally:
        workspace.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CLOSED)
def test_no_exploit_makes_a_test_pass(grader: CodeGrader, name: str):
    result = grader.grade_answer(swe_tests(), exploit(CLOSED[name]))
    assert result.kind in ("wrong", "crashed") and not result.failed
    assert result.components["fail_to_pass"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OPEN)
def test_what_the_documentation_calls_undetected_passes(grader: CodeGrader, name: str):
    assert grader.grade_answer(swe_tests(), exploit(OPEN[name])).kind == "correct"
