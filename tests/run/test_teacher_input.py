"""What a teacher reads: hints, and text in the tokens of another tokenizer."""

from __future__ import annotations

import json

import numpy as np
import pytest

from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tokenizer_training import problem_texts, tokenizer_config, train_tokenizer
from areal_jax.records import Message, Sample, Task
from areal_jax.rl.config import CrossTokenizer, SampledTokens, Teacher
from areal_jax.run.teacher_input import teacher_input

TASK = Task("t", (Message("user", "Find 3 + 4 mod 5."),), "2")
TEXT = "We have 3 + 4 = 7. \u00bfIs 7 mod 5 = 2? \u4f60\u597d, so \\boxed{2}"


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    return HFTokenizer.from_folder(resolve_policy_folder("embedded", "policy.path"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """A tokenizer with fewer merges, whose stop token has another id."""
    folder = tmp_path_factory.mktemp("other")
    train_tokenizer(problem_texts(20), 340).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config()))
    return HFTokenizer.from_folder(folder)


def sample_of(tokenizer: HFTokenizer, *, is_ended: bool = True) -> Sample:
    prompt, answer = tokenizer.render(TASK.prompt), tokenizer.encode(TEXT)
    if is_ended:
        answer = np.append(answer, np.int32(tokenizer.stop_token_ids[0]))
    tokens = np.concatenate([prompt, answer]).astype(np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    zeros = np.zeros(len(tokens), np.float32)
    versions = np.zeros(len(tokens), np.int32)
    return Sample(tokens, mask, zeros, versions, 1.0, "correct", "stop" if is_ended else "length")


def test_a_hint_is_a_system_message_before_the_same_answer(tokenizer: HFTokenizer) -> None:
    teacher = Teacher(path="current", hint="The answer is {answer}.", distillation=SampledTokens())
    size = tokenizer.vocab_size
    read_as = teacher_input(teacher, tokenizer, size, tokenizer, size)
    sample = sample_of(tokenizer)
    assert read_as.read is not None
    reading = read_as.read(TASK, sample)
    hinted = (Message("system", "The answer is 2."), *TASK.prompt)
    prompt = tokenizer.render(hinted)
    np.testing.assert_array_equal(reading.tokens[: len(prompt)], prompt)
    np.testing.assert_array_equal(reading.tokens[len(prompt) :], sample.tokens[sample.loss_mask])
    np.testing.assert_array_equal(reading.tokens[reading.starts], sample.tokens[reading.own_starts])
    assert len(reading.starts) == sample.loss_mask.sum()


@pytest.mark.parametrize("is_ended", [True, False])
def test_spans_of_two_tokenizers_have_the_same_text(
    is_ended: bool, tokenizer: HFTokenizer, other: HFTokenizer
) -> None:
    sample = sample_of(tokenizer, is_ended=is_ended)
    read_as = teacher_input(
        Teacher(path="other", distillation=CrossTokenizer()),
        tokenizer,
        tokenizer.vocab_size,
        other,
        other.vocab_size,
    )
    assert read_as.read is not None and read_as.vocabulary is not None
    reading = read_as.read(TASK, sample)
    own = [
        tokenizer.decode(sample.tokens[i:j])
        for i, j in zip(reading.own_starts, reading.own_stops, strict=True)
    ]
    theirs = [
        other.decode(reading.tokens[i:j])
        for i, j in zip(reading.starts, reading.stops, strict=True)
    ]
    assert own == theirs
    assert "".join(own) == TEXT
    # They follow each other to the end.
    start = int(sample.loss_mask.argmax())
    assert reading.own_starts.tolist() == [start, *reading.own_stops[:-1]]
    assert reading.own_stops[-1] == len(sample.tokens)
    assert reading.starts.tolist() == [len(other.render(TASK.prompt)), *reading.stops[:-1]]
    assert reading.stops[-1] == len(reading.tokens)
    # Several tokens of the teacher make one of the policy's, and the ends mean the same.
    lengths = reading.stops - reading.starts
    assert lengths.max() > 1
    if is_ended:
        assert read_as.vocabulary.own_ids[reading.tokens[-1]] == sample.tokens[-1]


def test_shared_tokens_are_those_of_equal_text(tokenizer: HFTokenizer, other: HFTokenizer) -> None:
    read_as = teacher_input(
        Teacher(path="other", distillation=CrossTokenizer()),
        tokenizer,
        tokenizer.vocab_size,
        other,
        other.vocab_size,
    )
    assert read_as.vocabulary is not None
    own_ids, shared = read_as.vocabulary
    ours, theirs = tokenizer.vocabulary(), other.vocabulary()
    expected = {token for token in theirs if token in ours}
    assert {theirs[token] for token in expected} == set(np.flatnonzero(own_ids >= 0).tolist())
    assert all(own_ids[theirs[token]] == ours[token] for token in expected)
    assert shared.sum() == len(expected) < tokenizer.vocab_size
