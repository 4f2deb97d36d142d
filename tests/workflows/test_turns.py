from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import chz
import numpy as np
import pytest

import areal_jax
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import (
    NO_VERSION,
    Completion,
    Message,
    Request,
    ResultKind,
    RewardResult,
    Sample,
    Sampling,
    StopReason,
    Task,
    ToolResult,
)
from areal_jax.rewards.config import RewardConfig, ToolsConfig
from areal_jax.rollout.calls import JournaledGenerate
from areal_jax.workflows.config import MultiTurn, Tags, ToolUse, WorkflowConfig
from areal_jax.workflows.from_config import make_workflow
from areal_jax.workflows.single_turn import GradingFailed
from areal_jax.workflows.turns import ToolFailed

TOKENIZER = HFTokenizer.from_folder(Path(areal_jax.__file__).parent / "models" / "embedded")
STOP = TOKENIZER.stop_token_ids[0]
TASK = Task("sum", (Message("user", "1+1?"),), "2")
AGAIN = "No. Again."
MULTI_TURN = MultiTurn(max_turns=3, turn_discount=0.5, feedback=AGAIN)
TOOL_USE = ToolUse(
    max_turns=3,
    call_format=Tags(),
    announce=False,
    tools=ToolsConfig(names=("calculator", "search")),
)
PROMPT = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"


def completion(text: str, stop: StopReason = "stop", version: int = 3) -> Completion:
    tokens = TOKENIZER.encode(text)
    if stop == "stop":
        tokens = np.append(tokens, np.int32(STOP))
    return Completion(
        tokens, -np.ones(len(tokens), np.float32), np.full(len(tokens), version, np.int32), stop
    )


class Policy:
    """Answers prompts with scripted texts, in order, and records the prompts."""

    def __init__(self, **answers: str | list[str]) -> None:
        """Create a policy with scripted answers by the text of the last message."""
        self._answers = {
            text: [texts] if isinstance(texts, str) else list(texts)
            for text, texts in answers.items()
        }
        self.prompts: list[str] = []
        self.stops: dict[str, StopReason] = {}

    async def __call__(
        self, prompt_tokens: np.ndarray, num_samples: int, **how: object
    ) -> list[Completion]:
        prompt = text_of(prompt_tokens)
        self.prompts.append(prompt)
        last = (
            prompt.split("<|im_end|>")[-2].partition("\n<|im_start|>")[2]
            or prompt.split("<|im_end|>")[-2]
        )
        message = last.partition("\n")[2]
        sampled = [self._answers[message].pop(0) for _ in range(num_samples)]
        return [completion(text, self.stops.get(text, "stop")) for text in sampled]


def text_of(tokens: np.ndarray) -> str:
    return TOKENIZER._tokenizer.decode(tokens.tolist(), skip_special_tokens=False)


def trained_text(sample: Sample) -> str:
    return text_of(sample.tokens[sample.loss_mask])


async def grader(task: Task, answer: str) -> RewardResult:
    if answer == "broken":
        return RewardResult("infrastructure", "no process")
    kind: ResultKind = (
        "correct" if answer == task.answer else "no_answer" if answer == "" else "wrong"
    )
    return RewardResult(kind)


async def tools(tool: str, argument: str) -> ToolResult:
    if argument == "broken":
        return ToolResult("infrastructure", "no process")
    return ToolResult("done", f"{tool} of {argument}")


def run(
    chosen: WorkflowConfig,
    policy: Callable,
    num_samples: int = 1,
    max_prompt_tokens: int = 1000,
    rewards: RewardConfig | None = None,
    grader: Callable = grader,
) -> tuple[Sample, ...]:
    workflow = make_workflow(
        chosen,
        TOKENIZER,
        num_samples,
        rewards or RewardConfig(),
        max_prompt_tokens=max_prompt_tokens,
        tools=tools,
    )
    return asyncio.run(workflow(TASK, policy, grader))  # type: ignore[arg-type]


