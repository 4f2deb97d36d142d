"""Evaluation with the engine and the workflow that train, while training goes on. Nothing is
trained on it, so no gate."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from statistics import fmean
from typing import TypeVar

import numpy as np
from jaxtyping import Int32

from areal_jax.errors import AllRejected, EngineStopped, first_error
from areal_jax.evaluation.estimators import standard_error, wilson_interval
from areal_jax.protocols import Engine, Grader, Workflow
from areal_jax.records import (
    CallIds,
    Completion,
    OnProgress,
    Request,
    Sample,
    Sampling,
    Task,
    derive_seed,
)

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Sized)

WAITING = 0.25
"""Share of the slots for which answers wait: a task that has some of its answers, or has them
graded, leaves slots empty."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one version is worth."""

    version: int
    """Asked for; where newer weights may come, tokens may be of later versions."""
    pass_at_1: float
    """Share of correct answers: the mean over all tasks of the mean over a task's samples; 0 for a
    task that failed. nan where rewards are raw."""
    standard_error: float
    """Of pass_at_1, or of mean_reward where there is none, from the spread between tasks: a task's
    samples are not independent."""
    interval_95: tuple[float, float]
    """Wilson's interval, which is honest at 0 and 1 too; two standard errors where rewards are
    raw."""
    mean_reward: float
    """The mean over the tasks that did not fail of the mean over a task's samples."""
    num_tasks: int
    """All that were asked, those that failed among them."""
    num_samples: int
    by_family: Mapping[str, float]
    """pass_at_1, or mean_reward where there is none, of each family of tasks."""
    truncated: float
    """Share of answers that were cut at the token budget."""
    mean_tokens: float
    """Of an answer, what the policy drew only."""
    grades: Mapping[str, int]
    failed: Mapping[str, int]
    """Tasks without samples, by the class of the error. They count as wrong, and have no share in
    figures of samples."""
    versions: tuple[int, int]
    """Oldest and newest version that drew a token."""
    seconds: float


def num_tasks_to_fill(num_slots: int, samples_per_task: int) -> int:
    """How many tasks at a time keep so many slots of engines busy, and leave them to training
    between."""
    return math.ceil((1 + WAITING) * num_slots / samples_per_task)


async def evaluate(
    tasks: Sequence[Task],
    workflow: Workflow,
    engine: Engine,
    grader: Grader,
    *,
    version: int,
    sampling: Sampling,
    seed: int,
    max_running: int,
) -> Evaluation:
    """Answer every task with weights of at least `version`, so many at a time, and grader.

    The same seed draws the same numbers for the same place in `tasks`, whatever the version, so
    that two evaluations differ by the policy alone. A task that fails is logged and counts as
    wrong.

    Raises AllRejected, with the last error, where every task fails; EngineStopped at once when no
    more answers can come."""
    if not tasks:
        raise ValueError("expected tasks to evaluate on, came none")
    clock = asyncio.get_running_loop().time
    began_s = clock()
    found = dict[int, tuple[Sample, ...]]()
    failures = await answer_all(
        enumerate(tasks),
        lambda place, task: workflow(
            task, EvaluationCalls(engine, version, sampling, seed, place), grader
        ),
        lambda place, task, samples: found.update({place: samples}),
        name=f"evaluation of version {version}",
        max_running=max_running,
    )
    if not found:
        last = list(failures.values())[-1]
        raise AllRejected(
            f"evaluation of version {version}: all {len(tasks)} tasks failed, the last: {last}"
        ) from last
    sampled = [(tasks[place], found[place]) for place in sorted(found)]
    failed = [(tasks[place], failures[place]) for place in sorted(failures)]
    return summarize(version, sampled, failed, clock() - began_s)


