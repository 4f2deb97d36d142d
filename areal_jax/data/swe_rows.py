"""Rows in the format of SWE-bench: a repository, a problem, and tests that a repair must pass."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_jax.data.code_tasks import RepositoryTests
from areal_jax.data.repository_files import (
    DATA,
    BadRepository,
    RepositoryFile,
    pack_files,
    parse_diff,
)

FIELDS = ("problem_statement", "test_patch", "FAIL_TO_PASS")
"""Fields that identify such a row."""


def read_repository_row(row: Mapping[str, Any], folder: Path) -> tuple[str, RepositoryTests]:
    """Read question and tests of a row.

    Args:
        row: the row, with the fields of SWE-bench and `repository`: the files of `base_commit` as
            the path of an archive or folder, as an archive (bytes, or base64 after "data:"), or as
            texts by path. Optional: `test_command`.
        folder: folder of relative paths.

    Raises:
        BadRepository: a field is missing or wrong. The files of archives are not read.
    """
    question, test_patch = row["problem_statement"], row["test_patch"]
    if not isinstance(question, str) or not question.strip() or not isinstance(test_patch, str):
        raise BadRepository("problem_statement or test_patch is no text")
    fail_to_pass = _read_names(row, "FAIL_TO_PASS")
    if not fail_to_pass:
        raise BadRepository("FAIL_TO_PASS is empty")
    parse_diff(test_patch)
    return question, RepositoryTests(
        _find_repository(row.get("repository"), folder.resolve()),
        test_patch,
        fail_to_pass,
        _read_names(row, "PASS_TO_PASS"),
        row.get("test_command") or "",
    )


def _read_names(row: Mapping[str, Any], field: str) -> list[str]:
    """Read names of tests: a list, or, as in SWE-bench's files, a list as JSON."""
    names = row.get(field) or []
    if isinstance(names, str):
        try:
            names = json.loads(names)
        except ValueError as error:
            raise BadRepository(f"{field} is no list of names as JSON") from error
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise BadRepository(f"{field} is no list of names")
    return names


def _find_repository(given: object, folder: Path) -> str:
    match given:
        case bytes():
            return DATA + base64.b64encode(given).decode()
        case dict() if given and all(isinstance(text, str) for text in given.values()):
            files = {path: RepositoryFile(text.encode()) for path, text in given.items()}
            return DATA + base64.b64encode(pack_files(files)).decode()
        case str() if given.startswith(DATA):
            return given
        case str() if given:
            path = (folder / given).resolve()
            if not path.is_relative_to(folder) or path == folder:
                raise BadRepository("repository is outside of the folder of the rows' file")
            if not path.exists():
                raise BadRepository("repository is a path at which there is nothing")
            return str(path)
        case _:
            raise BadRepository(
                "no repository, which should be an archive or folder beside the rows' file, or "
                "texts by path"
            )