def test_wrong_answer_gets_feedback_and_the_next_is_graded() -> None:
    policy = Policy(**{"1+1?": ["3", "2"], AGAIN: ["4", "2"]})
    wrong_twice, right = run(MULTI_TURN, policy, 2)
    # The first sample: 3, no, 4, no, 2.
    again = f"\n<|im_start|>user\n{AGAIN}<|im_end|>\n<|im_start|>assistant\n"
    assert text_of(wrong_twice.tokens) == f"{PROMPT}3<|im_end|>{again}4<|im_end|>{again}2<|im_end|>"
    assert trained_text(wrong_twice) == "3<|im_end|>4<|im_end|>2<|im_end|>"
    assert text_of(right.tokens) == f"{PROMPT}2<|im_end|>"
    assert (wrong_twice.grade, right.grade) == ("correct", "correct")
    for sample in (wrong_twice, right):
        assert (sample.versions[~sample.loss_mask] == NO_VERSION).all()
        assert (sample.versions[sample.loss_mask] == 3).all()


def test_missing_answer_gets_feedback_like_a_wrong_one() -> None:
    (sample,) = run(MULTI_TURN, Policy(**{"1+1?": "", AGAIN: "2"}))
    # Half of the way from -5 to 5.
    assert (sample.grade, sample.reward) == ("correct", 0.0)


def test_every_turn_is_graded_once() -> None:
    graded = list[str]()

    async def noting(task: Task, answer: str) -> RewardResult:
        graded.append(answer)
        return await grader(task, answer)

    run(
        chz.replace(MULTI_TURN, max_turns=2),
        Policy(**{"1+1?": ["2", "3"], AGAIN: "4"}),
        2,
        grader=noting,
    )
    assert sorted(graded) == ["2", "3", "4"]


def test_turn_discount_lowers_correct_rewards_only() -> None:
    # Between -5 and 5, half of the way is left with every turn: 5, 0, -2.5; wrong stays -5.
    policy = Policy(**{"1+1?": ["2", "3", "3", "3"], AGAIN: ["2", "3", "2", "3", "3"]})
    samples = run(MULTI_TURN, policy, 4)
    assert sorted(sample.reward for sample in samples) == [-5.0, -2.5, 0.0, 5.0]
    assert [sample.reward == -5.0 for sample in samples] == [
        sample.grade == "wrong" for sample in samples
    ]


def test_conversation_beyond_the_prompt_limit_is_truncated() -> None:
    prompt = len(
        TOKENIZER.render([*TASK.prompt, Message("assistant", "3"), Message("user", AGAIN)])
    )
    for room, num_turns, stop_reason in ((prompt, 2, "stop"), (prompt - 1, 1, "length")):
        policy = Policy(**{"1+1?": "3", AGAIN: "4"})
        (sample,) = run(chz.replace(MULTI_TURN, max_turns=2), policy, max_prompt_tokens=room)
        assert len(policy.prompts) == num_turns
        assert (sample.stop_reason, sample.grade, sample.reward) == (stop_reason, "wrong", -5.0)


def test_truncated_answer_gets_a_stop_token_as_context_and_feedback() -> None:
    policy = Policy(**{"1+1?": "33", AGAIN: "2"})
    policy.stops["33"] = "length"
    (sample,) = run(MULTI_TURN, policy)
    assert text_of(sample.tokens).startswith(f"{PROMPT}33<|im_end|>\n<|im_start|>user\n")
    assert trained_text(sample) == "332<|im_end|>"
    assert sample.stop_reason == "stop"


def test_tool_results_are_context_and_only_the_last_turn_is_graded() -> None:
    policy = Policy(
        **{
            "1+1?": "<calculator>1+1</calculator><search>two</search>",
            "search of two": "2",
        }
    )
    (sample,) = run(TOOL_USE, policy)
    result = (
        "\n<|im_start|>tool\ncalculator of 1+1<|im_end|>\n<|im_start|>tool\nsearch of "
        "two<|im_end|>\n<|im_start|>assistant\n"
    )
    first = "<calculator>1+1</calculator><search>two</search><|im_end|>"
    assert text_of(sample.tokens) == f"{PROMPT}{first}{result}2<|im_end|>"
    assert trained_text(sample) == f"{first}2<|im_end|>"
    assert (sample.grade, sample.reward) == ("correct", 5.0)


