"""AdamW, its learning rate over a run, and which parameters decay."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from areal_jax.trainer.config import OptimizerConfig


def learning_rate(
    config: OptimizerConfig, update: Int[Array, ""], num_updates: int
) -> Float[Array, ""]:
    """Rate of update number `update`, counted from 0, of a run of `num_updates`.

    It rises in equal steps to the peak over the first `warmup_fraction` of the run (no update is
    wasted on a rate of 0), and stays there or falls to 0 by cosine or line."""
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


def make_optimizer(config: OptimizerConfig, axes: Any) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) behind a clip of the global norm, as a direction: what it returns is
    still to be multiplied by minus the learning rate.

    Args:
        axes: logical axis names of every parameter; they tell matrices, which decay, from norms and
            biases, which do not.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        optax.add_decayed_weights(config.weight_decay, mask=_matrices(axes)),
    )


def num_updates_done(opt_state: optax.OptState) -> Int[Array, ""]:
    """How many updates made this state: Adam's own count."""
    return optax.tree.get(opt_state, "count")


def _matrices(axes: Any) -> Any:
    """True for what maps to or from the residual stream, or the rank of an adapter: the number of
    dimensions does not tell, since norms and biases of stacked layers have two or three."""
    return jax.tree.map(
        lambda names: not {"embed", "rank"}.isdisjoint(names) and len(set(names) - {"layers"}) > 1,
        axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )
