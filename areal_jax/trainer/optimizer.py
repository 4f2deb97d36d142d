"""AdamW, its learning-rate schedule, and weight decay."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from areal_jax.parallel.sharding import is_axes
from areal_jax.trainer.config import OptimizerConfig


def learning_rate(
    config: OptimizerConfig, update: Int[Array, ""], num_updates: int
) -> Float[Array, ""]:
    """Return the learning rate of an update (the schedule; in transformers `lr_scheduler`).

    It increases in equal steps to the peak over the first `warmup_fraction` of the run (the first
    update has a rate above 0), and is then constant or decreases to 0 by a cosine or linearly.

    Args:
        config: Peak, warm-up and schedule.
        update: Number of the update, from 0.
        num_updates: Updates of the run.
    """
    num_warmup = round(config.warmup_fraction * num_updates)
    risen = jnp.minimum(1.0, (update + 1) / max(1, num_warmup))
    progress = jnp.clip((update - num_warmup) / max(1, num_updates - num_warmup), 0.0, 1.0)
    match config.schedule:
        case "constant":
            left = 1.0
        case "cosine":
            left = 0.5 * (1.0 + jnp.cos(math.pi * progress))
        case "linear":
            left = 1.0 - progress
    return config.learning_rate * risen * left


def make_optimizer(
    config: OptimizerConfig, axes: Any, *, freezes_vision: bool = False
) -> optax.GradientTransformation:
    """Make AdamW (arXiv:1711.05101) with gradients clipped by their global norm.

    The result is a direction: multiply it by minus the learning rate.

    Args:
        config: Settings.
        axes: Logical axis names of every parameter. Matrices decay; norms and biases do not.
        freezes_vision: Whether the gradients of the vision tower are 0, which then does not decay.
    """
    decays = _matrices(axes)
    if freezes_vision and "vision" in decays:
        decays |= {"vision": jax.tree.map(lambda _: False, decays["vision"])}
    return _adamw(
        config.beta1, config.beta2, config.eps, config.weight_decay, config.max_grad_norm, decays
    )


def make_traced_optimizer(
    hyperparameters: Float[Array, "5"], axes: Any
) -> optax.GradientTransformation:
    """Make the optimizer of `make_optimizer` within a program that reads its numbers.

    Args:
        hyperparameters: beta1, beta2, epsilon, weight decay and largest gradient norm, which may be
            inf.
        axes: Logical axis names of every parameter.
    """
    return _adamw(*hyperparameters, decays=_matrices(axes))


def _adamw(
    beta1: Any, beta2: Any, eps: Any, weight_decay: Any, max_grad_norm: Any, decays: Any
) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(max_grad_norm),
        optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps),
        optax.add_decayed_weights(weight_decay, mask=decays),
    )


def num_updates_done(opt_state: optax.OptState) -> Int[Array, ""]:
    """Return the number of updates in this state: Adam's own count."""
    return optax.tree.get(opt_state, "count")


def _matrices(axes: Any) -> Any:
    """Return true for parameters that map to or from the residual stream or an adapter's rank.

    The number of dimensions does not decide: norms and biases of stacked layers have two or three.
    """
    return jax.tree.map(
        lambda names: not {"embed", "rank"}.isdisjoint(names) and len(set(names) - {"layers"}) > 1,
        axes,
        is_leaf=is_axes,
    )
