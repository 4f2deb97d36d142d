"""The limit on prompts: what an experiment's prompts and later turns need, and what will not
fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import chz

from areal_jax.config.checks import contradictions
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.data.policy_files import resolve_policy_folder
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError, config_errors
from areal_jax.models.hf import read_config
from areal_jax.records import Message, Task
from areal_jax.run.models import find_image_reader, load_tokenizer
from areal_jax.workflows.config import Agent, MultiTurn, ToolUse
from areal_jax.workflows.prompt_budget import (
    Limits,
    Prompts,
    doubtful_prompts,
    later_turns,
    measure_prompts,
    refused_prompts,
    required_prompt_tokens,
    too_few_tasks,
)

EXAMPLES_PROMPT_TOKENS = 1024
"""Least engine.max_prompt_tokens that fine-tuning chooses by itself."""


@dataclass(frozen=True, kw_only=True)
class LimitedPrompts:
    """An experiment with a limit on prompts."""

    experiment: AnyExperiment
    prompts: tuple[Prompts, ...]
    """Measured prompts, by the setting that names their tasks."""
    warnings: tuple[str, ...]
    """What will not fit, with the setting to change."""


def limit_prompts(experiment: AnyExperiment, **tasks: Sequence[Task]) -> LimitedPrompts:
    """Measure prompts, and choose a limit on them where engine.max_prompt_tokens is 0.

    Args:
        tasks: by the setting that names them.

    Raises:
        ConfigError: prompts, or the workflow's later turns, can never fit.
    """
    ignored = experiment.policy.ignore_config_keys
    with config_errors():
        folder = resolve_policy_folder(experiment.policy.path)
        model = read_config(folder, ignored, is_adapted=True, long_rope=experiment.policy.long_rope)
        positions = model.max_positions
        tokenizer = load_tokenizer(folder, find_image_reader(folder, model), ignored)
    prompts = _measure(experiment, tokenizer, tasks)
    turns = later_turns(tokenizer, experiment.workflow)
    longest = max((measured.longest for measured in prompts), default=0)
    engine = experiment.engine
    limit, most = engine.max_prompt_tokens, engine.max_new_tokens
    if not limit:
        # Where all turns may take more positions than the policy has, the last turns may be cut.
        limit = max(1, min(required_prompt_tokens(longest, turns, most), positions - most))
        if not isinstance(experiment, Experiment):
            limit = max(limit, EXAMPLES_PROMPT_TOKENS)
        experiment = chz.replace(experiment, engine=chz.replace(engine, max_prompt_tokens=limit))
        if problems := list(contradictions(experiment)):
            raise ConfigError("\n".join(problems))
    limits = Limits(limit, most, positions)
    if problems := [each for found in prompts for each in refused_prompts(found, turns, limits)]:
        raise ConfigError("\n".join(problems))
    warnings = [each for found in prompts for each in doubtful_prompts(found, turns, limits)]
    trained = next((found for found in prompts if found.source == "tasks"), None)
    if isinstance(experiment, Experiment) and trained is not None:
        warnings += too_few_tasks(
            trained, experiment.rollout.groups_per_batch, experiment.num_steps
        )
    return LimitedPrompts(experiment=experiment, prompts=prompts, warnings=tuple(warnings))


def _measure(
    experiment: AnyExperiment, tokenizer: HFTokenizer, tasks: dict[str, Sequence[Task]]
) -> tuple[Prompts, ...]:
    workflow, rewards = experiment.workflow, experiment.rewards
    if any(map(len, tasks.values())) and (problems := list(_one_turn_only(experiment, tokenizer))):
        raise ConfigError("\n".join(problems))
    is_boxed = not (rewards.accept_plain or rewards.function or isinstance(workflow, Agent))
    measure = partial(
        measure_prompts,
        tokenizer,
        workflow=workflow,
        max_new_tokens=experiment.engine.max_new_tokens,
        is_boxed=is_boxed,
    )
    with config_errors():
        return tuple(measure(source, of) for source, of in tasks.items() if len(of))


def _one_turn_only(experiment: AnyExperiment, tokenizer: HFTokenizer) -> Iterator[str]:
    """Refuse a workflow whose messages the chat template cannot render after an answer."""
    match workflow := experiment.workflow:
        case MultiTurn():
            role, remedy = "user", "set workflow=SingleTurn"
        case ToolUse():
            role = workflow.call_format.result_role
            remedy = "set workflow.call_format.result_role=user, or workflow=SingleTurn"
        case _:
            return
    try:
        tokenizer.render_next([Message(role, "?")])
    except ValueError as refusal:
        yield (
            f"workflow={type(workflow).__name__} answers policy.path={experiment.policy.path} "
            f"with a message of role {role}, and {refusal}; {remedy}"
        )
