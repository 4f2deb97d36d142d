"""What a preflight says of its trials: rows of a table, and findings that must be mended first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from areal_jax.config.experiment import Experiment
from areal_jax.data.config import Files, Hub
from areal_jax.protocols import Tokenizer
from areal_jax.records import Sample, Task
from areal_jax.rewards.tools import TOOLS
from areal_jax.rl.advantages import shape_rewards
from areal_jax.run.scripted_policy import Script
from areal_jax.workflows.config import Agent, CallFormat, Hermes, Tags, ToolUse
from areal_jax.workflows.tool_use import parse_calls


class Finding(NamedTuple):
    """Something that training would suffer from."""

    what: str
    expected: str
    found: str
    remedy: str
    """The setting to change."""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}; {self.remedy}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trial:
    """One script on one task, through the workflow to a reward."""

    script: Script
    task: Task
    samples: tuple[Sample, ...] = ()
    """Empty if the trial failed."""
    error: str = ""
    tools: Counter[str]
    """Calls that reached each tool."""
    num_tokens: int
    """Tokens of the longest call of the policy."""

    @property
    def reward(self) -> float:
        """Reward of the last sample; all samples of an agent have the same."""
        return self.samples[-1].reward


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All trials of one script on tasks of one kind."""

    script: str
    kind: str
    grades: Mapping[str, int]
    """Number of tasks by grade; `failed` where there is none."""
    rewards: Sequence[float]
    advantages: Sequence[float]
    tools: Mapping[str, int]
    """Number of calls by tool."""


def make_rows(trials: Sequence[Trial], advantages: Sequence[float]) -> list[Row]:
    """Sum trials up by kind and script, in their order.

    Args:
        trials: all trials.
        advantages: mean advantage of each trial's tokens; nan if it has none.
    """
    paired = list(zip(trials, advantages, strict=True))
    order = list(dict.fromkeys(map(_key_of, trials)))
    paired.sort(key=lambda pair: order.index(_key_of(pair[0])))
    rows = []
    for (kind, script), group in groupby(paired, key=lambda pair: _key_of(pair[0])):
        of_row = list(group)
        made = [trial for trial, _ in of_row if trial.samples]
        grades = Counter(
            trial.samples[-1].grade if trial.samples else "failed" for trial, _ in of_row
        )
        rows.append(
            Row(
                script=script,
                kind=kind,
                grades=grades,
                rewards=[trial.reward for trial in made],
                advantages=[each for _, each in of_row if np.isfinite(each)],
                tools=sum((trial.tools for trial, _ in of_row), Counter[str]()),
            )
        )
    return rows


def find_faults(
    experiment: Experiment, trials: Sequence[Trial], tokenizer: Tokenizer
) -> Iterator[Finding]:
    """Find what is wrong between prompts and rewards.

    Wrong answers must be worth less than the reference answer to the same task, so that partial
    credit is no fault. One line sums up all tasks of a kind.
    """
    by_task: dict[str, list[Trial]] = {}
    for trial in trials:
        by_task.setdefault(trial.task.id, []).append(trial)
    bounds = {task_id: _bound(experiment, of_task) for task_id, of_task in by_task.items()}
    unreached = {id(trial) for trial in trials if trial.samples and _find_unreached(trial)}

    def is_unrewarded(trial: Trial) -> bool:
        bound = bounds[trial.task.id]
        if not trial.samples or trial.script.is_right is not True or id(trial) in unreached:
            return False
        if trial.script.name == "reference":
            return not _is_rewarded(experiment, trial, by_task[trial.task.id])
        return bound is not None and trial.reward < bound

    def is_overrewarded(trial: Trial) -> bool:
        bound = bounds[trial.task.id]
        is_wrong = bool(trial.samples) and trial.script.is_right is False
        return is_wrong and bound is not None and trial.reward >= bound

    def is_too_long(trial: Trial) -> bool:
        return trial.script.is_right is True and trial.num_tokens > experiment.engine.max_new_tokens

    yield from _sum_up(trials, lambda trial: bool(trial.error), _describe_failure, experiment)
    for trial in _find_firsts(trials, lambda trial: id(trial) in unreached):
        yield _describe_unreached(experiment, trial, tokenizer)
    yield from _sum_up(trials, is_unrewarded, _describe_unrewarded, experiment)
    yield from _sum_up(trials, is_overrewarded, _describe_overrewarded, experiment)
    yield from _sum_up(trials, is_too_long, _describe_too_long, experiment)


