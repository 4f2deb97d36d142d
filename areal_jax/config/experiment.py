"""An experiment: the settings of all rooms in one record."""

from __future__ import annotations

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


@chz.chz
class Setup:
    """What every experiment settles, whatever it trains on."""

    name: str = chz.field(doc="names the run folder")
    description: str = chz.field(default="", doc="one line about what is tried")
    seed: int = chz.field(
        validator=NOT_NEGATIVE,
        default=1,
        doc="of fresh weights, of the order of the data and of every draw",
    )
    num_steps: int = chz.field(validator=NOT_NEGATIVE, doc="trainer steps; 0: only evaluate")
    policy: PolicyConfig = chz.field(default_factory=PolicyConfig, doc="what is trained")
    eval_tasks: TaskSource = chz.field(
        default_factory=lambda: Synthetic(split="heldout"), doc="what it is evaluated on"
    )
    prompt: PromptConfig = chz.field(
        default_factory=PromptConfig, doc="what is put around every problem"
    )
    placement: PlacementConfig = chz.field(
        default_factory=PlacementConfig, doc="which devices train and which decode"
    )
    launch: LaunchConfig = chz.field(
        default_factory=Local,
        doc="in which processes: Local, all in this one; Ray, on this machine or on many",
    )
    engine: EngineConfig = chz.field(default_factory=EngineConfig, doc="decoding")
    trainer: TrainerConfig = chz.field(
        default_factory=TrainerConfig, doc="how a batch becomes a version"
    )
    workflow: WorkflowConfig = chz.field(
        default_factory=SingleTurn,
        doc=(
            "how a task becomes samples, in training and evaluation: SingleTurn, MultiTurn, "
            "ToolUse or Agent"
        ),
    )
    rewards: RewardConfig = chz.field(default_factory=RewardConfig, doc="grading")
    evaluation: EvaluationConfig = chz.field(
        default_factory=EvaluationConfig, doc="evaluation while training goes on"
    )
    checkpoint: CheckpointConfig = chz.field(default_factory=CheckpointConfig, doc="what survives")
    metrics: MetricsConfig = chz.field(
        default_factory=MetricsConfig, doc="what is written beside metrics.jsonl"
    )
    health: HealthConfig = chz.field(
        default_factory=HealthConfig, doc="checks for a run that cannot learn"
    )


@chz.chz
class Experiment(Setup):
    """Reinforcement learning: everything that decides a run, and nothing that it finds out."""

    tasks: TaskSource = chz.field(default_factory=Synthetic, doc="what it is trained on")
    rollout: RolloutConfig = chz.field(
        default_factory=RolloutConfig, doc="batch shape and staleness"
    )


@chz.chz
class FineTuning(Setup):
    """Learning from examples that are there before the run begins."""

    examples: TaskSource = chz.field(
        default_factory=Synthetic,
        doc=(
            "what it is trained on: conversations, or prompts with their answers; for "
            "preferences, pairs of answers"
        ),
    )
    examples_per_batch: int = chz.field(
        validator=POSITIVE, default=64, doc="examples, or pairs, in one update"
    )
    eval_examples: TaskSource = chz.field(
        default_factory=HeldOut, doc="what is measured on examples is measured on these"
    )
    heldout_every_steps: int = chz.field(
        validator=NOT_NEGATIVE,
        default=50,
        doc="updates between two measurements of loss and perplexity (for preferences, of "
        "accuracy) on eval_examples, one "
        "before the first and one after the last; 0: none",
    )


@chz.chz
class SFTExperiment(FineTuning):
    """Supervised fine-tuning: how a policy comes to be that reinforcement learning can start
    from."""


@chz.chz
class PreferenceExperiment(FineTuning):
    """Training on pairs of a chosen and a rejected answer, of a policy or of a reward model."""

    loss: Preference = chz.field(
        default_factory=DPO,
        doc="what is learnt from a pair: by a policy DPO or IPO, by a reward model BradleyTerry",
    )

    @property
    def trains_reward_model(self) -> bool:
        """Whether the outcome scores answers, instead of giving them."""
        return isinstance(self.loss, BradleyTerry)

    @property
    def reference(self) -> Reference | None:
        """What the policy is compared with, by default the weights that training starts from; a
        reward model with nothing."""
        return None if self.trains_reward_model else self.trainer.reference or Reference()


AnyExperiment = Experiment | SFTExperiment | PreferenceExperiment


def is_due(version: int, every_steps: int) -> bool:
    """Whether something that happens every `every_steps` versions (0: never) happens at this
    version."""
    return every_steps > 0 and version % every_steps == 0
