"""An experiment: the settings of all rooms in one record."""

from __future__ import annotations

from typing import Any, TypeVar

import chz

from areal_jax.bounds import NOT_NEGATIVE, POSITIVE
from areal_jax.checkpoint.config import CheckpointConfig
from areal_jax.cluster.config import LaunchConfig, Local
from areal_jax.data.config import HeldOut, PromptConfig, Synthetic, TaskSource
from areal_jax.engine.config import EngineConfig
from areal_jax.evaluation.config import EvaluationConfig
from areal_jax.metrics.config import HealthConfig, MetricsConfig
from areal_jax.models.config import PolicyConfig
from areal_jax.parallel.config import PlacementConfig
from areal_jax.rewards.config import RewardConfig
from areal_jax.rl.config import DPO, BradleyTerry, Preference, Reference
from areal_jax.rollout.config import RolloutConfig
from areal_jax.trainer.config import TrainerConfig
from areal_jax.workflows.config import SingleTurn, WorkflowConfig

AnySetup = TypeVar("AnySetup", bound="Setup")


@chz.chz
class Setup:
    """Settings that every experiment has."""

    name: str = chz.field(doc="name of the experiment, of which run folders are named")
    description: str = chz.field(default="", doc="one line about the experiment")
    seed: int = chz.field(
        validator=NOT_NEGATIVE,
        default=1,
        doc="seed of fresh weights, data order and sampling",
    )
    num_steps: int = chz.field(
        validator=NOT_NEGATIVE, doc="number of trainer steps; 0: only evaluate"
    )
    policy: PolicyConfig = chz.field(default_factory=PolicyConfig, doc="policy to train")
    eval_tasks: TaskSource = chz.field(
        default_factory=lambda: Synthetic(split="heldout"), doc="tasks to evaluate on"
    )
    prompt: PromptConfig = chz.field(default_factory=PromptConfig, doc="text around every problem")
    placement: PlacementConfig = chz.field(
        default_factory=PlacementConfig, doc="devices of training and of decoding"
    )
    launch: LaunchConfig = chz.field(
        default_factory=Local,
        doc="processes of the run: Local, this one; Ray, workers on one or many machines",
    )
    engine: EngineConfig = chz.field(default_factory=EngineConfig, doc="decode engine")
    trainer: TrainerConfig = chz.field(
        default_factory=TrainerConfig, doc="optimizer and loss settings"
    )
    workflow: WorkflowConfig = chz.field(
        default_factory=SingleTurn,
        doc=(
            "how samples of a task are generated, in training and evaluation: SingleTurn, "
            "MultiTurn, ToolUse, Agent or Environment"
        ),
    )
    rewards: RewardConfig = chz.field(
        default_factory=RewardConfig, doc="reward function and grading processes"
    )
    evaluation: EvaluationConfig = chz.field(
        default_factory=EvaluationConfig, doc="evaluation during training"
    )
    checkpoint: CheckpointConfig = chz.field(
        default_factory=CheckpointConfig, doc="checkpoints and exported weights"
    )
    metrics: MetricsConfig = chz.field(
        default_factory=MetricsConfig, doc="outputs besides metrics.jsonl"
    )
    health: HealthConfig = chz.field(
        default_factory=HealthConfig, doc="health checks: a run that cannot learn"
    )

    def replace(self: AnySetup, *overrides: str, **changes: Any) -> AnySetup:
        """The experiment with other settings.

        Args:
            overrides: as on the command line: `"num_steps=10"`.
            changes: Python values by dotted key: `**{"trainer.optimizer.learning_rate": 1e-5}`;
                a record, such as `workflow=MultiTurn(max_turns=3)`, replaces the whole record.

        Raises:
            ConfigError: a setting is unknown, of another type or out of bounds, or settings
                contradict each other.
        """
        # The module that resolves settings needs the classes of this one.
        from areal_jax.config.load import replace_settings

        return replace_settings(self, overrides, changes)  # type: ignore[arg-type, return-value] # one of AnyExperiment, and of the same class


@chz.chz
class Experiment(Setup):
    """Reinforcement learning: all settings of a run."""

    tasks: TaskSource = chz.field(default_factory=Synthetic, doc="tasks to train on")
    rollout: RolloutConfig = chz.field(
        default_factory=RolloutConfig, doc="batch shape and staleness"
    )


@chz.chz
class FineTuning(Setup):
    """Training on given examples."""

    examples: TaskSource = chz.field(
        default_factory=Synthetic,
        doc=(
            "examples to train on: conversations, or prompts with answers; for preferences, pairs "
            "of answers"
        ),
    )
    examples_per_batch: int = chz.field(
        validator=POSITIVE, default=64, doc="examples, or pairs, of one update"
    )
    eval_examples: TaskSource = chz.field(
        default_factory=HeldOut, doc="held-out examples on which the loss is measured"
    )
    heldout_every_steps: int = chz.field(
        validator=NOT_NEGATIVE,
        default=50,
        doc="updates between measurements of loss and perplexity (for preferences, accuracy) on "
        "eval_examples, also before the first and after the last; 0: none",
    )


@chz.chz
class SFTExperiment(FineTuning):
    """Supervised fine-tuning (SFT)."""


@chz.chz
class PreferenceExperiment(FineTuning):
    """Training on pairs of a chosen and a rejected answer, of a policy or of a reward model."""

    loss: Preference = chz.field(
        default_factory=DPO,
        doc="loss of a pair: DPO or IPO of a policy, BradleyTerry of a reward model",
    )

    @property
    def trains_reward_model(self) -> bool:
        """Whether a reward model is trained, which scores answers."""
        return isinstance(self.loss, BradleyTerry)

    @property
    def reference(self) -> Reference | None:
        """The reference policy, by default the initial weights; None for a reward model."""
        return None if self.trains_reward_model else self.trainer.reference or Reference()


AnyExperiment = Experiment | SFTExperiment | PreferenceExperiment


def is_due(version: int, every_steps: int) -> bool:
    """Return whether an action with an interval of `every_steps` (0: never) is due at a version."""
    return every_steps > 0 and version % every_steps == 0
