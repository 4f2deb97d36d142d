"""Means over tokens: the result type of all losses, supervised and value losses, masked sums.

Every function takes one row [T] or a batch [B, T]. Values outside the mask may be nan or inf: they
reach neither the loss, nor a gradient, nor a metric. Axes: B rows, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

from areal_jax.metrics.meters import Mean


class PolicyLoss(NamedTuple):
    """A loss and its metrics."""

    loss: Float[Array, ""]
    """Differentiable with respect to the log-probs of the policy being trained only."""
    metrics: dict[str, Mean]

    def plus(self, other: PolicyLoss) -> PolicyLoss:
        """Add a loss over the same tokens; the metric `loss` becomes the sum of both."""
        (total, count), (other_total, _) = self.metrics["loss"], other.metrics["loss"]
        return PolicyLoss(
            self.loss + other.loss,
            self.metrics | other.metrics | {"loss": Mean(total + other_total, count)},
        )


def sft_loss(
    logp: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Compute the mean negative log-likelihood of the tokens under the mask, -1/N sum_t logp_t.

    Args:
        logp: log-probs of the policy being trained.
        mask: true (or 1) where the token counts.
        num_tokens: N. None: the mask's count; for a micro-batch, the whole mini-batch's count.
    """
    mask = jnp.asarray(mask).astype(bool)
    logp = zero_outside(mask, logp)
    count = jnp.sum(mask, dtype=logp.dtype)
    return mean_loss({"loss": -jnp.sum(logp)}, count, num_tokens)


def positive_nll(
    coefficient: float,
    logp: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    weights: Float[Array | np.ndarray, "*B T"],
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Compute the negative log-likelihood of correct answers (VAPO, arXiv:2504.05118).

    L = -coefficient/N sum_t weight_t logp_t. With weight N/(tokens of correct answers) there and 0
    elsewhere it is the mean over the tokens of correct answers.

    Args:
        coefficient: factor of the loss.
        logp: log-probs of the policy being trained.
        mask: true (or 1) where the token counts.
        weights: weight of every token.
        num_tokens: N. None: the mask's count; for a micro-batch, the whole mini-batch's count.
    """
    mask = jnp.asarray(mask).astype(bool)
    total = -jnp.sum(zero_outside(mask, weights) * zero_outside(mask, logp))
    count = jnp.sum(mask, dtype=total.dtype)
    return mean_loss({"loss": coefficient * total, "positive_nll": total}, count, num_tokens)


def value_loss(
    values: Float[Array | np.ndarray, "*B T"],
    old_values: Float[Array | np.ndarray, "*B T"],
    returns: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    *,
    clip_eps: float | None = 0.5,
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Compute the critic's clipped loss.

    L = 1/2N sum_t max((V_t - R_t)², (clip(V_t, V_old,t - clip_eps, V_old,t + clip_eps) - R_t)²). A
    value that moved towards its return by more than clip_eps gets no gradient (the original code of
    PPO; arXiv:2006.05990, choice C13; AReaL).

    Args:
        values: the critic's values; only they are differentiable.
        old_values: values before the update.
        returns: targets.
        mask: true (or 1) where the token counts.
        clip_eps: clip range, in units of reward; None: no clip.
        num_tokens: N. None: the mask's count; for a micro-batch, the whole mini-batch's count.
    """
    mask = jnp.asarray(mask).astype(bool)
    values = zero_outside(mask, values)
    old_values, returns = (
        jax.lax.stop_gradient(zero_outside(mask, constant)) for constant in (old_values, returns)
    )
    squared = (values - returns) ** 2
    is_clipped = jnp.zeros_like(mask)
    if clip_eps is not None:
        clipped = (jnp.clip(values, old_values - clip_eps, old_values + clip_eps) - returns) ** 2
        is_clipped, squared = clipped > squared, jnp.maximum(squared, clipped)
    count = jnp.sum(mask, dtype=values.dtype)
    return mean_loss(
        {"loss": 0.5 * jnp.sum(squared), "clip_fraction": masked_sum(mask, is_clipped)},
        count,
        num_tokens,
    )


def mean_loss(
    sums: dict[str, Float[Array, ""]],
    count: Float[Array, ""],
    num: Float[Array | np.ndarray, ""] | float | None,
) -> PolicyLoss:
    """Divide the sum `loss` by `num`, and return all sums as metrics of weight `count`.

    Args:
        sums: metrics' sums by name, `loss` among them.
        count: number of tokens or pairs under the mask.
        num: divisor of the loss; None: `count`.
    """
    divisor = jnp.maximum(count if num is None else jnp.asarray(num, count.dtype), 1.0)
    return PolicyLoss(
        sums["loss"] / divisor,
        {name: Mean(jax.lax.stop_gradient(total), count) for name, total in sums.items()},
    )


def zero_outside(
    mask: Bool[Array, "*B T"], values: Float[Array | np.ndarray, "*B T"]
) -> Float[Array, "*B T"]:
    """Return `values` in float32 or wider, with zeros where the mask is false."""
    values = jnp.asarray(values)
    return jnp.where(mask, values.astype(jnp.promote_types(values.dtype, jnp.float32)), 0.0)


def masked_sum(mask: Bool[Array, "*B T"], values: Shaped[Array, "*B T"]) -> Float[Array, ""]:
    """Sum `values` where the mask is true, in float32 or wider."""
    return jnp.sum(jnp.where(mask, values, 0).astype(jnp.promote_types(values.dtype, jnp.float32)))
