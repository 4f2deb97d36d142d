from __future__ import annotations

import json

import pytest

from areal_jax.rewards.countdown import grade_answer

GIVEN = json.dumps({"numbers": [3, 8, 5, 5], "target": 24})


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{3*8*5/5}",
        "so \\boxed{1} no, \\boxed{3*8*(5/5)}",
        "<answer> (8 + 5 - 5) * 3 </answer>",
        "<answer>3*8+5-5 = 24</answer>",
        "\\boxed{5-5+8*3}",
        "\\boxed{8/(5/5)*3}",
    ],
)
def test_each_number_is_used_once_and_reaches_the_target(text: str) -> None:
    assert grade_answer(GIVEN, text)[0] == "correct"


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{24}",  # none of the numbers
        "\\boxed{3*8}",  # not all of them
        "\\boxed{3*8*5/5+5-5}",  # more than once
        "\\boxed{38-5-5}",  # put together
        "\\boxed{3*8+5-5+0}",
        "\\boxed{3+8+5+5}",  # another value
        "\\boxed{3*8*5/5=25}",  # what it says of itself is not so
        "\\boxed{3*8*5//5}",
        "\\boxed{3*8+5-5 or 24}",
        "\\boxed{-5+5+3*8}",  # a sign is no operation of two numbers
        "\\boxed{3.0*8*5/5}",
        "\\boxed{3*8*5/(5-5)}",
        "\\boxed{}",
        "\\boxed{9**9**9**9}",
        "\\boxed{" + "(" * 5000 + "}",
        "\\boxed{" + "1+" * 100_000 + "1}",
        "\\boxed{__import__('os')}",
        "\\boxed{True*8*5/5}",
        "<answer>3*8*5/5</answer> \\boxed{3}",  # the last one counts
    ],
)
def test_other_answers_are_wrong(text: str) -> None:
    assert grade_answer(GIVEN, text)[0] == "wrong"


@pytest.mark.parametrize(
    "text", ["", "3*8*5/5", "\\boxed{3*8*5/5", "<answer>3*8", "\\boxed{" * 100_000]
)
def test_missing_answer_is_no_answer(text: str) -> None:
    assert grade_answer(GIVEN, text)[0] == "no_answer"
