"""All figures of a finished evaluation, from the graded answers to each task."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from areal_jax.evaluation.answers import Answer
from areal_jax.evaluation.figures import (
    Interval,
    majority_at_k,
    pass_at_k,
    powers_of_two,
    standard_error,
    wilson_interval,
)
from areal_jax.records import Task

PERCENTILES = (5, 25, 50, 75, 95, 100)
NUM_BINS = 24


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks of numbers from 0 to 1."""

    value: float
    interval_95: Interval
    """Wilson's."""


@dataclass(frozen=True, slots=True)
class Family:
    """What is known of one family of tasks."""

    num_tasks: int
    pass_at_1: Estimate
    truncated: float
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens that the policy drew for an answer."""

    mean: float
    percentiles: Mapping[int, float]
    edges: Sequence[float]
    """Of the histogram's bins, one more than there are counts."""
    counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class Problem:
    """How one task went. A failed one has no samples."""

    place: int
    task: str
    family: str
    expected: str
    """The reference; empty where it is a set of tests."""
    num_samples: int
    num_correct: int
    majority: str
    """The answer that most samples gave, in the form by which votes are counted; empty where none
    gave any."""
    num_truncated: int
    mean_tokens: float
    failed: str
    """Why there are no samples; empty where there are."""


@dataclass(frozen=True, slots=True)
class Results:
    """The figures of an evaluation. A failed task counts as wrong, and has no share in figures of
    samples and lengths."""

    num_tasks: int
    num_samples: int
    samples_per_task: int
    """Of the task that has fewest: how far k goes."""
    pass_at: Mapping[int, Estimate]
    """By k."""
    pass_at_1_standard_error: float
    majority_at: Mapping[int, Estimate] | None
    """By k; None where answers are programs, or right answers were found that cannot be counted as
    votes."""
    truncated: float
    """Share of answers that were cut at the token budget."""
    tokens: Lengths
    grades: Mapping[str, int]
    failed: Mapping[str, int]
    """Tasks without samples, by the class of the error."""
    families: Mapping[str, Family]
    problems: Sequence[Problem]


def results_of(
    tasks: Sequence[Task],
    answers: Mapping[int, Sequence[Answer]],
    failures: Mapping[int, Exception],
) -> Results:
    """The figures. The same answers give the same ones, whatever the order in which they came.

    Args: tasks: all that were asked. answers: by place in `tasks`, of at least one. failures: why
        others have none."""
    by_task = [answers.get(place, ()) for place in range(len(tasks))]
    every = [answer for of_task in by_task for answer in of_task]
    lengths = np.array([answer.num_tokens for answer in every])
    counts, edges = np.histogram(
        lengths, bins=min(NUM_BINS, int(lengths.max()) + 1), range=(0, int(lengths.max()) + 1)
    )
    most = min(len(of_task) for of_task in by_task if of_task)
    ks = powers_of_two(most)
    votes = _can_vote(tasks, every)
    families = defaultdict[str, list[Sequence[Answer]]](list)
    for task, of_task in zip(tasks, by_task, strict=True):
        families[task.family].append(of_task)
    return Results(
        num_tasks=len(tasks),
        num_samples=len(every),
        samples_per_task=most,
        pass_at={k: _estimate([_pass_at(of_task, k) for of_task in by_task]) for k in ks},
        pass_at_1_standard_error=standard_error([_pass_at(of_task, 1) for of_task in by_task]),
        majority_at={k: _estimate([_majority_at(of_task, k) for of_task in by_task]) for k in ks}
        if votes
        else None,
        truncated=_truncated(every),
        tokens=Lengths(
            float(lengths.mean()),
            dict(zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)),
            edges.tolist(),
            counts.tolist(),
        ),
        grades=dict(sorted(Counter(answer.grade for answer in every).items())),
        failed=dict(sorted(Counter(type(error).__name__ for error in failures.values()).items())),
        families={name: _family(families[name]) for name in sorted(families)},
        problems=[
            _problem(place, task, by_task[place], failures.get(place))
            for place, task in enumerate(tasks)
        ],
    )


def _num_correct(answers: Sequence[Answer]) -> int:
    return sum(answer.grade == "correct" for answer in answers)


def _truncated(answers: Sequence[Answer]) -> float:
    return fmean([answer.stop_reason == "length" for answer in answers]) if answers else 0.0


def _can_vote(tasks: Sequence[Task], answers: Sequence[Answer]) -> bool:
    return all(task.kind == "math" for task in tasks) and all(
        answer.vote is not None for answer in answers if answer.grade == "correct"
    )


def _estimate(scores: Sequence[float]) -> Estimate:
    mean = fmean(scores)
    return Estimate(mean, wilson_interval(mean, standard_error(scores), len(scores)))


def _pass_at(answers: Sequence[Answer], k: int) -> float:
    return pass_at_k(len(answers), _num_correct(answers), k) if answers else 0.0


def _majority_at(answers: Sequence[Answer], k: int) -> float:
    if not answers:
        return 0.0
    # What the grader calls correct is equal to the reference, however it is written: one answer.
    wrong = Counter(
        answer.vote for answer in answers if answer.vote is not None and answer.grade != "correct"
    )
    return majority_at_k(len(answers), _num_correct(answers), sorted(wrong.values()), k)


def _family(by_task: Sequence[Sequence[Answer]]) -> Family:
    every = [answer for answers in by_task for answer in answers]
    mean_tokens = fmean([answer.num_tokens for answer in every]) if every else 0.0
    pass_at_1 = _estimate([_pass_at(answers, 1) for answers in by_task])
    return Family(len(by_task), pass_at_1, _truncated(every), mean_tokens)


def _problem(
    place: int, task: Task, answers: Sequence[Answer], failure: Exception | None
) -> Problem:
    votes = Counter(answer.vote for answer in answers if answer.vote is not None)
    return Problem(
        place=place,
        task=task.id,
        family=task.family,
        expected=task.answer if task.kind == "math" else "",
        num_samples=len(answers),
        num_correct=_num_correct(answers),
        majority=min(votes, key=lambda vote: (-votes[vote], vote)) if votes else "",
        num_truncated=sum(answer.stop_reason == "length" for answer in answers),
        mean_tokens=fmean([answer.num_tokens for answer in answers]) if answers else 0.0,
        failed="" if failure is None else f"{type(failure).__name__}: {failure}",
    )
