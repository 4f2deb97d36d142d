"""Sources that `data=` names, and the formats of the benchmarks by their columns."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import pytest

from areal_jax.data import code_tasks
from areal_jax.data.benchmarks import BENCHMARKS, find_benchmark
from areal_jax.data.config import Files, Hub, PromptConfig
from areal_jax.data.sources import load_tasks

PRIVATE = json.dumps([{"input": "4 5\n", "output": "9\n"}])

ROWS: dict[str, dict[str, Any]] = {
    "aime24": {
        "id": 60,
        "problem": "Add 1 and 2.",
        "solution": "It is 3.",
        "answer": "003",
        "url": "",
        "year": 2024,
    },
    "aime25": {"problem": "Add 1 and 2.", "answer": "3", "id": "0"},
    "amc23": {"id": 0, "question": "Add 1 and 2.", "answer": 3.0, "url": "https://example.org"},
    "math500": {
        "problem": "Halve 1.",
        "solution": "...",
        "answer": "\\frac{1}{2}",
        "subject": "Algebra",
        "level": 2,
    },
    "gsm8k": {
        "question": "Ann has 1 egg and buys 2. How many?",
        "answer": "1 + 2 = <<1+2=3>>3\n#### 3",
    },
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": 'def add(a, b):\n    """The sum."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    },
    "mbpp": {
        "task_id": 11,
        "text": "Write a function that adds.",
        "code": "def add(a, b):\n    return a + b",
        "test_list": ["assert add(1, 2) == 3"],
        "test_setup_code": "",
        "challenge_test_list": [],
    },
    "livecodebench": {
        "question_title": "Add",
        "question_content": "Print the sum.",
        "platform": "atcoder",
        "difficulty": "easy",
        "starter_code": "",
        "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin"}]),
        # Compressed as on the hub: the pickle of one string.
        "private_test_cases": base64.b64encode(
            zlib.compress(b"\x80\x04\x8c" + bytes([len(PRIVATE)]) + PRIVATE.encode() + b".")
        ).decode(),
        "metadata": "{}",
    },
}

EXPECTED = {
    **{name: ("math", "3", "") for name in ("aime25", "amc23", "gsm8k")},
    "aime24": ("math", "003", ""),
    "math500": ("math", "\\frac{1}{2}", "Algebra"),
    "humaneval": ("code", "add", ""),
    "mbpp": ("code", "add", ""),
    "livecodebench": ("code", "9", "easy"),
}
"""Kind, part of the reference answer, family."""


def write_rows(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_benchmark_has_a_test_row() -> None:
    assert ROWS.keys() == EXPECTED.keys() == BENCHMARKS.keys()


@pytest.mark.parametrize("name", ROWS)
def test_columns_identify_the_benchmark_format(name: str, tmp_path: Path) -> None:
    source = find_benchmark(str(write_rows(tmp_path / "rows.jsonl", ROWS[name])))
    tasks, skipped = load_tasks(source, PromptConfig(suffix=" Box it."))
    kind, part, family = EXPECTED[name]
    assert (len(tasks), skipped, tasks[0].kind, tasks[0].family) == (1, {}, kind, family)
    assert part in tasks[0].answer
    assert tasks[0].prompt[-1].content.endswith(" Box it.")
    if kind == "code":
        code_tasks.parse_tests(tasks[0].answer)
    else:
        assert tasks[0].answer == part


def test_local_files_have_precedence_over_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_benchmark("gsm8k") == Hub(name="openai/gsm8k/main", split="test")
    assert find_benchmark("someone/problems/hard") == Hub(
        name="someone/problems/hard", split="test"
    )
    (tmp_path / "gsm8k").mkdir()
    write_rows(tmp_path / "gsm8k" / "test.jsonl", ROWS["gsm8k"])
    assert find_benchmark("gsm8k") == Files(path="gsm8k", split="test")


def test_folder_gives_its_test_file_or_only_file(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", ROWS["gsm8k"], ROWS["gsm8k"])
    assert find_benchmark(str(tmp_path)) == Files(path=str(tmp_path), split="train.jsonl")
    assert len(load_tasks(find_benchmark(str(tmp_path)), PromptConfig()).tasks) == 2
    test = write_rows(tmp_path / "test.jsonl", ROWS["gsm8k"])
    assert len(load_tasks(find_benchmark(str(tmp_path)), PromptConfig()).tasks) == 1
    test.rename(tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match=r"expected test\*.jsonl.*other.jsonl', 'train.jsonl"):
        find_benchmark(str(tmp_path))
    train.unlink()
    (tmp_path / "other.jsonl").unlink()
    with pytest.raises(ValueError, match="or a single such file; found none"):
        find_benchmark(str(tmp_path))


def test_unknown_data_is_refused_with_alternatives(tmp_path: Path) -> None:
    for data in ("aime26", "./nothing", "missing/rows.jsonl"):
        with pytest.raises(FileNotFoundError, match=f"data={data}: expected .*aime24, aime25"):
            find_benchmark(data)
    path = write_rows(tmp_path / "rows.jsonl", {"riddle": "?", "solution": "!"})
    with pytest.raises(ValueError, match=r"no row can be a task.*found fields riddle, solution"):
        load_tasks(find_benchmark(str(path)), PromptConfig())
