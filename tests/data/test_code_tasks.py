from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path

import pytest

from areal_jax.data.code_tasks import (
    Asserts,
    CodeTests,
    FunctionCalls,
    Stdin,
    defined_names,
    format_tests,
    free_names,
    parse_tests,
    read_code_problem,
)
from areal_jax.data.config import Files, PromptConfig
from areal_jax.data.sources import load_tasks

HUMAN_EVAL = {
    "task_id": "HumanEval/x",
    "prompt": 'import math\n\ndef helper(x):\n    return x\n\ndef f(x):\n    """Doubles."""\n',
    "test": (
        "def check(candidate):\n    for x in range(3):\n        assert helper(candidate(x)) "
        "== f(x) == math.floor(2 * x)\n"
    ),
    "entry_point": "f",
}
MBPP = {
    "text": "Write a function to add.",
    "code": "import sys\nclass Pair: pass\ndef sum(a, b):\n    return a + b",
    "test_setup_code": "p = Pair()",
    "test_list": ["assert sum(1, 2) == 3", "assert sys.maxsize and max(1, 2)"],
}
STDIN_CASES = [{"input": "1\n", "output": "2\n", "testtype": "stdin"}]
LIVE = {
    "question_content": "Double it.",
    "starter_code": "",
    "metadata": "{}",
    "public_test_cases": json.dumps(STDIN_CASES),
}
LIVE_CALLS = {
    "question_content": "Add.",
    "starter_code": "class Solution:\n    def add(self, a, b):\n        ",
    "metadata": '{"func_name": "add"}',
    "public_test_cases": json.dumps(
        [{"input": "[1]\n2", "output": "[1, 2]", "testtype": "functional"}]
    ),
}


def pickled_text(text: str) -> bytes:
    """Pickle a string with protocol 4: PROTO 4, FRAME, BINUNICODE, MEMOIZE, STOP."""
    inner = b"X" + struct.pack("<I", len(text.encode())) + text.encode() + b"\x94."
    return b"\x80\x04\x95" + struct.pack("<Q", len(inner)) + inner


PRIVATE = base64.b64encode(
    zlib.compress(pickled_text(json.dumps([{"input": "3\n", "output": "6\n"}])))
).decode()


@pytest.mark.parametrize(
    ("row", "tests"),
    [
        (HUMAN_EVAL, Asserts(HUMAN_EVAL["test"] + "\n\ncheck(f)\n", ["f"], HUMAN_EVAL["prompt"])),
        # The program defines `sum`, as the reference does; `max` is a builtin; `sys` is imported.
        (
            MBPP,
            Asserts(
                "p = Pair()\n" + "\n".join(MBPP["test_list"]) + "\n",
                ["Pair", "sum"],
                imports="import sys",
            ),
        ),
        (LIVE, Stdin([("1\n", "2\n")], is_exact=True)),
        (
            {**LIVE, "private_test_cases": PRIVATE},
            Stdin([("1\n", "2\n"), ("3\n", "6\n")], is_exact=True),
        ),
        (
            {**LIVE, "private_test_cases": '[{"input": "3", "output": "6"}]'},
            Stdin([("1\n", "2\n"), ("3", "6")], is_exact=True),
        ),
        (LIVE_CALLS, FunctionCalls("add", [(([1], 2), [1, 2])], is_exact=True)),
        (
            {
                "question": "Q",
                "input_output": '{"inputs": ["1", ["2", "3"]], "outputs": ["1", ["4"]]}',
            },
            Stdin([("1", "1"), ("2\n3", "4")]),
        ),
        (
            {
                "question": "Q",
                "input_output": '{"fn_name": "f", "inputs": [[1, 2]], "outputs": [[3]]}',
            },
            FunctionCalls("f", [([1, 2], 3)]),
        ),
        ({"question": "What is 1+1?", "answer": "2"}, None),
    ],
)
def test_fields_identify_the_format(row: dict[str, object], tests: CodeTests | None) -> None:
    problem = read_code_problem(row)
    assert (problem and problem[1]) == tests


@pytest.mark.parametrize(
    "row",
    [
        {"question": "Q", "input_output": ""},
        {"question": "Q", "input_output": "nonsense"},
        {"question": "Q", "input_output": "[1,2]"},
        {"question": "Q", "input_output": '{"inputs": [1], "outputs": [2]}'},
        {**LIVE, "public_test_cases": '[{"input": 1, "output": "2"}]'},
        {**LIVE_CALLS, "public_test_cases": '[{"input": 1, "output": "2"}]'},
        {**MBPP, "test_list": ["assert ("]},
        {**LIVE, "public_test_cases": "[]"},
        {**LIVE, "private_test_cases": "nonsense"},
        {
            **LIVE,
            "private_test_cases": base64.b64encode(
                zlib.compress(b"\x80\x04cos\nsystem\nX\x02\x00\x00\x00lsR.")
            ).decode(),
        },
    ],
)
def test_rows_without_readable_tests_are_refused(row: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="tests"):
        read_code_problem(row)


def test_code_rows_become_tasks_with_tests(tmp_path: Path) -> None:
    rows = [
        HUMAN_EVAL,
        MBPP,
        LIVE_CALLS,
        {**LIVE, "public_test_cases": "[]"},
        {"question": "1+1?", "answer": "2"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_tasks(Files(path=str(tmp_path)), PromptConfig(suffix=" Go."))
    assert [task.kind for task in loaded.tasks] == ["code"] * 3 + ["math"]
    assert loaded.kinds == {"code", "math"}
    assert loaded.skipped == {"no tests": ["train.jsonl:4"]}
    for task, row in zip(loaded.tasks[:3], rows, strict=False):
        problem = read_code_problem(row)
        assert problem is not None
        assert json.loads(format_tests(parse_tests(task.answer))) == json.loads(
            format_tests(problem[1])
        )
        assert task.prompt[0].content == problem[0] + " Go."
    # The question shows how the tested function is called, or how it begins.
    assert "assert sum(1, 2) == 3" in loaded.tasks[1].prompt[0].content
    assert "def add" in loaded.tasks[2].prompt[0].content


@pytest.mark.parametrize(
    "answer", ["42", "", "{}", '{"stdin": {}}', '{"riddle": {}}', "[]", "null"]
)
def test_answer_without_tests_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match="expected the answer of a code task"):
        parse_tests(answer)


def test_free_and_defined_names() -> None:
    code = "import a.b\nfrom c import d as e\ndef f(x, *y, **z): return x + y + z + g\n"
    code += "class H: pass\ni = j = [k for k in l]\nprint(i)"
    assert free_names(code) == {"g", "l"}
    assert defined_names(code) == {"a", "e", "f", "H", "i", "j"}
