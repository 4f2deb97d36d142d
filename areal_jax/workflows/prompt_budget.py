"""What a workflow's prompts take of `engine.max_prompt_tokens`, computed from tasks before anything
is sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_jax.protocols import Tokenizer
from areal_jax.records import Message, Task
from areal_jax.workflows.config import Agent, MultiTurn, ToolUse, WorkflowConfig
from areal_jax.workflows.tool_use import announcement
from areal_jax.workflows.turns import announced

MAX_MEASURED = 4096
"""So many tasks are measured, all where there are no more: a second's work."""

UNMEASURED_MARGIN = 1.25
"""Where not all tasks are measured, a longer prompt than the longest of them may come."""

ROUNDED_TO = 64
"""Limits that are found are multiples of this: another seed or a few more tasks then have the
same."""


@dataclass(frozen=True)
class LaterTurns:
    """What a workflow puts behind an answer, and how often."""

    num: int
    """Prompts at most that resume from an answer; 0: none."""
    least_tokens: int
    """Tokens at least between an answer and the next one."""
    most_tokens: int
    """Tokens that they may well take."""
    setting: str
    """Which sets how many there are."""
    is_required: bool = True
    """Whether the workflow is pointless without any."""


@dataclass(frozen=True)
class Prompts:
    """First prompts of tasks, as the workflow asks them."""

    source: str
    """Setting that names the tasks."""
    num_tasks: int
    lengths: Sequence[int]
    """Tokens of those that were measured."""
    num_distinct: int
    """Of those that were measured."""
    num_unanswerable: int
    """Of those that were measured: the answer alone is longer than `engine.max_new_tokens`."""

    @property
    def longest(self) -> int:
        """Tokens of the longest, with a margin where not all were measured."""
        longest = max(self.lengths, default=0)
        return (
            longest
            if len(self.lengths) == self.num_tasks
            else math.ceil(longest * UNMEASURED_MARGIN)
        )

    def counted(self, num: int) -> str:
        """So many of them, in words."""
        of = "" if len(self.lengths) == self.num_tasks else f", measured of {self.num_tasks},"
        return f"{num} of {len(self.lengths)} prompts of {self.source}{of}"


