"""Rows in the format of SWE-bench, whose repositories are made here."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

FILES = {
    "calc/__init__.py": "from calc.ops import add, half\n",
    "calc/ops.py": "def add(a, b):\n    return a - b\n\n\ndef half(x):\n    return x / 2\n",
    "tests/test_ops.py": (
        "import unittest\n\nimport pytest\n\nfrom calc import add, half\n\n\n"
        "def test_half():\n    assert half(3) == 1.5\n\n\n"
        "@pytest.mark.parametrize('x', [1, 2])\ndef test_half_of(x):\n    assert half(2 * x) == x\n"
    ),
    "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-x'\n",
}
TEST = (
    "\n\ndef test_add():\n    assert add(1, 2) == 3\n\n\n"
    "class TestAdd(unittest.TestCase):\n    def test_add(self):\n"
    "        self.assertEqual(add(-1, 1), 0)\n"
)


def diff(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """A unified diff as git writes it."""
    parts = []
    for path in sorted({*old, *new}):
        before, after = old.get(path), new.get(path)
        if before != after:
            first, second = (
                "/dev/null" if text is None else f"{side}/{path}"
                for side, text in (("a", before), ("b", after))
            )
            lines = difflib.unified_diff(
                (before or "").splitlines(True), (after or "").splitlines(True), first, second
            )
            parts.append("".join(lines))
    return "".join(parts)


def make_row(**fields: Any) -> dict[str, Any]:
    """A row whose repair is to replace a minus; it also moves no other file."""
    tests = "tests/test_ops.py"
    right = FILES["calc/ops.py"].replace("a - b", "a + b")
    return {
        "instance_id": "calc-1",
        "repository": FILES,
        "base_commit": "0" * 40,
        "problem_statement": "add subtracts.",
        "patch": diff(FILES, FILES | {"calc/ops.py": right}),
        "test_patch": diff(FILES, FILES | {tests: FILES[tests] + TEST}),
        "FAIL_TO_PASS": f'["{tests}::test_add", "{tests}::TestAdd::test_add"]',
        "PASS_TO_PASS": [f"{tests}::test_half", f"{tests}::test_half_of[1]"],
        **fields,
    }
