"""Repositories that a scripted policy edits in a workspace, and real grading outside of it."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Literal

import chz
import numpy as np
import pytest
from swe_rows import make_row
from test_turns import TOKENIZER, completion, text_of

from areal_jax.data.code_tasks import Repository, format_tests, parse_tests
from areal_jax.data.config import Files, PromptConfig, Repositories
from areal_jax.data.repositories import make_repository
from areal_jax.data.repository_files import apply_diff
from areal_jax.data.sft import encode_answer
from areal_jax.data.sources import generate_exercises, load_tasks
from areal_jax.records import Completion, Message, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.service import RewardService
from areal_jax.workflows.config import CodingAgent, Tags
from areal_jax.workflows.from_config import find_tools_config, make_workflow
from areal_jax.workflows.turns import read_files

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = WRONG.replace("-", "+")
TEST = "import unittest, add\nclass Test(unittest.TestCase):\n    def test(self):\n        self.assertEqual(add.add(1, 2), 3)\n"
REPOSITORY = Repository(
    "assert add(1, 2) == 3\nassert add(-1, 1) == 0",
    ["add"],
    files={"add.py": WRONG, "test_add.py": TEST},
    target="add.py",
)
TASK = Task("add", (Message("user", "Repair add.py."),), format_tests(REPOSITORY), "code")


def call(name: str, argument: str) -> str:
    parameter = {"shell": "command", "edit": "change", "python": "code"}[name]
    body = json.dumps({"name": name, "arguments": {parameter: argument}})
    return f"<tool_call>\n{body}\n</tool_call>"


class Scripted:
    """Answers with the next text, and keeps the prompts."""

    def __init__(self, *texts: str) -> None:
        self.texts, self.prompts = list(texts), list[str]()

    async def __call__(
        self, prompt_tokens: np.ndarray, num_samples: int, **how: object
    ) -> list[Completion]:
        self.prompts.append(text_of(prompt_tokens))
        return [completion(self.texts.pop(0)) for _ in range(num_samples)]


def run(
    policy: Scripted,
    max_turns: int = 6,
    task: Task = TASK,
    config: CodingAgent | None = None,
) -> list[str]:
    """Kinds of the grades of one sample."""
    config = chz.replace(config or CodingAgent(), max_turns=max_turns)

    async def main() -> list[str]:
        rewards = RewardConfig(num_workers=1)
        async with RewardService(rewards, ("code",), find_tools_config(config)) as grader:
            workflow = make_workflow(
                config, TOKENIZER, 1, rewards, max_prompt_tokens=10_000, tools=grader.use
            )
            return [each.grade for each in await workflow(task, policy, grader)]

    return asyncio.run(asyncio.wait_for(main(), 120))


def test_a_repaired_file_is_correct():
    policy = Scripted(
        call("shell", "python3 -m unittest test_add 2>&1 | tail -1"),
        call("edit", "add.py\n<<<<<<< SEARCH\na - b\n=======\na + b\n>>>>>>> REPLACE\n"),
        call("shell", "python3 -m unittest test_add 2>&1 | tail -1"),
        "Repaired.",
    )
    assert run(policy) == ["correct"]
    assert "FAILED (failures=1)" in policy.prompts[1] and policy.prompts[3].count("OK") == 1


@pytest.mark.slow
def test_the_files_of_a_swe_bench_row_are_graded_by_its_tests(tmp_path: Path):
    """The tests are not in the workspace, and python3 there finds pytest."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(make_row()))
    (task,) = load_tasks(Files(path=str(tmp_path / "rows.jsonl")), PromptConfig()).tasks
    fix = call("edit", "calc/ops.py\n<<<<<<< SEARCH\na - b\n=======\na + b\n>>>>>>> REPLACE\n")
    look = call("shell", "grep -rc test_add .; python3 -m pytest -q 2>&1 | tail -1")
    policy = Scripted(look, fix, "Done.")
    assert run(policy, task=task) == ["correct"]
    assert ":0\n" in policy.prompts[1] and ":1\n" not in policy.prompts[1]
    assert "3 passed" in policy.prompts[1]
    assert run(Scripted(look, "Done."), task=task) == ["wrong"]
    assert run(Scripted("Done."), task=task) == ["wrong"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "true",
        # Neither tests nor exit codes inside count.
        "echo > test_add.py; echo 'import os; os._exit(0)' > add.py",
        f"printf '{WRONG}' > add.py; mkdir unittest; echo 'exit(0)' > unittest/__init__.py",
        # A right program elsewhere.
        "echo 'def add(a, b): return a + b' > /tmp/other.py; ln -sf /tmp/other.py add.py",
        "rm add.py",
    ],
)
def test_what_repairs_nothing_is_not_correct(command: str):
    [grade] = run(Scripted(call("shell", command), "Done."))
    assert grade in ("wrong", "crashed", "no_answer")


@pytest.mark.slow
def test_the_file_counts_where_the_turns_run_out():
    fix = call("python", f"open('add.py', 'w').write({RIGHT!r})")
    assert run(Scripted(fix, call("shell", "ls")), max_turns=2) == ["correct"]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(6))
def test_demonstrations_are_graded_and_show_what_the_tools_print(index: int):
    source = Repositories(num_tasks=6)
    (task,) = load_tasks(source, PromptConfig()).tasks[index : index + 1]
    exercise = generate_exercises(source)[index]
    config = chz.replace(CodingAgent(), call_format=Tags(), announce=False)
    for demonstrations, grade in ((exercise.correct, "correct"), (exercise.incorrect, "wrong")):
        for turns in demonstrations:
            policy = Scripted(*(turn.content for turn in turns[::2]))
            assert run(policy, task=task, config=config) == [grade]
            *context, answer = (exercise.message, *turns)
            example = encode_answer(TOKENIZER, context, answer.content, PromptConfig())
            assert policy.prompts[-1] == text_of(example.prompt)
    assert exercise.correct and exercise.incorrect


def test_generated_repositories_have_one_fault_and_differ_by_split():
    found: dict[Literal["train", "heldout"], set[str]] = {"train": set(), "heldout": set()}
    for split, ids in found.items():
        for index in range(24):
            exercise = make_repository(index, split)
            family, tests = exercise.family, parse_tests(exercise.answer)
            assert isinstance(tests, Repository)
            program = tests.files[tests.target] + tests.tests
            with pytest.raises((AssertionError, IndexError, TypeError)):
                exec(program, {})
            repaired = apply_diff(read_files(tests), exercise.patch)[tests.target]
            assert repaired is not None
            exec(repaired.data.decode() + tests.tests, {})
            for demonstration in (*exercise.correct, *exercise.incorrect):
                _, text, change, *_ = (turn.content for turn in demonstration)
                # What is replaced occurs once, so that one line changes.
                if part := re.search(r'"s/(.*)/.*/"', change):
                    assert len(re.findall(re.sub(r"[()+]", r"\\\g<0>", part[1]), text)) == 1
            ids.add(repr(tests.files))
            assert make_repository(index, split) == exercise and tests.target.startswith(family)
    assert not found["train"] & found["heldout"] and len(found["train"]) == 24
    tasks = load_tasks(Repositories(num_tasks=4), PromptConfig()).tasks
    assert [task.kind for task in tasks] == ["code"] * 4 and len({task.id for task in tasks}) == 4
