"""Policy objectives: log-probs and advantages in, loss and metrics out.

Every function takes one row [T] or a batch [B, T]. Values outside the mask may be nan or inf: they
reach neither the loss, nor a gradient, nor a metric. Metrics are `Mean`s, so that those of several
micro-batches add up. Axes: B rows, T tokens.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from areal_jax.rl.config import (
    CISPO,
    DPPO,
    GMPO,
    GSPO,
    M2PO,
    PPO,
    SAPO,
    VESPO,
    BehaveLoss,
    CustomLoss,
    DecoupledPPO,
    ImportanceWeighting,
    Loss,
    M2POClip,
    Masked,
    OffPolicyReinforce,
    Reinforce,
    Truncated,
    Weighted,
)
from areal_jax.rl.importance_weights import (
    behave_weight,
    binary_kl,
    rejected_tokens,
    second_moment_bound,
    sequence_mean,
    sequence_sum,
)
from areal_jax.rl.token_losses import PolicyLoss, masked_sum, mean_loss, zero_outside


def decoupled_ppo_loss(
    logp: Float[Array | np.ndarray, "*B T"],
    proximal_logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    advantages: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    behave_weight_cap: float | None = None,
    behave_weight_mode: Literal["mask", "clamp"] = "mask",
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Compute the decoupled PPO loss (AReaL, arXiv:2505.24298, equation 5).

    L = -1/N sum_t w_t min(u_t A_t, clip(u_t, 1-clip_eps, 1+clip_eps_high) A_t), with
    w = proximal/behave and u = theta/proximal. Gradients flow through theta only. With proximal =
    behave this is PPO; with all three equal its gradient is the policy gradient.

    Args:
        logp: log-probs of the policy being trained (theta).
        proximal_logp: log-probs of the proximal policy.
        behave_logp: log-probs of the behaviour policy.
        advantages: advantage of every token.
        mask: true (or 1) where the token counts.
        clip_eps: lower clip range.
        clip_eps_high: upper clip range; None: `clip_eps`.
        dual_clip: c > 1 bounds the loss of a token with negative advantage by c|A|
            (arXiv:1912.09729); None: no bound.
        behave_weight_cap: largest w; None: no cap.
        behave_weight_mode: above the cap, "mask" removes the token from the sum and "clamp" sets w
            to the cap; N stays.
        num_tokens: N. None: the mask's count; for a micro-batch, the whole mini-batch's count.
    """
    if behave_weight_mode not in ("mask", "clamp"):
        raise ValueError(
            f"expected behave_weight_mode 'mask' or 'clamp', found {behave_weight_mode!r}"
        )
    importance_weighting: ImportanceWeighting = Weighted()
    if behave_weight_cap is not None:
        importance_weighting = (Masked if behave_weight_mode == "mask" else Truncated)(
            cap=behave_weight_cap
        )
    config = DecoupledPPO(
        clip_eps=clip_eps,
        clip_eps_high=clip_eps_high,
        dual_clip=dual_clip,
        importance_weighting=importance_weighting,
    )
    return policy_loss(
        config, logp, proximal_logp, behave_logp, advantages, mask, num_tokens=num_tokens
    )


