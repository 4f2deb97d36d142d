"""Estimated memory of training per device, without running anything."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from areal_jax.models import lora
from areal_jax.models.architecture import MoEConfig
from areal_jax.models.attention import choose_kernel
from areal_jax.models.decoder import Policy
from areal_jax.models.moe import choose_grouped_kernel, row_layout
from areal_jax.models.tpu_packed_attention import LANES
from areal_jax.parallel.compilation import ON_SPARSE_CORES, compiler_options
from areal_jax.parallel.sharding import (
    TRAIN_RULES,
    bytes_per_device,
    is_axes,
    num_shards,
    sharding,
    shardings,
)
from areal_jax.parallel.torus import is_gpu
from areal_jax.trainer.config import TrainerConfig
from areal_jax.trainer.critic import critic_config
from areal_jax.trainer.optimizer import make_optimizer
from areal_jax.trainer.state import state_shardings, trained

SAVED_PER_MLP = 6
"""Arrays of the MLP's width that a layer saves for its backward pass. This and the next six are
read from the buffers that live at the peak of programs that XLA compiles for TPUs."""
RECOMPUTED_PER_MLP = 4
"""As many that exist at a time while a layer is recomputed on a TPU."""
RECOMPUTED_PER_ADAPTED_MLP = 5
"""As many where the matrices have adapters."""
SAVED_PER_SCORE = 2
SAVED_PER_WIDTH = 5
WIDE_PER_WIDTH = 4
"""Arrays of the width in float32, of norms and residuals, that a layer saves without remat."""
SAVED_PER_LOGIT = 2
ROWS_OF_WIDTH, ROWS_OF_EXPERT = 4, 2
"""Arrays of an expert's rows, by their width, that exist at a time in its backward pass, with the
sums of their results in float32."""
GPU_ROWS_OF_WIDTH, GPU_ROWS_OF_EXPERT, MATRICES_OF_BLOCK = 4, 4, 12
"""As many where XLA compiles for GPUs, and, without a kernel, matrices in the compute dtype of each
block of rows: those of its expert and their gradients, for three products."""
SMALL_BYTES = 2**20
"""Bytes of counts, metrics and partial sums of a program."""


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

    It has more than 60 lines because every purpose has its own rule by kind of device and mesh.
    Parameters, gradients and optimizer are exact. The sum was 0 to 10 % above what XLA compiles
    for TPUs and GPUs (`benchmarks/results/memory_forecast.jsonl`).
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
    placed = state_shardings(policy, mesh, optimizer, offload=offload)
    params = bytes_per_device(abstract, placed.params)
    gathered = _gathered(policy, mesh)
    is_explicit = gathered > 0
    saved, layer = _activations(config, policy, mesh, compute_dtype, row_tokens, is_explicit)
    tokens = config.rows_per_micro_batch * row_tokens // mesh.shape["context"]
    chunk = min(tokens, config.logp_chunk_tokens)
    outputs = 1 if policy.config.is_scalar else policy.config.vocab_size // mesh.shape["tensor"]
    logits = SAVED_PER_LOGIT * chunk * outputs * _FLOAT32
    if is_explicit:
        # By explicit collectives: of the head a block at a time, and no matrix of several layers.
        logits = _block_logits(policy, outputs, chunk, tokens, jnp.dtype(compute_dtype).itemsize)
        gathered, of_layer = _gathered_explicitly(policy, mesh, compute_dtype)
        # One layer is recomputed when the logits have been freed.
        layer = max(0, layer + of_layer - logits)
    if is_gpu(mesh.devices.flat[0]):
        logits, layer = _gpu_logits(
            policy, outputs, chunk, tokens, compute_dtype, logits, layer, is_explicit=is_explicit
        )
    activations = saved + layer
    if mesh.shape["data"] > 1 and (policy.lora or not is_gpu(mesh.devices.flat[0])):
        # Gradients of adapters are summed over devices after the last layer, beside those
        # accumulated before. Others are summed in an update, and on TPUs need less than this.
        gathered += params
    elif mesh.shape["data"] > 1:
        # In an update, beside those accumulated, where activations and logits have been freed.
        gathered = max(gathered, params - activations - logits)
    moments = bytes_per_device(jax.eval_shape(optimizer.init, abstract), placed.opt_state)
    if offload:
        # The old and the new ones are on the device during an update, in the memory that
        # activations and logits have freed.
        moments = max(0, 2 * moments - gathered - activations - logits)
    return ({"frozen": frozen_bytes(policy, mesh, compute_dtype)} if policy.lora else {}) | {
        "parameters": params,
        "gradients": params,
        "optimizer": moments,
        "gathered weights": gathered,
        "activations": activations + SMALL_BYTES,
        "logits": logits,
    }


def frozen_bytes(policy: Policy, mesh: Mesh, compute_dtype: DTypeLike) -> int:
    """Return the bytes of a frozen policy on each device."""
    abstract = policy.abstract(compute_dtype)
    return bytes_per_device(abstract, shardings(mesh, policy.axes(), abstract, TRAIN_RULES))


def _activations(
    config: TrainerConfig,
    policy: Policy,
    mesh: Mesh,
    compute_dtype: DTypeLike,
    row_tokens: int,
    is_explicit: bool,
) -> tuple[int, int]:
    """Estimate the bytes that all layers save for the backward pass, and those that one layer takes
    while it is recomputed.
    """
    model, moe = policy.config, policy.config.moe
    itemsize, tensor = jnp.dtype(compute_dtype).itemsize, mesh.shape["tensor"]
    tokens = config.rows_per_micro_batch * row_tokens // mesh.shape["context"]
    heads, kv_heads, width = model.num_attention_heads, model.num_key_value_heads, model.hidden_size
    inner = (model.intermediate_size if moe is None else moe.shared_expert_intermediate_size) // (
        tensor
    )
    attended = heads * (model.head_dim * itemsize + _FLOAT32) // tensor
    projected = (heads + 2 * kv_heads) * model.head_dim * itemsize // tensor
    scores = 0
    if choose_kernel(mesh.devices.flat[0].platform, row_tokens) == "dense":
        # Keys of a query: half of the row on average. Scores are float32 in every kernel.
        scores = (
            SAVED_PER_SCORE * heads * (row_tokens + min(row_tokens, 128)) // 2 * _FLOAT32 // tensor
        )
    of_rows = 0 if moe is None else _expert_row_bytes(policy, moe, tokens, mesh, itemsize)

    def whole(per_mlp: int) -> int:
        per_token = SAVED_PER_WIDTH * width * itemsize + per_mlp * inner * itemsize
        return tokens * (per_token + projected + attended + scores) + of_rows

    if config.remat == "none":
        wide = WIDE_PER_WIDTH * width * _FLOAT32 * tokens // (2 if policy.lora else 1)
        return model.num_hidden_layers * (whole(SAVED_PER_MLP) + wide), 0
    # Sums of exponentials of the kernel for TPUs have one number in each lane until they are saved.
    has_lanes = is_explicit and not is_gpu(mesh.devices.flat[0])
    lanes = heads * (LANES - 1) * _FLOAT32 * tokens // tensor if has_lanes else 0
    kept = width * itemsize
    if config.remat in ("attention", "dots"):
        kept += attended
    if config.remat == "dots":
        # The products of experts are no dots.
        kept += projected + (width + 2 * inner) * itemsize
        # With adapters, products of both.
        kept += 2 * (width + inner) * itemsize if policy.lora else 0
        kept += 0 if moe is None else moe.num_experts * _FLOAT32
    per_mlp = SAVED_PER_MLP
    if is_explicit:
        per_mlp = RECOMPUTED_PER_ADAPTED_MLP if policy.lora else RECOMPUTED_PER_MLP
        # One more where attention, too, is recomputed.
        per_mlp += has_lanes and policy.lora is not None and config.remat == "full"
    return tokens * model.num_hidden_layers * kept, whole(per_mlp) + lanes


def _block_logits(policy: Policy, outputs: int, chunk: int, tokens: int, itemsize: int) -> int:
    """Return the bytes of a block of logits, or of their gradient with that of the head's block,
    beside the last hidden states and their gradient.
    """
    width = policy.config.hidden_size
    of_block = 0 if policy.lora else width * outputs * chunk // tokens * _FLOAT32
    return max(chunk * outputs * _FLOAT32, chunk * outputs * itemsize + of_block) + (
        tokens * width * (2 * itemsize + _FLOAT32)
    )


def _gpu_logits(
    policy: Policy,
    outputs: int,
    chunk: int,
    tokens: int,
    compute_dtype: DTypeLike,
    logits: int,
    layer: int,
    *,
    is_explicit: bool,
) -> tuple[int, int]:
    """Correct the bytes of logits, and of a recomputed layer, for what XLA compiles for GPUs: a
    chunk's gradient is cast beside it, and so is the head; without explicit collectives the head's
    gradient waits, too, and the layer is recomputed when all of these have been freed.
    """
    itemsize, width = jnp.dtype(compute_dtype).itemsize, policy.config.hidden_size
    cast, head = chunk * outputs * itemsize, width * outputs
    if is_explicit:
        beside = cast + head * itemsize // (2 if policy.lora else 1)
        # With adapters these, too, have been freed when rows of experts are recomputed.
        is_freed = policy.lora is not None and policy.config.moe is not None
        return logits + beside, max(0, layer - beside) if is_freed else layer
    logits += tokens * width * (2 * itemsize + _FLOAT32)
    logits += 0 if policy.lora else cast + head * (itemsize + _FLOAT32)
    return logits, max(0, layer - logits)


def _expert_row_bytes(
    policy: Policy, moe: MoEConfig, tokens: int, mesh: Mesh, itemsize: int
) -> int:
    """Return the bytes of a layer's rows of experts: a device has the rows of all tokens of its
    expert axis.
    """
    width, targets = policy.config.hidden_size, () if policy.lora is None else policy.lora.targets
    assignments = tokens * mesh.shape["expert"] * moe.num_experts_per_tok
    device, num_experts = mesh.devices.flat[0], moe.num_experts // mesh.shape["expert"]
    inner = moe.moe_intermediate_size // mesh.shape["tensor"]
    kernel = choose_grouped_kernel(device.platform, num_experts, width, inner)
    block, rows = row_layout(assignments, num_experts, kernel)
    # Updates of adapters exist beside products, two at a time.
    of_width, of_expert, updates = ROWS_OF_WIDTH, ROWS_OF_EXPERT, 2
    if is_gpu(device):
        of_width, of_expert = GPU_ROWS_OF_WIDTH, GPU_ROWS_OF_EXPERT
        updates = 1 if mesh.shape["expert"] == 1 else 0
    elif mesh.shape["tensor"] > 1 and compiler_options(mesh) is ON_SPARSE_CORES:
        # While they sum results over tensor, products for the gradients of matrices wait.
        of_width += 1
    updates *= any(target.startswith("experts.") for target in targets)
    of_blocks = 0
    if kernel == "blocks":
        of_blocks = rows // block * MATRICES_OF_BLOCK * width * inner
    return (
        rows * ((of_width + updates) * width + (of_expert + updates) * inner) + of_blocks
    ) * itemsize


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
    of one gathered layer with its gradient.
    """
    parts, dtype = num_shards(mesh, "embed", TRAIN_RULES), jnp.dtype(compute_dtype)
    abstract, axes = policy.abstract()["layers"], policy.axes()["layers"]
    rules = {**TRAIN_RULES, "embed": (), "expert_matrices": TRAIN_RULES["experts"]}
    of_layers, whole = (
        bytes_per_device(abstract, shardings(mesh, axes, abstract, each))
        for each in (TRAIN_RULES, rules)
    )
    whole //= policy.config.num_hidden_layers
    model = policy.config
    head = 0 if model.is_scalar else model.vocab_size * model.hidden_size
    head //= mesh.shape["tensor"] * parts
    if policy.lora:
        # Frozen weights are in the compute dtype already, and the head has no gradient: its part
        # is padded, and a block of it gathered. Adapters are cast, their gradients are summed over
        # devices beside those accumulated before, and one matrix of all layers is copied into the
        # layout of products. Of a layer without experts two matrices are gathered at a time.
        adapters = bytes_per_device(
            lora.abstract(policy),
            shardings(mesh, lora.axes(policy), lora.abstract(policy), TRAIN_RULES),
        )
        tensor = mesh.shape["tensor"]
        copied = model.num_hidden_layers * model.num_attention_heads * model.head_dim
        copied = copied * model.hidden_size // (tensor * parts)
        of_layer = whole // _FLOAT32
        if model.moe is None:
            of_layer = 2 * model.hidden_size * model.intermediate_size // tensor
        beside = adapters + (2 * head + adapters // _FLOAT32 + copied) * dtype.itemsize
        if is_gpu(mesh.devices.flat[0]) and mesh.shape["expert"] > 1:
            # All of it is freed before the rows of experts are the most.
            beside = 0
        return beside, of_layer * dtype.itemsize
    # XLA casts the parts of all layers before the loop over them; for GPUs those of experts in it.
    if is_gpu(mesh.devices.flat[0]):
        of_layers -= sum(
            bytes_per_device(leaf, sharding(mesh, names, leaf.shape, TRAIN_RULES))
            for names, leaf in zip(
                jax.tree.leaves(axes, is_leaf=is_axes), jax.tree.leaves(abstract), strict=True
            )
            if "expert_matrices" in names
        )
    if model.moe is not None and not is_gpu(mesh.devices.flat[0]):
        # Gradients of the three matrices of experts wait for their sums beside weights.
        whole += whole * dtype.itemsize // _FLOAT32
    cast = of_layers * dtype.itemsize // _FLOAT32 if dtype.itemsize < _FLOAT32 else 0
    return cast + head * (_FLOAT32 + dtype.itemsize), whole


_FLOAT32 = jnp.dtype(jnp.float32).itemsize
