"""Workflows of the user's own: a method that holds one conversation."""

from __future__ import annotations

from dataclasses import dataclass

from areal_jax.protocols import Generate, Grader, Tokenizer
from areal_jax.records import Message, RewardResult, Sample, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.functions import graded
from areal_jax.workflows.config import CustomWorkflow
from areal_jax.workflows.conversation import Call, build_next_prompt, make_samples
from areal_jax.workflows.single_turn import gather_graded, grade_answer


class PromptTooLong(Exception):
    """The next prompt exceeds engine.max_prompt_tokens; the conversation ends, truncated."""


class Chat:
    """One conversation of the policy about a task; `text` is its last answer."""

    def __init__(
        self,
        task: Task,
        first: Call,
        *,
        tokenizer: Tokenizer,
        generate: Generate,
        grader: Grader,
        max_prompt_tokens: int,
    ) -> None:
        self.task, self.calls = task, [first]
        self._tokenizer, self._generate, self._grader = tokenizer, generate, grader
        self._max_prompt_tokens = max_prompt_tokens
        self._result: RewardResult | None = None

    @property
    def text(self) -> str:
        """The policy's last answer."""
        return self._tokenizer.decode(self.calls[-1].completion.tokens)

    async def reply(self, message: str, role: str = "user") -> str:
        """Reply to the last answer with a message; the policy's next answer.

        A conversation that would exceed engine.max_prompt_tokens ends here, as truncated.
        """
        turn = [Message(role, message)]
        prompt = build_next_prompt(self._tokenizer, self.calls[-1], turn)
        if len(prompt) > self._max_prompt_tokens:
            raise PromptTooLong
        (completion,) = await self._generate(prompt, 1)
        self.calls.append(Call(prompt, completion))
        self._result = None
        return self.text

    async def grade(self) -> RewardResult:
        """The grade of the last answer, by the experiment's rewards."""
        if self._result is None:
            self._result = await grade_answer(self.task, self._grader, self.text)
        return self._result


@dataclass(frozen=True, slots=True)
class Custom:
    """Samples `num_samples` conversations on a task through the method of a CustomWorkflow.

    All answers of a conversation are one sample, with one reward.
    """

    config: CustomWorkflow
    tokenizer: Tokenizer
    num_samples: int
    rewards: RewardConfig
    max_prompt_tokens: int

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        prompt = self.tokenizer.render(task.prompt)
        chats = [
            Chat(
                task,
                Call(prompt, each),
                tokenizer=self.tokenizer,
                generate=generate,
                grader=grader,
                max_prompt_tokens=self.max_prompt_tokens,
            )
            for each in await generate(prompt, self.num_samples)
        ]
        return tuple(await gather_graded(map(self._converse, chats)))

    async def _converse(self, chat: Chat) -> Sample:
        is_truncated, found = False, None
        try:
            found = await self.config.run(chat.task, chat)
        except PromptTooLong:
            is_truncated = True
        if found is None:
            result = await chat.grade()
        else:
            kind, score, components = graded(found, self.rewards.scale)
            result = RewardResult(kind, score=score, components=components)
        reward = result.to_reward(self.rewards.correct, self.rewards.wrong, self.rewards.no_answer)
        (sample,) = make_samples(
            chat.calls,
            [reward] * len(chat.calls),
            result,
            stop_reason="length" if is_truncated else None,
        )
        return sample
