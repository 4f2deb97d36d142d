"""Evaluation during training, with the engine and the workflow of training, and without a gate."""

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
"""Additional tasks, as a share of the slots: tasks with finished or ungraded answers leave slots
idle."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one version."""

    version: int
    """Requested version; without pinning, later versions may sample tokens too."""
    pass_at_1: float
    """Mean over tasks of the share of correct samples; 0 for failed tasks. nan with raw rewards."""
    standard_error: float
    """Standard error of pass_at_1 (raw rewards: of mean_reward) over tasks, as a task's samples are
    not independent."""
    interval_95: tuple[float, float]
    """Wilson's interval (raw rewards: two standard errors)."""
    mean_reward: float
    """Mean over tasks that did not fail of the mean over a task's samples."""
    num_tasks: int
    """Number of tasks, including failed ones."""
    num_samples: int
    by_family: Mapping[str, float]
    """pass_at_1 (raw rewards: mean_reward) of each family of tasks."""
    truncated: float
    """Share of truncated answers."""
    mean_tokens: float
    """Sampled tokens per answer."""
    grades: Mapping[str, int]
    failed: Mapping[str, int]
    """Tasks without samples, by class of their error. They count as wrong in pass_at_1 only."""
    versions: tuple[int, int]
    """Oldest and newest version that sampled a token."""
    seconds: float


def num_tasks_to_fill(num_slots: int, samples_per_task: int) -> int:
    """Return the number of concurrent tasks that keep the engines' slots busy."""
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
    """Evaluate a version on tasks.

    Sampling keys depend on seed and index of a task only, so that two evaluations differ by the
    policy only. A failed task is logged and counts as wrong.

    Args:
        tasks: the tasks.
        workflow: turns one task into samples.
        engine: generates completions.
        grader: grades answers.
        version: minimum version of the weights.
        sampling: sampling parameters.
        seed: seed of all sampling.
        max_running: maximum number of concurrent tasks.

    Raises:
        AllRejected: every task failed; the last error is its cause.
        EngineStopped: the engine answers no more requests.
        ValueError: there are no tasks.
    """
    if not tasks:
        raise ValueError("expected tasks to evaluate on, found none")
    clock = asyncio.get_running_loop().time
    start_s = clock()
    found = dict[int, tuple[Sample, ...]]()
    failures = await answer_all(
        enumerate(tasks),
        lambda place, task: workflow(
            task, EvaluationCalls(engine, version, sampling, seed, place, task.images), grader
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
    return summarize(version, sampled, failed, clock() - start_s)


async def answer_all(
    tasks: Iterable[tuple[int, Task]],
    answer: Callable[[int, Task], Awaitable[T]],
    on_answer: Callable[[int, Task, T], None],
    *,
    name: str,
    max_running: int,
) -> dict[int, Exception]:
    """Answer tasks concurrently.

    Failures, including answers without samples, are logged. EngineStopped and errors of `on_answer`
    end all tasks.

    Args:
        tasks: tasks with their indices.
        answer: answers one task.
        on_answer: called with each answer.
        name: name of the evaluation in the log.
        max_running: maximum number of concurrent tasks.

    Returns:
        The errors of failed tasks by index.
    """
    # Bounds concurrent tasks; each has the deadlines of engine and grader.
    slots = asyncio.Semaphore(max_running)
    failures = dict[int, Exception]()
    traced = set[type[Exception]]()

    async def one(place: int, task: Task) -> None:
        async with slots:
            try:
                if not (found := await answer(place, task)):
                    raise ValueError("the workflow returned no samples")
            except Exception as error:  # a workflow runs untrusted code: its error fails the task
                cause = first_error(error)
                if isinstance(cause, EngineStopped):
                    raise cause from None
                # One traceback per class of errors is enough to find the fault.
                trace = None if type(cause) in traced else cause
                traced.add(type(cause))
                logger.warning("%s, task %s: %s", name, task.id, cause, exc_info=trace)
                failures[place] = cause
                return
        on_answer(place, task, found)

    try:
        async with asyncio.TaskGroup() as answering:
            for place, task in tasks:
                answering.create_task(one(place, task))
    except ExceptionGroup as errors:
        raise first_error(errors) from None
    return failures


@dataclass(slots=True)
class EvaluationCalls:
    """The `generate` of one task; its request ids differ from those of training."""

    engine: Engine
    version: int
    sampling: Sampling
    seed: int
    place: int
    images: tuple[bytes, ...] = ()
    """Images of the task."""
    _call_ids: CallIds = field(init=False)

    def __post_init__(self) -> None:
        self._call_ids = CallIds(self.place)

    async def __call__(
        self,
        prompt_tokens: Int32[np.ndarray, "P"],
        num_samples: int,
        *,
        max_new_tokens: int | None = None,
        grammar: str = "",
        on_progress: OnProgress | None = None,
    ) -> list[Completion]:
        call = self._call_ids.next(prompt_tokens, num_samples, max_new_tokens, grammar)
        request = Request(
            id=f"eval-{self.version}-{call}",
            prompt_tokens=prompt_tokens,
            num_samples=num_samples,
            sampling=self.sampling.of_call(max_new_tokens, grammar),
            seed=derive_seed(self.seed, f"eval-{call}"),
            min_version=self.version,
            on_progress=on_progress,
            images=self.images,
        )
        return await self.engine.submit(request)


def summarize(
    version: int,
    sampled: Sequence[tuple[Task, Sequence[Sample]]],
    failed: Sequence[tuple[Task, Exception]],
    seconds: float,
) -> Evaluation:
    """Compute the scores of an evaluation.

    Args:
        version: the evaluated version.
        sampled: tasks with samples, at least one.
        failed: the other tasks with their errors; they count as wrong.
        seconds: duration of the evaluation.
    """
    is_raw = any(sample.grade == "scored" for _, samples in sampled for sample in samples)
    rewards = [fmean([sample.reward for sample in samples]) for _, samples in sampled]
    if is_raw:  # a failed task has no reward
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
