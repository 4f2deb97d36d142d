"""Generated problems, checked with brute-force solvers that read the question alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import combinations
from typing import get_args

import pytest

from areal_jax.data.problems import (
    FAMILIES,
    Axis,
    Difficulty,
    Problem,
    Split,
    SyntheticProblems,
    chain,
    make_problem,
    num_problems,
    problem_code,
)

DIFFICULTIES: tuple[Difficulty, ...] = get_args(Difficulty)
SPLITS: tuple[Split, ...] = get_args(Split)

EVERY_FAMILY = pytest.mark.parametrize("family", list(FAMILIES))


@cache
def some(family: str, difficulty: Difficulty, split: Split = "train") -> list[Problem]:
    return [
        make_problem(family, difficulty, split, 0, i)
        for i in range(min(48, num_problems(family, difficulty, split)))
    ]


def apart(one: Axis, other: Axis) -> bool:
    if isinstance(one, range) and isinstance(other, range):  # some are too long to list
        return one[-1] < other[0] or other[-1] < one[0]
    return not set(one) & set(other)


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


def says(question: str, *words: str) -> bool:
    return any(word in question for word in words)


def solve_sequence(question: str) -> int:
    term, step, n = numbers(question.removeprefix("Row 1 "))
    for _ in range(n - 1):
        term += step
    return term


def solve_remainder(question: str) -> int:
    a, b, left = numbers(question)
    return [*range(left)][(a + b) - sum(left for _ in range((a + b) // left))]


def solve_units_digit(question: str) -> int:
    base, exponent, *_ = numbers(question)
    return int(str(base**exponent)[-1])


def solve_gcd(question: str) -> int:
    a, b = numbers(question)
    return max(d for d in range(1, min(a, b) + 1) if a % d == b % d == 0)


def solve_lcm(question: str) -> int:
    start, a, b = numbers(question)
    if not question.startswith(("What", "Add")):
        a, b, start = start, a, b
    time = start + 1
    while (time - start) % a or (time - start) % b:
        time += 1
    return time


def solve_digit_sum(question: str) -> int:
    (number,) = numbers(question)
    total = 0
    while number:
        number, digit = divmod(number, 10)
        total += digit
    return total


def solve_linear(question: str) -> int:
    a, b, c = numbers(question)
    (x,) = [x for x in range(1000) if a * x + b == c]
    return x


def solve_system(question: str) -> int:
    total, difference = numbers(question)
    ((x, y),) = [(total - y, y) for y in range(total) if total - y - y == difference]
    return x if says(question, "larger", "Find x") else y


def solve_composition(question: str) -> int:
    a, b, x, *depth = numbers(question)
    for _ in range(depth[0] if depth else question.count("f(") - 1):
        x = a * x + b
    return x


def solve_base(question: str) -> int:
    numeral, radix = numbers(question)
    if says(question, "the base"):
        radix, numeral = numeral, radix
    return int(str(numeral), radix)


def solve_counting(question: str) -> int:
    low, high = numbers(question)
    both = says(question, "both included", "through", "<=")
    return sum(low <= n <= high if both else low < n < high for n in range(high + 2))


def solve_weekday(question: str) -> int:
    zero, six, day, days = numbers(question)
    assert (zero, six) == (0, 6)
    if says(question, "days after", "days before"):
        days, day = day, days
    for _ in range(days):
        if says(question, " in ", "after", " on."):
            day = 0 if day == 6 else day + 1
        else:
            assert says(question, "ago", "before", "back")
            day = 6 if day == 0 else day - 1
    return day


def solve_ages(question: str) -> int:
    age, times, years = numbers(question)
    if says(question, "who is"):
        age, times = times, age
    older = sum(age for _ in range(times))
    if says(question, "will", f"in {years} years", "finds"):
        return older + years
    assert says(question, "ago", "eats")
    return older - years


def solve_percentage(question: str) -> int:
    price, percent, *_ = numbers(question)
    share = Fraction(price * percent, 100)
    rises = says(question, "rises", "raised", "gains", "plus")
    assert rises or says(question, "falls", "cut", "loses", "less")
    result = price + share if rises else price - share
    assert result.denominator == 1
    return int(result)


def solve_average(question: str) -> int:
    count, mean, known = numbers(question)
    if says(question, "points came"):
        known, count, mean = count, mean, known
    (missing,) = [n for n in range(1000) if Fraction(known + n, count) == mean]
    return missing


def solve_rectangle(question: str) -> int:
    given = re.search(r"(perimeter|area) (?:is )?(\d+)", question)
    assert given
    size = int(given[2])
    (width,) = numbers(question.replace(given[0], ""))
    if given[1] == "perimeter":
        (area,) = [
            width * height for height in range(1000) if width + height + width + height == size
        ]
        return area
    (around,) = [
        width + height + width + height for height in range(1000) if width * height == size
    ]
    return around


SOLVERS: dict[str, Callable[[str], int]] = {
    name.removeprefix("solve_"): solver
    for name, solver in list(globals().items())
    if name.startswith("solve_")
}


def test_every_family_has_a_brute_force_solver() -> None:
    assert set(SOLVERS) == set(FAMILIES)
    assert len(FAMILIES) >= 12


@EVERY_FAMILY
def test_brute_force_solver_confirms_the_answer(family: str) -> None:
    for difficulty in DIFFICULTIES:
        for split in SPLITS:
            for problem in some(family, difficulty, split):
                assert SOLVERS[family](problem.question) == problem.answer, problem
                assert 0 <= problem.answer <= 999


def boxed(solution: str) -> int:
    *_, last = solution.split("\n")
    match = re.fullmatch(r"\\boxed\{(\d{1,3})\}", last)
    assert match, solution
    return int(match[1])


@EVERY_FAMILY
def test_only_the_worked_solution_boxes_the_answer(family: str) -> None:
    for difficulty in DIFFICULTIES:
        for problem in some(family, difficulty):
            assert boxed(problem.solution) == problem.answer
            assert problem.wrong_solutions, problem
            assert all(boxed(wrong) != problem.answer for wrong in problem.wrong_solutions)
            assert len(set(problem.wrong_solutions)) == len(problem.wrong_solutions)


def holds(step: str) -> bool:
    """Whether `12*3=36` or `83=7*11+6` is true."""
    left, right = step.split("=")

    def value(side: str) -> Fraction:
        # Steps contain only sums of products, or a single minus or slash between two numbers.
        if match := re.fullmatch(r"(\d+)([-/])(\d+)", side):
            a, b = Fraction(match[1]), Fraction(match[3])
            return a - b if match[2] == "-" else a / b
        total = Fraction(0)
        for term in side.split("+"):
            product = Fraction(1)
            for factor in term.split("*"):
                product *= int(factor)
            total += product
        return total

    return value(left) == value(right)


@EVERY_FAMILY
def test_every_step_of_every_method_is_true(family: str) -> None:
    for difficulty in DIFFICULTIES:
        for problem in some(family, difficulty):
            for solution in (problem.solution, *problem.wrong_solutions):
                for step in solution.split("\n")[:-1]:
                    if family == "units_digit" and "=" not in step:  # the cycle of last digits
                        assert re.fullmatch(r"\d \d \d \d", step)
                    else:
                        assert holds(step), (problem, step)


def test_step_checker_detects_false_steps() -> None:
    assert holds("83=7*11+6") and holds("12-5=7")
    assert not holds("83=7*11+5") and not holds("12-5=8") and not holds("3+4=8")


# All families share the code of the shuffles; small families can be enumerated.
SMALL_FAMILIES = [family for family in FAMILIES if num_problems(family, "easy", "train") < 2000]


@pytest.mark.parametrize("family", SMALL_FAMILIES)
def test_splits_are_disjoint_and_complete_under_any_seed(family: str) -> None:
    train, heldout = (num_problems(family, "easy", split) for split in SPLITS)
    codes = [problem_code(family, "easy", "train", 0, i) for i in range(train)]
    unseen = [problem_code(family, "easy", "heldout", 1, i) for i in range(heldout)]
    assert sorted(codes + unseen) == list(range(train + heldout))
    assert problem_code(family, "easy", "train", 0, train) == codes[0]


@EVERY_FAMILY
def test_splits_and_difficulties_share_no_question(family: str) -> None:
    # By construction no parameters are shared; here: two problems do not have the same wording.
    questions = [
        p.question
        for difficulty in DIFFICULTIES
        for split in SPLITS
        for p in some(family, difficulty, split)
    ]
    assert len(set(questions)) == len(questions)
    for one, other in combinations(DIFFICULTIES, 2):
        axes, others = FAMILIES[family].axes[one], FAMILIES[family].axes[other]
        assert any(apart(axes[name], others[name]) for name in axes), f"{one} and {other} may meet"


def test_heldout_is_an_eighth() -> None:
    for family in FAMILIES:
        heldout, train = (
            num_problems(family, "easy", "heldout"),
            num_problems(family, "easy", "train"),
        )
        assert heldout == (heldout + train) // 8
        assert heldout >= 40  # enough for each family's share of 640 held-out problems


def test_problem_depends_on_its_index_alone() -> None:
    problems = list(SyntheticProblems(200, seed=3))
    assert SyntheticProblems(1000, seed=3)[137] == problems[137]
    assert problems[137] == make_problem(
        list(FAMILIES)[137 % len(FAMILIES)], "easy", "train", 3, 137 // len(FAMILIES)
    )
    assert problems[:7] == SyntheticProblems(200, seed=3)[:7]
    assert problems[-1] == SyntheticProblems(200, seed=3)[-1]


def test_problem_ids_are_stable() -> None:
    # Journals and checkpoints contain ids: a change here breaks every stored run.
    problem = make_problem("sequence", "easy", "train", 0, 0)
    assert problem.id == "sequence-easy-1586"
    assert problem.question == (
        "An arithmetic sequence starts with 27 and has common difference 6. What is term number 11?"
    )
    assert problem.answer == 87  # 27 + 10*6


def test_seeds_change_the_problems() -> None:
    first, second = ([p.id for p in SyntheticProblems(160, seed=seed)] for seed in (0, 1))
    assert len(set(first) & set(second)) < 40


def test_families_alternate_and_can_be_selected() -> None:
    assert [p.family for p in SyntheticProblems(len(FAMILIES))] == list(FAMILIES)
    chosen = SyntheticProblems(6, families=("gcd", "lcm"), difficulty="hard", split="heldout")
    assert [p.family for p in chosen] == ["gcd", "lcm"] * 3
    assert all(p.id.startswith(f"{p.family}-hard-") for p in chosen)


def test_unknown_family_is_refused_with_known_ones() -> None:
    with pytest.raises(ValueError, match=r"expected problem families .*gcd.*, found 'gdc'"):
        SyntheticProblems(1, families=("gdc",))
    with pytest.raises(IndexError):
        SyntheticProblems(3)[3]


@EVERY_FAMILY
def test_every_family_has_several_wordings(family: str) -> None:
    wordings = {
        re.sub(r"\b(Ann|Ben|Eva|Leo|Mia|Tom)\b", "N", re.sub(r"\d+", "0", p.question))
        for p in some(family, "easy")
    }
    assert len(wordings) >= 4


@EVERY_FAMILY
def test_prompts_and_solutions_are_short(family: str) -> None:
    for difficulty in DIFFICULTIES:
        for problem in some(family, difficulty):
            assert 15 <= len(problem.question) <= 120
            assert len(problem.solution) <= (56 if difficulty == "easy" else 100)


def test_chain_writes_steps_and_detects_unnatural_numbers() -> None:
    # 9-1=8, 8*3=24, 24+5=29
    assert chain(9, "-", 1, "*", 3, "+", 5) == (("9-1=8", "8*3=24", "24+5=29"), 29, True)
    # 83=7*11+6 continues with the remainder 6 or the quotient 11
    assert chain(83, "mod", 7, "+", 1) == (("83=7*11+6", "6+1=7"), 7, True)
    assert chain(83, "quotient", 7, "from", 20) == (("83=7*11+6", "20-11=9"), 9, True)
    assert not chain(3, "-", 4, "+", 9).is_natural
    assert not chain(47, "/", 3).is_natural
    assert chain(48, "/", 3) == (("48/3=16",), 16, True)
