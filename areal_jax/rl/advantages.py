"""How the rewards of a batch become one advantage per sample, the same on all its tokens. numpy only.

Standard deviations are those of a sample (divided by n - 1), as in AReaL. Where all rewards are equal the advantage is 0.
Axes: G samples of a group.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Float32, Int

from areal_jax.rl.config import Advantages, BatchNormalized, GroupNormalized


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
            return [_group_normalized(rewards, config) for rewards in rewards_by_group]
        case BatchNormalized():
            return _batch_normalized(rewards_by_group, num_loss_tokens_by_group, config)
    raise TypeError(
        f"advantages must be GroupNormalized or BatchNormalized, came {type(config).__name__}; set trainer.advantages to one"
    )


def _group_normalized(rewards_G: Float[np.ndarray, "G"], config: GroupNormalized) -> Float32[np.ndarray, "G"]:
    """(r - mean of the group) / (std of the group + eps) (GRPO, arXiv:2402.03300, section 4.1.2)."""
    # Asked of the rewards, not of the deviation: the mean of equal floats may differ from them in the last bit.
    if len(rewards_G) == 0 or rewards_G.min() == rewards_G.max():
        return np.zeros(rewards_G.shape, np.float32)
    centred_G = rewards_G.astype(np.float64) - rewards_G.mean(dtype=np.float64)
    if config.divide_by_std:
        centred_G /= rewards_G.std(ddof=1, dtype=np.float64) + config.eps
    return centred_G.astype(np.float32)


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
