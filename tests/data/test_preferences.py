"""Preference pairs from files in published formats, and from generated problems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chz
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from areal_jax.data.config import Files, HeldOut, PromptConfig, Synthetic, TaskSource
from areal_jax.data.examples import ExampleSet
from areal_jax.data.policy_files import EMBEDDED
from areal_jax.data.preferences import PreferencePair, load_pairs
from areal_jax.data.problems import SyntheticProblems
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.records import Message

TOKENIZER = HFTokenizer.from_folder(EMBEDDED)


def load_sets(
    source: TaskSource,
    eval_source: TaskSource | None = None,
    *,
    seed: int = 0,
    prompt: PromptConfig | None = None,
) -> tuple[ExampleSet[PreferencePair], ExampleSet[PreferencePair]]:
    prompt = prompt or PromptConfig()
    return load_pairs(
        source, eval_source, prompt, TOKENIZER, seed=seed, max_tokens=64, max_pair_tokens=100
    )


def load(source: TaskSource, **changes: Any) -> ExampleSet[PreferencePair]:
    return load_sets(source, None, **changes)[0]


def answers(pair: PreferencePair) -> tuple[str, str]:
    chosen, rejected = (
        TOKENIZER.decode(side.tokens[side.loss_mask]) for side in (pair.chosen, pair.rejected)
    )
    return chosen, rejected


def write(file: Path, *rows: object) -> Files:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return Files(path=str(file))


def turns(*texts: str, first: str = "user") -> list[dict[str, str]]:
    roles = ("user", "assistant") if first == "user" else ("assistant", "user")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"prompt": "One?", "chosen": "1", "rejected": "2"}, {}),
        ({"question": "One?", "chosen": "1", "rejected": "2"}, {}),
        ({"ask": {"text": "One?"}, "chosen": "1", "rejected": "2"}, {"prompt_field": "ask.text"}),
        ({"prompt": "One?", "chosen": turns("One?", "1"), "rejected": turns("One?", "2")}, {}),
        ({"chosen": turns("One?", "1"), "rejected": turns("One?", "2")}, {}),
        (
            {
                "prompt": turns("One?"),
                "chosen": turns("1", first="a"),
                "rejected": turns("2", first="a"),
            },
            {},
        ),
        (
            {
                "chosen": "\n\nHuman: One?\n\nAssistant: 1",
                "rejected": "\n\nHuman: One?\n\nAssistant: 2",
            },
            {},
        ),
        ({"prompt": "\n\nHuman: One?\n\nAssistant:", "chosen": "1", "rejected": "2"}, {}),
    ],
    ids=[
        "texts",
        "question",
        "named prompt",
        "prompt in both",
        "conversations",
        "messages",
        "hh-rlhf",
        "hh-rlhf's prompt",
    ],
)
def test_all_pair_formats_give_the_same_pair(
    row: dict, fields: dict[str, str], tmp_path: Path
) -> None:
    (pair,) = load(chz.replace(write(tmp_path / "pairs.jsonl", row), **fields)).examples
    assert answers(pair) == ("1", "2")
    for side in (pair.chosen, pair.rejected):
        np.testing.assert_array_equal(side.prompt, TOKENIZER.render([Message("user", "One?")]))
        assert (
            side.loss_mask[len(side.prompt) :].all()
            and side.tokens[-1] == TOKENIZER.stop_token_ids[0]
        )


def test_pairs_compare_the_last_answers(tmp_path: Path) -> None:
    row = {"chosen": turns("One?", "1", "Two?", "2"), "rejected": turns("One?", "1", "Two?", "3")}
    text = {
        name: "".join(
            f"\n\n{'Human' if turn['role'] == 'user' else 'Assistant'}: {turn['content']}"
            for turn in messages
        )
        for name, messages in row.items()
    }
    prompt = PromptConfig(system="Be short.", suffix="!")
    for pair in load(write(tmp_path / "pairs.jsonl", row, text), prompt=prompt).examples:
        assert answers(pair) == ("2", "3")
        turns_before = [
            ("system", "Be short."),
            ("user", "One?"),
            ("assistant", "1"),
            ("user", "Two?!"),
        ]
        np.testing.assert_array_equal(
            pair.rejected.prompt, TOKENIZER.render([Message(*turn) for turn in turns_before])
        )


def test_parquet_and_json_hold_the_same_pairs(tmp_path: Path) -> None:
    rows = [{"chosen": turns("One?", "1"), "rejected": turns("One?", "2")}]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    for suffix in ("json", "parquet"):
        assert [
            answers(pair) for pair in load(Files(path=str(tmp_path / f"pairs.{suffix}"))).examples
        ] == [("1", "2")]


def test_bad_rows_are_skipped_with_file_and_line(tmp_path: Path) -> None:
    question = {"prompt": "One?"}
    source = write(
        tmp_path / "pairs.jsonl",
        question | {"chosen": "1", "rejected": "2"},
        "no json",
        question | {"rejected": "2"},
        {"chosen": "1", "rejected": "2"},
        question | {"chosen": "1", "rejected": " "},
        question | {"chosen": "1", "rejected": []},
        question | {"chosen": "1", "rejected": "1"},
        question | {"chosen": "1", "rejected": turns("Two?", "2")},
        {"chosen": turns("One?", "1", "So?"), "rejected": turns("One?", "2", "So?")},
        {"chosen": turns("1", first="a"), "rejected": turns("2", first="a")},
        question | {"chosen": [{"role": "tool", "content": "1"}], "rejected": "2"},
        question | {"chosen": "7 " * 40, "rejected": "1"},
        question | {"chosen": "7 " * 22, "rejected": "8 " * 22},
        {"prompt": "Last?", "chosen": "8", "rejected": "9"},
    )
    found = load(source)
    assert [answers(pair) for pair in found.examples] == [("1", "2"), ("8", "9")]
    assert found.skipped == {
        "not a JSON object": ["pairs.jsonl:2"],
        "no chosen answer": ["pairs.jsonl:3"],
        "no prompt": ["pairs.jsonl:4", "pairs.jsonl:10"],
        "an empty answer": ["pairs.jsonl:5"],
        "no rejected answer": ["pairs.jsonl:6"],
        "the same answer twice": ["pairs.jsonl:7"],
        "answers to different prompts": ["pairs.jsonl:8"],
        "does not end in an answer": ["pairs.jsonl:9"],
        "role tool, expected system, user, assistant": ["pairs.jsonl:11"],
        "longer than 64 tokens": ["pairs.jsonl:12"],
        "pair longer than 100 tokens": ["pairs.jsonl:13"],
    }


def test_source_without_pairs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"no row can be a pair .*chosen and rejected.*problem, question.*set prompt_field$",
    ):
        load(write(tmp_path / "pairs.jsonl", {"text": "none"}))


def test_generated_pairs_prefer_the_right_solution() -> None:
    pairs = load(Synthetic(num_tasks=64)).examples
    assert len(pairs) == 64
    for pair, problem in zip(pairs, SyntheticProblems(64), strict=True):
        chosen, rejected = answers(pair)
        assert chosen == problem.solution and rejected in problem.wrong_solutions
    again, other = (
        load(Synthetic(num_tasks=64)).examples,
        load(Synthetic(num_tasks=64), seed=1).examples,
    )
    assert answers(again[17]) == answers(pairs[0:20][17])
    assert any(answers(again[i]) != answers(other[i]) for i in range(64))


def test_all_pairs_of_a_prompt_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 10}?", "chosen": f"{i}", "rejected": "none"} for i in range(40)]
    train, heldout = load_sets(write(tmp_path / "pairs.jsonl", *rows), HeldOut(share=0.2))
    prompts = [
        {pair.chosen.prompt.tobytes() for pair in found.examples} for found in (train, heldout)
    ]
    assert (len(train.examples), len(heldout.examples)) == (32, 8)
    assert not prompts[0] & prompts[1]
    generated, unseen = load_sets(Synthetic(num_tasks=8), HeldOut(max_examples=4))
    assert (len(generated.examples), len(unseen.examples)) == (8, 4)
