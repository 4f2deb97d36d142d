"""An evaluation by the command line: answer the tasks that a folder lacks, grade, report, and
resume after a stop.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import signal
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import (
    AsyncExitStack,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
)
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from areal_jax.cluster.signals import Interrupted
from areal_jax.config.checks import require_objects
from areal_jax.config.experiment import AnyExperiment
from areal_jax.config.overrides import JSON, to_json
from areal_jax.config.policy_names import RunCheckpoint
from areal_jax.data.sources import load_tasks
from areal_jax.errors import ConfigError, EngineStopped, InvalidRequest, Unanswered, config_errors
from areal_jax.evaluation.answers import Answer, AnswerFolder
from areal_jax.evaluation.report import TIMES, summary, write_report
from areal_jax.evaluation.results import Results, compute_results
from areal_jax.evaluation.scoring import answer_all
from areal_jax.metrics import names
from areal_jax.metrics.description import write_description
from areal_jax.metrics.files import add_file_name
from areal_jax.metrics.progress import ProgressDisplay, facts_of_evaluation
from areal_jax.records import ENVIRONMENT, Task, task_to_json
from areal_jax.rewards.service import RewardService
from areal_jax.run.answerers import LocalAnswerer, RemoteAnswerer, find_local, find_server
from areal_jax.run.callbacks import RunControl
from areal_jax.run.claim import claimed, writable
from areal_jax.run.grading import start_rewards
from areal_jax.run.plan_report import count_text
from areal_jax.run.reward_model import reward_model_of
from areal_jax.run.stopping import StopRequest
from areal_jax.workflows.from_config import find_tools_config

T = TypeVar("T")

EVALUATIONS_FOLDER = Path("evaluations")

DECIDING = (
    *("seed", "policy.", "prompt.", "eval_tasks", "rewards.", "workflow"),
    *("engine.max_prompt_tokens", "engine.max_new_tokens"),
    *("evaluation.num_tasks", "evaluation.samples_per_task", "evaluation.temperature"),
)
"""Prefixes of the settings that decide the answers, or how they are graded."""

NOT_DECIDING = ("rewards.num_workers",)


def run(
    experiment: AnyExperiment,
    *,
    checkpoint: RunCheckpoint | None,
    server: str | None,
    folder: Path | None,
    control: RunControl,
) -> tuple[Path, Results]:
    """Answer the tasks that the folder lacks, grade the answers, and write the report.

    Args:
        checkpoint: of a run, instead of the experiment's policy.
        server: URL of a server, instead of either.
        folder: None: one named after the settings.
        control: the caller's stop requests.

    Returns:
        The folder, and the results.

    Raises:
        Interrupted: the caller asked to stop.
        ConfigError: an input is missing or does not fit.
        Unanswered: no task was answered, or tasks failed that may succeed when they are tried
            again.
    """
    config = experiment.evaluation
    require_objects(experiment, unused=("tasks.", "examples.", "eval_examples."))
    with config_errors("eval_tasks"):
        found = load_tasks(experiment.eval_tasks, experiment.prompt)
    tasks = found.tasks[: config.num_tasks]
    with config_errors() if server else nullcontext():
        answerer = (
            find_server(experiment, server, tasks)
            if server
            else find_local(experiment, checkpoint, tasks)
        )
    experiment = answerer.experiment
    settings = identity(experiment, tasks) | answerer.identity()
    folder = folder or EVALUATIONS_FOLDER / folder_name(experiment.name, answerer.name, settings)
    data = count_text("tasks", *found, experiment.eval_tasks)
    some = "" if len(tasks) == len(found.tasks) else f"the first {len(tasks)} of "
    headline = (
        f"{answerer.headline}; data: {some}{data}; samples_per_task {config.samples_per_task}, "
        f"temperature {config.temperature:g}; folder: {folder}"
    )
    with _opened(folder, settings, answerer.version) as answers:
        progress = ProgressDisplay(
            headline,
            len(tasks),
            len(answers.found),
            show_steps=experiment.metrics.progress,
            unit="task",
            facts=facts_of_evaluation,
        )
        with closing(progress):
            write_description(folder, headline, to_json(experiment), answerer.devices)
            try:
                answering = _answer(experiment, tasks, found.kinds, answerer, answers, progress)
                failures = asyncio.run(_until_stopped(answering, control))
            except EngineStopped as error:
                raise Unanswered(
                    f"{error}; the same command answers the remaining tasks"
                ) from error
            results = _report(experiment, headline, settings, tasks, answers, failures, progress)
    return folder, results


async def _until_stopped(answering: Coroutine[Any, Any, T], control: RunControl) -> T:
    stop = StopRequest()
    with control.stopping(stop):
        failures = await stop.unless_set(answering)
    if failures is None:
        raise Interrupted(signal.SIGINT, "stopped by SIGINT; the same call resumes it")
    return failures


def _report(
    experiment: AnyExperiment,
    headline: str,
    settings: Mapping[str, JSON],
    tasks: Sequence[Task],
    answers: AnswerFolder,
    failures: Mapping[int, Exception],
    progress: ProgressDisplay,
) -> Results:
    """Write the report of the answers so far.

    Raises:
        Unanswered: no task was answered, or tasks failed that may succeed when they are tried
            again.
    """
    if not answers.found:
        last = list(failures.values())[-1]
        raise Unanswered(
            f"none of the {len(tasks)} tasks could be answered, the last: {last}"
        ) from last
    is_raw = experiment.rewards.scale == "raw"
    results = compute_results(tasks, answers.found, failures, is_raw=is_raw)
    report = write_report(answers.path, headline, settings, results, tasks, answers.found)
    progress.say("; ".join(f"{name} {figure}" for name, figure in summary(results)))
    progress.say(f"report: {report}")
    # An invalid request stays invalid; other failures may not repeat.
    if again := [error for error in failures.values() if not isinstance(error, InvalidRequest)]:
        raise Unanswered(
            f"{len(again)} of {len(tasks)} problems failed, {results.treatment}, the last: "
            f"{again[-1]}; the same command tries them again"
        )
    return results


@contextmanager
def _opened(folder: Path, settings: Mapping[str, JSON], version: int) -> Iterator[AnswerFolder]:
    """Claim and open the folder.

    Raises:
        ConfigError: another process has claimed it, it belongs to other settings, or it cannot be
            written to.
    """
    with ExitStack() as stack:
        try:
            with writable(folder, "--folder"):
                stack.enter_context(claimed(folder, "--folder"))
                answers = stack.enter_context(closing(AnswerFolder(folder, settings, version)))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        yield answers


async def _answer(
    experiment: AnyExperiment,
    tasks: Sequence[Task],
    kinds: set[str],
    answerer: LocalAnswerer | RemoteAnswerer,
    answers: AnswerFolder,
    progress: ProgressDisplay,
) -> dict[int, Exception]:
    """Answer the remaining tasks, and write each answer at once; the errors of tasks that failed,
    by index.
    """
    left = [(index, task) for index, task in enumerate(tasks) if index not in answers.found]
    if not left:
        return {}
    start_s, num_tokens = time.monotonic(), 0

    def keep(index: int, task: Task, found: Sequence[Answer]) -> None:
        nonlocal num_tokens
        answers.add(index, task, found)
        num_tokens += sum(answer.num_tokens for answer in found)
        graded = [answer for of_task in answers.found.values() for answer in of_task]
        progress.update(
            len(answers.found),
            {
                **score_of(graded, is_raw=experiment.rewards.scale == "raw"),
                names.ROLLOUT_TOKENS_PER_S: num_tokens / (time.monotonic() - start_s),
            },
        )

    async with AsyncExitStack() as stack:
        with progress.stage("loading", announce=False):
            grader = await stack.enter_async_context(
                RewardService(
                    experiment.rewards,
                    kinds - {ENVIRONMENT},
                    find_tools_config(experiment.workflow),
                    scorer=reward_model_of(experiment),
                )
            )
            await start_rewards(grader, experiment, tasks, say=progress.say)
            ask = await stack.enter_async_context(answerer.answering(grader))
        failures = await answer_all(
            left, ask, keep, name="evaluation", max_running=answerer.max_running
        )
    seconds = time.monotonic() - start_s
    with (
        add_file_name(answers.path / TIMES),
        (answers.path / TIMES).open("a", encoding="utf-8") as file,
    ):
        row = {
            "ended": time.strftime("%Y-%m-%d %H:%M:%S"),
            "num_tasks": len(left) - len(failures),
            "num_tokens": num_tokens,
        }
        file.write(
            json.dumps(row | {"seconds": seconds, "tokens_per_s": num_tokens / seconds}) + "\n"
        )
    return failures


def score_of(answers: Sequence[Answer], *, is_raw: bool) -> dict[str, float]:
    """The score of the answers so far, under its name."""
    if is_raw:
        return {names.EVAL_REWARD: fmean([answer.reward or 0.0 for answer in answers])}
    return {names.PASS_AT_1: fmean([answer.grade == "correct" for answer in answers])}


def identity(experiment: AnyExperiment, tasks: Sequence[Task]) -> dict[str, JSON]:
    """The settings that decide the answers or the grades, and a digest of the tasks."""
    listed = to_json(experiment)
    deciding = {
        key: listed[key] for key in listed if key.startswith(DECIDING) and key not in NOT_DECIDING
    }
    return deciding | {"tasks": _digest([task_to_json(task) for task in tasks])}


def folder_name(experiment: str, answerer: str, settings: Mapping[str, JSON]) -> str:
    """A folder name that is unique to an evaluation."""
    return re.sub(r"[^\w.-]+", "_", f"{experiment}-{answerer}-{_digest(settings)}")


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=4).hexdigest()
