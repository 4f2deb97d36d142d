"""Tests of programming problems, read from rows of HumanEval, MBPP, LiveCodeBench and APPS."""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickletools
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stdin:
    """Tests of a script that reads standard input and writes standard output."""

    cases: Sequence[Sequence[str]]
    """Input and expected output of each test."""
    is_exact: bool = False
    """Whether decimals must match to the last digit, as in LiveCodeBench's checker."""


@dataclass(frozen=True, slots=True)
class FunctionCalls:
    """Tests that call a function, or a method of a class called Solution."""

    function: str
    cases: Sequence[Sequence[Any]]
    """Arguments (a sequence) and expected result of each test, as JSON values."""
    is_exact: bool = False
    """Whether results must be equal, as in LiveCodeBench's checker; a tuple equals a list."""


@dataclass(frozen=True, slots=True)
class Asserts:
    """Python code with assertions about the functions and classes of a program."""

    tests: str
    names: Sequence[str]
    """Names that the tests use and the program must define."""
    prompt: str = ""
    """Code that the program continues, such as a signature with a docstring."""
    imports: str = ""
    """Imports that the tests need."""


@dataclass(frozen=True, slots=True)
class Repository(Asserts):
    """Files of which one, edited, is the program that the tests are about."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by path."""
    target: str = ""
    """Path of the program."""


@dataclass(frozen=True, slots=True)
class RepositoryTests:
    """Tests of the files of a whole repository, as in SWE-bench."""

    repository: str
    """What `repository_files.read_repository` reads."""
    test_patch: str
    """Unified diff of the tests, applied after the answer."""
    fail_to_pass: Sequence[str]
    """Names of tests that fail in the repository, and of which a repair passes all."""
    pass_to_pass: Sequence[str] = ()
    """Names of tests that must go on to pass."""
    test_command: str = ""
    """Command of bash that runs and names the tests; empty: pytest."""


CodeTests: TypeAlias = Stdin | FunctionCalls | Asserts | RepositoryTests

FORMS = {
    form.__name__.lower(): form
    for form in (Stdin, FunctionCalls, Asserts, Repository, RepositoryTests)
}


def format_tests(tests: CodeTests) -> str:
    """Serialize tests into the `answer` of a task of kind "code"."""
    return json.dumps({type(tests).__name__.lower(): asdict(tests)})


def parse_tests(answer: str) -> CodeTests:
    """Read the tests from the `answer` of a task of kind "code"; the inverse of `format_tests`.

    Raises:
        ValueError: the answer holds no tests.
    """
    try:
        ((form, fields),) = json.loads(answer).items()
        return FORMS[form](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected the answer of a code task, an object {{FORM: ...}} with FORM one of "
            f"{', '.join(FORMS)}: {error}"
        ) from None


def read_code_problem(row: Row) -> tuple[str, CodeTests] | None:
    """Read the question and the tests of a row; the fields of the row decide its format.

    Returns:
        Question and tests, or None if the row is not a programming problem.

    Raises:
        ValueError: the row is a programming problem without usable tests.
    """
    for fields, read in _READERS.items():
        if all(field in row for field in fields):
            try:
                question, tests = read(row)
            except (
                KeyError,
                TypeError,
                AttributeError,
                SyntaxError,
                zlib.error,
                json.JSONDecodeError,
            ) as error:
                raise ValueError(f"unreadable tests ({type(error).__name__})") from error
            if isinstance(tests, Stdin | FunctionCalls) and not tests.cases:
                raise ValueError("no tests")
            if isinstance(tests, Stdin) and not all(
                isinstance(side, str) for case in tests.cases for side in case
            ):
                raise ValueError("input or output of tests is not text")
            return question, tests
    return None


def read_solution(row: Row) -> str | None:
    """Read the reference program of a row of HumanEval, MBPP or APPS, or the reference patch of one
    of SWE-bench; None if it has none.
    """
    if isinstance(row.get("test_patch"), str):
        return row.get("patch") or None
    if isinstance(rest := row.get("canonical_solution"), str):
        return f"{row.get('prompt') or ''}{rest}"
    if isinstance(program := row.get("code"), str):
        return program
    try:
        solutions = json.loads(row.get("solutions") or "[]")
    except (TypeError, ValueError):
        return None
    is_list = isinstance(solutions, list) and solutions and isinstance(solutions[0], str)
    return solutions[0] if is_list else None


