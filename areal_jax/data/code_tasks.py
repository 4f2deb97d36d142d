"""Programming problems: what grading them needs, and the rows of HumanEval, MBPP, LiveCodeBench and
APPS that carry it."""

from __future__ import annotations

import ast
import base64
import builtins
import json
import pickletools
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

Row: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Stdin:
    """A script that reads its input and writes its output."""

    cases: Sequence[Sequence[str]]
    """Input and expected output of each."""
    is_exact: bool = False
    """Whether fractions must come to the last digit, as for LiveCodeBench's checker."""


@dataclass(frozen=True, slots=True)
class Calls:
    """A function, or a method of a class called Solution."""

    function: str
    cases: Sequence[Sequence[Any]]
    """Arguments, a sequence, and expected result of each, as JSON has them."""
    is_exact: bool = False
    """Whether results must be equal, but for a tuple in place of a list, as for LiveCodeBench's
    checker."""


@dataclass(frozen=True, slots=True)
class Asserts:
    """Functions and classes that Python code uses and asserts something of."""

    tests: str
    names: Sequence[str]
    """Names in the tests that are the program's to define."""
    prompt: str = ""
    """Code that the program resumes from."""
    imports: str = ""
    """Code that the tests need before them."""


CodeTests: TypeAlias = Stdin | Calls | Asserts

FORMS = {form.__name__.lower(): form for form in (Stdin, Calls, Asserts)}


def as_answer(tests: CodeTests) -> str:
    """Tests as the `answer` of a task of kind "code"."""
    return json.dumps({type(tests).__name__.lower(): asdict(tests)})


def tests_of(answer: str) -> CodeTests:
    """Tests from the `answer` of a task of kind "code". ValueError where there are none."""
    try:
        ((form, fields),) = json.loads(answer).items()
        return FORMS[form](**fields)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"expected the answer of a code task, an object {{FORM: ...}} with "
            f"{', '.join(FORMS)}: {error}"
        ) from None


def code_problem(row: Row) -> tuple[str, CodeTests] | None:
    """The question and the tests of a row, by the fields that it has; None where it is no
    programming problem.

    ValueError, in a few words, where it is one that cannot be graded."""
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
                raise ValueError(f"tests that cannot be read ({type(error).__name__})") from error
            if not isinstance(tests, Asserts) and not tests.cases:
                raise ValueError("no tests")
            if isinstance(tests, Stdin) and not all(
                isinstance(side, str) for case in tests.cases for side in case
            ):
                raise ValueError("tests whose input or output is no text")
            return question, tests
    return None


def _human_eval(row: Row) -> tuple[str, CodeTests]:
    prompt, entry_point = row["prompt"], row["entry_point"]
    tests = f"{row['test']}\n\ncheck({entry_point})\n"
    question = (
        "Complete this function, and give the whole of it in a ```python "
        f"block.\n\n```python\n{prompt}```"
    )
    return question, Asserts(
        tests, sorted({entry_point, *(free_names(tests) - defined_names(prompt))}), prompt
    )


def _mbpp(row: Row) -> tuple[str, CodeTests]:
    asserts = "\n".join(row["test_list"])
    question = (
        f"{row.get('text') or row['prompt']}\nYour code should pass these "
        f"tests:\n\n{asserts}\n\nGive it in a ```python block."
    )
    tests = f"{row.get('test_setup_code') or ''}\n{asserts}\n"
    loaded, free = _loaded(ast.parse(tests)), free_names(tests)
    # A program may define what is called as something built in, such as `sum`; only the reference
    # tells.
    names = free | loaded & defined_names(row.get("code") or "")
    modules = names & sys.stdlib_module_names
    imports = [
        *(row.get("test_imports") or ()),
        *(f"import {module}" for module in sorted(modules)),
    ]
    return question, Asserts(tests, sorted(names - modules), imports="\n".join(imports))


def _live_code_bench(row: Row) -> tuple[str, CodeTests]:
    given = [
        *json.loads(row["public_test_cases"]),
        *_private(row.get("private_test_cases") or "[]"),
    ]
    question, starter = row["question_content"], row.get("starter_code") or ""
    if function := json.loads(row.get("metadata") or "{}").get("func_name"):
        # Lines as that checker has them: JSON may hold other separators.
        lines = [filter(str.strip, case["input"].split("\n")) for case in given]
        cases = [
            (tuple(map(json.loads, each)), json.loads(case["output"]))
            for each, case in zip(lines, given, strict=True)
        ]
        return _ask(question, starter), Calls(function, cases, is_exact=True)
    return _ask(question, starter), Stdin(
        [(case["input"], case["output"]) for case in given], is_exact=True
    )


def _private(tests: str) -> list[Any]:
    """Private tests are JSON, or JSON as a pickled string, compressed. The one string is read off;
    nothing is unpickled."""
    if tests.lstrip().startswith("["):
        return json.loads(tests)
    pickled = zlib.decompress(base64.b64decode(tests))
    (text,) = (
        argument
        for operation, argument, _ in pickletools.genops(pickled)
        if "UNICODE" in operation.name
    )
    return json.loads(str(text))


def _apps(row: Row) -> tuple[str, CodeTests]:
    given = json.loads(row["input_output"] or "{}")
    question = _ask(row["question"], row.get("starter_code") or "")
    inputs, outputs = given.get("inputs", []), given.get("outputs", [])
    if function := given.get("fn_name"):
        # Nearly all rows wrap each result in a list.
        if all(isinstance(output, list) and len(output) == 1 for output in outputs):
            outputs = [output[0] for output in outputs]
        return question, Calls(function, list(zip(inputs, outputs, strict=True)))
    lines = [
        ["\n".join(side) if isinstance(side, list) else side for side in case]
        for case in zip(inputs, outputs, strict=True)
    ]
    return question, Stdin([(case[0], case[1]) for case in lines])


def _ask(question: str, starter: str) -> str:
    if starter:
        return (
            f"{question}\n\nComplete this code, and give the whole of it in a ```python "
            f"block.\n\n```python\n{starter}\n```"
        )
    return (
        f"{question}\n\nGive a Python program that reads standard input and writes standard "
        "output, in a ```python block."
    )


_READERS: Mapping[tuple[str, ...], Callable[[Row], tuple[str, CodeTests]]] = {
    ("prompt", "test", "entry_point"): _human_eval,
    ("test_list",): _mbpp,
    ("question_content", "public_test_cases"): _live_code_bench,
    ("question", "input_output"): _apps,
}
"""Fields by which a format is known."""


def free_names(code: str) -> set[str]:
    """Names that code uses and that neither it nor Python defines."""
    tree = ast.parse(code)
    bound = {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return _loaded(tree) - bound - _declared(ast.walk(tree)) - set(dir(builtins))


def defined_names(code: str) -> set[str]:
    """Names that a module of this code has."""
    tree = ast.parse(code)
    targets = (
        target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets
    )
    return _declared(tree.body) | {target.id for target in targets if isinstance(target, ast.Name)}


def _loaded(tree: ast.AST) -> set[str]:
    return {
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _declared(nodes: Any) -> set[str]:
    names = set[str]()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return names
