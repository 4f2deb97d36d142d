from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import (
    NO_VERSION,
    Completion,
    Message,
    ResultKind,
    RewardResult,
    Sample,
    StopReason,
    Task,
)
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.service import RewardService
from areal_jax.workflows.single_turn import GradingFailed, SingleTurn

TASK = Task("sum", (Message("user", "1+1?"),), "2")
STOP = 0


@pytest.fixture
def tokenizer() -> HFTokenizer:
    """One token per character, and a stop token."""
    inner = tokenizers.Tokenizer(
        models.WordLevel({"<stop>": STOP, "?": 1} | {chr(c): c for c in range(32, 127)}, "?")
    )
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken("<stop>", special=True)])
    return HFTokenizer(inner, "{{ messages[0].content }}=", {}, [STOP])


def completion(tokenizer: HFTokenizer, text: str, stop: StopReason, version: int) -> Completion:
    tokens = tokenizer.encode(text)
    if stop == "stop":
        tokens = np.append(tokens, np.int32(STOP))
    return Completion(
        tokens, -np.ones(len(tokens), np.float32), np.full(len(tokens), version, np.int32), stop
    )


def run(
    tokenizer: HFTokenizer,
    completions: list[Completion],
    grader: Callable[[Task, str], object],
    requests: list[tuple[list[int], int]] | None = None,
) -> tuple[Sample, ...]:
    async def generate(prompt_tokens: np.ndarray, num_samples: int) -> list[Completion]:
        if requests is not None:
            requests.append((prompt_tokens.tolist(), num_samples))
        return completions

    workflow = SingleTurn(tokenizer, len(completions), RewardConfig())
    return asyncio.run(workflow(TASK, generate, grader))  # type: ignore[arg-type]


def result_of_kind(kind: ResultKind) -> Callable[[Task, str], object]:
    async def grader(task: Task, answer: str) -> RewardResult:
        return RewardResult(kind)

    return grader


def test_sample_arrays_are_aligned_with_tokens(tokenizer: HFTokenizer) -> None:
    requests: list[tuple[list[int], int]] = []
    sampled = [completion(tokenizer, "2", "stop", 3), completion(tokenizer, "17", "length", 4)]
    samples = run(tokenizer, sampled, result_of_kind("correct"), requests)
    prompt = [ord(c) for c in "1+1?="]
    assert requests == [(prompt, 2)]
    stopped, cut = samples
    # The prompt's five tokens are context; the answer is trained on, with the token that stops it.
    assert stopped.tokens.tolist() == [*prompt, ord("2"), STOP]
    assert stopped.loss_mask.tolist() == [False] * 5 + [True] * 2
    assert stopped.behave_logp.tolist() == [0.0] * 5 + [-1.0] * 2
    assert stopped.versions.tolist() == [NO_VERSION] * 5 + [3] * 2
    assert cut.tokens.tolist() == [*prompt, ord("1"), ord("7")]
    assert (stopped.stop_reason, cut.stop_reason) == ("stop", "length")
    for sample in samples:
        lengths = {
            len(a) for a in (sample.tokens, sample.loss_mask, sample.behave_logp, sample.versions)
        }
        assert lengths == {len(sample.tokens)}
        assert (sample.tokens.dtype, sample.behave_logp.dtype, sample.versions.dtype) == (
            np.int32,
            np.float32,
            np.int32,
        )


@pytest.mark.parametrize("kind", ["correct", "wrong", "no_answer", "timeout", "crashed"])
def test_reward_of_a_grade_follows_the_settings(tokenizer: HFTokenizer, kind: ResultKind) -> None:
    (sample,) = run(tokenizer, [completion(tokenizer, "2", "stop", 0)], result_of_kind(kind))
    assert sample.reward == (5.0 if kind == "correct" else -5.0)
    assert sample.grade == kind


def test_failing_grader_is_not_a_wrong_answer(tokenizer: HFTokenizer) -> None:
    async def grader(task: Task, answer: str) -> RewardResult:
        if answer == "2":
            return RewardResult("infrastructure", "no process")
        await asyncio.sleep(0.01)
        graded.append(answer)
        return RewardResult("correct")

    graded = list[str]()
    with pytest.raises(GradingFailed, match="no process"):
        run(tokenizer, [completion(tokenizer, text, "stop", 0) for text in ("1", "2", "3")], grader)
    # Whether every call fails is known only when the others have ended.
    assert graded == ["1", "3"]


def test_failed_reward_call_of_any_kind_is_not_a_wrong_answer(tokenizer: HFTokenizer) -> None:
    async def grader(task: Task, answer: str) -> RewardResult:
        return RewardResult("crashed", "ValueError: boom", failed=True)

    with pytest.raises(GradingFailed, match="boom"):
        run(tokenizer, [completion(tokenizer, "2", "stop", 0)], grader)


def test_raw_score_is_the_reward(tokenizer: HFTokenizer) -> None:
    async def grader(task: Task, answer: str) -> RewardResult:
        return RewardResult("scored", score=-12.5)

    (sample,) = run(tokenizer, [completion(tokenizer, "2", "stop", 0)], grader)
    assert (sample.reward, sample.grade) == (-12.5, "scored")


def test_answers_are_graded_concurrently_each_with_its_own_result(
    tokenizer: HFTokenizer,
) -> None:
    waiting = asyncio.Event()
    seen: list[str] = []

    async def grader(task: Task, answer: str) -> RewardResult:
        seen.append(answer)
        if len(seen) == 3:
            waiting.set()
        await asyncio.wait_for(waiting.wait(), 5)
        return RewardResult("correct" if answer == task.answer else "wrong")

    sampled = [completion(tokenizer, text, "stop", 0) for text in ("1", "2", "3")]
    samples = run(tokenizer, sampled, grader)
    assert [sample.reward for sample in samples] == [-5.0, 5.0, -5.0]
    # The grader reads the answer without its stop token.
    assert sorted(seen) == ["1", "2", "3"]


def test_boxed_answers_are_graded_by_the_reward_service(
    tokenizer: HFTokenizer, tmp_path: Path
) -> None:
    async def main() -> list[tuple[float, str]]:
        sampled = [
            completion(tokenizer, text, "stop", 0)
            for text in ("so \\boxed{02}", "\\boxed{3}", "two", "\\boxed{2} and")
        ]
        sampled[3] = completion(tokenizer, "\\boxed{2} and", "length", 0)

        async def generate(
            prompt_tokens: np.ndarray, num_samples: int, **_: Any
        ) -> list[Completion]:
            return sampled

        async with RewardService(RewardConfig()) as grader:
            samples = await SingleTurn(tokenizer, 4, RewardConfig())(TASK, generate, grader)
            return [(sample.reward, sample.grade) for sample in samples]

    # An answer that is right before it is cut is right.
    assert asyncio.run(main()) == [
        (5.0, "correct"),
        (-5.0, "wrong"),
        (-5.0, "no_answer"),
        (5.0, "correct"),
    ]
