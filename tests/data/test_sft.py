"""Examples of the embedded policy, and of user-supplied conversations."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import areal_jax.models
from areal_jax.data.config import Files, HeldOut, PromptConfig, Synthetic, TaskSource
from areal_jax.data.examples import ExampleSet
from areal_jax.data.problems import FAMILIES, SyntheticProblems
from areal_jax.data.sft import (
    DRILL_SHARE,
    GUESS_SHARE,
    RIGHT_SHARE,
    SupervisedExample,
    encode_drill,
    load_examples,
    sample_answer,
)
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.data.tokenizer_training import SPECIAL_TOKENS, problem_texts, train_tokenizer
from areal_jax.records import Message

EMBEDDED = Path(next(iter(areal_jax.models.__path__))) / "embedded"
TOKENIZER = HFTokenizer.from_folder(EMBEDDED)


def load_sets(
    source: TaskSource,
    eval_source: TaskSource | None = None,
    *,
    seed: int = 0,
    prompt: PromptConfig = PromptConfig(),  # noqa: B008
    tokenizer: HFTokenizer = TOKENIZER,
) -> tuple[ExampleSet[SupervisedExample], ExampleSet[SupervisedExample]]:
    return load_examples(source, eval_source, prompt, tokenizer, seed=seed, max_tokens=128)


def load(source: TaskSource, **changes: Any) -> ExampleSet[SupervisedExample]:
    return load_sets(source, None, **changes)[0]


def answers_of(example: SupervisedExample) -> str:
    return TOKENIZER.decode(example.tokens[example.loss_mask])


@given(st.text())
@pytest.mark.slow
def test_decoding_inverts_encoding(text: str) -> None:
    # Special tokens in a text are encoded as such, and decode leaves them out.
    if not any(special in text for special in SPECIAL_TOKENS):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(st.integers(min_value=0))
def test_each_digit_is_a_token(number: int) -> None:
    assert len(TOKENIZER.encode(f"{number}")) == len(str(number))


def test_tokenizer_training_is_deterministic() -> None:
    one, two = (train_tokenizer(problem_texts(48), vocab_size=400) for _ in range(2))
    assert one.to_str() == two.to_str()
    assert one.get_vocab_size() == 400
    assert [one.token_to_id(special) for special in SPECIAL_TOKENS] == [0, 1, 2]


def test_chat_template_adds_eight_tokens() -> None:
    # <|im_start|> user \n ... <|im_end|> \n <|im_start|> assistant \n: eight around the question.
    question = "What is 12+7?"
    assert len(TOKENIZER.render([Message("user", question)])) == len(TOKENIZER.encode(question)) + 8


def test_prompts_and_answers_are_short_in_tokens() -> None:
    problems = SyntheticProblems(15 * len(FAMILIES))
    prompts = [len(TOKENIZER.render([Message("user", p.question)])) for p in problems]
    answers = [len(TOKENIZER.encode(p.solution)) + 1 for p in problems]
    assert max(prompts) <= 44 and np.mean(prompts) < 32
    assert max(answers) <= 60 and np.mean(answers) < 32


def test_only_answers_are_learnt() -> None:
    examples = load(Synthetic(num_tasks=64)).examples
    num_drills = 0
    for example, problem in zip(examples, SyntheticProblems(64), strict=True):
        prompt = TOKENIZER.render([Message("user", problem.question)])
        if len(prompt) > len(example.tokens) or (prompt != example.tokens[: len(prompt)]).any():
            assert "Practice." in TOKENIZER.decode(example.tokens)
            num_drills += 1
            continue
        np.testing.assert_array_equal(
            np.flatnonzero(example.loss_mask), np.arange(len(prompt), len(example.tokens))
        )
        assert example.tokens[-1] == TOKENIZER.stop_token_ids[0]
        answer = answers_of(example)
        assert answer in (problem.solution, *problem.wrong_solutions) or answer.startswith(
            "\\boxed{"
        )
    # 64 samples: the mean is 19.2, one standard deviation 3.7.
    assert num_drills == pytest.approx(64 * DRILL_SHARE, abs=11)


def test_number_of_examples_equals_number_of_problems() -> None:
    # Under some of the seeds the first example is a drill.
    for seed in range(8):
        examples = load(Synthetic(num_tasks=4), seed=seed).examples
        assert len(list(examples)) == len(examples) == 4


def test_few_problems_make_shorter_drills() -> None:
    # One problem has few distinct steps, or none: then the example is its answer.
    drilled = set[bool]()
    for seed in range(40):
        (example,) = load(Synthetic(num_tasks=1, seed=seed % 8), seed=seed).examples
        assert example.loss_mask.any()
        drilled.add("Practice." in TOKENIZER.decode(example.tokens))
    assert drilled == {True, False}


def test_drill_learns_the_results_alone() -> None:
    example = encode_drill(TOKENIZER, ["12*3=36", "83=7*11+6"], PromptConfig())
    before = TOKENIZER.render([Message("user", "Practice.")])
    expected = np.concatenate([before, TOKENIZER.encode("12*3=36\n83=7*11+6\n")])
    np.testing.assert_array_equal(example.tokens, expected)
    assert answers_of(example) == "36\n11+6\n"


def test_generated_examples_are_deterministic() -> None:
    source = Synthetic(num_tasks=64)
    one, two = (load(source, seed=4).examples for _ in range(2))
    np.testing.assert_array_equal(one[17].tokens, two[0:20][17].tokens)
    other = load(source, seed=5).examples
    assert any(answers_of(one[i]) != answers_of(other[i]) for i in range(8))


def test_answers_are_sampled_with_the_set_shares() -> None:
    assert set(RIGHT_SHARE) == set(FAMILIES)
    for family in ("rectangle", "digit_sum"):
        problem, chance = SyntheticProblems(1, families=(family,))[0], random.Random(0)
        sampled = Counter(sample_answer(problem, chance) for _ in range(4000))
        right = sampled[problem.solution] / 4000
        # One standard deviation is at most sqrt(0.25 / 4000) = 0.008.
        assert right == pytest.approx((1 - GUESS_SHARE) * RIGHT_SHARE[family], abs=0.03)
        wrong = [sampled[wrong] / 4000 for wrong in problem.wrong_solutions]
        each = (1 - GUESS_SHARE) * (1 - RIGHT_SHARE[family]) / len(wrong)
        assert wrong == pytest.approx([each] * len(wrong), abs=0.03)
        guesses = {
            text for text in sampled if text not in (problem.solution, *problem.wrong_solutions)
        }
        assert guesses and f"\\boxed{{{problem.answer}}}" not in guesses


TURNS = [("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")]


def chat(*turns: tuple[str, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write(file: Path, *rows: object) -> Files:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return Files(path=str(file))


def test_conversation_answers_are_learnt_in_one_example(tmp_path: Path) -> None:
    (example,) = load(
        write(tmp_path / "chat.jsonl", chat(("system", "Be short."), *TURNS))
    ).examples
    turns = [
        ("system", "Be short.", False),
        *((role, text, role == "assistant") for role, text in TURNS),
    ]
    tokens, mask = list[int](), list[bool]()
    for role, text, learnt in turns:
        # The words and their stop token are learnt, not the line break after it.
        for piece, in_mask in (
            (f"<|im_start|>{role}\n", False),
            (f"{text}<|im_end|>", learnt),
            ("\n", False),
        ):
            encoded = TOKENIZER.encode(piece)
            tokens += encoded.tolist()
            mask += [in_mask] * len(encoded)
    # Nothing follows the last answer.
    np.testing.assert_array_equal(example.tokens, tokens[:-1])
    np.testing.assert_array_equal(example.loss_mask, mask[:-1])


def test_answers_with_changed_context_start_new_examples(
    tmp_path: Path,
) -> None:
    # Only the last question has the suffix.
    prompt = PromptConfig(system="Be short.", suffix="!")
    one, two = load(write(tmp_path / "chat.jsonl", chat(*TURNS)), prompt=prompt).examples
    assert [answers_of(one), answers_of(two)] == ["1", "2"]
    context = [
        Message("system", "Be short."),
        *(Message(*turn) for turn in TURNS[:2]),
        Message("user", "Two?!"),
    ]
    np.testing.assert_array_equal(two.tokens[~two.loss_mask], TOKENIZER.render(context))


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"question": "One?", "answer": "1 #### 1"}, {}),
        ({"prompt": "One?", "response": "1 #### 1"}, {}),
        (
            {
                "prompt": [{"role": "user", "content": "One?"}],
                "completion": [{"role": "assistant", "content": "1 #### 1"}],
            },
            {},
        ),
        (
            {"ask": {"text": "One?"}, "say": "1 #### 1"},
            {"prompt_field": "ask.text", "answer_field": "say"},
        ),
        (
            {"turns": chat(("user", "One?"), ("assistant", "1 #### 1"))["messages"]},
            {"prompt_field": "turns"},
        ),
    ],
    ids=[
        "question and answer",
        "prompt and response",
        "messages and completion",
        "named fields",
        "named messages",
    ],
)
def test_prompt_and_answer_rows_are_conversations(
    row: dict, fields: dict[str, str], tmp_path: Path
) -> None:
    (example,) = load(chz.replace(write(tmp_path / "pairs.jsonl", row), **fields)).examples
    assert answers_of(example) == "1 #### 1"
    np.testing.assert_array_equal(
        example.tokens[~example.loss_mask], TOKENIZER.render([Message("user", "One?")])
    )


def test_parquet_and_json_hold_the_same_conversations(tmp_path: Path) -> None:
    rows = [chat(*TURNS), chat(("user", "Three?"), ("assistant", "3"))]
    (tmp_path / "chat.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    lines = load(write(tmp_path / "chat.jsonl", *rows)).examples
    for suffix in ("json", "parquet"):
        found = load(Files(path=str(tmp_path / f"chat.{suffix}"))).examples
        assert [example.tokens.tolist() for example in found] == [
            example.tokens.tolist() for example in lines
        ]


def test_bad_rows_are_skipped_with_file_and_line(tmp_path: Path) -> None:
    source = write(
        tmp_path / "chat.jsonl",
        chat(*TURNS),
        "no json",
        {"text": "no conversation"},
        chat(("user", "Unanswered?")),
        {"question": "Unanswered?"},
        chat(("tool", "7"), ("assistant", "1")),
        chat(("assistant", "Hello."), ("user", "Hm?")),
        chat(("user", "Picture?"), ("assistant", ["an image"])),
        chat(("user", "Empty?"), ("assistant", " ")),
        chat(("user", "Long?"), ("assistant", "7 " * 100)),
        chat(("user", "Last?"), ("assistant", "9")),
    )
    found = load(source)
    assert [answers_of(example) for example in found.examples] == ["12", "9"]
    assert found.skipped == {
        "not a JSON object": ["chat.jsonl:2"],
        "no prompt": ["chat.jsonl:3"],
        "no answer of the assistant": ["chat.jsonl:4", "chat.jsonl:5"],
        "role tool, expected system, user, assistant": ["chat.jsonl:6"],
        "begins with an answer": ["chat.jsonl:7"],
        "prompt is neither text nor messages": ["chat.jsonl:8"],
        "an empty answer": ["chat.jsonl:9"],
        "longer than 128 tokens": ["chat.jsonl:10"],
    }


def test_template_refusals_are_skipped_rows(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% "
        "endif %}{{ m['content'] }}{% endfor %}"
    )
    source = write(tmp_path / "chat.jsonl", chat(("system", "?"), *TURNS), chat(*TURNS[:2]))
    assert load(source, tokenizer=HFTokenizer.from_folder(tmp_path)).skipped == {
        "the chat template refuses the conversation: no system": ["chat.jsonl:1"]
    }


def test_held_out_prompts_are_not_trained_on(
    tmp_path: Path,
) -> None:
    # 40 prompts, each with three answers, in an order that mixes them.
    rows = [chat(("user", f"{i % 40}?"), ("assistant", f"{i}")) for i in range(120)]

    def split(*rows: object, held_out: HeldOut = HeldOut(share=0.1)) -> tuple[set[str], set[str]]:  # noqa: B008
        train, heldout = load_sets(write(tmp_path / "chat.jsonl", *rows), held_out)
        answers = [
            [answers_of(example) for example in found.examples] for found in (train, heldout)
        ]
        assert len(answers[0]) + len(answers[1]) == len(rows)
        return set(answers[0]), set(answers[1])

    train, heldout = split(*rows)
    # A tenth of 40 prompts with three answers each.
    assert len(heldout) == 12 and len(train) == 108 and not train & heldout
    assert {int(answer) % 40 for answer in train} & {
        int(answer) % 40 for answer in heldout
    } == set()
    # The order does not matter.
    assert split(*rows[::-1]) == (train, heldout)
    assert len(split(*rows, held_out=HeldOut(share=0.5, max_examples=2))[1]) == 6
    with pytest.raises(ValueError, match=r"leaves none of 1 prompts.*eval_examples\.share"):
        split(rows[0])


def test_generated_held_out_examples_use_the_heldout_split() -> None:
    train, heldout = load_sets(
        Synthetic(num_tasks=16, difficulty="medium"), HeldOut(max_examples=8)
    )
    assert (len(train.examples), len(heldout.examples)) == (16, 8)
    other = load(Synthetic(num_tasks=8, split="heldout", difficulty="medium")).examples
    assert [answers_of(example) for example in heldout.examples] == [
        answers_of(example) for example in other
    ]


def test_evaluation_examples_may_have_their_own_source(tmp_path: Path) -> None:
    train, heldout = load_sets(
        Synthetic(num_tasks=16), write(tmp_path / "test.jsonl", chat(*TURNS))
    )
    assert len(train.examples) == 16
    assert [answers_of(example) for example in heldout.examples] == ["12"]


def test_a_source_without_examples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"empty\.jsonl: no row can be an example \(1 no prompt \(empty\.jsonl:1\)\)",
    ):
        load(write(tmp_path / "empty.jsonl", {}))
    with pytest.raises(
        ValueError,
        match="expected Synthetic, Exercises, Repositories, ReasoningGym, Files or Hub, found HeldOut",
    ):
        load(HeldOut())
