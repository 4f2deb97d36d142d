"""Seeded generator of AIME-style problems with worked solutions and wrong ones.

Answers are integers from 0 to 999. A family is a function of a few parameters. For each difficulty
its parameters range over finite axes, so the problems of a family are numbered: a code is a number
in the mixed radix of the axes. A fixed shuffle of all codes assigns its first eighth to `heldout`
and the rest to `train`, independent of the seed, so the splits share no problem. A seeded shuffle
inside the split then decides the order. Both shuffles are bijections that are computed point by
point, so any problem can be made alone and none repeats within an epoch. In each family the values
of some axis differ between any two difficulties.

The file has more than 400 lines because it lists all families of problems, a few lines each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, overload

Split = Literal["train", "heldout"]
Difficulty = Literal["easy", "medium", "hard"]
Axis = Sequence[int] | Sequence[str] | Sequence[tuple[int, ...]]

HELDOUT_SHARE = 8
"""One problem in this many is held out."""

NAMES = ("Ann", "Ben", "Eva", "Leo", "Mia", "Tom")


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem with its answer, its worked solution, and wrong methods without slips."""

    id: str
    """Family, difficulty and code; the same under any seed."""
    family: str
    question: str
    answer: int
    solution: str
    """One step per line, then the answer in \\boxed{}."""
    wrong_solutions: tuple[str, ...]
    """Solutions of the same form by wrong methods; none boxes the answer."""


class Worked(NamedTuple):
    """Written steps of a method, and their result."""

    steps: tuple[str, ...]
    value: int
    is_natural: bool = True
    """Whether every step stays in the natural numbers; other methods are not used."""

    def text(self) -> str:
        """Format the steps and the boxed result."""
        return "\n".join((*self.steps, f"\\boxed{{{self.value}}}"))


class Draft(NamedTuple):
    """What a family generates from its parameters."""

    questions: tuple[str, ...]
    """Alternative wordings of the same problem."""
    right: Worked
    wrong: tuple[Worked, ...]


