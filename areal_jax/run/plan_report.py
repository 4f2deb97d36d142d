"""A plan as text: the headline of a run, and the lines of --dry-run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from areal_jax.config.experiment import Experiment, PreferenceExperiment
from areal_jax.config.overrides import as_text
from areal_jax.data.config import HeldOut, TaskSource
from areal_jax.data.sources import Skipped, format_skipped
from areal_jax.models import lora
from areal_jax.models.config import PolicyConfig
from areal_jax.models.decoder import Policy
from areal_jax.run.memory_checks import find_shortage, format_memory
from areal_jax.run.models import read_model
from areal_jax.run.plan import FrozenModelSpec, Plan
from areal_jax.workflows.prompt_budget import Prompts


def headline(plan: Plan) -> str:
    """One line: policy, data and devices."""
    return f"policy: {_policy(plan)}; data: {_data(plan)}; devices: {plan.devices}"


def plan_text(plan: Plan) -> str:
    """The whole plan, one line for each part."""
    lines = (
        ("policy", _policy(plan)),
        ("trained", _trained(plan)),
        *_critic(plan),
        *((spec.name, _frozen_model(spec)) for spec in plan.frozen_models),
        *_draft_policy(plan),
        ("data", _data(plan)),
        ("training", _training(plan)),
        ("evaluation", "; ".join(filter(None, (_held_out(plan), _pass_at_1(plan)))) or "none"),
        *(("prompts", _prompts(plan, prompts)) for prompts in plan.prompts),
        ("devices", plan.devices),
        ("train mesh", _shape(plan.train_mesh)),
        ("  on each", format_memory(plan.train_bytes())),
        *_rollout(plan),
        ("memory", find_shortage(plan) or "ok"),
    )
    return "\n".join(f"{name:<12}  {line}" for name, line in lines)


def policy_text(config: PolicyConfig, policy: Policy, dtype: jnp.dtype) -> str:
    """Path, architecture, size and precision of a policy."""
    model = policy.config
    ignored = f"; ignoring {', '.join(model.ignored_keys)}" if model.ignored_keys else ""
    return (
        f"{config.path} ({model.architecture}, {model.num_params / 1e6:,.1f} M parameters, "
        f"{dtype.name}{ignored})"
    )


def count_text(unit: str, items: Sequence[object], skipped: Skipped, source: TaskSource) -> str:
    """Number and source of tasks or examples, and what was skipped."""
    name = getattr(source, "path", None) or getattr(source, "name", None) or "problems"
    origin = "those held out" if isinstance(source, HeldOut) else f"{type(source).__name__} {name}"
    suffix = f" (skipped: {format_skipped(skipped)})" if skipped else ""
    return f"{len(items)} {unit} from {origin}{suffix}"


def _policy(plan: Plan) -> str:
    return policy_text(plan.experiment.policy, plan.policy, plan.compute_dtype)


def _trained(plan: Plan) -> str:
    policy, config = plan.policy, plan.experiment.policy
    if policy.lora is None:
        return f"all parameters, read out as {policy.config.readout}"
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(lora.abstract(policy)))
    return (
        f"{num_params / 1e6:,.3f} M parameters of an adapter of rank {policy.lora.rank} on "
        f"{as_text(policy.lora.targets)}, {config.adapter or 'fresh'}; "
        f"{policy.config.num_params / 1e6:,.1f} M frozen"
    )


def _critic(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.critic is None or plan.critic_folder is None:
        return
    model, config = plan.critic.config, plan.experiment.policy
    path = plan.experiment.trainer.critic.path or config.path
    head = "" if read_model(config, plan.critic_folder).is_scalar else ", with a fresh head"
    size = f"{model.num_params / 1e6:,.1f} M parameters"
    yield "critic", f"{path} ({model.architecture}, {size}{head})"


def _frozen_model(spec: FrozenModelSpec) -> str:
    model = spec.policy.config
    where = ", in the host's memory" if spec.offload else ""
    weights = "the weights that training starts from" if spec.folder is None else spec.path
    return f"{weights} ({model.architecture}, {model.num_params / 1e6:,.1f} M parameters{where})"


def _draft_policy(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.draft is not None:
        path, model = plan.experiment.engine.draft_policy, plan.draft.policy.config
        size = f"{model.num_params / 1e6:,.1f} M parameters"
        yield "draft policy", f"{path} ({model.architecture}, {size})"


def _data(plan: Plan) -> str:
    experiment = plan.experiment
    if isinstance(experiment, Experiment):
        return count_text("tasks", *plan.tasks, experiment.tasks)
    examples = plan.examples
    return count_text(_unit(plan), examples.examples, examples.skipped, experiment.examples)


def _unit(plan: Plan) -> str:
    return "pairs" if isinstance(plan.experiment, PreferenceExperiment) else "examples"


def _training(plan: Plan) -> str:
    experiment = plan.experiment
    if not isinstance(experiment, Experiment):
        return f"{experiment.num_steps} updates of {experiment.examples_per_batch} {_unit(plan)}"
    rollout = experiment.rollout
    return (
        f"{experiment.num_steps} steps of {rollout.groups_per_batch} groups x "
        f"{rollout.samples_per_group} samples, {experiment.trainer.num_mini_batches} updates each; "
        f"max_staleness {as_text(rollout.max_staleness)}"
    )


def _held_out(plan: Plan) -> str:
    experiment = plan.experiment
    if isinstance(experiment, Experiment) or not experiment.heldout_every_steps:
        return ""
    metric = "accuracy" if isinstance(experiment, PreferenceExperiment) else "perplexity"
    found = plan.eval_examples
    examples = count_text(_unit(plan), found.examples, found.skipped, experiment.eval_examples)
    return f"loss and {metric} every {experiment.heldout_every_steps} steps of {examples}"


def _pass_at_1(plan: Plan) -> str:
    evaluation = plan.experiment.evaluation
    if not evaluation.every_steps:
        return ""
    num_tasks = "all" if evaluation.num_tasks is None else f"at most {evaluation.num_tasks}"
    tasks = count_text("tasks", *plan.eval_tasks, plan.experiment.eval_tasks)
    samples = f"samples_per_task {evaluation.samples_per_task}"
    return f"pass@1 every {evaluation.every_steps} steps; {num_tasks} of {tasks}; {samples}"


def _prompts(plan: Plan, prompts: Prompts) -> str:
    lengths = prompts.lengths
    is_all = len(lengths) == prompts.num_tasks
    measured = "all" if is_all else f"{len(lengths):,} of {prompts.num_tasks:,}"
    return (
        f"{prompts.source}: {min(lengths)} to {max(lengths)} tokens ({measured} measured); "
        f"engine.max_prompt_tokens={plan.experiment.engine.max_prompt_tokens}"
    )


def _rollout(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.decodes:
        yield "rollout mesh", _shape(plan.rollout_mesh)
        yield "  on each", format_memory(plan.rollout_bytes())


def _shape(mesh: Mesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
