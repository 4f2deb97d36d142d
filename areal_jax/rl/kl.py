"""KL between policies, estimated from sampled tokens (http://joschu.net/blog/kl-approx.html).

Axes: B rows, T tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Shaped

from areal_jax.rl.config import Estimator, KLInLoss, KLInReward, Teacher
from areal_jax.rl.token_losses import PolicyLoss, mean_loss, zero_outside


def kl_estimate(
    estimator: Estimator, log_ratio: Float[Array | np.ndarray, "*B T"]
) -> Float[Array | np.ndarray, "*B T"]:
    """Estimate KL(policy || reference) per token from x = log(policy/reference).

    k1 = x: unbiased, of either sign. k2 = x²/2: biased, never negative. k3 = exp(-x) - 1 + x:
    unbiased, never negative. Tokens are sampled by the policy. Returns numpy for numpy and jax for
    jax arguments.
    """
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
    """Compute token rewards -coefficient · k(log behave - log reference), 0 outside the action
    mask.
    """
    log_ratio = np.where(action_mask, behave_logp.astype(np.float64) - reference_logp, 0.0)
    return -config.coefficient * np.asarray(kl_estimate(config.estimator, log_ratio))


def distilled_advantages(
    config: Teacher,
    advantages: Float32[np.ndarray, "T"],
    behave_logp: Float[np.ndarray, "T"],
    teacher_logp: Float[np.ndarray, "T"],
    action_mask: Bool[np.ndarray, "T"],
) -> Float32[np.ndarray, "T"]:
    """Compute reward_weight · advantage + weight · log(teacher/behave) for sampled tokens.

    The policy gradient with advantage log(teacher/behave) is minus the gradient of KL(policy ||
    teacher) of each token given its prefix (on-policy distillation: arXiv:2306.08543;
    https://thinkingmachines.ai/blog/on-policy-distillation). The effect of a token on the KL of
    later tokens is ignored.
    """
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
    """Compute coefficient/N sum_t weight_t k_t(log theta_t - log reference_t) (GRPO,
    arXiv:2402.03300, equations 3 and 4).

    Gradients flow through theta only. Values outside the mask may be nan.

    Args:
        config: coefficient and estimator.
        logp: log-probs of the policy being trained.
        reference_logp: log-probs of the reference policy.
        mask: true (or 1) where the token counts.
        weights: weight of every token, from `mean_weights`; None: 1.
        num_tokens: N. None: the mask's count; for a micro-batch, the whole mini-batch's count.
    """
    mask = jnp.asarray(mask).astype(bool)
    log_ratio = zero_outside(mask, logp) - jax.lax.stop_gradient(zero_outside(mask, reference_logp))
    token_loss = config.coefficient * jnp.asarray(kl_estimate(config.estimator, log_ratio))
    if weights is not None:
        token_loss *= zero_outside(mask, weights)
    # The metric is k3, unbiased and of low variance, whichever estimator the loss uses.
    sums = {
        "loss": jnp.sum(token_loss),
        "kl_reference": jnp.sum(jnp.asarray(kl_estimate("k3", log_ratio))),
    }
    return mean_loss(sums, jnp.sum(mask, dtype=token_loss.dtype), num_tokens)
