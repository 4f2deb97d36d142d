"""Stages of a trainer step: what reference, critic and proximal policy contribute to it.

A stage is a function of the packed rollouts that returns a `StageOutput`. The functions here
become stages with `functools.partial`, which binds the other arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import jax
import numpy as np
from jaxtyping import Float

from areal_jax.errors import CorruptedState
from areal_jax.metrics.meters import Mean
from areal_jax.parallel.sharding import fetch
from areal_jax.records import Sample
from areal_jax.rl.config import M2PO, KLInReward, M2POClip
from areal_jax.rl.kl import kl_estimate, kl_penalty
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.frozen import ReadOnlyPolicy
from areal_jax.trainer.objective import m2po_mask, proximal_of
from areal_jax.trainer.pipeline import (
    Column,
    CriticValues,
    MiniBatch,
    PackedRollouts,
    RolloutBatch,
    StageOutput,
    TokenValues,
)
from areal_jax.trainer.step import Learner


def reference_in_loss(packed: PackedRollouts, reference: ReadOnlyPolicy) -> StageOutput:
    """Give the loss the log-probs of a reference."""
    columns = _frozen_columns(packed, reference)
    # Waited for, so that the time counts for this stage.
    jax.block_until_ready(columns)
    return StageOutput(columns={"reference_logp": columns})


def reference_in_reward(
    packed: PackedRollouts, reference: ReadOnlyPolicy, kl: KLInReward
) -> StageOutput:
    """Subtract a KL penalty from the reward of every sampled token."""
    logp = frozen_logprobs(packed, reference)

    def penalty(sample: Sample, reference_logp: Float[np.ndarray, "T"]) -> Float[np.ndarray, "T"]:
        return kl_penalty(kl, sample.behave_logp, reference_logp, sample.loss_mask)

    return StageOutput(
        token_rewards=packed.batch.map_samples(penalty, logp),
        metrics={"kl_reference": kl_from_behave(packed.batch, logp)},
    )


def critic_values(packed: PackedRollouts, critic: Learner) -> StageOutput:
    """Give the estimator of advantages the values of a critic.

    Raises:
        CorruptedState: The values are not finite.
    """
    columns = [_current_columns(mini_batch, critic) for mini_batch in packed.mini_batches]
    by_place = {}
    for mini_batch, column in zip(packed.mini_batches, columns, strict=True):
        host = np.reshape(fetch(column), mini_batch.layout.shape)
        by_place |= zip(mini_batch.places, mini_batch.layout.gather(host), strict=True)
    if not all(np.isfinite(values).all() for values in by_place.values()):
        raise CorruptedState(
            f"step {packed.batch.version}: the critic's values are not finite: it has diverged. "
            "Lower trainer.critic.optimizer.learning_rate or trainer.critic.optimizer.max_grad_norm"
        )
    return StageOutput(values=CriticValues(by_place, columns))


def gradient_norms(packed: PackedRollouts, learner: Learner) -> StageOutput:
    """Give the estimator of advantages, for every sample, log(W g) as in VCPO.

    Raises:
        CorruptedState: A norm is not finite.
    """
    found = [[-math.inf] * len(group.samples) for group in packed.batch.groups]
    total, count = 0.0, 0.0
    for mini_batch in packed.mini_batches:
        if not mini_batch.places:
            continue
        columns = fetch([learner.gradient_norms(each) for each in mini_batch.micro_batches])
        logp, norms = (
            mini_batch.layout.gather(np.stack(arrays)) for arrays in zip(*columns, strict=True)
        )
        for (i, j), logp_T, norm_T in zip(mini_batch.places, logp, norms, strict=True):
            mask = packed.batch.trained[i][j][: len(logp_T)]
            behave_logp = packed.batch.groups[i].samples[j].behave_logp[: len(logp_T)]
            log_weight = (logp_T - behave_logp)[mask].sum(dtype=np.float64)
            norm = float(norm_T[mask][0])
            if not math.isfinite(norm):
                raise CorruptedState(
                    f"step {packed.batch.version}: the gradient of a sample's log-prob has norm "
                    f"{norm}: the policy has diverged. Lower trainer.optimizer.learning_rate or "
                    "trainer.optimizer.max_grad_norm"
                )
            found[i][j] = float(log_weight) + (math.log(norm) if norm else -math.inf)
            total, count = total + norm, count + 1.0
    return StageOutput(
        log_weighted_norms=found, metrics={"sample_gradient_norm": Mean(total, count)}
    )


def reads_proximal(config: TrainerConfig) -> bool:
    """Whether a step ever needs a forward pass of its own, for `proximal_logprobs` or for the bound
    of `M2POClip`.
    """
    if isinstance(config.loss, M2POClip):
        return True
    if proximal_of(config.loss) != "recompute":
        return False
    return config.num_mini_batches > 1 or isinstance(config.loss, M2PO)


def proximal_logprobs(
    packed: PackedRollouts, learner: Learner, config: TrainerConfig
) -> StageOutput:
    """Give the loss the proximal log-probs, and the mask of the tokens that M2PO keeps.

    They are those of the parameters before the step.
    The update of the first mini-batch takes them from its own forward pass. M2PO, which selects
    among all tokens of a mini-batch, needs them before if that has several micro-batches.
    """
    if proximal_of(config.loss) != "recompute":
        return StageOutput()
    is_m2po = isinstance(config.loss, M2PO)
    logp: list[Column | None] = [
        _current_columns(mini_batch, learner)
        if number or (is_m2po and len(mini_batch.micro_batches) > 1)
        else None
        for number, mini_batch in enumerate(packed.mini_batches)
    ]
    if not isinstance(config.loss, M2PO):
        return StageOutput(columns={"proximal_logp": logp})
    masks, kept, counted = list[Column | None](), 0.0, 0.0
    for mini_batch, column in zip(packed.mini_batches, logp, strict=True):
        if not column:
            masks.append(column)
            continue
        pairs = zip(column, mini_batch.micro_batches, strict=True)
        host = fetch([(proximal, each.behave_logp, each.loss_mask) for proximal, each in pairs])
        proximal, behave, mask = (np.stack(arrays) for arrays in zip(*host, strict=True))
        near = np.asarray(m2po_mask(config.loss, proximal.astype(np.float64), behave, mask))
        masks.append(learner.put_column(near))
        kept, counted = kept + float(near.sum()), counted + float(mask.sum())
    return StageOutput(
        columns={"proximal_logp": logp, "loss_mask": masks},
        metrics={"m2po_kept_fraction": Mean(kept, counted)},
    )


def _current_columns(mini_batch: MiniBatch, learner: Learner) -> Column:
    """Return what a learner predicts before its first update: log-probs, or a critic's values."""
    columns = [learner.logprobs(micro_batch) for micro_batch in mini_batch.micro_batches]
    # Waited for, so that the time counts for this stage.
    jax.block_until_ready(columns)
    return columns


