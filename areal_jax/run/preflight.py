"""A trial of everything between a prompt and an update, before any training: scripted answers go
through template, workflow, tools, verifier, advantages and one optimizer update.

Needs no accelerator and no weights: of the policy, only config.json and the tokenizer are read.
"""

from __future__ import annotations

import ast
import asyncio
import math
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import chz
import numpy as np

from areal_jax.checkpoint.config import POLICY
from areal_jax.cluster.config import Local
from areal_jax.config.experiment import AnyExperiment, Experiment, PreferenceExperiment
from areal_jax.config.load import find_experiment, load_experiment
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.preferences import PreferencePair
from areal_jax.data.sft import SupervisedExample
from areal_jax.data.sources import format_skipped
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError, config_errors
from areal_jax.models.hf import read_config
from areal_jax.parallel.config import PlacementConfig
from areal_jax.records import Group
from areal_jax.run.checks import find_unreadable
from areal_jax.run.make_plan import find_examples, load_task_sets
from areal_jax.run.models import find_image_reader, load_tokenizer
from areal_jax.run.plan import TrainingPlan
from areal_jax.run.preflight_findings import (
    Finding,
    Row,
    Trial,
    find_faults,
    find_no_signal,
    make_rows,
)
from areal_jax.run.preflight_trials import Trials
from areal_jax.run.prompt_limits import limit_prompts
from areal_jax.run.trial_update import (
    UpdateResult,
    make_tiny_plan,
    update_from_examples,
    update_from_groups,
)
from areal_jax.workflows.config import Agent

T = TypeVar("T")

COMMAND = "areal-train"
"""How docstrings of experiments write the training command."""

NUM_EXAMPLES = 32
"""Examples of the update of fine-tuning."""

AGENT_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class ExampleRow:
    """Examples of fine-tuning, as the trainer reads them."""

    what: str
    num_examples: int
    num_tokens: int
    num_loss_tokens: int
    num_ended: int
    """Examples whose last token is a stop token in the loss."""


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What a preflight found."""

    name: str
    notes: Sequence[str] = ()
    rows: Sequence[Row] = ()
    examples: Sequence[ExampleRow] = ()
    update: UpdateResult | None = None
    findings: Sequence[Finding] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


def run_preflight(experiment: AnyExperiment, source: str | None) -> PreflightReport:
    """Try an experiment without training it.

    Args:
        experiment: the experiment.
        source: name or file of the experiment, whose docstring may say which command makes its
            policy.

    Raises:
        ConfigError: a part of the experiment is missing, or does not fit the others.
    """
    start_s = time.perf_counter()
    folder, notes = find_tokenizer_folder(experiment, source)
    experiment = _on_one_device(experiment, folder)
    with config_errors():
        ignored = experiment.policy.ignore_config_keys
        model = read_config(folder, ignored, is_adapted=True, long_rope=experiment.policy.long_rope)
        tokenizer = load_tokenizer(folder, find_image_reader(folder, model), ignored)
    if problems := list(find_unreadable(experiment, model, tokenizer)):
        raise ConfigError("\n".join(problems))
    with TemporaryDirectory() as scratch:
        try_it = _try_tasks if isinstance(experiment, Experiment) else _try_examples
        report = try_it(experiment, folder, Path(scratch), tokenizer)
    return replace(report, notes=[*notes, *report.notes], seconds=time.perf_counter() - start_s)


def find_tokenizer_folder(
    experiment: AnyExperiment, source: str | None
) -> tuple[Path, Sequence[str]]:
    """Find the folder with config.json and tokenizer of an experiment's policy.

    A policy that an earlier command makes need not exist: it will have the tokenizer of the policy
    that this command trains.

    Returns:
        The folder, and notes about it.

    Raises:
        ConfigError: there is none.
    """
    path = experiment.policy.path
    try:
        return resolve_policy_folder(path, has_weights=False), ()
    except (OSError, ValueError) as error:
        for command in _commands(source):
            options = dict(word.split("=", 1) for word in command if word.startswith("--"))
            run_folder, name = options.get("--run-folder"), options.get("--exp")
            if name is None or run_folder is None or Path(run_folder) / POLICY != Path(path):
                continue
            made = load_experiment(name, *(word for word in command if not word.startswith("--")))
            folder, notes = find_tokenizer_folder(made, name)
            line = " ".join([COMMAND, *command])
            note = (
                f"policy.path={path} does not exist; `{line}` makes it from "
                f"policy.path={made.policy.path}, whose tokenizer and chat template are used here"
            )
            return folder, (note, *notes)
        raise ConfigError(
            f"{error}; --preflight reads config.json, tokenizer.json and the chat template of it"
        ) from error


def _commands(source: str | None) -> Iterator[list[str]]:
    """Arguments of each training command in the docstring of an experiment's file."""
    if source is None:
        return
    text = ast.get_docstring(ast.parse(find_experiment(source).read_text(encoding="utf-8"))) or ""
    for line in re.findall(rf"{COMMAND} (.*)", re.sub(r"\\\n\s*", "", text)):
        yield shlex.split(line)


