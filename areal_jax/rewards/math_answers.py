"""Mathematical answers: extraction from a text, and comparison with the reference.

An answer is equal to the reference if both are, element by element and unit by unit, the same
words, the same exact number, or expressions that computer algebra finds equal. A text that cannot
be read as any of these is equal to the same text only. The file has more than 400 lines because the
comparisons call one another.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

from areal_jax.rewards.math_notation import (
    PERCENT,
    STYLE,
    Unit,
    equal_numbers,
    parse_number,
    split_list,
    split_unit,
    to_latex,
    to_parseable,
)

MAX_TEXT_CHARS = 200_000
"""Number of characters at the end of a text in which an answer is searched."""

MAX_ANSWER_CHARS = 300
MAX_NESTING = 8
MAX_DIGITS = 100_000.0
"""Limits beyond which an answer is compared with the reference as text only."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"[-+−]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+|/[0-9]+)?")
_BETWEEN_BOXES = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;:! ]|\\\\|\\q?quad(?![A-Za-z])|\b(?:and|or)\b|\\text\s*\{[\s,]*(?:and|or)?[\s,]*\}"
    r"|[A-Za-z](?:_\{?[0-9A-Za-z]+\}?)?\s*=)*"
)
"""Everything that may separate the boxes of one list. Any other text means that the later box
replaces the earlier one.
"""

_WORDS = re.compile(
    r"(?:\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mbox)\s*\{[^{}\\$]*\}\s*)+"
)
_BARE_WORD = re.compile(r"[A-Za-z][A-Za-z ]*")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(r"\(?([A-J])(?:\)|[.:])\)?\s.*", re.DOTALL)
_IN_BASE = re.compile(r"(?:\(([0-9A-Za-z]+)\)|([0-9A-Za-z]+))\s*_\s*\{?\s*([0-9]+)\s*\}?")
_TORN = re.compile(r"(?<![_^0-9.])[0-9]*[0-9.] +[0-9]+(?![0-9]* */)")
"""Two adjacent numbers that are not a mixed number."""

_OMISSION = re.compile(r"\\[lcvd]?dots(?![A-Za-z])|\.\.\.")
_INTEGER = re.compile(r"([-+]?)\s*0*([0-9]+)(?:\.0*)?")
_THOUSANDS = re.compile(r"(?<=[0-9])[, ](?=[0-9]{3}(?![0-9]))")
_GROUPED = re.compile(
    r"[-+]?\s*[0-9]{1,3}(?:,[0-9]{3})+(?:\.0*)?|[-+]?\s*[0-9]{1,3}(?: [0-9]{3})+(?:\.0*)?|[-+]?\s*[0-9]+(?:\.0*)?"
)
_RELATION = re.compile(r"\\(?:leq?|geq?|neq?|lt|gt)(?![A-Za-z])|[<>]|!=")
_EQUALS = re.compile(r"(?<![<>!:])=(?!=)")
_NAME = re.compile(
    r"(?:\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|tau|phi|omega|angle|triangle|mathbb|mathcal|frac|"
    r"overline|vec|text|mathrm|operatorname|max|min|left|right) ?|[A-Za-z|:\s{},';]|\([^()=]*\)|_\{?[A-Za-z0-9]+\}?)+"
)
"""Names that may precede a sign of equality: x, f(2), (p, q), |AB|, S_1 : S_2."""

_MEMBER = re.compile(r"[A-Za-z](?:_\{?[0-9A-Za-z]+\}?)?\s*\\in(?![A-Za-z])\s*(.+)", re.DOTALL)
_SET_OPERATION = re.compile(r"\\(?:cup|cap|setminus|backslash|times)(?![A-Za-z])")
_COLONS = re.compile(r"[0-9.]+(?:\s*:\s*[0-9.]+)+")
_BRACKETS = {"(": ")", "[": "]", "\\langle": "\\rangle", "\\{": "\\}"}
_BRACKET = re.compile(r"\\langle(?![A-Za-z])|\\rangle(?![A-Za-z])|\\[{}]|[()\[\]]|\\begin|\\end")
_TOKEN = re.compile(r"\\[A-Za-z]+|[0-9]+(?:\.[0-9]+)?|\*\*|[][{}()^!]|[A-Za-z]")
_CALCULUS = re.compile(r"\\(?:sum|prod|i*int|oint|lim)(?![A-Za-z])")

