"""One question, several answers: the workflow of the paper's mathematics experiments."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from areal_jax.records import Generate, Judge, Sample, Task, Tokenizer, Verdict
from areal_jax.rewards.config import RewardConfig
from areal_jax.workflows.conversation import Call, samples_of


class JudgeFailed(RuntimeError):
    """No verdict on an answer through no fault of its own: the group must not be trained on."""


async def judged(task: Task, judge: Judge, answer: str) -> Verdict:
    """The verdict on an answer. JudgeFailed where there is none."""
    verdict = await judge(task, answer)
    if verdict.kind == "infrastructure":
        raise JudgeFailed(verdict.detail)
    return verdict


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Draw `samples_per_group` answers to a task and judge them all at the same time.

    An answer cut at the token budget is judged like any other: its stop_reason says that it was cut."""

    tokenizer: Tokenizer
    samples_per_group: int
    rewards: RewardConfig

    async def __call__(self, task: Task, generate: Generate, judge: Judge) -> tuple[Sample, ...]:
        prompt = self.tokenizer.render(task.prompt)
        calls = [Call(prompt, completion) for completion in await generate(prompt, self.samples_per_group)]
        # A judge that fails cancels the others.
        async with asyncio.TaskGroup() as judging:
            samples = [judging.create_task(self._sample(task, judge, call)) for call in calls]
        return tuple(sample.result() for sample in samples)

    async def _sample(self, task: Task, judge: Judge, call: Call) -> Sample:
        verdict = await judged(task, judge, self.tokenizer.decode(call.completion.tokens))
        reward = verdict.worth(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer)
        (sample,) = samples_of([call], [reward], verdict.kind)
        return sample
