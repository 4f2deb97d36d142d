"""Mathematical answers: found in a text, and compared with the reference.

Finding is linear in the text. What is left to computer algebra is bounded first, for that can take for ever: the judging
process around it has a deadline, but a bound is cheaper than a killed process.
"""

from __future__ import annotations

import logging
import math
import re

MAX_TEXT_CHARS = 200_000
"""An answer is looked for in the last so many characters."""

MAX_ANSWER_CHARS = 300
MAX_NESTING = 8
MAX_DIGITS = 100_000.0
"""Beyond these an answer is compared with the reference as text only."""

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_NUMBER = re.compile(r"[-+−]?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+|/[0-9]+)?")
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_THOUSANDS = re.compile(r"(?<=[0-9])(?:,|\{,\}|,?\\[,!])(?=[0-9]{3}(?![0-9]))")
_SIGNS = str.maketrans(
    {"−": "-", "°": "^\\circ", "π": "\\pi ", "∞": "\\infty ", "×": "\\times ", "·": "\\cdot ", "∪": "\\cup ", "\u00a0": " "}
)
_UNIT = re.compile(r"([-+]?(?:\\?\$)?[0-9][0-9.,]*) *(?:(?:square|cubic) )?(?!(?:sqrt|pi|sin|cos|tan|log|exp)\b)[A-Za-z]{3,}")
_FRACTION_OF_NAMES = re.compile(r"\\frac(\\[A-Za-z]+)([0-9])")
_WRAPPED_NUMBER = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([-+]?[0-9][0-9.,]*)\}")
_WORDS = re.compile(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\{([A-Za-z() ]+)\}")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")
_PERCENT = re.compile(r"\\?%")
_TORN = re.compile(r"[0-9] +[0-9]+(?![0-9]* */)")
"""Two numbers side by side, which is no mixed number either."""

_INTEGER = re.compile(r"([-+−]?)0*([0-9]+)(?:\.0*)?")
_TOKEN = re.compile(r"\\[A-Za-z]+|[0-9]+(?:\.[0-9]+)?|\*\*|[][{}()^!]|[A-Za-z]")
_CALCULUS = re.compile(r"\\(?:sum|prod|i*int|oint|lim)(?![A-Za-z])")


def extract_answer(text: str, accept_plain: bool = False) -> str | None:
    """What the last closed \\boxed{} holds; else what follows the last '####' in its line; else, if asked, the last number."""
    text = text[-MAX_TEXT_CHARS:]
    answer = _last_boxed(text)
    if answer is None and "####" in text:
        answer = text.rpartition("####")[2].partition("\n")[0]
    if answer is None and accept_plain:
        answer = next(iter(_NUMBER.findall(text)[-1:]), None)
    return answer.strip() or None if answer else None


def _last_boxed(text: str) -> str | None:
    """The content of the closed box that opens last, braces nested and escaped as LaTeX has it."""
    opened = list[tuple[int, bool]]()
    """Where each open group's content begins, and whether it is a box."""
    last = (-1, -1)
    for token in _BRACES.finditer(text):
        if token.group().endswith("{") and token.group() != "\\{":
            opened.append((token.end(), len(token.group()) > 1))
        elif token.group() == "}" and opened:
            start, is_box = opened.pop()
            if is_box and start > last[0]:
                last = (start, token.start())
    return text[slice(*last)] if last[0] >= 0 else None


def plain_integer(answer: str) -> str | None:
    """An integer's digits without leading zeros, thousands separators and delimiters: 042, $42$, 42.0 and 42 are one.

    Digits, not an int: thousands of them cost nothing. None where it is no plain integer."""
    integer = _INTEGER.fullmatch(_THOUSANDS.sub("", _bare(answer)))
    if integer is None:
        return None
    sign, digits = integer.groups()
    return f"-{digits}" if sign in ("-", "−") and digits != "0" else digits


def canonical(answer: str) -> str:
    """A form that spellings of one answer share, as far as text alone can tell: what votes for an answer are counted by."""
    bare = _bare(answer)
    return plain_integer(answer) or (_folded(bare) if _WORDS.fullmatch(bare) else "".join(bare.split()))


