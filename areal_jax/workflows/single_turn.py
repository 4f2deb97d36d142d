"""One question, several answers: the workflow of the paper's mathematics experiments."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from areal_jax.records import NO_VERSION, Completion, Generate, Judge, Sample, Task, Tokenizer, Verdict
from areal_jax.rewards.config import RewardConfig


class JudgeFailed(RuntimeError):
    """No verdict on an answer through no fault of its own: the group must not be trained on."""


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Draw `samples_per_group` answers to a task and judge them all at the same time.

    An answer cut at the token budget is judged like any other: its stop_reason says that it was cut."""

    tokenizer: Tokenizer
    samples_per_group: int
    rewards: RewardConfig

    async def __call__(self, task: Task, generate: Generate, judge: Judge) -> tuple[Sample, ...]:
        prompt = self.tokenizer.render(task.prompt)
        completions = await generate(prompt, self.samples_per_group)
        # A judge that fails cancels the others.
        async with asyncio.TaskGroup() as judging:
            verdicts = [judging.create_task(self._judged(task, judge, completion)) for completion in completions]
        return tuple(
            self._sample(prompt, completion, verdict.result())
            for completion, verdict in zip(completions, verdicts, strict=True)
        )

    async def _judged(self, task: Task, judge: Judge, completion: Completion) -> Verdict:
        verdict = await judge(task, self.tokenizer.decode(completion.tokens))
        if verdict.kind == "infrastructure":
            raise JudgeFailed(verdict.detail)
        return verdict

    def _sample(self, prompt: Int32[np.ndarray, "P"], completion: Completion, verdict: Verdict) -> Sample:
        """Prompt and answer in one, the answer's tokens trained on, its stop token among them."""
        after_prompt = len(prompt)
        return Sample(
            tokens=np.concatenate([prompt, completion.tokens]),
            loss_mask=np.arange(after_prompt + len(completion.tokens)) >= after_prompt,
            behave_logp=np.concatenate([np.zeros(after_prompt, np.float32), completion.logp]),
            versions=np.concatenate([np.full(after_prompt, NO_VERSION, np.int32), completion.versions]),
            reward=verdict.worth(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer),
            verdict=verdict.kind,
            stop_reason=completion.stop_reason,
        )
