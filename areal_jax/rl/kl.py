"""How far one policy is from another, estimated from sampled tokens, and what follows from it
(http://joschu.net/blog/kl-approx.html).

Axes: B rows, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Shaped

from areal_jax.rl.config import Estimator, KLInLoss, KLInReward, Teacher
from areal_jax.rl.losses import PolicyLoss, mean_loss, zero_outside


def kl_estimate(
    estimator: Estimator, log_ratio: Float[Array | np.ndarray, "*B T"]
) -> Float[Array | np.ndarray, "*B T"]:
    """Per token, an estimate of KL(policy || reference) from x = log(policy/reference) of a token
    that the policy drew:

    k1 = x, unbiased, of either sign; k2 = x²/2, never negative, biased; k3 = exp(-x) - 1 + x,
    unbiased and never negative. numpy in, numpy out; jax in, jax out."""
    match estimator:
        case "k1":
            return log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            return log_ratio.__array_namespace__().expm1(-log_ratio) + log_ratio


def kl_penalty(
    config: KLInReward,
    behave_logp: Float[np.ndarray, "T"],
    reference_logp: Float[np.ndarray, "T"],
    action_mask: Bool[np.ndarray, "T"],
) -> Float64[np.ndarray, "T"]:
    """What each token of a sample earns for straying from the reference: -coefficient · k(log
    behave - log reference), and 0 where the policy drew none."""
    log_ratio = np.where(action_mask, behave_logp.astype(np.float64) - reference_logp, 0.0)
    return -config.coefficient * np.asarray(kl_estimate(config.estimator, log_ratio))


def distilled_advantages(
    config: Teacher,
    advantages: Float32[np.ndarray, "T"],
    behave_logp: Float[np.ndarray, "T"],
    teacher_logp: Float[np.ndarray, "T"],
    action_mask: Bool[np.ndarray, "T"],
) -> Float32[np.ndarray, "T"]:
    """reward_weight · advantage + weight · log(teacher/behave) for every token that the policy
    drew.

    The policy gradient with log(teacher/behave) for an advantage is minus the gradient of KL(policy
    || teacher) of each token given those before it (on-policy distillation: arXiv:2306.08543;
    https://thinkingmachines.ai/blog/on-policy-distillation). What a token does to the KL of later
    ones is left out."""
    gain = np.where(action_mask, teacher_logp - behave_logp.astype(np.float64), 0.0)
    return (config.reward_weight * advantages + config.weight * gain).astype(np.float32)


def kl_loss(
    config: KLInLoss,
    logp: Float[Array | np.ndarray, "*B T"],
    reference_logp: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    weights: Float[Array | np.ndarray, "*B T"] | None = None,
    *,
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """coefficient/N sum_t weight_t k_t(log theta_t - log reference_t) (GRPO, arXiv:2402.03300,
    equations 3 and 4).

    Gradients flow through theta alone. What lies under the mask may be nan.

    Args:
        weights: of every token in the mean that the loss is; None: 1.
        num_tokens: N. None counts the mask; give the whole mini-batch's count where this is one of
            its micro-batches.
    """
    mask = jnp.asarray(mask).astype(bool)
    log_ratio = zero_outside(mask, logp) - jax.lax.stop_gradient(zero_outside(mask, reference_logp))
    token_loss = config.coefficient * jnp.asarray(kl_estimate(config.estimator, log_ratio))
    if weights is not None:
        token_loss *= zero_outside(mask, weights)
    # Of all estimates k3 tells most, whichever the loss is made of.
    sums = {
        "loss": jnp.sum(token_loss),
        "kl_reference": jnp.sum(jnp.asarray(kl_estimate("k3", log_ratio))),
    }
    return mean_loss(sums, jnp.sum(mask, dtype=token_loss.dtype), num_tokens)
