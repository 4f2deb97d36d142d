"""Advantages of tokens from the rewards of a batch; numpy only.

Standard deviations are divided by n - 1, as in AReaL. If all rewards are equal, a centred advantage
is exactly 0. Axes: G samples of a group, S samples of a mini-batch, T tokens of a sample.

The file has more than 400 lines because it lists every estimator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from areal_jax.rl.config import (
    GAE,
    GDPO,
    SPO,
    VCPO,
    Advantages,
    BatchNormalized,
    CustomAdvantages,
    GroupNormalized,
    LeaveOneOut,
    MaxRL,
    Mean,
    Shaping,
    Unnormalized,
    component_weights,
)


class Trajectory(NamedTuple):
    """Rewards, masks and values of one sample."""

    reward: float
    """Shaped reward of the whole sample."""
    action_mask: Bool[np.ndarray, "T"]
    """True for tokens that the policy sampled."""
    loss_mask: Bool[np.ndarray, "T"]
    """True for sampled tokens that are in the loss."""
    token_rewards: Float[np.ndarray, "T"] | None = None
    """Additional reward per token, 0 outside the action mask; None: none."""
    values: Float[np.ndarray, "T"] | None = None
    """Critic's value of the state in which each token was sampled; read under the action mask
    only."""
    value_after: float = 0.0
    """Critic's value of the state after the last sampled token; 0 if the answer has ended."""
    components: Mapping[str, float] = {}
    """Named parts of the reward."""
    baseline: float | None = None
    """Expected reward of the prompt, with SPO."""
    log_weighted_norm: float | None = None
    """log(W g), with VCPO: W is theta/behave of the sample, and g the norm of the gradient of its
    log-prob; -inf without a token in the loss."""


def compute_advantages(
    config: Advantages, groups: Sequence[Sequence[Trajectory]]
) -> list[list[Float32[np.ndarray, "_"]]]:
    """Compute one advantage per token, by group and sample. Groups may differ in size.

    Without a critic, all tokens of a sample get the advantage of its reward, plus their token
    rewards to go, undiscounted.

    Raises:
        TypeError: the estimator is unknown.
    """
    match config:
        case GroupNormalized():
            return _spread(groups, _group_normalized(_rewards_by_group(groups), config))
        case LeaveOneOut():
            return _spread(
                groups, [_leave_one_out(rewards_G) for rewards_G in _rewards_by_group(groups)]
            )
        case MaxRL():
            return _spread(groups, [_max_rl(rewards_G) for rewards_G in _rewards_by_group(groups)])
        case GDPO():
            return _spread(groups, _component_normalized(groups, config))
        case SPO():
            return _spread(groups, _above_tracked_rate(groups, config))
        case VCPO():
            return _spread(groups, [_above_least_variance(group, config) for group in groups])
        case BatchNormalized():
            return _batch_normalized(groups, config)
        case GAE():
            return _gae(groups, config)
        case CustomAdvantages():
            return _spread(
                groups, [_custom(rewards_G, config) for rewards_G in _rewards_by_group(groups)]
            )
        case Unnormalized():
            return _spread(groups, _rewards_by_group(groups))
    raise TypeError(
        "expected an advantage estimator of areal_jax.rl.config, found "
        f"{type(config).__name__}; set trainer.advantages to GroupNormalized, LeaveOneOut, "
        "MaxRL, GDPO, SPO, VCPO, BatchNormalized, Unnormalized or GAE"
    )


def reward_to_go(token_rewards: Float[np.ndarray, "T"]) -> Float64[np.ndarray, "T"]:
    """Return for each token the sum of its own and all later rewards."""
    return np.cumsum(token_rewards[::-1], dtype=np.float64)[::-1]


def value_targets(
    config: GAE, groups: Sequence[Sequence[Trajectory]]
) -> list[list[Float32[np.ndarray, "_"]]]:
    """Compute the critic's targets, the lambda returns: unnormalised advantage plus value.

    Targets are 0 outside the action mask. Lambda is `critic_lam`, if it is set (VC-PPO,
    arXiv:2503.01491).
    """

    def targets(trajectory: Trajectory) -> Float32[np.ndarray, "T"]:
        lam = _lambda(config, trajectory) if config.critic_lam is None else config.critic_lam
        advantages, values = _advantages_and_values(config, trajectory, lam)
        return (advantages + values).astype(np.float32)

    return [[targets(trajectory) for trajectory in group] for group in groups]


