from __future__ import annotations

import time

import pytest

from areal_jax.data.code_tasks import Asserts
from areal_jax.rewards.code_grader import (
    continues,
    extract_program,
    is_same_output,
    uses_undefined_names,
)

PROMPT = 'def f(x):\n    """Doubles."""\n'


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\nbetter:\n```py\nx = 2\n```", "x = 2\n"),
        ("```Python3\nx = 1\n```\n```\n1\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\nls\n```", None),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        # A block that was cut off is none; the one before it counts.
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 1\n"),
        ("```python\nx = 1", None),
        ("```python\n```", None),
        ("```python\nx = '`'\n```", "x = '`'\n"),
        # Without any block the whole text, if it is Python that does something.
        ("print(1)", "print(1)"),
        ("import sys\nx = 1", "import sys\nx = 1"),
        ("hello", None),
        ("I cannot do it.", None),
        ("", None),
        ("x" + "(" * 10_000, None),
        ("print(1)\0", None),
    ],
)
def test_the_program_is_in_the_last_closed_block(text: str, program: str | None) -> None:
    assert extract_program(text) == program


def test_bare_text_continues_the_prompt() -> None:
    assert extract_program("    return 2 * x\n", PROMPT) == "    return 2 * x\n"
    assert extract_program("I cannot.", PROMPT) is None
    assert extract_program("", PROMPT) is None


@pytest.mark.parametrize(
    ("program", "on"),
    [
        ("    return 2 * x", True),
        ("def f(x):\n    return 1", False),
        ("  def f(x): ...", False),
        ("def ff(x): ...", True),
    ],
)
def test_program_continues_the_prompt_unless_it_repeats_it(program: str, on: bool) -> None:
    assert continues(Asserts("", ["f"], PROMPT), program) is on
    assert not continues(Asserts("", ["f"]), program)


@pytest.mark.parametrize(
    "text",
    [
        "```" * 300_000,
        "```python\n" * 100_000,
        "`" * 1_000_000,
        "\n" * 1_000_000,
        "-" * 500_000 + "1",
    ],
)
def test_programs_are_searched_in_linear_time(text: str) -> None:
    began_s = time.process_time()
    extract_program(text)
    extract_program(text + "\n```python\nx = 1\n```\n")
    assert time.process_time() - began_s < 5.0


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1 2\n", "1 2", True),
        (" 1 2 \n\n\n", "1 2\n", True),
        ("1  2", "1 2", True),
        ("1\n2", "1 2", False),
        ("1 2", "1 2 3", False),
        ("YES", "Yes", False),
        ("", "", True),
        ("", "1", False),
        ("0.3333333", "0.333333333", True),
        ("0.33", "0.333333333", False),
        ("1.5", "1.50", True),
        ("1e-9", "0.0", True),
        # Where an integer is expected its digits must come.
        ("2.0", "2", False),
        ("1000001", "1000000", False),
        ("nan", "0.5", False),
        ("inf", "inf", True),
        ("1" * 5000, "1" * 5000, True),
        ("9" * 5000, "0.5", False),
    ],
)
def test_outputs_are_the_same_but_for_spaces_and_how_fractions_are_written(
    found: str, expected: str, same: bool
) -> None:
    assert is_same_output(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        ("1.50 2", "1.5 2.0", True),
        ("2.0", "2", True),
        ("1e3", "1000", True),
        ("0.3333333", "0.333333333", False),
        ("50000000000000001", "50000000000000000", False),
        ("YES", "yes", False),
        ("1 a", "1.0 a", False),
        ("1\u20282", "1\n2", False),
        ("1\n\n2", "1\n2", False),
        (" 1 \n 2\n\n", "1\n2", True),
        ("nan", "NaN", False),
        ("sNaN", "1", False),
        ("1 2", "1 2 3", False),
        ("1e999999999", "1e-999999999", False),
        ("9" * 100_000, "9" * 99_999 + "8", False),
    ],
)
def test_exact_outputs_are_lines_or_decimals(found: str, expected: str, same: bool) -> None:
    assert is_same_output(found, expected, is_exact=True) is same


@pytest.mark.parametrize(
    ("program", "uses"),
    [
        ("print(int(input()))", False),
        (
            (
                "import sys\nfrom math import sqrt as root\ndef f(x):\n    return root(x) + "
                "sys.maxsize\nprint(f(4), __file__)"
            ),
            False,
        ),
        ("print(sqrt(4))", True),
        ("def f(x):\n    return sqrt(x)", True),
        ("def f(sqrt):\n    return sqrt", False),
        # Another function's local variable is no definition.
        ("def g():\n    sqrt = 1\ndef f(x):\n    return sqrt(x)", True),
        ("class A:\n    def f(self, x: List[int]): pass", True),
        ("def g():\n    global n\n    n = 1\ndef f():\n    return n", False),
        ("from math import *\nprint(sqrt(4))", True),
        ("eval('sqrt(4)')", True),
        ("[x for x in range(3)]\nlambda y: y", False),
        ("def f(", False),
        ("(" * 5000 + ")" * 5000, False),
    ],
)
def test_names_that_a_program_lacks_are_found(program: str, uses: bool) -> None:
    assert uses_undefined_names(program) is uses