def _frozen_columns(packed: PackedRollouts, frozen: ReadOnlyPolicy) -> Sequence[Column]:
    """Return log-probs of all micro-batches, by mini-batch, asynchronously."""
    found = iter(
        frozen.logprobs(
            [each for mini_batch in packed.mini_batches for each in mini_batch.micro_batches]
        )
    )
    return [[next(found) for _ in mini_batch.micro_batches] for mini_batch in packed.mini_batches]


def frozen_logprobs(packed: PackedRollouts, frozen: ReadOnlyPolicy) -> TokenValues:
    """Return log-probs of all packed tokens in one transfer to the host.

    Tokens that are not packed are not in the loss. They get the behaviour log-probs.
    """
    logp = packed.batch.map_samples(lambda sample: sample.behave_logp.copy())
    for mini_batch, columns in zip(
        packed.mini_batches, fetch(_frozen_columns(packed, frozen)), strict=True
    ):
        if columns:
            gathered = mini_batch.layout.gather(np.stack(columns))
            for (i, j), of_sequence in zip(mini_batch.places, gathered, strict=True):
                logp[i][j][: len(of_sequence)] = of_sequence
    return logp


def kl_from_behave(batch: RolloutBatch, logp: TokenValues) -> Mean:
    """Return the KL of the behaviour policy from one with these log-probs, over the loss tokens."""

    def log_ratios(
        sample: Sample, other_logp: Float[np.ndarray, "T"], trained: np.ndarray
    ) -> Float[np.ndarray, "_"]:
        return (sample.behave_logp - other_logp)[trained]

    log_ratio = np.concatenate(list(chain(*batch.map_samples(log_ratios, logp, batch.trained))))
    # k3 has the lowest variance of the estimators.
    return Mean(float(np.sum(kl_estimate("k3", log_ratio))), float(len(log_ratio)))
