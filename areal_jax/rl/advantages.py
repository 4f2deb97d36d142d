"""How the rewards of a batch become an advantage for every token. numpy only.

Standard deviations are those of a sample (divided by n - 1), as in AReaL. Where all rewards are
equal a centred advantage is 0.
Axes: G samples of a group, T tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from areal_jax.rl.config import (
    GAE,
    Advantages,
    BatchNormalized,
    GroupNormalized,
    LeaveOneOut,
    Mean,
    Shaping,
    Unnormalized,
)


class Trajectory(NamedTuple):
    """A sample as advantages see it."""

    reward: float
    """Of the whole sample, shaped."""
    action_mask: Bool[np.ndarray, "T"]
    """The tokens that the policy drew; all others only stand between them."""
    loss_mask: Bool[np.ndarray, "T"]
    """Of those, the ones in the loss."""
    token_rewards: Float[np.ndarray, "T"] | None = None
    """What each token earns besides, 0 where the policy drew none; None: nothing."""
    values: Float[np.ndarray, "T"] | None = None
    """By a critic, of the state in which each token was sampled, which is the one before it; read
    where the policy drew one."""
    value_after: float = 0.0
    """By a critic, of the state behind the last token that the policy drew; 0 where the answer had
    come to its end."""


def compute_advantages(
    config: Advantages, groups: Sequence[Sequence[Trajectory]]
) -> list[list[Float32[np.ndarray, "_"]]]:
    """One advantage per token, by group and sample, in the order given. Groups may differ in size.

    Without a critic a sample's reward makes the same advantage on all its tokens; to it is added
    what they earn besides, from each token on, undiscounted."""
    match config:
        case GroupNormalized():
            return _spread(groups, _group_normalized(_rewards_by_group(groups), config))
        case LeaveOneOut():
            return _spread(
                groups, [_leave_one_out(rewards_G) for rewards_G in _rewards_by_group(groups)]
            )
        case BatchNormalized():
            return _batch_normalized(groups, config)
        case GAE():
            return _generalized(groups, config)
        case Unnormalized():
            return _spread(groups, _rewards_by_group(groups))
    raise TypeError(
        f"{type(config).__name__} says nothing of how rewards become advantages; set "
        "trainer.advantages to GroupNormalized, "
        "LeaveOneOut, BatchNormalized, Unnormalized or GAE"
    )


def reward_to_go(token_rewards: Float[np.ndarray, "T"]) -> Float64[np.ndarray, "T"]:
    """Of every token, the sum of its own reward and all later ones."""
    return np.cumsum(token_rewards[::-1], dtype=np.float64)[::-1]


def value_targets(
    config: GAE, groups: Sequence[Sequence[Trajectory]]
) -> list[list[Float32[np.ndarray, "_"]]]:
    """What the critic is to say of every token that the policy drew: its advantage, not normalised,
    and the value that it is an advantage over (the return of lambda). 0 of others."""
    return [
        [
            (
                generalized_advantages(config, trajectory)
                + np.where(trajectory.action_mask, _values(trajectory), 0.0)
            ).astype(np.float32)
            for trajectory in group
        ]
        for group in groups
    ]


def generalized_advantages(config: GAE, trajectory: Trajectory) -> Float64[np.ndarray, "T"]:
    """Advantage of every token that the policy drew, 0 of others (GAE, arXiv:1506.02438, equation
    16), not normalised.

    delta_i = r_i + gamma V_{i+1} - V_i,  A_i = delta_i + gamma lam A_{i+1},  i counting sampled
    tokens alone: prompt, feedback and what a tool said are no steps, and discount nothing. The
    sample's reward comes with its last one."""
    action_mask = trajectory.action_mask
    advantages, values = (
        np.zeros(action_mask.shape, np.float64),
        _values(trajectory)[action_mask].astype(np.float64),
    )
    if len(values):
        rewards = (
            np.zeros(values.shape)
            if trajectory.token_rewards is None
            else trajectory.token_rewards[action_mask].astype(np.float64)
        )
        rewards[-1] += trajectory.reward
        after = np.append(values[1:], trajectory.value_after)
        advantages[action_mask] = _discounted(
            rewards + config.gamma * after - values, config.gamma * config.lam
        )
    return advantages