def find_no_signal(
    experiment: Experiment, groups: Sequence[Sequence[Trial]], max_new_tokens: int
) -> Iterator[Finding]:
    """Find whether rewards make no difference, or the wrong one, once they are shaped.

    Args:
        experiment: its shaping.
        groups: trials of each task.
        max_new_tokens: token budget of the trials.
    """
    teacher = experiment.trainer.teacher
    if teacher is not None and teacher.reward_weight == 0:
        return  # learns from the teacher alone
    shaped: list[tuple[np.ndarray, np.ndarray, Sequence[Trial]]] = []
    for trials in groups:
        made = [trial for trial in trials if trial.samples]
        rewards_G = np.array([trial.reward for trial in made], np.float64)
        num_sampled_G = np.array([trial.samples[-1].loss_mask.sum() for trial in made], np.int64)
        shaped_G = shape_rewards(
            experiment.trainer.shaping, rewards_G, num_sampled_G, max_new_tokens
        )
        shaped.append((rewards_G, shaped_G, made))
    if not any(_has_reference(made) for _, _, made in shaped):
        return  # every answer that can be given is wrong
    before = np.concatenate([rewards_G for rewards_G, _, _ in shaped])
    after = np.concatenate([shaped_G for _, shaped_G, _ in shaped])
    if all(len(shaped_G) < 2 or np.ptp(shaped_G) == 0 for _, shaped_G, _ in shaped):
        is_shaped = any(len(rewards_G) > 1 and np.ptp(rewards_G) for rewards_G, _, _ in shaped)
        found = f"{after.min():g} for every answer to a task"
        if is_shaped:
            found = f"rewards {before.min():g} ... {before.max():g} that all become {after.max():g}"
        grade = next(
            trial.samples[-1].grade
            for _, _, made in shaped
            for trial in made
            if trial.script.name == "reference"
        )
        remedy = "change trainer.shaping" if is_shaped else _reward_setting(experiment, grade)
        yield Finding("signal of groups", "rewards that differ in some group", found, remedy)
        return
    inverted = [
        made[0].task.id
        for rewards_G, shaped_G, made in shaped
        if len(made) > 1 and shaped_G[rewards_G.argmax()] < shaped_G[rewards_G.argmin()]
    ]
    if inverted:
        yield Finding(
            "shaped rewards",
            "the best answer above the worst",
            f"the opposite on {len(inverted)} of {len(shaped)} tasks",
            "change trainer.shaping",
        )


def _key_of(trial: Trial) -> tuple[str, str]:
    return trial.task.kind, trial.script.name


def _has_reference(trials: Sequence[Trial]) -> bool:
    return any(trial.script.name == "reference" for trial in trials)


def _is_rewarded(experiment: Experiment, reference: Trial, of_task: Sequence[Trial]) -> bool:
    """Whether a reference answer gets credit."""
    rewards = experiment.rewards
    if rewards.scale == "raw":
        wrong = [
            each.reward
            for each in of_task
            if each.script.name in ("empty", "wrong") and each.samples
        ]
        return not wrong or reference.reward > min(wrong)
    if rewards.function is None and not isinstance(experiment.workflow, Agent):
        return reference.samples[-1].grade == "correct"
    return reference.reward > rewards.wrong


def _bound(experiment: Experiment, of_task: Sequence[Trial]) -> float | None:
    """Reward below which every wrong answer to a task must be; None if it is unknown."""
    for trial in of_task:
        if trial.script.name == "reference" and trial.samples:
            if _is_rewarded(experiment, trial, of_task):
                return trial.reward
            break
    return experiment.rewards.correct if experiment.rewards.scale == "unit" else None


def _find_unreached(trial: Trial) -> list[str]:
    return [tool for tool in trial.script.calls if not trial.tools[tool]]


def _find_firsts(trials: Sequence[Trial], is_faulty: Callable[[Trial], bool]) -> list[Trial]:
    """The first trial of each kind and script that is faulty."""
    return list({_key_of(trial): trial for trial in reversed(trials) if is_faulty(trial)}.values())[
        ::-1
    ]


def _sum_up(
    trials: Sequence[Trial],
    is_faulty: Callable[[Trial], bool],
    describe: Callable[[Experiment, Trial, str], Finding],
    experiment: Experiment,
) -> Iterator[Finding]:
    """One finding for each kind and script, with the number of tasks."""
    for first in _find_firsts(trials, is_faulty):
        of_key = [trial for trial in trials if _key_of(trial) == _key_of(first)]
        count = f"on {sum(map(is_faulty, of_key))} of {len(of_key)} tasks, such as {first.task.id}"
        yield describe(experiment, first, count)


