"""Pairs of answers from files in the forms in which others publish them, and from generated
problems."""

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


def load_both(
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
    return load_both(source, None, **changes)[0]


def said(pair: PreferencePair) -> tuple[str, str]:
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
def test_the_forms_in_which_pairs_are_published_are_the_same_pair(
    row: dict, fields: dict[str, str], tmp_path: Path
) -> None:
    (pair,) = load(chz.replace(write(tmp_path / "pairs.jsonl", row), **fields)).examples
    assert said(pair) == ("1", "2")
    for side in (pair.chosen, pair.rejected):
        np.testing.assert_array_equal(side.prompt, TOKENIZER.render([Message("user", "One?")]))
        assert (
            side.loss_mask[len(side.prompt) :].all()
            and side.tokens[-1] == TOKENIZER.stop_token_ids[0]
        )


def test_of_longer_conversations_the_last_answers_are_compared(tmp_path: Path) -> None:
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
        assert said(pair) == ("2", "3")
        asked = [("system", "Be short."), ("user", "One?"), ("assistant", "1"), ("user", "Two?!")]
        np.testing.assert_array_equal(
            pair.rejected.prompt, TOKENIZER.render([Message(*turn) for turn in asked])
        )


def test_parquet_and_json_hold_the_same_pairs(tmp_path: Path) -> None:
    rows = [{"chosen": turns("One?", "1"), "rejected": turns("One?", "2")}]
    (tmp_path / "pairs.json").write_text(json.dumps(rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    for suffix in ("json", "parquet"):
        assert [
            said(pair) for pair in load(Files(path=str(tmp_path / f"pairs.{suffix}"))).examples
        ] == [("1", "2")]


def test_bad_rows_are_skipped_and_named_with_file_and_line(tmp_path: Path) -> None:
    one = {"prompt": "One?"}
    source = write(
        tmp_path / "pairs.jsonl",
        one | {"chosen": "1", "rejected": "2"},
        "no json",
        one | {"rejected": "2"},
        {"chosen": "1", "rejected": "2"},
        one | {"chosen": "1", "rejected": " "},
        one | {"chosen": "1", "rejected": []},
        one | {"chosen": "1", "rejected": "1"},
        one | {"chosen": "1", "rejected": turns("Two?", "2")},
        {"chosen": turns("One?", "1", "So?"), "rejected": turns("One?", "2", "So?")},
        {"chosen": turns("1", first="a"), "rejected": turns("2", first="a")},
        one | {"chosen": [{"role": "tool", "content": "1"}], "rejected": "2"},
        one | {"chosen": "7 " * 40, "rejected": "1"},
        one | {"chosen": "7 " * 22, "rejected": "8 " * 22},
        {"prompt": "Last?", "chosen": "8", "rejected": "9"},
    )
    found = load(source)
    assert [said(pair) for pair in found.examples] == [("1", "2"), ("8", "9")]
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


def test_a_source_without_pairs_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError,
        match=r"no row can be a pair .*chosen and rejected.*problem, question.*Set prompt_field$",
    ):
        load(write(tmp_path / "pairs.jsonl", {"text": "none"}))


def test_of_a_generated_problem_the_right_solution_is_chosen_and_a_wrong_one_rejected() -> None:
    pairs = load(Synthetic(num_tasks=64)).examples
    assert len(pairs) == 64
    for pair, problem in zip(pairs, SyntheticProblems(64), strict=True):
        chosen, rejected = said(pair)
        assert chosen == problem.solution and rejected in problem.wrong_solutions
    again, other = (
        load(Synthetic(num_tasks=64)).examples,
        load(Synthetic(num_tasks=64), seed=1).examples,
    )
    assert said(again[17]) == said(pairs[0:20][17])
    assert any(said(again[i]) != said(other[i]) for i in range(64))


def test_all_pairs_of_a_prompt_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 10}?", "chosen": f"{i}", "rejected": "none"} for i in range(40)]
    train, apart = load_both(write(tmp_path / "pairs.jsonl", *rows), HeldOut(share=0.2))
    asked = [{pair.chosen.prompt.tobytes() for pair in found.examples} for found in (train, apart)]
    assert (len(train.examples), len(apart.examples)) == (32, 8) and not asked[0] & asked[1]
    generated, unseen = load_both(Synthetic(num_tasks=8), HeldOut(max_examples=4))
    assert (len(generated.examples), len(unseen.examples)) == (8, 4)
