"""Right and wrong answers to tasks, with which the path from an answer to its reward is tried."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from areal_jax.data.code_tasks import read_solution
from areal_jax.data.config import Exercises, Files, Hub, Repositories, TaskSource
from areal_jax.data.exercises import Demonstration
from areal_jax.data.repositories import make_repository
from areal_jax.data.sources import generate_exercises, read_rows
from areal_jax.records import PUZZLE, Message, Task

MAX_NUMBERS = 5
"""Numbers of a countdown task that is solved by trying everything."""


class ReferenceAnswer(NamedTuple):
    """A right and a wrong answer to a task."""

    right: str
    """An expression or a word for mathematics and countdown, a program or a patch for code."""
    wrong: str
    """The same form; empty if the source has no wrong program or patch."""
    demonstrations: tuple[Demonstration, ...] = ()
    """Right and wrong turns, where the source demonstrates them."""


def find_references(
    source: TaskSource, tasks: Sequence[Task], chosen: Sequence[int]
) -> list[ReferenceAnswer | None]:
    """Find references of tasks; None if the source has none.

    Args:
        source: source of the tasks.
        tasks: its tasks.
        chosen: indices of the tasks that need a reference.
    """
    picked = [tasks[index] for index in chosen]
    if isinstance(source, Exercises):
        exercises = generate_exercises(source)
        demonstrated = [
            (exercises[index].correct[0], exercises[index].incorrect[0]) for index in chosen
        ]
        return [_reference(task, _program(turns[0]), _program(turns[1]), turns)
                for task, turns in zip(picked, demonstrated, strict=True)]  # fmt: skip
    if isinstance(source, Repositories):
        repositories = (make_repository(index, source.split, source.seed) for index in chosen)
        return [ReferenceAnswer(each.patch, "") for each in repositories]
    programs = _read_programs(source) if any(task.kind == "code" for task in picked) else {}
    return [_reference(task, programs.get(task.id, "")) for task in picked]


def _reference(
    task: Task, program: str, wrong: str = "", demonstrations: tuple[Demonstration, ...] = ()
) -> ReferenceAnswer | None:
    match task.kind:
        case "environment":
            return None  # right actions are the environment's to know
        case "code":
            return ReferenceAnswer(program, wrong, demonstrations) if program else None
        case "countdown":
            given = json.loads(task.answer)
            solution = solve_countdown(given["numbers"], given["target"])
            near = solve_countdown(given["numbers"], given["target"], is_wrong=True)
            return (solution and near and ReferenceAnswer(solution, near, demonstrations)) or None
        case _:
            answer = task.answer
            if task.kind == PUZZLE and not (answer := json.loads(answer)["answer"]):
                return None  # some generators give none
            return ReferenceAnswer(answer, change_answer(answer), demonstrations)


def change_answer(answer: str) -> str:
    """Return another answer than this one: the next integer, or an expression plus 1."""
    return str(int(answer) + 1) if answer.lstrip("-").isdecimal() else f"{answer}+1"


def solve_countdown(numbers: Sequence[int], target: int, *, is_wrong: bool = False) -> str | None:
    """Find an expression of all numbers, each used once, with the target as its value.

    Args:
        numbers: the numbers.
        target: the value.
        is_wrong: find an expression with another value instead.

    Returns:
        The expression, or None if there is none, or more than MAX_NUMBERS numbers.
    """
    if len(numbers) > MAX_NUMBERS:
        return None
    terms = [(str(number), Fraction(number)) for number in numbers]
    found = (text for text, value in _combinations(terms) if (value == target) != is_wrong)
    return next(found, None)


def _combinations(terms: Sequence[tuple[str, Fraction]]) -> Iterator[tuple[str, Fraction]]:
    """Yield every expression of all terms, with its value."""
    if len(terms) == 1:
        yield terms[0]
        return
    for i, (left, x) in enumerate(terms):
        for j, (right, y) in enumerate(terms):
            if i == j:
                continue
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            combined = [(f"({left}-{right})", x - y)]
            if i < j:
                combined += [(f"({left}+{right})", x + y), (f"({left}*{right})", x * y)]
            if y:
                combined.append((f"({left}/{right})", x / y))
            for term in combined:
                yield from _combinations([term, *rest])


def _read_programs(source: TaskSource) -> Mapping[str, str]:
    """Read the reference programs of rows, by the id of their task."""
    if not isinstance(source, Files | Hub):
        return {}
    rows, _ = read_rows(source, lambda place, row: (place, read_solution(row)), "a task", "rows")
    return {place: program for place, program in rows if program}


def _program(turns: Sequence[Message]) -> str:
    """The program of a demonstration: its last turn without the fence."""
    return turns[-1].content.removeprefix("```python\n").removesuffix("\n```")
