"""Estimated memory of training per device, without running anything."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from areal_jax.models.architecture import ModelConfig
from areal_jax.models.attention import choose_kernel
from areal_jax.models.decoder import Policy
from areal_jax.parallel.sharding import TRAIN_RULES, bytes_per_device, num_shards, shardings
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.critic import critic_config
from areal_jax.trainer.optimizer import make_optimizer
from areal_jax.trainer.state import frozen, frozen_shardings, state_shardings, trained

SAVED_PER_MLP = 6
"""Arrays of the MLP's width that a layer saves for its backward pass. This and the next four are
fitted to what XLA reports."""
RECOMPUTED_PER_MLP = 5
"""As many that exist at a time while a layer is recomputed on a TPU."""
SAVED_PER_SCORE = 2
SAVED_PER_WIDTH = 5
SAVED_PER_LOGIT = 2


def predicted_bytes(
    config: TrainerConfig,
    policy: Policy,
    mesh: Mesh,
    compute_dtype: DTypeLike,
    *,
    row_tokens: int,
    critic: Policy | None = None,
) -> Mapping[str, int]:
    """Estimate the bytes on each device of the train mesh, by purpose.

    Parameters, gradients and optimizer are exact. The sum was 0 to 10 % above what XLA compiles
    for TPUs of dense policies with sharded parameters (`benchmarks/memory_forecast.py`);
    activations and logits of others are within about a third.
    `critic` counts its parameters and optimizer state, and the bytes by which its updates exceed
    the policy's.
    """
    if critic is not None:
        of_policy, of_critic = (
            predicted_bytes(of, which, mesh, compute_dtype, row_tokens=row_tokens)
            for of, which in ((config, policy), (critic_config(config), critic))
        )
        resting = ("frozen", "parameters", "optimizer")
        passing = [
            sum(size for name, size in of.items() if name not in resting)
            for of in (of_policy, of_critic)
        ]
        rests = of_critic["parameters"] + of_critic["optimizer"]
        return {**of_policy, "critic": rests + max(0, passing[1] - passing[0])}
    abstract, axes = trained(policy)
    optimizer, offload = make_optimizer(config.optimizer, axes), config.optimizer.offload
    placed, base = (
        state_shardings(policy, mesh, optimizer, offload=offload),
        frozen(policy, compute_dtype),
    )
    params = bytes_per_device(abstract, placed.params)
    gathered = _gathered(policy, mesh)
    is_explicit = gathered > 0 and not policy.lora and policy.config.moe is None
    per_mlp = RECOMPUTED_PER_MLP if is_explicit and config.remat != "none" else SAVED_PER_MLP
    saved, layer = _activations(config, policy.config, mesh, compute_dtype, row_tokens, per_mlp)
    chunk = min(
        config.rows_per_micro_batch * row_tokens // mesh.shape["context"], config.logp_chunk_tokens
    )
    outputs = 1 if policy.config.is_scalar else policy.config.vocab_size // mesh.shape["tensor"]
    logits = SAVED_PER_LOGIT * chunk * outputs * _FLOAT32
    if is_explicit:
        # By explicit collectives: of the head a block at a time, and no matrix of several layers.
        logits = chunk * outputs * _FLOAT32
        gathered, of_layer = _gathered_explicitly(policy, mesh, compute_dtype)
        # One layer is recomputed when the logits have been freed.
        layer = max(0, layer + of_layer - logits)
    elif mesh.shape["data"] > 1:
        # Gradients are summed over devices after the last layer, beside those accumulated before.
        gathered += params
    activations = saved + layer
    moments = bytes_per_device(jax.eval_shape(optimizer.init, abstract), placed.opt_state)
    if offload:
        # They are on the device during an update, in the memory that activations and logits have
        # freed.
        moments = max(0, moments - activations - logits)
    return (
        {"frozen": bytes_per_device(base, frozen_shardings(policy, mesh))} if policy.lora else {}
    ) | {
        "parameters": params,
        "gradients": params,
        "optimizer": moments,
        "gathered weights": gathered,
        "activations": activations,
        "logits": logits,
    }


def frozen_bytes(policy: Policy, mesh: Mesh, compute_dtype: DTypeLike) -> int:
    """Return the bytes of a frozen policy on each device."""
    abstract = policy.abstract(compute_dtype)
    return bytes_per_device(abstract, shardings(mesh, policy.axes(), abstract, TRAIN_RULES))


def _activations(
    config: TrainerConfig,
    model: ModelConfig,
    mesh: Mesh,
    compute_dtype: DTypeLike,
    row_tokens: int,
    per_mlp: int,
) -> tuple[int, int]:
    """Estimate the bytes that all layers save for the backward pass, and those that one layer takes
    while it is recomputed.
    """
    itemsize, tensor = jnp.dtype(compute_dtype).itemsize, mesh.shape["tensor"]
    tokens = config.rows_per_micro_batch * row_tokens // mesh.shape["context"]
    heads, kv_heads, width = model.num_attention_heads, model.num_key_value_heads, model.hidden_size
    # A token's rows at its experts, and about as many empty ones, because an expert's rows come in
    # whole blocks.
    moe = model.moe
    inner = (
        model.intermediate_size
        if moe is None
        else 2 * moe.num_experts_per_tok * moe.moe_intermediate_size
        + moe.shared_expert_intermediate_size
    )
    attended = heads * (model.head_dim * itemsize + _FLOAT32) // tensor
    projected = (heads + 2 * kv_heads) * model.head_dim * itemsize // tensor
    scores = 0
    if choose_kernel(mesh.devices.flat[0].platform, row_tokens) == "dense":
        # Keys of a query: half of the row on average. Scores are float32 in every kernel.
        scores = (
            SAVED_PER_SCORE * heads * (row_tokens + min(row_tokens, 128)) // 2 * _FLOAT32 // tensor
        )
    whole = (
        SAVED_PER_WIDTH * width * itemsize
        + per_mlp * inner * itemsize // tensor
        + projected
        + attended
        + scores
    )
    if config.remat == "none":
        return model.num_hidden_layers * tokens * whole, 0
    kept = width * itemsize
    if config.remat in ("attention", "dots"):
        kept += attended
    if config.remat == "dots":
        kept += projected + (2 * width + 2 * inner // tensor) * itemsize
    return tokens * model.num_hidden_layers * kept, tokens * whole


def _gathered(policy: Policy, mesh: Mesh) -> int:
    """Estimate the bytes of one layer, embedding and head with their gradients, gathered over the
    devices that hold other rows or tokens.
    """
    parts = num_shards(mesh, "embed", TRAIN_RULES)
    if parts == 1:
        return 0
    abstract, placed = (
        policy.abstract(),
        shardings(mesh, policy.axes(), policy.abstract(), TRAIN_RULES),
    )
    everything = bytes_per_device(abstract, placed)
    layers = bytes_per_device(abstract["layers"], placed["layers"])
    return 2 * parts * (everything - layers + layers // policy.config.num_hidden_layers)


def _gathered_explicitly(policy: Policy, mesh: Mesh, compute_dtype: DTypeLike) -> tuple[int, int]:
    """Estimate the bytes of weights that are cast and of the head's gradient on a device, and those
    of one gathered layer's gradient.
    """
    parts, dtype = num_shards(mesh, "embed", TRAIN_RULES), jnp.dtype(compute_dtype)
    abstract, axes = policy.abstract(), policy.axes()
    of_layers = bytes_per_device(
        abstract["layers"], shardings(mesh, axes["layers"], abstract["layers"], TRAIN_RULES)
    )
    # XLA casts the parts of all layers before the loop over them.
    cast = of_layers * dtype.itemsize // _FLOAT32 if dtype.itemsize < _FLOAT32 else 0
    model = policy.config
    head = 0 if model.is_scalar else model.vocab_size * model.hidden_size
    head //= mesh.shape["tensor"] * parts
    return (
        cast + head * (_FLOAT32 + dtype.itemsize),
        parts * of_layers // model.num_hidden_layers,
    )


_FLOAT32 = jnp.dtype(jnp.float32).itemsize
