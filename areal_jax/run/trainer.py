"""The trainer of a plan: its weights, the policies beside it, and how what it has trained is
written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from areal_jax.checkpoint.recovery import Columns
from areal_jax.checkpoint.store import CheckpointError, CheckpointStore
from areal_jax.config.experiment import Experiment, FineTuning, PreferenceExperiment
from areal_jax.errors import ConfigError
from areal_jax.models import hf, lora
from areal_jax.models.decoder import Params
from areal_jax.parallel.sharding import TRAIN_RULES, shardings
from areal_jax.run.models import initial_params
from areal_jax.run.plan import TrainingPlan, had
from areal_jax.trainer.critic import CriticWeights
from areal_jax.trainer.forward import Forward, FrozenPolicy
from areal_jax.trainer.ppo import Trainer
from areal_jax.trainer.preference import PreferenceTrainer
from areal_jax.trainer.sft import SupervisedTrainer
from areal_jax.trainer.versions import FromExamples, Versions

POLICY = "policy"
CRITIC = "critic"
ADAPTER = "adapter"


def rl_trainer(plan: TrainingPlan, params: Params, base: Params | None) -> Trainer:
    """The trainer of a plan for reinforcement learning, with the weights it starts from, and those
    beside an adapter."""
    exp = plan.experiment
    assert isinstance(exp, Experiment)
    return Trainer(
        exp.trainer,
        plan.policy,
        params,
        plan.train_mesh,
        plan.compute_dtype,
        num_updates=exp.num_steps * exp.trainer.num_mini_batches,
        max_staleness=exp.rollout.max_staleness,
        staleness_of_kind=exp.rollout.staleness_of_kind(),
        temperature=exp.engine.temperature,
        row_tokens=plan.row_tokens,
        max_new_tokens=exp.engine.max_new_tokens,
        base=base,
        critic=initial_critic(plan),
        reference=frozen_policy(plan, "reference", params, base),
        teacher=frozen_policy(plan, "teacher", params, base),
    )


def trainer_from_examples(
    plan: TrainingPlan, params: Params, base: Params | None
) -> FromExamples[Any]:
    """The trainer of a plan for learning from examples, with the weights it starts from, and those
    beside an adapter."""
    exp = plan.experiment
    assert isinstance(exp, FineTuning)
    make = SupervisedTrainer
    if isinstance(exp, PreferenceExperiment):
        make = partial(
            PreferenceTrainer, exp.loss, reference=frozen_policy(plan, "reference", params, base)
        )
    return make(
        exp.trainer,
        plan.policy,
        params,
        plan.train_mesh,
        plan.compute_dtype,
        num_updates=exp.num_steps,
        row_tokens=plan.row_tokens,
        measures=exp.heldout_every_steps > 0,
        base=base,
    )


def initial_weights(plan: TrainingPlan) -> tuple[Params, Params | None]:
    """What is trained, and the frozen weights if that is an adapter, on the train mesh. ConfigError
    where those cannot be."""
    experiment, policy = plan.experiment, plan.policy
    # What is frozen is kept as it is computed with.
    dtype = plan.compute_dtype if policy.lora else np.float32
    mesh, seed = plan.train_mesh, experiment.seed
    return had(
        lambda: initial_params(
            experiment.policy, policy, plan.policy_folder, mesh, TRAIN_RULES, dtype, seed
        )
    )


def initial_critic(plan: TrainingPlan) -> CriticWeights | None:
    """What the critic begins with, if one is asked: its own weights, or a trunk, by default the
    policy's, and a fresh head."""
    critic, folder, experiment = plan.critic, plan.critic_folder, plan.experiment
    if critic is None or folder is None:
        return None
    placed = shardings(plan.train_mesh, critic.axes(), critic.abstract(), TRAIN_RULES)
    if experiment.policy.random_init and experiment.trainer.critic.path is None:
        # The same key draws the same trunk.
        params = jax.jit(critic.init, out_shardings=placed)(jax.random.key(experiment.seed))
    else:
        params = had(lambda: hf.load(folder, critic, placed))
    return CriticWeights(critic, params)


def frozen_policy(
    plan: TrainingPlan, name: str, params: Params, base: Params | None
) -> FrozenPolicy | None:
    """The frozen policy that trainer.NAME names, on the train mesh; None where it names none.

    Args: params, base: what training starts from, on the train mesh. A policy that is the same
        shares their memory."""
    found = next((found for found in plan.beside if found.name == name), None)
    if found is None:
        return None
    experiment, mesh, dtype = plan.experiment, plan.train_mesh, plan.compute_dtype
    # Examples were sampled at no temperature of the engine's.
    temperature = experiment.engine.temperature if isinstance(experiment, Experiment) else 1.0
    forward = Forward(
        experiment.trainer,
        found.policy,
        mesh,
        dtype,
        temperature=temperature,
        row_tokens=plan.row_tokens,
    )
    abstract = found.policy.abstract(dtype)
    if (folder := found.folder) is not None:
        placed = shardings(mesh, found.policy.axes(), abstract, TRAIN_RULES)
        weights = had(lambda: hf.load(folder, found.policy, placed, dtype=dtype))
        return FrozenPolicy(forward, weights, offload=found.offload)
    if found.policy.lora:
        return FrozenPolicy(forward, params, base, offload=found.offload)
    initial = base or jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract)
    return FrozenPolicy(forward, initial, offload=found.offload)


@dataclass(frozen=True, eq=False)
class Checkpointer:
    """Writes down what a trainer has trained, and resumes from it. Use it from one thread at a
    time."""

    plan: TrainingPlan
    folder: Path
    """Of the run."""
    trainer: Versions
    base: Params | None
    """The frozen weights, where the trainer trains an adapter beside them."""
    store: CheckpointStore

    def restore(self, version: int) -> Columns:
        """Let the trainer resume from a checkpoint; what that holds beside it. ConfigError where
        that cannot be."""
        try:
            state, beside = self.store.restore(
                version, self.trainer.let_go()
            )  # two states would not fit
        except CheckpointError as error:
            raise ConfigError(str(error)) from error
        self.trainer.restore(state)
        return beside

    def save(self, version: int, beside: Columns) -> None:
        """Begin a checkpoint. CheckpointError where this one, or the one before, cannot be
        written."""
        self.store.save(version, self.trainer.state, beside)

    def write_results(self, version: int) -> list[str]:
        """Write what was trained where other tools find it, and wait for the checkpoint under way;
        what to tell of that."""
        return list(self._written(version))

    def _written(self, version: int) -> Iterator[str]:
        plan, config = self.plan, self.plan.experiment
        policy, params, exports = plan.policy, self.trainer.params, config.checkpoint.export_hf
        if self.base is not None:
            # Others know nothing of the name 'embedded'.
            base = (
                str(plan.policy_folder) if config.policy.path == "embedded" else config.policy.path
            )
            lora.save(self.folder / ADAPTER, policy, params, base)
            yield f"adapter of version {version}: {self.folder / ADAPTER}"
        if exports:
            whole = params if self.base is None else lora.merge(policy, self.base, params)
            hf.save(self.folder / POLICY, policy, whole, plan.policy_folder)
            yield f"policy of version {version}: {self.folder / POLICY}"
        critic = self.trainer.state.critic
        if critic is not None and plan.critic is not None and exports:
            hf.save(self.folder / CRITIC, plan.critic, critic.params, plan.critic_folder)
            yield f"critic of version {version}: {self.folder / CRITIC}"
        try:
            self.store.wait()
        except CheckpointError as error:
            yield f"warning: {error}"
