"""Rows in the format of SWE-bench, from files to tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from swe_rows import FILES, make_row

from areal_jax.data.code_tasks import RepositoryTests, parse_tests
from areal_jax.data.config import Files, PromptConfig
from areal_jax.data.repository_files import RepositoryFile, pack_files, read_repository
from areal_jax.data.sources import load_tasks

REPOSITORY = {path: RepositoryFile(text.encode()) for path, text in FILES.items()}


def load(folder: Path, *rows: dict[str, Any]) -> tuple[list[RepositoryTests], dict[str, Any]]:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_tasks(Files(path=str(path)), PromptConfig())
    tests = [parse_tests(task.answer) for task in found.tasks]
    assert {task.kind for task in found.tasks} == {"code"}
    assert all(isinstance(each, RepositoryTests) for each in tests)
    return tests, dict(found.skipped)  # pyright: ignore[reportReturnType]


def test_repositories_are_beside_the_rows(tmp_path: Path):
    (tmp_path / "calc.tar.gz").write_bytes(pack_files(REPOSITORY))
    (tmp_path / "calc").mkdir()
    (tmp_path / "calc" / "ops.py").write_text("1")
    tests, skipped = load(
        tmp_path, make_row(repository="calc.tar.gz"), make_row(repository="calc"), make_row()
    )
    assert not skipped and [read_repository(each.repository) for each in tests] == [
        REPOSITORY,
        {"ops.py": RepositoryFile(b"1")},
        REPOSITORY,
    ]
    assert tests[0].fail_to_pass == [
        "tests/test_ops.py::test_add",
        "tests/test_ops.py::TestAdd::test_add",
    ]
    assert tests[0].pass_to_pass[0] == "tests/test_ops.py::test_half"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"repository": None}, "no repository"),
        ({"repository": "../secret.tar"}, "repository is outside of the folder"),
        ({"repository": "/etc"}, "repository is outside of the folder"),
        ({"repository": "link"}, "repository is outside of the folder"),
        ({"repository": "."}, "repository is outside of the folder"),
        ({"repository": "none.tar"}, "repository is a path at which there is nothing"),
        ({"repository": {"a": 1}}, "no repository"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "test_a"}, "FAIL_TO_PASS is no list of names as JSON"),
        ({"PASS_TO_PASS": "[1]"}, "PASS_TO_PASS is no list of names"),
        ({"problem_statement": " "}, "problem_statement or test_patch is no text"),
        ({"test_patch": "text"}, "expected a unified diff, found 'text'"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, fields: dict[str, Any], words: str):
    (tmp_path / "link").symlink_to("/etc")
    _, skipped = load(tmp_path, make_row(), make_row(**fields))
    ((reason, places),) = skipped.items()
    assert words in reason and places == ["rows.jsonl:2"]