Algebra = Callable[[str, str], bool]


def extract_answer(text: str, accept_plain: bool = False) -> str | None:
    """Extract the answer of a text.

    It is the content of the last closed \\boxed{}, or of the last ones if they are one list;
    otherwise the text after the last '####' in its line; otherwise, if asked for, the last number.
    """
    text = text[-MAX_TEXT_CHARS:]
    answer = extract_boxed(text)
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2].partition("\n")[0]
    if answer is None and accept_plain:
        answer = next(iter(_NUMBER.findall(text)[-1:]), None)
    return answer.strip() or None if answer else None


def extract_boxed(text: str) -> str | None:
    """Return the content of the closed box that opens last, with nested and escaped braces as in
    LaTeX. Boxes before it belong to it if only separators of a list are between them.
    """
    opened = list[tuple[int, int, bool]]()
    """Start of each open group and of its content, and whether it is a box."""
    boxes = list[tuple[int, int, int]]()
    """Start, content and end of closed boxes that contain no later one."""
    for token in _BRACES.finditer(text):
        if token.group().endswith("{") and token.group() != "\\{":
            opened.append((token.start(), token.end(), len(token.group()) > 1))
        elif token.group() == "}" and opened:
            start, content, is_box = opened.pop()
            if is_box and not (boxes and boxes[-1][0] > start):
                boxes.append((start, content, token.start()))
    if not boxes:
        return None
    answers = [text[slice(*boxes[-1][1:])]]
    for (_, content, end), later in zip(boxes[-2::-1], boxes[:0:-1], strict=True):
        if later[0] - end > MAX_ANSWER_CHARS or not _BETWEEN_BOXES.fullmatch(
            text, end + 1, later[0]
        ):
            break
        if (answer := text[content:end]).strip() not in (other.strip() for other in answers):
            answers.insert(0, answer)
        if sum(map(len, answers)) > MAX_ANSWER_CHARS:
            break
    return ", ".join(answers)


def plain_integer(answer: str) -> str | None:
    """Return an integer's digits without leading zeros, thousands separators and delimiters: 042,
    $42$, 42.0 and 42 are one.

    The result is text, because an int of thousands of digits is slow. None for other texts.
    """
    return _integer(_value(answer))


def _integer(latex: str) -> str | None:
    if not _GROUPED.fullmatch(latex):
        return None
    integer = _INTEGER.fullmatch(_THOUSANDS.sub("", latex))
    if integer is None:
        return None
    sign, digits = integer.groups()
    return f"-{digits}" if sign == "-" and digits != "0" else digits


def canonical(answer: str) -> str:
    """Return a form that spellings of one answer share, as far as text alone shows; votes for an
    answer are counted by it.
    """
    value = _value(answer)
    return _integer(value) or (
        _folded(value) if _WORDS.fullmatch(value) else "".join(value.split())
    )


def _value(answer: str) -> str:
    """Return the answer in LaTeX without its unit."""
    if len(answer) > MAX_ANSWER_CHARS:
        return answer.strip()
    latex = to_latex(answer)
    return latex if _WORDS.fullmatch(latex) else split_unit(latex)[0]


def compare_plainly(answer: str, reference: str) -> bool | None:
    """Compare by text and exact numbers. None: only computer algebra can decide."""
    return _compare_texts(answer, reference, None)


