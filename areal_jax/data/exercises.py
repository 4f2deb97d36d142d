"""Seeded generator of exercises for policies that call tools or write programs.

Each exercise has correct and incorrect demonstrations. Supervised fine-tuning on a mixture of both
gives a policy that is capable but undecided; reinforcement learning then increases the share of
correct ones. `problems` does the same for workflows with a single answer. The
file has more than 400 lines because it lists all families of exercises.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, overload

from areal_jax.data.code_tasks import Stdin, format_tests
from areal_jax.data.facts import BOXES, HALLS, fact
from areal_jax.data.problems import Problem, SyntheticProblems
from areal_jax.data.shapes import COLORS, FORMS, Shape, arrange_shapes, draw_picture
from areal_jax.data.splits import Split, digest_of, is_in_split
from areal_jax.image_files import ImageFile
from areal_jax.records import Message

Demonstration: TypeAlias = tuple[Message, ...]
"""The turns after the question: assistant and tool alternate; the assistant has the last turn."""


class ExerciseDraft(NamedTuple):
    """What a family generates; fields as in `Exercise`."""

    question: str
    answer: str
    correct: Sequence[Demonstration]
    incorrect: Sequence[Demonstration]
    images: tuple[ImageFile, ...] = ()
    key: str = ""
    """What id and split depend on; empty: question and answer."""
    drill: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Exercise:
    """One exercise with its answer and demonstrations."""

    id: str
    family: str
    question: str
    answer: str
    """Reference for the grader."""
    kind: str
    """Grader of the answer, as in `Task`."""
    correct: Sequence[Demonstration]
    """Demonstrations that end in a correct answer."""
    incorrect: Sequence[Demonstration]
    """Demonstrations of the same form that end in a wrong answer."""
    images: tuple[ImageFile, ...] = ()
    drill: tuple[str, str] | None = None
    """Another question about the images and its answer, for supervised fine-tuning."""
    correct_share: float = 1.0
    """Share of correct demonstrations in supervised fine-tuning."""

    @property
    def message(self) -> Message:
        """The question as a message of the user."""
        return Message("user", self.question, self.images)


class ExerciseFamily(NamedTuple):
    """A generator of exercises of one type."""

    draft: Callable[[random.Random, Split], ExerciseDraft]
    kind: str
    """Grader of the answers, as in `Task`."""
    correct_share: float
    """Share of correct demonstrations in supervised fine-tuning."""
    has_images: bool


FAMILIES: dict[str, ExerciseFamily] = {}
"""All families by name, in the order in which they alternate."""


def _family(
    kind: str, correct_share: float, *, has_images: bool = False
) -> Callable[[Callable[..., ExerciseDraft]], Callable[..., ExerciseDraft]]:
    def register(draft: Callable[..., ExerciseDraft]) -> Callable[..., ExerciseDraft]:
        FAMILIES[draft.__name__] = ExerciseFamily(draft, kind, correct_share, has_images)
        return draft

    return register


class GeneratedExercises(Sequence[Exercise]):
    """Lazy sequence of exercises.

    The two splits share no question; within a split questions may repeat.
    """

    def __init__(
        self, num_exercises: int, split: Split, families: Sequence[str] = (), seed: int = 0
    ) -> None:
        """Check the families.

        Args:
            num_exercises: length of the sequence.
            split: split of the exercises.
            families: names of families; empty for all without images.
            seed: seed of the exercises.

        Raises:
            ValueError: a family is unknown.
        """
        if unknown := set(families) - FAMILIES.keys():
            raise ValueError(
                f"families: expected exercise families {', '.join(FAMILIES)}, found "
                f"{', '.join(sorted(unknown))}"
            )
        self._count, self._seed = num_exercises, seed
        self._split: Split = split
        self._families = tuple(families) or tuple(
            name for name, family in FAMILIES.items() if not family.has_images
        )

    @property
    def kinds(self) -> set[str]:
        """Graders that the exercises need."""
        return {FAMILIES[name].kind for name in self._families}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Exercise: ...
    @overload
    def __getitem__(self, index: slice) -> list[Exercise]: ...
    def __getitem__(self, index: int | slice) -> Exercise | list[Exercise]:
        selected = range(self._count)[index]
        return (
            self._make(selected)
            if isinstance(selected, int)
            else [self._make(each) for each in selected]
        )

    def _make(self, index: int) -> Exercise:
        name = self._families[index % len(self._families)]
        family, rng = FAMILIES[name], random.Random(f"{self._seed}/{self._split}/{name}/{index}")
        while True:
            draft = family.draft(rng, self._split)
            key = draft.key or f"{draft.question}/{draft.answer}"
            digest = digest_of(key)
            if is_in_split(digest, self._split) and draft.correct and draft.incorrect:
                return Exercise(
                    f"{name}-{digest}",
                    name,
                    draft.question,
                    draft.answer,
                    family.kind,
                    draft.correct,
                    draft.incorrect,
                    draft.images,
                    draft.drill,
                    family.correct_share,
                )


def sample_demonstration(exercise: Exercise, rng: random.Random) -> Demonstration:
    """Sample a demonstration, correct with probability `correct_share`."""
    is_correct = rng.random() < exercise.correct_share
    return rng.choice(exercise.correct if is_correct else exercise.incorrect)


def make_turns(*texts: str) -> Demonstration:
    """Make turns that alternate between the assistant and the tool."""
    return tuple(Message(("assistant", "tool")[i % 2], text) for i, text in enumerate(texts))


# Countdown: a correct demonstration makes attempts, each with its distance from the target, until
# one reaches it; an incorrect one guesses.


@_family("countdown", correct_share=0.6)
def countdown(rng: random.Random, split: Split) -> ExerciseDraft:
    """Reach a target with three numbers, each used once."""
    numbers = [rng.randint(1, 9) for _ in range(3)]
    attempts = dict(_attempts(numbers))
    target = rng.choice(sorted(set(attempts.values())))
    hits = [attempt for attempt, value in attempts.items() if value == target]
    misses = [attempt for attempt, value in attempts.items() if value != target]
    question = f"Make {target} from {numbers[0]}, {numbers[1]} and {numbers[2]}, each used once."

    def boxed(expression: str) -> str:
        return f"\\boxed{{{expression}}}"

    def trying(*tries: tuple[str, str]) -> Demonstration:
        lines = (
            f"{line} {_difference(attempts[expression, line], target)}"
            for expression, line in tries
        )
        return make_turns("\n".join((*lines, boxed(tries[-1][0]))))

    correct = [
        trying(*rng.sample(misses, count), rng.choice(hits)) for count in range(len(misses) + 1)
    ]
    incorrect = [make_turns(boxed(expression)) for expression, _ in misses]
    return ExerciseDraft(
        question, json.dumps({"numbers": numbers, "target": target}), correct, incorrect
    )


def _difference(value: int, target: int) -> str:
    low, high = sorted((value, target))
    return f"{high}-{low}={high - low}"


def _attempts(numbers: Sequence[int]) -> Iterator[tuple[tuple[str, str], int]]:
    """Yield sums and differences of three numbers that are not negative.

    Each comes as its expression, its calculation such as 3+8-5=11-5=6, and its value.
    """
    x, y, z = numbers
    for first, second, operation, third in (
        (x, y, "+", z),
        (x, y, "-", z),
        (x, z, "-", y),
        (y, z, "-", x),
    ):
        value = first + second + (third if operation == "+" else -third)
        expression = f"{first}+{second}{operation}{third}"
        if value >= 0:
            line = f"{expression}={first + second}{operation}{third}={value}"
            yield (expression, line), value


# Facts: a correct demonstration searches with both numbers of the question; incorrect ones search
# with one of them, or guess.


@_family("math", correct_share=0.35)
def facts(rng: random.Random, split: Split) -> ExerciseDraft:
    """Find a number that only a search can reveal."""
    hall, box = rng.choice(HALLS), rng.choice(BOXES)
    sentence, count = fact(hall, box)
    question = rng.choice(
        (
            f"How many pens has box {box} in hall {hall}?",
            f"In hall {hall}, how many pens are in box {box}?",
        )
    )

    def searching(query: str, found: tuple[str, int]) -> Demonstration:
        return make_turns(f"<search>{query}</search>", found[0], f"\\boxed{{{found[1]}}}")

    correct = searching(f"{hall} {box}", (sentence, count))
    incorrect = [
        searching(f"{hall}", fact(hall, BOXES[0])),
        searching(f"{box}", fact(HALLS[0], box)),
        make_turns(f"\\boxed{{{rng.randint(100, 999)}}}"),
    ]
    return ExerciseDraft(
        question, str(count), [correct], [each for each in incorrect if each[-1] != correct[-1]]
    )


# Calculations: problems with large numbers. A correct demonstration passes the right expression to
# the calculator.

CALCULATED = ("linear", "counting", "ages", "average")
"""Families of `problems` with short methods that consist of arithmetic alone."""

_STEP = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")


@_family("math", correct_share=0.35)
def calculations(rng: random.Random, split: Split) -> ExerciseDraft:
    """Solve a problem with a calculator."""
    problems = SyntheticProblems(1 << 20, split, CALCULATED, "medium")
    problem = problems[rng.randrange(len(problems))]
    correct, incorrect = (
        [
            _calculating(*expression)
            for expression in map(combine_steps, solutions)
            if expression is not None
        ]
        for solutions in ((problem.solution,), problem.wrong_solutions)
    )
    return ExerciseDraft(
        problem.question, str(problem.answer), correct, [*incorrect, _guess(problem, rng)]
    )


def combine_steps(solution: str) -> tuple[str, str] | None:
    """Combine the steps of a solution into one expression.

    Returns:
        The expression and its value, or None if some step is no arithmetic or does not use the
        result of the step before.
    """
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


def _calculating(expression: str, value: str) -> Demonstration:
    return make_turns(f"<calculator>{expression}</calculator>", value, f"\\boxed{{{value}}}")


def _guess(problem: Problem, rng: random.Random) -> Demonstration:
    near = [
        number
        for number in range(max(0, problem.answer - 9), problem.answer + 10)
        if number != problem.answer
    ]
    return make_turns(f"\\boxed{{{rng.choice(near)}}}")


# Programs that read integers and print one; the incorrect ones differ in the expression.

_READ_TWO = "a,b=map(int,input().split())\nprint({})"
_READ_ONE = "a=int(input())\nprint({})"
_INPUTS = ((7, 3), (12, 12), (5, 48), (90, 8), (31, 2))


class _Program(NamedTuple):
    """A program in terms of its inputs a and b and a constant k."""

    prints: str
    """Description of its output, for the question."""
    frame: str
    """Code that reads the inputs and prints an expression."""
    right: str
    wrong: tuple[str, ...]
    """Similar expressions with other values."""
    value: Callable[[int, int, int], int]
    """Value of the right expression, from a, b and k."""


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


@_family("code", correct_share=0.3)
def programs(rng: random.Random, split: Split) -> ExerciseDraft:
    """Write a program that reads integers and prints one."""
    program, k = rng.choice(_PROGRAMS), rng.randint(2, 60)
    num_inputs, read = (2, "two integers") if program.frame == _READ_TWO else (1, "an integer")
    question = rng.choice(
        ("Write a program that reads {} and prints {}.", "Read {}, then print {}.")
    )
    cases = [
        (" ".join(map(str, inputs[:num_inputs])) + "\n", f"{program.value(*inputs, k)}\n")
        for inputs in _INPUTS
    ]

    def writing(expression: str) -> Demonstration:
        return make_turns(f"```python\n{program.frame.format(expression.format(k=k))}\n```")

    return ExerciseDraft(
        question.format(read, program.prints.format(k=k)),
        format_tests(Stdin(cases)),
        [writing(program.right)],
        [writing(expression) for expression in program.wrong],
    )


# Shapes in a picture: a correct demonstration names and counts the shapes that are asked for;
# incorrect ones those of the color or of the form alone, or they guess. The drill counts all shapes
# of a picture by kind.

MAX_COUNTED = 5


@_family("math", correct_share=0.35, has_images=True)
def count_shapes(rng: random.Random, split: Split) -> ExerciseDraft:
    """Count the shapes of one color and form in a picture."""
    asked = Shape(rng.choice(list(COLORS)), rng.choice(FORMS))
    picture = arrange_shapes(rng, asked, MAX_COUNTED)
    shapes = [shape for shape in picture if shape is not None]
    answer = shapes.count(asked)
    question = rng.choice(("How many {} {}s are there?", "Count the {} {}s."))
    similar = {
        asked.color: [shape.color for shape in shapes].count(asked.color),
        f"{asked.form}s": [shape.form for shape in shapes].count(asked.form),
    }
    guess = rng.choice([near for near in range(MAX_COUNTED + 2) if near != answer])

    def counting(what: str, count: int) -> Demonstration:
        return make_turns(f"{what} \\boxed{{{count}}}".strip())

    return ExerciseDraft(
        question.format(*asked),
        str(answer),
        [counting(f"{asked.color} {asked.form}s", answer)],
        [
            *(counting(what, count) for what, count in similar.items() if count != answer),
            counting("", guess),
        ],
        (draw_picture(picture, rng),),
        # Not the question, so that no arrangement is in both splits.
        key=repr(picture),
        drill=(
            "Count all shapes.",
            "\n".join(
                f"{kind.color} {kind.form}s {count}"
                for kind, count in sorted(Counter(shapes).items())
            ),
        ),
    )
