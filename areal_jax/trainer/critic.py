"""The critic beside the policy (GAE): a learner of its own, whose policy has a scalar head.

Axes: B rows, T tokens of a row or of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import chz
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from areal_jax.metrics.meters import Mean
from areal_jax.models.decoder import Params, Policy
from areal_jax.rl.advantages import Trajectory
from areal_jax.rl.logprobs import values_before
from areal_jax.rl.losses import PolicyLoss, value_loss
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.forward import DeviceBatch
from areal_jax.trainer.step import Learner


class CriticWeights(NamedTuple):
    """What a critic begins with."""

    policy: Policy
    """With a scalar head."""
    params: Params


def critic_config(config: TrainerConfig) -> TrainerConfig:
    """The trainer's settings as the critic reads them: with its own optimizer."""
    return chz.replace(config, optimizer=config.critic.optimizer or config.optimizer)


def critic_learner(
    config: TrainerConfig,
    weights: CriticWeights,
    mesh: Mesh,
    compute_dtype: DTypeLike,
    num_updates: int,
    *,
    row_tokens: int,
) -> Learner:
    """A learner of returns; `params` are copied."""

    def objective(
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

    return Learner(
        critic_config(config),
        weights.policy,
        weights.params,
        mesh,
        compute_dtype,
        num_updates,
        objective=objective,
        temperature=1.0,
        row_tokens=row_tokens,
    )


def with_values(
    trajectory: Trajectory, following: Float32[np.ndarray, "_"], *, was_cut_off: bool
) -> Trajectory:
    """What the critic says put to a trajectory.

    Args:
        following: the value of what follows each token, up to the last that the policy drew; or
            none at all: 0 of everything.
        was_cut_off: the answer ended for want of room, so that more could have come: the critic
            says how much.
    """
    values = np.zeros(trajectory.action_mask.shape, np.float32)
    values[1 : len(following)] = following[:-1]
    return trajectory._replace(
        values=values, value_after=float(following[-1]) if was_cut_off and len(following) else 0.0
    )


def describe_values(
    trajectories: Sequence[Sequence[Trajectory]],
    targets: Sequence[Sequence[Float32[np.ndarray, "_"]]],
) -> dict[str, float | Mean]:
    """How well the critic foretold a batch, over its loss tokens: explained variance 1 is all, 0 no
    better than the mean."""
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
    spread = float(np.var(returns)) if len(returns) else 0.0
    return {
        "values": Mean(float(values.sum()), float(len(values))),
        "returns": Mean(float(returns.sum()), float(len(returns))),
        "explained_variance": 1.0 - float(np.var(returns - values)) / spread
        if spread > 0.0
        else 0.0,
    }
