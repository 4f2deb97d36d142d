"""The critic of GAE: a second learner, whose policy has a scalar head.

Axes: B rows, T tokens of a row or of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import chz
import numpy as np
from jaxtyping import Array, Float, Float32

from areal_jax.metrics.meters import Mean
from areal_jax.rl.advantages import Trajectory
from areal_jax.rl.logprobs import values_before
from areal_jax.rl.token_losses import PolicyLoss, value_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.programs import Objective
from areal_jax.trainer.step import Learner, TrainableModel


def critic_config(config: TrainerConfig) -> TrainerConfig:
    """Return the trainer's settings with the critic's optimizer."""
    return chz.replace(config, optimizer=config.critic.optimizer or config.optimizer)


def critic_learner(config: TrainerConfig, model: TrainableModel, num_updates: int) -> Learner:
    """Return a learner of returns.

    Args:
        config: The trainer's settings.
        model: A policy with a scalar head.
        num_updates: Length of the learning-rate schedule, in updates.
    """

    def loss(
        values: Array, batch: DeviceBatch, num_tokens: Float[Array, ""], _: Array
    ) -> PolicyLoss:
        return value_loss(
            values_before(values, batch.segment_ids),
            values_before(batch.proximal_logp, batch.segment_ids),
            batch.advantages,
            batch.loss_mask,
            clip_eps=config.critic.value_clip_eps,
            num_tokens=num_tokens,
        )

    return Learner(critic_config(config), model, Objective(loss), num_updates)


def with_values(
    trajectory: Trajectory, following: Float32[np.ndarray, "_"], *, was_cut_off: bool
) -> Trajectory:
    """Return the trajectory with a critic's values.

    Args:
        trajectory: Without values.
        following: The value of what follows each token, up to the last sampled one. Empty: all
            values are 0.
        was_cut_off: The answer ended at its token limit, so that the critic's last value counts.
    """
    values = np.zeros(trajectory.action_mask.shape, np.float32)
    values[1 : len(following)] = following[:-1]
    value_after = float(following[-1]) if was_cut_off and len(following) else 0.0
    return trajectory._replace(values=values, value_after=value_after)


def describe_values(
    trajectories: Sequence[Sequence[Trajectory]],
    targets: Sequence[Sequence[Float32[np.ndarray, "_"]]],
) -> dict[str, float | Mean]:
    """Return metrics of a critic's predictions, over the loss tokens of a batch.

    The explained variance is 1 for perfect predictions, and 0 for those no better than the mean.
    """
    pairs = list(zip(chain.from_iterable(trajectories), chain.from_iterable(targets), strict=True))
    nothing = np.zeros(0)
    returns = np.concatenate(
        [nothing, *(target[trajectory.loss_mask] for trajectory, target in pairs)]
    )
    values = np.concatenate(
        [
            nothing,
            *(
                trajectory.values[trajectory.loss_mask]
                for trajectory, _ in pairs
                if trajectory.values is not None
            ),
        ]
    )
    variance = float(np.var(returns)) if len(returns) else 0.0
    return {
        "values": Mean(float(values.sum()), float(len(values))),
        "returns": Mean(float(returns.sum()), float(len(returns))),
        "explained_variance": 1.0 - float(np.var(returns - values)) / variance
        if variance > 0.0
        else 0.0,
    }
