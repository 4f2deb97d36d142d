"""Gated activations of MLPs and experts."""

from __future__ import annotations

import jax
from jaxtyping import Array, Float

from areal_jax.models.traits import Activation


def gated(
    activation: Activation, gate: Float[Array, "*B F"], up: Float[Array, "*B F"]
) -> Float[Array, "*B F"]:
    """Apply the activation to the outputs of gate and up."""
    match activation:
        case "silu":
            return jax.nn.silu(gate) * up
        case "gelu_tanh":
            return jax.nn.gelu(gate, approximate=True) * up
