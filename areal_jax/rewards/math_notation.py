"""Notation of mathematical answers: spellings are normalized in LaTeX, numbers become exact, units
are separated from letters.

Nothing here drops what it does not recognize: a text that is no number, list or unit is returned
whole, for computer algebra or for a comparison as text. The file has more than 400 lines because
numbers, units and lists share one table of spellings.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

MAX_NUMBER_CHARS = 1000
MAX_EXPONENT = 1000
"""Limits beyond which a number is not expanded."""

MIN_DECIMALS = 6
"""A decimal counts as the rounding of an exact value if it has at least so many digits after the
point and so many significant digits.
"""

_SYMBOLS = {
    **dict.fromkeys("−‐‑‒–—―﹣", "-"),
    **dict.fromkeys("·⋅∙•∗", "\\cdot "),
    **dict.fromkeys("⁄∕÷", "/"),
    **dict.fromkeys("≤⩽≦", "\\le "),
    **dict.fromkeys("≥⩾≧", "\\ge "),
    **dict.fromkeys("≈≃≅", "\\approx "),
    **dict.fromkeys("°º˚", "^{\\circ}"),
    **dict.fromkeys("′’ʹ", "'"),
    **dict.fromkeys("…⋯", "\\ldots "),
    **{
        "×": "\\times ",
        "∞": "\\infty ",
        "≠": "\\neq ",
        "±": "\\pm ",
        "∓": "\\mp ",
        "∪": "\\cup ",
        "∩": "\\cap ",
    },
    **{
        "∈": "\\in ",
        "∅": "\\emptyset ",
        "⟨": "\\langle ",
        "⟩": "\\rangle ",
        "→": "\\to ",
        "∑": "\\sum ",
        "∏": "\\prod ",
    },
    **{
        "∫": "\\int ",
        "√": "\\sqrt ",
        "∛": "\\sqrt[3]",
        "∜": "\\sqrt[4]",
        "ℝ": "\\mathbb{R}",
        "ℤ": "\\mathbb{Z}",
    },
    **{
        "ℕ": "\\mathbb{N}",
        "ℚ": "\\mathbb{Q}",
        "ℂ": "\\mathbb{C}",
        "⌊": "\\lfloor ",
        "⌋": "\\rfloor ",
        "∖": "\\setminus ",
    },
}
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_TOKEN = r"(?:[0-9A-Za-z]|\\[A-Za-z]+)"
_DELIMITERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
STYLE = r"\\(?:text|textbf|textrm|textit|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname|rm)\s*"
_STYLED = re.compile(STYLE + r"\{([-+]?[0-9][0-9.,/]*|[A-Za-z])\}")
"""A number or a letter means the same in any style."""
_NOTHING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|!)(?![A-Za-z])")
_GAP = re.compile(r"(?:(?<!\\)\\[,;:> ]|\\q?quad|~|\s)+")
_THIN = re.compile(r",\s*\\!\s*|(?<=[0-9])\\[,!](?=[0-9]{3}(?![0-9]))")
"""Separators of thousands in LaTeX."""

_SQRT_PLAIN = re.compile(r"\\sqrt(\[[0-9]\])? ?(?:([0-9]+(?:\.[0-9]+)?)|\(([^()]*)\))")
_SPELLED = re.compile(
    r"(?<![A-Za-z\\{])(sqrt|pi|infinity|infty|sin|cos|tan|cot|sec|csc|ln|log|exp|cosh|sinh|tanh)(?![A-Za-z])"
)
_PAREN_AFTER = re.compile(r"(\\sqrt|\^)\s*\(")


class Number(NamedTuple):
    """An exact rational number and its notation."""

    value: Fraction
    decimals: int
    """Digits after the point; 0 for integers and fractions."""


@lru_cache(256)
def _symbol(character: str) -> str:
    """Return the LaTeX of a character outside of ASCII; the character itself if it has none."""
    if character in _SYMBOLS:
        return _SYMBOLS[character]
    category = unicodedata.category(character)
    if category == "Zs":
        return " "
    if character in "\u200b\u200c\u200d\u2060\ufeff":
        return ""
    kind, _, points = unicodedata.decomposition(character).partition(" ")
    if kind in ("<super>", "<sub>", "<fraction>"):
        plain = "".join(_symbol(chr(int(point, 16))) for point in points.split())
        if kind == "<fraction>":
            over, _, under = plain.partition("/")
            return f"\\frac{{{over}}}{{{under}}}"
        return f"{'^' if kind == '<super>' else '_'}{{{plain}}}"
    folded = unicodedata.normalize("NFKC", character)
    if folded != character:
        return "".join(map(_symbol, folded))
    name = unicodedata.name(character, "")
    if name.startswith("GREEK ") and " LETTER " in name and " WITH " not in name:
        letter = name.rpartition(" ")[2].lower().replace("lamda", "lambda")
        return f"\\{letter if 'SMALL' in name else letter.capitalize()} "
    return character


@lru_cache(1024)
def to_latex(text: str) -> str:
    """Return the text as LaTeX in one spelling: without Unicode symbols, delimiters, sizes and
    spacing; fractions braced.
    """
    text = text.strip().removesuffix(".").strip()
    if not text.isascii():
        text = "".join(map(_symbol, text))
        text = re.sub(
            r"\}\^\{|\}_\{", lambda pair: "" if _is_run(text, pair.start()) else pair.group(), text
        )
        text = _SQRT_PLAIN.sub(lambda root: f"\\sqrt{root[1] or ''}{{{root[2] or root[3]}}}", text)
    for left, right in _DELIMITERS:
        inside = text.removeprefix(left).removesuffix(right)
        if len(text) - len(inside) == len(left) + len(right) and left not in inside:
            text = inside.strip().removesuffix(".")
            break
    if len(re.findall(r"(?<!\\)\$", text)) % 2 == 0:
        text = re.sub(r"(?<!\\)\$", "", text)
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z])", r"\\", text)
    text = _NOTHING.sub("", _THIN.sub(",", text.replace("{,}", ",")))
    text = _GAP.sub(" ", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(rf"\\frac\s*({_TOKEN})", r"\\frac{\1}", text)
    text = re.sub(rf"\\frac\s*({_GROUP})\s*({_TOKEN})", r"\\frac\1{\2}", text)
    text = re.sub(rf"\\frac\s*({_GROUP})\s*\{{", r"\\frac\1{", text)
    text = re.sub(rf"\\sqrt\s*(\[[^][]*\])\s*({_TOKEN})", r"\\sqrt\1{\2}", text)
    text = _STYLED.sub(r"\1", text)
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})", r"^{\\circ}", text)
    text = re.sub(
        r"\\(?:le|leqslant)(?![A-Za-z])",
        r"\\leq",
        re.sub(r"\\(?:ge|geqslant)(?![A-Za-z])", r"\\geq", text),
    )
    return re.sub(r"(?<!\\)\\$", "", text.strip()).strip()


def _is_run(text: str, closing: int) -> bool:
    """Return whether the brace that closes there belongs to an exponent or index that continues
    after it.
    """
    opening = text.rfind("{", 0, closing)
    return opening > 0 and text[opening - 1] == text[closing + 1]


def to_parseable(text: str) -> str:
    """Convert the notation of programming languages to LaTeX: **, *, sqrt(), pi, exponents in
    parentheses.
    """
    text = text.replace("**", "^").replace("*", "\\cdot ").replace("'", "^{\\prime}")
    text = re.sub(r"(?<![A-Za-z\\])([ie])\(", r"\1\\cdot (", text.replace("\\bmod", "\\mod"))
    text = _SPELLED.sub(r"\\\1", text).replace("\\infinity", "\\infty")
    while found := _PAREN_AFTER.search(text):
        closing = _closing(text, found.end() - 1)
        if closing is None:
            return text
        text = f"{text[: found.start()]}{found[1]}{{{text[found.end() : closing]}}}{text[closing + 1 :]}"
    return text


def _closing(text: str, opening: int) -> int | None:
    depth = 0
    for place in range(opening, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    return None


_SIGN = r"(?P<sign>[-+]?)\s*"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_DECIMAL = rf"(?P<whole>{_DIGITS}|)(?:\.(?P<part>[0-9]*))?(?:\\(?:overline|bar|dot)\s*\{{?(?P<period>[0-9]+)\}}?)?"
_POWER = r"(?:\s*(?:\\times|\\cdot|\*)\s*10\s*\^\s*\{?\s*(?P<power>[-+]?\s*[0-9]+)\s*\}?|[eE](?P<e>[-+]?[0-9]+))?"
_PLAIN = re.compile(_SIGN + _DECIMAL + _POWER)
_OVER = re.compile(
    r"\\frac\s*\{\s*(?P<over>[^{}]+)\}\s*\{\s*(?P<under>[^{}]+)\}|(?P<top>[^/{}\\ ]+)\s*/\s*(?P<bottom>[^/{}\\ ]+)"
)
_MIXED = re.compile(
    rf"{_SIGN}(?P<whole>[0-9]+)(?:\s*(?P<frac>\\frac.*)|\s+(?P<slash>[0-9]+\s*/\s*[0-9]+))"
)


def parse_number(text: str) -> Number | None:
    """Parse a text that is one number: integer, decimal, repeating decimal, power of ten, fraction
    or mixed number.

    None for other texts, and for a number that is too long to be expanded.
    """
    text = text.strip()
    if not text or len(text) > MAX_NUMBER_CHARS:
        return None
    if (plain := _PLAIN.fullmatch(text)) and (plain["whole"] or plain["part"]):
        power = int((plain["power"] or plain["e"] or "0").replace(" ", "")[:6])
        if abs(power) > MAX_EXPONENT:
            return None
        whole, part = re.sub("[, ]", "", plain["whole"]) or "0", plain["part"] or ""
        value = Fraction(int(whole + part), 10 ** len(part))
        if plain["period"]:
            if plain["part"] is None:
                return None
            value += Fraction(
                int(plain["period"]), (10 ** len(plain["period"]) - 1) * 10 ** len(part)
            )
        exact = plain["period"] is not None
        return Number(
            (-1 if plain["sign"] == "-" else 1) * value * Fraction(10) ** power,
            0 if exact else max(0, len(part) - power),
        )
    if mixed := _MIXED.fullmatch(text):
        part = parse_number(mixed["frac"] or mixed["slash"])
        if part is None or not 0 <= part.value < 1 or part.decimals:
            return None
        value = int(mixed["whole"]) + part.value
        return Number(-value if mixed["sign"] == "-" else value, 0)
    negative = text.startswith("-")
    if over := _OVER.fullmatch(text.lstrip("+-").strip() if text[0] in "+-" else text):
        above, below = (
            parse_number(over["over"] or over["top"]),
            parse_number(over["under"] or over["bottom"]),
        )
        if above is None or below is None or below.value == 0:
            return None
        value = above.value / below.value
        return Number(-value if negative else value, 0)
    return None


def equal_numbers(ours: Number, theirs: Number) -> bool:
    """Return whether two numbers are equal, or a decimal with enough digits is the other one
    rounded or truncated.
    """
    if ours.value == theirs.value:
        return True
    for short, exact in ((ours, theirs), (theirs, ours)):
        unit = Fraction(1, 10**short.decimals)
        is_long = short.decimals >= MIN_DECIMALS and abs(short.value) / unit >= 10 ** (
            MIN_DECIMALS - 1
        )
        if is_long and (exact.decimals == 0 or exact.decimals > short.decimals):
            gap = abs(short.value - exact.value)
            if gap <= unit / 2 or (gap < unit and abs(short.value) < abs(exact.value)):
                return True
    return False


class Unit(NamedTuple):
    """A product of powers of base quantities, such as length squared, and its size in their base
    units.
    """

    powers: tuple[tuple[str, int], ...]
    size: Fraction


PERCENT = Unit((("percent", 1),), Fraction(1))

_KINDS: dict[str, dict[str, str]] = {
    "length": {
        "mm millimeter millimetre": "0.001",
        "cm centimeter centimetre": "0.01",
        "dm decimeter decimetre": "0.1",
        "m meter metre": "1",
        "km kilometer kilometre": "1000",
        "in inch inche": "0.0254",
        "ft foot feet": "0.3048",
        "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "mass": {
        "mg milligram": "0.001",
        "g gram": "1",
        "kg kilogram": "1000",
        "oz ounce": "28.349523125",
        "lb pound": "453.59237",
    },
    "time": {
        "ms millisecond": "0.001",
        "s sec second": "1",
        "min minute": "60",
        "h hr hour": "3600",
        "day": "86400",
        "week": "604800",
    },
    "months": {"month": "1", "yr year": "12"},
    "volume": {"ml milliliter millilitre": "0.001", "l liter litre": "1"},
    "money": {"$ dollar usd buck": "1", "¢ cent": "0.01"},
    "euro": {"€ euro eur": "1"},
    "sterling": {"£": "1"},
    "angle": {"^{\\circ} degree deg": "1"},
    "radian": {"rad radian": "1"},
    "percent": {"% percent percentage pct": "1"},
}
_UNITS = {
    name: (kind, Fraction(size))
    for kind, units in _KINDS.items()
    for names, size in units.items()
    for name in names.split()
}
_NO_UNIT = ("unit", "point")
_SCALES = {
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_CURRENCY = re.compile(r"([-+]?)\s*(\\?\$|€|£)\s*(?=[-+.0-9\\(])(.+)", re.DOTALL)
_SIGNED_TAIL = re.compile(
    r"(.*[^\s\\])\s*(\\?%|\\?\$|€|£|¢|\^\{\\circ\}(?:\s*(?:\\(?:text|mathrm)\s*\{\s*)?([CF])\}?)?)",
    re.DOTALL,
)
_STYLED_TAIL = re.compile(
    rf"(.*?[^\s\\]) *((?:{STYLE}\{{[A-Za-z\s.,/²³^%0-9()-]+\}}(?:\s*\^\s*\{{?\s*-?[0-9]\s*\}}?)?[\s/]*|\\cdot *)+)",
    re.DOTALL,
)
_BARE_TAIL = re.compile(
    r"(.*[0-9})]) ?((?:[A-Za-z]{2,}\.?(?: ?\^ ?\{?-?[0-9]\}?)?[ /]?)(?:[A-Za-z]+\.?(?: ?\^ ?\{?-?[0-9]\}?)?[ /]?)*)"
)
_UNIT_WORD = re.compile(r"([A-Za-z$¢%€£]+)\.?(?:\s*\^\s*\{?\s*(-?[0-9])\s*\}?)?|(/)")
_SENTENCE = {
    "and",
    "or",
    "if",
    "for",
    "where",
    "when",
    "mod",
    "is",
    "not",
    "no",
    "then",
    "with",
    "to",
}


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Split a quantity into value and unit; the text and None without a unit.

    Letters count as a unit inside \\text{} or the like, or if they name a unit that is no common
    variable.
    """
    if currency := _CURRENCY.fullmatch(text):
        value, unit = split_unit(currency[3])
        money = _unit(currency[2].removeprefix("\\"), True)
        return f"{currency[1]}{value}", money if unit is None or unit == money else None
    if signed := _SIGNED_TAIL.fullmatch(text):
        name = signed[2].removeprefix("\\")
        if signed[3]:
            return signed[1], Unit(((f"degree {signed[3]}", 1),), Fraction(1))
        return signed[1], _unit(name, True) if not name.startswith("^") else Unit(
            (("angle", 1),), Fraction(1)
        )
    for pattern, is_styled in ((_STYLED_TAIL, True), (_BARE_TAIL, False)):
        if found := pattern.fullmatch(text):
            value, words = (
                found[1],
                re.sub(STYLE + r"\{([^{}]*)\}", r"\1", found[2]).replace("\\cdot", " "),
            )
            first, _, rest = words.strip().partition(" ")
            if first.lower() in _SCALES and (number := parse_number(value)):
                scaled = number.value * _SCALES[first.lower()]
                text = (
                    f"{scaled.numerator}/{scaled.denominator}"
                    if scaled.denominator > 1
                    else str(scaled.numerator)
                )
                return (text, _unit(rest, is_styled)) if rest else (text, None)
            unit = _unit(words, is_styled)
            if unit is not None:
                return value, unit if unit.powers else None
    return text, None