def compare_symbolically(answer: str, reference: str) -> bool:
    """Compare with computer algebra. It may take any time: a process must be killable."""
    return bool(_compare_texts(answer, reference, _equal_expressions))


def _compare_texts(answer: str, reference: str, algebra: Algebra | None) -> bool | None:
    if not is_bounded(answer, reference):
        ours, theirs = plain_integer(answer), plain_integer(reference)
        return answer.strip() == reference.strip() != "" or (ours is not None and ours == theirs)
    ours, theirs = to_latex(answer), to_latex(reference)
    return _compare(ours, theirs, algebra) if ours and theirs else False


def _compare(ours: str, theirs: str, algebra: Algebra | None) -> bool | None:
    """Compare two texts in LaTeX: whole, then as quantities, lists, brackets, relations, and
    finally as expressions.
    """
    if _unstyled(ours).replace(" ", "") == _unstyled(theirs).replace(" ", "") and not (
        _TORN.search(ours) or _TORN.search(theirs)
    ):
        return bool(ours)
    if not ours or not theirs:
        return False
    if (words := _compare_words(ours, theirs)) is not None:
        return words
    if _OMISSION.search(ours) or _OMISSION.search(theirs):
        # The omitted elements are unknown.
        return False
    (value, unit), (their_value, their_unit) = split_unit(ours), split_unit(theirs)
    if (value, their_value) != (ours, theirs):
        has_list = len(split_list(ours)) > 1 or len(split_list(theirs)) > 1
        if not has_list or (parse_number(value) and parse_number(their_value)):
            return _compare_quantities(value, unit, their_value, their_unit, algebra)
    integers = _integer(ours), _integer(theirs)
    if None not in integers and integers[0] == integers[1]:
        return True
    numbers = parse_number(ours), parse_number(theirs)
    if numbers[0] and numbers[1]:
        return equal_numbers(numbers[0], numbers[1])
    if (in_base := _compare_bases(ours, theirs)) is not None:
        return in_base
    if _COLONS.fullmatch(ours) and _COLONS.fullmatch(theirs):
        return _compare_in_order(re.split(r"\s*:\s*", ours), re.split(r"\s*:\s*", theirs), algebra)
    if (member := _MEMBER.fullmatch(ours)) and not _EQUALS.search(theirs):
        theirs = their_member[1] if (their_member := _MEMBER.fullmatch(theirs)) else theirs
        return _compare(member[1], theirs, algebra)
    if (member := _MEMBER.fullmatch(theirs)) and not _EQUALS.search(ours):
        return _compare(ours, member[1], algebra)
    if (listed := _compare_lists(ours, theirs, algebra)) is not _UNDECIDED:
        return listed
    if _TORN.search(ours) and not _TORN.search(theirs):
        return False
    if (stated := _compare_relations(ours, theirs, algebra)) is not _UNDECIDED:
        return stated
    return None if algebra is None else algebra(ours, theirs)


_UNDECIDED: Any = object()
"""Result that says that only computer algebra can decide, where None means something else."""


def _compare_words(ours: str, theirs: str) -> bool | None:
    """Compare words and letters of choices. None if neither text is one."""
    for letter, explained in ((theirs, ours), (ours, theirs)):
        if (choice := _CHOICE.fullmatch(_unstyled(letter))) and (
            chosen := _CHOSEN.fullmatch(_unstyled(explained))
        ):
            return choice[1] == chosen[1]
    if _WORDS.fullmatch(theirs) or (_WORDS.fullmatch(ours) and _BARE_WORD.fullmatch(theirs)):
        if parse_number(_unstyled(ours)) and parse_number(_unstyled(theirs)):
            return None
        return _folded(ours) == _folded(theirs) != ""
    if (
        len(theirs) > 3
        and _BARE_WORD.fullmatch(theirs)
        and _BARE_WORD.fullmatch(ours)
        and _folded(ours) == _folded(theirs)
    ):
        return True
    if _CHOICE.fullmatch(theirs) and _CHOICE.fullmatch(ours):
        return _folded(ours) == _folded(theirs)
    return None


