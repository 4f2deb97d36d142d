"""Make the plan of a run from an experiment: find policy and data, and cut the meshes.

Missing or contradictory input is refused here, before any device is busy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import chz
import jax
from jax.sharding import Mesh

from areal_jax.config.checks import require_objects
from areal_jax.config.experiment import AnyExperiment, Experiment, PreferenceExperiment
from areal_jax.data.examples import ExampleSet
from areal_jax.data.policy_files import EMBEDDED, resolve_policy_folder
from areal_jax.data.preferences import load_pairs
from areal_jax.data.sft import load_examples
from areal_jax.data.sources import TaskSet, load_tasks
from areal_jax.engine.decode import DecodeEngine
from areal_jax.errors import ConfigError, config_errors
from areal_jax.models.architecture import ModelConfig, Readout
from areal_jax.models.decoder import Policy
from areal_jax.models.paged_attention import choose_paged_kernel, stored_head_dim
from areal_jax.parallel.compilation import Compiler, compile_lowered
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import (
    Meshes,
    compute_dtype,
    engine_meshes,
    make_meshes,
    make_rollout_mesh,
    make_train_mesh,
)
from areal_jax.parallel.torus import order_devices
from areal_jax.records import derive_seed
from areal_jax.rl.config import GAE
from areal_jax.run.checks import find_mismatches
from areal_jax.run.draft_policies import find_draft_policy, random_draft_policy
from areal_jax.run.frozen_models import find_frozen_models
from areal_jax.run.memory_checks import shard_to_fit
from areal_jax.run.models import (
    find_critic,
    find_image_reader,
    find_policy,
    load_tokenizer,
    with_pad_token,
)
from areal_jax.run.plan import Plan, TrainingPlan, decodes
from areal_jax.run.prompt_limits import limit_prompts
from areal_jax.run.reward_model import reward_model_of
from areal_jax.sim.costs import Efficiency, EngineCosts
from areal_jax.sim.hardware import device_of_kind
from areal_jax.trainer.forward import check_row_shards

CACHE_SHARE = 0.85
"""Share of an engine's memory for two versions of the weights and the caches, in a plan to compile.
"""


def make_plan(
    experiment: AnyExperiment,
    devices: Sequence[jax.Device] | None = None,
    compiler: Compiler = compile_lowered,
) -> Plan:
    """Find policy and data, and cut the meshes.

    Args:
        experiment: settings of the run.
        devices: devices to cut the meshes from; None for all.
        compiler: compiles the programs of trainer and engines.

    Raises:
        ConfigError: one of them is missing, or does not fit the others.
    """
    require_objects(experiment)
    with config_errors():
        meshes = _make_meshes(experiment, jax.devices() if devices is None else devices)
    tasks, eval_tasks = load_task_sets(experiment)
    num_tasks = experiment.evaluation.num_tasks
    limited = limit_prompts(
        experiment,
        tasks=tasks.tasks,
        eval_tasks=eval_tasks.tasks[:num_tasks] if eval_tasks.tasks else (),
    )
    experiment = limited.experiment
    training = replace(make_training_plan(experiment, meshes.train), compiler=compiler)
    with config_errors():
        examples, eval_examples = find_examples(experiment, training)
        engines = _make_engines(experiment, meshes, training)
    reward_model = reward_model_of(experiment, meshes.rollout.devices.flat[-1])
    plan = Plan(
        **{each.name: getattr(training, each.name) for each in fields(training)},
        tasks=tasks,
        examples=examples,
        eval_examples=eval_examples,
        eval_tasks=eval_tasks,
        prompts=limited.prompts,
        warnings=limited.warnings,
        rollout_mesh=meshes.rollout,
        engines=engines,
        reward_model=reward_model,
    )
    if problems := list(find_mismatches(plan)):
        raise ConfigError("\n".join(problems))
    return plan


def make_shape_plan(
    experiment: Experiment,
    model: ModelConfig,
    devices: Sequence[jax.Device],
    compiler: Compiler = compile_lowered,
    draft: ModelConfig | None = None,
) -> Plan:
    """Make a plan to compile, without weights, tasks and a tokenizer of its own.

    No program depends on the tokenizer, for which that of the embedded policy stands. Without
    engine.kv_tokens, the KV caches are those of all slots, or as much as the devices hold.

    Args:
        experiment: settings of the run.
        model: shape of the policy.
        devices: devices to cut the meshes from.
        compiler: compiles the programs.
        draft: shape of the draft policy of engine.draft_policy.

    Raises:
        ConfigError: the shape does not fit the settings or the devices.
    """
    row_tokens = experiment.trainer.row_tokens or experiment.engine.max_tokens
    with config_errors():
        meshes, policy = _make_meshes(experiment, devices), Policy(model)
        experiment = _with_caches_that_fit(experiment, model, draft, meshes.rollout)
        dtype = compute_dtype(experiment.policy.compute_dtype, meshes.train)
        check_row_shards(policy, meshes.train, row_tokens)
        training = shard_to_fit(
            TrainingPlan(
                experiment=experiment,
                policy_folder=EMBEDDED,
                policy=policy,
                frozen_models=(),
                image_reader=None,
                tokenizer=load_tokenizer(EMBEDDED, None),
                compute_dtype=dtype,
                train_mesh=meshes.train,
                row_tokens=row_tokens,
                critic=None,
                critic_folder=None,
                draft=draft and random_draft_policy(draft, dtype),
                compiler=compiler,
            )
        )
        engines = _make_engines(experiment, meshes, training)
    no_tasks, no_examples = TaskSet((), {}), ExampleSet((), {})
    return Plan(
        **{each.name: getattr(training, each.name) for each in fields(training)},
        tasks=no_tasks,
        examples=no_examples,
        eval_examples=no_examples,
        eval_tasks=no_tasks,
        prompts=(),
        warnings=(),
        rollout_mesh=meshes.rollout,
        engines=engines,
    )


def make_training_plan(experiment: AnyExperiment, mesh: Mesh) -> TrainingPlan:
    """Find what the trainer needs, to train on a mesh.

    Raises:
        ConfigError: a part is missing, or does not fit the others.
    """
    is_pairs = isinstance(experiment, PreferenceExperiment)
    # A pair lies in one row.
    row_tokens = experiment.trainer.row_tokens or experiment.engine.max_tokens * (1 + is_pairs)
    readout: Readout = "CausalLM"
    if isinstance(experiment, PreferenceExperiment) and experiment.trains_reward_model:
        readout = "SequenceClassification"
    critic_folder, critic = None, None
    with config_errors():
        folder = resolve_policy_folder(experiment.policy.path)
        policy = find_policy(experiment.policy, folder, readout)
        if isinstance(experiment.trainer.advantages, GAE):
            critic_folder = resolve_policy_folder(
                experiment.trainer.critic.path or experiment.policy.path
            )
            critic = find_critic(experiment.policy, critic_folder)
        image_reader = find_image_reader(folder, policy.config)
        tokenizer = load_tokenizer(folder, image_reader, experiment.policy.ignore_config_keys)
        policy = with_pad_token(policy, tokenizer, folder)
        critic = critic and with_pad_token(critic, tokenizer, folder)
        dtype = compute_dtype(experiment.policy.compute_dtype, mesh)
        draft = find_draft_policy(experiment.engine, experiment.policy, tokenizer, dtype)
        plan = TrainingPlan(
            experiment=experiment,
            policy_folder=folder,
            policy=policy,
            frozen_models=find_frozen_models(experiment, policy, tokenizer, mesh, row_tokens),
            tokenizer=tokenizer,
            compute_dtype=dtype,
            train_mesh=mesh,
            row_tokens=row_tokens,
            critic=critic,
            critic_folder=critic_folder,
            image_reader=image_reader,
            draft=draft,
        )
        for each in filter(None, (policy, critic)):
            check_row_shards(each, mesh, row_tokens)
        return shard_to_fit(plan)


def load_task_sets(experiment: AnyExperiment) -> tuple[TaskSet, TaskSet]:
    """Tasks to train on and to evaluate on; empty where the experiment has none."""
    tasks, eval_tasks = TaskSet((), {}), TaskSet((), {})
    if isinstance(experiment, Experiment):
        with config_errors("tasks"):
            tasks = load_tasks(experiment.tasks, experiment.prompt)
    if experiment.evaluation.every_steps:
        with config_errors("eval_tasks"):
            eval_tasks = load_tasks(experiment.eval_tasks, experiment.prompt)
    return tasks, eval_tasks


def find_examples(
    experiment: AnyExperiment, training: TrainingPlan
) -> tuple[ExampleSet, ExampleSet]:
    """Examples to train on and held-out examples; empty in reinforcement learning."""
    if isinstance(experiment, Experiment):
        return ExampleSet((), {}), ExampleSet((), {})
    load = load_examples
    if isinstance(experiment, PreferenceExperiment):
        load = partial(load_pairs, max_pair_tokens=training.row_tokens)
    return load(
        experiment.examples,
        experiment.eval_examples if experiment.heldout_every_steps else None,
        experiment.prompt,
        training.tokenizer,
        seed=derive_seed(experiment.seed, "examples"),
        max_tokens=min(training.row_tokens, training.policy.config.max_positions),
    )


def _with_caches_that_fit(
    experiment: Experiment, model: ModelConfig, draft: ModelConfig | None, rollout: Mesh
) -> Experiment:
    """Return the experiment with the KV caches that fit beside two versions of the weights, and
    those of the draft policy; as it is where all fit, or not even those of one sequence of each
    shard.
    """
    engine, kind = experiment.engine, rollout.devices.flat[0].device_kind
    if engine.kv_tokens:
        return experiment
    tensor, page = rollout.shape["tensor"], engine.page_tokens
    costs = EngineCosts(model, device_of_kind(kind)[1], tensor, Efficiency(memory=CACHE_SHARE))
    room = costs.kv_tokens_beside(2) * model.cached_per_token
    per_token = _stored_per_token(model, rollout, page)
    if draft is not None:
        room -= draft.num_params
        per_token += _stored_per_token(draft, rollout, page)
    per_shard = room // per_token
    fits = per_shard // page * page * rollout.size // tensor
    if per_shard < engine.max_tokens + 2 * page or fits >= engine.num_slots * engine.max_tokens:
        return experiment
    return chz.replace(experiment, engine=chz.replace(engine, kv_tokens=fits))


def _stored_per_token(model: ModelConfig, rollout: Mesh, page_tokens: int) -> int:
    """Return the numbers that pages hold of a token, with the padding of heads."""
    latent, platform = model.latent, rollout.devices.flat[0].platform
    size = model.head_dim if latent is None else latent.width
    kernel = choose_paged_kernel(platform, size, page_tokens, is_latent=latent is not None)
    return model.cached_per_token * stored_head_dim(kernel, size) // size


def _make_engines(
    experiment: AnyExperiment, meshes: Meshes, training: TrainingPlan
) -> tuple[DecodeEngine, ...]:
    count = experiment.placement.engines if decodes(experiment) else 1
    num_slots = experiment.engine.num_slots
    if num_slots % count:
        raise ValueError(
            f"engine.num_slots={num_slots} is not divisible by placement.engines={count}, which "
            f"share the slots; set engine.num_slots to a multiple of {count}"
        )
    config = chz.replace(
        experiment.engine,
        num_slots=num_slots // count,
        kv_tokens=experiment.engine.kv_tokens // count,
    )
    return tuple(
        training.make_engine(mesh, config) for mesh in engine_meshes(meshes.rollout, count)
    )


def _make_meshes(experiment: AnyExperiment, devices: Sequence[jax.Device]) -> Meshes:
    placement = experiment.launch.resolve_placement(experiment.placement)
    num_train = placement.train_devices or len(devices)
    if decodes(experiment) or num_train > len(devices):
        return make_meshes(placement, devices)
    # The rollout mesh is the first device, where nothing uses it.
    return Meshes(
        make_train_mesh(placement, order_devices(devices)[:num_train]),
        make_rollout_mesh(PlacementConfig(), devices[:1]),
    )
