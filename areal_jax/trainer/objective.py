"""The reinforcement-learning objective of a micro-batch, as the trainer's settings define it.

Axes: B rows, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from areal_jax.metrics.meters import Mean
from areal_jax.rl.config import (
    M2PO,
    BehaveLoss,
    CrossTokenizer,
    JensenShannon,
    KLInLoss,
    Loss,
    M2POClip,
    Proximal,
    ProximalLoss,
    SampledTokens,
    Teacher,
)
from areal_jax.rl.distillation import (
    TeacherVocabulary,
    earlier_logprobs,
    sampled_distillation_loss,
    span_divergence,
)
from areal_jax.rl.importance_weights import interpolated_proximal, second_moment_mask
from areal_jax.rl.kl import kl_loss
from areal_jax.rl.logprobs import token_divergences
from areal_jax.rl.losses import policy_loss
from areal_jax.rl.off_policy import OffPolicyCounts, off_policy_counts
from areal_jax.rl.token_losses import PolicyLoss, mean_loss, positive_nll
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch, Forward, Predictions
from areal_jax.trainer.programs import Objective
from areal_jax.trainer.step import Learner, TrainableModel


def policy_learner(
    config: TrainerConfig,
    model: TrainableModel,
    num_updates: int,
    vocabulary: TeacherVocabulary | None = None,
) -> Learner:
    """Return the learner of the policy.

    Args:
        config: The trainer's settings.
        model: The policy and its initial parameters.
        num_updates: Updates of the whole run: steps times `num_mini_batches`. The learning-rate
            schedule spans those after the critic's warm-up.
        vocabulary: The teacher's, with distillation=CrossTokenizer.
    """
    return Learner(
        config,
        model,
        policy_objective(config, vocabulary),
        max(0, num_updates - config.num_critic_steps() * config.num_mini_batches),
    )


def proximal_of(loss: Loss) -> Proximal:
    """Return where the proximal log-probs of an objective come from."""
    match loss:
        case BehaveLoss():
            return "behave"
        case ProximalLoss():
            return loss.proximal
    return "recompute"


def policy_objective(
    config: TrainerConfig, vocabulary: TeacherVocabulary | None = None
) -> Objective:
    """Return the policy loss, plus the KL to a reference, the loss on correct answers and the
    distillation of a teacher if the settings have them.

    The function has more than 60 lines because the parts share one mask and one denominator.
    """
    kl = None if config.reference is None else config.reference.kl
    columns: tuple[str, ...] = ()
    if isinstance(kl, KLInLoss):
        columns = (
            ("reference_logp",) if config.loss_mean == "tokens" else ("reference_logp", "weights")
        )

    if config.positive_nll_coef:
        columns = (*columns, "positive_weights")
    if isinstance(config.loss, M2POClip):
        columns = (*columns, "clip_bound")

    def loss(
        logp: Array,
        batch: DeviceBatch,
        num_tokens: Float[Array, ""],
        proximal_is_current: Bool[Array, ""],
    ) -> PolicyLoss:
        proximal_logp = _proximal_logp(config.loss, logp, batch, proximal_is_current)
        mask, metrics = batch.loss_mask, {}
        if isinstance(config.loss, M2PO):
            near = m2po_mask(config.loss, proximal_logp, batch.behave_logp, mask)
            # Otherwise the mask of the batch is M2PO's already, of the whole mini-batch.
            mask = jnp.where(proximal_is_current, near, mask)
            counts = (
                jnp.stack([near.sum(), batch.loss_mask.sum()]).astype(jnp.float32)
                * proximal_is_current
            )
            metrics = {"m2po_kept_fraction": Mean(counts[0], counts[1])}
        result = policy_loss(
            config.loss,
            logp,
            proximal_logp,
            batch.behave_logp,
            batch.advantages,
            mask,
            batch.segment_ids,
            clip_bound=batch.clip_bound,
            num_tokens=num_tokens,
        )
        result = result._replace(metrics=result.metrics | metrics)
        if isinstance(kl, KLInLoss) and batch.reference_logp is not None:
            penalty = kl_loss(
                kl, logp, batch.reference_logp, mask, batch.weights, num_tokens=num_tokens
            )
            result = result.plus(penalty)
        if batch.positive_weights is not None:
            result = result.plus(
                positive_nll(
                    config.positive_nll_coef, logp, mask, batch.positive_weights, num_tokens
                )
            )
        return result

    def off_policy(
        logp: Array, batch: DeviceBatch, proximal_is_current: Bool[Array, ""]
    ) -> OffPolicyCounts:
        # A BehaveLoss has no proximal policy of its own: theta takes its place.
        policy_logp = logp
        if not isinstance(config.loss, BehaveLoss):
            policy_logp = _proximal_logp(config.loss, logp, batch, proximal_is_current)
        return off_policy_counts(
            policy_logp - batch.behave_logp, batch.loss_mask, batch.age, batch.segment_ids
        )

    if config.teacher is None:
        return Objective(loss, columns, off_policy)
    if isinstance(config.teacher.distillation, SampledTokens):
        columns = (*columns, "teacher_logp", *({"weights"} - {*columns}))
    return Objective(
        loss,
        columns,
        off_policy,
        _distillation_loss(config.teacher, vocabulary),
        num_top_tokens(config.teacher, vocabulary),
    )


def num_top_tokens(teacher: Teacher, vocabulary: TeacherVocabulary | None = None) -> int:
    """Return how many of the teacher's most likely tokens its distillation reads."""
    how = teacher.distillation
    if not isinstance(how, JensenShannon | CrossTokenizer):
        return 0
    return how.num_tokens if vocabulary is None else min(how.num_tokens, len(vocabulary.own_ids))