def _unstyled(text: str) -> str:
    return re.sub(STYLE + r"\{([^{}]*)\}", r"\1", text).strip()


def _folded(text: str) -> str:
    """Normalize words for the comparison: without case, spaces and parentheses."""
    return re.sub(r"[ ()]", "", _unstyled(text)).casefold()


def _compare_quantities(
    value: str,
    unit: Unit | None,
    their_value: str,
    their_unit: Unit | None,
    algebra: Algebra | None,
) -> bool | None:
    """Compare values with units. A missing unit counts as the other's; the value of 50% is 50 or
    1/2.
    """
    if unit is None or their_unit is None or unit == their_unit:
        same = _compare(value, their_value, algebra)
        if same is not False or PERCENT not in (unit, their_unit) or unit == their_unit:
            return same
        ours, theirs = (
            f"\\frac{{{v}}}{{100}}" if u == PERCENT else v
            for v, u in ((value, unit), (their_value, their_unit))
        )
        return _compare(ours, theirs, algebra)
    if unit.powers != their_unit.powers:
        return False
    ratio = unit.size / their_unit.size
    if (ours := parse_number(value)) and (theirs := parse_number(their_value)):
        return ours.value * ratio == theirs.value
    return _compare(
        f"\\frac{{{ratio.numerator}}}{{{ratio.denominator}}} ({value})", their_value, algebra
    )


def _compare_bases(ours: str, theirs: str) -> bool | None:
    """Compare numbers in a named base. The question names it, so that an answer may omit it."""
    our_base, their_base = _IN_BASE.fullmatch(ours), _IN_BASE.fullmatch(theirs)
    if their_base:
        digits = their_base[1] or their_base[2]
        if our_base:
            return ((our_base[1] or our_base[2]).lower(), int(our_base[3])) == (
                digits.lower(),
                int(their_base[3]),
            )
        return ours.lower() == digits.lower() if digits[0].isdigit() else None
    if our_base and (theirs_number := parse_number(theirs)) and 2 <= int(our_base[3]) <= 36:
        try:
            return (
                Fraction(int(our_base[1] or our_base[2], int(our_base[3]))) == theirs_number.value
            )
        except ValueError:
            return False
    return None


def _compare_lists(ours: str, theirs: str, algebra: Algebra | None) -> Any:
    """Compare lists, sets, tuples and intervals element by element. `_UNDECIDED` if neither text is
    one.
    """
    operations = (_SET_OPERATION.search(side) and _outer(side) is None for side in (ours, theirs))
    if any(operations) and min(len(split_list(ours)), len(split_list(theirs))) == 1:
        return _UNDECIDED
    brackets, elements = _elements(ours)
    their_brackets, their_elements = _elements(theirs)
    if len(elements) == 1 and len(their_elements) > 1:
        brackets, elements = _elements(ours, is_loose=True)
    elif len(their_elements) == 1 and len(elements) > 1:
        their_brackets, their_elements = _elements(theirs, is_loose=True)
    is_set, is_their_set = brackets in ("", "\\{"), their_brackets in ("", "\\{")
    if is_set and is_their_set:
        elements, their_elements = _both_signs(elements), _both_signs(their_elements)
        if len(elements) == len(their_elements) == 1:
            one, other = elements[0], their_elements[0]
            return _compare(one, other, algebra) if (one, other) != (ours, theirs) else _UNDECIDED
        if _RELATION.search(ours) and _RELATION.search(theirs):
            return _UNDECIDED
        return _compare_in_any_order(elements, their_elements, algebra)
    if len(elements) == 1 and len(their_elements) == 1 and "(" in (brackets, their_brackets):
        return _UNDECIDED
    if (
        _RELATION.search(ours)
        or _RELATION.search(theirs)
        or any(map(_EQUALS.search, elements + their_elements))
    ):
        return _UNDECIDED
    if "matrix" in ours + theirs or "array" in ours + theirs:
        return _UNDECIDED
    if brackets != their_brackets:
        pairs = {brackets, their_brackets}
        if not (
            pairs == {"()", "\\langle\\rangle"}
            or (pairs & {""} and pairs & {"()", "\\langle\\rangle"})
        ):
            return False
    return _compare_in_order(elements, their_elements, algebra)