def generalized_advantages(config: GAE, trajectory: Trajectory) -> Float64[np.ndarray, "T"]:
    """Compute unnormalised advantages of sampled tokens (GAE, arXiv:1506.02438, equation 16).

    delta_i = r_i + gamma V_{i+1} - V_i,  A_i = delta_i + gamma lam A_{i+1}, where i counts sampled
    tokens only: prompt, feedback and tool output are no steps and discount nothing. The sample's
    reward is added to its last step. Advantages are 0 outside the action mask.

    With `config.step="turn"`, i counts turns: r_i is the sum of the turn's token rewards, V_i the
    value of the state in which its first token was sampled, and its tokens share A_i.
    """
    lam = _lambda(config, trajectory)
    return _advantages_and_values(config, trajectory, lam)[0]


def _lambda(config: GAE, trajectory: Trajectory) -> float:
    """max(0, 1 - 1 / (alpha L)) with L sampled tokens (VAPO, arXiv:2504.05118), or `lam`."""
    if config.length_alpha is None:
        return config.lam
    return max(0.0, 1.0 - 1.0 / (config.length_alpha * max(trajectory.action_mask.sum(), 1)))


def _advantages_and_values(
    config: GAE, trajectory: Trajectory, lam: float
) -> Float64[np.ndarray, "2 T"]:
    """Advantage of every token's step, and the critic's value before it."""
    action_mask = trajectory.action_mask
    found = np.zeros((2, *action_mask.shape), np.float64)
    places = np.flatnonzero(action_mask)
    if not len(places):
        return found
    is_first = np.ones(places.shape, bool)
    if config.step == "turn":
        is_first[1:] = np.diff(places) > 1
    values = _values(trajectory)[places[is_first]].astype(np.float64)
    token_rewards = (
        np.zeros(places.shape)
        if trajectory.token_rewards is None
        else trajectory.token_rewards[places].astype(np.float64)
    )
    rewards = np.add.reduceat(token_rewards, np.flatnonzero(is_first))
    rewards[-1] += trajectory.reward
    after = np.append(values[1:], trajectory.value_after)
    advantages = _discounted(rewards + config.gamma * after - values, config.gamma * lam)
    found[:, places] = np.stack([advantages, values])[:, np.cumsum(is_first) - 1]
    return found


def shape_rewards(
    config: Shaping,
    rewards_G: Float[np.ndarray, "G"],
    num_sampled_G: Int[np.ndarray, "G"],
    max_new_tokens: int,
) -> Float[np.ndarray, "G"]:
    """Compute clip(scale · (r + bias)) minus the overlong penalty (DAPO, arXiv:2503.14476,
    equation 13).

    Args:
        config: reward shaping.
        rewards_G: rewards of a group's samples.
        num_sampled_G: sampled tokens of each answer.
        max_new_tokens: length at which the whole `config.overlong_penalty` applies.
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
    """Compute factors of the samples' advantages that turn a mean over tokens into `mean`.

    Every objective is proportional to the advantage, so that only the KL in the loss needs the
    factors too.

    Args:
        mean: aggregation of the mini-batch's loss.
        num_loss_tokens: loss tokens of each sample of the mini-batch.
        constant_tokens: divisor of the aggregation "constant".
    """
    if mean == "tokens":
        return np.ones(num_loss_tokens.shape, np.float32)
    # A sample without loss tokens does not count as a sequence.
    mean_length = num_loss_tokens.sum() / max((num_loss_tokens > 0).sum(), 1)
    lengths = (
        np.maximum(num_loss_tokens, 1)
        if mean == "sequences"
        else np.full(num_loss_tokens.shape, constant_tokens)
    )
    return (mean_length / lengths).astype(np.float32)


def _discounted(x: Float64[np.ndarray, "T"], decay: float) -> Float64[np.ndarray, "T"]:
    """Return y_t = x_t + decay y_{t+1}, by doubling: log2(T) vectorised passes."""
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
            batch = np.concatenate(centred)
            # Each group's mean is 0, so this is the root of the mean square.
            std = np.sqrt((batch**2).sum() / max(len(batch) - 1, 1))
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


def _custom(
    rewards_G: Float[np.ndarray, "G"], config: CustomAdvantages
) -> Float32[np.ndarray, "G"]:
    """The user's advantages of a group, checked."""
    found = np.asarray(config.of_group(rewards_G.copy()), np.float32)
    if found.shape != rewards_G.shape or not np.isfinite(found).all():
        raise ValueError(
            f"trainer.advantages={type(config).__name__}: expected of_group to return "
            f"{len(rewards_G)} finite numbers, found {found}"
        )
    return found


