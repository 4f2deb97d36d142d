"""Long files, classes and functions say in their docstrings why they are not cut."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "areal_jax"


def too_long(source: str, name: str = "") -> Iterator[str]:
    """Yield what is too long and gives no reason. A function counts without its docstring."""
    module = ast.parse(source)
    if (lines := source.count("\n")) > 400 and not gives_reason(module, 400):
        yield f"{name}: {lines} lines"
    for node in ast.walk(module):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        lines, limit = (node.end_lineno or 0) - node.lineno + 1, 200
        if not isinstance(node, ast.ClassDef):
            lines -= len((ast.get_docstring(node, clean=False) or "").splitlines())
            limit = 60
        if lines > limit and not gives_reason(node, limit):
            yield f"{name}: {node.name}: {lines} lines"


def gives_reason(
    node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, limit: int
) -> bool:
    return f"more than {limit} lines because" in " ".join((ast.get_docstring(node) or "").split())


def test_what_is_long_gives_its_reason() -> None:
    found = [
        line
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in too_long(path.read_text(), path.relative_to(PACKAGE).as_posix())
    ]
    assert found == []


def test_sizes_are_counted() -> None:
    body, reason = "    x = 1\n", '    """It has more than 60 lines because."""\n'
    assert list(too_long("def f():\n" + 59 * body)) == []
    assert list(too_long("def f():\n" + 60 * body)) == [": f: 61 lines"]
    assert list(too_long("def f():\n" + reason + 60 * body)) == []
    assert list(too_long("class C:\n" + 200 * body)) == [": C: 201 lines"]
    assert list(too_long(401 * "x = 1\n")) == [": 401 lines"]
