"""One question, several answers: the workflow of the paper's mathematics experiments."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from areal_jax.errors import NotGraded, first_error
from areal_jax.protocols import Generate, Grader, Tokenizer
from areal_jax.records import RewardResult, Sample, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.workflows.conversation import Call, make_samples

T = TypeVar("T")


class GradingFailed(NotGraded):
    """A reward call failed, which says nothing of the answer."""


async def grade_answer(task: Task, grader: Grader, answer: str) -> RewardResult:
    """The grade on an answer. GradingFailed where there is none."""
    grade = await grader(task, answer)
    if grade.failed:
        raise GradingFailed(grade.detail)
    return grade


async def side_by_side(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What each returns. An error cancels the others, except NotGraded: whether one of them is
    graded is still to be known."""

    async def kept(each: Coroutine[Any, Any, T]) -> T | NotGraded:
        try:
            return await each
        except Exception as error:
            if isinstance(failure := first_error(error), NotGraded):
                return failure
            raise

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(kept(each)) for each in work]
    found = list[T]()
    for task in tasks:
        if isinstance(result := task.result(), NotGraded):
            raise result
        found.append(result)
    return found


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Draw `samples_per_group` answers to a task and grader them all at the same time.

    An answer cut at the token budget is graded like any other: its stop_reason says that it was
    cut."""

    tokenizer: Tokenizer
    samples_per_group: int
    rewards: RewardConfig

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        prompt = self.tokenizer.render(task.prompt)
        calls = [
            Call(prompt, completion)
            for completion in await generate(prompt, self.samples_per_group)
        ]
        return tuple(await side_by_side(self._sample(task, grader, call) for call in calls))

    async def _sample(self, task: Task, grader: Grader, call: Call) -> Sample:
        grade = await grade_answer(task, grader, self.tokenizer.decode(call.completion.tokens))
        reward = grade.to_reward(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer)
        (sample,) = make_samples([call], [reward], grade.kind)
        return sample
