"""Trial of the reward before training, so that a reward that fails is refused at the start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice

from areal_jax.errors import ConfigError
from areal_jax.protocols import Grader
from areal_jax.records import RewardResult, Task
from areal_jax.rewards.config import RewardConfig

NUM_ROWS = 8
"""Number of rows whose reference answers are graded."""

NUM_SEARCHED = 64
"""Number of rows that are searched for tasks of each kind."""


async def probe(
    grade: Grader, tasks: Sequence[Task], config: RewardConfig, *, must_grade: bool = True
) -> list[str]:
    """Grade an empty answer and reference answers to the first rows.

    A function is called for one row of each kind. Verifiers of mathematics must grade reference
    answers of several rows.

    Args:
        must_grade: Whether the run depends on the verifier.

    Returns:
        Warnings.

    Raises:
        ConfigError: A call fails, or no reference answer is correct.
    """
    rows = list(islice(tasks, NUM_SEARCHED))
    first = list({task.kind: task for task in reversed(rows)}.values())
    is_verified = not (config.function or config.judge or config.model)
    graded = first if not is_verified else [task for task in rows if task.kind == "math"][:NUM_ROWS]
    asked = [(task, "empty", "") for task in first]
    asked += [
        (task, "reference", text) for task in graded for text in _reference_texts(task, config)
    ]
    grades = await asyncio.gather(*(grade(task, text) for task, _, text in asked))
    for (task, which, text), result in zip(asked, grades, strict=True):
        if result.failed:
            raise ConfigError(_failure(task, which, text, result, config))
    found = [(task, which, result) for (task, which, _), result in zip(asked, grades, strict=True)]
    return (
        _warnings_of_function(found, config)
        if not is_verified
        else _warnings_of_verifier(found, config, must_grade)
    )


def _reference_texts(task: Task, config: RewardConfig) -> list[str]:
    """Return texts with the row's reference answer, as a policy might write them; none for
    programs.
    """
    if task.kind != "math":
        return []
    boxed = f"\\boxed{{{task.answer}}}"
    return [boxed] if config.function is None else [task.answer, boxed]


def _failure(task: Task, which: str, text: str, result: RewardResult, config: RewardConfig) -> str:
    who = f"the verifier of kind {task.kind}"
    if config.function:
        who = f"rewards.function={config.function}"
    if config.judge is not None:
        who = "rewards.judge" if config.judge.weight == 1 else f"rewards.judge, or {who},"
    if config.model is not None:
        who = f"rewards.model, or {who},"
    answer = "an empty answer" if which == "empty" else f"the reference answer {text[:100]!r}"
    hint = "; raise rewards.timeout_s if it needs longer" if result.kind == "timeout" else ""
    reported = f"{who} failed on {answer} to task {task.id}: {result.detail}{hint}"
    return f"{reported}\n{result.trace}" if result.trace else reported


def _warnings_of_function(
    found: Sequence[tuple[Task, str, RewardResult]], config: RewardConfig
) -> list[str]:
    empty = {task.kind: result for task, which, result in found if which == "empty"}
    references = [(task, result) for task, which, result in found if which == "reference"]
    if not references or any(result.score != empty[task.kind].score for task, result in references):
        return []
    task, result = references[0]
    name = f"rewards.function={config.function}"
    if scored := config.judge or config.model:
        name = "rewards.judge" if scored is config.judge else "rewards.model"
    return [
        f"{name} returns {result.score} for an empty answer to task "
        f"{task.id} and the same for its reference answer {task.answer[:100]!r}, plain and in "
        "\\boxed{}; if it compares answers, check what form it expects"
    ]


def _warnings_of_verifier(
    found: Sequence[tuple[Task, str, RewardResult]], config: RewardConfig, must_grade: bool
) -> list[str]:
    references = [(task, result) for task, which, result in found if which == "reference"]
    if config.form is not None:  # for which no reference answer can be written here
        return []
    bad = [(task, result) for task, result in references if result.kind != "correct"]
    reported = "; ".join(
        f"task {task.id}: {task.answer[:100]!r} is {result.kind}" for task, result in bad
    )
    if bad and len(bad) == len(references) and must_grade:
        raise ConfigError(
            f"none of the reference answers of {len(bad)} rows is graded correct in \\boxed{{}} "
            f"({reported}); expected answers that the verifier can read: set the source's "
            "answer_field, or rewards.function to a function of yours"
        )
    return (
        [
            (
                f"{len(bad)} of {len(references)} reference answers are not graded correct in "
                f"\\boxed{{}}: {reported}"
            )
        ]
        if bad
        else []
    )
