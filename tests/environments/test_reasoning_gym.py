"""Puzzles of the real reasoning-gym as tasks, and their grading in reward workers.

Needs the extra `reasoning-gym`; elsewhere these tests are not collected.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import sympy

from areal_jax.data import reasoning_gym as adapter
from areal_jax.data.config import PromptConfig, ReasoningGym
from areal_jax.data.sources import load_tasks
from areal_jax.records import PUZZLE, RewardResult, Task
from areal_jax.rewards.config import RewardConfig
from areal_jax.rewards.service import RewardService

adapter.load()  # without the warnings of its libraries
import reasoning_gym  # noqa: E402  # pyright: ignore[reportMissingImports]
from reasoning_gym.dataset import ProceduralDataset  # noqa: E402  # pyright: ignore[reportMissingImports]

EASY = '{"chain_sum": {"max_terms": 2, "max_digits": 1}, "gcd": {"max_value": 30}}'


def tasks(*names: str, **settings: object) -> list[Task]:
    source = ReasoningGym(names=names, num_tasks=60, **settings)  # type: ignore[arg-type]
    return list(load_tasks(source, PromptConfig()).tasks)


def grade(*asked: tuple[Task, str], config: RewardConfig | None = None) -> list[RewardResult]:
    async def main() -> list[RewardResult]:
        async with RewardService(config or RewardConfig(), (PUZZLE,)) as service:
            return [await service(task, text) for task, text in asked]

    return asyncio.run(main())


def answer_of(task: Task) -> str:
    return json.loads(task.answer)["answer"]


def test_generators_alternate_and_splits_share_no_question() -> None:
    train = tasks("chain_sum", "gcd", parameters=EASY)
    assert [task.family for task in train[:4]] == ["chain_sum", "gcd"] * 2
    assert train == tasks("chain_sum", "gcd", parameters=EASY)
    others = tasks("chain_sum", "gcd", parameters=EASY, seed=1)
    heldout = tasks("chain_sum", "gcd", parameters=EASY, split="heldout", seed=1)
    assert others != train and not {task.id for task in heldout} & {
        task.id for task in (*train, *others)
    }
    # Of sums of two digits there are few, so that splits by seed alone would share most of them.
    assert len({task.id for task in train if task.family == "chain_sum"}) < 30


def test_parameters_reach_the_generator() -> None:
    assert all(
        task.prompt[0].content.count(" + ") + task.prompt[0].content.count(" - ") == 2
        for task in tasks("chain_sum", parameters='{"min_terms": 3, "max_terms": 3}')
    )
    (first, *_) = tasks(
        "composite", parameters='{"datasets": [{"name": "gcd", "config": {"max_value": 9}}]}'
    )
    assert "Greatest Common Divisor" in first.prompt[0].content


@pytest.mark.parametrize(
    ("names", "parameters", "expected"),
    [
        (("chain_sum", "riddle"), "{}", "names: .* found riddle; known are ab, acre"),
        (("gcd",), '{"max_terms": 3}', "gcd of reasoning-gym has no max_terms; expected min_numb"),
        (("gcd",), '{"seed": 3}', "gcd of reasoning-gym has no seed"),
        (("gcd",), '{"min_numbers": 0}', "gcd of reasoning-gym refuses .*min_numbers"),
        (("gcd",), "3", "expected a JSON object"),
        (("gcd",), "{", "expected a JSON object"),
        (("lcm",), '{"max_value": 2}', "lcm .* made no puzzle of split=.* in 128 tries"),
    ],
)
def test_settings_that_are_not_the_packages_are_refused(
    names: tuple[str, ...], parameters: str, expected: str
) -> None:
    with pytest.raises(ValueError, match=expected):
        # With one value there is one question, which is in one of the splits.
        for split in ("train", "heldout"):
            tasks(*names, parameters=parameters, split=split)


@dataclass
class _Config:
    seed: int = 0
    size: int = 1


class _Endless(ProceduralDataset):
    """Searches for a puzzle that does not exist."""

    def __getitem__(self, idx: int) -> dict[str, object]:
        while len(os.listdir(os.devnull.rpartition("/")[0])):
            time.sleep(0.01)
        raise AssertionError


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setitem(
        reasoning_gym.factory.DATASETS, "endless", (lambda config: _Endless(config, 0, 1), _Config)
    )
    yield "endless"


def test_a_generator_that_never_returns_is_named(
    endless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "FIRST_PUZZLE_S", 0.1)
    with pytest.raises(ValueError, match=r"endless of reasoning-gym made no puzzle in 0\.1 s"):
        tasks(endless)


def test_workers_score_as_the_package_does() -> None:
    (task, *_), (hidden, *_) = tasks("chain_sum", parameters=EASY), tasks("prime_factorization")
    right = answer_of(task)
    found = grade(
        (task, f"So \\boxed{{{right}}}"),
        (task, f"<answer>1</answer> or <answer> {right} </answer>"),
        (task, f"\\boxed{{{right} apples}}"),
        (task, f"it is {right}"),
        (hidden, "\\boxed{seven}"),
    )
    assert [result.kind for result in found] == [
        "correct",
        "correct",
        "wrong",
        "no_answer",
        "wrong",
    ]
    # The package's score of a text that contains the answer: its share of the characters.
    assert found[2].score == pytest.approx(len(right) / len(f"{right} apples"))
    # Its verifier raises on words; the answer is wrong, and the group is not lost.
    assert not found[4].failed and "unreadable: ValueError" in found[4].detail
    (plain,) = grade((task, right), config=RewardConfig(accept_plain=True))
    assert plain.kind == "correct"


EVALUATED = (
    *("string_insertion", "spiral_matrix", "rotate_matrix", "binary_matrix", "n_queens"),
    *("simple_integration", "intermediate_integration", "polynomial_multiplication"),
    *("puzzle24", "countdown"),
)
"""Generators whose scores read answers as Python."""


def test_no_answer_is_executed(tmp_path: Path) -> None:
    found = [task for task in tasks(*EVALUATED)[: len(EVALUATED)]]
    path = tmp_path / "executed"
    attacks = (
        f"__import__('pathlib').Path({str(path)!r}).touch()",
        f"[open({str(path)!r}, 'w')]",
        f"[c for c in [open({str(path)!r}, 'w')]]",
        f"(lambda: open({str(path)!r}, 'w'))()",
        f"1or open({str(path)!r}, 'w')",
        f"f'{{open({str(path)!r}, chr(119))}}'",
        f"x.__class__.__base__.__subclasses__() or open({str(path)!r}, 'w')",
        "preview(x)",
        "exit()",
        "quit",
        "lambda: 1",
        "_",
    )
    for task in found:
        for attack in attacks:
            score, _ = adapter.score_answer(task.answer, attack)
            assert score <= 0.01, (task.family, attack)
    assert not path.exists()


def test_every_evaluation_of_the_package_is_replaced() -> None:
    adapter.load()
    modules = [module for name, module in sys.modules.items() if name.startswith("reasoning_gym.")]
    evaluating = [
        module
        for module in modules
        if module.__file__ and re.search(r"\beval\(|sympy", Path(module.__file__).read_text())
    ]
    assert len(evaluating) >= 10
    for module in evaluating:
        assert vars(module)["eval"] is adapter.evaluate_plainly
        for each in vars(module).values():
            assert each not in (sympy, sympy.parse_expr, sympy.sympify), module


def test_plain_values_and_expressions_are_read() -> None:
    assert adapter.evaluate_plainly("[[0, 'Q'], (-1, 2 // 3)]") == [[0, "Q"], (-1, 0)]
    x = sympy.Symbol("x")
    assert (
        adapter.parse_expression("2*x**3/3 - sin(x) + 1e2") == 2 * x**3 / 3 - sympy.sin(x) + 100.0
    )
    for text in ("9**9", "a", "f(1)", "[x for x in (1,)]", "'a'.upper()", "{}"):
        with pytest.raises(ValueError, match="expected numbers, texts and lists"):
            adapter.evaluate_plainly(text)
    for text in ("quit()", "x.y", "'x'", "__x", "x[0]", "1; 2", "x if y else z"):
        with pytest.raises(ValueError, match="expected an expression"):
            adapter.parse_expression(text)


def test_puzzles_are_graded_by_processes_with_other_hashes() -> None:
    """Generators that iterate over sets make other puzzles there, and metadata has tuples."""
    names = (
        "ransom_note",
        "isomorphic_strings",
        "word_ladder",
        "arc_1d",
        "polynomial_equations",
        "simple_integration",
        "number_sorting",
        "base_conversion",
    )
    found = {task.family: [task.answer, answer_of(task)] for task in tasks(*names)[: len(names)]}
    program = (
        "import json, sys\n"
        "from areal_jax.data.reasoning_gym import score_answer\n"
        "print(json.dumps({name: score_answer(*each) for name, each in json.load(sys.stdin).items()}))"
    )
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(found),
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        scores = json.loads(done.stdout.splitlines()[-1])
        assert scores == {name: [1.0, ""] for name in names}
