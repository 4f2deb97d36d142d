"""Results of a finished evaluation, computed from its graded answers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from areal_jax.evaluation.answers import Answer
from areal_jax.evaluation.estimators import (
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
    """Wilson's interval."""


@dataclass(frozen=True, slots=True)
class FamilyResult:
    """Results of one family of tasks."""

    num_tasks: int
    pass_at_1: Estimate | None
    """None with raw rewards."""
    mean_reward: float | None
    """None without raw rewards, or if all tasks failed."""
    truncated: float
    mean_tokens: float


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Distribution of the sampled tokens per answer."""

    mean: float
    percentiles: Mapping[int, float]
    edges: Sequence[float]
    """Edges of the histogram's bins, one more than counts."""
    counts: Sequence[int]


@dataclass(frozen=True, slots=True)
class ProblemResult:
    """Results of one task. A failed task has no samples."""

    place: int
    task: str
    family: str
    expected: str
    """Reference answer; empty for code tasks."""
    num_samples: int
    num_correct: int
    mean_reward: float | None
    """None for a failed task, or without raw rewards."""
    majority: str
    """Canonical form of the most frequent answer; empty without answers."""
    num_truncated: int
    mean_tokens: float
    failed: str
    """Error of a failed task; empty for others."""


@dataclass(frozen=True, slots=True)
class Results:
    """Results of an evaluation. A failed task counts as wrong in pass@k and maj@k only."""

    num_tasks: int
    num_samples: int
    samples_per_task: int
    """Smallest number of samples of a task, which bounds k."""
    pass_at: Mapping[int, Estimate]
    """pass@k by k; empty with raw rewards."""
    pass_at_1_standard_error: float | None
    mean_reward: float | None
    """Mean over tasks of the mean over a task's samples; None without raw rewards."""
    mean_reward_standard_error: float | None
    majority_at: Mapping[int, Estimate] | None
    """maj@k by k; None for code tasks, or if correct answers have no canonical form."""
    truncated: float
    """Share of truncated answers."""
    tokens: LengthSummary
    grades: Mapping[str, int]
    failed: Mapping[str, int]
    """Tasks without samples, by class of their error."""
    families: Mapping[str, FamilyResult]
    problems: Sequence[ProblemResult]

    @property
    def treatment(self) -> str:
        """How failed tasks count."""
        return "counted as wrong" if self.mean_reward is None else "left out of the mean"


def compute_results(
    tasks: Sequence[Task],
    answers: Mapping[int, Sequence[Answer]],
    failures: Mapping[int, Exception],
    *,
    is_raw: bool = False,
) -> Results:
    """Compute the results. They do not depend on the order of the answers.

    Args:
        tasks: all tasks.
        answers: answers by index in `tasks`, of at least one task.
        failures: errors of the other tasks.
        is_raw: whether rewards are raw, so that no answer is correct or wrong.
    """
    by_task = [answers.get(place, ()) for place in range(len(tasks))]
    every = [answer for of_task in by_task for answer in of_task]
    lengths = np.array([answer.num_tokens for answer in every])
    counts, edges = np.histogram(
        lengths, bins=min(NUM_BINS, int(lengths.max()) + 1), range=(0, int(lengths.max()) + 1)
    )
    most = min(len(of_task) for of_task in by_task if of_task)
    ks = [] if is_raw else powers_of_two(most)
    votes = not is_raw and _can_vote(tasks, every)
    rewards = [
        reward for of_task in by_task if (reward := _mean_reward(of_task, is_raw)) is not None
    ]
    families = defaultdict[str, list[Sequence[Answer]]](list)
    for task, of_task in zip(tasks, by_task, strict=True):
        families[task.family].append(of_task)
    return Results(
        num_tasks=len(tasks),
        num_samples=len(every),
        samples_per_task=most,
        pass_at={k: _estimate([_pass_at(of_task, k) for of_task in by_task]) for k in ks},
        pass_at_1_standard_error=None
        if is_raw
        else standard_error([_pass_at(of_task, 1) for of_task in by_task]),
        mean_reward=fmean(rewards) if is_raw else None,
        mean_reward_standard_error=standard_error(rewards) if is_raw else None,
        majority_at={k: _estimate([_majority_at(of_task, k) for of_task in by_task]) for k in ks}
        if votes
        else None,
        truncated=_truncated(every),
        tokens=LengthSummary(
            float(lengths.mean()),
            dict(zip(PERCENTILES, np.percentile(lengths, PERCENTILES).tolist(), strict=True)),
            edges.tolist(),
            counts.tolist(),
        ),
        grades=dict(sorted(Counter(answer.grade for answer in every).items())),
        failed=dict(sorted(Counter(type(error).__name__ for error in failures.values()).items())),
        families={name: _family(families[name], is_raw) for name in sorted(families)},
        problems=[
            _problem(place, task, by_task[place], failures.get(place), is_raw)
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
    # Correct answers are equal to the reference in any notation: they are one answer.
    wrong = Counter(
        answer.vote for answer in answers if answer.vote is not None and answer.grade != "correct"
    )
    return majority_at_k(len(answers), _num_correct(answers), sorted(wrong.values()), k)


def _mean_reward(answers: Sequence[Answer], is_raw: bool) -> float | None:
    rewards = [answer.reward for answer in answers if is_raw and answer.reward is not None]
    return fmean(rewards) if rewards else None


def _family(by_task: Sequence[Sequence[Answer]], is_raw: bool) -> FamilyResult:
    every = [answer for answers in by_task for answer in answers]
    mean_tokens = fmean([answer.num_tokens for answer in every]) if every else 0.0
    pass_at_1 = None if is_raw else _estimate([_pass_at(answers, 1) for answers in by_task])
    rewards = [
        reward for answers in by_task if (reward := _mean_reward(answers, is_raw)) is not None
    ]
    reward = fmean(rewards) if rewards else None
    return FamilyResult(len(by_task), pass_at_1, reward, _truncated(every), mean_tokens)


def _problem(
    place: int, task: Task, answers: Sequence[Answer], failure: Exception | None, is_raw: bool
) -> ProblemResult:
    votes = Counter(answer.vote for answer in answers if answer.vote is not None)
    return ProblemResult(
        place=place,
        task=task.id,
        family=task.family,
        expected=task.answer if task.kind == "math" else "",
        num_samples=len(answers),
        num_correct=_num_correct(answers),
        mean_reward=_mean_reward(answers, is_raw),
        majority=min(votes, key=lambda vote: (-votes[vote], vote)) if votes else "",
        num_truncated=sum(answer.stop_reason == "length" for answer in answers),
        mean_tokens=fmean([answer.num_tokens for answer in answers]) if answers else 0.0,
        failed="" if failure is None else f"{type(failure).__name__}: {failure}",
    )
