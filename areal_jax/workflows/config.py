"""How one task becomes samples: one choice, for training and for evaluation alike."""

from __future__ import annotations

from typing import Literal

import chz

from areal_jax.bounds import FRACTION, POSITIVE
from areal_jax.rewards.config import ToolsConfig


@chz.chz
class WorkflowConfig:
    """How one task becomes samples."""


@chz.chz
class SingleTurn(WorkflowConfig):
    """One answer, graded."""


@chz.chz
class MultiTurn(WorkflowConfig):
    """Another attempt after every wrong answer. The attempts of a conversation are one sample,
    graded by the last."""

    max_turns: int = chz.field(
        validator=POSITIVE,
        default=2,
        doc="attempts at most; a conversation beyond engine.max_prompt_tokens ends before",
    )
    turn_discount: float = chz.field(
        validator=FRACTION,
        default=0.9,
        doc=(
            "share of what a right answer is worth above a wrong one that is left with every "
            "further attempt"
        ),
    )
    feedback: str = chz.field(
        default="Your answer is wrong, or cannot be read. Think again, and give another one.",
        doc="what the user says to a wrong answer",
    )


@chz.chz
class CallFormat:
    """How a policy writes that it calls a tool, and how it is told the result."""

    result_role: str = chz.field(
        default="tool",
        doc="role of the message with a result; user, for chat templates that know no other",
    )


@chz.chz
class Hermes(CallFormat):
    """<tool_call>{"name": NAME, "arguments": {PARAMETER: ARGUMENT}}</tool_call>, as Hermes and Qwen
    policies have learnt it."""


@chz.chz
class Tags(CallFormat):
    """<NAME>ARGUMENT</NAME>, as in Search-R1 (arXiv:2503.09516): the shortest form, for policies
    that are taught their own."""


@chz.chz
class ToolUse(WorkflowConfig):
    """Turns that call tools, whose results are context, and at last an answer, graded."""

    max_turns: int = chz.field(
        validator=POSITIVE,
        default=4,
        doc=(
            "turns of the policy at most, the last one answers; one beyond "
            "engine.max_prompt_tokens does not come"
        ),
    )
    call_format: CallFormat = chz.field(
        default_factory=Hermes, doc="how calls are written: Hermes or Tags"
    )
    announce: bool = chz.field(default=True, doc="tell the policy of its tools in a system message")
    tools: ToolsConfig = chz.field(
        default_factory=ToolsConfig, doc="which tools, and how much they may take"
    )


@chz.chz
class Agent(WorkflowConfig):
    """A program of yours that calls the policy as OpenAI's API is called: all that the policy says
    in it is trained on.

    What it asks for is sampled as the run draws everything: a temperature, top_p, penalty or seed
    of its own changes nothing."""

    function: str | None = chz.field(
        default=None,
        doc="FILE.py:NAME or PACKAGE.MODULE:NAME, called as NAME(task, base_url, api_key), async "
        "or not, for every sample; it "
        "returns a bool, or a number from 0 to 1 for a reward between wrong and correct; None: its last answer is graded",
    )
    command: str | None = chz.field(
        default=None,
        doc="instead of a function, a program that is run for every sample, with OPENAI_BASE_URL "
        "and OPENAI_API_KEY in its "
        "environment and the task as JSON on its standard input; its last line of output says "
        "what a function would return",
    )
    timeout_s: float = chz.field(
        validator=POSITIVE,
        default=600.0,
        doc="seconds after which an agent is ended, with all that it started, and its group "
        "given up; the clock stops while a "
        "pinned evaluation holds the weights",
    )
    stall_warning_s: float = chz.field(
        validator=POSITIVE,
        default=5.0,
        doc=(
            "seconds for which an async function may block its event loop before a warning names "
            "the line"
        ),
    )
    expected_calls: int = chz.field(
        validator=POSITIVE,
        default=4,
        doc=(
            "consecutive calls for which engine.max_prompt_tokens=0 leaves room, each with all "
            "that was said before"
        ),
    )
    max_running: int = chz.field(
        validator=POSITIVE,
        default=256,
        doc="agents at work at the same time; those of an evaluation are counted apart",
    )
    export: Literal["concatenated", "per_call"] = chz.field(
        default="concatenated",
        doc=(
            "concatenated: calls that resume from one another, token for token, are one sample; "
            "per_call: each call is one"
        ),
    )
