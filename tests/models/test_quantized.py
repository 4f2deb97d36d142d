"""Matrices in 8 bits: rounding, and policies that have them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_policies import random_params, tiny_policy

from areal_jax.models.attention import packed_attention
from areal_jax.models.decoder import Params, Policy
from areal_jax.models.moe import sharded_experts
from areal_jax.models.quantized import Quantized, quantize, quantize_layer
from areal_jax.parallel.config import PlacementConfig
from areal_jax.parallel.mesh import make_meshes
from areal_jax.parallel.sharding import ROLLOUT_RULES, shardings


def quantized(params: Params, policy: Policy, dtype: str) -> Params:
    unstacked = policy.unstack(params)
    layers = (quantize_layer(layer, jnp.dtype(dtype)) for layer in unstacked["layers"])
    return unstacked | {"layers": tuple(layers)}


def is_quantized(node: Any) -> bool:
    return isinstance(node, Quantized)


def dequantized(params: Params) -> Params:
    return jax.tree.map(
        lambda node: node.values.astype(jnp.float32) * node.scale if is_quantized(node) else node,
        params,
        is_leaf=is_quantized,
    )


def test_entries_are_rounded_to_multiples_of_each_outputs_scale() -> None:
    # Largest entries 127 and 2.54: steps of 1 and 0.02.
    w = jnp.array([[127.0, 2.54, 0.0], [-0.5, -0.031, 0.0], [1.6, 0.049, 0.0]])
    found = quantize(w, range(1), "int8")
    assert found.values.dtype == jnp.int8
    np.testing.assert_array_equal(found.values, [[127, 127, 0], [0, -2, 0], [2, 2, 0]])
    np.testing.assert_allclose(found.scale, [[1.0, 0.02, 1 / 127]], rtol=1e-6)


@pytest.mark.parametrize(("dtype", "step"), [("int8", 1 / 254), ("float8_e4m3fn", 1 / 16)])
def test_errors_are_within_half_a_step(dtype: str, step: float) -> None:
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(6, 5, 7)) * 10.0 ** rng.integers(-9, 9, (1, 1, 7)), "float32")
    found = quantize(w, range(2), dtype)
    assert found.scale.shape == (1, 1, 7)
    error = jnp.abs(found.values.astype(jnp.float32) * found.scale - w)
    # Steps of int8 are of the largest entry, and of float8 of the entry itself but for the smallest.
    near = jnp.abs(w).max((0, 1)) if dtype == "int8" else jnp.abs(w) + jnp.abs(w).max((0, 1)) / 448
    assert (error <= 1.01 * step * near).all()


@pytest.mark.parametrize(
    ("architecture", "num_matrices"),
    [
        ("Qwen2ForCausalLM", 3 * 7),
        # Two products of each latent are read by heads, and stay.
        ("DeepseekV3ForCausalLM", 3 * 4 + 3 * 3 + 2 * 3),
        ("Qwen3NextForCausalLM", 3 * 5 + 4 + 4 * 6),
        ("GptOssForCausalLM", 3 * 7),
    ],
)
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.slow
def test_policy_computes_with_the_rounded_matrices(
    architecture: str, num_matrices: int, dtype: str
) -> None:
    policy = tiny_policy(architecture)
    params = random_params(policy)
    narrow = quantized(params, policy, dtype)
    nodes = [node for node in jax.tree.leaves(narrow, is_leaf=is_quantized) if is_quantized(node)]
    assert len(nodes) == num_matrices
    tokens = jnp.arange(12).reshape(2, 6) % 40
    segments, positions = jnp.ones_like(tokens), jnp.tile(jnp.arange(6), (2, 1))
    plain = partial(
        policy.hidden,
        tokens=tokens,
        positions=positions,
        attend=packed_attention(segments),
        compute_dtype=jnp.float32,
        unroll=True,
    )
    hidden = jax.jit(plain)
    found, expected = hidden(narrow)[0], hidden(dequantized(narrow))[0]
    # Hidden states of tiny Qwen3-Next differ by 6e-4 when each parameter is rounded the other way.
    atol = 2e-3 if architecture == "Qwen3NextForCausalLM" else 2e-4
    np.testing.assert_allclose(found, expected, atol=atol)
    assert np.abs(found - hidden(params)[0]).max() > 1e-2
    if policy.config.moe is None:
        return
    # Two shards of experts, and two of the width of each.
    mesh = make_meshes(PlacementConfig(rollout_devices=4, rollout_tensor=2), jax.devices()).rollout
    axes = policy.unstack_axes(policy.axes())
    placed = jax.device_put(narrow, shardings(mesh, axes, narrow, ROLLOUT_RULES))
    split = partial(plain, experts=sharded_experts(mesh, ROLLOUT_RULES))
    sharded = jax.jit(split)(placed)[0]
    np.testing.assert_allclose(sharded, expected, atol=atol)