def _read_human_eval(row: Row) -> tuple[str, CodeTests]:
    prompt, entry_point = row["prompt"], row["entry_point"]
    tests = f"{row['test']}\n\ncheck({entry_point})\n"
    question = (
        "Complete this function, and give the whole of it in a ```python block."
        f"\n\n```python\n{prompt}```"
    )
    return question, Asserts(
        tests, sorted({entry_point, *(free_names(tests) - defined_names(prompt))}), prompt
    )


def _read_mbpp(row: Row) -> tuple[str, CodeTests]:
    asserts = "\n".join(row["test_list"])
    question = (
        f"{row.get('text') or row['prompt']}\nYour code should pass these "
        f"tests:\n\n{asserts}\n\nGive it in a ```python block."
    )
    tests = f"{row.get('test_setup_code') or ''}\n{asserts}\n"
    loaded, free = _loaded_names(ast.parse(tests)), free_names(tests)
    # A program may define a name of a builtin, such as `sum`; only the reference solution shows it.
    names = free | loaded & defined_names(row.get("code") or "")
    modules = names & sys.stdlib_module_names
    imports = [
        *(row.get("test_imports") or ()),
        *(f"import {module}" for module in sorted(modules)),
    ]
    return question, Asserts(tests, sorted(names - modules), imports="\n".join(imports))


def _read_live_code_bench(row: Row) -> tuple[str, CodeTests]:
    tests = [
        *json.loads(row["public_test_cases"]),
        *_read_private_tests(row.get("private_test_cases") or "[]"),
    ]
    question, starter = row["question_content"], row.get("starter_code") or ""
    if function := json.loads(row.get("metadata") or "{}").get("func_name"):
        # As that checker splits lines: JSON text may contain other line separators.
        lines = [filter(str.strip, test["input"].split("\n")) for test in tests]
        cases = [
            (tuple(map(json.loads, arguments)), json.loads(test["output"]))
            for arguments, test in zip(lines, tests, strict=True)
        ]
        return _format_question(question, starter), FunctionCalls(function, cases, is_exact=True)
    return _format_question(question, starter), Stdin(
        [(test["input"], test["output"]) for test in tests], is_exact=True
    )


def _read_private_tests(tests: str) -> list[Any]:
    """Read private tests: JSON, or JSON as a pickled string, compressed and base64-encoded.

    The one string is read from the pickle's opcodes; nothing is unpickled.
    """
    if tests.lstrip().startswith("["):
        return json.loads(tests)
    pickled = zlib.decompress(base64.b64decode(tests))
    (text,) = (
        argument
        for operation, argument, _ in pickletools.genops(pickled)
        if "UNICODE" in operation.name
    )
    return json.loads(str(text))


def _read_apps(row: Row) -> tuple[str, CodeTests]:
    tests = json.loads(row["input_output"] or "{}")
    question = _format_question(row["question"], row.get("starter_code") or "")
    inputs, outputs = tests.get("inputs", []), tests.get("outputs", [])
    if function := tests.get("fn_name"):
        # Nearly all rows wrap each result in a list.
        if all(isinstance(output, list) and len(output) == 1 for output in outputs):
            outputs = [output[0] for output in outputs]
        return question, FunctionCalls(function, list(zip(inputs, outputs, strict=True)))
    lines = [
        ["\n".join(side) if isinstance(side, list) else side for side in case]
        for case in zip(inputs, outputs, strict=True)
    ]
    return question, Stdin([(case[0], case[1]) for case in lines])


def _format_question(question: str, starter: str) -> str:
    if starter:
        return (
            f"{question}\n\nComplete this code, and give the whole of it in a ```python block."
            f"\n\n```python\n{starter}\n```"
        )
    return (
        f"{question}\n\nGive a Python program that reads standard input and writes standard "
        "output, in a ```python block."
    )


_READERS: Mapping[tuple[str, ...], Callable[[Row], tuple[str, CodeTests]]] = {
    ("prompt", "test", "entry_point"): _read_human_eval,
    ("test_list",): _read_mbpp,
    ("question_content", "public_test_cases"): _read_live_code_bench,
    ("question", "input_output"): _read_apps,
}
"""Reader of each format, by the fields that identify it."""


def free_names(code: str) -> set[str]:
    """Find names that code uses and that neither it nor Python defines."""
    tree = ast.parse(code)
    assigned = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    assigned |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return _loaded_names(tree) - assigned - _declared_names(ast.walk(tree)) - set(dir(builtins))


def defined_names(code: str) -> set[str]:
    """Find names that code defines at module level."""
    tree = ast.parse(code)
    targets = (
        target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    )
    return _declared_names(tree.body) | {
        target.id for target in targets if isinstance(target, ast.Name)
    }


def _loaded_names(tree: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _declared_names(nodes: Any) -> set[str]:
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return names
