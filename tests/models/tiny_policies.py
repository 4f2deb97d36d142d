"""Small policies of every family, with every parameter random."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import masked_attention, packed_attention
from areal_jax.models.decoder import Attend, Params, Policy
from areal_jax.models.delta_rule import RecurrentState, state_shapes

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
VISION: dict[str, Any] = {
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 8,
        "patch_size": 2,
        "out_hidden_size": 16,
    },
    "image_token_id": 30,
    "video_token_id": 31,
    "vision_start_token_id": 32,
    "vision_end_token_id": 33,
    "head_dim": 4,
    "rope_parameters": {"rope_type": "default", "mrope_section": [0, 1, 1]},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
LATENT = GROUPED | {
    "num_key_value_heads": 4,
    "q_lora_rank": 6,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
}
LINEAR = {
    "head_dim": 4,
    "num_hidden_layers": 4,
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "partial_rotary_factor": 0.5,
    "layer_types": [f"{kind}_attention" for kind in ("linear", "full", "linear", "linear")],
}
FAMILY: dict[str, Mapping[str, object]] = {
    "Qwen3MoeForCausalLM": EXPERTS,
    "Qwen3ForCausalLM": {"head_dim": 4},
    "SeedOssForCausalLM": {"head_dim": 4},
    "Ernie4_5ForCausalLM": {"head_dim": 4},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4ForCausalLM": {"head_dim": 4, "attention_bias": True},
    # The third of three layers has no window.
    "Gemma3ForCausalLM": {"head_dim": 4, "sliding_window": 3, "sliding_window_pattern": 3},
    "Olmo3ForCausalLM": {"sliding_window": 3},
    "Qwen2MoeForCausalLM": EXPERTS | {"shared_expert_intermediate_size": 8},
    "DeepseekV3ForCausalLM": LATENT,
    "Glm4MoeForCausalLM": GROUPED | {"head_dim": 4, "use_qk_norm": True},
    "Qwen3NextForCausalLM": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 8},
    "Qwen3_5ForCausalLM": LINEAR,
    "Qwen3_5MoeForCausalLM": LINEAR | EXPERTS | {"shared_expert_intermediate_size": 8},
    "Qwen2_5_VLForConditionalGeneration": VISION
    | {"vision_config": VISION["vision_config"] | {"window_size": 8, "fullatt_block_indexes": [1]}},
    "Qwen3VLForConditionalGeneration": VISION
    | {
        "vision_config": VISION["vision_config"]
        | {"num_position_embeddings": 9, "deepstack_visual_indexes": [0]}
    },
    "GptOssForCausalLM": {
        "head_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 3,
    },
}
"""Settings of each family, for `tiny_policy`."""


def tiny_policy(architecture: str = "Qwen2ForCausalLM", **settings: object) -> Policy:
    family = FAMILY.get(architecture, {})
    return Policy(
        ModelConfig.from_hf(
            {"architectures": [architecture], **SIZES, **family, **settings}, source="a test"
        )
    )


def random_params(policy: Policy, seed: int = 0) -> Params:
    """Move `host_params` to a device."""
    return jax.device_put(host_params(policy, seed))


def host_params(policy: Policy, seed: int = 0) -> Params:
    """Sample all parameters, including biases and norms, so that a missing one shows."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda leaf: (2 * rng.normal(size=leaf.shape) / leaf.shape[-1] ** 0.5).astype(leaf.dtype),
        policy.abstract(),
    )


def on_one_device(policy: Policy) -> Params:
    """Make shardings for `hf.load` on one device."""
    return jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), policy.abstract())


def cached_hidden(
    policy: Policy, params: Params, tokens: jax.Array, prompt: int, *, unroll: bool = False
) -> jax.Array:
    """Compute final hidden states: the first `prompt` tokens by prefill, the others by decode
    steps.
    """
    config, empty = policy.config, None
    if config.linear is not None:
        shapes = state_shapes(config.linear, len(tokens), jnp.float32)
        state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        layers = range(config.num_hidden_layers)
        empty, unroll = tuple(state if i in config.linear_layers else None for i in layers), True
    hidden = partial(policy.hidden, params, compute_dtype=jnp.float32, unroll=unroll)
    step_of = jax.jit(
        lambda token, step, caches: hidden(
            token, jnp.full_like(token, step), _attend_at(step), caches
        )
    )
    segments = jnp.ones_like(tokens[:, :prompt])
    positions = jnp.broadcast_to(jnp.arange(prompt), segments.shape)
    prefill = jax.jit(
        lambda tokens: hidden(tokens, positions, _attend_keeping(packed_attention(segments)), empty)
    )
    row, caches, _ = prefill(tokens[:, :prompt])
    token_axis = 1 if unroll else 2  # behind B, or behind L and B
    room = [(0, 0)] * (4 if unroll else 5)
    room[token_axis] = (0, tokens.shape[1] - prompt)
    caches = jax.tree.map(
        lambda cache: cache if isinstance(cache, RecurrentState) else jnp.pad(cache, room),
        caches,
        is_leaf=lambda cache: isinstance(cache, RecurrentState),
    )
    rows = [row]
    for step in range(prompt, tokens.shape[1]):
        row, caches, _ = step_of(tokens[:, step : step + 1], step, caches)
        rows.append(row)
    return jnp.concatenate(rows, axis=1)


def _attend_keeping(inner: Attend) -> Attend:
    """Attend within the prompt, and return its keys and values as cache."""

    def attend(q, k, v, cache, window=None, sinks=None):
        return inner(q, k, v, None, window, sinks)[0], (k, v)

    return attend


def _attend_at(step: jax.Array) -> Attend:
    """Write keys and values of one token at `step`, and attend to the tokens up to it."""

    def attend(q, k, v, cache, window=None, sinks=None):
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(old, new, step, axis=1)
            for old, new in zip(cache, (k, v), strict=True)
        )
        columns = jnp.arange(k.shape[1])
        seen = columns <= step if window is None else (columns <= step) & (columns > step - window)
        mask = jnp.broadcast_to(seen, (len(k), 1, k.shape[1]))
        return masked_attention(q, k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3), mask, sinks), (
            k,
            v,
        )

    return attend
