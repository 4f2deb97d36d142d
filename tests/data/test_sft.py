"""What the embedded policy learns from, and conversations of users' own."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import areal_jax.models
from areal_jax.data.config import Files, Hub, PromptConfig, Synthetic
from areal_jax.data.problems import FAMILIES, SyntheticProblems
from areal_jax.data.sft import (
    DRILL_SHARE,
    GUESS_SHARE,
    RIGHT_SHARE,
    SupervisedExample,
    draw_answer,
    encode_drill,
    load_examples,
)
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tokenizer_training import SPECIAL_TOKENS, train_tokenizer
from areal_jax.records import Message

EMBEDDED = Path(next(iter(areal_jax.models.__path__))) / "embedded"
TOKENIZER = HFTokenizer.from_folder(EMBEDDED)


def said(example: SupervisedExample) -> str:
    return TOKENIZER.decode(example.tokens[example.loss_mask])


@given(st.text())
def test_any_text_comes_back_from_the_tokenizer(text: str) -> None:
    # Special tokens written out in a text are those tokens, and decode leaves them out.
    if not any(special in text for special in SPECIAL_TOKENS):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.integers(min_value=0))
def test_each_digit_is_a_token(number: int) -> None:
    assert len(TOKENIZER.encode(f"{number}")) == len(str(number))


def test_training_the_tokenizer_twice_makes_the_same() -> None:
    one, two = (train_tokenizer(vocab_size=400, num_problems=48) for _ in range(2))
    assert one.to_str() == two.to_str()
    assert one.get_vocab_size() == 400
    assert [one.token_to_id(special) for special in SPECIAL_TOKENS] == [0, 1, 2]


def test_a_conversation_is_rendered_in_few_tokens() -> None:
    # <|im_start|> user \n ... <|im_end|> \n <|im_start|> assistant \n: eight around the question.
    question = "What is 12+7?"
    assert len(TOKENIZER.render([Message("user", question)])) == len(TOKENIZER.encode(question)) + 8


def test_prompts_and_answers_are_short_in_tokens() -> None:
    problems = SyntheticProblems(15 * len(FAMILIES))
    prompts = [len(TOKENIZER.render([Message("user", p.question)])) for p in problems]
    answers = [len(TOKENIZER.encode(p.solution)) + 1 for p in problems]
    assert max(prompts) <= 44 and np.mean(prompts) < 32
    assert max(answers) <= 60 and np.mean(answers) < 32


def test_an_example_ends_its_prompt_with_the_answer_and_learns_that_alone() -> None:
    examples = load_examples(Synthetic(num_tasks=64), PromptConfig(), TOKENIZER, seed=0, max_tokens=128).examples
    num_drills = 0
    for example, problem in zip(examples, SyntheticProblems(64), strict=True):
        prompt = TOKENIZER.render([Message("user", problem.question)])
        if len(prompt) > len(example.tokens) or (prompt != example.tokens[: len(prompt)]).any():
            assert "Practice." in TOKENIZER.decode(example.tokens)
            num_drills += 1
            continue
        np.testing.assert_array_equal(np.flatnonzero(example.loss_mask), np.arange(len(prompt), len(example.tokens)))
        assert example.tokens[-1] == TOKENIZER.stop_token_ids[0]
        answer = said(example)
        assert answer in (problem.solution, *problem.wrong_solutions) or answer.startswith("\\boxed{")
    # 64 draws: the mean is 19.2, one standard deviation 3.7.
    assert num_drills == pytest.approx(64 * DRILL_SHARE, abs=11)


def test_a_drill_asks_and_learns_the_results_alone() -> None:
    example = encode_drill(TOKENIZER, ["12*3=36", "83=7*11+6"], PromptConfig())
    before = TOKENIZER.render([Message("user", "Practice.")])
    whole = np.concatenate([before, TOKENIZER.encode("12*3=36\n83=7*11+6\n")])
    np.testing.assert_array_equal(example.tokens, whole)
    assert said(example) == "36\n11+6\n"


def test_examples_are_the_same_whenever_they_are_asked_for() -> None:
    source = Synthetic(num_tasks=64)
    one, two = (load_examples(source, PromptConfig(), TOKENIZER, seed=4, max_tokens=128).examples for _ in range(2))
    np.testing.assert_array_equal(one[17].tokens, two[0:20][17].tokens)
    other = load_examples(source, PromptConfig(), TOKENIZER, seed=5, max_tokens=128).examples
    assert any(said(one[i]) != said(other[i]) for i in range(8))


def test_answers_are_drawn_in_the_shares_that_are_set() -> None:
    assert set(RIGHT_SHARE) == set(FAMILIES)
    for family in ("rectangle", "digit_sum"):
        problem, chance = SyntheticProblems(1, families=(family,))[0], random.Random(0)
        drawn = Counter(draw_answer(problem, chance) for _ in range(4000))
        right = drawn[problem.solution] / 4000
        # One standard deviation is at most sqrt(0.25 / 4000) = 0.008.
        assert right == pytest.approx((1 - GUESS_SHARE) * RIGHT_SHARE[family], abs=0.03)
        wrong = [drawn[wrong] / 4000 for wrong in problem.wrong_solutions]
        each = (1 - GUESS_SHARE) * (1 - RIGHT_SHARE[family]) / len(wrong)
        assert wrong == pytest.approx([each] * len(wrong), abs=0.03)
        guesses = {text for text in drawn if text not in (problem.solution, *problem.wrong_solutions)}
        assert guesses and f"\\boxed{{{problem.answer}}}" not in guesses


def test_every_answer_of_a_conversation_makes_an_example(tmp_path: Path) -> None:
    turns = [("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")]
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]},
        {"text": "no conversation"},
        {"messages": [{"role": "user", "content": "Unanswered?"}]},
        {"messages": [{"role": "user", "content": "Long?"}, {"role": "assistant", "content": "7 " * 50}]},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\nno json\n")
    examples, skipped = load_examples(
        Files(path=str(file)), PromptConfig(system="Be short.", suffix="!"), TOKENIZER, seed=0, max_tokens=60
    )
    assert [said(example) for example in examples] == ["1", "2"]
    prompt = [Message("system", "Be short."), *(Message(*turn) for turn in turns[:2]), Message("user", "Two?!")]
    np.testing.assert_array_equal(examples[1].tokens[~examples[1].loss_mask], TOKENIZER.render(prompt))
    assert skipped == {"no messages that end in an answer of the assistant": 3, "longer than 60 tokens": 1}


def test_a_source_without_examples_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("{}\n")
    with pytest.raises(ValueError, match="no row can be an example"):
        load_examples(Files(path=str(empty)), PromptConfig(), TOKENIZER, seed=0, max_tokens=60)
    with pytest.raises(ValueError, match="expected Synthetic or Files, came Hub"):
        load_examples(Hub(name="a/b"), PromptConfig(), TOKENIZER, seed=0, max_tokens=60)