def _elements(text: str, is_loose: bool | None = None) -> tuple[str, list[str]]:
    """Return the brackets around a text ("" without any) and its elements."""
    outer = _outer(text)
    if outer is None:
        return "", split_list(text, is_loose is True or not _GROUPED.fullmatch(text))
    opening, inside, closing = outer
    elements = split_list(inside)
    if opening == "\\{" or (opening == "{" and len(elements) > 1):
        return "\\{", elements
    return (opening + closing, elements) if len(elements) > 1 else ("", [text])


def _outer(text: str) -> tuple[str, str, str] | None:
    """Return opening bracket, content and closing bracket of a text inside one pair of brackets."""
    text = re.sub(r"^\{(\s*[^{}]*)\}$", r"\\{\1\\}", text)
    depth, opening = 0, _BRACKET.match(text)
    if opening is None or opening.group() not in _BRACKETS:
        return None
    for token in _BRACKET.finditer(text):
        if token.start() > 0 and depth == 0:
            return None
        depth += 1 if token.group() in _BRACKETS or token.group() == "\\begin" else -1
        if depth == 0:
            if token.end() != len(text):
                return None
            return opening.group(), text[opening.end() : token.start()].strip(), token.group()
    return None


def _both_signs(elements: list[str]) -> list[str]:
    """Replace each element with \\pm by two."""
    both = list[str]()
    for element in elements:
        if re.search(r"\\pm(?![A-Za-z])", element) and len(both) < 16:
            for plus, minus in (("+", "-"), ("-", "+")):
                signed = re.sub(r"\\pm(?![A-Za-z])\s*", plus, element)
                both.append(re.sub(r"\\mp(?![A-Za-z])\s*", minus, signed).removeprefix("+").strip())
        else:
            both.append(element)
    return both


def _compare_in_order(ours: list[str], theirs: list[str], algebra: Algebra | None) -> bool | None:
    if len(ours) != len(theirs):
        return False
    same = [_compare(our, their, algebra) for our, their in zip(ours, theirs, strict=True)]
    return False if False in same else None if None in same else True


def _compare_in_any_order(
    ours: list[str], theirs: list[str], algebra: Algebra | None
) -> bool | None:
    if len(ours) != len(theirs):
        # A repeated element counts once, but a list of one repeated element is not a single
        # value.
        # value.
        ours, theirs = (
            [*dict.fromkeys(one.replace(" ", "") for one in side)] for side in (ours, theirs)
        )
        if len(ours) != len(theirs) or len(ours) == 1:
            return False
    left, is_open = list(theirs), False
    for our in ours:
        found = [_compare(our, their, algebra) for their in left]
        if True in found:
            del left[found.index(True)]
        elif None in found:
            is_open = True
        else:
            return False
    return None if is_open else True


def _compare_relations(ours: str, theirs: str, algebra: Algebra | None) -> Any:
    """Compare a named value with a bare value, and chains of equations. `_UNDECIDED` if there is
    neither.
    """
    ours, is_ours_cut = _exact_part(ours)
    theirs, is_theirs_cut = _exact_part(theirs)
    if is_ours_cut or is_theirs_cut:
        return _compare(ours, theirs, algebra)
    sides, their_sides = _sides(ours), _sides(theirs)
    if sides is None or their_sides is None or len(sides) == len(their_sides) == 1:
        return _UNDECIDED
    if len(sides) == len(their_sides) == 2 and not (
        _NAME.fullmatch(sides[0]) and _NAME.fullmatch(their_sides[0])
    ):
        return _UNDECIDED
    value, their_value = _stated(sides, algebra), _stated(their_sides, algebra)
    if value is None or their_value is None:
        return _UNDECIDED if algebra is None or len(sides) == len(their_sides) == 2 else False
    if value[0] and their_value[0] and value[0].replace(" ", "") != their_value[0].replace(" ", ""):
        return _UNDECIDED
    return _compare(value[1], their_value[1], algebra)