def test_tools_are_not_called_in_the_last_turn() -> None:
    call = "<search>x</search>"
    policy = Policy(**{"1+1?": call, "search of x": [call, call]})
    (sample,) = run(TOOL_USE, policy)
    assert len(policy.prompts) == 3
    assert sample.grade == "wrong"


def test_invalid_tool_call_is_answered_with_its_error() -> None:
    policy = Policy(**{"1+1?": "<search>two", "Error: <search> without </search>": "2"})
    (sample,) = run(TOOL_USE, policy)
    assert sample.grade == "correct"


@pytest.mark.parametrize("chosen", [MULTI_TURN, TOOL_USE], ids=["grader", "tool"])
def test_infrastructure_failure_is_not_a_wrong_answer(chosen: WorkflowConfig) -> None:
    policy = Policy(**{"1+1?": "broken" if chosen is MULTI_TURN else "<search>broken</search>"})
    with pytest.raises(GradingFailed if chosen is MULTI_TURN else ToolFailed, match="no process"):
        run(chosen, policy)


def test_other_conversations_are_graded_after_a_tool_failure() -> None:
    policy = Policy(**{"1+1?": ["<search>broken</search>", "2"]})
    grades = list[RewardResult]()

    async def grade(task: Task, answer: str) -> RewardResult:
        grades.append(await grader(task, answer))
        return grades[-1]

    with pytest.raises(ToolFailed, match="no process"):
        run(TOOL_USE, policy, num_samples=2, grader=grade)
    assert [grade.kind for grade in grades] == ["correct"]


def test_tools_are_described_in_the_system_message_if_configured() -> None:
    announcing = ToolUse(max_turns=3, call_format=Tags(), tools=ToolsConfig(names=("calculator",)))
    policy = Policy(**{"1+1?": "2"})
    run(announcing, policy)
    (prompt,) = policy.prompts
    assert prompt.startswith("<|im_start|>system\nYou may call a tool")
    assert "<calculator>expression</calculator>" in prompt


class SlowEngine:
    """Answers with delays that reorder the calls, and stops after a number of answers."""

    def __init__(self, answers: int) -> None:
        self.left, self.sampled = answers, Counter[str]()
        self.has_stopped = asyncio.Event()

    async def submit(self, request: Request) -> list[Completion]:
        # What is sampled depends on the request alone, as in an engine.
        rng = np.random.default_rng(request.seed)
        await asyncio.sleep(float(rng.random()) / 200)
        if self.left == 0:
            self.has_stopped.set()
            await asyncio.sleep(3600)
        self.left -= 1
        self.sampled[request.id] += request.num_samples
        return [
            completion(str(rng.integers(0, 3)) * rng.integers(1, 3))
            for _ in range(request.num_samples)
        ]

    async def snapshot(self) -> dict:
        return {}


def test_interrupted_conversation_resumes_identically() -> None:
    chosen = MultiTurn(max_turns=4, turn_discount=0.5, feedback=AGAIN)
    workflow = make_workflow(
        chosen, TOKENIZER, 6, RewardConfig(), max_prompt_tokens=1000, tools=tools
    )
    sampling = Sampling(16, stop_token_ids=TOKENIZER.stop_token_ids)

    async def rolled_out(engine: SlowEngine, journal: dict) -> tuple[list[tuple], dict]:
        calls = JournaledGenerate(engine, 0, sampling, 7, 0, dict(journal))
        working = asyncio.ensure_future(workflow(TASK, calls, grader))
        stopped = asyncio.ensure_future(engine.has_stopped.wait())
        await asyncio.wait((working, stopped), timeout=60, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
            return [], calls.journal
        return [
            (text_of(each.tokens), each.reward, each.versions.tolist()) for each in working.result()
        ], calls.journal

    async def main() -> None:
        whole, journal = await rolled_out(SlowEngine(1000), {})
        assert len(journal) > 6
        for answers in range(1, len(journal)):
            crashed = SlowEngine(answers)
            nothing, kept = await rolled_out(crashed, {})
            assert nothing == [] and len(kept) == answers
            resumed = SlowEngine(1000)
            assert (await rolled_out(resumed, kept))[0] == whole
            # Nothing that was sampled before is sampled again.
            assert not crashed.sampled.keys() & resumed.sampled.keys()

    asyncio.run(main())
