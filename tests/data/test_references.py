"""Right and wrong answers to tasks of every source."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from areal_jax.data.code_tasks import read_solution
from areal_jax.data.config import Exercises, Files, PromptConfig, Synthetic, TaskSource
from areal_jax.data.references import change_answer, find_references, solve_countdown
from areal_jax.data.sources import load_tasks
from areal_jax.rewards.countdown import grade_answer


@pytest.mark.parametrize(
    ("numbers", "target"),
    [([3, 8, 5], 6), ([2, 7], 14), ([8, 2], 4), ([25, 50, 75, 100], 200), ([1, 5, 5, 5, 5], 126)],
)
def test_countdown_is_solved_and_missed(numbers: list[int], target: int) -> None:
    reference = json.dumps({"numbers": numbers, "target": target})
    right = solve_countdown(numbers, target)
    wrong = solve_countdown(numbers, target, is_wrong=True)
    assert grade_answer(reference, f"\\boxed{{{right}}}")[0] == "correct"
    assert grade_answer(reference, f"\\boxed{{{wrong}}}")[0] == "wrong"
    # Each number once, also where it misses.
    assert wrong is not None
    used = [node.value for node in ast.walk(ast.parse(wrong)) if isinstance(node, ast.Constant)]
    assert sorted(map(str, used)) == sorted(map(str, numbers))


def test_countdown_without_solution_has_none() -> None:
    # 1 and 1 give 0, 1 and 2.
    assert solve_countdown([1, 1], 3) is None
    assert solve_countdown([1] * 6, 6) is None


@pytest.mark.parametrize(
    ("answer", "other"), [("41", "42"), ("-3", "-2"), ("\\frac{1}{2}", "\\frac{1}{2}+1")]
)
def test_a_changed_answer_differs(answer: str, other: str) -> None:
    assert change_answer(answer) == other


@pytest.mark.parametrize(
    ("row", "program"),
    [
        (
            {"prompt": "def f():\n", "canonical_solution": "    return 1\n"},
            "def f():\n    return 1\n",
        ),
        ({"code": "x = 1"}, "x = 1"),
        ({"solutions": '["first", "second"]'}, "first"),
        ({"solutions": "nonsense"}, None),
        ({"question_content": "?"}, None),
    ],
)
def test_reference_programs_of_rows(row: dict[str, str], program: str | None) -> None:
    assert read_solution(row) == program


@pytest.mark.parametrize(
    "source",
    [Synthetic(), Exercises(families=("facts", "programs"))],
    ids=["problems", "exercises"],
)
def test_references_belong_to_their_tasks(source: TaskSource) -> None:
    tasks = load_tasks(source, PromptConfig()).tasks
    references = find_references(source, tasks, [5, 2])
    for index, reference in zip((5, 2), references, strict=True):
        assert reference is not None and reference.right != reference.wrong
        if tasks[index].kind == "math":
            assert reference.right == tasks[index].answer
        for turns in reference.demonstrations[:1]:
            assert reference.right in turns[-1].content


def test_rows_without_reference_program_have_none(tmp_path: Path) -> None:
    cases = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    rows = [
        {"question": "a", "input_output": cases, "solutions": '["print(1)"]'},
        {"question": "b", "input_output": cases},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    source = Files(path=str(path))
    first, second = find_references(source, load_tasks(source, PromptConfig()).tasks, [0, 1])
    assert (first and first.right, second) == ("print(1)", None)
