from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np
import pytest

from areal_jax.errors import AllRejected, EngineStopped, InvalidRequest
from areal_jax.evaluation.estimators import wilson_interval
from areal_jax.evaluation.scoring import Evaluation, evaluate, num_tasks_to_fill, summarize
from areal_jax.protocols import Generate, Grader
from areal_jax.records import (
    NO_VERSION,
    Completion,
    Message,
    Request,
    RewardResult,
    Sample,
    Sampling,
    StopReason,
    Task,
)


def task(number: int, family: str = "sums") -> Task:
    return Task(f"task-{number}", (Message("user", str(number)),), "1", family=family)


def sample(
    correct: bool, num_tokens: int = 2, stop: StopReason = "stop", version: int = 3
) -> Sample:
    """One token of prompt, then num_tokens sampled by a version."""
    mask = np.arange(1 + num_tokens) > 0
    versions = np.where(mask, version, NO_VERSION).astype(np.int32)
    logp = np.zeros(1 + num_tokens, np.float32)
    grade = "correct" if correct else "wrong"
    return Sample(
        np.arange(1 + num_tokens, dtype=np.int32), mask, logp, versions, float(correct), grade, stop
    )


class Oracle:
    """Answers immediately: the token of sample i depends on the request's seed; every request is
    kept."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.running = self.most_running = 0

    async def submit(self, request: Request) -> list[Completion]:
        if int(request.prompt_tokens[0]) == 99:
            raise InvalidRequest("prompt of 99")
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        tokens = [
            np.array([(request.seed + i) % 2, 7], np.int32) for i in range(request.num_samples)
        ]
        versions = np.array([request.min_version, request.min_version + 1], np.int32)
        return [
            Completion(sampled, np.zeros(2, np.float32), versions, "stop") for sampled in tokens
        ]

    async def snapshot(self) -> dict[str, tuple[Completion, ...]]:
        return {}


async def workflow(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
    samples = []
    for completion in await generate(np.array([int(task.prompt[0].content)], np.int32), 2):
        grade = await grader(task, str(completion.tokens[0]))
        mask = np.ones(2, np.bool_)
        samples.append(
            Sample(
                completion.tokens,
                mask,
                completion.logp,
                completion.versions,
                0.0,
                grade.kind,
                "stop",
            )
        )
    return tuple(samples)


async def grader(task: Task, answer: str) -> RewardResult:
    return RewardResult("correct" if answer == task.answer else "wrong")


def run(
    tasks: list[Task],
    engine: Oracle,
    version: int = 4,
    seed: int = 5,
    max_running: int = 8,
    workflow: Callable[..., object] = workflow,
) -> Evaluation:
    sampling = Sampling(max_new_tokens=2)
    return asyncio.run(
        evaluate(
            tasks,
            workflow,  # type: ignore[arg-type]
            engine,
            grader,
            version=version,
            sampling=sampling,
            seed=seed,
            max_running=max_running,
        )
    )


def test_scores_equal_hand_computed_numbers() -> None:
    sampled = [
        (task(0, "gcd"), [sample(True), sample(True)]),
        (task(1, "gcd"), [sample(True, 4, "length"), sample(False, version=5)]),
        (task(2, "lcm"), [sample(False), sample(False, 6)]),
        (task(3, "lcm"), [sample(False), sample(True, version=2)]),
    ]
    evaluation = summarize(3, sampled, [], 2.5)
    # Scores by task: 1, 1/2, 0, 1/2; their mean is 1/2, deviations squared sum to 1/2, over 4 * 3.
    assert evaluation.pass_at_1 == 0.5
    assert evaluation.standard_error == pytest.approx(math.sqrt(0.5 / 12))
    assert evaluation.by_family == {"gcd": 0.75, "lcm": 0.25}
    assert (evaluation.num_tasks, evaluation.num_samples) == (4, 8)
    assert evaluation.truncated == 1 / 8
    # 6 of two tokens, one of four, one of six.
    assert evaluation.mean_tokens == (6 * 2 + 4 + 6) / 8
    assert evaluation.grades == {"correct": 4, "wrong": 4}
    assert evaluation.versions == (2, 5)
    assert asdict(evaluation) == {
        **{
            name: getattr(evaluation, name)
            for name in ("version", "pass_at_1", "standard_error", "num_tasks", "num_samples")
        },
        "by_family": {"gcd": 0.75, "lcm": 0.25},
        "interval_95": evaluation.interval_95,
        "truncated": 0.125,
        "mean_tokens": 2.75,
        "grades": {"correct": 4, "wrong": 4},
        "failed": {},
        "versions": (2, 5),
        "seconds": 2.5,
        "mean_reward": 0.5,
    }


def test_raw_rewards_have_a_mean_and_no_pass_at_1() -> None:
    def scored(reward: float) -> Sample:
        return replace(sample(False), reward=reward, grade="scored")

    found = summarize(
        3,
        [(task(0, "a"), [scored(-2.0), scored(4.0)]), (task(1, "b"), [scored(7.0), scored(7.0)])],
        [(task(2, "a"), KeyError())],
        1.0,
    )
    # Means by task: 1 and 7; their mean is 4, deviations squared sum to 18, over 2 * 1.
    assert math.isnan(found.pass_at_1) and (found.mean_reward, found.standard_error) == (4.0, 3.0)
    assert (found.by_family, found.interval_95) == ({"a": 1.0, "b": 7.0}, (-2.0, 10.0))
    # A failed task has no reward: it is listed, and in no mean.
    assert (found.num_tasks, found.failed) == (3, {"KeyError": 1})


def test_standard_error_counts_tasks_not_samples() -> None:
    # Eight answers to one task are one sample of a task: repeating each answer eight times adds
    # nothing.
    few = summarize(0, [(task(i), [sample(i < 3)]) for i in range(8)], [], 0.0)
    many = summarize(0, [(task(i), [sample(i < 3)] * 8) for i in range(8)], [], 0.0)
    assert few.standard_error == many.standard_error == pytest.approx(math.sqrt(3 / 8 * 5 / 8 / 7))
    assert few.interval_95 == many.interval_95


def test_requests_have_unique_ids_and_wait_for_the_version() -> None:
    engine = Oracle()
    evaluation = run([task(i) for i in range(20)], engine, version=4, max_running=3)
    ids = [request.id for request in engine.requests]
    assert len(set(ids)) == 20
    # By version, task, prompt and number of earlier calls with it.
    assert sorted({re.sub(r"[.][0-9a-f]{12}[.]0$", "", each) for each in ids}) == sorted(
        f"eval-4-{i}" for i in range(20)
    )
    assert {request.min_version for request in engine.requests} == {4}
    # Training continued: the oracle's second token is of the next version.
    assert evaluation.versions == (4, 5)
    assert engine.most_running == 3
    assert evaluation.num_samples == 40
    # Of the two samples of each task exactly one samples token 1.
    assert evaluation.pass_at_1 == 0.5
    assert evaluation.standard_error == 0.0


def test_samples_depend_on_seed_not_on_version_or_order() -> None:
    def seeds(version: int, seed: int, max_running: int) -> dict[int, int]:
        engine = Oracle()
        run([task(i) for i in range(20)], engine, version, seed, max_running)
        return {int(request.prompt_tokens[0]): request.seed for request in engine.requests}

    assert seeds(4, 5, 1) == seeds(9, 5, 20)
    assert seeds(4, 5, 1) != seeds(4, 6, 1)
    assert len(set(seeds(4, 5, 1).values())) == 20


def test_call_may_have_its_own_token_budget() -> None:
    async def short(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        await generate(np.array([1], np.int32), 1, max_new_tokens=1)
        return await workflow(task, generate, grader)

    engine = Oracle()
    run([task(0)], engine, workflow=short)
    assert [request.sampling.max_new_tokens for request in engine.requests] == [1, 2]


def test_failed_task_counts_as_wrong(caplog: pytest.LogCaptureFixture) -> None:
    evaluation = run([task(0), task(99, "long"), task(1), task(99)], Oracle())
    # Of the two samples of each answered task one is right: (1/2 + 0 + 1/2 + 0) / 4, squared
    # deviations 4 / 16, over 4 * 3.
    assert (evaluation.num_tasks, evaluation.num_samples, evaluation.failed) == (
        4,
        4,
        {"InvalidRequest": 2},
    )
    assert (evaluation.pass_at_1, evaluation.standard_error) == (
        0.25,
        pytest.approx(math.sqrt(0.25 / 12)),
    )
    assert evaluation.by_family == {"long": 0.0, "sums": pytest.approx(1 / 3)}
    assert evaluation.interval_95 == wilson_interval(0.25, evaluation.standard_error, 4)
    assert "task task-99: prompt of 99" in caplog.text


def test_task_without_samples_counts_as_wrong() -> None:
    async def silent(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        return () if task.id == "task-1" else await workflow(task, generate, grader)

    evaluation = run([task(0), task(1)], Oracle(), workflow=silent)
    assert (evaluation.num_tasks, evaluation.pass_at_1, evaluation.failed) == (
        2,
        0.25,
        {"ValueError": 1},
    )


def test_evaluation_fails_if_all_tasks_fail() -> None:
    with pytest.raises(AllRejected, match="all 2 tasks failed, the last: prompt of 99"):
        run([task(99), task(99)], Oracle())
    with pytest.raises(ValueError, match="found none"):
        run([], Oracle())


def test_stopped_engine_ends_the_evaluation() -> None:
    async def stopped(task: Task, generate: Generate, grader: Grader) -> tuple[Sample, ...]:
        if task.id == "task-1":
            async with asyncio.TaskGroup() as group:
                group.create_task(raises())
        await asyncio.sleep(1000)
        return ()

    async def raises() -> None:
        raise EngineStopped("device lost")

    with pytest.raises(EngineStopped, match="device lost"):
        run([task(i) for i in range(4)], Oracle(), workflow=stopped)


@pytest.mark.parametrize(
    ("num_slots", "samples_per_task", "tasks"),
    # A quarter more than there are slots; a task alone fills them where it has more samples than
    # they are.
    [(256, 1, 320), (256, 4, 80), (8, 8, 2), (4, 64, 1)],
)
def test_concurrent_tasks_fill_the_slots(num_slots: int, samples_per_task: int, tasks: int) -> None:
    assert num_tasks_to_fill(num_slots, samples_per_task) == tasks
