"""What a run is made of, as data: policy, tasks, meshes, engines, and the memory that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from areal_jax.cluster.config import Ray
from areal_jax.config.experiment import AnyExperiment, Experiment
from areal_jax.data.examples import ExampleSet
from areal_jax.data.sources import TaskSet
from areal_jax.data.tokenizer import HFTokenizer
from areal_jax.engine.config import EngineConfig
from areal_jax.engine.decode import DecodeEngine
from areal_jax.engine.drafts import DraftPolicy
from areal_jax.models.decoder import Policy
from areal_jax.models.vision.image_reader import ImageReader
from areal_jax.parallel.compilation import Compiler, compile_lowered
from areal_jax.parallel.sharding import bytes_per_device
from areal_jax.run.reward_model import RewardModel
from areal_jax.trainer.memory_estimate import frozen_bytes, predicted_bytes
from areal_jax.trainer.state import trained
from areal_jax.workflows.config import Environment
from areal_jax.workflows.prompt_budget import Prompts

Memory = Mapping[str, int]
"""Bytes on each device, by purpose."""


@dataclass(frozen=True, kw_only=True)
class FrozenModelSpec:
    """A frozen policy that training reads: a reference or a teacher."""

    name: str
    """Its settings are trainer.NAME."""
    path: str
    policy: Policy
    folder: Path | None
    """None: the weights that training starts from."""
    offload: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainingPlan:
    """What a trainer is made of. Holds no weights."""

    experiment: AnyExperiment
    policy_folder: Path
    policy: Policy
    frozen_models: tuple[FrozenModelSpec, ...]
    tokenizer: HFTokenizer
    compute_dtype: jnp.dtype
    train_mesh: Mesh
    row_tokens: int
    """Tokens of a packed row."""
    critic: Policy | None
    """Critic of advantages=GAE."""
    critic_folder: Path | None
    """Folder of the critic's weights: its own, or those of its trunk."""
    image_reader: ImageReader | None
    """Reads images; None if the policy does not."""
    draft: DraftPolicy | None = None
    """Policy that proposes drafts to the engines."""
    compiler: Compiler = compile_lowered
    """Compiles the programs of trainer and engines."""

    def make_engine(self, mesh: Mesh, config: EngineConfig) -> DecodeEngine:
        """Make an engine of the policy on a mesh."""
        return DecodeEngine(
            self.policy,
            mesh,
            config,
            self.compute_dtype,
            image_reader=self.image_reader,
            compiler=self.compiler,
            draft=self.draft,
        )

    def train_bytes(self) -> Memory:
        """Estimated bytes that training takes on each device of its mesh."""
        config, mesh = self.experiment.trainer, self.train_mesh
        sizes = dict(
            predicted_bytes(
                config,
                self.policy,
                mesh,
                self.compute_dtype,
                row_tokens=self.row_tokens,
                critic=self.critic,
            )
        )
        # Offloaded weights are on the device only while it holds no gradients and activations.
        reusable = sum(sizes[name] for name in ("gradients", "activations", "logits"))
        for spec in self.frozen_models:
            if spec.folder is None and self.policy.lora:
                continue  # the adapter's frozen weights, which are counted already
            size = frozen_bytes(spec.policy, mesh, self.compute_dtype)
            sizes[spec.name] = max(0, size - reusable) if spec.offload else size
        return sizes


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan(TrainingPlan):
    """An experiment with everything that its settings name on this machine. Holds no weights."""

    tasks: TaskSet
    """Tasks of reinforcement learning; empty in fine-tuning."""
    examples: ExampleSet[Any]
    """Examples of fine-tuning, in the form of its trainer; empty in reinforcement learning."""
    eval_examples: ExampleSet[Any]
    """Held-out examples of fine-tuning; empty where their loss is not measured."""
    eval_tasks: TaskSet
    """Empty where the experiment does not evaluate."""
    prompts: tuple[Prompts, ...]
    """Measured prompts of the tasks to train on and to evaluate on."""
    warnings: tuple[str, ...]
    """Tasks that will fail."""
    rollout_mesh: Mesh
    engines: tuple[DecodeEngine, ...]
    """Equal engines on meshes of their own; not used where the experiment does not decode."""
    reward_model: RewardModel | None = None
    """Scores answers, on the last rollout device; None without rewards.model.path."""

    @property
    def engine(self) -> DecodeEngine:
        """The first engine."""
        return self.engines[0]

    @property
    def num_slots(self) -> int:
        """Slots of all engines together."""
        launch, num_slots = self.experiment.launch, self.experiment.engine.num_slots
        return num_slots * launch.rollout_engines if isinstance(launch, Ray) else num_slots

    @property
    def decodes(self) -> bool:
        """Whether anything is generated; in fine-tuning only evaluations are."""
        return decodes(self.experiment)

    @property
    def devices(self) -> str:
        """Number and kind of the devices: those that train + those that decode."""
        train, rollout = (mesh.devices.flat[0] for mesh in (self.train_mesh, self.rollout_mesh))
        if not self.decodes:
            return f"{self.train_mesh.size} {train.device_kind}"
        if train == rollout:
            return f"1 {train.device_kind}, shared by both meshes"
        is_auto = self.experiment.placement.rollout_share == "auto"
        until = ", until trial steps have balanced them" if is_auto else ""
        return f"{self.train_mesh.size} + {self.rollout_mesh.size} {train.device_kind}{until}"

    def rollout_bytes(self) -> Memory:
        """Bytes that decoding takes on each device of its mesh: the weights, a second copy of the
        trained ones during an update, the KV caches, and both of each opponent; with a draft
        policy, its weights, and its KV caches among the others.
        """
        if not self.decodes:
            return {}
        engine = self.engine
        arriving = jax.eval_shape(engine.layout, trained(self.policy).abstract)
        weights = 2 * bytes_per_device(arriving, engine.param_shardings)
        if self.policy.lora:
            weights += bytes_per_device(
                jax.eval_shape(engine.layout, self.policy.abstract()), engine.base_shardings
            )
        sizes = {"weights": weights, "KV caches": engine.kv_bytes()}
        if self.draft is not None:
            sizes["draft policy"] = engine.draft_bytes()
        workflow = self.experiment.workflow
        if isinstance(workflow, Environment) and workflow.opponents:
            each = bytes_per_device(
                jax.eval_shape(engine.layout, self.policy.abstract()), engine.base_shardings
            )
            each += engine.kv_bytes() + engine.draft_bytes()
            sizes["opponents"] = len(set(workflow.opponents)) * each
        if (scorer := self.reward_model) is not None:
            sizes["reward model"] = frozen_bytes(scorer.policy, scorer.mesh, self.compute_dtype)
        return sizes


def decodes(experiment: AnyExperiment) -> bool:
    """Whether the experiment generates anything."""
    return isinstance(experiment, Experiment) or experiment.evaluation.every_steps > 0


def split_at(plan: Plan, rollout: int, train: int) -> AnyExperiment:
    """The experiment with `rollout` and `train` devices, and as many slots on each decoding device
    as in the plan.
    """
    engine, before = plan.experiment.engine, plan.rollout_mesh.size
    return chz.replace(
        plan.experiment,
        placement=chz.replace(
            plan.experiment.placement,
            rollout_share=None,
            rollout_devices=rollout,
            train_devices=train,
        ),
        engine=chz.replace(
            engine,
            num_slots=max(1, engine.num_slots * rollout // before),
            kv_tokens=engine.kv_tokens * rollout // before,
        ),
    )


def possible_splits(plan: Plan) -> range:
    """The numbers of rollout devices that placement.adaptive chooses from: those of 1, 2, ...
    engines of the present size, beside at least one train device; under Ray, as of its settings.
    """
    launch = plan.experiment.launch
    if isinstance(launch, Ray):
        return launch.possible_splits()
    size = plan.engine.mesh.size
    return range(size, plan.train_mesh.size + plan.rollout_mesh.size, size)
