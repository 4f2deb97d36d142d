"""The optimizer updates of a trainer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from areal_jax.errors import CorruptedState
from areal_jax.metrics.meters import Mean, Meters
from areal_jax.parallel.sharding import fetch
from areal_jax.rl.config import M2POClip
from areal_jax.rl.importance_weights import second_moment_bound
from areal_jax.rl.off_policy import OffPolicyCounts, describe_off_policy
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.pipeline import LearnerBatch
from areal_jax.trainer.step import Learner


@dataclass(frozen=True, eq=False)
class Update:
    """One optimizer update of a learner."""

    learner: Learner
    batch: LearnerBatch
    is_critic: bool = False


def apply_updates(updates: Sequence[Sequence[Update]], version: int) -> dict[str, float | Mean]:
    """Apply the updates of all mini-batches, in order. Those without a loss token are skipped.

    Args:
        updates: By mini-batch, the updates of its learners.
        version: Version of the parameters before the step.

    Returns:
        Metrics of the updates; those of the critic begin with `value_`.

    Raises:
        FloatingPointError: Loss or gradient is not finite. The update is not applied.
        CorruptedState: The same, and the parameters are between two versions or predict no finite
            log-probs themselves.
    """
    meters, num_applied = Meters(), 0
    off_policy = list[OffPolicyCounts]()
    for number, of_mini_batch in enumerate(updates):
        for update in of_mini_batch:
            batch = update.batch
            if not batch.num_loss_tokens:
                continue
            try:
                (metrics, counts), digest = update.learner.update(
                    _with_clip_bound(update),
                    batch.num_loss_tokens,
                    proximal_is_current=batch.proximal_is_current,
                )
            except FloatingPointError as error:
                where = f"step {version}, update {number + 1} of {len(updates)}"
                raise _not_applied(update, where, version, num_applied, error) from None
            meters.update(metrics, "value_" if update.is_critic else "")
            off_policy += [counts] if counts is not None else []
            if not update.is_critic:
                meters.gauge("params_digest", digest)
            num_applied += 1
    described = (
        describe_off_policy(jax.tree.map(lambda *parts: sum(parts), *off_policy))
        if off_policy
        else {}
    )
    return meters.metrics() | described


def _with_clip_bound(update: Update) -> Sequence[DeviceBatch]:
    """Return the micro-batches, with the bound of the whole mini-batch if the objective has one."""
    learner, batches = update.learner, update.batch.micro_batches
    if "clip_bound" not in learner.columns:
        return batches
    assert isinstance(learner.loss, M2POClip)
    logp = [learner.logprobs(batch) for batch in batches]
    columns = [
        (theta, batch.behave_logp, batch.advantages, batch.loss_mask)
        for theta, batch in zip(logp, batches, strict=True)
    ]
    theta, behave, advantages, mask = (np.stack(each) for each in zip(*fetch(columns), strict=True))
    bound = second_moment_bound(
        (theta.astype(np.float64) - behave).reshape(-1),
        advantages.reshape(-1),
        mask.reshape(-1),
        learner.loss.max_second_moment,
    )
    bounds = learner.put_column(np.full(theta.shape, bound, np.float32))
    return [batch._replace(clip_bound=each) for batch, each in zip(batches, bounds, strict=True)]


def _not_applied(
    update: Update, where: str, version: int, num_applied: int, error: FloatingPointError
) -> FloatingPointError:
    """Return the error of an update that is not applied.

    A critic's values were finite before the step, so that its state is corrupted only if updates
    were applied.
    """
    is_corrupted = num_applied > 0 or not (update.is_critic or _is_finite(update))
    left = f"the last good version is {version}"
    if num_applied:
        left = (
            f"{num_applied} before it were, so that version {version} is gone and "
            f"{version + 1} is not complete"
        )
    elif is_corrupted:
        left = f"version {version} itself predicts no finite probabilities"
    if update.is_critic:
        what = f"the critic's {error}"
        advice = (
            "Lower trainer.critic.optimizer.learning_rate or trainer.critic.optimizer.max_grad_norm"
        )
    else:
        what = f"{error}"
        advice = (
            "Lower trainer.optimizer.learning_rate or trainer.optimizer.max_grad_norm, or set "
            "trainer.loss.importance_weighting=Masked with a trainer.loss.importance_weighting.cap"
        )
    return (CorruptedState if is_corrupted else FloatingPointError)(
        f"{where}: {what}. The update was not applied; {left}. {advice}"
    )


def _is_finite(update: Update) -> bool:
    """Whether the current policy gives every loss token a probability.

    If so, a loss that is not finite has other causes.
    """
    return all(
        bool(np.isfinite(logp[mask]).all())
        for logp, mask in (
            fetch((update.learner.logprobs(batch), batch.loss_mask))
            for batch in update.batch.micro_batches
        )
    )