def _distillation_loss(
    teacher: Teacher, vocabulary: TeacherVocabulary | None
) -> Callable[[Predictions, DeviceBatch, Forward, Array], PolicyLoss] | None:
    """Return the loss of learning from a teacher; None if advantages hold it already."""

    def sampled(
        predictions: Predictions, batch: DeviceBatch, forward: Forward, num_tokens: Array
    ) -> PolicyLoss:
        del forward
        how = teacher.distillation
        assert isinstance(how, SampledTokens) and batch.teacher_logp is not None
        result = sampled_distillation_loss(
            how,
            predictions.logp,
            batch.teacher_logp,
            batch.behave_logp,
            batch.loss_mask,
            batch.weights,
            num_tokens=num_tokens,
        )
        return _weighted(result, teacher.weight)

    def compared(
        predictions: Predictions, batch: DeviceBatch, forward: Forward, num_tokens: Array
    ) -> PolicyLoss:
        how = teacher.distillation
        assert isinstance(how, JensenShannon | CrossTokenizer) and vocabulary is not None
        targets, head = batch.teacher_targets, predictions.head
        assert targets is not None and head is not None
        logp, scale = predictions.logp, jnp.zeros_like(predictions.logp)
        if isinstance(how, CrossTokenizer):
            scale = earlier_logprobs(logp, targets.remaining)
        divergences = token_divergences(
            predictions.hidden,
            head,
            targets,
            scale,
            partial(span_divergence, how, vocabulary),
            temperature=forward.temperature,
            chunk_tokens=forward.chunk_tokens,
        )
        if isinstance(how, JensenShannon):
            ratio = jnp.exp(jax.lax.stop_gradient(logp) - batch.behave_logp)
            divergences *= jnp.minimum(ratio, how.max_ratio)
        total = jnp.sum(targets.weight * divergences)
        count = jnp.sum(batch.loss_mask, dtype=total.dtype)
        result = mean_loss({"loss": total, "teacher_divergence": total}, count, num_tokens)
        return _weighted(result, teacher.weight)

    match teacher.distillation:
        case SampledTokens():
            return sampled
        case JensenShannon() | CrossTokenizer():
            return compared
    return None


def _weighted(result: PolicyLoss, weight: float) -> PolicyLoss:
    total, count = result.metrics["loss"]
    return PolicyLoss(weight * result.loss, result.metrics | {"loss": Mean(weight * total, count)})


def _proximal_logp(
    loss: Loss, logp: Array, batch: DeviceBatch, proximal_is_current: Bool[Array, ""]
) -> Array:
    """Return the log-probs of the proximal policy, without gradient."""
    match proximal_of(loss):
        case "recompute":
            current = jax.lax.stop_gradient(logp)
            return jnp.where(proximal_is_current, current, batch.proximal_logp)
        case "interpolate":
            return interpolated_proximal(logp, batch.behave_logp, batch.age)
        case "behave":
            return batch.behave_logp


def m2po_mask(
    loss: M2PO,
    proximal_logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    mask: Bool[Array | np.ndarray, "*B T"],
) -> Bool[Array | np.ndarray, "*B T"]:
    """Return the loss tokens that M2PO keeps, given all tokens of a mini-batch."""
    log_weight = (proximal_logp - behave_logp).reshape(-1)
    return second_moment_mask(log_weight, mask.reshape(-1), loss.max_second_moment).reshape(
        mask.shape
    )
