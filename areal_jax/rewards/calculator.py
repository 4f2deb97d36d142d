"""Arithmetic of a policy, never evaluated as Python: the expression is parsed, and only the
operations below are executed.

Exact, with integers and fractions. Standard library only.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from decimal import Context, Decimal
from fractions import Fraction
from typing import TypeAlias

MAX_CHARS = 1000
MAX_DEPTH = 50
MAX_BITS = 4096
"""Largest number of bits of any numerator or denominator: more than a thousand digits."""

MAX_DIGITS_SHOWN = 300

Number: TypeAlias = Fraction


class NotArithmetic(ValueError):
    """The text is not arithmetic, or exceeds a limit; the message is for the policy."""


def parse(text: str) -> ast.expr:
    """Parse an expression of limited length and depth.

    Raises:
        NotArithmetic: The text is none.
    """
    if len(text) > MAX_CHARS:
        raise NotArithmetic(f"{len(text)} characters, expected at most {MAX_CHARS}")
    # Brackets are counted before Python's parser recurses into them.
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        raise NotArithmetic(f"brackets nested {deepest} deep, expected at most {MAX_DEPTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NotArithmetic("no arithmetic expression, such as 12*(3+4)") from error


def calculate(text: str) -> str:
    """Return the value of an expression: exact, or with 12 digits if it is not an integer.

    Raises:
        NotArithmetic: The message says what is wrong.
    """
    value = evaluate(parse(text))
    shown = str(value.numerator) if value.denominator == 1 else _rounded(value)
    if len(shown) > MAX_DIGITS_SHOWN:
        raise NotArithmetic(f"a number of {len(shown)} digits, expected at most {MAX_DIGITS_SHOWN}")
    return shown


def _rounded(value: Fraction) -> str:
    """Format a value with 12 digits; floats are exact enough within these bounds only."""
    if Fraction(10) ** -300 < abs(value) < Fraction(10) ** 300:
        return f"{float(value):.12g}"
    context = Context(prec=12)
    quotient = context.divide(Decimal(value.numerator), Decimal(value.denominator))
    return f"{quotient.normalize(context):g}"


def evaluate(node: ast.expr, depth: int = 0) -> Number:
    """Evaluate + - * / // % ** over numbers exactly.

    Raises:
        NotArithmetic: There is another operation, or a value is too large.
    """
    if depth > 4 * MAX_DEPTH:
        raise NotArithmetic("too many operations in one another")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _bounded(_as_fraction(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -evaluate(operand, depth + 1)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return evaluate(operand, depth + 1)
        case ast.BinOp(left=left, op=operation, right=right):
            return _bounded(
                _combined(operation, evaluate(left, depth + 1), evaluate(right, depth + 1))
            )
        case _:
            raise NotArithmetic(
                "only numbers, brackets and + - * / // % ** are understood, not "
                f"{type(node).__name__}"
            )


def numbers_in(node: ast.expr) -> Iterator[ast.Constant]:
    """Return the numbers in an expression."""
    return (each for each in ast.walk(node) if isinstance(each, ast.Constant))


def _as_fraction(number: int | float) -> Fraction:
    try:
        # Through its decimal digits: 0.1 is a tenth.
        return Fraction(number) if isinstance(number, int) else Fraction(repr(number))
    except (ValueError, OverflowError) as error:
        raise NotArithmetic("a number that is not finite") from error


def _combined(operation: ast.operator, left: Number, right: Number) -> Number:
    match operation:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.Pow():
            return _power(left, right)
    if not isinstance(operation, ast.Div | ast.FloorDiv | ast.Mod):
        raise NotArithmetic(f"only + - * / // % ** are understood, not {type(operation).__name__}")
    if right == 0:
        raise NotArithmetic("division by zero")
    match operation:
        case ast.Div():
            return left / right
        case ast.FloorDiv():
            return Fraction(left // right)
        case _:
            return left % right


def _power(left: Number, right: Number) -> Number:
    if right.denominator != 1:
        raise NotArithmetic("a power whose exponent is no whole number")
    if left == 0 and right < 0:
        raise NotArithmetic("division by zero")
    # Checked before the computation: 9**9**9 would fill the memory.
    if _bits(left) * abs(right.numerator) > MAX_BITS and left not in (0, 1, -1):
        raise NotArithmetic(f"a power of more than {MAX_BITS} bits")
    if abs(right.numerator) > MAX_BITS:
        return Fraction(left ** (right.numerator % 2)) if left else left  # 0, 1 and -1
    return Fraction(left**right.numerator)


def _bits(number: Number) -> int:
    return max(number.numerator.bit_length(), number.denominator.bit_length())


def _bounded(number: Number) -> Number:
    if _bits(number) > MAX_BITS:
        raise NotArithmetic(f"a number of more than {MAX_BITS} bits")
    return number