def measure_prompts(
    tokenizer: Tokenizer,
    source: str,
    tasks: Sequence[Task],
    workflow: WorkflowConfig,
    *,
    max_new_tokens: int,
    is_boxed: bool,
) -> Prompts:
    """Render the first prompts of tasks, of evenly spaced ones where there are many.

    Args:
        is_boxed: whether mathematics is graded by what stands in a box, so that no shorter answer
            can be right.
    """
    num = min(len(tasks), MAX_MEASURED)
    measured = [tasks[number * len(tasks) // num] for number in range(num)]
    system = system_message(workflow)
    unanswerable = 0
    if is_boxed:
        boxed = (f"\\boxed{{{task.answer}}}" for task in measured if task.kind == "math")
        unanswerable = sum(len(tokenizer.encode(text)) > max_new_tokens for text in boxed)
    return Prompts(
        source,
        len(tasks),
        [len(tokenizer.render(announced(task.prompt, system))) for task in measured],
        len({task.prompt for task in measured}),
        unanswerable,
    )


def system_message(workflow: WorkflowConfig) -> str:
    """What the workflow tells the policy before all else."""
    if isinstance(workflow, ToolUse) and workflow.announce:
        return announcement(workflow.call_format, workflow.tools.names)
    return ""


def later_turns(tokenizer: Tokenizer, workflow: WorkflowConfig) -> LaterTurns:
    """What comes behind an answer. ValueError where the chat template cannot put it there."""

    def tokens_of(role: str, text: str) -> int:
        return len(tokenizer.render_next([Message(role, text)]))

    match workflow:
        case MultiTurn():
            feedback = tokens_of("user", workflow.feedback)
            return LaterTurns(workflow.max_turns - 1, feedback, feedback, "workflow.max_turns")
        case ToolUse():
            role, tools = workflow.call_format.result_role, workflow.tools
            # Words of the length that a tool's output is cut to: what programs print and documents
            # say. Sums are short.
            text = "a few words of text " * (tools.max_output_chars // 20)
            most = "1234567890.12345" if set(tools.names) == {"calculator"} else text
            return LaterTurns(
                workflow.max_turns - 1,
                tokens_of(role, "1"),
                tokens_of(role, most),
                "workflow.max_turns",
            )
        case Agent():
            # What an agent says is its own affair; two lines are longer than most of it.
            try:
                least, most = (
                    tokens_of("user", text) for text in ("?", "a few words of text " * 8)
                )
            except (
                ValueError
            ):  # a template for one turn: such an agent's calls do not resume from one another
                return LaterTurns(0, 0, 0, "")
            return LaterTurns(
                workflow.expected_calls - 1,
                least,
                most,
                "workflow.expected_calls",
                is_required=False,
            )
        case _:
            return LaterTurns(0, 0, 0, "")


def required_prompt_tokens(longest: int, turns: LaterTurns, max_new_tokens: int) -> int:
    """The limit under which every turn fits: the first prompt, and for every later one the answer
    before it, the token that ends it, and what is put behind."""
    needed = longest + turns.num * (max_new_tokens + 1 + turns.most_tokens)
    return max(1, math.ceil(needed / ROUNDED_TO)) * ROUNDED_TO


@dataclass(frozen=True)
class Limits:
    """What prompts and answers may take, in tokens."""

    max_prompt_tokens: int
    max_new_tokens: int
    positions: int
    """Of the policy: no sequence is longer."""

    def remedy(self, longest: int, turns: LaterTurns) -> str:
        """What to set so that all turns fit."""
        needed = required_prompt_tokens(longest, turns, self.max_new_tokens)
        if needed + self.max_new_tokens <= self.positions:
            return f"set engine.max_prompt_tokens={needed}, or to 0"
        settings = " or ".join(filter(None, ("engine.max_new_tokens", turns.setting)))
        return (
            f"all of it needs {needed}, and the policy has {self.positions} positions: lower "
            f"{settings}, or shorten prompts"
        )


def refused_prompts(prompts: Prompts, turns: LaterTurns, limits: Limits) -> Iterator[str]:
    """What can never work under these limits, each in a sentence with the setting that would do."""
    shortest, remedy = min(prompts.lengths), limits.remedy(prompts.longest, turns)
    limit = f"engine.max_prompt_tokens={limits.max_prompt_tokens}"
    # An answer has a token at least, and one that ends it.
    room = limits.max_prompt_tokens - shortest - turns.least_tokens - 2
    if shortest > limits.max_prompt_tokens:
        yield (
            f"every prompt of {prompts.source} is longer than {limit}: the shortest has "
            f"{shortest} tokens; {remedy}"
        )
    elif turns.num and turns.is_required and room < 0:
        yield (
            f"{limit} leaves not enough resources for a second turn: a prompt of "
            f"{prompts.source} has at least {shortest} tokens, and what "
            f"follows its answer {turns.least_tokens}; {remedy}"
        )
    if prompts.num_unanswerable == len(prompts.lengths):
        yield (
            f"engine.max_new_tokens={limits.max_new_tokens} is shorter than every answer to "
            f"{prompts.source} in its box; "
            "raise engine.max_new_tokens"
        )


def doubtful_prompts(prompts: Prompts, turns: LaterTurns, limits: Limits) -> Iterator[str]:
    """What fails in part under these limits, with counts and the setting that would do."""
    remedy, most = limits.remedy(prompts.longest, turns), limits.max_prompt_tokens
    limit = f"engine.max_prompt_tokens={most}"
    if too_long := sum(length > most for length in prompts.lengths):
        yield (
            f"{prompts.counted(too_long)} are longer than {limit}, and are neither trained on "
            f"nor answered; {remedy}"
        )
    # An answer of full length, the token that ends it, and the least that follows.
    each = limits.max_new_tokens + 1 + turns.least_tokens
    for turn in range(1, turns.num + 1):
        if cut := sum(length <= most < length + turn * each for length in prompts.lengths):
            yield (
                f"{prompts.counted(cut)} leave not enough resources under {limit} for turn "
                f"{turn + 1} after answers of "
                f"engine.max_new_tokens={limits.max_new_tokens}; {remedy}"
            )
            break
    if prompts.num_unanswerable:
        yield (
            f"{prompts.counted(prompts.num_unanswerable)} have answers longer than "
            f"engine.max_new_tokens={limits.max_new_tokens}; raise engine.max_new_tokens"
        )


def too_few_tasks(prompts: Prompts, groups_per_batch: int, num_steps: int) -> Iterator[str]:
    """Fewer different tasks than a batch has groups."""
    if prompts.num_distinct < groups_per_batch:
        passes = num_steps * groups_per_batch / max(1, prompts.num_tasks)
        yield (
            f"{prompts.source} has {prompts.num_distinct} different prompts for "
            f"rollout.groups_per_batch={groups_per_batch}: "
            f"every batch repeats them, and the run passes over its tasks {passes:,.0f} times; "
            "add tasks, or set "
            f"rollout.groups_per_batch={prompts.num_distinct}"
        )
