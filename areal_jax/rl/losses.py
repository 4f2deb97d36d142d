"""Policy objectives: log-probabilities and advantages in, one loss and its metrics out. Axes: B rows, T tokens.

Every function takes one row [T] or a batch [B, T]. What lies under the mask may be nan or inf: it reaches neither the loss,
nor a gradient, nor a metric. Metrics are (sum, weight) pairs, so that those of several micro-batches add up; divide last.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from areal_jax.rl.config import PPO, DecoupledPPO, Loss

Meter: TypeAlias = tuple[Float[Array, ""], Float[Array, ""]]
"""A sum and the weight it is to be divided by."""


class PolicyLoss(NamedTuple):
    loss: Float[Array, ""]
    """Differentiable with respect to the log-probabilities of the policy being trained, and nothing else."""
    metrics: dict[str, Meter]


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
    """Decoupled PPO (AReaL, arXiv:2505.24298, equation 5): trust the neighbourhood of `proximal`, correct for `behave`.

    L = -1/N sum_t w_t min(u_t A_t, clip(u_t, 1-clip_eps, 1+clip_eps_high) A_t),  w = proximal/behave,  u = theta/proximal;
    gradients flow through theta alone. With proximal = behave this is PPO; with all three equal its gradient is the policy
    gradient.

    Args:
        mask: true (or 1) where the token counts.
        clip_eps_high: None takes `clip_eps`.
        dual_clip: c > 1 bounds the loss of a token with negative advantage by c|A| (arXiv:1912.09729); None bounds nothing.
        behave_weight_cap: None leaves w as it is. Above the cap, "mask" takes the token out of the sum and "clamp" sets w to
            the cap; N stays.
        num_tokens: N. None counts the mask; give the whole mini-batch's count where this is one of its micro-batches.
    """
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip must be above 1, came {dual_clip}; set loss.dual_clip to c > 1, or to none for no bound")
    if behave_weight_mode not in ("mask", "clamp"):
        raise ValueError(f"behave_weight_mode must be 'mask' or 'clamp', came {behave_weight_mode!r}")
    mask = jnp.asarray(mask).astype(bool)
    logp, advantages = _zero_outside(mask, logp), _zero_outside(mask, advantages)
    proximal_logp = jax.lax.stop_gradient(_zero_outside(mask, proximal_logp))
    behave_logp = jax.lax.stop_gradient(_zero_outside(mask, behave_logp))

    weight = jnp.exp(proximal_logp - behave_logp)
    capped = jnp.zeros_like(mask)
    if behave_weight_cap is not None:
        capped = weight > behave_weight_cap
        weight = jnp.where(capped, behave_weight_cap if behave_weight_mode == "clamp" else 0.0, weight)

    # min(uA, clip(u)A) is A times u bounded on one side: from above where A > 0, from below where A < 0; the dual clip adds
    # the bound from above where A < 0. A bounded u is a constant, and exp must not see its log-ratio: in the backward pass
    # the zero that selects it would meet the inf of an overflowing exp, and 0 * inf is nan.
    log_ratio = jnp.where(weight > 0.0, logp - proximal_logp, 0.0)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    lower = jnp.where(advantages < 0.0, 1.0 - clip_eps, 0.0)
    upper = 1.0 + (clip_eps if clip_eps_high is None else clip_eps_high)
    upper = jnp.where(advantages < 0.0, jnp.inf if dual_clip is None else dual_clip, upper)
    too_low, too_high = ratio < lower, ratio > upper
    bounded = too_low | too_high
    surrogate = jnp.where(bounded, jnp.clip(ratio, lower, upper), jnp.exp(jnp.where(bounded, 0.0, log_ratio)))
    token_loss = jnp.where(mask, -weight * surrogate * advantages, 0.0)

    count = jnp.sum(mask, dtype=token_loss.dtype)
    log_ratio_to_behave = jax.lax.stop_gradient(logp) - behave_logp
    metrics = {
        "loss": jnp.sum(token_loss),
        "ratio": _sum(mask, ratio),
        "clip_fraction": _sum(mask, jnp.where(advantages > 0.0, too_high, too_low)),
        "dual_clip_fraction": _sum(mask, too_high & (advantages < 0.0)),
        "behave_weight": _sum(mask, weight),
        # Mean of squares: with the mean it gives the effective sample size, and it shows outliers as a maximum would.
        "behave_weight_squared": _sum(mask, weight**2),
        "behave_weight_capped_fraction": _sum(mask, capped),
        # exp(x) - 1 - x with x = log(theta/behave): never negative, and low in variance (http://joschu.net/blog/kl-approx.html).
        "kl_behave_theta": _sum(mask, jnp.expm1(log_ratio_to_behave) - log_ratio_to_behave),
        "kl_proximal_theta": _sum(mask, jnp.expm1(log_ratio) - log_ratio),
    }
    divisor = jnp.maximum(count if num_tokens is None else jnp.asarray(num_tokens, token_loss.dtype), 1.0)
    return PolicyLoss(
        jnp.sum(token_loss) / divisor, {name: (jax.lax.stop_gradient(total), count) for name, total in metrics.items()}
    )


def ppo_loss(
    logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    advantages: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    *,
    clip_eps: float = 0.2,
    clip_eps_high: float | None = None,
    dual_clip: float | None = None,
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """PPO (arXiv:1707.06347, equation 7): the clip is centred on the policy that sampled, which is decoupled PPO's
    special case proximal = behave."""
    return decoupled_ppo_loss(
        logp,
        behave_logp,
        behave_logp,
        advantages,
        mask,
        clip_eps=clip_eps,
        clip_eps_high=clip_eps_high,
        dual_clip=dual_clip,
        num_tokens=num_tokens,
    )


def policy_loss(
    config: Loss,
    logp: Float[Array | np.ndarray, "*B T"],
    proximal_logp: Float[Array | np.ndarray, "*B T"],
    behave_logp: Float[Array | np.ndarray, "*B T"],
    advantages: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """The objective that `config` names. PPO does not read `proximal_logp`."""
    match config:
        case DecoupledPPO():
            return decoupled_ppo_loss(
                logp,
                proximal_logp,
                behave_logp,
                advantages,
                mask,
                clip_eps=config.clip_eps,
                clip_eps_high=config.clip_eps_high,
                dual_clip=config.dual_clip,
                behave_weight_cap=config.behave_weight_cap,
                behave_weight_mode=config.behave_weight_mode,
                num_tokens=num_tokens,
            )
        case PPO():
            return ppo_loss(
                logp,
                behave_logp,
                advantages,
                mask,
                clip_eps=config.clip_eps,
                clip_eps_high=config.clip_eps_high,
                dual_clip=config.dual_clip,
                num_tokens=num_tokens,
            )
    raise TypeError(f"loss must be DecoupledPPO or PPO, came {type(config).__name__}; set trainer.loss to one of them")


def sft_loss(
    logp: Float[Array | np.ndarray, "*B T"],
    mask: Shaped[Array | np.ndarray, "*B T"],
    num_tokens: Float[Array | np.ndarray, ""] | float | None = None,
) -> PolicyLoss:
    """Mean negative log-likelihood of the tokens under the mask: -1/N sum_t logp_t."""
    mask = jnp.asarray(mask).astype(bool)
    logp = _zero_outside(mask, logp)
    count = jnp.sum(mask, dtype=logp.dtype)
    divisor = jnp.maximum(count if num_tokens is None else jnp.asarray(num_tokens, logp.dtype), 1.0)
    return PolicyLoss(-jnp.sum(logp) / divisor, {"loss": (jax.lax.stop_gradient(-jnp.sum(logp)), count)})


def _zero_outside(mask: Shaped[Array, "*B T"], values: Float[Array | np.ndarray, "*B T"]) -> Float[Array, "*B T"]:
    """`values` in float32 or wider, with zeros where the mask is false."""
    values = jnp.asarray(values)
    return jnp.where(mask, values.astype(jnp.promote_types(values.dtype, jnp.float32)), 0.0)


def _sum(mask: Shaped[Array, "*B T"], values: Shaped[Array, "*B T"]) -> Float[Array, ""]:
    return jnp.sum(jnp.where(mask, values, 0).astype(jnp.promote_types(values.dtype, jnp.float32)))