def _unit(words: str, is_styled: bool) -> Unit | None:
    """Return the unit of that name; None if it is none. Unknown words are a unit of their own, if
    they are styled.
    """
    powers, size, sign, factor = dict[str, int](), Fraction(1), 1, 1
    unknown = list[str]()
    words = (
        words.replace("²", "^2")
        .replace("³", "^3")
        .replace("(", " ")
        .replace(")", " ")
        .strip()
        .rstrip(".,")
    )
    if not words or _UNIT_WORD.sub("", words).strip(" ,-"):
        return None
    for word in _UNIT_WORD.finditer(words):
        name = (word[1] or "").lower()
        if word[3] or name == "per":
            sign = -1
            continue
        if name in ("square", "sq", "cubic", "cu"):
            factor = 2 if name.startswith("sq") else 3
            continue
        power = sign * (int(word[2]) if word[2] else 1) * factor
        factor = 1
        known = next(
            (
                _UNITS[form]
                for form in (name, name.removesuffix("s"), name.removesuffix("es"))
                if form in _UNITS
            ),
            None,
        )
        if name in ("mph", "kmh", "kph"):
            known = None
            powers["length"] = powers.get("length", 0) + 1
            powers["time"] = powers.get("time", 0) - 1
            size *= _UNITS["mile" if name == "mph" else "km"][1] / 3600
            continue
        if known is not None:
            powers[known[0]] = powers.get(known[0], 0) + power
            size *= known[1] ** power
        elif name.removesuffix("s") in _NO_UNIT:
            continue
        elif not is_styled or name in _SENTENCE:
            return None
        else:
            unknown.append(f"{name.removesuffix('s')}^{power}")
    if unknown:
        powers[" ".join(unknown)] = 1
    return Unit(tuple(sorted((kind, power) for kind, power in powers.items() if power)), size)


