"""Small policies of every family, with every parameter random."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.decoder import Params, Policy

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny_policy(architecture: str = "Qwen2ForCausalLM", **settings: object) -> Policy:
    return Policy(ModelConfig.from_hf({"architectures": [architecture], **SIZES, **settings}, source="a test"))


def random_params(policy: Policy, seed: int = 0) -> Params:
    """Biases and norms are random too, so that leaving one out shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: jnp.asarray(2 * rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5, leaf.dtype), policy.abstract()
    )


def on_one_device(policy: Policy) -> Params:
    """Shardings for `hf.load`."""
    return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), policy.abstract())
