"""Gated activations of MLPs and experts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from areal_jax.models.traits import Activation

SWISH_ALPHA, SWISH_LIMIT = 1.702, 7.0
"""Constants of GPT-OSS (swiglu_alpha, swiglu_limit)."""


def gated(
    activation: Activation, gate: Float[Array, "*B F"], up: Float[Array, "*B F"]
) -> Float[Array, "*B F"]:
    """Apply the activation to the outputs of gate and up."""
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
        case "clipped_swish":
            gate, up = jnp.minimum(gate, SWISH_LIMIT), jnp.clip(up, -SWISH_LIMIT, SWISH_LIMIT)
            return (up + 1) * gate * jax.nn.sigmoid(SWISH_ALPHA * gate)