def policy_loss(
    config: Loss,
    logp: Float[Array | np.ndarray, "*B T"],
    proximal_logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    advantages: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    segment_ids: Int[Array | np.ndarray, "*B T"] | None = None,
    *,
    clip_bound: Float[Array | np.ndarray, "*B T"] | None = None,
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Compute the objective that `config` selects.

    L = -1/N sum_t w_t f(u_t, A_t), with w the importance weight proximal/behave as configured (0
    where a token is rejected) and u = theta/proximal. A `BehaveLoss` does not read
    `proximal_logp`: its proximal policy is behave.

    The function has more than 60 lines because it passes each objective its own settings.

    Args:
        config: the objective.
        logp: log-probs of the policy being trained (theta).
        proximal_logp: log-probs of the proximal policy.
        behave_logp: log-probs of the behaviour policy.
        advantages: advantage of every token.
        mask: true (or 1) where the token counts.
        segment_ids: sequence of each token in its row, for sequence-level ratios and weights;
            None: each row is one sequence.
        clip_bound: M2POClip's bound on |log(theta/behave)|, equal for all tokens of a mini-batch;
            None: that of these tokens.
        num_tokens: N. None: the mask's count; for a micro-batch, the whole mini-batch's count.

    Raises:
        TypeError: the objective is unknown.
        ValueError: a cap or a dual clip is out of range.
    """
    mask = jnp.asarray(mask).astype(bool)
    logp, advantages = zero_outside(mask, logp), zero_outside(mask, advantages)
    behave_logp = jax.lax.stop_gradient(zero_outside(mask, behave_logp))
    match config:
        case OffPolicyReinforce():
            proximal_logp = jax.lax.stop_gradient(logp)
        case BehaveLoss():
            proximal_logp = behave_logp
        case _:
            proximal_logp = jax.lax.stop_gradient(zero_outside(mask, proximal_logp))

    weight, capped = behave_weight(config, proximal_logp - behave_logp, mask, segment_ids)
    rejected = rejected_tokens(
        config, logp, proximal_logp, behave_logp, advantages, mask, segment_ids
    )
    if rejected is not None:
        weight = jnp.where(rejected, 0.0, weight)
    # A masked token must not reach exp: in the backward pass the zero that masks it would meet inf.
    log_ratio = jnp.where(weight > 0.0, logp - proximal_logp, 0.0)
    match config:
        case DecoupledPPO() | PPO():
            far = None
            if isinstance(config, DecoupledPPO) and config.behave_clip is not None:
                far = config.behave_clip, proximal_logp - behave_logp
            gain, extra = _clipped(
                log_ratio, advantages, config.clip_eps, config.clip_eps_high, config.dual_clip, far
            )
        case M2POClip():
            if clip_bound is None:
                clip_bound = second_moment_bound(
                    jax.lax.stop_gradient(log_ratio).reshape(-1),
                    advantages.reshape(-1),
                    mask.reshape(-1),
                    config.max_second_moment,
                )
            bound = jnp.asarray(clip_bound)
            lower = jnp.minimum(jnp.exp(-bound), config.clip_min)
            upper = jnp.maximum(jnp.exp(bound), config.clip_max)
            gain, extra = _clipped(log_ratio, advantages, 1.0 - lower, upper - 1.0, None)
        case GSPO():
            # The mean includes tokens that their importance weight masks.
            log_ratio = sequence_mean(logp - proximal_logp, mask, segment_ids)
            advantages = sequence_mean(advantages, mask, segment_ids)
            gain, extra = _clipped(
                log_ratio, advantages, config.clip_eps, config.clip_eps_high, None
            )
        case GMPO():
            advantages = sequence_mean(advantages, mask, segment_ids)
            gain, extra = _geometric(logp - proximal_logp, advantages, mask, segment_ids, config)
        case DPPO():
            gain, extra = _within_divergence(logp, behave_logp, advantages, config)
        case VESPO():
            gain, extra = _smoothly_weighted(logp, log_ratio, advantages, mask, segment_ids, config)
        case SAPO():
            gain, extra = _gated(log_ratio, advantages, config), {}
        case CISPO():
            gain, extra = _weighted_by_clipped_ratio(logp, log_ratio, advantages, config)
        case M2PO() | Reinforce():
            gain, extra = jnp.exp(log_ratio) * advantages, {}
        case OffPolicyReinforce():
            gain, extra = advantages * logp, {}
        case CustomLoss():
            gain, extra = config.gain(jnp.exp(log_ratio), advantages, logp), {}
        case _:
            raise TypeError(
                f"expected a policy objective, found {type(config).__name__}; set trainer.loss to "
                "one of areal_jax.rl.config"
            )
    token_loss = jnp.where(mask, -weight * gain, 0.0)
    if rejected is not None:
        extra["rejected_fraction"] = rejected

    count = jnp.sum(mask, dtype=token_loss.dtype)
    log_ratio_to_behave = jax.lax.stop_gradient(logp) - behave_logp
    metrics = {
        "loss": jnp.sum(token_loss),
        "ratio": masked_sum(mask, jnp.exp(log_ratio)),
        "behave_weight": masked_sum(mask, weight),
        # With the mean, the mean of squares gives the effective sample size; like a maximum, it
        # shows outliers.
        "behave_weight_squared": masked_sum(mask, weight**2),
        "behave_weight_capped_fraction": masked_sum(mask, capped),
        # exp(x) - 1 - x with x = log(theta/behave): never negative, and low in variance
        # (http://joschu.net/blog/kl-approx.html).
        "kl_behave_theta": masked_sum(mask, jnp.expm1(log_ratio_to_behave) - log_ratio_to_behave),
        "kl_proximal_theta": masked_sum(mask, jnp.expm1(log_ratio) - log_ratio),
        **{name: masked_sum(mask, values) for name, values in extra.items()},
    }
    return mean_loss(metrics, count, num_tokens)


def _clipped(
    log_ratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    clip_eps: float | Array,
    clip_eps_high: float | Array | None,
    dual_clip: float | None,
    behave_clip: tuple[float, Float[Array, "*B T"]] | None = None,
) -> tuple[Float[Array, "*B T"], dict[str, Bool[Array, "*B T"]]]:
    """min(uA, clip(u, 1-clip_eps, 1+clip_eps_high) A), at least dual_clip · A where A < 0, and
    where u is clipped.

    Args:
        log_ratio: log u.
        advantages: A.
        clip_eps: lower clip range.
        clip_eps_high: upper clip range; None: `clip_eps`.
        dual_clip: c > 1, or None.
        behave_clip: bound c > 1 on theta/behave, and log(proximal/behave) of every token.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(
            f"expected dual_clip above 1, found {dual_clip}; set trainer.loss.dual_clip to c > 1, "
            "or to none for no bound"
        )
    # min(uA, clip(u)A) is A times u bounded on one side: from above where A > 0, from below where A
    # < 0; the dual clip adds the bound from above where A < 0. A bounded u is a constant, and exp
    # must not see its log-ratio: in the backward pass the zero that selects it would meet the inf
    # of an overflowing exp, and 0 * inf is nan.
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    lower = jnp.where(advantages < 0.0, 1.0 - clip_eps, 0.0)
    upper = 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high)
    if behave_clip is not None:
        bound, log_weight = behave_clip
        lower = jnp.where(advantages < 0.0, jnp.maximum(lower, jnp.exp(-log_weight) / bound), lower)
        upper = jnp.minimum(upper, bound * jnp.exp(-log_weight))
    upper = jnp.where(advantages < 0.0, jnp.inf if dual_clip is None else dual_clip, upper)
    too_low, too_high = ratio < lower, ratio > upper
    bounded = too_low | too_high
    clipped = jnp.where(
        bounded, jnp.clip(ratio, lower, upper), jnp.exp(jnp.where(bounded, 0.0, log_ratio))
    )
    return clipped * advantages, {
        "clip_fraction": jnp.where(advantages > 0.0, too_high, too_low),
        "dual_clip_fraction": too_high & (advantages < 0.0),
    }