async def answer_all(
    tasks: Iterable[tuple[int, Task]],
    answer: Callable[[int, Task], Awaitable[T]],
    reported: Callable[[int, Task, T], None],
    *,
    name: str,
    max_running: int,
) -> dict[int, Exception]:
    """Have every task answered, so many at a time, each with its place, and `reported` as soon as
    it is; what others failed with, by place.

    A failure is logged under `name`; an answer without samples is one. EngineStopped ends all at
    once, and so does what `reported` raises."""
    # Bounds what is asked of the engine at a time; each answer has the engine's and the grader's
    # deadline.
    places = asyncio.Semaphore(max_running)
    failures = dict[int, Exception]()
    traced = set[type[Exception]]()

    async def one(place: int, task: Task) -> None:
        async with places:
            try:
                if not (found := await answer(place, task)):
                    raise ValueError("the workflow returned no samples")
            except Exception as error:
                cause = first_error(error)
                if isinstance(cause, EngineStopped):
                    raise cause from None
                # One trace of a kind is enough to find the fault.
                trace = None if type(cause) in traced else cause
                traced.add(type(cause))
                logger.warning("%s, task %s: %s", name, task.id, cause, exc_info=trace)
                failures[place] = cause
                return
        reported(place, task, found)

    try:
        async with asyncio.TaskGroup() as answering:
            for place, task in tasks:
                answering.create_task(one(place, task))
    except ExceptionGroup as errors:
        raise first_error(errors) from None
    return failures


@dataclass(slots=True)
class EvaluationCalls:
    """The `generate` of one task. Its requests are told apart from training's by their ids."""

    engine: Engine
    version: int
    sampling: Sampling
    seed: int
    place: int
    _call_ids: CallIds = field(init=False)

    def __post_init__(self) -> None:
        self._call_ids = CallIds(self.place)

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        call = self._call_ids.next(prompt_tokens, num_samples, max_new_tokens)
        request = Request(
            id=f"eval-{self.version}-{call}",
            prompt_tokens=prompt_tokens,
            num_samples=num_samples,
            sampling=self.sampling.with_max_new_tokens(max_new_tokens),
            seed=derive_seed(self.seed, f"eval-{call}"),
            min_version=self.version,
            on_progress=on_progress,
        )
        return await self.engine.submit(request)


def summarize(
    version: int,
    sampled: Sequence[tuple[Task, Sequence[Sample]]],
    failed: Sequence[tuple[Task, Exception]],
    seconds: float,
) -> Evaluation:
    """The figures of an evaluation.

    Args:
        sampled: the samples of every task that has some; at least one.
        failed: the other tasks, each with its error. They count as wrong."""
    is_raw = any(sample.grade == "scored" for _, samples in sampled for sample in samples)
    rewards = [fmean([sample.reward for sample in samples]) for _, samples in sampled]
    if is_raw:  # a failed task has no reward, and no number would be an honest one
        scored, scores = [task for task, _ in sampled], rewards
    else:
        scored = [task for task, _ in (*sampled, *failed)]
        scores = [
            fmean([sample.grade == "correct" for sample in samples]) for _, samples in sampled
        ] + [0.0] * len(failed)
    by_family = defaultdict[str, list[float]](list)
    for task, score in zip(scored, scores, strict=True):
        by_family[task.family].append(score)
    samples = [sample for _, of_task in sampled for sample in of_task]
    versions = np.concatenate([sample.versions[sample.loss_mask] for sample in samples])
    mean, error = fmean(scores), standard_error(scores)
    return Evaluation(
        version=version,
        pass_at_1=math.nan if is_raw else mean,
        standard_error=error,
        interval_95=(mean - 2 * error, mean + 2 * error)
        if is_raw
        else wilson_interval(mean, error, len(scores)),
        mean_reward=fmean(rewards),
        num_tasks=len(sampled) + len(failed),
        num_samples=len(samples),
        by_family={family: fmean(of_family) for family, of_family in sorted(by_family.items())},
        truncated=fmean([sample.stop_reason == "length" for sample in samples]),
        mean_tokens=fmean([int(sample.loss_mask.sum()) for sample in samples]),
        grades=dict(sorted(Counter(sample.grade for sample in samples).items())),
        failed=dict(sorted(Counter(type(error).__name__ for _, error in failed).items())),
        versions=(int(versions.min()), int(versions.max())),
        seconds=seconds,
    )