_SEPARATOR = re.compile(
    rf"(?:[,;]|{STYLE}\{{[\s,]*(?:and|or)[\s,]*\}}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))"
)


def split_list(text: str, is_loose: bool = True) -> list[str]:
    """Split the elements of a list without brackets; the text alone if it is none.

    Args:
        text: LaTeX.
        is_loose: Whether a comma without a space after it separates too. Then 1,000 is one number,
            unless it is an element of a list with spaces.
    """
    separators = list[re.Match[str]]()
    depth, place, found = (
        0,
        0,
        {separator.start(): separator for separator in _SEPARATOR.finditer(text)},
    )
    while place < len(text):
        if place in found and depth == 0:
            separators.append(found[place])
            place = found[place].end()
            continue
        if text.startswith(("\\begin", "\\langle", "\\{"), place):
            depth, place = (
                depth + 1,
                place
                + (6 if text.startswith("\\begin", place) else 7 if text[place + 1] == "l" else 2),
            )
            continue
        if text.startswith(("\\end", "\\rangle", "\\}"), place):
            depth, place = (
                depth - 1,
                place
                + (4 if text.startswith("\\end", place) else 7 if text[place + 1] == "r" else 2),
            )
            continue
        depth += (text[place] in "([{") - (text[place] in ")]}")
        place += 1
    if not is_loose or any(text[one.start() : one.end() + 1] == ", " for one in separators):
        separators = [
            one
            for one in separators
            if one.group() != "," or text[one.end() : one.end() + 1] == " "
        ]
    elements, start = list[str](), 0
    for separator in separators:
        elements.append(text[start : separator.start()].strip())
        start = separator.end()
    elements.append(text[start:].strip())
    return (
        [element for element in elements if element]
        if len(separators) and len(elements) > 1
        else [text]
    )
