"""The trainer of a plan, its initial weights, and its frozen models."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np

from areal_jax.config.experiment import Experiment, FineTuning, PreferenceExperiment
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.errors import ConfigError, config_errors
from areal_jax.models import hf
from areal_jax.models.attention import choose_kernel
from areal_jax.models.decoder import Params, Policy
from areal_jax.parallel.sharding import TRAIN_RULES, abstract, is_abstract, shardings
from areal_jax.rl.config import CrossTokenizer
from areal_jax.run.models import initial_params
from areal_jax.run.plan import TrainingPlan
from areal_jax.run.teacher_input import teacher_input
from areal_jax.trainer.critic import critic_learner
from areal_jax.trainer.distillation import TeacherInput
from areal_jax.trainer.forward import Forward
from areal_jax.trainer.frozen import FrozenPolicy, ReadOnlyPolicy
from areal_jax.trainer.objective import policy_learner
from areal_jax.trainer.pipeline import SampleLimits
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.preference import PreferenceTrainer
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.state import frozen, frozen_shardings, trained
from areal_jax.trainer.step import TrainableModel
from areal_jax.trainer.versions import FromExamples


def rl_trainer(plan: TrainingPlan, params: Params, base: Params | None) -> Trainer:
    """Make the trainer of reinforcement learning.

    Args:
        params: initial weights, or an initial adapter. Shapes alone if the trainer's programs are
            only to be compiled.
        base: frozen weights of an adapter.
    """
    exp = plan.experiment
    assert isinstance(exp, Experiment)
    num_updates = exp.num_steps * exp.trainer.num_mini_batches
    critic = initial_critic(plan, shapes_only=is_abstract(params))
    read_as, teacher = _teacher_input(plan), frozen_policy(plan, "teacher", params, base)
    model = trainable_model(plan, params, base)
    vocabulary = None if read_as is None else read_as.vocabulary
    learner = policy_learner(exp.trainer, model, num_updates, vocabulary)
    if exp.trainer.teacher is not None and exp.trainer.teacher.path == "current":
        teacher = ReadOnlyPolicy(
            _forward(plan, plan.policy, teacher_row_tokens(plan)),
            lambda: (learner.params, learner.base),
        )
    return Trainer(
        config=exp.trainer,
        limits=SampleLimits(
            max_staleness=exp.rollout.max_staleness,
            max_new_tokens=exp.engine.max_new_tokens,
            max_staleness_by_kind=exp.rollout.staleness_of_kind(),
            num_frozen_steps=exp.trainer.num_critic_steps(),
        ),
        policy=learner,
        critic=None if critic is None else critic_learner(exp.trainer, critic, num_updates),
        reference=frozen_policy(plan, "reference", params, base),
        teacher=teacher,
        teacher_input=read_as,
    )


def teacher_row_tokens(plan: TrainingPlan) -> int:
    """Return the length of the rows that the teacher reads, in tokens."""
    teacher = plan.experiment.trainer.teacher
    return plan.row_tokens if teacher is None else teacher.row_tokens or plan.row_tokens


def _teacher_input(plan: TrainingPlan) -> TeacherInput | None:
    """Return how the teacher reads samples; None without a teacher."""
    config = plan.experiment.trainer.teacher
    if config is None:
        return None
    spec = next((spec for spec in plan.frozen_models if spec.name == "teacher"), None)
    tokenizer, policy = plan.tokenizer, plan.policy if spec is None else spec.policy
    has_own = isinstance(config.distillation, CrossTokenizer)
    if has_own and spec is not None and spec.folder is not None:
        ignored = plan.experiment.policy.ignore_config_keys
        tokenizer = HFTokenizer.from_folder(spec.folder, ignored)
    sizes = plan.policy.config.vocab_size, policy.config.vocab_size
    return teacher_input(config, plan.tokenizer, sizes[0], tokenizer, sizes[1])


def _forward(plan: TrainingPlan, policy: Policy, row_tokens: int) -> Forward:
    return Forward(
        plan.experiment.trainer,
        policy,
        plan.train_mesh,
        plan.compute_dtype,
        temperature=sampling_temperature(plan),
        row_tokens=row_tokens,
        shares_prefixes=shares_prefixes(plan),
        compiler=plan.compiler,
    )


def shares_prefixes(plan: TrainingPlan) -> bool:
    """Return whether tokens with which several samples begin are packed once.

    All policies that read the samples compute attention alone over the tokens before; images
    belong to a sample.
    """
    experiment = plan.experiment
    if not isinstance(experiment, Experiment):
        return False
    policies = [plan.policy, plan.critic, *(spec.policy for spec in plan.frozen_models)]
    can_share = not any(
        policy.config.linear or policy.config.vision for policy in policies if policy is not None
    )
    match experiment.trainer.share_prefixes:
        case "always":
            if not can_share:
                raise ConfigError(
                    "trainer.share_prefixes=always needs policies without linear attention and "
                    "images; set it to auto"
                )
            return True
        case "never":
            return False
        case "auto":
            platform = plan.train_mesh.devices.flat[0].platform
            return can_share and choose_kernel(platform, plan.row_tokens) != "tpu"


def trainable_model(plan: TrainingPlan, params: Params, base: Params | None) -> TrainableModel:
    """Return the policy of a plan with the weights that training starts from."""
    return TrainableModel(
        policy=plan.policy,
        params=params,
        mesh=plan.train_mesh,
        compute_dtype=plan.compute_dtype,
        row_tokens=plan.row_tokens,
        temperature=sampling_temperature(plan),
        base=base,
        replays_router=isinstance(plan.experiment, Experiment)
        and plan.experiment.engine.router_replay,
        shares_prefixes=shares_prefixes(plan),
        compiler=plan.compiler,
        image_reader=plan.image_reader,
    )


def sampling_temperature(plan: TrainingPlan) -> float:
    """Return the sampling temperature of the samples that are trained on; 1 for examples."""
    experiment = plan.experiment
    return experiment.engine.temperature if isinstance(experiment, Experiment) else 1.0


def example_trainer(plan: TrainingPlan, params: Params, base: Params | None) -> FromExamples[Any]:
    """Make the trainer of fine-tuning.

    Args:
        params: initial weights, or an initial adapter.
        base: frozen weights of an adapter.
    """
    exp = plan.experiment
    assert isinstance(exp, FineTuning)
    make = SupervisedTrainer
    if isinstance(exp, PreferenceExperiment):
        make = partial(
            PreferenceTrainer, exp.loss, reference=frozen_policy(plan, "reference", params, base)
        )
    return make(
        exp.trainer,
        trainable_model(plan, params, base),
        num_updates=exp.num_steps,
        measures=exp.heldout_every_steps > 0,
    )


def initial_weights(plan: TrainingPlan) -> tuple[Params, Params | None]:
    """Load or initialize the trained weights on the train mesh; of an adapter, also the frozen
    weights.

    Raises:
        ConfigError: they cannot be loaded.
    """
    experiment, policy = plan.experiment, plan.policy
    # Frozen weights are stored in the type in which they are used.
    dtype = plan.compute_dtype if policy.lora else np.float32
    mesh, seed = plan.train_mesh, experiment.seed
    with config_errors():
        return initial_params(
            experiment.policy, policy, plan.policy_folder, mesh, TRAIN_RULES, dtype, seed
        )


def abstract_weights(plan: TrainingPlan) -> tuple[Params, Params | None]:
    """Return the shapes and shardings of `initial_weights`."""
    policy, mesh = plan.policy, plan.train_mesh
    params, axes = trained(policy)
    base = None
    if policy.lora:
        base = abstract(frozen(policy, plan.compute_dtype), frozen_shardings(policy, mesh))
    return abstract(params, shardings(mesh, axes, params, TRAIN_RULES)), base


def initial_critic(plan: TrainingPlan, *, shapes_only: bool = False) -> TrainableModel | None:
    """Load the critic of advantages=GAE: its own weights, or a trunk (by default the policy's) with
    a fresh head; None where there is no critic.

    Args:
        shapes_only: load nothing.
    """
    critic, folder, experiment = plan.critic, plan.critic_folder, plan.experiment
    if critic is None or folder is None:
        return None
    placed = shardings(plan.train_mesh, critic.axes(), critic.abstract(), TRAIN_RULES)
    if shapes_only:
        params = abstract(critic.abstract(), placed)
    elif experiment.policy.random_init and experiment.trainer.critic.path is None:
        # The policy's key samples the policy's trunk.
        params = jax.jit(critic.init, out_shardings=placed)(jax.random.key(experiment.seed))
    else:
        with config_errors():
            params = hf.load(folder, critic, placed)
    return TrainableModel(
        policy=critic,
        params=params,
        mesh=plan.train_mesh,
        compute_dtype=plan.compute_dtype,
        row_tokens=plan.row_tokens,
        shares_prefixes=shares_prefixes(plan),
        compiler=plan.compiler,
    )


def frozen_policy(
    plan: TrainingPlan, name: str, params: Params, base: Params | None
) -> FrozenPolicy | None:
    """Load the frozen policy that trainer.NAME names onto the train mesh; None where it names none.

    Args:
        params: initial weights on the train mesh, or an initial adapter. A frozen policy with the
            same weights shares their memory.
        base: frozen weights of an adapter.
    """
    spec = next((spec for spec in plan.frozen_models if spec.name == name), None)
    if spec is None:
        return None
    mesh, dtype = plan.train_mesh, plan.compute_dtype
    row_tokens = teacher_row_tokens(plan) if name == "teacher" else plan.row_tokens
    forward = _forward(plan, spec.policy, row_tokens)
    shapes = spec.policy.abstract(dtype)
    placed = shardings(mesh, spec.policy.axes(), shapes, TRAIN_RULES)
    if is_abstract(params) and not spec.policy.lora:
        return FrozenPolicy(forward, abstract(shapes, placed), offload=spec.offload)
    if (folder := spec.folder) is not None:
        with config_errors():
            weights = hf.load(folder, spec.policy, placed, dtype=dtype)
        return FrozenPolicy(forward, weights, offload=spec.offload)
    if spec.policy.lora:
        return FrozenPolicy(forward, params, base, offload=spec.offload)
    initial = base or jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, shapes)
    return FrozenPolicy(forward, initial, offload=spec.offload)
