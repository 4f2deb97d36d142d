"""Multi-turn workflows: the user or tools reply to the policy's turns until its final answer.

Workflows of several turns differ in their `Reply`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from areal_jax.data.code_tasks import Repository, RepositoryTests, parse_tests
from areal_jax.data.repository_files import (
    RepositoryFile,
    RepositoryFiles,
    pack_files,
    read_repository,
)
from areal_jax.data.tool_calls import InvalidToolCall, ToolCall
from areal_jax.errors import NotGraded
from areal_jax.protocols import Generate, Grader, Tokenizer, Tools
from areal_jax.records import Completion, Message, RewardResult, Sample, StopReason, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.tools import WORKSPACE_TOOLS
from areal_jax.rewards.workspace import Conversation, Workspaces
from areal_jax.workflows.config import CallFormat
from areal_jax.workflows.conversation import Call, build_next_prompt, make_samples
from areal_jax.workflows.single_turn import gather_graded, grade_answer
from areal_jax.workflows.tool_use import announcement, parse_calls


class ToolFailed(NotGraded):
    """A tool gave no result through no fault of the call."""


class TurnResult(NamedTuple):
    """Reply to one turn of the policy."""

    messages: tuple[Message, ...] = ()
    """Messages for the policy's next turn; empty: the turn was the final answer."""
    grade: RewardResult | None = None
    """Grade of the turn, if it was graded."""


@runtime_checkable
class Reply(Protocol):
    """Replies to a turn that is not the last.

    It should be deterministic: after a crash, completions that follow another reply are sampled
    again.
    """

    def conversation(self, task: Task) -> AbstractAsyncContextManager[Reply]:
        """Enter a conversation; yields what replies in it."""
        ...

    async def __call__(self, task: Task, text: str, grader: Grader) -> TurnResult: ...
    async def grade(self, task: Task, text: str, grader: Grader) -> RewardResult:
        """Grade a conversation that ends with this turn."""
        ...


