"""Preference objectives on pairs of a chosen and a rejected answer.

Segments 1 and 2 of a row are the chosen and the rejected answer of its first pair, each with its
prompt; segments 3 and 4 are the next pair. Axes: B rows, T tokens, P pairs of a row, 2 chosen and
rejected.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from areal_jax.metrics.meters import Mean
from areal_jax.rl.config import DPO, IPO, BradleyTerry, Preference
from areal_jax.rl.token_losses import PolicyLoss, masked_sum, mean_loss, zero_outside


def preference_loss(
    config: Preference,
    values: Float[Array | np.ndarray, "B T"],
    reference: Float[Array | np.ndarray, "B T"],
    mask: Shaped[Array | np.ndarray, "B T"],
    segment_ids: Int[Array | np.ndarray, "B T"],
    *,
    num_pairs: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Compute the mean preference loss over pairs.

    The margin m is the chosen answer's reward minus the rejected one's. DPO and BradleyTerry:
    -(1 - label_smoothing) log sigmoid(m) - label_smoothing log sigmoid(-m). IPO:
    (m - 1 / (2 beta))². With x = values - reference, the reward of an answer is beta sum_t x_t
    (DPO), the mean of x_t (IPO) or sum_t x_t (BradleyTerry).

    Args:
        config: the objective.
        values: log-probs under the policy being trained (DPO, IPO), or a reward model's scores.
        reference: log-probs under the initial policy, without gradient; zeros for a reward model.
        mask: true (or 1) on the tokens of the answers; for BradleyTerry, on the one token per
            answer that holds its score. Values outside the mask may be nan.
        segment_ids: sequence of each token in its row; 0: padding.
        num_pairs: divisor. None: the number of pairs; for a micro-batch, the whole mini-batch's.

    Raises:
        TypeError: the objective is unknown.
    """
    mask = jnp.asarray(mask).astype(bool)
    values = zero_outside(mask, values)
    log_ratio = values - jax.lax.stop_gradient(zero_outside(mask, reference))
    num_tokens, sums = (
        _sum_by_answer(mask.astype(values.dtype), segment_ids),
        _sum_by_answer(log_ratio, segment_ids),
    )
    match config:
        case DPO():
            rewards, smoothing = config.beta * sums, config.label_smoothing
        case IPO():
            rewards, smoothing = sums / jnp.maximum(num_tokens, 1.0), 0.0
        case BradleyTerry():
            rewards, smoothing = sums, 0.0
        case _:
            raise TypeError(
                f"expected a preference objective, found {type(config).__name__}; set loss to DPO, "
                "IPO or BradleyTerry"
            )
    chosen, rejected = rewards[..., 0], rewards[..., 1]
    margin = chosen - rejected
    if isinstance(config, IPO):
        pair_loss = (margin - 0.5 / config.beta) ** 2
    else:
        pair_loss = (1.0 - smoothing) * jax.nn.softplus(-margin) + smoothing * jax.nn.softplus(
            margin
        )

    is_pair = num_tokens[..., 0] > 0.0
    metrics = {
        "loss": masked_sum(is_pair, pair_loss),
        # A tie counts half.
        "accuracy": masked_sum(is_pair, 0.5 * (jnp.sign(margin) + 1.0)),
        "margin": masked_sum(is_pair, margin),
        "chosen_reward": masked_sum(is_pair, chosen),
        "rejected_reward": masked_sum(is_pair, rejected),
    }
    mean = mean_loss(metrics, jnp.sum(is_pair, dtype=values.dtype), num_pairs)
    if isinstance(config, BradleyTerry):
        return mean
    logp = jax.lax.stop_gradient(_sum_by_answer(values, segment_ids))
    # The objective is relative: the log-probs of both answers may fall.
    logp_metrics = {
        name: Mean(jnp.sum(logp[..., i]), jnp.sum(num_tokens[..., i]))
        for i, name in enumerate(("chosen_logp", "rejected_logp"))
    }
    return mean._replace(metrics=mean.metrics | logp_metrics)


def _sum_by_answer(
    values: Float[Array, "B T"], segment_ids: Int[Array | np.ndarray, "B T"]
) -> Float[Array, "B P 2"]:
    """Sum over each segment, by pair; zeros for pairs that a row does not have.

    A row has at most T/4 pairs, as answer and prompt have at least one token each.
    """
    num_pairs = values.shape[1] // 4

    def sum_row(values: Float[Array, "T"], segments: Int[Array, "T"]) -> Float[Array, "P 2"]:
        return jax.ops.segment_sum(values, segments, num_segments=2 * num_pairs + 1)[1:].reshape(
            num_pairs, 2
        )

    return jax.vmap(sum_row)(values, jnp.asarray(segment_ids))