def _geometric(
    log_ratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    segment_ids: Int[Array | np.ndarray, "*B T"] | None,
    config: GMPO,
) -> tuple[Float[Array, "*B T"], dict[str, Bool[Array, "*B T"]]]:
    """exp(mean of the bounded log u over the sequence) A (GMPO, arXiv:2507.20673)."""
    bounded = jnp.where(
        advantages > 0.0,
        jnp.minimum(log_ratio, config.clip),
        jnp.maximum(log_ratio, -config.clip),
    )
    ratio = jnp.exp(sequence_mean(bounded, mask, segment_ids))
    return ratio * advantages, {"clip_fraction": bounded != log_ratio}


def _within_divergence(
    logp: Float[Array, "*B T"],
    behave_logp: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    config: DPPO,
) -> tuple[Float[Array, "*B T"], dict[str, Bool[Array, "*B T"]]]:
    """keep r A - log_ratio_penalty log(r)² (DPPO, arXiv:2602.04879)."""
    log_ratio, held = logp - behave_logp, jax.lax.stop_gradient(logp)
    moved = jnp.exp(held) - jnp.exp(behave_logp)
    distance = jnp.abs(moved) if config.divergence == "tv" else binary_kl(behave_logp, held)
    dropped = (distance > config.threshold) & (moved * advantages > 0.0)
    # A dropped token must not reach exp, as in `_clipped`.
    ratio = jnp.where(dropped, 0.0, jnp.exp(jnp.where(dropped, 0.0, log_ratio)))
    gain = ratio * advantages - config.log_ratio_penalty * log_ratio**2
    return gain, {"clip_fraction": dropped}


def _smoothly_weighted(
    logp: Float[Array, "*B T"],
    log_ratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    segment_ids: Int[Array | np.ndarray, "*B T"] | None,
    config: VESPO,
) -> tuple[Float[Array, "*B T"], dict[str, Bool[Array, "*B T"]]]:
    """phi(W) A log theta with phi(W) = W^k exp(lam (1 - W)) (VESPO, arXiv:2602.10693)."""
    log_product = jax.lax.stop_gradient(sequence_sum(log_ratio, mask, segment_ids))
    k = jnp.where(advantages < 0.0, config.k_negative, config.k_positive)
    lam = jnp.where(advantages < 0.0, config.lam_negative, config.lam_positive)
    # From W = e^20 on phi is 0 in float32; beyond, inf - inf would be nan.
    log_product = jnp.minimum(log_product, 20.0)
    return jnp.exp(k * log_product - lam * jnp.expm1(log_product)) * advantages * logp, {}


def _gated(
    log_ratio: Float[Array, "*B T"], advantages: Float[Array, "*B T"], config: SAPO
) -> Float[Array, "*B T"]:
    """(4/tau) sigmoid(tau (u - 1)) A (SAPO, arXiv:2511.20347, equation 6): its slope at u = 1 is A
    for every tau.
    """
    tau = jnp.where(advantages > 0.0, config.temperature_positive, config.temperature_negative)
    # From ratio 64 on the gate is constant in float32; beyond, exp must not overflow.
    ratio = jnp.exp(jnp.minimum(log_ratio, math.log(64.0)))
    return 4.0 / tau * jax.nn.sigmoid(tau * (ratio - 1.0)) * advantages


def _weighted_by_clipped_ratio(
    logp: Float[Array, "*B T"],
    log_ratio: Float[Array, "*B T"],
    advantages: Float[Array, "*B T"],
    config: CISPO,
) -> tuple[Float[Array, "*B T"], dict[str, Bool[Array, "*B T"]]]:
    """clip(u) A log theta with the clipped ratio as a constant: every token keeps its gradient."""
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    lower = 0.0 if config.clip_eps_low is None else 1.0 - config.clip_eps_low
    clipped = jnp.clip(ratio, lower, 1.0 + config.clip_eps_high)
    return clipped * advantages * logp, {"clip_fraction": clipped != ratio}