@dataclass(frozen=True, slots=True)
class Turns:
    """Samples `num_samples` independent conversations on a task and grades the last turn of each.

    A conversation ends if its reply has no messages, after `max_turns`, or before a prompt of more
    than `max_prompt_tokens`; the latter counts as truncated. A turn truncated at max_new_tokens
    gets a reply like any other.
    """

    tokenizer: Tokenizer
    num_samples: int
    rewards: RewardConfig
    reply: Reply
    max_turns: int
    max_prompt_tokens: int
    turn_discount: float = 1.0
    """Discount per further turn of the reward above that of a wrong answer."""
    announcement: str = ""
    """Text of the system message that describes the tools; empty: none."""

    async def __call__(self, task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        prompt = self.tokenizer.render(add_system_text(task.prompt, self.announcement))
        first = await generate(prompt, self.num_samples)
        return tuple(
            await gather_graded(
                self._converse(task, Call(prompt, each), generate, grader) for each in first
            )
        )

    async def _converse(self, task: Task, call: Call, generate: Generate, grader: Grader) -> Sample:
        async with self.reply.conversation(task) as reply:
            return await self._converse_with(reply, task, call, generate, grader)

    async def _converse_with(
        self, reply: Reply, task: Task, call: Call, generate: Generate, grader: Grader
    ) -> Sample:
        calls, result, stop_reason = [call], TurnResult(), None
        while len(calls) < self.max_turns:
            result = await reply(task, self._decode(calls[-1].completion), grader)
            if not result.messages:
                break
            prompt = build_next_prompt(self.tokenizer, calls[-1], result.messages)
            if len(prompt) > self.max_prompt_tokens:
                stop_reason: StopReason | None = "length"
                break
            (completion,) = await generate(prompt, 1)
            calls.append(Call(prompt, completion))
            result = TurnResult()
        last = self._decode(calls[-1].completion)
        grade = result.grade or await reply.grade(task, last, grader)
        (sample,) = make_samples(
            calls,
            [self._reward(grade, len(calls))] * len(calls),
            grade,
            stop_reason=stop_reason,
        )
        return sample

    def _decode(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.tokens)

    def _reward(self, grade: RewardResult, num_turns: int) -> float:
        """wrong + turn_discount^(turns - 1) (reward - wrong): a wrong answer never gains by more
        turns.
        """
        wrong = self.rewards.wrong
        reward = grade.to_reward(self.rewards.correct, wrong, self.rewards.no_answer)
        if self.turn_discount == 1:
            return reward
        return wrong + self.turn_discount ** (num_turns - 1) * (reward - wrong)


def add_system_text(prompt: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    """Append a text to the prompt's system message, or add one; an empty text adds none."""
    if not text:
        return prompt
    first, rest = (
        (prompt[0].content + "\n\n", prompt[1:]) if prompt[0].role == "system" else ("", prompt)
    )
    return (Message("system", first + text), *rest)


@dataclass(frozen=True, slots=True)
class Feedback:
    """Replies to a wrong answer with a user message."""

    message: str

    async def __call__(self, task: Task, text: str, grader: Grader) -> TurnResult:
        grade = await grade_answer(task, grader, text)
        return TurnResult(
            () if grade.kind == "correct" else (Message("user", self.message),), grade
        )

    def conversation(self, task: Task) -> AbstractAsyncContextManager[Reply]:
        return nullcontext(self)

    async def grade(self, task: Task, text: str, grader: Grader) -> RewardResult:
        return await grade_answer(task, grader, text)


@dataclass(frozen=True, slots=True)
class ToolReply:
    """Replies with the results of tool calls, or with the error of an invalid call."""

    tools: Tools
    names: tuple[str, ...]
    call_format: CallFormat
    workspaces: Workspaces | None = None
    """Of tools that run in the workspace of a conversation."""
    workspace: Conversation | None = None
    """That of this conversation."""
    grades_files: bool = False
    """Whether the answer is the files of the workspace, or one that the task names."""

    @asynccontextmanager
    async def conversation(self, task: Task) -> AsyncIterator[Reply]:
        if self.workspaces is None:
            yield self
            return
        start = partial(_pack, _repository(task)) if self.grades_files else bytes
        async with self.workspaces.open(start) as workspace:
            yield replace(self, workspace=workspace)

    async def grade(self, task: Task, text: str, grader: Grader) -> RewardResult:
        if self.grades_files and self.workspace is not None:
            # The tests never enter the workspace: its files are graded in another sandbox.
            tests, is_open = _repository(task), self.workspace.is_open
            if isinstance(tests, Repository):
                program = tests.files[tests.target]
                if is_open:
                    program = await self.workspace.read(tests.target)
                text = f"```python\n{program}\n```"
            else:
                files = await self.workspace.archive() if is_open else b""
                if files is None:
                    return RewardResult("crashed", "the files are too large to be kept")
                text = base64.b64encode(files).decode()
        return await grade_answer(task, grader, text)

    @property
    def announcement(self) -> str:
        """Description of tools and call format for the policy."""
        return announcement(self.call_format, self.names)

    async def __call__(self, task: Task, text: str, grader: Grader) -> TurnResult:
        calls = parse_calls(self.call_format, text, self.names)
        async with asyncio.TaskGroup() as group:
            results = [group.create_task(self._run_tool(call)) for call in calls]
        return TurnResult(
            tuple(Message(self.call_format.result_role, result.result()) for result in results)
        )

    async def _run_tool(self, call: ToolCall | InvalidToolCall) -> str:
        if isinstance(call, InvalidToolCall):
            return f"Error: {call.reason}"
        (argument,) = call.arguments.values()
        workspace = self.workspace if call.name in WORKSPACE_TOOLS else None
        result = await (workspace or self.tools)(call.name, argument)
        if result.kind == "infrastructure":
            raise ToolFailed(f"{call.name}: {result.text}")
        return result.text


def _repository(task: Task) -> Repository | RepositoryTests:
    tests = parse_tests(task.answer)
    if not isinstance(tests, Repository | RepositoryTests):
        raise ValueError(
            f"task {task.id}: expected a repository as the answer of workflow=CodingAgent, found "
            f"{type(tests).__name__.lower()}; set tasks=Repositories, or tasks to rows with the "
            "fields of SWE-bench"
        )
    return tests


def read_files(tests: Repository | RepositoryTests) -> RepositoryFiles:
    """Return the files of a repository."""
    if isinstance(tests, RepositoryTests):
        return read_repository(tests.repository)
    return {path: RepositoryFile(text.encode()) for path, text in tests.files.items()}


def _pack(tests: Repository | RepositoryTests) -> bytes:
    """Return the archive of a repository's files."""
    return pack_files(read_files(tests))
