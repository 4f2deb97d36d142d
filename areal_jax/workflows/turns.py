"""Several turns: what the policy says is answered, by the user or by tools, until it has had its
say.

What differs between workflows of several turns is who answers, a `Reply`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from areal_jax.data.tool_calls import InvalidToolCall, ToolCall
from areal_jax.errors import NotGraded
from areal_jax.protocols import Generate, Grader, Tokenizer, Tools
from areal_jax.records import Completion, Message, RewardResult, Sample, StopReason, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.workflows.config import CallFormat
from areal_jax.workflows.conversation import Call, build_next_prompt, make_samples
from areal_jax.workflows.single_turn import grade_answer, side_by_side
from areal_jax.workflows.tool_use import announcement, parse_calls


class ToolFailed(NotGraded):
    """A tool gave no result through no fault of the call."""


class Answered(NamedTuple):
    """What comes of a turn."""

    messages: tuple[Message, ...] = ()
    """What the policy is told next; none where it has had its say."""
    grade: RewardResult | None = None
    """On the turn, where it is known."""


@runtime_checkable
class Reply(Protocol):
    """Who answers a turn that is not the last. Deterministic, or what was sampled after it is
    sampled again after a crash."""

    async def __call__(self, task: Task, said: str, grader: Grader) -> Answered: ...


@dataclass(frozen=True, slots=True)
class Turns:
    """Draw `num_samples` conversations on a task, each going on by itself, and grader what is said
    last in each.

    A conversation ends where nobody answers, after `max_turns`, or before a prompt of more than
    `max_prompt_tokens`; that one counts as truncated. A turn cut at the budget of new tokens is
    answered like any other."""

    tokenizer: Tokenizer
    num_samples: int
    rewards: RewardConfig
    reply: Reply
    max_turns: int
    max_prompt_tokens: int
    turn_discount: float = 1.0
    """Share of the reward above a wrong answer's that is left with every further turn."""
    announcement: str = ""
    """What the system tells the policy before all else."""

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        prompt = self.tokenizer.render(announced(task.prompt, self.announcement))
        first = await generate(prompt, self.num_samples)
        return tuple(
            await side_by_side(
                self._converse(task, Call(prompt, each), generate, grader) for each in first
            )
        )

    async def _converse(self, task: Task, call: Call, generate: Generate, grader: Grader) -> Sample:
        calls, answered, stop_reason = [call], Answered(), None
        while len(calls) < self.max_turns:
            answered = await self.reply(task, self._said(calls[-1].completion), grader)
            if not answered.messages:
                break
            prompt = build_next_prompt(self.tokenizer, calls[-1], answered.messages)
            if len(prompt) > self.max_prompt_tokens:
                stop_reason: StopReason | None = "length"
                break
            (completion,) = await generate(prompt, 1)
            calls.append(Call(prompt, completion))
            answered = Answered()
        grade = answered.grade or await grade_answer(task, grader, self._said(calls[-1].completion))
        (sample,) = make_samples(
            calls,
            [self._reward(grade, len(calls))] * len(calls),
            grade.kind,
            stop_reason=stop_reason,
        )
        return sample

    def _said(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.tokens)

    def _reward(self, grade: RewardResult, num_turns: int) -> float:
        """wrong + turn_discount^(turns - 1) (reward - wrong): no wrong answer gains by more turns,
        whatever it is worth."""
        wrong = self.rewards.wrong
        reward = grade.to_reward(self.rewards.correct, wrong, self.rewards.no_answer)
        if self.turn_discount == 1:
            return reward
        return wrong + self.turn_discount ** (num_turns - 1) * (reward - wrong)


def announced(prompt: tuple[Message, ...], announcement: str) -> tuple[Message, ...]:
    """The prompt with something more for the system to say."""
    if not announcement:
        return prompt
    first, rest = (
        (prompt[0].content + "\n\n", prompt[1:]) if prompt[0].role == "system" else ("", prompt)
    )
    return (Message("system", first + announcement), *rest)


@dataclass(frozen=True, slots=True)
class Feedback:
    """A user who says that an answer is wrong."""

    text: str

    async def __call__(self, task: Task, said: str, grader: Grader) -> Answered:
        grade = await grade_answer(task, grader, said)
        return Answered(() if grade.kind == "correct" else (Message("user", self.text),), grade)


@dataclass(frozen=True, slots=True)
class ToolReply:
    """Tools that do what they are called for, and say why where they cannot."""

    tools: Tools
    names: tuple[str, ...]
    call_format: CallFormat

    @property
    def announcement(self) -> str:
        """What a policy must know to call them."""
        return announcement(self.call_format, self.names)

    async def __call__(self, task: Task, said: str, grader: Grader) -> Answered:
        calls = parse_calls(self.call_format, said, self.names)
        async with asyncio.TaskGroup() as working:
            results = [working.create_task(self._result(call)) for call in calls]
        return Answered(
            tuple(Message(self.call_format.result_role, result.result()) for result in results)
        )

    async def _result(self, call: ToolCall | InvalidToolCall) -> str:
        if isinstance(call, InvalidToolCall):
            return f"Error: {call.reason}"
        (argument,) = call.arguments.values()
        result = await self.tools(call.name, argument)
        if result.kind == "infrastructure":
            raise ToolFailed(f"{call.name}: {result.text}")
        return result.text