def shape_rewards(
    config: Shaping,
    rewards_G: Float[np.ndarray, "G"],
    num_sampled_G: Int[np.ndarray, "G"],
    max_new_tokens: int,
) -> Float[np.ndarray, "G"]:
    """clip(scale · (r + bias)), and less of it for answers near the limit (DAPO, arXiv:2503.14476,
    equation 13).

    Args:
        num_sampled_G: tokens of each answer.
        max_new_tokens: the limit, at which an answer loses all of `config.overlong_penalty`.
    """
    shaped_G = config.scale * (rewards_G + config.bias)
    if config.clip is not None:
        shaped_G = np.clip(shaped_G, -config.clip, config.clip)
    if config.overlong_share == 0.0:
        return shaped_G
    overlong_tokens = config.overlong_share * max_new_tokens
    excess_G = np.clip(
        (num_sampled_G - (max_new_tokens - overlong_tokens)) / overlong_tokens, 0.0, 1.0
    )
    return shaped_G - config.overlong_penalty * excess_G


def mean_weights(
    mean: Mean, num_loss_tokens: Int[np.ndarray, "S"], constant_tokens: int
) -> Float32[np.ndarray, "S"]:
    """Factors of the samples' advantages with which a mean over all tokens of a mini-batch becomes
    the mean that is asked for.

    Every objective is proportional to the advantage, so no objective has to know of means; only a
    KL that joins the loss does.

    Args:
        num_loss_tokens: of every sample of the mini-batch.
        constant_tokens: the length by which "constant" divides.
    """
    if mean == "tokens":
        return np.ones(num_loss_tokens.shape, np.float32)
    # A sample without a token in the loss is none of the sequences.
    mean_length = num_loss_tokens.sum() / max((num_loss_tokens > 0).sum(), 1)
    lengths = (
        np.maximum(num_loss_tokens, 1)
        if mean == "sequences"
        else np.full(num_loss_tokens.shape, constant_tokens)
    )
    return (mean_length / lengths).astype(np.float32)


def _discounted(x: Float64[np.ndarray, "T"], decay: float) -> Float64[np.ndarray, "T"]:
    """y_t = x_t + decay y_{t+1}, by doubling: each turn sums twice as many terms, so that T tokens
    take log2(T) turns."""
    y, span = x.copy(), 1
    while span < len(y):
        y[:-span] += decay**span * y[span:]
        span *= 2
    return y


def _group_normalized(
    rewards_by_group: Sequence[Float[np.ndarray, "_"]], config: GroupNormalized
) -> list[Float32[np.ndarray, "_"]]:
    """(r - mean of the group) / (std + eps) (GRPO, arXiv:2402.03300, section 4.1.2)."""
    centred = [_centred(rewards_G) for rewards_G in rewards_by_group]
    match config.divide_by:
        case "nothing":
            divisors = [1.0] * len(centred)
        case "batch_std":
            together = np.concatenate(centred)
            # The groups' own means are 0, so this is the root of the mean square.
            std = np.sqrt((together**2).sum() / max(len(together) - 1, 1))
            divisors = [std + config.eps] * len(centred)
        case "group_std":
            divisors = [
                np.sqrt((centred_G**2).sum() / max(len(centred_G) - 1, 1)) + config.eps
                for centred_G in centred
            ]
    return [
        (centred_G / divisor).astype(np.float32)
        for centred_G, divisor in zip(centred, divisors, strict=True)
    ]


def _leave_one_out(rewards_G: Float[np.ndarray, "G"]) -> Float32[np.ndarray, "G"]:
    """r - mean of the others (RLOO, arXiv:2402.14740, equation 8) = G / (G - 1) (r - mean of
    all)."""
    size = len(rewards_G)
    return (size / max(size - 1, 1) * _centred(rewards_G)).astype(np.float32)


