"""Single-turn workflow: one prompt, several graded answers (AReaL's mathematics experiments)."""

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
    """A reward call failed; the answer is not graded."""


async def grade_answer(task: Task, grader: Grader, answer: str) -> RewardResult:
    """Grade an answer.

    Raises:
        GradingFailed: the reward call failed.
    """
    result = await grader(task, answer)
    if result.failed:
        raise GradingFailed(result.detail)
    return result


async def gather_graded(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results.

    An error cancels the others, except NotGraded: the others run on, so that the controller learns
    whether any of them is graded.
    """

    async def catch_not_graded(each: Coroutine[Any, Any, T]) -> T | NotGraded:
        try:
            return await each
        except Exception as error:  # re-raised, unless NotGraded, also inside a group
            if isinstance(failure := first_error(error), NotGraded):
                return failure
            raise

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(catch_not_graded(each)) for each in work]
    found = list[T]()
    for task in tasks:
        if isinstance(result := task.result(), NotGraded):
            raise result
        found.append(result)
    return found


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Samples `samples_per_group` answers to a task and grades them concurrently.

    Truncated answers are graded like any other; their stop_reason is `length`.
    """

    tokenizer: Tokenizer
    samples_per_group: int
    rewards: RewardConfig

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        prompt = self.tokenizer.render(task.prompt)
        calls = [
            Call(prompt, completion)
            for completion in await generate(prompt, self.samples_per_group)
        ]
        return tuple(await gather_graded(self._sample(task, grader, call) for call in calls))

    async def _sample(self, task: Task, grader: Grader, call: Call) -> Sample:
        grade = await grade_answer(task, grader, self.tokenizer.decode(call.completion.tokens))
        reward = grade.to_reward(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer)
        (sample,) = make_samples([call], [reward], grade)
        return sample