def _exact_part(text: str) -> tuple[str, bool]:
    """Return the exact value before a sign of approximation (after a mere name, the approximate
    one), and whether there is a sign.
    """
    exact, sign, approximate = (part.strip() for part in text.partition("\\approx"))
    if not sign or not exact or not approximate:
        return text, False
    return (f"{exact} = {approximate}" if _NAME.fullmatch(exact) else exact), True


def _sides(text: str) -> list[str] | None:
    """Return the sides of a chain of equations; None if there are other relations, or lists of
    equations.
    """
    if _RELATION.search(text):
        return None
    depth, start, sides = 0, 0, list[str]()
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and _EQUALS.match(text, place):
            sides.append(text[start:place].strip())
            start = place + 1
    return [*sides, text[start:].strip()]


def _stated(sides: list[str], algebra: Algebra | None) -> tuple[str, str] | None:
    """Return the name, if any, and the value that a chain of equations states; None if it states
    none or is not true.
    """
    if len(sides) == 1:
        return "", sides[0]
    if len(sides) == 2 and _NAME.fullmatch(sides[1]) and not _NAME.fullmatch(sides[0]):
        sides = sides[::-1]
    name = sides[0] if _NAME.fullmatch(sides[0]) else ""
    values = sides[1:] if name else sides
    if all(_compare(value, values[-1], algebra) for value in values[:-1]):
        return name, values[-1]
    return None


@lru_cache(1024)
def _equal_expressions(ours: str, theirs: str) -> bool:
    """Return whether computer algebra finds two expressions equal, unless their values at a point
    differ.

    Cached, because the samples of a group often agree.
    """
    from math_verify import verify

    for library in ("math_verify", "latex2sympy2_extended"):
        # The library warns that it has no deadline; the grading process has one.
        logging.getLogger(library).setLevel(logging.CRITICAL)
    answer, reference = _expression(ours), _expression(theirs)
    if answer is None or reference is None:
        return False
    decimals = [len(part) for part in re.findall(r"\.([0-9]+)", ours + " " + theirs)]
    rounding = min(max([6, *decimals]), 15)
    is_equal = verify(
        reference, answer, float_rounding=rounding, allow_set_relation_comp=True, timeout_seconds=0
    )
    return bool(is_equal) and not _differ_at_a_point(answer, reference)


@lru_cache(256)
def _expression(latex: str) -> Any:
    """Parse a text that is one expression; None if it cannot be read. Cached, because each sample
    of a group has the same reference.
    """
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, normalize_latex
    from math_verify.grader import should_treat_as_complex
    from sympy import Expr, I, MatrixBase

    # Units are separated from letters before: the library takes m, h and even abc for units and
    # drops them.
    # them.
    spelling = NormalizationConfig(
        basic_latex=True,
        units=False,
        malformed_operators=True,
        nits=True,
        boxed="none",
        equations=False,
    )
    text = normalize_latex(to_parseable(latex), spelling)
    if text.count("{") != text.count("}"):
        return None
    try:
        expression = _reader()(is_real=not should_treat_as_complex(text)).parse(text)
    except Exception:  # untrusted text; an unreadable answer counts in rewards/grade/wrong
        return None
    imaginary = [symbol for symbol in getattr(expression, "free_symbols", ()) if symbol.name == "i"]
    return (
        expression.subs(imaginary[0], I)
        if imaginary and isinstance(expression, Expr | MatrixBase)
        else expression
    )