def compare_plainly(answer: str, reference: str) -> bool | None:
    """Whether the two are the same where text alone can tell: equal text, integers, words, numbers in a base that is named.
    None: mathematics must tell."""
    ours, theirs = _bare(answer), _bare(reference)
    if ours == theirs:
        return True
    if _WORDS.fullmatch(theirs):
        return _folded(ours) == _folded(theirs)
    if ("%" in ours) != ("%" in theirs):
        # Whether a percentage bears its sign is a matter of taste.
        same = plain_integer(_PERCENT.sub("", ours)), plain_integer(_PERCENT.sub("", theirs))
        if None not in same and same[0] == same[1]:
            return True
    in_base = _IN_BASE.fullmatch(ours), _IN_BASE.fullmatch(theirs)
    if in_base[1]:
        # The question says which base, so that an answer need not.
        return in_base[0].groups() == in_base[1].groups() if in_base[0] else ours == in_base[1].group(1)
    integers = plain_integer(ours), plain_integer(theirs)
    if None not in integers:
        return integers[0] == integers[1]
    if _TORN.search(ours) and not _TORN.search(theirs):
        return False
    return None if is_bounded(ours, theirs) else False


def _folded(text: str) -> str:
    """Words as they are compared: without case, spaces and parentheses."""
    return re.sub(r"[ ()]", "", _WORDS.sub(r"\1", text)).casefold()


def compare_symbolically(answer: str, reference: str) -> bool:
    """Whether the two are equal mathematics. May take any time: for a process that can be killed."""
    from math_verify import LatexExtractionConfig, parse, verify

    for library in ("math_verify", "latex2sympy2_extended"):
        # They warn that they set no deadline; the judging process has one.
        logging.getLogger(library).setLevel(logging.CRITICAL)
    # LaTeX only: the library's plain expressions go through Python's eval.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    gold, target = (parse(f"\\boxed{{{_bare(side)}}}", latex, parsing_timeout=0) for side in (reference, answer))
    return verify(gold, target, timeout_seconds=0)


def is_bounded(answer: str, reference: str) -> bool:
    """Whether computer algebra may be let loose on an answer: short, not deeply nested, no number of too many digits, and
    sums, products, integrals and limits only where the reference has them too."""
    if len(answer) > MAX_ANSWER_CHARS or _nesting(answer) > MAX_NESTING:
        return False
    if set(_CALCULUS.findall(answer)) - set(_CALCULUS.findall(reference)):
        return False
    return num_digits(answer) <= MAX_DIGITS


def num_digits(expression: str) -> float:
    """An upper bound on the decimal digits of any number that evaluating the expression may write out; inf beyond all bounds.

    Everything is taken for a product, a letter for 10."""
    tokens = _TOKEN.findall(expression)[::-1]
    digits = 0.0
    while tokens:
        digits += _factor(tokens)
    return digits


def _factor(tokens: list[str]) -> float:
    """Take one factor with its exponents and factorials from the end of `tokens`; the decimal logarithm of its bound."""
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


def _bare(answer: str) -> str:
    """Without the delimiters of mathematics, spaces, a full stop, a currency and a unit in words around it; signs as LaTeX."""
    answer = answer[:MAX_TEXT_CHARS].translate(_SIGNS).strip().removesuffix(".").strip()
    for left, right in _DELIMITERS:
        inside = answer.removeprefix(left).removesuffix(right)
        if len(answer) - len(inside) == len(left) + len(right) and left not in inside:
            answer = inside.strip()
            break
    if wrapped := _WRAPPED_NUMBER.fullmatch(answer):
        answer = wrapped.group(1)
    if len(answer) <= MAX_ANSWER_CHARS:
        measured = _UNIT.fullmatch(answer)
        answer = _FRACTION_OF_NAMES.sub(r"\\frac{\1}{\2}", measured.group(1) if measured else answer)
    return answer.removeprefix("\\$").strip()
