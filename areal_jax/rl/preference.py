"""Objectives of pairs of answers, one chosen and one rejected. Axes: B rows, T tokens, P pairs of a
row, 2 chosen and rejected.

Segments 1 and 2 of a row are the chosen and the rejected answer of one pair, each with its prompt;
3 and 4 of the next.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from areal_jax.rl.config import DPO, IPO, BradleyTerry, Preference
from areal_jax.rl.losses import PolicyLoss, masked_sum, mean_loss, zero_outside


def preference_loss(
    config: Preference,
    values: Float[Array | np.ndarray, "B T"],
    reference: Float[Array | np.ndarray, "B T"],
    mask: Shaped[Array | np.ndarray, "B T"],
    segment_ids: Int[Array | np.ndarray, "B T"],
    *,
    num_pairs: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """The mean over pairs of what `config` makes of m, the chosen answer's reward less the rejected
    one's:

    DPO, BradleyTerry: -(1 - label_smoothing) log sigmoid(m) - label_smoothing log sigmoid(-m);
    IPO: (m - 1 / (2 beta))². With x = values - reference, the reward of an answer is beta sum_t x_t
    (DPO), the mean of x_t (IPO) or sum_t x_t.

    Args:
        values: log-probabilities under the policy being trained (DPO, IPO), or a reward model's
            scores.
        reference: log-probabilities under the policy that training began with; zeros for a reward
            model, which has none.
            Nothing flows through it.
        mask: true (or 1) on the tokens of the answers; for BradleyTerry, on the one token of each
            at which its score stands.
            What lies outside may be nan.
        num_pairs: None counts them; give the whole mini-batch's count where this is one of its
            micro-batches.
    """
    mask = jnp.asarray(mask).astype(bool)
    values = zero_outside(mask, values)
    gained = values - jax.lax.stop_gradient(zero_outside(mask, reference))
    num_tokens, sums = (
        _of_answers(mask.astype(values.dtype), segment_ids),
        _of_answers(gained, segment_ids),
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
                f"{type(config).__name__} is no objective of pairs; set loss to DPO, IPO or "
                "BradleyTerry"
            )
    chosen, rejected = rewards[..., 0], rewards[..., 1]
    margin = chosen - rejected
    if isinstance(config, IPO):
        each = (margin - 0.5 / config.beta) ** 2
    else:
        each = (1.0 - smoothing) * jax.nn.softplus(-margin) + smoothing * jax.nn.softplus(margin)

    is_pair = num_tokens[..., 0] > 0.0
    metrics = {
        "loss": masked_sum(is_pair, each),
        # A tie is neither right nor wrong.
        "accuracy": masked_sum(is_pair, 0.5 * (jnp.sign(margin) + 1.0)),
        "margin": masked_sum(is_pair, margin),
        "chosen_reward": masked_sum(is_pair, chosen),
        "rejected_reward": masked_sum(is_pair, rejected),
    }
    found = mean_loss(metrics, jnp.sum(is_pair, dtype=values.dtype), num_pairs)
    if isinstance(config, BradleyTerry):
        return found
    logp = jax.lax.stop_gradient(_of_answers(values, segment_ids))
    # Preferred is what is likelier than before by comparison: both answers may lose.
    of_answers = {
        name: (jnp.sum(logp[..., i]), jnp.sum(num_tokens[..., i]))
        for i, name in enumerate(("chosen_logp", "rejected_logp"))
    }
    return found._replace(metrics=found.metrics | of_answers)


def _of_answers(
    values: Float[Array, "B T"], segment_ids: Int[Array | np.ndarray, "B T"]
) -> Float[Array, "B P 2"]:
    """The sum over each segment, pair by pair; zeros where a row has fewer. An answer has a token,
    and so has its prompt."""
    num_pairs = values.shape[1] // 4

    def of_row(values: Float[Array, "T"], segments: Int[Array, "T"]) -> Float[Array, "P 2"]:
        return jax.ops.segment_sum(values, segments, num_segments=2 * num_pairs + 1)[1:].reshape(
            num_pairs, 2
        )

    return jax.vmap(of_row)(values, jnp.asarray(segment_ids))
