"""Tinker's loss functions, as sums over tokens of the project's objectives.

https://tinker-docs.thinkingmachines.ai/losses. Axes: B rows, T tokens of a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from areal_jax.errors import InvalidRequest
from areal_jax.rl.config import (
    CISPO,
    PPO,
    KLInLoss,
    Loss,
    OffPolicyReinforce,
    Reinforce,
    Unweighted,
)
from areal_jax.rl.importance_weights import sequence_mean
from areal_jax.rl.kl import kl_loss
from areal_jax.rl.losses import policy_loss
from areal_jax.rl.token_losses import positive_nll

_DEFAULTS: Mapping[str, Mapping[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    # One-sided, as in the paper.
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    # As in the paper.
    "gspo": {"clip_low_threshold": 1.0 - 3e-4, "clip_high_threshold": 1.0 + 4e-4},
}
"""Settings of each loss function with their defaults. Thresholds are bounds of the ratio."""


class SummedLoss(NamedTuple):
    """A loss function with its settings; hashable, so that programs are compiled by it."""

    name: str
    config: tuple[tuple[str, float], ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the batch that it reads."""
        match self.name:
            case "cross_entropy":
                return ("weights",)
            case "gspo":
                return "logprobs", "advantages", "sequence_ratio_mask"
        return "logprobs", "advantages"


def read_loss(name: str, config: Mapping[str, float | str]) -> SummedLoss:
    """Read the loss function of a request.

    Raises:
        InvalidRequest: it is unknown, or a setting is unknown or out of bounds.
    """
    if name == "stable_reinforce":
        raise InvalidRequest(
            "loss_fn='stable_reinforce' is not supported: its objective is not published; set "
            f"loss_fn to one of {', '.join(_DEFAULTS)}"
        )
    if name not in _DEFAULTS:
        raise InvalidRequest(
            f"loss_fn={name[:100]!r}: expected one of {', '.join(_DEFAULTS)}; compute others on "
            "the client with forward_backward_custom"
        )
    defaults = _DEFAULTS[name]
    if unknown := sorted(set(config) - set(defaults)):
        raise InvalidRequest(
            f"loss_fn_config of {name}: expected {', '.join(defaults) or 'no settings'}, found "
            f"{', '.join(each[:100] for each in unknown)}"
        )
    values = dict(defaults)
    for key, value in config.items():
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise InvalidRequest(
                f"loss_fn_config of {name}: expected {key} to be a number of at least 0, found "
                f"{str(value)[:100]!r}"
            )
        values[key] = value
    low, high = values.get("clip_low_threshold", 0.0), values.get("clip_high_threshold", 2.0)
    if not low < 1.0 < high:
        raise InvalidRequest(
            f"loss_fn_config of {name}: expected clip_low_threshold < 1 < clip_high_threshold, "
            f"found {low:g} and {high:g}"
        )
    return SummedLoss(name, tuple(sorted(values.items())))


def summed_loss(
    loss: SummedLoss,
    logp: Float[Array, "B T"],
    columns: Mapping[str, Float[Array, "B T"]],
    mask: Bool[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Compute the sum of a loss function over tokens.

    cross_entropy: -w log theta. importance_sampling: -u A, with u = theta/sampler. ppo: -min(u A,
    clip(u) A). cispo: -clip(u) A log theta, with the ratio as a constant. dro: -A log theta +
    beta/2 log(u)², over all tokens, also those of the prompt, as Tinker defines it. gspo: as ppo,
    where u has the value of the geometric mean over the tokens of `sequence_ratio_mask`, and the
    gradient of the token's own ratio (GSPO-token, arXiv:2507.18071, equation 13).

    Args:
        loss: the loss function.
        logp: log-probs of the targets (theta).
        columns: `loss.columns`.
        mask: true on targets.
        segment_ids: sequence of each token in its row.
    """
    if loss.name == "cross_entropy":
        weights = columns["weights"]
        # Tokens without weight may have any log-prob.
        return positive_nll(1.0, logp, mask & (weights != 0.0), weights, 1.0).loss
    values, behave_logp = dict(loss.config), columns["logprobs"]
    advantages = columns["advantages"]
    counted = mask if loss.name == "dro" else mask & (advantages != 0.0)
    proximal_logp = behave_logp
    if loss.name == "gspo":
        constant, in_ratio = jax.lax.stop_gradient(logp), columns["sequence_ratio_mask"] != 0.0
        mean = sequence_mean(constant - behave_logp, mask & in_ratio, segment_ids)
        proximal_logp = jnp.where(counted, constant - mean, 0.0)
    total = policy_loss(
        _objective(loss.name, values),
        logp,
        proximal_logp,
        proximal_logp,
        advantages,
        counted,
        segment_ids,
        num_tokens=1.0,
    ).loss
    if loss.name == "dro":
        penalty = KLInLoss(coefficient=values["beta"], estimator="k2")
        total += kl_loss(penalty, logp, behave_logp, counted, num_tokens=1.0).loss
    return jnp.asarray(total)


def _objective(name: str, values: Mapping[str, float]) -> Loss:
    match name:
        case "importance_sampling":
            return Reinforce()
        case "dro":
            return OffPolicyReinforce(importance_weighting=Unweighted())
    low, high = values["clip_low_threshold"], values["clip_high_threshold"]
    if name in ("ppo", "gspo"):
        return PPO(clip_eps=1.0 - low, clip_eps_high=high - 1.0)
    return CISPO(clip_eps_low=None if low == 0.0 else 1.0 - low, clip_eps_high=high - 1.0)