def _leave_one_out(rewards_G: Float[np.ndarray, "G"]) -> Float32[np.ndarray, "G"]:
    """r - mean of the others (RLOO, arXiv:2402.14740, equation 8) = G / (G - 1) (r - group
    mean).
    """
    size = len(rewards_G)
    return (size / max(size - 1, 1) * _centred(rewards_G)).astype(np.float32)


def _max_rl(rewards_G: Float[np.ndarray, "G"]) -> Float32[np.ndarray, "G"]:
    """(r - group mean) / group mean (MaxRL, arXiv:2602.02710)."""
    if len(rewards_G) and rewards_G.min() < 0.0:
        raise ValueError(
            "trainer.advantages=MaxRL expects rewards of 0 or more, found "
            f"{rewards_G.min()}; set rewards.wrong=0, or use GroupNormalized"
        )
    mean = rewards_G.mean() if len(rewards_G) else 0.0
    return (_centred(rewards_G) / (mean if mean > 0.0 else 1.0)).astype(np.float32)


def _above_tracked_rate(
    groups: Sequence[Sequence[Trajectory]], config: SPO
) -> list[Float64[np.ndarray, "_"]]:
    """d = r - tracked rate of the prompt, then (d - mean) / (std + eps) over the samples of the
    batch (SPO, arXiv:2509.13232).
    """
    for each in chain.from_iterable(groups):
        if each.baseline is None or not 0.0 <= each.reward <= 1.0:
            raise ValueError(
                "trainer.advantages=SPO expects rewards between 0 and 1 and a tracked success "
                f"rate, found a reward of {each.reward} and a rate of {each.baseline}; set "
                "rewards.correct=1 and rewards.wrong=0"
            )
    above = [
        np.array([each.reward - (each.baseline or 0.0) for each in group], np.float64)
        for group in groups
    ]
    flat = np.concatenate([np.zeros(0), *above])
    if not len(flat) or flat.min() == flat.max():
        return [np.zeros(len(group)) for group in groups]
    divisor = flat.std(ddof=1) + config.eps
    return [(above_G - flat.mean()) / divisor for above_G in above]


def _above_least_variance(group: Sequence[Trajectory], config: VCPO) -> Float64[np.ndarray, "G"]:
    """(r - b) / (std + eps) with b = sum W² g² r / sum W² g² (VCPO, arXiv:2602.17616, OPOB)."""
    if any(each.log_weighted_norm is None for each in group):
        raise ValueError(
            "trainer.advantages=VCPO expects the norm of each sample's gradient, found a "
            "trajectory without; set trainer.advantages to another estimator"
        )
    rewards_G = np.array([each.reward for each in group], np.float64)
    log_G = np.array([each.log_weighted_norm for each in group], np.float64)
    if not np.isfinite(log_G).any() or rewards_G.min() == rewards_G.max():
        return np.zeros(len(group))
    # Relative to the largest, because W is a product over tokens.
    weights_G = np.exp(2.0 * (log_G - log_G.max()))
    above_G = rewards_G - (weights_G * rewards_G).sum() / weights_G.sum()
    return above_G / (1.0 if config.divide_by == "nothing" else rewards_G.std(ddof=1) + config.eps)