def _name_of(trial: Trial) -> str:
    return f"{trial.script.name}, {trial.task.kind}"


def _quote(trial: Trial) -> str:
    said = repr(trial.script.turns[-1][-80:])
    return f"{said}, truncated," if trial.script.is_cut else said


def _describe_failure(experiment: Experiment, trial: Trial, count: str) -> Finding:
    return Finding(
        _name_of(trial), "a reward", f"{trial.error} {count}", _reward_setting(experiment, "")
    )


def _describe_unrewarded(experiment: Experiment, trial: Trial, count: str) -> Finding:
    sample = trial.samples[-1]
    found = f"{trial.reward:g} ({sample.grade}) for {_quote(trial)} {count}"
    remedy = _reward_setting(experiment, sample.grade)
    if sample.stop_reason == "length":
        remedy = (
            f"the conversation ends at engine.max_prompt_tokens="
            f"{experiment.engine.max_prompt_tokens}; raise it"
        )
    return Finding(
        _name_of(trial),
        f"the reward of a right answer, {experiment.rewards.correct:g}",
        found,
        remedy,
    )


def _describe_overrewarded(experiment: Experiment, trial: Trial, count: str) -> Finding:
    remedy = _reward_setting(experiment, trial.samples[-1].grade)
    if trial.task.kind == "code" and experiment.rewards.function is None:
        remedy = "set rewards.sandbox.isolation=bubblewrap, and check the tests of the task"
    found = f"{trial.reward:g} ({trial.samples[-1].grade}) for {_quote(trial)} {count}"
    return Finding(_name_of(trial), "less than the reward of a right answer", found, remedy)


def _describe_too_long(experiment: Experiment, trial: Trial, count: str) -> Finding:
    return Finding(
        _name_of(trial),
        f"at most engine.max_new_tokens={experiment.engine.max_new_tokens} tokens",
        f"{trial.num_tokens} tokens {count}",
        f"set engine.max_new_tokens to at least {trial.num_tokens}",
    )


def _describe_unreached(experiment: Experiment, trial: Trial, tokenizer: Tokenizer) -> Finding:
    tool, turn = _find_unreached(trial)[0], trial.script.turns[0]
    what = f"tools, {_name_of(trial)}"
    return Finding(
        what,
        f"a call of {tool} to reach it",
        f"none for {turn[:80]!r}",
        _remedy_of_unreached(experiment, tool, turn, tokenizer),
    )


def _remedy_of_unreached(experiment: Experiment, tool: str, turn: str, tokenizer: Tokenizer) -> str:
    workflow = experiment.workflow
    if not isinstance(workflow, ToolUse):
        return f"workflow={type(workflow).__name__} has no tools; set workflow=ToolUse"
    if tool not in workflow.tools.names:
        return f"add {tool} to workflow.tools.names={','.join(workflow.tools.names)}"
    formats: tuple[CallFormat, ...] = (Hermes(), Tags())
    fitting = [type(each).__name__ for each in formats if parse_calls(each, turn, tuple(TOOLS))]
    chosen = type(workflow.call_format).__name__
    if chosen not in fitting:
        return f"workflow.call_format={chosen} does not read it; set it to {' or '.join(fitting)}"
    if not parse_calls(workflow.call_format, tokenizer.decode(tokenizer.encode(turn)), (tool,)):
        return (
            f"policy.path={experiment.policy.path} has a tokenizer in which the tags of "
            f"workflow.call_format={chosen} are special tokens, which decoding leaves out; set "
            f"workflow.call_format={'Tags' if chosen == 'Hermes' else 'Hermes'}"
        )
    return "raise workflow.max_turns or engine.max_prompt_tokens"


def _reward_setting(experiment: Experiment, grade: str) -> str:
    """The setting that decides rewards."""
    rewards, workflow, tasks = experiment.rewards, experiment.workflow, experiment.tasks
    if isinstance(workflow, Agent) and grade != "no_answer":
        name = "command" if workflow.function is None else "function"
        return f"change the agent, workflow.{name}={getattr(workflow, name)}"
    if rewards.form is not None and grade == "no_answer":
        return f"change rewards.form={rewards.form}"
    if rewards.model is not None:
        return "train rewards.model on pairs with such answers, or lower rewards.model.weight"
    if rewards.function is not None:
        return f"change the reward function, rewards.function={rewards.function}"
    if isinstance(tasks, Files | Hub):
        return (
            f"set tasks.answer_field={tasks.answer_field} to a field that the verifier reads, or "
            "rewards.function to a function of yours"
        )
    return "set rewards.function to a function of yours"
