"""Prompt lengths of a workflow against `engine.max_prompt_tokens`, measured before any sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal_jax.data.sources import MAX_MEASURED
from areal_jax.protocols import Tokenizer
from areal_jax.records import Message, Task
from areal_jax.workflows.config import Agent, Environment, MultiTurn, ToolUse, WorkflowConfig
from areal_jax.workflows.tool_use import announcement
from areal_jax.workflows.turns import add_system_text

UNMEASURED_MARGIN = 1.25
"""Factor on the longest measured prompt if not all tasks are measured."""

ROUNDED_TO = 64
"""Limits are rounded up to multiples of this, so that other seeds and a few more tasks give the
same limit."""


@dataclass(frozen=True)
class LaterTurns:
    """Prompts that a workflow builds after the first answer."""

    num: int
    """Maximum number of later prompts."""
    least_tokens: int
    """Minimum number of tokens between an answer and the next one."""
    most_tokens: int
    """Number of tokens to plan for between an answer and the next one."""
    setting: str
    """Setting of the number of turns."""
    is_required: bool = True
    """Whether the workflow needs at least one later turn."""


@dataclass(frozen=True)
class Prompts:
    """Measured first prompts of tasks."""

    source: str
    """Setting that names the tasks."""
    num_tasks: int
    lengths: Sequence[int]
    """Tokens of each measured prompt."""
    num_distinct: int
    """Number of distinct measured prompts."""
    num_unanswerable: int
    """Number of measured prompts whose reference answer is longer than `engine.max_new_tokens`."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, with a margin if not all were measured."""
        longest = max(self.lengths, default=0)
        return (
            longest
            if len(self.lengths) == self.num_tasks
            else math.ceil(longest * UNMEASURED_MARGIN)
        )

    def format_count(self, num: int) -> str:
        """Format a number of the measured prompts."""
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
    """Measure the first prompts of at most MAX_MEASURED evenly spaced tasks.

    Args:
        tokenizer: the policy's tokenizer.
        source: setting that names the tasks.
        tasks: the tasks.
        workflow: settings of the workflow.
        max_new_tokens: token budget of an answer.
        is_boxed: whether answers must be in a box, so that a correct answer cannot be shorter than
            the boxed reference.
    """
    num = min(len(tasks), getattr(tasks, "num_measured", MAX_MEASURED))
    measured = [tasks[number * len(tasks) // num] for number in range(num)]
    system, unanswerable = system_message(workflow), 0
    observation = workflow.observation_tokens if isinstance(workflow, Environment) else 0

    def count_tokens(task: Task) -> int:
        messages = add_system_text(task.prompt, system)
        return observation + (len(tokenizer.render(messages)) if messages else 0)

    if is_boxed:
        boxed = (f"\\boxed{{{task.answer}}}" for task in measured if task.kind == "math")
        unanswerable = sum(len(tokenizer.encode(text)) > max_new_tokens for text in boxed)
    return Prompts(
        source,
        len(tasks),
        [count_tokens(task) for task in measured],
        # The prompt of a seed is the environment's.
        len({(task.prompt, task.answer) if observation else task.prompt for task in measured}),
        unanswerable,
    )


def system_message(workflow: WorkflowConfig) -> str:
    """Return the workflow's system message; empty if it has none."""
    if isinstance(workflow, ToolUse) and workflow.announce:
        return announcement(workflow.call_format, workflow.tools.names)
    return ""


def later_turns(tokenizer: Tokenizer, workflow: WorkflowConfig) -> LaterTurns:
    """Measure the prompts that follow an answer.

    Raises:
        ValueError: the chat template cannot append the workflow's messages.
    """

    def count_tokens(role: str, text: str) -> int:
        return len(tokenizer.render_next([Message(role, text)]))

    match workflow:
        case MultiTurn():
            feedback = count_tokens("user", workflow.feedback)
            return LaterTurns(workflow.max_turns - 1, feedback, feedback, "workflow.max_turns")
        case ToolUse():
            role, tools = workflow.call_format.result_role, workflow.tools
            # Text of the length that tool output is truncated to. A calculator's results are short.
            text = "a few words of text " * (tools.max_output_chars // 20)
            most = "1234567890.12345" if set(tools.names) == {"calculator"} else text
            return LaterTurns(
                workflow.max_turns - 1,
                count_tokens(role, "1"),
                count_tokens(role, most),
                "workflow.max_turns",
            )
        case Environment(max_turns=max_turns, observation_tokens=most):
            least = count_tokens("user", ".")
            return LaterTurns(max_turns - 1, least, max(least, most), "workflow.max_turns", False)
        case Agent():
            # An agent's messages are unknown; two lines are longer than most.
            try:
                least, most = (
                    count_tokens("user", text) for text in ("?", "a few words of text " * 8)
                )
            except ValueError:  # a single-turn template: the agent's calls never extend one another
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
    """Compute the prompt limit under which every turn fits.

    It is the first prompt plus, for every later turn, the previous answer, its stop token and the
    messages that follow.
    """
    needed = longest + turns.num * (max_new_tokens + 1 + turns.most_tokens)
    return max(1, math.ceil(needed / ROUNDED_TO)) * ROUNDED_TO


@dataclass(frozen=True)
class Limits:
    """Limits of prompts and answers, in tokens."""

    max_prompt_tokens: int
    max_new_tokens: int
    positions: int
    """Maximum sequence length of the policy."""

    def remedy(self, longest: int, turns: LaterTurns) -> str:
        """Return which settings to change so that all turns fit."""
        needed = required_prompt_tokens(longest, turns, self.max_new_tokens)
        if needed + self.max_new_tokens <= self.positions:
            return f"set engine.max_prompt_tokens={needed}, or to 0"
        settings = " or ".join(filter(None, ("engine.max_new_tokens", turns.setting)))
        return (
            f"all turns need {needed} prompt tokens, and the policy has {self.positions} "
            f"positions; lower {settings}, or shorten prompts"
        )


def refused_prompts(prompts: Prompts, turns: LaterTurns, limits: Limits) -> Iterator[str]:
    """Yield errors: prompts that never fit these limits, with the setting to change."""
    shortest, remedy = min(prompts.lengths), limits.remedy(prompts.longest, turns)
    limit = f"engine.max_prompt_tokens={limits.max_prompt_tokens}"
    # An answer has at least one token and a stop token.
    room = limits.max_prompt_tokens - shortest - turns.least_tokens - 2
    if shortest > limits.max_prompt_tokens:
        yield (
            f"every prompt of {prompts.source} is longer than {limit}: the shortest has "
            f"{shortest} tokens; {remedy}"
        )
    elif turns.num and turns.is_required and room < 0:
        yield (
            f"{limit} is too small for a second turn: a prompt of {prompts.source} has at least "
            f"{shortest} tokens, and the messages after its answer {turns.least_tokens}; {remedy}"
        )
    if prompts.num_unanswerable == len(prompts.lengths):
        yield (
            f"engine.max_new_tokens={limits.max_new_tokens} is shorter than every answer to "
            f"{prompts.source} in its box; raise engine.max_new_tokens"
        )


def doubtful_prompts(prompts: Prompts, turns: LaterTurns, limits: Limits) -> Iterator[str]:
    """Yield warnings: prompts that do not fit these limits, with counts and the setting to
    change.
    """
    remedy, most = limits.remedy(prompts.longest, turns), limits.max_prompt_tokens
    limit = f"engine.max_prompt_tokens={most}"
    if too_long := sum(length > most for length in prompts.lengths):
        yield (
            f"{prompts.format_count(too_long)} are longer than {limit} and will be rejected; "
            f"{remedy}"
        )
    # An answer of full length, its stop token, and the shortest messages after it.
    each = limits.max_new_tokens + 1 + turns.least_tokens
    for turn in range(1, turns.num + 1):
        if cut := sum(length <= most < length + turn * each for length in prompts.lengths):
            yield (
                f"{prompts.format_count(cut)} do not fit {limit} in turn {turn + 1} after answers "
                f"of engine.max_new_tokens={limits.max_new_tokens}; {remedy}"
            )
            break
    if prompts.num_unanswerable:
        yield (
            f"{prompts.format_count(prompts.num_unanswerable)} have answers longer than "
            f"engine.max_new_tokens={limits.max_new_tokens}; raise engine.max_new_tokens"
        )


def too_few_tasks(prompts: Prompts, groups_per_batch: int, num_steps: int) -> Iterator[str]:
    """Yield a warning if there are fewer distinct tasks than groups in a batch."""
    if prompts.num_distinct < groups_per_batch:
        passes = num_steps * groups_per_batch / max(1, prompts.num_tasks)
        yield (
            f"{prompts.source} has {prompts.num_distinct} distinct prompts for "
            f"rollout.groups_per_batch={groups_per_batch}: every batch repeats them, and the run "
            f"makes {passes:,.0f} epochs over its tasks; add tasks, or set "
            f"rollout.groups_per_batch={prompts.num_distinct}"
        )