def _on_one_device(experiment: T, folder: Path) -> T:
    """The experiment with its policy's files in a local folder, in one process and on one
    device.
    """
    assert isinstance(experiment, AnyExperiment)
    workflow = experiment.workflow
    if isinstance(workflow, Agent):
        workflow = chz.replace(workflow, timeout_s=min(workflow.timeout_s, AGENT_TIMEOUT_S))
    workers = min(experiment.rewards.num_workers, os.cpu_count() or 1)
    return chz.replace(
        experiment,
        policy=chz.replace(experiment.policy, path=str(folder)),
        launch=Local(),
        placement=PlacementConfig(),
        workflow=workflow,
        rewards=chz.replace(experiment.rewards, num_workers=max(2, workers)),
    )


# Reinforcement learning.


def _try_tasks(
    experiment: AnyExperiment, folder: Path, scratch: Path, tokenizer: HFTokenizer
) -> PreflightReport:
    assert isinstance(experiment, Experiment)
    tasks, eval_tasks = load_task_sets(experiment)
    limited = limit_prompts(experiment, tasks=tasks.tasks)
    experiment = limited.experiment
    assert isinstance(experiment, Experiment)
    plan = make_tiny_plan(experiment, folder, scratch)
    notes = list(limited.warnings)
    if tasks.skipped:
        notes.append(f"tasks: skipped {format_skipped(tasks.skipped)}")
    trials = asyncio.run(Trials(experiment, tokenizer, notes).run(tasks, eval_tasks))
    groups = [
        [trial for trial in trials.made if trial.task.id == task_id]
        for task_id in dict.fromkeys(trial.task.id for trial in trials.made)
    ]
    update, advantages = _update(plan, groups)
    findings = [
        *trials.findings,
        *find_faults(experiment, trials.made, tokenizer),
        *(no_signal := list(find_no_signal(experiment, groups, trials.budget))),
        *_find_bad_update(update, has_signal=not no_signal and _has_reference(trials.made)),
    ]
    return PreflightReport(
        name=experiment.name,
        notes=notes,
        rows=make_rows(trials.made, [advantages.get(id(trial), math.nan) for trial in trials.made]),
        update=update,
        findings=findings,
    )


def _has_reference(trials: Sequence[Trial]) -> bool:
    return any(trial.script.name == "reference" for trial in trials)


