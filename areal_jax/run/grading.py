"""Grading of a run: the reward service, a trial of it before training, and its spans in the
trace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from areal_jax.cluster.config import Ray
from areal_jax.config.experiment import AnyExperiment
from areal_jax.errors import ConfigError
from areal_jax.metrics.trace import Trace
from areal_jax.protocols import Grader
from areal_jax.records import ENVIRONMENT, RewardResult, Task, ToolResult
from areal_jax.rewards.forks import CannotStart
from areal_jax.rewards.probe import probe
from areal_jax.rewards.service import RewardService
from areal_jax.run.plan import Plan
from areal_jax.workflows.config import Agent, Environment
from areal_jax.workflows.from_config import find_tools_config

logger = logging.getLogger(__name__)


@runtime_checkable
class CountedGrader(Grader, Protocol):
    """A grader with counters, which also executes tool calls."""

    async def use(self, tool: str, argument: str) -> ToolResult: ...
    def counters(self) -> Mapping[str, float]: ...


class TracedGrader:
    """A grader whose calls are spans of the trace."""

    def __init__(self, grader: CountedGrader, trace: Trace) -> None:
        self.counted, self._trace = grader, trace

    async def __call__(self, task: Task, answer: str) -> RewardResult:
        start_s = time.perf_counter()
        result = await self.counted(task, answer)
        self._trace.span("rewards", result.kind, start_s, time.perf_counter(), {"task": task.id})
        return result

    async def use(self, tool: str, argument: str) -> ToolResult:
        """Execute a tool call."""
        start_s = time.perf_counter()
        result = await self.counted.use(tool, argument)
        self._trace.span("rewards", f"{tool}: {result.kind}", start_s, time.perf_counter())
        return result

    def counters(self) -> Mapping[str, float]:
        """The grader's own counters."""
        return self.counted.counters()


async def try_grading(plan: Plan) -> None:
    """Start the reward workers of a plan, grade a few answers, and end the workers.

    Raises:
        ConfigError: the settings name a reward or a tool that does not work.
    """
    # On a cluster, reward workers run elsewhere, with other files and another system.
    if plan.decodes and not isinstance(plan.experiment.launch, Ray):
        async with reward_service(plan) as service:
            await start_rewards(service, plan.experiment, *task_sets(plan), say=logger.warning)


async def start_rewards(
    service: RewardService,
    experiment: AnyExperiment,
    *tasks: Sequence[Task],
    say: Callable[[str], None],
) -> None:
    """Start reward workers, and grade answers to the first tasks of each source.

    Raises:
        ConfigError: that does not work.
    """
    try:
        await service.start()
    except CannotStart as error:
        raise ConfigError(str(error)) from error
    await probe_rewards(service.grade, experiment, *tasks, say=say)


async def probe_rewards(
    grader: Grader, experiment: AnyExperiment, *tasks: Sequence[Task], say: Callable[[str], None]
) -> None:
    """Grade answers to the first tasks of each source, and warn of suspicious results.

    Raises:
        ConfigError: the reward does not work.
    """
    if isinstance(experiment.workflow, Environment):
        return  # its steps have the rewards
    # An agent may grade itself, so that its tasks need no answer that a verifier can read.
    must_grade = not isinstance(experiment.workflow, Agent)
    for of_source in tasks:
        for warning in await probe(grader, of_source, experiment.rewards, must_grade=must_grade):
            say(f"warning: {warning}")


def reward_service(plan: Plan) -> RewardService:
    """The reward service of a plan, not started."""
    return RewardService(
        plan.experiment.rewards,
        kinds_of_tasks(plan),
        find_tools_config(plan.experiment.workflow),
        scorer=plan.reward_model,
    )


def task_sets(plan: Plan) -> tuple[Sequence[Task], Sequence[Task]]:
    """Tasks to train on, and tasks to evaluate on."""
    return plan.tasks.tasks, plan.eval_tasks.tasks


def kinds_of_tasks(plan: Plan) -> frozenset[str]:
    """Kinds of the tasks that will be graded."""
    return frozenset(plan.tasks.kinds | plan.eval_tasks.kinds) - {ENVIRONMENT}
