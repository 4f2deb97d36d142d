"""Importance weights of tokens that an older policy sampled, and the proximal policy between.

Axes: B rows, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from areal_jax.rl.config import (
    ImportanceWeightedLoss,
    Loss,
    Masked,
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
            capped = weight > importance_weighting.cap
            return jnp.where(
                capped,
                importance_weighting.cap if isinstance(importance_weighting, Truncated) else 0.0,
                weight,
            ), capped
    raise TypeError(
        f"expected an importance weighting, found {type(importance_weighting).__name__}; set "
        "trainer.loss.importance_weighting to one of areal_jax.rl.config"
    )


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
