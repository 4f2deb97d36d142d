"""Importance weights of tokens that an older policy sampled, and the proximal policy between.

Axes: B rows, T tokens.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from areal_jax.rl.config import (
    ImportanceWeightedLoss,
    Loss,
    Masked,
    ProximalLoss,
    Rejection,
    Truncated,
    Unweighted,
    Weighted,
)


def interpolated_proximal(
    logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    age: Int[Array | np.ndarray, "*B T"],
) -> Float[Array, "*B T"]:
    """Interpolate the log-probs of the policy just before this trainer step (A-3PO).

    They are behave + a (theta - behave) with a = age / (age + 1), without gradient and without a
    forward pass.

    Args:
        logp: log-probs of the policy being trained (theta).
        behave_logp: log-probs of the behaviour policy.
        age: trainer steps from the version that sampled the token to the one before this step;
            theta is one version later.
    """
    behave_logp, logp = jnp.asarray(behave_logp), jax.lax.stop_gradient(jnp.asarray(logp))
    age = jnp.maximum(jnp.asarray(age), 0).astype(logp.dtype)
    return behave_logp + age / (age + 1.0) * (logp - behave_logp)


def second_moment_mask(
    log_weight: Float[Array | np.ndarray, "T"],
    mask: Bool[Array | np.ndarray, "T"],
    max_second_moment: float,
) -> Bool[Array | np.ndarray, "T"]:
    """Select the tokens that M2PO trains on (arXiv:2510.01161, section 4).

    Drops the tokens furthest from the policy that sampled them, until the mean of log_weight² over
    the rest is at most `max_second_moment`. Pass all tokens of a mini-batch at once, and divide the
    loss by the count of all of them: the result then does not depend on micro-batching.

    Args:
        log_weight: log(proximal/behave) of every token.
        mask: true where the token counts.
        max_second_moment: bound on the mean of log_weight².
    """
    # numpy on the host, or jax inside of a jitted program.
    xp = log_weight.__array_namespace__()
    squares = xp.where(mask, log_weight, xp.inf) ** 2
    order = xp.argsort(squares, stable=True)
    means = xp.cumsum(squares[order]) / xp.arange(1, len(order) + 1)
    # Sorted, the running means increase; those that include a token outside the mask are infinite.
    return (means <= max_second_moment)[xp.argsort(order)]


def second_moment_bound(
    log_ratio: Float[Array | np.ndarray, "T"],
    advantages: Float[Array | np.ndarray, "T"],
    mask: Bool[Array | np.ndarray, "T"],
    max_second_moment: float,
) -> Float[Array | np.ndarray, ""]:
    """Return the bound on |log_ratio| of M2PO's authors (arXiv:2510.01161): inf while the mean
    square of the harmful tokens is at most `max_second_moment`, else the largest of their absolute
    values with which it is, if the others are clipped to it; 0 if there is none.

    Pass all tokens of a mini-batch at once.

    Args:
        log_ratio: log(theta/behave) of every token.
        advantages: advantage of every token. A token is harmful if its ratio has moved in the
            advantage's direction.
        mask: true where the token counts.
        max_second_moment: bound on the mean square.
    """
    xp = log_ratio.__array_namespace__()
    harmful = mask & (log_ratio * advantages > 0.0)
    sizes = xp.sort(xp.where(harmful, xp.abs(log_ratio), xp.inf))
    num, places = xp.sum(harmful), xp.arange(sizes.shape[0])
    squares = xp.where(places < num, sizes, 0.0) ** 2
    # Of the k-th smallest: the smaller ones as they are, the larger ones clipped to it.
    clipped = xp.cumsum(squares) + (num - places - 1) * squares
    fits = (places < num) & (clipped <= max_second_moment * num)
    largest = xp.max(xp.where(fits, sizes, 0.0), initial=0.0)
    return xp.where(xp.sum(squares) <= max_second_moment * num, xp.inf, largest)


def behave_weight(
    config: Loss,
    log_weight: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    segment_ids: Int[Array | np.ndarray, "*B T"] | None,
) -> tuple[Float[Array, "*B T"], Bool[Array, "*B T"]]:
    """Importance weight of every token, and where a cap changed it."""
    importance_weighting = (
        config.importance_weighting if isinstance(config, ImportanceWeightedLoss) else Unweighted()
    )
    nowhere = jnp.zeros_like(mask)
    match importance_weighting:
        case Unweighted():
            return jnp.ones_like(log_weight), nowhere
        case Weighted() | Truncated() | Masked():
            match importance_weighting.level:
                case "sequence":
                    log_weight = sequence_sum(log_weight, mask, segment_ids)
                case "geometric":
                    log_weight = sequence_mean(log_weight, mask, segment_ids)
            weight = jnp.exp(log_weight)
            if isinstance(importance_weighting, Weighted):
                return weight, nowhere
            floor, cap = importance_weighting.floor, importance_weighting.cap
            capped = (weight < floor) | (weight > cap)
            if isinstance(importance_weighting, Truncated):
                return jnp.clip(weight, floor, cap), capped
            return jnp.where(capped, 0.0, weight), capped
    raise TypeError(
        f"expected an importance weighting, found {type(importance_weighting).__name__}; set "
        "trainer.loss.importance_weighting to one of areal_jax.rl.config"
    )


def rejected_tokens(
    config: Loss,
    logp: Float[Array, "*B T"],
    proximal_logp: Float[Array, "*B T"],
    behave_logp: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    segment_ids: Int[Array | np.ndarray, "*B T"] | None,
) -> Bool[Array, "*B T"] | None:
    """Find the tokens under the mask that `Rejection` removes; None where it has no bound."""
    if not isinstance(config, ImportanceWeightedLoss) or config.rejection == Rejection():
        return None
    bounds, logp = config.rejection, jax.lax.stop_gradient(logp)
    is_behave = isinstance(config, ProximalLoss) and config.proximal == "behave"
    policy_logp = logp if is_behave else proximal_logp
    log_weight = policy_logp - behave_logp
    rejected = jnp.zeros_like(mask)
    mean = sequence_mean(log_weight, mask, segment_ids)
    for level, low, high in (
        (mean, bounds.geometric_min, bounds.geometric_max),
        (sequence_sum(log_weight, mask, segment_ids), bounds.sequence_min, bounds.sequence_max),
    ):
        rejected |= level < (-math.inf if low is None else math.log(low))
        rejected |= level > (math.inf if high is None else math.log(high))
    if bounds.k3_max is not None:
        k3 = jnp.expm1(log_weight) - log_weight
        rejected |= sequence_mean(k3, mask, segment_ids) > bounds.k3_max
    if bounds.binary_kl_max is not None:
        forward, backward = (
            binary_kl(policy_logp, behave_logp),
            binary_kl(behave_logp, policy_logp),
        )
        rejected |= jnp.maximum(forward, backward) > bounds.binary_kl_max
    if bounds.negative_log_ratio_max is not None:
        distance = sequence_mean(behave_logp - logp, mask, segment_ids)
        rejected |= (distance > bounds.negative_log_ratio_max) & (
            sequence_mean(advantages, mask, segment_ids) < 0.0
        )
    return rejected & mask


def binary_kl(logp: Float[Array, "*B T"], other_logp: Float[Array, "*B T"]) -> Float[Array, "*B T"]:
    """KL of two coins that show a token with probabilities p = e^logp and q = e^other_logp:
    p log(p/q) + (1 - p) log((1-p)/(1-q)).
    """
    # Of a token with probability 1, rounding may make the log-prob positive.
    log_rest, other_log_rest = (
        jnp.log(-jnp.expm1(jnp.minimum(x, -1e-6))) for x in (logp, other_logp)
    )
    return jnp.exp(logp) * (logp - other_logp) + jnp.exp(log_rest) * (log_rest - other_log_rest)


def sequence_sum(
    values: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    segment_ids: Int[Array | np.ndarray, "*B T"] | None,
) -> Float[Array, "*B T"]:
    """For each token, the sum over its sequence's tokens under the mask."""
    values = jnp.where(mask, values, 0.0)
    if segment_ids is None:
        return jnp.broadcast_to(values.sum(-1, keepdims=True), values.shape)

    def sum_row(values: Float[Array, "T"], segments: Int[Array, "T"]) -> Float[Array, "T"]:
        return jax.ops.segment_sum(values, segments, num_segments=len(values) + 1)[segments]

    rows = (
        values.reshape(-1, values.shape[-1]),
        jnp.asarray(segment_ids).reshape(-1, values.shape[-1]),
    )
    return jax.vmap(sum_row)(*rows).reshape(values.shape)


def sequence_mean(
    values: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    segment_ids: Int[Array | np.ndarray, "*B T"] | None,
) -> Float[Array, "*B T"]:
    """For each token, the mean over its sequence's tokens under the mask; 0 if there are none."""
    total = sequence_sum(values, mask, segment_ids)
    return total / jnp.maximum(sequence_sum(mask.astype(total.dtype), mask, segment_ids), 1.0)