class Family(NamedTuple):
    """A generator of problems of one type."""

    draft: Callable[..., Draft]
    axes: Mapping[Difficulty, Mapping[str, Axis]]


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order in which they alternate."""


def _family(**axes: Mapping[str, Axis]) -> Callable[[Callable[..., Draft]], Callable[..., Draft]]:
    def register(draft: Callable[..., Draft]) -> Callable[..., Draft]:
        FAMILIES[draft.__name__] = Family(
            draft, {"easy": axes["easy"], "medium": axes["medium"], "hard": axes["hard"]}
        )
        return draft

    return register


def chain(start: int, *rest: str | int) -> Worked:
    """Apply operations to a number and write each as a step.

    chain(9, "-", 1, "*", 3) has the steps 9-1=8 and 8*3=24. "from" subtracts the current value from
    the operand. "mod" and "quotient" both write a division with remainder, 83=7*11+6, and continue
    with the remainder or the quotient. "/" must be exact for `is_natural`.

    Args:
        start: first value.
        rest: operations and operands, alternating.
    """
    value, steps, is_natural = start, list[str](), True
    for operation, operand in zip(rest[::2], rest[1::2], strict=True):
        assert isinstance(operand, int)
        match operation:
            case "+":
                step, result = f"{value}+{operand}", value + operand
            case "-":
                step, result = f"{value}-{operand}", value - operand
            case "from":
                step, result = f"{operand}-{value}", operand - value
            case "*":
                step, result = f"{value}*{operand}", value * operand
            case "/":
                step, result = f"{value}/{operand}", value // operand
                is_natural = is_natural and value % operand == 0
            case "mod" | "quotient":
                quotient, remainder = divmod(value, operand)
                steps.append(f"{value}={operand}*{quotient}+{remainder}")
                value = remainder if operation == "mod" else quotient
                continue
            case _:
                raise ValueError(f"unknown operation: {operation!r}")
        steps.append(f"{step}={result}")
        value, is_natural = result, is_natural and result >= 0
    return Worked(tuple(steps), value, is_natural)


def _euclid(a: int, b: int) -> Worked:
    steps = list[str]()
    while b:
        steps.append(f"{a}={b}*{a // b}+{a % b}")
        a, b = b, a % b
    return Worked(tuple(steps), a)


def _coprime_pairs(low: int, high: int) -> list[tuple[int, ...]]:
    return [(p, q) for p in range(low, high) for q in range(2, p) if math.gcd(p, q) == 1]


def _lcm_pairs(low: int, high: int, most_tries: int, most_lcm: int) -> list[tuple[int, ...]]:
    """List pairs a < b with b in [low, high) whose least common multiple is a small multiple of b.

    a does not divide b.
    """
    pairs = ((a, b) for b in range(low, high) for a in range(4, b) if b % a)
    return [pair for pair in pairs if math.lcm(*pair) <= min(most_lcm, most_tries * pair[1])]


def _numerals(bases: Iterable[int], num_digits: int) -> list[tuple[int, ...]]:
    """List (base, digits ...) of every number up to 999 with `num_digits` digits in the bases."""
    return [
        (base, *(value // base**place % base for place in reversed(range(num_digits))))
        for base in bases
        for value in range(base ** (num_digits - 1), min(base**num_digits, 1000))
    ]


@_family(
    easy={"first": range(1, 31), "step": range(2, 10), "n": range(5, 13)},
    medium={"first": range(10, 100), "step": range(11, 26), "n": range(8, 21)},
    hard={"first": range(100, 301), "step": range(12, 25), "n": range(21, 31)},
)
def sequence(first: int, step: int, n: int) -> Draft:
    return Draft(
        (
            (
                f"An arithmetic sequence starts with {first} and has common difference {step}. "
                f"What is term number {n}?"
            ),
            (
                f"The first term of an arithmetic sequence is {first} and the difference is "
                f"{step}. Find term {n}."
            ),
            f"Write down {first} and keep adding {step}. What is number {n} in the list?",
            (
                f"Row 1 of a hall has {first} seats, and each row has {step} more. How many seats "
                f"has row {n}?"
            ),
        ),
        chain(n, "-", 1, "*", step, "+", first),
        (
            chain(n, "*", step, "+", first),
            chain(n, "+", 1, "*", step, "+", first),
            chain(n, "-", 1, "*", step),
            chain(n, "-", 1, "+", step, "+", first),
        ),
    )


@_family(
    easy={"a": range(11, 50), "b": range(11, 50), "m": range(3, 10)},
    medium={"a": range(100, 300), "b": range(50, 300), "m": range(3, 20)},
    hard={"a": range(300, 1000), "b": range(300, 1000), "m": range(11, 100)},
)
def remainder(a: int, b: int, m: int) -> Draft:
    return Draft(
        (
            f"What is the remainder when {a}+{b} is divided by {m}?",
            f"Find the remainder of {a}+{b} modulo {m}.",
            f"{a} red and {b} blue beads are put into bags of {m}. How many are left over?",
            f"Compute {a}+{b} modulo {m}.",
        ),
        chain(a, "+", b, "mod", m),
        (
            chain(a, "+", b, "quotient", m),
            chain(a, "mod", m, "+", b),
            chain(b, "mod", m, "+", a),
            chain(a, "+", b, "-", m),
        ),
    )


@_family(
    easy={
        "base": [n for n in range(12, 100) if n % 10 in (2, 3, 4, 7, 8, 9)],
        "exponent": range(5, 41),
    },
    medium={
        "base": [n for n in range(102, 400) if n % 10 in (2, 3, 4, 7, 8, 9)],
        "exponent": range(20, 200),
    },
    hard={
        "base": [n for n in range(402, 1000) if n % 10 in (2, 3, 4, 7, 8, 9)],
        "exponent": range(100, 1000),
    },
)
def units_digit(base: int, exponent: int) -> Draft:
    cycle = [pow(base, k, 10) for k in (1, 2, 3, 4)]
    listed, division = " ".join(map(str, cycle)), chain(exponent, "mod", 4)

    def taking(place: int) -> Worked:
        return Worked((listed, *division.steps), cycle[(place - 1) % 4])

    return Draft(
        (
            f"What is the units digit of {base}^{exponent}?",
            f"Find the last digit of {base}^{exponent}.",
            f"With which digit does {base}^{exponent} end?",
            f"What is the remainder when {base}^{exponent} is divided by 10?",
        ),
        taking(division.value),
        (
            taking(division.value + 1),
            taking(division.value - 1),
            Worked((listed,), cycle[-1]),
            chain(base % 10, "*", exponent, "mod", 10),
        ),
    )


@_family(
    easy={"divisor": range(2, 12), "ratio": _coprime_pairs(3, 10), "order": ("falling", "rising")},
    medium={
        "divisor": range(11, 41),
        "ratio": _coprime_pairs(10, 14),
        "order": ("falling", "rising"),
    },
    hard={
        "divisor": range(20, 46),
        "ratio": _coprime_pairs(14, 22),
        "order": ("falling", "rising"),
    },
)
def gcd(divisor: int, ratio: tuple[int, int], order: str) -> Draft:
    large, small = divisor * ratio[0], divisor * ratio[1]
    a, b = (large, small) if order == "falling" else (small, large)
    return Draft(
        (
            f"What is the greatest common divisor of {a} and {b}?",
            f"Find the largest integer that divides both {a} and {b}.",
            f"{a} pens and {b} books are shared out equally. What is the largest number of pupils?",
            f"What is the largest square tile that covers a floor of {a} by {b}?",
        ),
        _euclid(large, small),
        (
            chain(large, "mod", small),
            chain(large, "-", small),
            chain(small, "/", 2),
            chain(large, "quotient", small),
        ),
    )


@_family(
    easy={"pair": _lcm_pairs(5, 41, 3, 99), "start": range(1, 21)},
    medium={"pair": _lcm_pairs(41, 100, 4, 500), "start": range(1, 60)},
    hard={"pair": _lcm_pairs(100, 250, 4, 900), "start": range(10, 100)},
)
def lcm(pair: tuple[int, int], start: int) -> Draft:
    a, b = pair
    least = math.lcm(a, b)
    tries = tuple(
        f"{multiple}={a}*{multiple // a}+{multiple % a}" for multiple in range(b, least + 1, b)
    )

    def adding(steps: tuple[str, ...], value: int) -> Worked:
        return Worked((*steps, *(last := chain(value, "+", start)).steps), last.value)

    return Draft(
        (
            f"What is {start} plus the least common multiple of {a} and {b}?",
            f"Add {start} to the smallest positive integer that both {a} and {b} divide.",
            (
                f"Two lights flash every {a} and {b} seconds. Both flash at second {start}. "
                "At which second do both flash next?"
            ),
            (
                f"One bus leaves every {a} minutes, one every {b}. Both leave at minute {start}. "
                "When do both leave next?"
            ),
        ),
        adding(tries, least),
        (
            chain(a, "*", b, "+", start),
            chain(a, "+", b, "+", start),
            Worked(tries, least),
            adding(tries[:1], b),
            chain(b, "-", a, "+", start),
        ),
    )


@_family(
    easy={"number": range(1000, 10000)},
    medium={"number": range(10**5, 10**6)},
    hard={"number": range(10**8, 10**9)},
)
def digit_sum(number: int) -> Draft:
    digits = [int(digit) for digit in str(number)]

    def adding(*parts: int) -> Worked:
        return chain(parts[0], *(item for part in parts[1:] for item in ("+", part)))

    return Draft(
        (
            f"What is the sum of the digits of {number}?",
            f"Find the digit sum of {number}.",
            f"The digits of {number} are added. What is the total?",
            f"Add all digits of {number}.",
        ),
        adding(*digits),
        (
            adding(*digits[:-1]),
            adding(*digits[1:]),
            adding(*digits, len(digits)),
            chain(
                digits[0], "*", digits[1], *(item for digit in digits[2:] for item in ("+", digit))
            ),
        ),
    )


@_family(
    easy={"a": range(2, 10), "x": range(2, 11), "b": range(1, 26)},
    medium={"a": range(3, 16), "x": range(13, 41), "b": range(10, 100)},
    hard={"a": range(6, 21), "x": range(41, 100), "b": range(100, 1000)},
)
def linear(a: int, x: int, b: int) -> Draft:
    c = a * x + b
    return Draft(
        (
            f"Solve {a}x+{b}={c} for x.",
            f"If {a}x+{b}={c}, what is x?",
            f"{a} times a number plus {b} is {c}. Find the number.",
            f"{a} equal boxes and {b} loose nuts make {c} nuts. How many nuts are in a box?",
        ),
        chain(c, "-", b, "/", a),
        (
            chain(c, "+", b, "/", a),
            chain(c, "-", b),
            chain(c, "-", b, "-", a),
            chain(c, "-", a),
            chain(c, "quotient", a),
        ),
    )


@_family(
    easy={"small": range(2, 31), "difference": range(2, 31), "ask": ("larger", "smaller")},
    medium={"small": range(31, 151), "difference": range(5, 100), "ask": ("larger", "smaller")},
    hard={"small": range(151, 500), "difference": range(50, 500), "ask": ("larger", "smaller")},
)
def system(small: int, difference: int, ask: str) -> Draft:
    total = small + difference + small
    larger, smaller = chain(total, "+", difference, "/", 2), chain(total, "-", difference, "/", 2)
    letter = "x" if ask == "larger" else "y"
    return Draft(
        (
            f"Two numbers have sum {total} and difference {difference}. What is the {ask} number?",
            f"x+y={total} and x-y={difference}. Find {letter}.",
            (
                f"Two boxes hold {total} nuts, one {difference} more than the other. How many does "
                f"the {ask} box hold?"
            ),
            (
                f"Find the {ask} of two numbers whose sum is {total} and whose difference is "
                f"{difference}."
            ),
        ),
        larger if ask == "larger" else smaller,
        (
            smaller if ask == "larger" else larger,
            chain(total, "-", difference),
            chain(total, "+", difference),
            chain(total, "/", 2),
        ),
    )


@_family(
    easy={"a": range(2, 4), "b": range(1, 26), "x": range(2, 13), "depth": (2,)},
    medium={"a": range(3, 8), "b": range(26, 60), "x": range(3, 11), "depth": (2,)},
    hard={"a": range(2, 4), "b": range(2, 30), "x": range(3, 20), "depth": (3,)},
)
def composition(a: int, b: int, x: int, depth: int) -> Draft:
    inside = f"{'f(' * depth}{x}{')' * depth}"
    return Draft(
        (
            f"Let f(x)={a}x+{b}. Find {inside}.",
            f"If f(x)={a}x+{b}, what is {inside}?",
            f"For f(x)={a}x+{b}, compute {inside}.",
            f"A machine turns x into {a}x+{b}. Put in {x}, {depth} times over. What comes out?",
        ),
        chain(x, *("*", a, "+", b) * depth),
        (
            chain(x, *("*", a, "+", b) * (depth - 1)),
            chain(x, "*", a, "+", b, "*", depth),
            chain(x, *("*", a) * depth, "+", b),
            chain(x, "*", a, "+", b, *("+", b) * (depth - 1)),
        ),
    )


@_family(
    easy={"numeral": _numerals(range(3, 7), 3)},
    medium={"numeral": _numerals((7, 8, 9), 3)},
    hard={"numeral": _numerals((4, 5), 4)},
)
def base(numeral: tuple[int, ...]) -> Draft:
    radix, *digits = numeral
    written = "".join(map(str, digits))

    def reading(*places: int) -> Worked:
        return chain(
            places[0], *(item for place in places[1:] for item in ("*", radix, "+", place))
        )

    return Draft(
        (
            f"What is {written} in base {radix} as a base ten number?",
            f"Write the base {radix} number {written} in base ten.",
            f"Convert {written} from base {radix} to base ten.",
            f"Which integer is written {written} in base {radix}?",
        ),
        reading(*digits),
        (
            reading(*reversed(digits)),
            reading(*digits[:-1]),
            chain(digits[0], *(item for digit in digits[1:] for item in ("+", digit)), "*", radix),
            chain(digits[0], "*", radix, *(item for digit in digits[1:] for item in ("+", digit))),
        ),
    )


@_family(
    easy={"low": range(5, 41), "span": range(10, 56), "ends": ("both", "neither")},
    medium={"low": range(61, 300), "span": range(50, 300), "ends": ("both", "neither")},
    hard={"low": range(300, 2000), "span": range(200, 998), "ends": ("both", "neither")},
)
def counting(low: int, span: int, ends: str) -> Draft:
    high = low + span
    both, neither = chain(high, "-", low, "+", 1), chain(high, "-", low, "-", 1)
    inclusive = (
        f"How many integers are there from {low} to {high}, both included?",
        f"How many pages does one read who reads from page {low} through page {high}?",
        f"How many integers n satisfy {low}<=n<={high}?",
        f"Doors {low} to {high} are painted, both included. How many doors are that?",
    )
    exclusive = (
        f"How many integers are strictly between {low} and {high}?",
        f"How many pages are between page {low} and page {high}, without these two?",
        f"How many integers n satisfy {low}<n<{high}?",
        f"The doors between {low} and {high} are painted, not these two. How many doors are that?",
    )
    return Draft(
        inclusive if ends == "both" else exclusive,
        both if ends == "both" else neither,
        (
            neither if ends == "both" else both,
            chain(high, "-", low),
            chain(high, "+", low),
            chain(high, "+", 1),
        ),
    )


@_family(
    easy={"today": range(7), "days": range(8, 61), "when": ("after", "before")},
    medium={"today": range(7), "days": range(100, 366), "when": ("after", "before")},
    hard={"today": range(7), "days": range(366, 2000), "when": ("after", "before")},
)
def weekday(today: int, days: int, when: str) -> Draft:
    after = chain(today, "+", days, "mod", 7)
    backward = chain(days, "mod", 7)
    before = Worked(
        backward.steps + (rest := chain(today, "+", 7, "-", backward.value, "mod", 7)).steps,
        rest.value,
    )
    later, earlier = when == "after", when == "before"
    return Draft(
        (
            f"Days of the week are 0 to 6. Today is day {today}. Which day "
            f"{f'is it in {days} days' if later else f'was it {days} days ago'}?",
            f"Number the days of the week 0 to 6. Which day is {days} days {when} day {today}?",
            f"A wheel has places 0 to 6. From place {today} it turns {days} places "
            f"{'on' if later else 'back'}. Which place is reached?",
            f"With days of the week from 0 to 6, find the day {days} days {when} a day {today}.",
        ),
        before if earlier else after,
        (
            after if earlier else before,
            backward,
            chain(days, "quotient", 7),
            chain(today, "+", days, "+", 1, "mod", 7),
            chain(days, "-", today, "mod", 7),
        ),
    )


@_family(
    easy={"age": range(7, 22), "times": range(2, 5), "years": range(2, 13), "when": ("in", "ago")},
    medium={
        "age": range(22, 41),
        "times": range(2, 5),
        "years": range(5, 38),
        "when": ("in", "ago"),
    },
    hard={
        "age": range(41, 100),
        "times": range(3, 9),
        "years": range(41, 121),
        "when": ("in", "ago"),
    },
)
def ages(age: int, times: int, years: int, when: str) -> Draft:
    younger, older = NAMES[(age + years) % 6], NAMES[(age + years + times) % 6]
    later, earlier = chain(age, "*", times, "+", years), chain(age, "*", times, "-", years)
    future = (
        (
            f"{younger} is {age}. {older} is {times} times as old. How old will {older} be in "
            f"{years} years?"
        ),
        (
            f"{older} is {times} times as old as {younger}, who is {age}. What is the age of "
            f"{older} in {years} years?"
        ),
        (
            f"A tree is {age} years old, a house {times} times as old. How old will the house be "
            f"in {years} years?"
        ),
        (
            f"{younger} has {age} nuts, {older} {times} times as many. {older} finds {years} more. "
            f"How many has {older} now?"
        ),
    )
    past = (
        (
            f"{younger} is {age}. {older} is {times} times as old. How old was {older} {years} "
            "years ago?"
        ),
        (
            f"{older} is {times} times as old as {younger}, who is {age}. What was the age of "
            f"{older} {years} years ago?"
        ),
        (
            f"A tree is {age} years old, a house {times} times as old. How old was the house "
            f"{years} years ago?"
        ),
        (
            f"{younger} has {age} nuts, {older} {times} times as many. {older} eats {years}. How "
            f"many has {older} now?"
        ),
    )
    return Draft(
        future if when == "in" else past,
        later if when == "in" else earlier,
        (
            earlier if when == "in" else later,
            chain(age, "*", times),
            chain(age, "+", years, "*", times),
            chain(age, "+", times, "+", years),
            chain(age, "+", times, "-", years),
        ),
    )


@_family(
    easy={"tenths": range(1, 10), "price": range(20, 201, 10), "change": ("falls", "rises")},
    medium={"tenths": range(1, 10), "price": range(210, 520, 10), "change": ("falls", "rises")},
    hard={"tenths": range(1, 7), "price": range(520, 630, 10), "change": ("falls", "rises")},
)
def percentage(tenths: int, price: int, change: str) -> Draft:
    percent = 10 * tenths
    part = ("/", 10, "*", tenths)
    lower, higher = chain(price, *part, "from", price), chain(price, *part, "+", price)
    return Draft(
        (
            f"A price of {price} {change} by {percent}%. What is the new price?",
            (
                f"{price} is {'cut' if change == 'falls' else 'raised'} by {percent} percent. Find "
                "the result."
            ),
            (
                f"A club of {price} {'loses' if change == 'falls' else 'gains'} {percent}% of its "
                "members. How many are there now?"
            ),
            f"What is {price} {'less' if change == 'falls' else 'plus'} {percent}% of {price}?",
        ),
        lower if change == "falls" else higher,
        (
            higher if change == "falls" else lower,
            chain(price, *part),
            chain(price, "-", percent),
            chain(price, "+", percent),
        ),
    )


@_family(
    easy={"count": range(3, 7), "mean": range(6, 17), "missing": range(1, 18)},
    medium={"count": range(4, 9), "mean": range(26, 61), "missing": range(10, 100)},
    hard={"count": range(9, 13), "mean": range(61, 100), "missing": range(100, 500)},
)
def average(count: int, mean: int, missing: int) -> Draft:
    known = count * mean - missing
    return Draft(
        (
            (
                f"The average of {count} numbers is {mean}. All but one have sum {known}. Find the "
                "missing number."
            ),
            (
                f"{count} numbers have mean {mean}. All but the last have sum {known}. What is the "
                "last?"
            ),
            (
                f"{count} tests have average score {mean}. The others have sum {known}. What is "
                "the score of the last test?"
            ),
            (
                f"{known} points came from all but one of {count} games, with average {mean} in "
                "all. Find the points of the last."
            ),
        ),
        chain(count, "*", mean, "-", known),
        (
            chain(count, "*", mean, "+", known),
            chain(known, "-", mean),
            chain(count, "*", mean),
            chain(known, "+", mean),
            chain(known, "/", count),
        ),
    )


@_family(
    easy={"width": range(2, 10), "height": range(3, 25), "ask": ("area", "perimeter")},
    medium={"width": range(5, 16), "height": range(31, 61), "ask": ("area", "perimeter")},
    hard={"width": range(5, 8), "height": range(61, 143), "ask": ("area", "perimeter")},
)
def rectangle(width: int, height: int, ask: str) -> Draft:
    around, area = 2 * (width + height), width * height
    given = "perimeter" if ask == "area" else "area"
    size = around if ask == "area" else area
    questions = (
        f"A rectangle with {given} {size} is {width} wide. What is its {ask}?",
        f"Find the {ask} of a rectangle of width {width} and {given} {size}.",
        f"A garden is {width} wide and has {given} {size}. What is its {ask}?",
        f"One side of a rectangle is {width}, its {given} is {size}. Find the {ask}.",
    )
    if ask == "area":
        right = chain(around, "/", 2, "-", width, "*", width)
        wrong = (
            chain(around, "-", width, "*", width),
            chain(around, "/", 2, "-", width),
            chain(around, "/", 2, "*", width),
            chain(around, "*", width),
        )
    else:
        right = chain(area, "/", width, "+", width, "*", 2)
        wrong = (
            chain(area, "+", width, "*", 2),
            chain(area, "/", width),
            chain(area, "/", width, "+", width),
            chain(area, "/", width, "*", 2, "+", width),
        )
    return Draft(questions, right, wrong)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def _shuffled(index: int, size: int, key: str) -> int:
    """Return the position of `index` in the shuffle of range(size) named `key`.

    A Feistel network on pairs of half-words, applied again until the result is below `size` (cycle
    walking).
    """
    half = max(1, -(-(size - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for step in range(4):
            left, right = right, left ^ (_number(f"{key}/{step}/{right}") & mask)
        index = left << half | right
        if index < size:
            return index


def _split_range(size: int, split: Split) -> range:
    num_heldout = size // HELDOUT_SHARE
    match split:
        case "heldout":
            return range(num_heldout)
        case "train":
            return range(num_heldout, size)
        case _:
            raise ValueError(f"split: expected train or heldout, found {split!r}")


def _axes(family: str, difficulty: Difficulty) -> Mapping[str, Axis]:
    if family not in FAMILIES:
        raise ValueError(
            f"families: expected problem families {', '.join(FAMILIES)}, found {family!r}"
        )
    if difficulty not in FAMILIES[family].axes:
        raise ValueError(f"difficulty: expected easy, medium or hard, found {difficulty!r}")
    return FAMILIES[family].axes[difficulty]


def _num_codes(family: str, difficulty: Difficulty) -> int:
    return math.prod(len(axis) for axis in _axes(family, difficulty).values())


def num_problems(family: str, difficulty: Difficulty, split: Split) -> int:
    """Number of distinct problems of a family."""
    return len(_split_range(_num_codes(family, difficulty), split))


def problem_code(family: str, difficulty: Difficulty, split: Split, seed: int, index: int) -> int:
    """Code of problem number `index`: its number in the family, in the mixed radix of the axes."""
    size = _num_codes(family, difficulty)
    positions = _split_range(size, split)
    position = positions[_shuffled(index % len(positions), len(positions), f"{seed}/{split}")]
    return _shuffled(position, size, f"{family}/{difficulty}")


def make_problem(
    family: str, difficulty: Difficulty, split: Split, seed: int, index: int
) -> Problem:
    """Make problem number `index` of one family; problems repeat after `num_problems`."""
    code = problem_code(family, difficulty, split, seed, index)
    parameters, rest = dict[str, int | str | tuple[int, ...]](), code
    for name, axis in _axes(family, difficulty).items():
        rest, value = divmod(rest, len(axis))
        parameters[name] = axis[value]
    draft = FAMILIES[family].draft(**parameters)
    name = f"{family}-{difficulty}-{code}"
    answer = draft.right.value
    return Problem(
        name,
        family,
        draft.questions[_number(name) % len(draft.questions)],
        answer,
        draft.right.text(),
        tuple(
            dict.fromkeys(
                w.text()
                for w in draft.wrong
                if w.is_natural and w.value != answer and w.value <= 999
            )
        ),
    )


class SyntheticProblems(Sequence[Problem]):
    """Lazy sequence of `num` problems; the families alternate."""

    def __init__(
        self,
        num: int,
        split: Split = "train",
        families: Sequence[str] = (),
        difficulty: Difficulty = "easy",
        seed: int = 0,
    ) -> None:
        """Check the families and the difficulty.

        Args:
            num: length of the sequence.
            split: split of the problems.
            families: names of families; empty for all.
            difficulty: size of the numbers and number of steps.
            seed: seed of the order of problems.
        """
        self.families = tuple(families) or tuple(FAMILIES)
        for family in self.families:
            _split_range(len(_axes(family, difficulty)), split)
        self.num, self.seed = num, seed
        self.split: Split = split
        self.difficulty: Difficulty = difficulty

    def __len__(self) -> int:
        return self.num

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.num))]
        if not -self.num <= index < self.num:
            raise IndexError(f"problem {index} of {self.num}")
        number, family = divmod(index % self.num, len(self.families))
        return make_problem(self.families[family], self.difficulty, self.split, self.seed, number)
