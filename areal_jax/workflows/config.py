"""Settings of workflows, for training and evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

import chz

from areal_jax.bounds import FRACTION, POSITIVE
from areal_jax.python_objects import as_text_setting
from areal_jax.records import Task
from areal_jax.rewards.config import ToolsConfig


@chz.chz
class WorkflowConfig:
    """A workflow: turns one task into samples."""


@chz.chz
class CustomWorkflow(WorkflowConfig, ABC):
    """A workflow of the user's own: a subclass that defines `run`.

    Its fields are settings, as those of any workflow. The method runs in the event loop of the run:
    it must not block, and for equal answers and grades it must reply equally, so that it can be
    replayed after a crash.

    Example:
        @chz.chz
        class SecondTry(CustomWorkflow):
            async def run(self, task, chat):
                if (await chat.grade()).kind != "correct":
                    await chat.reply("Check your answer, and give it again.")
    """

    @abstractmethod
    async def run(self, task: Task, chat: Any) -> float | None:
        """Hold one conversation.

        Args:
            task: the task.
            chat: the conversation (`areal_jax.Chat`), whose `text` is the policy's answer to the
                task; `await chat.reply(message)` continues it, and `await chat.grade()` is the
                `RewardResult` of the last answer.

        Returns:
            The reward as of a reward function (see rewards.scale), or None to have the last answer
            graded.
        """


@chz.chz
class SingleTurn(WorkflowConfig):
    """One graded answer per sample."""


@chz.chz
class MultiTurn(WorkflowConfig):
    """A further attempt after every wrong answer. The attempts of a conversation are one sample,
    graded by the last.
    """

    max_turns: int = chz.field(
        validator=POSITIVE,
        default=2,
        doc="maximum number of attempts; conversations beyond engine.max_prompt_tokens end earlier",
    )
    turn_discount: float = chz.field(
        validator=FRACTION,
        default=0.9,
        doc="discount per further attempt of the reward above that of a wrong answer",
    )
    feedback: str = chz.field(
        default="Your answer is wrong, or cannot be read. Think again, and give another one.",
        doc="text of the user message after a wrong answer",
    )


@chz.chz
class CallFormat:
    """Format of tool calls and their results."""

    result_role: str = chz.field(
        default="tool",
        doc="role of the message with a tool's result; user for chat templates without tool role",
    )


@chz.chz
class Hermes(CallFormat):
    """<tool_call>{"name": NAME, "arguments": {PARAMETER: ARGUMENT}}</tool_call>, the format of
    Hermes and Qwen policies.
    """


@chz.chz
class Tags(CallFormat):
    """<NAME>ARGUMENT</NAME>, as in Search-R1 (arXiv:2503.09516): the shortest format, for policies
    without one of their own.
    """


@chz.chz
class ToolUse(WorkflowConfig):
    """Turns that call tools, whose results become context, and a final graded answer."""

    max_turns: int = chz.field(
        validator=POSITIVE,
        default=4,
        doc=(
            "maximum number of turns, including the answer; conversations beyond "
            "engine.max_prompt_tokens end earlier"
        ),
    )
    call_format: CallFormat = chz.field(
        default_factory=Hermes, doc="format of tool calls: Hermes or Tags"
    )
    announce: bool = chz.field(default=True, doc="description of the tools in a system message")
    tools: ToolsConfig = chz.field(
        default_factory=ToolsConfig, doc="available tools and their limits"
    )


@chz.chz
class CodingAgent(ToolUse):
    """Turns that edit a repository in a sandbox of their own, until one calls no tool. The file
    that the task names is then graded as any program, by tests that the policy cannot reach.

    `tasks=Repositories` has such tasks.
    """

    max_turns: int = chz.field(
        validator=POSITIVE,
        default=8,
        doc=("maximum number of turns; conversations beyond engine.max_prompt_tokens end earlier"),
    )
    tools: ToolsConfig = chz.field(
        default_factory=lambda: ToolsConfig(names=("shell", "edit", "python")),
        doc="available tools and their limits",
    )


@chz.chz
class Environment(WorkflowConfig):
    """A class of the user's with Gymnasium's `reset(seed)` and `step(action)`, with texts or
    messages as observations and the policy's turns as actions.

    `tasks=Seeds` plays an episode from each seed. Tasks of other sources precede the first
    observation, and `reset` gets them as `options["task"]` if it has that parameter.

    A class with `players`, a tuple of names, has several: observations, actions and rewards are
    dicts by player, and those who have an observation act next. The policy plays all of them, each
    on its own view, or one of them against frozen opponents.
    """

    environment: str = chz.field(
        converter=as_text_setting,
        doc="environment class FILE.py:NAME or PACKAGE.MODULE:NAME, or a function that makes one: "
        "reset(seed) returns the first observation (and info), step(text) observation, reward, "
        "terminated, truncated and info, async or not",
    )
    arguments: str = chz.field(
        default="{}", doc='keyword arguments of the class, a JSON object such as {"size": 4}'
    )
    opponents: tuple[str, ...] = chz.field(
        default=(),
        doc="frozen policies that play against the policy, comma-separated: initial, the one that "
        "training starts from, or run folders, RUN/checkpoints/VERSION or Hugging Face folders; "
        "the policy's seat and who has the others are drawn by the seed. Each takes memory for its "
        "weights and a KV cache on the rollout devices; empty: the policy plays all players",
    )
    max_turns: int = chz.field(
        validator=POSITIVE,
        default=16,
        doc="maximum number of steps; episodes beyond engine.max_prompt_tokens end earlier",
    )
    step_timeout_s: float = chz.field(
        validator=POSITIVE,
        default=30.0,
        doc="time limit of a reset or step, in seconds; beyond it, the process is killed and its "
        "group is rejected",
    )
    observation_tokens: int = chz.field(
        validator=POSITIVE,
        default=128,
        doc="tokens of an observation that engine.max_prompt_tokens=0 plans for",
    )
    max_running: int = chz.field(
        validator=POSITIVE,
        default=256,
        doc="maximum number of concurrent episodes, each in a process of its own",
    )


@chz.chz
class Agent(WorkflowConfig):
    """A user's program that calls the policy through an OpenAI-compatible API; all completions of
    its calls are trained on.

    The run's sampling parameters apply: the program's temperature, top_p, penalties and seed have
    no effect.
    """

    function: str | None = chz.field(
        default=None,
        doc="agent function FILE.py:NAME or PACKAGE.MODULE:NAME, async or not, called as "
        "NAME(task, base_url, api_key) for every sample; returns a bool, a number from 0 to 1 "
        "for a "
        "reward between wrong and correct, or None to have its last answer graded",
    )
    command: str | None = chz.field(
        default=None,
        doc="agent program instead of a function, run for every sample with OPENAI_BASE_URL, "
        "OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in its environment and the task "
        "as JSON on standard input; its last line of output is the return value of a function",
    )
    arguments: str = chz.field(
        default="{}",
        doc="keyword arguments of the function, a JSON object; a class is made with them once per "
        "process, and its object is called",
    )
    timeout_s: float = chz.field(
        validator=POSITIVE,
        default=600.0,
        doc="time limit of an agent, in seconds; beyond it, its processes are killed and its group "
        "is rejected; the clock stops while a pinned evaluation holds the weights",
    )
    stall_warning_s: float = chz.field(
        validator=POSITIVE,
        default=5.0,
        doc=(
            "time for which an async function may block its event loop before a warning names the "
            "line, in seconds"
        ),
    )
    expected_calls: int = chz.field(
        validator=POSITIVE,
        default=4,
        doc=(
            "number of consecutive calls, each with the whole conversation, that "
            "engine.max_prompt_tokens=0 plans for"
        ),
    )
    max_running: int = chz.field(
        validator=POSITIVE,
        default=256,
        doc="maximum number of concurrent agents; agents of evaluations are counted separately",
    )
    export: Literal["concatenated", "per_call"] = chz.field(
        default="concatenated",
        doc=(
            "samples of an agent: concatenated (calls that extend one another, token by token, are "
            "one sample) or per_call (each call is one sample)"
        ),
    )


@chz.chz
class Verifiers(Agent):
    """Episodes of a taskset of verifiers (extra `verifiers`, in an environment of its own), whose
    harness calls the policy; all completions are trained on.

    `tasks=Seeds` plays the taskset's tasks in their order, from `tasks.first` on. The names of its
    rewards are the components of an episode's reward.
    """

    environment: str = chz.field(doc="taskset of verifiers: a module, a package or a folder")
    arguments: str = chz.field(
        default="{}",
        doc='settings of the environment, a JSON object such as {"taskset": {"size": 100}, '
        '"agent": {"max_turns": 4}}; by default its harness runs as a process of this machine',
    )
    renderer: str | None = chz.field(
        default=None,
        doc="folder of the policy's tokenizer, from which verifiers' train client renders prompts "
        "as token ids; none: the server renders messages by the chat template",
    )
    function: str | None = chz.field(
        default="areal_jax.workflows.verifiers:Player", doc="agent that plays the episodes"
    )
