"""A trainer step as pure functions over immutable batches.

    select_tokens        groups                                  -> RolloutBatch
    pack_rollouts        RolloutBatch                            -> PackedRollouts
    stages (stages.py)   PackedRollouts                          -> StageOutput, each
    estimate_advantages  RolloutBatch, StageOutputs              -> AdvantageEstimate
    policy_batches,      PackedRollouts, AdvantageEstimate and
    critic_batches       StageOutputs                            -> LearnerBatch, each mini-batch
    apply_updates        LearnerBatches (updates.py)             -> metrics

The types fix the order of a step, because each function takes what an earlier one returns. A stage
(reference, teacher, critic, proximal policy) takes the packed rollouts alone. No stage reads what
another contributes, so stages run in any order, and a new one is a new function.

The functions change nothing but their results. Some start a transfer to the train mesh.

Axes: G samples of a group, M micro-batches, B rows, T tokens of a sample or of a row.

The file has more than 400 lines because its functions are read in the order of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from areal_jax.data.packing import Layout, TrainingSequence
from areal_jax.errors import CorruptedState
from areal_jax.metrics.meters import Mean
from areal_jax.records import Group, Sample
from areal_jax.rl.advantages import (
    Trajectory,
    compute_advantages,
    mean_weights,
    shape_rewards,
    value_targets,
)
from areal_jax.rl.config import GAE
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.critic import with_values
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.step import Learner

S = TypeVar("S")

TokenMasks: TypeAlias = Sequence[Sequence[Bool[np.ndarray, "_"]]]
"""By group and sample, one flag per token."""

TokenValues: TypeAlias = Sequence[Sequence[Float[np.ndarray, "_"]]]
"""By group and sample, one number per token."""

Place: TypeAlias = tuple[int, int]
"""Index of a group in the batch, and of a sample in the group."""

Column: TypeAlias = Sequence[Any]
"""One value per token of a mini-batch ([B, T], or a tuple of such), by micro-batch, on the train
mesh."""


@dataclass(frozen=True, kw_only=True)
class SampleLimits:
    """Limits of the samples.

    Attributes:
        max_staleness: Trainer steps by which a token in the loss may lag behind; None: any number.
        max_new_tokens: The engine's limit to an answer, in tokens.
        max_staleness_by_kind: `max_staleness` of the task kinds that have their own.
        num_frozen_steps: First trainer steps that leave the policy as it is (critic warm-up): their
            versions are one policy, and staleness does not count them.
    """

    max_staleness: int | None
    max_new_tokens: int
    max_staleness_by_kind: Mapping[str, int | None] = field(default_factory=dict)
    num_frozen_steps: int = 0

    def staleness(self, version: int, versions: Int32[np.ndarray, "_"]) -> Int32[np.ndarray, "_"]:
        """Return the policy's steps between the versions that sampled tokens and this one."""
        frozen = self.num_frozen_steps
        return max(version, frozen) - (np.maximum(versions, frozen) if frozen else versions)


