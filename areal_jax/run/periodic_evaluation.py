"""Evaluation every evaluation.every_steps versions, while training continues."""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

from areal_jax.evaluation.scoring import Evaluation, evaluate, num_tasks_to_fill
from areal_jax.metrics import names
from areal_jax.metrics.files import describe_disk_error
from areal_jax.protocols import Engine, Grader, Tools, WeightPublisher
from areal_jax.run.generation import WorkflowHost, evaluation_sampling, workflow_of
from areal_jax.run.plan import Plan
from areal_jax.run.recording import Recording
from areal_jax.threads import run_in_thread

logger = logging.getLogger(__name__)

WEIGHTS_TIMEOUT_S = 1800.0
"""Longest time for weights of any size to reach the engines."""


@dataclass(kw_only=True)
class PeriodicEvaluation:
    """Evaluates versions of the policy on the held-out tasks of a plan."""

    plan: Plan
    engine: Engine
    grader: Grader
    tools: Tools
    host: WorkflowHost | None
    weight_channel: WeightPublisher
    recording: Recording
    # At most one task: no evaluation starts while another runs. Started by `start`, ended by
    # `join`.
    running: set[asyncio.Task[None]] = field(default_factory=set)

    async def evaluate(self, version: int) -> None:
        """Evaluate weights of `version` (pinned) or of at least `version`, where the experiment
        evaluates.
        """
        if self.plan.experiment.evaluation.every_steps:
            await self._wait_for(version)
            await self._evaluate(version)

    async def start(self, version: int) -> None:
        """Evaluate in the background, unless an evaluation is running."""
        if not self.running:
            await self._wait_for(version)
            task = asyncio.create_task(
                self._evaluate(version), name=f"evaluation of version {version}"
            )
            self.running.add(task)
            task.add_done_callback(self.running.discard)
            task.add_done_callback(_log_failure)

    async def join(self, *, cancel: bool) -> list[BaseException]:
        """Wait for the evaluation in the background; its errors.

        Args:
            cancel: end it early.
        """
        if cancel:
            for task in self.running:
                task.cancel()
        outcomes = await asyncio.gather(*self.running, return_exceptions=True)
        return [outcome for outcome in outcomes if isinstance(outcome, BaseException)]

    async def _wait_for(self, version: int) -> None:
        """Where evaluations are pinned, wait until all engines have the version, before a newer one
        is published.
        """
        if self.plan.experiment.evaluation.pinned:
            await run_in_thread(
                partial(self.weight_channel.wait_all_engines, version, WEIGHTS_TIMEOUT_S),
                "waiting for weights",
            )

    async def _evaluate(self, version: int) -> None:
        experiment, config = self.plan.experiment, self.plan.experiment.evaluation
        tokenizer, host = self.plan.tokenizer, self.host
        paused = self.weight_channel.paused() if config.pinned else nullcontext()
        evaluating = nullcontext() if host is None else host.evaluating(holds=config.pinned)
        stage = self.recording.progress.stage("evaluation", announce=False)
        span = self.recording.span("evaluation", f"version {version}")
        with stage, paused, evaluating as runner, span:
            result = await evaluate(
                self.plan.eval_tasks.tasks[: config.num_tasks],
                workflow_of(experiment, tokenizer, config.samples_per_task, self.tools, runner),
                self.engine,
                self.grader,
                version=version,
                sampling=evaluation_sampling(experiment, tokenizer.stop_token_ids),
                seed=experiment.seed,
                max_running=num_tasks_to_fill(self.plan.num_slots, config.samples_per_task),
            )
        self.recording.record_evaluation(version, evaluation_metrics(result), summary(result))


def evaluation_metrics(result: Evaluation) -> dict[str, float]:
    """Metrics of an evaluation, by their names in metrics.jsonl."""
    if math.isnan(result.pass_at_1):  # raw rewards: no answer is correct or wrong
        score = {
            names.EVAL_REWARD: result.mean_reward,
            names.EVAL_REWARD_ERROR: result.standard_error,
        }
    else:
        score = {names.PASS_AT_1: result.pass_at_1, names.PASS_AT_1_ERROR: result.standard_error}
    families = {family: score for family, score in result.by_family.items() if family}
    return {
        **score,
        "evaluation/truncated_fraction": result.truncated,
        "evaluation/answer_tokens": result.mean_tokens,
        "evaluation/num_tasks": result.num_tasks,
        "evaluation/num_failed": sum(result.failed.values()),
        "evaluation/newest_version": result.versions[1],
        "evaluation/seconds": result.seconds,
        **{f"evaluation/grade/{kind}": count for kind, count in result.grades.items()},
        **{f"evaluation/family/{family}": score for family, score in families.items()},
    }


def summary(result: Evaluation) -> str:
    """One line: score, confidence interval, failures, truncation and duration."""
    low, high = result.interval_95
    if math.isnan(result.pass_at_1):
        score = f"mean reward {result.mean_reward:.4g} (95 %: {low:.4g} to {high:.4g})"
        consequence = "left out"
    else:
        score = f"pass@1 {result.pass_at_1:.1%} (95 %: {low:.1%} to {high:.1%})"
        consequence = "counted as wrong"
    num_failed = sum(result.failed.values())
    failed = f", {num_failed} of them failed and {consequence}" if num_failed else ""
    return (
        f"evaluation of version {result.version}: {score} on {result.num_tasks} problems{failed}, "
        f"{result.truncated:.1%} truncated, {result.seconds:.1f} s"
    )


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        trace = None if isinstance(error, OSError) and describe_disk_error(error) else error
        logger.error("%s failed: %s", task.get_name(), error, exc_info=trace)