@lru_cache(1)
def _reader() -> Callable[..., Any]:
    """Return the library's LaTeX parser, with case-sensitive letters, and without Python's eval, to
    which it passes each number.
    """
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
    from sympy import Float, Integer

    class Reader(_Latex2Sympy):
        def parse_number(self, text: str) -> Any:
            digits = text.replace(",", "")
            return Integer(int(digits)) if digits.isdecimal() else Float(digits)

    return partial(Reader, config=ConversionConfig(lowercase_symbols=False))


def _differ_at_a_point(ours: Any, theirs: Any) -> bool:
    """Return whether two expressions have different values at a point of distinct variables.

    The library treats small differences as zero: exp(-100) and exp(-200), 1/2004! and 1/2006!.
    """
    from sympy import Expr, Float, Rational

    if not (isinstance(ours, Expr) and isinstance(theirs, Expr)):
        return False
    names = sorted({str(symbol) for side in (ours, theirs) for symbol in side.free_symbols})
    point = {name: Rational(2 * place + 3, 7) for place, name in enumerate(names)}
    try:
        values = [
            side.subs({symbol: point[str(symbol)] for symbol in side.free_symbols}).evalf(40)
            for side in (ours, theirs)
        ]
        if not all(value.is_number and value.is_finite for value in values):
            return False
        tolerance = 1e-5 if ours.has(Float) or theirs.has(Float) else 1e-25
        sizes = [abs(value) for value in values]
        # A sum that is zero may have a rounding error.
        bound = tolerance * max(sizes) if min(sizes) else 1e-100
        return bool(abs(values[0] - values[1]) > bound)
    except (ArithmeticError, AttributeError, TypeError, ValueError):
        return False


def is_bounded(answer: str, reference: str) -> bool:
    """Return whether computer algebra may process an answer.

    It is short, not deeply nested, without numbers of too many digits, and with sums, products,
    integrals and limits only if the reference has them.
    """
    if len(answer) > MAX_ANSWER_CHARS or _nesting(answer) > MAX_NESTING:
        return False
    if set(_CALCULUS.findall(answer)) - set(_CALCULUS.findall(reference)):
        return False
    return num_digits(answer) <= MAX_DIGITS


def num_digits(expression: str) -> float:
    """Return an upper bound on the decimal digits of any number that evaluating the expression may
    produce; inf beyond all bounds.

    Every operation counts as a product, and a letter as 10.
    """
    tokens = _TOKEN.findall(expression)[::-1]
    digits = 0.0
    while tokens:
        digits += _factor(tokens)
    return digits


def _factor(tokens: list[str]) -> float:
    """Take one factor with its exponents and factorials from the end of `tokens`, and return the
    decimal logarithm of its bound.
    """
    token = tokens.pop()
    if token in "([{":
        size = 0.0
        while tokens and tokens[-1] not in ")]}":
            size += _factor(tokens)
        tokens[-1:] = []
    elif token[0].isdigit():
        size = float(len(token)) if len(token) > 300 else math.log10(max(1.0, float(token)))
    elif token in ("\\binom", "\\dbinom", "\\tbinom") and tokens:
        # binom(n, k) < 2**n
        size = math.log10(2) * _power_of_ten(_factor(tokens))
    else:
        size = 1.0 if token.isalpha() else 0.3
    while tokens and tokens[-1] in ("^", "**", "!"):
        if tokens.pop() == "!":
            size = max(size, 1.0) * _power_of_ten(size)
        elif tokens:
            size = max(size, 0.3) * _power_of_ten(_factor(tokens))
    return size


def _power_of_ten(exponent: float) -> float:
    return 10.0**exponent if exponent < 300 else math.inf


def _nesting(expression: str) -> int:
    deepest = depth = 0
    for character in expression:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