def _update(
    plan: TrainingPlan, groups: Sequence[Sequence[Trial]]
) -> tuple[UpdateResult | None, Mapping[int, float]]:
    """Make one update; also the mean advantage of each trial's sampled tokens, by its identity."""
    made = [[trial for trial in trials if trial.samples] for trials in groups]
    made = [trials for trials in made if trials]
    if not made:
        return None, {}
    batch = [
        Group(number, trials[0].task, tuple(each for trial in trials for each in trial.samples))
        for number, trials in enumerate(made)
    ]
    update = update_from_groups(plan, batch)
    means: dict[int, float] = {}
    for trials, of_group in zip(made, update.advantages, strict=False):
        place = 0
        for trial in trials:
            values = of_group[place : place + len(trial.samples)]
            masked = [
                of_sample[sample.loss_mask]
                for of_sample, sample in zip(values, trial.samples, strict=True)
            ]
            means[id(trial)] = float(np.concatenate(masked).mean())
            place += len(trial.samples)
    return update, means


def _find_bad_update(update: UpdateResult | None, *, has_signal: bool) -> Iterator[Finding]:
    if update is None:
        return
    if update.error:
        remedy = "change trainer.loss, trainer.advantages or trainer.shaping"
        yield Finding("update", "a finite loss and gradient", update.error, remedy)
    elif not math.isfinite(update.grad_norm) or (has_signal and update.grad_norm == 0):
        found = f"a gradient norm of {update.grad_norm:g} over {update.num_tokens} tokens"
        remedy = "change trainer.loss, trainer.advantages or trainer.shaping"
        yield Finding("update", "a finite gradient that is not 0", found, remedy)


# Fine-tuning.


def _try_examples(
    experiment: AnyExperiment, folder: Path, scratch: Path, tokenizer: HFTokenizer
) -> PreflightReport:
    limited = limit_prompts(experiment)
    plan = make_tiny_plan(limited.experiment, folder, scratch)
    with config_errors():
        examples, _ = find_examples(plan.experiment, plan)
    notes = [f"examples: skipped {format_skipped(examples.skipped)}"] if examples.skipped else []
    first: list[Any] = list(islice(examples.examples, NUM_EXAMPLES))
    is_pairs = isinstance(experiment, PreferenceExperiment)
    sides: dict[str, list[SupervisedExample]] = {"examples": first}
    if is_pairs:
        pairs: list[PreferencePair] = first
        sides = {
            "chosen": [pair.chosen for pair in pairs],
            "rejected": [pair.rejected for pair in pairs],
        }
    rows = [_describe(what, side, tokenizer) for what, side in sides.items()]
    lengths = [sum(len(side[i].tokens) for side in sides.values()) for i in range(len(first))]
    learned = next(iter(sides.values()))[0]
    notes.append(f"learned of the first example: {_learned_text(learned, tokenizer)!r}")
    update = update_from_examples(plan, first, max(lengths))
    findings = [
        *(finding for row in rows for finding in _find_bad_examples(row)),
        *_find_bad_update(update, has_signal=True),
    ]
    return PreflightReport(
        name=experiment.name, notes=notes, examples=rows, update=update, findings=findings
    )


def _describe(
    what: str, examples: Sequence[SupervisedExample], tokenizer: HFTokenizer
) -> ExampleRow:
    return ExampleRow(
        what=what,
        num_examples=len(examples),
        num_tokens=sum(len(example.tokens) for example in examples),
        num_loss_tokens=sum(int(example.loss_mask.sum()) for example in examples),
        num_ended=sum(
            bool(example.loss_mask[-1]) and int(example.tokens[-1]) in tokenizer.stop_token_ids
            for example in examples
        ),
    )


def _learned_text(example: SupervisedExample, tokenizer: HFTokenizer) -> str:
    return tokenizer.decode(example.tokens[example.loss_mask])[:120]


def _find_bad_examples(row: ExampleRow) -> Iterator[Finding]:
    remedy = "change the chat template of policy.path, or the fields that examples names"
    if row.num_loss_tokens == 0:
        yield Finding(row.what, "tokens in the loss", "none", remedy)
    if row.num_ended == 0:
        found = f"none in {row.num_examples} examples, so that no answer learns to end"
        yield Finding(row.what, "a stop token in the loss", found, remedy)
