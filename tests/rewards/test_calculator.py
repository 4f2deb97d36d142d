from __future__ import annotations

from contextlib import suppress

import pytest

from areal_jax.rewards.calculator import NotArithmetic, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1+1", "2"),
        (" (14*21+5) * 3 ", "897"),
        ("2**10", "1024"),
        ("2^10", "1024"),
        ("-3**2", "-9"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("-7%3", "2"),
        ("6/4", "1.5"),
        ("1/3*3", "1"),  # exact: floats would do here too, but not in the next
        ("0.1+0.2-0.3", "0"),
        ("1/3", "0.333333333333"),
        ("10**20/3*3", "100000000000000000000"),
        ("1e3", "1000"),
        ("0**0", "1"),
        ("(-1)**99999999999", "-1"),
        ("1**(10**30)", "1"),
        ("0**(10**30)", "0"),
        ("2**-2", "0.25"),
        ("1_000", "1000"),
        # 10^400 / 7 = 1.42857142857... x 10^399: no float is as large, nor as small as what
        # follows.
        ("10**400/7", "1.42857142857e+399"),
        ("-10**400/7", "-1.42857142857e+399"),
        ("1/10**400", "1e-400"),
        ("1/10**320", "1e-320"),
    ],
)
def test_arithmetic_is_exact(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "bits"),
        ("9**(9**9)", "bits"),
        ("(10**400)**400", "bits"),
        ("2**99999999999999999999", "bits"),
        ("10**1000", "digits"),
        ("*".join(["99999"] * 160), "digits"),
        ("1e999999999", "finite"),
        ("1e400", "finite"),
        ("(" * 400 + "1" + ")" * 400, "deep"),
        ("[" * 400, "deep"),
        ("-" * 900 + "1", ""),
        ("1" + "+1" * 400, ""),
        ("9" * 5000, "characters"),
        ("x" * (1 << 20), "characters"),
        ("1/0", "zero"),
        ("1%0", "zero"),
        ("1//0", "zero"),
        ("0**-1", "zero"),
        ("2**0.5", "whole"),
        ("", "no arithmetic"),
        ("1+", "no arithmetic"),
        ("1\x00", "no arithmetic"),
        ("\ud800", "no arithmetic"),
        ("two", "Name"),
        ("__import__('os').system('true')", "Call"),
        ("(1).__class__", "Attribute"),
        ("'a'*9", "Constant"),
        ("1 if 1 else 2", "IfExp"),
        ("1<2", "Compare"),
        ("1 and 2", "BoolOp"),
        ("True", "Constant"),
        ("1j", "Constant"),
        ("~1", "UnaryOp"),
        ("1<<99999999", "LShift"),
        ("[1 for x in y]", "ListComp"),
        ("(lambda: 1)()", "Call"),
        ("f'{1}'", "JoinedStr"),
        ("a:=1", "no arithmetic"),
    ],
)
@pytest.mark.timeout(30)
def test_other_expressions_are_refused_quickly(expression: str, reason: str) -> None:
    if reason:
        with pytest.raises(NotArithmetic, match=reason) as raised:
            calculate(expression)
        assert len(str(raised.value)) < 200
    else:
        # Deep or long, and either is right: a number, or a refusal.
        with suppress(NotArithmetic):
            assert int(calculate(expression)) in (1, 401)