def _centred(rewards_G: Float[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """r - mean of the group; exactly 0 where all are equal, though the mean of equal floats may
    differ in the last bit."""
    if len(rewards_G) == 0 or rewards_G.min() == rewards_G.max():
        return np.zeros(rewards_G.shape, np.float64)
    return rewards_G.astype(np.float64) - rewards_G.mean(dtype=np.float64)


def _batch_normalized(
    groups: Sequence[Sequence[Trajectory]], config: BatchNormalized
) -> list[list[Float32[np.ndarray, "_"]]]:
    """(R - mean) / (std + eps) of the return R from each token on, mean and std over the loss
    tokens of the whole batch (AReaL, arXiv:2505.24298, section 5.1)."""
    # A sample whose tokens all return the same is one value of their number.
    values, counts = [np.zeros(0)], [np.zeros(0)]
    for trajectory in chain.from_iterable(groups):
        if trajectory.token_rewards is None:
            values.append(np.array([trajectory.reward]))
            counts.append(np.array([trajectory.loss_mask.sum()]))
        else:
            values.append(_return_to_go(trajectory)[trajectory.loss_mask])
            counts.append(np.ones(len(values[-1])))
    returns, weights = (
        np.concatenate(values).astype(np.float64),
        np.concatenate(counts).astype(np.float64),
    )
    counted = returns[weights > 0]
    if len(counted) == 0 or counted.min() == counted.max():
        return [
            [np.zeros(trajectory.action_mask.shape, np.float32) for trajectory in group]
            for group in groups
        ]
    num_tokens = weights.sum()
    mean = (weights * returns).sum() / num_tokens
    divisor = np.sqrt((weights * (returns - mean) ** 2).sum() / (num_tokens - 1)) + config.eps
    return [
        [((_return_to_go(trajectory) - mean) / divisor).astype(np.float32) for trajectory in group]
        for group in groups
    ]


def _return_to_go(trajectory: Trajectory) -> Float64[np.ndarray, "T"]:
    if trajectory.token_rewards is None:
        return np.broadcast_to(np.float64(trajectory.reward), trajectory.action_mask.shape)
    return trajectory.reward + reward_to_go(trajectory.token_rewards)


def _generalized(
    groups: Sequence[Sequence[Trajectory]], config: GAE
) -> list[list[Float32[np.ndarray, "_"]]]:
    """(A - mean) / (std + eps), mean and std over the loss tokens of the whole batch; or A as it
    is."""
    advantages = [
        [generalized_advantages(config, trajectory) for trajectory in group] for group in groups
    ]
    mean, divisor = 0.0, 1.0
    if config.normalize:
        pairs = zip(chain.from_iterable(advantages), chain.from_iterable(groups), strict=True)
        together = np.concatenate(
            [np.zeros(0), *(values[trajectory.loss_mask] for values, trajectory in pairs)]
        )
        if len(together) > 1:
            mean, divisor = together.mean(), together.std(ddof=1) + config.eps
    return [
        [((values - mean) / divisor).astype(np.float32) for values in group] for group in advantages
    ]


def _values(trajectory: Trajectory) -> Float[np.ndarray, "T"]:
    if trajectory.values is None:
        raise ValueError(
            "GAE needs the values of a critic, came a trajectory without; choose other "
            "trainer.advantages"
        )
    return trajectory.values


def _rewards_by_group(groups: Sequence[Sequence[Trajectory]]) -> list[Float64[np.ndarray, "_"]]:
    return [np.array([trajectory.reward for trajectory in group], np.float64) for group in groups]


def _spread(
    groups: Sequence[Sequence[Trajectory]], by_group: Sequence[Float[np.ndarray, "_"]]
) -> list[list[Float32[np.ndarray, "_"]]]:
    """One number per sample to all its tokens, with what they earn besides."""

    def on_tokens(trajectory: Trajectory, advantage: float) -> Float32[np.ndarray, "T"]:
        if trajectory.token_rewards is None:
            return np.broadcast_to(np.float32(advantage), trajectory.action_mask.shape)
        return (advantage + reward_to_go(trajectory.token_rewards)).astype(np.float32)

    return [
        [
            on_tokens(trajectory, float(advantage))
            for trajectory, advantage in zip(group, advantages_G, strict=True)
        ]
        for group, advantages_G in zip(groups, by_group, strict=True)
    ]
