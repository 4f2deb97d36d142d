"""Countdown: an expression with a target value, made of given numbers, each used once. Standard
library only.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Literal

from areal_jax.rewards.calculator import NotArithmetic, evaluate, numbers_in, parse

_OPERATIONS = (ast.Add, ast.Sub, ast.Mult, ast.Div)

_BOXED = re.compile(r"\\boxed\{([^{}]*)\}|<answer>([^<>]*)</answer>")


def grade_answer(reference: str, text: str) -> tuple[Literal["correct", "wrong", "no_answer"], str]:
    """Grade a text.

    The answer is the last \\boxed{} or <answer>, an expression of + - * / and brackets; " = TARGET"
    after it is allowed.

    Args:
        reference: JSON of {"numbers": [...], "target": ...}.

    Returns:
        Grade and answer.
    """
    given = json.loads(reference)
    found = _BOXED.findall(text)
    if not found:
        return "no_answer", ""
    answer = max(found[-1], key=len).strip()
    expression, _, claimed = answer.partition("=")
    if claimed and claimed.strip() != str(given["target"]):
        return "wrong", answer
    try:
        tree = parse(expression)
        used = [number.value for number in numbers_in(tree)]
        is_plain = all(
            isinstance(node, ast.Constant | ast.operator)
            or (isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATIONS))
            for node in ast.walk(tree)
        )
        is_right = (
            is_plain
            and all(type(number) is int for number in used)
            and sorted(used, key=str) == sorted(given["numbers"], key=str)
            and evaluate(tree) == given["target"]
        )
    except NotArithmetic:
        is_right = False
    return "correct" if is_right else "wrong", answer