def _component_normalized(
    groups: Sequence[Sequence[Trajectory]], config: GDPO
) -> list[Float64[np.ndarray, "_"]]:
    """z = sum_k weight_k (r_k - group mean) / (group std + eps), then (z - mean) / (std + eps) over
    the batch (GDPO, arXiv:2601.05242).

    A sample without components, whose text is not in `rewards.form`, has the lowest of its group.
    """
    trajectories = list(chain.from_iterable(groups))
    names = sorted(set[str]().union(*(each.components for each in trajectories)))
    if not names and len({each.reward for each in trajectories}) <= 1:
        # No text is in the form, and nothing can be learned.
        return [np.zeros(len(group)) for group in groups]
    for each in trajectories:
        if not names or (each.components and each.components.keys() != set(names)):
            raise ValueError(
                "trainer.advantages=GDPO expects the same named components in every reward, found "
                f"{', '.join(each.components) or 'none'}, and {', '.join(names) or 'none'} in the "
                "batch; let rewards.function return a dict of all of them"
            )
    weights = component_weights(config.weights)
    if unknown := weights.keys() - set(names):
        raise ValueError(
            f"trainer.advantages.weights names {', '.join(sorted(unknown))}; the reward has "
            f"{', '.join(names)}"
        )
    sums = [
        np.sum(
            [
                weights.get(name, 1.0) * _normalized(_components(group, name), config.eps)
                for name in names
            ],
            axis=0,
        )
        for group in groups
    ]
    flat = np.concatenate(sums)
    counts = np.ones(len(flat))
    if config.over == "tokens":
        counts = np.array([each.loss_mask.sum() for each in trajectories], np.float64)
    total = max(counts.sum(), 1.0)
    # The mean of every group is 0: rounding must not give advantages to groups without signal.
    mean = (counts * flat).sum() / total if config.over == "tokens" else 0.0
    std = np.sqrt((counts * (flat - mean) ** 2).sum() / max(total - 1.0, 1.0))
    return [(of_group - mean) / (std + config.eps) for of_group in sums]


def _components(group: Sequence[Trajectory], name: str) -> Float64[np.ndarray, "G"]:
    lowest = min((each.components[name] for each in group if each.components), default=0.0)
    return np.array([each.components.get(name, lowest) for each in group], np.float64)


def _normalized(rewards_G: Float[np.ndarray, "G"], eps: float) -> Float64[np.ndarray, "G"]:
    centred_G = _centred(rewards_G)
    return centred_G / (np.sqrt((centred_G**2).sum() / max(len(centred_G) - 1, 1)) + eps)


def _centred(rewards_G: Float[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """r - mean of the group; exactly 0 if all are equal, though the mean of equal floats may differ
    in the last bit.
    """
    if len(rewards_G) == 0 or rewards_G.min() == rewards_G.max():
        return np.zeros(rewards_G.shape, np.float64)
    return rewards_G.astype(np.float64) - rewards_G.mean(dtype=np.float64)


def _batch_normalized(
    groups: Sequence[Sequence[Trajectory]], config: BatchNormalized
) -> list[list[Float32[np.ndarray, "_"]]]:
    """(R - mean) / (std + eps) with R each token's return, mean and std over the loss tokens of the
    whole batch (AReaL, arXiv:2505.24298, section 5.1).
    """
    # A sample whose tokens have equal returns contributes one value with their count.
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


def _gae(
    groups: Sequence[Sequence[Trajectory]], config: GAE
) -> list[list[Float32[np.ndarray, "_"]]]:
    """(A - mean) / (std + eps), mean and std over the loss tokens of the whole batch, or A
    itself.
    """
    advantages = [
        [generalized_advantages(config, trajectory) for trajectory in group] for group in groups
    ]
    mean, divisor = 0.0, 1.0
    if config.normalize:
        pairs = zip(chain.from_iterable(advantages), chain.from_iterable(groups), strict=True)
        batch = np.concatenate(
            [np.zeros(0), *(values[trajectory.loss_mask] for values, trajectory in pairs)]
        )
        if len(batch) > 1:
            mean, divisor = batch.mean(), batch.std(ddof=1) + config.eps
    return [
        [((values - mean) / divisor).astype(np.float32) for values in group] for group in advantages
    ]


def _values(trajectory: Trajectory) -> Float[np.ndarray, "T"]:
    if trajectory.values is None:
        raise ValueError(
            "GAE expects a critic's values, found a trajectory without; set trainer.advantages to "
            "another estimator"
        )
    return trajectory.values


def _rewards_by_group(groups: Sequence[Sequence[Trajectory]]) -> list[Float64[np.ndarray, "_"]]:
    return [np.array([trajectory.reward for trajectory in group], np.float64) for group in groups]


def _spread(
    groups: Sequence[Sequence[Trajectory]], by_group: Sequence[Float[np.ndarray, "_"]]
) -> list[list[Float32[np.ndarray, "_"]]]:
    """Spread one advantage per sample over its tokens, and add their token rewards to go."""

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
