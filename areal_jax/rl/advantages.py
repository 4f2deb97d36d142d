"""How the rewards of a batch become one advantage per sample, the same on all its tokens. numpy only.

Standard deviations are those of a sample (divided by n - 1), as in AReaL. Where all rewards are equal a centred advantage is 0.
Axes: G samples of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from areal_jax.rl.config import GAE, Advantages, BatchNormalized, GroupNormalized, LeaveOneOut, Mean, Shaping, Unnormalized


def compute_advantages(
    config: Advantages,
    rewards_by_group: Sequence[Float[np.ndarray, "_"]],
    num_loss_tokens_by_group: Sequence[Int[np.ndarray, "_"]],
) -> list[Float32[np.ndarray, "_"]]:
    """One advantage per sample, group by group, in the order given. Groups may differ in size.

    Args:
        num_loss_tokens_by_group: tokens of each sample that are in the loss; BatchNormalized weights the sample by them.
    """
    match config:
        case GroupNormalized():
            return _group_normalized(rewards_by_group, config)
        case LeaveOneOut():
            return [_leave_one_out(rewards) for rewards in rewards_by_group]
        case BatchNormalized():
            return _batch_normalized(rewards_by_group, num_loss_tokens_by_group, config)
        case Unnormalized():
            return [rewards.astype(np.float32) for rewards in rewards_by_group]
    raise TypeError(
        f"{type(config).__name__} says nothing of how rewards become advantages; set trainer.advantages to GroupNormalized, "
        "LeaveOneOut, BatchNormalized or Unnormalized"
    )


def generalized_advantages(
    config: GAE,
    rewards: Float[np.ndarray, "T"],
    values: Float[np.ndarray, "T"],
    drawn: Bool[np.ndarray, "T"],
    value_after: float,
) -> Float64[np.ndarray, "T"]:
    """Advantage of every token that the policy drew in one sequence, 0 of others (GAE, arXiv:1506.02438, equation 16).

    delta_i = r_i + gamma V_{i+1} - V_i,  A_i = delta_i + gamma lam A_{i+1},  i counting drawn tokens alone: prompt, feedback
    and what a tool said are no steps, and discount nothing. A + V is the return that the critic is to learn.

    Args:
        rewards: read where a token was drawn.
        values: of the state in which each token was drawn, that is before it; read there too.
        value_after: of the state behind the last drawn token: 0 where the answer ended, the critic's where it was cut off.
    """
    advantages = np.zeros(drawn.shape, np.float64)
    before = values[drawn].astype(np.float64)
    if len(before):
        after = np.append(before[1:], value_after)
        advantages[drawn] = _discounted(rewards[drawn] + config.gamma * after - before, config.gamma * config.lam)
    return advantages


def normalized(
    advantages: Sequence[Float[np.ndarray, "_"]], counted: Sequence[Bool[np.ndarray, "_"]], eps: float
) -> list[Float32[np.ndarray, "_"]]:
    """(A - mean) / (std + eps), mean and std over the counted tokens of all sequences together; 0 where all are equal."""
    together = np.concatenate([of_one[mask] for of_one, mask in zip(advantages, counted, strict=True)])
    if len(together) == 0 or together.min() == together.max():
        return [np.zeros(of_one.shape, np.float32) for of_one in advantages]
    mean, divisor = together.mean(dtype=np.float64), together.std(ddof=1, dtype=np.float64) + eps
    return [((of_one - mean) / divisor).astype(np.float32) for of_one in advantages]


def shaped_rewards(
    config: Shaping,
    rewards_G: Float[np.ndarray, "G"],
    num_drawn_G: Int[np.ndarray, "G"],
    max_new_tokens: int,
) -> Float[np.ndarray, "G"]:
    """clip(scale · (r + bias)), and less of it for answers near the limit (DAPO, arXiv:2503.14476, equation 13).

    Args:
        num_drawn_G: tokens of each answer.
        max_new_tokens: the limit, at which an answer loses all of `config.overlong_penalty`.
    """
    shaped_G = config.scale * (rewards_G + config.bias)
    if config.clip is not None:
        shaped_G = np.clip(shaped_G, -config.clip, config.clip)
    if config.overlong_share == 0.0:
        return shaped_G
    overlong_tokens = config.overlong_share * max_new_tokens
    excess_G = np.clip((num_drawn_G - (max_new_tokens - overlong_tokens)) / overlong_tokens, 0.0, 1.0)
    return shaped_G - config.overlong_penalty * excess_G


def mean_weights(mean: Mean, num_loss_tokens: Int[np.ndarray, "S"], constant_tokens: int) -> Float32[np.ndarray, "S"]:
    """Factors of the samples' advantages with which a mean over all tokens of a mini-batch becomes the mean that is asked for.

    Every objective is proportional to the advantage, so no objective has to know of means.

    Args:
        num_loss_tokens: of every sample of the mini-batch.
        constant_tokens: the length by which "constant" divides.
    """
    if mean == "tokens":
        return np.ones(num_loss_tokens.shape, np.float32)
    # A sample without a token in the loss is none of the sequences.
    mean_length = num_loss_tokens.sum() / max((num_loss_tokens > 0).sum(), 1)
    lengths = np.maximum(num_loss_tokens, 1) if mean == "sequences" else np.full(num_loss_tokens.shape, constant_tokens)
    return (mean_length / lengths).astype(np.float32)


def _discounted(x: Float64[np.ndarray, "T"], decay: float) -> Float64[np.ndarray, "T"]:
    """y_t = x_t + decay y_{t+1}, by doubling: each turn sums twice as many terms, so that T tokens take log2(T) turns."""
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
            divisors = [np.sqrt((centred_G**2).sum() / max(len(centred_G) - 1, 1)) + config.eps for centred_G in centred]
    return [(centred_G / divisor).astype(np.float32) for centred_G, divisor in zip(centred, divisors, strict=True)]


def _leave_one_out(rewards_G: Float[np.ndarray, "G"]) -> Float32[np.ndarray, "G"]:
    """r - mean of the others (RLOO, arXiv:2402.14740, equation 8) = G / (G - 1) (r - mean of all)."""
    size = len(rewards_G)
    return (size / max(size - 1, 1) * _centred(rewards_G)).astype(np.float32)


def _centred(rewards_G: Float[np.ndarray, "G"]) -> Float64[np.ndarray, "G"]:
    """r - mean of the group; exactly 0 where all are equal, though the mean of equal floats may differ in the last bit."""
    if len(rewards_G) == 0 or rewards_G.min() == rewards_G.max():
        return np.zeros(rewards_G.shape, np.float64)
    return rewards_G.astype(np.float64) - rewards_G.mean(dtype=np.float64)


def _batch_normalized(
    rewards_by_group: Sequence[Float[np.ndarray, "_"]],
    num_loss_tokens_by_group: Sequence[Int[np.ndarray, "_"]],
    config: BatchNormalized,
) -> list[Float32[np.ndarray, "_"]]:
    """(r - mean) / (std + eps), mean and std over the loss tokens of the whole batch (AReaL, arXiv:2505.24298, section 5.1)."""
    rewards = np.concatenate(rewards_by_group).astype(np.float64)
    counts = np.concatenate(num_loss_tokens_by_group).astype(np.float64)
    num_tokens = counts.sum()
    counted = rewards[counts > 0]
    if len(counted) == 0 or counted.min() == counted.max():
        return [np.zeros(rewards_G.shape, np.float32) for rewards_G in rewards_by_group]
    centred = rewards - (counts * rewards).sum() / num_tokens
    std = np.sqrt((counts * centred**2).sum() / (num_tokens - 1))
    advantages = (centred / (std + config.eps)).astype(np.float32)
    return np.split(advantages, np.cumsum([len(rewards_G) for rewards_G in rewards_by_group])[:-1])
