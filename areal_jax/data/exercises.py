"""Exercises for policies that use tools or write programs, from a seeded generator, each with good
and bad ways to solve it.

They are to workflows what `problems` are to a single answer: supervised fine-tuning on a mixture of
ways makes a policy that is able and undecided, and reinforcement learning teaches it which way is
good.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, TypeAlias, overload

from areal_jax.data.code_tasks import Stdin, as_answer
from areal_jax.data.facts import BOXES, HALLS, fact
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.records import Message

Split = Literal["train", "heldout"]

HELDOUT_SHARE = 8
"""One exercise in this many is held out: which, its question says."""

Way: TypeAlias = tuple[Message, ...]
"""A conversation after the question: what the assistant says, what tools answer, and what it says
last."""


class Draft(NamedTuple):
    question: str
    answer: str
    good: Sequence[Way]
    bad: Sequence[Way]


@dataclass(frozen=True, slots=True)
class Exercise:
    id: str
    family: str
    question: str
    answer: str
    """What the grader of its kind compares with."""
    kind: str
    good: Sequence[Way]
    """Ways that end in a right answer."""
    bad: Sequence[Way]
    """Ways that do not, in the same form."""


class Family(NamedTuple):
    draft: Callable[[random.Random, Split], Draft]
    kind: str
    """Which grader reads the answer."""
    good_share: float
    """Of the ways that fine-tuning learns."""


FAMILIES: dict[str, Family] = {}
"""All families by name, in the order in which exercises go through them."""


def _family(kind: str, good_share: float) -> Callable[[Callable[..., Draft]], Callable[..., Draft]]:
    def register(draft: Callable[..., Draft]) -> Callable[..., Draft]:
        FAMILIES[draft.__name__] = Family(draft, kind, good_share)
        return draft

    return register


class GeneratedExercises(Sequence[Exercise]):
    """So many exercises, each made when asked for. The two splits share no question; one may come
    again in its own."""

    def __init__(
        self, num_exercises: int, split: Split, families: Sequence[str] = (), seed: int = 0
    ) -> None:
        """Args: families: names; none: all. ValueError names them where one is unknown."""
        if unknown := set(families) - FAMILIES.keys():
            raise ValueError(
                f"families: no family {', '.join(sorted(unknown))} of exercises; known are "
                f"{', '.join(FAMILIES)}"
            )
        self._count, self._seed = num_exercises, seed
        self._split: Split = split
        self._families = tuple(families) or tuple(FAMILIES)

    @property
    def kinds(self) -> set[str]:
        """Which graders they need."""
        return {FAMILIES[name].kind for name in self._families}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Exercise: ...
    @overload
    def __getitem__(self, index: slice) -> list[Exercise]: ...
    def __getitem__(self, index: int | slice) -> Exercise | list[Exercise]:
        places = range(self._count)[index]
        return (
            self._make(places)
            if isinstance(places, int)
            else [self._make(place) for place in places]
        )

    def _make(self, place: int) -> Exercise:
        name = self._families[place % len(self._families)]
        family, chance = FAMILIES[name], random.Random(f"{self._seed}/{self._split}/{name}/{place}")
        while True:
            draft = family.draft(chance, self._split)
            digest = blake2b(f"{draft.question}/{draft.answer}".encode(), digest_size=6)
            if (
                (digest.digest()[0] % HELDOUT_SHARE == 0) == (self._split == "heldout")
                and draft.good
                and draft.bad
            ):
                return Exercise(
                    f"{name}-{digest.hexdigest()}",
                    name,
                    draft.question,
                    draft.answer,
                    family.kind,
                    *draft[2:],
                )


def sample_method(exercise: Exercise, chance: random.Random) -> Way:
    """A way to solve it, as one would who does not know which ways are good."""
    is_good = chance.random() < FAMILIES[exercise.family].good_share
    return chance.choice(exercise.good if is_good else exercise.bad)


def _says(*turns: str) -> Way:
    """The assistant and the tool in turns."""
    return tuple(
        Message(("assistant", "tool")[place % 2], text) for place, text in enumerate(turns)
    )


# Countdown: the good way tries, and says of every attempt how far off it is, until one hits; the
# bad one guesses.


@_family("countdown", good_share=0.6)
def countdown(chance: random.Random, split: Split) -> Draft:
    numbers = [chance.randint(1, 9) for _ in range(3)]
    attempts = dict(_attempts(numbers))
    target = chance.choice(sorted(set(attempts.values())))
    hits = [attempt for attempt, value in attempts.items() if value == target]
    misses = [attempt for attempt, value in attempts.items() if value != target]
    question = f"Make {target} from {numbers[0]}, {numbers[1]} and {numbers[2]}, each used once."

    def boxed(whole: str) -> str:
        return f"\\boxed{{{whole}}}"

    def trying(*tried: tuple[str, str]) -> Way:
        lines = (f"{line} {_difference(attempts[whole, line], target)}" for whole, line in tried)
        return _says("\n".join((*lines, boxed(tried[-1][0]))))

    good = [
        trying(*chance.sample(misses, count), chance.choice(hits))
        for count in range(len(misses) + 1)
    ]
    bad = [_says(boxed(whole)) for whole, _ in misses]
    return Draft(question, json.dumps({"numbers": numbers, "target": target}), good, bad)


def _difference(value: int, target: int) -> str:
    low, high = sorted((value, target))
    return f"{high}-{low}={high - low}"


def _attempts(numbers: Sequence[int]) -> Iterator[tuple[tuple[str, str], int]]:
    """Sums and differences of three numbers, each with how it is worked out, 3+8-5=11-5=6, and its
    value; none is negative."""
    x, y, z = numbers
    for first, second, operation, third in (
        (x, y, "+", z),
        (x, y, "-", z),
        (x, z, "-", y),
        (y, z, "-", x),
    ):
        value = first + second + (third if operation == "+" else -third)
        whole = f"{first}+{second}{operation}{third}"
        if value >= 0:
            yield (whole, f"{whole}={first + second}{operation}{third}={value}"), value


# Facts: the good way searches with both numbers of the question, bad ones with one, or they guess.


@_family("math", good_share=0.35)
def facts(chance: random.Random, split: Split) -> Draft:
    hall, box = chance.choice(HALLS), chance.choice(BOXES)
    found, count = fact(hall, box)
    question = chance.choice(
        (
            f"How many pens has box {box} in hall {hall}?",
            f"In hall {hall}, how many pens are in box {box}?",
        )
    )

    def finding(query: str, found: tuple[str, int]) -> Way:
        return _says(f"<search>{query}</search>", found[0], f"\\boxed{{{found[1]}}}")

    good = [finding(f"{hall} {box}", (found, count))]
    bad = [
        finding(f"{hall}", fact(hall, BOXES[0])),
        finding(f"{box}", fact(HALLS[0], box)),
        _says(f"\\boxed{{{chance.randint(100, 999)}}}"),
    ]
    return Draft(question, str(count), good, [way for way in bad if way[-1] != good[0][-1]])


# Calculations: problems with numbers too large for the head. The good way has the right expression
# calculated.

CALCULATED = ("linear", "counting", "ages", "average")
"""Families of `problems` whose methods are arithmetic throughout, and short."""

_STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


@_family("math", good_share=0.35)
def calculations(chance: random.Random, split: Split) -> Draft:
    problems = SyntheticProblems(1 << 20, split, CALCULATED, "medium")
    problem = problems[chance.randrange(len(problems))]
    good, bad = (
        [
            _calculating(*expression)
            for expression in map(expression_of, solutions)
            if expression is not None
        ]
        for solutions in ((problem.solution,), problem.wrong_solutions)
    )
    return Draft(problem.question, str(problem.answer), good, [*bad, _guess(problem, chance)])


def expression_of(solution: str) -> tuple[str, str] | None:
    """The steps of a solution in one expression, with its value; None where they are not arithmetic
    one after another."""
    steps = [_STEP.fullmatch(line) for line in solution.split("\n")[:-1]]
    expression = before = ""
    for step in steps:
        if step is None:
            return None
        left, operation, right, value = step.groups()
        if not expression:
            expression = f"{left}{operation}{right}"
        elif left == before:
            expression = f"({expression}){operation}{right}"
        elif right == before:
            expression = f"{left}{operation}({expression})"
        else:
            return None
        before = value
    return (expression, before) if expression else None


def _calculating(expression: str, value: str) -> Way:
    return _says(f"<calculator>{expression}</calculator>", value, f"\\boxed{{{value}}}")


def _guess(problem: Problem, chance: random.Random) -> Way:
    near = [
        number
        for number in range(max(0, problem.answer - 9), problem.answer + 10)
        if number != problem.answer
    ]
    return _says(f"\\boxed{{{chance.choice(near)}}}")


# Programs that read integers and print one, with bad ones that are near.

_READ_TWO = "a,b=map(int,input().split())\nprint({})"
_READ_ONE = "a=int(input())\nprint({})"
_INPUTS = ((7, 3), (12, 12), (5, 48), (90, 8), (31, 2))


class _Program(NamedTuple):
    """What it prints, and what it reads; the expression that it prints, and others that are near. k
    is a number."""

    prints: str
    frame: str
    right: str
    wrong: tuple[str, ...]
    value: Callable[[int, int, int], int]
    """Of the right expression, from a, b and k."""


_PROGRAMS = (
    _Program(
        "their sum times {k}",
        _READ_TWO,
        "(a+b)*{k}",
        ("a+b*{k}", "a*{k}+b", "(a-b)*{k}"),
        lambda a, b, k: (a + b) * k,
    ),
    _Program(
        "their product plus {k}",
        _READ_TWO,
        "a*b+{k}",
        ("a+b+{k}", "a*b-{k}", "a*(b+{k})"),
        lambda a, b, k: a * b + k,
    ),
    _Program(
        "the larger plus {k}",
        _READ_TWO,
        "max(a,b)+{k}",
        ("min(a,b)+{k}", "a+{k}"),
        lambda a, b, k: max(a, b) + k,
    ),
    _Program(
        "the smaller times {k}",
        _READ_TWO,
        "min(a,b)*{k}",
        ("max(a,b)*{k}", "b*{k}"),
        lambda a, b, k: min(a, b) * k,
    ),
    _Program(
        "the remainder modulo {k}",
        _READ_ONE,
        "a%{k}",
        ("a//{k}", "{k}%a", "a-{k}"),
        lambda a, b, k: a % k,
    ),
    _Program(
        "{k} plus its square",
        _READ_ONE,
        "a*a+{k}",
        ("a+a+{k}", "a*(a+{k})", "a*{k}"),
        lambda a, b, k: a * a + k,
    ),
)


@_family("code", good_share=0.3)
def programs(chance: random.Random, split: Split) -> Draft:
    program, k = chance.choice(_PROGRAMS), chance.randint(2, 60)
    num_inputs, read = (2, "two integers") if program.frame == _READ_TWO else (1, "an integer")
    question = chance.choice(
        ("Write a program that reads {} and prints {}.", "Read {}, then print {}.")
    )
    cases = [
        (" ".join(map(str, given[:num_inputs])) + "\n", f"{program.value(*given, k)}\n")
        for given in _INPUTS
    ]

    def writing(expression: str) -> Way:
        return _says(f"```python\n{program.frame.format(expression.format(k=k))}\n```")

    return Draft(
        question.format(read, program.prints.format(k=k)),
        as_answer(Stdin(cases)),
        [writing(program.right)],
        [writing(expression) for expression in program.wrong],
    )