@dataclass(frozen=True, eq=False)
class RolloutBatch:
    """The groups of one trainer step, and which of their tokens are in the loss."""

    groups: Sequence[Group]
    version: int
    """Version of the parameters before the step."""
    stale: TokenMasks
    """Sampled tokens that are context only, because they are too old."""
    trained: TokenMasks
    """Tokens in the loss."""

    def map_samples(
        self, compute: Callable[..., S], *by_sample: Sequence[Sequence[Any]]
    ) -> list[list[S]]:
        """Map `compute` over the samples and their entries in `by_sample`, by group and sample."""
        return [
            [compute(*of_sample) for of_sample in zip(group.samples, *of_group, strict=True)]
            for group, *of_group in zip(self.groups, *by_sample, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class MiniBatch:
    """The share of a batch that one optimizer update sees, packed.

    Its micro-batches have only the columns that the rollouts have. The others are zeros.
    """

    micro_batches: Sequence[DeviceBatch]
    layout: Layout
    places: Sequence[Place]
    """The sample of each sequence of the layout."""
    weights: Float32[np.ndarray, "_"]
    """Weight of each sequence's tokens in the mean that the loss is."""
    num_loss_tokens: int

    def put(self, learner: Learner, values: Iterable[Shaped[np.ndarray, "_"] | float]) -> Column:
        """Start the transfer of a column.

        Args:
            learner: Whose mesh and micro-batch shape the column has.
            values: By sequence, one number per token, or one for all tokens.
        """
        return learner.put_column(self.layout.scatter(values, np.float32))


@dataclass(frozen=True, eq=False)
class PackedRollouts:
    """A batch with its mini-batches."""

    batch: RolloutBatch
    mini_batches: Sequence[MiniBatch]


class CriticValues(NamedTuple):
    """A critic's values of all packed tokens: at token t, of what follows token t."""

    by_place: Mapping[Place, Float32[np.ndarray, "_"]]
    columns: Sequence[Column]
    """By mini-batch."""


def _unchanged(advantages: TokenValues) -> TokenValues:
    return advantages


def _nothing() -> None:
    pass


@dataclass(frozen=True, eq=False)
class StageOutput:
    """What a stage adds to a step. By default nothing."""

    token_rewards: TokenValues | None = None
    """Added to the rewards of tokens, before advantages are estimated."""
    values: CriticValues | None = None
    """Read by the estimator of advantages. At most one stage has them."""
    baselines: Sequence[float] | None = None
    """Expected reward of each group's prompt, read by the estimator of advantages."""
    log_weighted_norms: Sequence[Sequence[float]] | None = None
    """By group and sample, `Trajectory.log_weighted_norm`."""
    transform_advantages: Callable[[TokenValues], TokenValues] = _unchanged
    """Applied to the estimated advantages."""
    columns: Mapping[str, Sequence[Column | None]] = field(default_factory=dict)
    """Columns of the policy's micro-batches, by name and mini-batch. None: as packed."""
    metrics: Mapping[str, float | Mean] = field(default_factory=dict)
    on_trained: Callable[[], None] = _nothing
    """Called after the updates of the step, which may fail."""


Stage: TypeAlias = Callable[[PackedRollouts], StageOutput]
"""A pure function that adds to a step."""


@dataclass(frozen=True, eq=False)
class AdvantageEstimate:
    """Advantages of a batch, and what they are made of."""

    advantages: TokenValues
    trajectories: Sequence[Sequence[Trajectory]]
    value_targets: Sequence[Sequence[Float32[np.ndarray, "_"]]] | None
    """What a critic is to predict; None without a critic."""


@dataclass(frozen=True, eq=False)
class LearnerBatch:
    """A mini-batch with all columns that a learner's update reads."""

    micro_batches: Sequence[DeviceBatch]
    num_loss_tokens: int
    proximal_is_current: bool
    """The update takes the proximal log-probs from its own forward pass."""


def check_groups(groups: Sequence[Group], num_mini_batches: int, version: int) -> None:
    """Check that a batch can be trained on.

    Raises:
        ValueError: It cannot; the message says why.
        CorruptedState: A behaviour log-prob is not finite.
    """
    if len(groups) < num_mini_batches:
        raise ValueError(
            f"a batch of {len(groups)} groups cannot be split into {num_mini_batches} "
            "mini-batches; lower trainer.num_mini_batches or raise rollout.groups_per_batch"
        )
    for group in groups:
        for i, sample in enumerate(group.samples):
            where = f"sample {i} of group {group.id} (task {group.task.id})"
            if not np.isfinite(sample.reward):
                raise ValueError(f"{where} has a reward that is not finite: {sample.reward}")
            if not np.isfinite(sample.behave_logp[sample.loss_mask]).all():
                raise CorruptedState(
                    f"step {version}: {where} has a behaviour log-probability that is not finite: "
                    "the policy that sampled it has diverged. Lower "
                    "trainer.optimizer.learning_rate or trainer.optimizer.max_grad_norm"
                )
            if sample.loss_mask[:1].any():
                raise ValueError(
                    f"{where} begins with a token in the loss, which nothing predicts; expected a "
                    "prompt"
                )


def select_tokens(groups: Sequence[Group], version: int, limits: SampleLimits) -> RolloutBatch:
    """Exclude the tokens from the loss that are more than `max_staleness` versions old."""

    def stale(sample: Sample, kind: str) -> Bool[np.ndarray, "T"]:
        bound = limits.max_staleness_by_kind.get(kind, limits.max_staleness)
        if bound is None:
            return np.zeros(sample.loss_mask.shape, bool)
        return sample.loss_mask & (limits.staleness(version, sample.versions) > bound)

    masks = [[stale(sample, group.task.kind) for sample in group.samples] for group in groups]
    trained = [
        [sample.loss_mask & ~old for sample, old in zip(group.samples, olds, strict=True)]
        for group, olds in zip(groups, masks, strict=True)
    ]
    return RolloutBatch(groups, version, masks, trained)


def pack_rollouts(
    batch: RolloutBatch, config: TrainerConfig, limits: SampleLimits, learner: Learner
) -> PackedRollouts:
    """Split a batch into mini-batches, pack them, and start their transfer to the train mesh.

    Of each sample it packs the tokens up to the last sampled one, and nothing of a sample without a
    token in the loss.
    """

    def packed(share: Sequence[int]) -> MiniBatch:
        places = [(i, j) for i in share for j, mask in enumerate(batch.trained[i]) if mask.any()]
        masks = [batch.trained[i][j] for i, j in places]
        num_trained = np.array([mask.sum() for mask in masks], np.int64)
        sequences = []
        for (i, j), mask in zip(places, masks, strict=True):
            sample = batch.groups[i].samples[j]
            end = len(mask) - int(sample.loss_mask[::-1].argmax())
            age = limits.staleness(batch.version, sample.versions[:end])
            experts = None if sample.experts is None else sample.experts[:end]
            columns = sample.tokens[:end], mask[:end], sample.behave_logp[:end], age, experts
            images = learner.read_images(batch.groups[i].task.images, sample.tokens[:end])
            # Of a token that was sampled, a stage may read the log-prob, also of a stale one.
            num_context = int(sample.loss_mask.argmax())
            sequences.append(TrainingSequence(*columns, images, num_context))
        micro_batches, layout = learner.pack(sequences)
        return MiniBatch(
            [learner.put(micro_batch) for micro_batch in micro_batches],
            layout,
            places,
            mean_weights(config.loss_mean, num_trained, limits.max_new_tokens),
            num_loss_tokens=int(num_trained.sum()),
        )

    sizes = [sum(len(sample.tokens) for sample in group.samples) for group in batch.groups]
    return PackedRollouts(
        batch, [packed(share) for share in _balanced(sizes, config.num_mini_batches)]
    )


def estimate_advantages(
    batch: RolloutBatch,
    config: TrainerConfig,
    limits: SampleLimits,
    contributions: Sequence[StageOutput],
) -> AdvantageEstimate:
    """Estimate the advantage of every token from rewards and from what the stages contribute."""
    trajectories = _trajectories(batch, config, limits, contributions)
    if (values := critic_values_of(contributions)) is not None:
        nothing = np.zeros(0, np.float32)
        trajectories = [
            [
                with_values(
                    trajectory,
                    values.by_place.get((i, j), nothing),
                    was_cut_off=sample.stop_reason == "length",
                )
                for j, (trajectory, sample) in enumerate(zip(of_group, group.samples, strict=True))
            ]
            for i, (of_group, group) in enumerate(zip(trajectories, batch.groups, strict=True))
        ]
    advantages: TokenValues = compute_advantages(config.advantages, trajectories)
    for contribution in contributions:
        advantages = contribution.transform_advantages(advantages)
    gae = config.advantages if isinstance(config.advantages, GAE) else None
    targets = None if gae is None else value_targets(gae, trajectories)
    return AdvantageEstimate(advantages, trajectories, targets)


def critic_values_of(contributions: Iterable[StageOutput]) -> CriticValues | None:
    """Return the critic's values, if a stage contributes them."""
    return next((each.values for each in contributions if each.values is not None), None)


def policy_batches(
    packed: PackedRollouts,
    estimate: AdvantageEstimate,
    contributions: Sequence[StageOutput],
    learner: Learner,
) -> list[LearnerBatch]:
    """Return what the policy's updates read, by mini-batch.

    Advantages are multiplied by the weights of the mean that the loss is.
    """

    def batch_of(number: int, mini_batch: MiniBatch) -> LearnerBatch:
        sequences = zip(
            mini_batch.places, mini_batch.weights, mini_batch.layout.lengths, strict=True
        )
        weighted = (weight * estimate.advantages[i][j][:n] for (i, j), weight, n in sequences)
        columns = {"advantages": mini_batch.put(learner, weighted)}
        if "weights" in learner.columns:
            columns["weights"] = mini_batch.put(learner, mini_batch.weights.tolist())
        if "positive_weights" in learner.columns:
            columns["positive_weights"] = mini_batch.put(
                learner, _positive_weights(packed.batch, mini_batch)
            )
        for contribution in contributions:
            for name, by_mini_batch in contribution.columns.items():
                if (column := by_mini_batch[number]) is not None:
                    assert name not in columns, f"two stages contribute {name}"
                    columns[name] = column
        return LearnerBatch(
            _with_columns(mini_batch, columns),
            mini_batch.num_loss_tokens,
            proximal_is_current="proximal_logp" not in columns,
        )

    return [batch_of(number, mini_batch) for number, mini_batch in enumerate(packed.mini_batches)]


def _positive_weights(batch: RolloutBatch, mini_batch: MiniBatch) -> list[float]:
    """Return weights of sequences that turn a mean over tokens into one over correct answers'."""
    is_correct = [batch.groups[i].samples[j].grade == "correct" for i, j in mini_batch.places]
    tokens = sum(
        int(batch.trained[i][j].sum())
        for (i, j), correct in zip(mini_batch.places, is_correct, strict=True)
        if correct
    )
    return [mini_batch.num_loss_tokens / tokens if correct else 0.0 for correct in is_correct]


def critic_batches(
    packed: PackedRollouts,
    estimate: AdvantageEstimate,
    contributions: Sequence[StageOutput],
    critic: Learner,
) -> list[LearnerBatch]:
    """Return what the critic's updates read, by mini-batch: its old values, and their targets."""
    values, targets = critic_values_of(contributions), estimate.value_targets
    assert values is not None and targets is not None

    def batch_of(mini_batch: MiniBatch, old_values: Column) -> LearnerBatch:
        sequences = zip(mini_batch.places, mini_batch.layout.lengths, strict=True)
        returns = mini_batch.put(critic, (targets[i][j][:n] for (i, j), n in sequences))
        columns = {"proximal_logp": old_values, "advantages": returns}
        return LearnerBatch(
            _with_columns(mini_batch, columns),
            mini_batch.num_loss_tokens,
            proximal_is_current=False,
        )

    return [batch_of(*pair) for pair in zip(packed.mini_batches, values.columns, strict=True)]


def _with_columns(mini_batch: MiniBatch, columns: Mapping[str, Column]) -> list[DeviceBatch]:
    assert all(len(column) == len(mini_batch.micro_batches) for column in columns.values())
    return [
        micro_batch._replace(**{name: column[i] for name, column in columns.items()})
        for i, micro_batch in enumerate(mini_batch.micro_batches)
    ]


def _trajectories(
    batch: RolloutBatch,
    config: TrainerConfig,
    limits: SampleLimits,
    contributions: Sequence[StageOutput],
) -> list[list[Trajectory]]:
    """Return the samples with shaped rewards, and with the sum of contributed token rewards."""

    def shaped(group: Group) -> Float[np.ndarray, "G"]:
        rewards_G = np.array([sample.reward for sample in group.samples])
        num_sampled_G = np.array([sample.loss_mask.sum() for sample in group.samples])
        return shape_rewards(config.shaping, rewards_G, num_sampled_G, limits.max_new_tokens)

    def trajectory(
        sample: Sample,
        reward: float,
        baseline: float | None,
        log_weighted_norm: float | None,
        trained: Bool[np.ndarray, "T"],
        *earned: np.ndarray,
    ) -> Trajectory:
        if isinstance(config.advantages, GAE) and sample.token_rewards is not None:
            # Each turn's own reward; what shaping has changed counts at the end.
            reward -= float(sample.token_rewards.sum(dtype=np.float64))
            earned = (*earned, sample.token_rewards)
        return Trajectory(
            reward,
            sample.loss_mask,
            trained,
            sum(earned[1:], earned[0]) if earned else None,
            components=sample.components,
            baseline=baseline,
            log_weighted_norm=log_weighted_norm,
        )

    rewards = [shaped(group).tolist() for group in batch.groups]
    earned = [each.token_rewards for each in contributions if each.token_rewards is not None]
    by_group = next((each.baselines for each in contributions if each.baselines is not None), None)
    by_group = [None] * len(rewards) if by_group is None else by_group
    baselines = [
        [baseline] * len(of_group) for baseline, of_group in zip(by_group, rewards, strict=True)
    ]
    norms = next(
        (each.log_weighted_norms for each in contributions if each.log_weighted_norms is not None),
        [[None] * len(of_group) for of_group in rewards],
    )
    return batch.map_samples(trajectory, rewards, baselines, norms, batch.trained, *earned)


def _balanced(sizes: Sequence[int], num_shares: int) -> list[list[int]]:
    """Split the indices of `sizes` into shares of like number and like total.

    Largest first, in turn, and back (snake order).
    """
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    for turn, i in enumerate(np.argsort(-np.asarray(sizes), kind="stable")):
        lap, share = divmod(turn, num_shares)
        shares[num_shares - 1 - share if lap % 2 else share].append(int(i))
    return [sorted(share) for share in shares]
